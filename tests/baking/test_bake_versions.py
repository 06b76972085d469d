"""Baking again: nothing where nothing changed, a new version beside the old where something did."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import batchwright as bw
from batchwright.store import collect_garbage
from batchwright.store.versions import list_versions
from refusals import refused
from shared import sorted_texts


def recipe_of(source: Path, **ingredient: object) -> bw.DatasetRecipe:
    recipe = bw.DatasetRecipe(seed=1).add_ingredient(source, **({"name": "web"} | ingredient))  # type: ignore[arg-type]
    return recipe.prepare_step(bw.tokenize("bytes"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    (folder / "b.jsonl").write_text('{"text": "three"}\n')
    return folder


@pytest.fixture
def to(tmp_path: Path) -> Path:
    return tmp_path / "a.store"


def stamps(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_an_unchanged_recipe_over_unchanged_files_writes_nothing(source, to, quiet_bake, capsys):
    first = quiet_bake(recipe_of(source), to)
    before = stamps(to)
    again = quiet_bake(recipe_of(source), to, show_progress=True)
    assert again.version == first.version
    assert stamps(to) == before
    assert capsys.readouterr().err == f"{to}: up to date (3 documents, 11 tokens)\n"


def test_up_to_date_is_known_without_importing_arrow(source, to, quiet_bake):
    quiet_bake(recipe_of(source), to)
    code = f"""
import sys
import batchwright as bw
recipe = bw.DatasetRecipe(seed=1).add_ingredient({str(source)!r}, name="web").prepare_step(bw.tokenize("bytes"))
bw.bake(recipe, {str(to)!r})
assert "pyarrow" not in sys.modules and "tokenizers" not in sys.modules, "imported"
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(bw.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, f"{to}: up to date (3 documents, 11 tokens)\n")


def test_files_that_were_touched_but_not_changed_are_up_to_date(source, to, quiet_bake):
    first = quiet_bake(recipe_of(source), to)
    os.utime(source / "a.jsonl", (1, 1))
    assert quiet_bake(recipe_of(source), to).version == first.version
    assert list_versions(to) == [first.version]


@pytest.mark.usefixtures("small_units")
def test_a_touched_file_of_several_units_is_compared_by_its_content(source, to, quiet_bake):
    (source / "c.jsonl").write_text("".join(f'{{"text": "number {n}"}}\n' for n in range(50)))
    first = quiet_bake(recipe_of(source), to)
    os.utime(source / "c.jsonl", (1, 1))
    assert quiet_bake(recipe_of(source), to).version == first.version
    (source / "c.jsonl").write_text("".join(f'{{"text": "number {n}"}}\n' for n in range(50)).replace("49", "94"))
    os.utime(source / "c.jsonl", (1, 1))
    assert quiet_bake(recipe_of(source), to).version == first.version  # same size and time: nothing says it changed
    os.utime(source / "c.jsonl", (2, 2))
    assert quiet_bake(recipe_of(source), to).version != first.version


def change_a_file(source):
    (source / "a.jsonl").write_text('{"text": "ONE"}\n{"text": "two"}\n')
    return recipe_of(source)


def add_a_file(source):
    (source / "0.jsonl").write_text('{"text": "zero"}\n')
    return recipe_of(source)


def remove_a_file(source):
    (source / "b.jsonl").unlink()
    return recipe_of(source)


@pytest.mark.parametrize(
    ("change", "left"),
    [
        (change_a_file, ["ONE", "three", "two"]),
        (add_a_file, ["one", "three", "two", "zero"]),
        (remove_a_file, ["one", "two"]),
        (lambda source: recipe_of(source, where=lambda row: "t" in row["text"]), ["three", "two"]),
        (lambda source: recipe_of(source, name="other"), ["one", "three", "two"]),
        (lambda source: recipe_of(source).holdout(0.5), ["one", "three", "two"]),
    ],
)
def test_a_change_makes_a_new_version_beside_the_old(source, to, quiet_bake, change, left):
    old = quiet_bake(recipe_of(source), to)
    new = quiet_bake(change(source), to)
    assert new.version != old.version
    assert sorted_texts(new) == left
    assert sorted_texts(bw.open_store(to)) == left
    assert sorted_texts(old) == ["one", "three", "two"]  # who reads the old version keeps it
    assert sorted_texts(bw.open_store(to, version=old.version)) == ["one", "three", "two"]


def test_a_changed_function_is_noticed_and_an_equal_one_is_not(source, to, quiet_bake):
    first = quiet_bake(recipe_of(source, where=lambda row: len(row["text"]) > 3), to)
    assert quiet_bake(recipe_of(source, where=lambda row: len(row["text"]) > 3), to).version == first.version
    assert quiet_bake(recipe_of(source, where=lambda row: len(row["text"]) > 2), to).version != first.version


def test_a_changed_format_is_noticed(source, to, quiet_bake):
    (source / "x.shout").write_text("hello\n")

    def bake_with(read, version=None):
        bw.register_format("shout", extensions=(".shout",), by_line=True, version=version)(read)
        return quiet_bake(recipe_of(source / "x.shout"), to)

    first = bake_with(lambda line: {"text": line.decode().upper()})
    assert sorted_texts(first) == ["HELLO"]
    assert bake_with(lambda line: {"text": line.decode().upper()}).version == first.version
    assert sorted_texts(bake_with(lambda line: {"text": line.decode().title()})) == ["Hello"]
    named = bake_with(lambda line: {"text": "1"}, version="1")
    assert bake_with(lambda line: {"text": "2"}, version="1").version == named.version
    assert sorted_texts(bake_with(lambda line: {"text": "2"}, version="2")) == ["2"]


