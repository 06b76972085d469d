"""From units to shards: order, sizes, and what the report says of every row."""

from __future__ import annotations

import io
import json
import re

import pytest

import batchwright as bw
from batchwright.baking import run
from batchwright.base.progress import progress
from refusals import refused
from shared import texts


def recipe_of(source, seed: int = 0, **ingredient) -> bw.DatasetRecipe:
    recipe = bw.DatasetRecipe(seed=seed).add_ingredient(source, **({"name": "a"} | ingredient))
    return recipe.prepare_step(bw.tokenize("bytes"))


NUMBERS = [f"number {n}" for n in range(40)]


@pytest.mark.usefixtures("small_units")
def test_documents_are_shuffled_by_seed_and_ingredient(tmp_path, quiet_bake):
    one = texts(quiet_bake(recipe_of(NUMBERS, seed=1), tmp_path / "1.store"))
    assert sorted(one) == sorted(NUMBERS)
    assert one != NUMBERS
    assert texts(quiet_bake(recipe_of(NUMBERS, seed=1), tmp_path / "same.store")) == one
    assert texts(quiet_bake(recipe_of(NUMBERS, seed=2), tmp_path / "2.store")) != one
    assert texts(quiet_bake(recipe_of(NUMBERS, seed=1, name="b"), tmp_path / "b.store"), "b") != one


@pytest.mark.usefixtures("small_units")
def test_without_shuffle_documents_keep_the_order_of_path_and_row(raw, tmp_path, quiet_bake):
    store = quiet_bake(recipe_of(raw / "web"), tmp_path / "a.store", shuffle=False)
    places = [(row.file, row.row) for row in store.rows()]
    assert places == sorted(places)
    assert len(places) == 120
    assert texts(quiet_bake(recipe_of(NUMBERS), tmp_path / "b.store", shuffle=False)) == NUMBERS


def test_a_small_corpus_is_one_shard_for_each_source(raw, tmp_path, quiet_bake):
    recipe = bw.DatasetRecipe().add_ingredient(raw / "web", name="web").add_ingredient(raw / "code", name="code")
    store = quiet_bake(recipe.prepare_step(bw.tokenize("bytes")), tmp_path / "a.store")
    assert sorted(path.name for path in store.folder.glob("*.arrow")) == [
        "code-train-00000.arrow",
        "files.arrow",
        "shards.arrow",
        "texts.arrow",
        "units.arrow",
        "web-train-00000.arrow",
    ]
    assert store.names == ["web", "code"]


@pytest.mark.usefixtures("small_units")
def test_units_are_joined_to_shards_up_to_a_size(tmp_path, quiet_bake, monkeypatch):
    monkeypatch.setattr(run, "_SHARD_BYTES", 100)
    store = quiet_bake(recipe_of(NUMBERS), tmp_path / "a.store", shuffle=False)
    sizes = store.stream("a").shard_tokens.tolist()
    assert len(sizes) > 2
    assert all(size <= 100 for size in sizes)
    assert texts(store) == NUMBERS


def test_a_unit_with_more_tokens_than_a_shard_holds_is_split_between_documents(tmp_path, quiet_bake, monkeypatch):
    monkeypatch.setattr("batchwright.store.writer.MAX_SHARD_TOKENS", 50)
    store = quiet_bake(recipe_of(NUMBERS), tmp_path / "a.store", shuffle=False)
    assert store.stream("a").shard_documents.tolist() == [6, 6, 5, 5, 5, 5, 5, 3]  # of 8 and 9 tokens
    assert texts(store) == NUMBERS
    assert [row.row for row in store.rows()] == list(range(40))


def test_a_document_with_more_tokens_than_a_shard_holds_is_named(tmp_path, quiet_bake, monkeypatch):
    monkeypatch.setattr("batchwright.baking.unit.MAX_SHARD_TOKENS", 10)
    with refused(bw.TokenizerError, "11 tokens", "10", file="<memory>", row=1):
        quiet_bake(recipe_of(["short", "one is long"]), tmp_path / "a.store")


def test_a_source_of_which_nothing_is_left_is_an_empty_stream(tmp_path, quiet_bake):
    recipe = bw.DatasetRecipe().add_ingredient(NUMBERS, name="a").add_ingredient(["x"], name="b", where=lambda row: 0)
    store = quiet_bake(recipe.prepare_step(bw.tokenize("bytes")), tmp_path / "a.store")
    assert store.names == ["a", "b"]
    assert store.stream("b").num_tokens == 0
    assert bw.open_store(store.path, verify=True).num_rows == 40


