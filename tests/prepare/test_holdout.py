"""A document's side is a hash of its text: nothing else decides it, and nothing else moves it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import batchwright as bw
from batchwright.prepare import side_of
from refusals import refused

TEXTS = [f"document number {n}" for n in range(400)]


@pytest.fixture
def bake(tmp_path: Path) -> Callable[..., dict[str, set[str]]]:
    """The texts on each side of a holdout."""
    made = iter(range(100))

    def sides(source, fraction: float = 0.2, seed: int = 0, **ingredient) -> dict[str, set[str]]:
        recipe = bw.DatasetRecipe(seed=seed).add_ingredient(source, **{"name": "a", **ingredient}).holdout(fraction)
        recipe.prepare_step(bw.tokenize("bytes"))
        store = bw.bake(recipe, tmp_path / f"{next(made)}.store", workers=0, show_progress=False)
        found: dict[str, set[str]] = {"train": set(), "val": set()}
        for row in store.rows():
            found[row.split].add(store.decode(row.tokens) or "")
        return found

    return sides


def test_about_that_share_of_documents_is_held_out_and_no_text_is_on_both_sides(bake):
    sides = bake(TEXTS)
    assert sides["train"] | sides["val"] == set(TEXTS)
    assert not sides["train"] & sides["val"]
    assert 60 < len(sides["val"]) < 100


def test_duplicates_fall_together_across_files_and_sources(tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(TEXTS))
    (tmp_path / "b.txt").write_text("\n".join(TEXTS[::-1]))
    recipe = bw.DatasetRecipe().holdout(0.3)
    recipe.add_ingredient(tmp_path / "*.txt", format="lines", name="files").add_ingredient(TEXTS, name="memory")
    store = bw.bake(recipe.prepare_step(bw.tokenize("bytes")), tmp_path / "a.store", workers=0, show_progress=False)
    sides: dict[str, set[str]] = {}
    for row in store.rows():
        sides.setdefault(store.decode(row.tokens) or "", set()).add(row.split)
    assert len(sides) == 400
    assert all(len(seen) == 1 for seen in sides.values())
    assert store.stream("files", "val").num_documents == 2 * store.stream("memory", "val").num_documents > 0


def test_new_files_move_nothing(tmp_path, bake):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "m.txt").write_text("\n".join(TEXTS[:200]))
    old = bake(tmp_path / "in", format="lines")
    (tmp_path / "in" / "a.txt").write_text("\n".join(TEXTS[200:]))
    new = bake(tmp_path / "in", format="lines")
    assert old["val"] < new["val"]
    assert old["train"] < new["train"]


def test_neither_seed_nor_order_nor_name_decides_a_side(bake):
    assert bake(TEXTS, seed=1) == bake(TEXTS[::-1], seed=2, name="b")


def test_a_larger_fraction_only_adds_to_what_is_held_out(bake):
    small, large = bake(TEXTS, 0.1), bake(TEXTS, 0.3)
    assert small["val"] < large["val"]


def test_the_side_is_that_of_the_text_which_is_tokenised(tmp_path):
    recipe = bw.DatasetRecipe().add_ingredient([f"{text}   " for text in TEXTS]).holdout(0.2)
    recipe.prepare_step(lambda row: {"text": row["text"].strip()}).prepare_step(bw.tokenize("bytes"))
    store = bw.bake(recipe, tmp_path / "a.store", workers=0, show_progress=False)
    for row in store.rows():
        assert row.split == side_of(store.decode(row.tokens) or "", 0.2)


def test_sides_are_pinned():
    # Stores that were baked before hold these out: if a side changed, validation text would enter training.
    sides = "".join("v" if side_of(text, 0.2) == "val" else "." for text in TEXTS[:40])
    assert sides == "...............v..v.v......v..v........."


def test_a_validation_loader_is_in_order_and_has_every_row_once(tmp_path):
    recipe = bw.DatasetRecipe().add_ingredient(TEXTS, name="a").holdout(0.2)
    path = tmp_path / "a.store"
    store = bw.bake(recipe.prepare_step(bw.tokenize("bytes", append_eos=True)), path, workers=0, show_progress=False)
    loader = bw.PretrainDataLoader(path, chunk_size=16, batch_size=8, split="val", framework="numpy")
    stream = store.stream("a", "val")
    tokens = stream.read(0, stream.num_tokens).astype(np.int64)
    num_rows = (len(tokens) - 1) // 16
    assert num_rows % 8, "the last batch must not be full by chance"
    batches = list(loader)
    assert len(batches) == loader.get_num_batches() == -(-num_rows // 8)
    read = np.concatenate([batch.input_ids for batch in batches])
    assert np.array_equal(read.ravel(), tokens[: num_rows * 16])
    assert len(batches[-1].input_ids) == batches[-1].metadata["global_rows"] == num_rows % 8
    assert all(batch.metadata["weight"].all() and batch.loss_mask.all() for batch in batches)
    again = bw.PretrainDataLoader(path, chunk_size=16, batch_size=8, split="val", seed=9, framework="numpy")
    assert all((a.input_ids == b.input_ids).all() for a, b in zip(batches, again, strict=True))


def test_no_window_spans_both_sides(tmp_path):
    recipe = bw.DatasetRecipe().add_ingredient(TEXTS, name="a").holdout(0.2)
    path = tmp_path / "a.store"
    bw.bake(recipe.prepare_step(bw.tokenize("bytes", append_eos=True)), path, workers=0, show_progress=False)
    for split in ("train", "val"):
        loader = bw.PretrainDataLoader(path, chunk_size=16, batch_size=8, split=split, framework="numpy")
        loader.get_batch()
        for step in range(loader.get_num_batches()):
            for record in bw.trace(path, loader, step=step):
                assert side_of(TEXTS[record.row], 0.2) == split


def test_a_split_that_was_not_made_asks_for_a_holdout(tmp_path):
    path = tmp_path / "a.store"
    recipe = bw.DatasetRecipe().add_ingredient(TEXTS).prepare_step(bw.tokenize("bytes"))
    bw.bake(recipe, path, workers=0, show_progress=False)
    with refused(bw.SpecError, "'val'", there="memory (train)", remedy="recipe.holdout("):
        bw.PretrainDataLoader(path, chunk_size=16, split="val")
