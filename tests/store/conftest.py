"""A small store to read, damage and copy."""

from __future__ import annotations

from pathlib import Path

import pytest

import batchwright as bw
from batchwright.baking import run


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Sources web (5 documents, 2 files) and notes (3, from memory), in the order of the files, two shards for web."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("zero\none\n\nthree\n")
    (tmp_path / "in" / "b.txt").write_text("four\nfive and more")
    recipe = bw.DatasetRecipe().add_ingredient(tmp_path / "in" / "*.txt", format="lines", name="web")
    recipe.add_ingredient(["x", "yy", "zzz"], name="notes").prepare_step(bw.tokenize("bytes", append_eos=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("batchwright.sources.units.UNIT_BYTES", 16)
        patch.setattr(run, "_SHARD_BYTES", 40)
        store = bw.bake(recipe, tmp_path / "a.store", workers=0, shuffle=False, show_progress=False)
    assert sorted(p.name for p in store.folder.glob("*-*.arrow")) == [
        "notes-train-00000.arrow",
        "web-train-00000.arrow",
        "web-train-00001.arrow",
    ]
    return store.path
