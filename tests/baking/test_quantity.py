"""Which rows a bake keeps: `where` first, then a quantity of the rows with the smallest hashes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import batchwright as bw
from batchwright.base.seeds import key_of, mix64
from batchwright.sources import units
from refusals import refused


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """a.jsonl with rows 0 to 49 (a blank line after each tenth), sub/b.jsonl with rows 50 to 79."""
    (tmp_path / "in" / "sub").mkdir(parents=True)
    for name, numbers in (("a.jsonl", range(50)), ("sub/b.jsonl", range(50, 80))):
        lines = [json.dumps({"text": f"row {n}", "n": n}) + "\n" * (1 + (n % 10 == 9)) for n in numbers]
        (tmp_path / "in" / name).write_text("".join(lines))
    return tmp_path / "in"


def kept(store: bw.Store) -> set[str]:
    return {store.decode(row.tokens) or "" for row in store.rows()}


def bake(source, to: Path, quiet_bake, *, seed: int = 5, **ingredient: object) -> bw.Store:
    recipe = bw.DatasetRecipe(seed=seed).add_ingredient(source, **({"name": "web"} | ingredient))
    return quiet_bake(recipe.prepare_step(bw.tokenize("bytes")), to)


def smallest(quantity: int, passing) -> set[str]:
    """By hand: sort rows by the hash of (seed, ingredient, file, line), and take the first."""
    hashes = []
    for n in range(80):
        name, line = ("a.jsonl", n + n // 10) if n < 50 else ("sub/b.jsonl", n - 50 + (n - 50) // 10)
        key = np.uint64(key_of("quantity", 5, "web", name))
        if passing(n):
            hashes.append((int(mix64(np.array([line], np.uint64), key)[0]), f"row {n}"))
    return {text for _, text in sorted(hashes)[:quantity]}


@pytest.mark.parametrize(("quantity", "number"), [(7, 7), (0.25, 20), (1, 1), (1.0, 80), (1000, 80), (0.29, 23)])
def test_a_quantity_keeps_exactly_the_rows_with_the_smallest_hashes(source, tmp_path, quiet_bake, quantity, number):
    store = bake(source, tmp_path / "a.store", quiet_bake, quantity=quantity)
    assert kept(store) == smallest(number, lambda n: True)
    assert store.num_rows == number


def test_a_quantity_applies_after_where(source, tmp_path, quiet_bake):
    store = bake(source, tmp_path / "a.store", quiet_bake, quantity=0.5, where=lambda row: row["n"] % 4 == 0)
    assert kept(store) == smallest(10, lambda n: n % 4 == 0)
    assert store.report["ingredients"]["web"]["dropped"] == {"beyond quantity": 10, "not where": 60}


@pytest.mark.parametrize("unit_bytes", [50, 333, 1000])
def test_the_same_rows_are_kept_whatever_the_size_of_units(source, tmp_path, quiet_bake, monkeypatch, unit_bytes):
    monkeypatch.setattr(units, "UNIT_BYTES", unit_bytes)
    store = bake(source, tmp_path / "a.store", quiet_bake, quantity=15)
    assert kept(store) == smallest(15, lambda n: True)


def test_the_same_rows_are_kept_wherever_the_corpus_lies(source, tmp_path, quiet_bake):
    source.rename(tmp_path / "moved")
    assert kept(bake(tmp_path / "moved", tmp_path / "a.store", quiet_bake, quantity=15)) == smallest(15, lambda n: True)


def test_a_larger_quantity_keeps_what_a_smaller_one_kept(source, tmp_path, quiet_bake):
    few = kept(bake(source, tmp_path / "a.store", quiet_bake, quantity=10))
    more = kept(bake(source, tmp_path / "b.store", quiet_bake, quantity=30))
    assert few < more


def test_another_seed_keeps_other_rows(source, tmp_path, quiet_bake):
    one = kept(bake(source, tmp_path / "a.store", quiet_bake, quantity=10, seed=1))
    two = kept(bake(source, tmp_path / "b.store", quiet_bake, quantity=10, seed=2))
    assert one != two


def test_a_quantity_of_rows_from_memory(tmp_path, quiet_bake, monkeypatch):
    rows = [f"row {n}" for n in range(40)]
    whole = kept(bake(rows, tmp_path / "a.store", quiet_bake, quantity=12))
    monkeypatch.setattr(units.cut_rows, "__defaults__", (7,))
    assert kept(bake(rows, tmp_path / "b.store", quiet_bake, quantity=12)) == whole
    assert len(whole) == 12


def test_a_vocabulary_of_characters_is_that_of_the_rows_that_are_kept(source, tmp_path, quiet_bake):
    recipe = bw.DatasetRecipe().add_ingredient(source, quantity=3, where=lambda row: row["n"] < 10)
    store = quiet_bake(recipe.prepare_step(bw.tokenize("chars")), tmp_path / "a.store")
    assert store.manifest.tokenizer["vocab_size"] == len(set("".join(kept(store))))


@pytest.mark.parametrize("quantity", [-1, 1.5, -0.1, float("nan"), True, "10", [1]])
def test_a_quantity_that_is_none_is_refused(quantity):
    with refused(bw.SpecError, f"quantity={quantity!r}", parameter="quantity"):
        bw.DatasetRecipe().add_ingredient(["a"], quantity=quantity)


def test_a_quantity_from_numpy_is_a_number_like_any_other():
    recipe = (
        bw.DatasetRecipe().add_ingredient(["a"], quantity=np.int64(5)).add_ingredient(["b"], quantity=np.float32(0.5))
    )
    assert [ingredient.quantity for ingredient in recipe.ingredients] == [5, 0.5]


def test_one_row_is_not_a_share_of_all_rows(source, tmp_path, quiet_bake):
    to = tmp_path / "c.store"
    assert len(bake(source, to, quiet_bake, quantity=1.0)) > 1
    assert len(bake(source, to, quiet_bake, quantity=1)) == 1  # though 1 == 1.0