def test_going_back_to_a_recipe_uses_the_version_that_is_still_there(source, to, quiet_bake):
    one = quiet_bake(recipe_of(source), to)
    two = quiet_bake(recipe_of(source, quantity=1), to)
    before = stamps(to / "versions")
    again = quiet_bake(recipe_of(source), to)
    assert (again.version, bw.open_store(to).version) == (one.version, one.version)
    assert stamps(to / "versions") == before  # a running job may read it: it is not written again
    assert sorted_texts(two) == sorted_texts(bw.open_store(to, version=two.version))


@pytest.mark.parametrize("damage", ["missing", "truncated", "no manifest", "bad manifest"])
def test_a_damaged_version_is_not_up_to_date_and_baking_mends_it(source, to, quiet_bake, damage):
    store = quiet_bake(recipe_of(source), to)
    shard, manifest = store.folder / "web-train-00000.arrow", store.folder / "manifest.json"
    if damage == "missing":
        shard.unlink()
    elif damage == "truncated":
        os.truncate(shard, 100)
    elif damage == "no manifest":
        manifest.unlink()
    else:
        manifest.write_bytes(b"{")
    mended = quiet_bake(recipe_of(source), to)
    assert sorted_texts(bw.open_store(to, verify=True)) == ["one", "three", "two"]
    assert mended.fingerprint == store.fingerprint


def test_a_store_that_is_copied_elsewhere_is_up_to_date_there(source, to, tmp_path, quiet_bake):
    first = quiet_bake(recipe_of(source), to)
    shutil.copytree(to, tmp_path / "copy.store")
    assert quiet_bake(recipe_of(source), tmp_path / "copy.store").version == first.version


def test_a_tokenizer_file_that_moved_is_the_same_tokenizer(source, to, tmp_path, quiet_bake):
    from tokenizers import Tokenizer, models

    recipes = []
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        Tokenizer(models.WordLevel({"one": 0}, unk_token="one")).save(str(tmp_path / folder / "tokenizer.json"))
        step = bw.tokenize(tmp_path / folder / "tokenizer.json")
        recipes.append(bw.DatasetRecipe().add_ingredient(source).prepare_step(step))
    assert quiet_bake(recipes[0], to).version == quiet_bake(recipes[1], to).version


def test_garbage_collection_removes_old_versions_that_nobody_reads(source, to, quiet_bake):
    old = quiet_bake(recipe_of(source), to)
    new = quiet_bake(recipe_of(source, quantity=1), to)
    removals = collect_garbage(to)
    assert [(removal.folder.name, removal.in_use) for removal in removals] == [(old.version, True)]
    assert sorted_texts(old) == ["one", "three", "two"]  # this process has it open, so it stays
    version = old.version
    del old
    gc.collect()
    assert [removal.in_use for removal in collect_garbage(to, dry_run=True)] == [False]
    assert set(list_versions(to)) == {version, new.version}
    removed = collect_garbage(to)
    assert [(removal.folder.name, removal.in_use) for removal in removed] == [(version, False)]
    assert removed[0].num_bytes > 500
    assert list_versions(to) == [new.version]
    assert collect_garbage(to) == []


def test_garbage_collection_leaves_what_another_process_reads(source, to, quiet_bake):
    version = quiet_bake(recipe_of(source), to).version
    code = "import sys, batchwright as bw; store = bw.open_store(sys.argv[1]); print('open', flush=True); input()"
    environment = {**os.environ, "PYTHONPATH": str(Path(bw.__file__).parents[1])}
    reader = subprocess.Popen(
        [sys.executable, "-c", code, str(to)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "open\n"
        quiet_bake(recipe_of(source, quantity=1), to)
        gc.collect()
        assert [removal.in_use for removal in collect_garbage(to)] == [True]
        assert (to / "versions" / version / "manifest.json").exists()
        reader.kill()
    assert [removal.in_use for removal in collect_garbage(to)] == [False]


def test_garbage_collection_keeps_the_newest_and_sweeps_unfinished_work(source, to, quiet_bake):
    versions = [quiet_bake(recipe_of(source, quantity=n), to).version for n in (1, 2, 3)]
    for age, version in enumerate(reversed(versions)):
        os.utime(to / "versions" / version / "manifest.json", (1000 - age, 1000 - age))
    (to / "work").mkdir()
    (to / "work" / "unit.arrow").write_bytes(b"x" * 10)
    (to / "versions" / "half").mkdir()
    gc.collect()
    removed = [removal.folder.name for removal in collect_garbage(to, keep=1)]
    assert removed == [versions[0], "half", "work"]
    assert bw.open_store(to).version == versions[2]
    assert bw.open_store(to, version=versions[1]).num_rows == 2


def test_garbage_collection_refuses_what_is_not_a_store(source):
    with refused(bw.StoreError, folder=source, remedy="batchwright bake FOLDER"):
        collect_garbage(source)
    assert sorted(os.listdir(source)) == ["a.jsonl", "b.jsonl"]


def test_a_store_inside_the_folder_it_is_baked_from_is_not_an_input(source, quiet_bake):
    first = quiet_bake(recipe_of(source), source / "own.store")
    again = quiet_bake(recipe_of(source), source / "own.store")
    assert again.version == first.version
