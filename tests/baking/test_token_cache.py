"""The same text with the same tokenizer is not tokenised twice, and no store can tell the difference."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import batchwright as bw
from batchwright.baking import work
from batchwright.sources import units
from batchwright.store import collect_garbage
from batchwright.store.layout import Manifest, sealed
from harness import stand_still
from refusals import refused

WORDS = [f"word {n} " + "so " * (n % 7) for n in range(40)]


class Counting:
    """Bakes with a function as tokenizer that writes down every text it is asked for."""

    def __init__(self, folder: Path, quiet_bake) -> None:
        self.folder, self.quiet_bake, self.log = folder, quiet_bake, folder / "log"

    def bake(self, rows, to="b.store", *, workers=0, version="1", dtype=None, eos=None, failing="", **ingredient):
        """(the texts that were encoded, the store)."""
        log = self.log

        def encode(text):
            if failing and failing in text:
                raise ValueError("this one is too much")
            with open(log, "a") as file:
                file.write(text + "\n")
            return list(text.encode())

        append = {"append_eos": True, "eos": eos} if eos is not None else {}
        step = bw.tokenize(encode, vocab_size=256, version=version, dtype=dtype, **append)
        self.log.write_text("")
        recipe = bw.DatasetRecipe(seed=5).add_ingredient(rows, **{"name": "words", **ingredient})
        store = self.quiet_bake(recipe.prepare_step(step), self.folder / to, workers=workers)
        return self.log.read_text().splitlines(), store


@pytest.fixture
def counting(tmp_path, quiet_bake) -> Counting:
    return Counting(tmp_path, quiet_bake)


@pytest.fixture
def first(counting) -> bw.Store:
    """A store of the first 30 words."""
    encoded, store = counting.bake(WORDS[:30], "a.store")
    assert sorted(encoded) == sorted(WORDS[:30])
    return store


def texts_of(store: bw.Store) -> list[str]:
    return sorted(bytes(document.tokens[document.tokens < 255].astype("u1")).decode() for document in store.rows())


@pytest.mark.usefixtures("small_units", "first")
@pytest.mark.parametrize("workers", [0, 2])
def test_another_recipe_encodes_only_the_texts_that_are_new(counting, workers):
    encoded, store = counting.bake(WORDS[10:], where=lambda row: len(row["text"]) > 9, name="other", workers=workers)
    assert sorted(encoded) == sorted(word for word in WORDS[30:] if len(word) > 9)
    assert texts_of(store) == sorted(word for word in WORDS[10:] if len(word) > 9)


@pytest.mark.usefixtures("small_units", "first")
@pytest.mark.parametrize("settings", [{}, {"eos": 255}, {"dtype": "uint32"}])
def test_the_store_has_the_same_bytes_as_without_it(counting, version_files, monkeypatch, settings):
    encoded, _ = counting.bake(WORDS[10:], "with.store", **settings)
    assert len(encoded) == 10
    monkeypatch.setenv("BATCHWRIGHT_TOKEN_CACHE", "off")
    encoded, _ = counting.bake(WORDS[10:], "without.store", **settings)
    assert len(encoded) == 30
    assert version_files(counting.folder / "with.store") == version_files(counting.folder / "without.store")


@pytest.mark.parametrize("before", [{}, {"eos": 7}, {"eos": 254, "dtype": "uint16"}])
@pytest.mark.parametrize("after", [{}, {"eos": 253}, {"dtype": "uint32"}])
def test_another_end_of_document_and_another_type_of_ids_do_not_matter(counting, before, after):
    counting.bake(WORDS, "a.store", **before)
    encoded, store = counting.bake(WORDS, **after)
    assert encoded == []
    end = [after["eos"]] if "eos" in after else []
    assert sorted(document.tokens.tolist() for document in store.rows()) == sorted(
        [*word.encode(), *end] for word in WORDS
    )
    assert store.manifest.token_dtype == after.get("dtype", "uint8")


def test_of_a_changed_file_only_the_changed_rows_are_encoded(counting, tmp_path):
    file = tmp_path / "words.jsonl"
    file.write_text("".join(json.dumps({"text": word}) + "\n" for word in WORDS))
    counting.bake(file)
    file.write_text(file.read_text().replace("word 17 ", "other 17 "))
    encoded, store = counting.bake(file)
    assert encoded == [WORDS[17].replace("word", "other")]
    assert store.num_rows == 40


@pytest.mark.usefixtures("small_units")
def test_a_version_that_was_made_of_old_ones_is_known_too(counting, version_files):
    (counting.folder / "in").mkdir()
    for name, words in (("a", WORDS[:20]), ("b", WORDS[20:])):
        (counting.folder / "in" / f"{name}.jsonl").write_text("".join(json.dumps({"text": w}) + "\n" for w in words))
    counting.bake(counting.folder / "in" / "a.jsonl", "a.store")
    shutil.rmtree(Path(os.environ["BATCHWRIGHT_HOME"]) / "tokenized")
    assert len(counting.bake(counting.folder / "in", "a.store")[0]) == 20  # units of the first file are taken as wholes
    assert counting.bake(WORDS, "memory.store", name="w")[0] == []
    counting.bake(counting.folder / "in", "new.store")
    assert version_files(counting.folder / "a.store") == version_files(counting.folder / "new.store")


@pytest.mark.usefixtures("first")
def test_another_version_of_the_tokenizer_knows_nothing(counting):
    assert len(counting.bake(WORDS[:30], version="2")[0]) == 30


SCRIPT = """
import sys
import batchwright as bw
def encode(text):
    return list(text.encode())