@pytest.mark.usefixtures("small_units")
def test_the_report_accounts_for_every_row(raw, tmp_path, quiet_bake, capsys):
    recipe = bw.DatasetRecipe().add_ingredient(
        raw / "web", name="web", where=lambda row: row["number"] < 100, quantity=50
    )
    recipe.add_ingredient(["", "x", "yy"], name="notes")
    recipe.prepare_step(lambda row: row if "7" not in row["text"] else None, name="no sevens")
    store = quiet_bake(recipe.prepare_step(bw.tokenize("bytes")), tmp_path / "a.store", show_progress=True)
    web, notes = (store.report["ingredients"][name] for name in ("web", "notes"))
    assert web["rows_read"] == 120 == web["documents"] + sum(web["dropped"].values())
    assert web["dropped"]["not where"] == 20
    assert web["dropped"]["beyond quantity"] == 50
    assert notes["dropped"] == {"empty text": 1}
    assert web["tokens"] + notes["tokens"] == store.num_tokens
    assert store.report["errors"] == 0
    printed = capsys.readouterr().err
    assert f"web: {web['documents']} of 120 rows kept; dropped: 50 beyond quantity, " in printed
    assert "notes: 2 of 3 rows kept; dropped: 1 empty text" in printed


def test_the_raw_files_are_kept_in_a_table(raw, tmp_path, quiet_bake):
    store = quiet_bake(recipe_of(raw / "web"), tmp_path / "a.store")
    assert store.files["name"].to_pylist() == ["a.jsonl", "b.jsonl.gz", "c.jsonl.zst"]
    assert store.files["format"].to_pylist() == ["jsonl"] * 3
    assert store.files["num_bytes"].tolist() == [path.stat().st_size for path in sorted((raw / "web").iterdir())]


def test_where_and_steps_of_several_ingredients_are_each_their_own(tmp_path, quiet_bake):
    recipe = bw.DatasetRecipe()
    for name, limit in (("small", 3), ("large", 30)):
        recipe.add_ingredient([{"text": str(n), "n": n} for n in range(40)], name=name, where=_below(limit))
    store = quiet_bake(recipe.prepare_step(bw.tokenize("bytes")), tmp_path / "a.store")
    assert sorted(texts(store, "small")) == ["0", "1", "2"]
    assert len(texts(store, "large")) == 30


def _below(limit: int):
    return lambda row: row["n"] < limit


def test_a_bake_is_the_same_from_a_json_file_and_from_memory(tmp_path, quiet_bake):
    rows = [{"body": f"row {n}", "n": n} for n in range(30)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = quiet_bake(recipe_of(tmp_path / "a.jsonl", text="body"), tmp_path / "file.store")
    memory = quiet_bake(recipe_of(rows, text="body"), tmp_path / "memory.store")
    assert file.fingerprint == memory.fingerprint


# Progress: lines that can be read in a log; a bar only on a terminal.


def test_progress_without_a_terminal_is_a_line_now_and_then(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr("batchwright.base.progress._SECONDS_BETWEEN_LINES", 0.0)
    with progress("baking a.store", 200_000_000, to=stream) as done:
        done.advance(50_000_000, "web: 10 documents")
        done.advance(150_000_000)
    first, second = stream.getvalue().splitlines()
    assert re.fullmatch(r"baking a\.store: 25 %, [\d.]+ MB/s web: 10 documents", first)
    assert re.fullmatch(r"baking a\.store: 100 %, [\d.]+ MB/s", second)


def test_progress_does_not_flood_a_log():
    stream = io.StringIO()
    with progress("baking", 1000, to=stream) as done:
        for _ in range(1000):
            done.advance(1)
    assert stream.getvalue() == ""


def test_progress_on_a_terminal_is_a_bar_that_goes_away():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with progress("baking a.store", 100, to=stream) as done:
        done.advance(100, "web")
    assert "baking a.store" in stream.getvalue()
    assert "\x1b[" in stream.getvalue()


def test_progress_of_nothing_shows_nothing():
    stream = io.StringIO()
    with progress("baking", 0, show=False, to=stream) as done:
        done.advance(0)
    assert stream.getvalue() == ""
