"""A change redoes only what depends on it; the result is what a bake from nothing would give, to the byte."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import batchwright as bw


class Kitchen:
    """Four files of ten rows, three units each; counts the rows that are read."""

    def __init__(self, folder: Path, quiet_bake, version_files) -> None:
        self.folder, self.raw, self.store = folder, folder / "in", folder / "a.store"
        self.bake_it, self.version_files, self.read = quiet_bake, version_files, folder / "read"
        self.raw.mkdir()
        for name in "acdf":
            self.write(name)

    def write(self, name: str, word: str = "row") -> None:
        (self.raw / f"{name}.jsonl").write_text("".join(f'{{"text": "{word} {name} {n}"}}\n' for n in range(10)))

    def bake(self, to: Path | None = None, *, holdout: float = 0.3, **ingredient) -> int:
        """Rows that were read to bake the store (or `to`)."""
        read = self.read

        def step(row):
            with open(read, "a") as file:
                file.write(".")
            return row

        recipe = bw.DatasetRecipe(seed=4).add_ingredient(self.raw, **{"name": "web", **ingredient}).holdout(holdout)
        recipe.prepare_step(step, version="1").prepare_step(bw.tokenize("bytes", append_eos=True))
        self.read.write_text("")
        self.bake_it(recipe, to or self.store)
        return self.read.stat().st_size

    def is_as_from_nothing(self, **settings) -> bool:
        """Whether the store is, byte by byte, what a bake into a new folder gives."""
        shutil.rmtree(self.folder / "new.store", ignore_errors=True)
        self.bake(self.folder / "new.store", **settings)
        bw.open_store(self.store, verify=True)
        return self.version_files(self.store) == self.version_files(self.folder / "new.store")


@pytest.fixture
def kitchen(tmp_path, quiet_bake, version_files, monkeypatch) -> Kitchen:
    monkeypatch.setattr("batchwright.sources.units.UNIT_BYTES", 100)
    made = Kitchen(tmp_path, quiet_bake, version_files)
    assert made.bake() == 40
    return made


def test_of_a_changed_file_only_that_file_is_read_again(kitchen):
    kitchen.write("c", word="other")
    assert kitchen.bake() == 10
    assert kitchen.is_as_from_nothing()


@pytest.mark.parametrize("name", ["0", "b", "z"])
def test_a_file_that_is_added_before_between_or_after_is_all_that_is_read(kitchen, name):
    kitchen.write(name)
    assert kitchen.bake() == 10
    assert kitchen.is_as_from_nothing()


def test_after_a_file_was_removed_nothing_is_read(kitchen):
    (kitchen.raw / "c.jsonl").unlink()
    assert kitchen.bake() == 0
    assert kitchen.is_as_from_nothing()


def test_a_changed_setting_that_every_document_depends_on_redoes_all(kitchen):
    assert kitchen.bake(holdout=0.5) == 40
    assert kitchen.is_as_from_nothing(holdout=0.5)
    assert kitchen.bake(where=lambda row: True) == 40


def test_a_source_that_is_added_leaves_the_others_as_they_were(kitchen, tmp_path, quiet_bake):
    seen = []
    recipe = bw.DatasetRecipe(seed=4)
    for name in ("one", "two"):
        recipe.add_ingredient([f"{name} {n}" for n in range(5)], name=name)
        made = bw.DatasetRecipe(recipe.ingredients, seed=4)
        made.prepare_step(lambda row: seen.append(row["text"]) or row, version="1").prepare_step(bw.tokenize("bytes"))
        quiet_bake(made, tmp_path / "memory.store")
    assert sorted(seen) == sorted(f"{name} {n}" for name in ("one", "two") for n in range(5))


def test_units_are_taken_from_any_version_that_is_still_there(kitchen):
    kitchen.write("c", word="other")
    kitchen.bake()
    kitchen.write("c")
    os.utime(kitchen.raw / "c.jsonl", (5, 5))
    assert kitchen.bake() == 10  # another time: it must be read to be known
    (kitchen.raw / "a.jsonl").unlink()
    assert kitchen.bake() == 0
    assert kitchen.is_as_from_nothing()


def test_a_damaged_shard_is_not_taken_over(kitchen):
    (shard,) = (kitchen.store / "versions").glob("*/web-train-*.arrow")
    data = shard.read_bytes()
    shard.write_bytes(data.replace(b"r\0o\0w\0", b"r\0a\0w\0", 1))
    kitchen.write("b")
    assert kitchen.bake() > 10  # what lies in the damaged shard is read again
    assert kitchen.is_as_from_nothing()


def test_a_quantity_redoes_the_units_of_which_other_rows_are_chosen(kitchen):
    assert kitchen.bake(quantity=40) == 40  # the choice is part of what a unit is: now there is one
    assert kitchen.bake(quantity=39) < 39
    assert kitchen.is_as_from_nothing(quantity=39)


def test_units_that_lie_over_several_shards_are_done_again(kitchen, monkeypatch):
    monkeypatch.setattr("batchwright.store.writer.MAX_SHARD_TOKENS", 25)
    kitchen.write("g")
    kitchen.bake()
    kitchen.write("h")
    assert kitchen.bake() >= 10
    assert kitchen.is_as_from_nothing()


def test_workers_and_reuse_give_the_same(kitchen, quiet_bake, version_files):
    for name in "bgh":
        kitchen.write(name)
    kitchen.bake_it = lambda recipe, to: quiet_bake(recipe, to, workers=2)
    assert kitchen.bake() == 30
    kitchen.bake_it = quiet_bake
    assert kitchen.is_as_from_nothing()