recipe = bw.DatasetRecipe().add_ingredient(["one", "two"], name=sys.argv[1])
bw.bake(recipe.prepare_step(bw.tokenize(encode, vocab_size=256, version="1")), sys.argv[2], workers=0)
"""


def test_functions_of_two_programs_with_one_name_and_version_are_two_tokenizers(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(Path(bw.__file__).parents[1])}

    def said_by(program: str, name: str) -> str:
        (tmp_path / program).write_text(SCRIPT)
        command = [sys.executable, program, name, f"{name}.store"]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stderr

    assert "before" not in said_by("one.py", "a")
    assert "before" not in said_by("two.py", "b")
    assert "2 of 2 documents were tokenised before" in said_by("one.py", "c")


def test_bake_says_how_many_documents_were_tokenised_before(counting, capsys):
    counting.bake(WORDS[:30], "a.store")
    counting.quiet_bake = bw.bake
    counting.bake(WORDS)
    assert "  30 of 40 documents were tokenised before\n" in capsys.readouterr().err


def test_a_bake_of_new_texts_says_nothing_of_it(counting, capsys):
    counting.quiet_bake = bw.bake
    counting.bake(WORDS)
    assert "before" not in capsys.readouterr().err


def test_characters_are_known_once_they_are_fitted(tmp_path, quiet_bake, capsys):
    for name, words in (("a", WORDS), ("b", WORDS[::-1]), ("c", [*WORDS, "zebra"])):
        recipe = bw.DatasetRecipe().add_ingredient(words, name=name)
        store = bw.bake(recipe.prepare_step(bw.tokenize("chars")), tmp_path / f"{name}.store", workers=0)
        assert sorted(store.decode(document.tokens) for document in store.rows()) == sorted(words)
    said = capsys.readouterr().err
    assert said.count("40 of 40 documents were tokenised before") == 1
    assert "of 41" not in said  # other characters: another vocabulary


def test_an_error_names_the_row_also_where_rows_before_it_are_known(counting, first, tmp_path):
    file = tmp_path / "words.jsonl"
    file.write_text("".join(json.dumps({"text": word}) + "\n" for word in WORDS))
    with refused(bw.TokenizerError, "this one is too much", file=file, line=34):
        counting.bake(file, failing="word 33")


# What is not used


def flip(path: Path, old: bytes) -> None:
    """Change a byte in the middle of a file, where `old` is."""
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, bytes([old[0] ^ 1]) + old[1:], 1))


def test_a_shard_that_was_altered_is_not_used(counting, first):
    flip(next(first.folder.glob("words-*.arrow")), b"word 3 ")
    encoded, store = counting.bake(WORDS[:30])
    assert sorted(encoded) == sorted(WORDS[:30])
    assert texts_of(store) == sorted(WORDS[:30])


@pytest.mark.parametrize("damage", ["altered", "truncated", "missing"])
def test_a_table_that_is_damaged_is_not_used(counting, first, damage):
    table = first.folder / "texts.arrow"
    data = table.read_bytes()
    table.unlink()
    if damage != "missing":
        table.write_bytes(data[:900] + b"\0" + data[901:] if damage == "altered" else data[:900])
    encoded, store = counting.bake(WORDS[:30])
    assert len(encoded) == 30
    assert texts_of(store) == sorted(WORDS[:30])
    with refused(bw.StoreError, file=table):
        bw.open_store(first.path, verify=True)


def entries() -> list[Path]:
    return list((Path(os.environ["BATCHWRIGHT_HOME"]) / "tokenized").glob("*/*.json"))


def test_a_store_that_was_removed_is_forgotten(counting, first):
    shutil.rmtree(first.path)
    assert len(counting.bake(WORDS[:30])[0]) == 30
    (entry,) = entries()
    assert json.loads(entry.read_text())["store"] == str(counting.folder / "b.store")


def test_a_version_that_gc_removed_is_forgotten(counting):
    counting.bake(WORDS[:30], "a.store")
    counting.bake(["none of them"], "a.store")
    assert len(entries()) == 2
    collect_garbage(counting.folder / "a.store")
    assert len(counting.bake(WORDS[:30])[0]) == 30


@pytest.mark.usefixtures("small_units")
def test_a_version_that_was_deleted_during_a_bake_is_not_used(counting, first, monkeypatch):
    find_cache = work.find_cache

    def find_and_delete(*args):
        cache = find_cache(*args)
        assert len(cache.stores) == 1
        shutil.rmtree(first.path)  # before the workers open it
        return cache

    monkeypatch.setattr(work, "find_cache", find_and_delete)
    encoded, store = counting.bake(WORDS[:30], workers=2)
    assert sorted(encoded) == texts_of(store) == sorted(WORDS[:30])


def test_a_store_in_whose_place_another_lies_is_forgotten(counting, first):
    other = counting.bake(WORDS[:30], "other.store", version="2")[1]
    shutil.rmtree(first.folder)
    shutil.copytree(other.folder, first.folder)  # a version of the same name, made with another tokenizer
    assert len(counting.bake(WORDS[:30])[0]) == 30
    assert str(first.path) not in [json.loads(entry.read_text())["store"] for entry in entries()]


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"store": "/nowhere", "version": "../../x"}', b"\xff"])
def test_an_entry_that_makes_no_sense_is_removed(counting, first, content):
    (entry,) = entries()
    entry.write_bytes(content)
    assert len(counting.bake(WORDS[:30])[0]) == 30
    assert entry not in entries()


def test_a_store_of_an_earlier_release_opens_and_is_not_used(counting, first):
    manifest = json.loads((first.folder / "manifest.json").read_text())
    del manifest["texts_hash"], manifest["checksum"]
    (first.folder / "manifest.json").write_bytes(sealed(manifest))
    (first.folder / "texts.arrow").unlink()
    old = bw.open_store(first.path, verify=True)
    assert old.texts is None
    assert old.fingerprint == first.fingerprint
    assert len(counting.bake(WORDS[:30])[0]) == 30


def test_the_fingerprint_of_a_store_does_not_know_of_its_table_of_texts(first):
    manifest = Manifest.load(first.folder)
    assert replace(manifest, texts_hash="").fingerprint == manifest.fingerprint


def test_a_shard_is_not_read_whole_for_one_short_text(counting):
    counting.bake(["yes", *(f"{n} " + "long " * 1000 for n in range(20))], "a.store")
    assert counting.bake(["yes"])[0] == ["yes"]
    assert counting.bake([f"{n} " + "long " * 1000 for n in range(20)], "c.store")[0] == []


@pytest.mark.parametrize("kind", ["file", "missing"])
def test_a_home_that_cannot_be_written_is_no_matter(counting, monkeypatch, tmp_path, kind):
    if kind == "file":
        (tmp_path / "home").write_text("not a folder")
        monkeypatch.setenv("BATCHWRIGHT_HOME", str(tmp_path / "home"))
    else:
        monkeypatch.delenv("BATCHWRIGHT_HOME")
        monkeypatch.setattr(Path, "home", _no_home)
    counting.bake(WORDS[:30], "a.store")
    assert len(counting.bake(WORDS)[0]) == 40
    assert counting.bake(WORDS[:35])[0] == []  # versions of the store itself are known without it


def _no_home():
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.usefixtures("first")
def test_turned_off_it_neither_looks_nor_remembers(counting, monkeypatch):
    monkeypatch.setenv("BATCHWRIGHT_TOKEN_CACHE", "off")
    assert len(counting.bake(WORDS)[0]) == 40
    assert len(entries()) == 1


def test_bytes_are_not_looked_up(tmp_path, quiet_bake):
    quiet_bake(bw.DatasetRecipe().add_ingredient(WORDS).prepare_step(bw.tokenize("bytes")), tmp_path / "a.store")
    assert entries() == []


# Several processes


def bake_words(to: Path, log: Path, first: int, last: int, wait_at: str = "") -> None:
    """A job that writes down every text it encodes, and stands still at one of them."""
    units.cut_rows.__defaults__ = (4,)

    def encode(text):
        with open(log, "a") as file:
            file.write(text + "\n")
        if text == wait_at:
            stand_still(encoded=text)
        return list(text.encode())

    recipe = bw.DatasetRecipe().add_ingredient([f"word {n}" for n in range(first, last)], name=str(first))
    bw.bake(recipe.prepare_step(bw.tokenize(encode, vocab_size=256, version="1")), to, workers=0, show_progress=False)


def test_of_a_bake_that_was_killed_nothing_is_used_until_it_is_finished(tmp_path, processes):
    a, b, again = tmp_path / "a.store", tmp_path / "b.log", tmp_path / "again.log"
    processes.start("killed", bake_words, a, tmp_path / "a.log", 0, 20, wait_at="word 15")
    processes.wait_until_said("killed", encoded="word 15")
    processes.kill("killed")
    processes.start("other", bake_words, tmp_path / "b.store", b, 10, 30)
    processes.finish("other")
    assert len(b.read_text().splitlines()) == 20
    processes.start("again", bake_words, a, again, 0, 20)
    processes.finish("again")
    # Units of four: three were done before; of the rest, 12 to 19, all lie in the other store now.
    assert not again.exists()
    assert bw.open_store(a, verify=True).num_rows == 20


def test_bakes_at_the_same_time_do_not_disturb_each_other(tmp_path, processes, version_files, monkeypatch):
    def start(name, first, last):
        processes.start(name, bake_words, tmp_path / f"{name}.store", tmp_path / f"{name}.log", first, last)

    start("0", 0, 20)
    start("1", 1, 21)
    processes.finish("0", "1")
    monkeypatch.setenv("BATCHWRIGHT_TOKEN_CACHE", "off")
    start("alone", 1, 21)
    processes.finish("alone")
    assert version_files(tmp_path / "1.store") == version_files(tmp_path / "alone.store")
    monkeypatch.delenv("BATCHWRIGHT_TOKEN_CACHE")
    start("after", 0, 21)
    processes.finish("after")
    assert not (tmp_path / "after.log").exists()
