"""What tests of sources share: small units of work, and the documents that a source gives when it is baked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import batchwright as bw
from batchwright.sources import memory, units

ROWS = [
    {
        "text": f"document {n}" + ", and more" * (n % 4),
        "number": n,
        "message": {"role": "user", "content": f"said {n}"},
        "turns": [{"who": "a", "text": f"turn {n}"}, {"who": "b", "text": "over"}],
    }
    for n in range(60)
]


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    """Sixty rows with text, a number, a struct and a list of structs."""
    return [dict(row) for row in ROWS]


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several units from a few kilobytes."""
    monkeypatch.setattr(units, "UNIT_BYTES", 1000)
    monkeypatch.setattr(memory, "_PIECE_ROWS", 8)


Documents = list[tuple[int, str]]


@pytest.fixture
def documents_of(tmp_path: Path) -> Callable[..., Documents]:
    """(row, text) of every document of a source, in its order, by baking it."""

    def bake(source: Any, text: str = "text", *, where: Any = None, **settings: Any) -> Documents:
        recipe = bw.DatasetRecipe().add_ingredient(source, text, name="x", where=where)
        recipe.prepare_step(bw.tokenize("bytes"))
        number = len(list(tmp_path.glob("*.store")))
        settings = {"workers": 0, "show_progress": False, "shuffle": False, **settings}
        store = bw.bake(recipe, tmp_path / f"{number}.store", **settings)
        return [(store[n].row, store.decode(store[n].tokens)) for n in range(store.num_rows)]

    return bake


@pytest.fixture
def as_jsonl(tmp_path: Path, rows: list[dict[str, Any]]) -> Path:
    """The same rows as lines of JSON."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
