"""A recipe says what a dataset is made of, checks what it is told, and prints what it will do."""

from __future__ import annotations

import datetime
import decimal
import os
import threading
from pathlib import Path

import pyarrow as pa
import pytest

import batchwright as bw
from refusals import refused


def test_methods_change_the_recipe_and_return_it():
    recipe = bw.DatasetRecipe(seed=3)
    assert recipe.add_ingredient(["a"]) is recipe
    assert recipe.prepare_step(bw.tokenize("bytes")) is recipe
    assert recipe.holdout(0.1) is recipe
    assert [ingredient.name for ingredient in recipe.ingredients] == ["memory"]


def test_a_recipe_prints_what_it_will_do(tmp_path):
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "a.jsonl").write_text('{"text": "x"}\n')
    (tmp_path / "web" / "b.jsonl").write_text("")

    def english(row):
        return row["lang"] == "en"

    recipe = bw.DatasetRecipe(seed=3)
    recipe.add_ingredient(tmp_path / "web", where=english, quantity=1000)
    recipe.add_ingredient(["one", "two"], name="notes", quantity=0.5)
    recipe.prepare_step(str.upper, name="shout").prepare_step(bw.tokenize("bytes", append_eos=True)).holdout(0.005)
    assert repr(recipe).splitlines() == [
        "DatasetRecipe, seed 3",
        "├─ web: 2 files, 14 bytes, where english, 1,000 of them",
        "├─ notes: 2 rows from memory, 50 % of them",
        "├─ then shout",
        "├─ then tokenize(bytes, eos 256 (its own))",
        "└─ hold out 0.5 % as val",
    ]


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("data/web/*.jsonl", "web"),
        ("data/web.jsonl.gz", "web"),
        ("*.jsonl", "data"),
        (Path("../books"), "books"),
        (["data/web/*.jsonl", "more/*.jsonl"], "web"),
        ([Path("a.txt"), Path("b.txt")], "a"),
        (["one", "two words"], "memory"),
        ([{"text": "one"}], "memory"),
    ],
)
def test_an_ingredient_without_a_name_is_named_after_its_source(source, name):
    assert bw.DatasetRecipe().add_ingredient(source).ingredients[0].name == name


def test_names_that_would_be_taken_get_a_number():
    recipe = bw.DatasetRecipe().add_ingredient(["a"]).add_ingredient(["b"]).add_ingredient(["c"])
    assert [ingredient.name for ingredient in recipe.ingredients] == ["memory", "memory-2", "memory-3"]


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("", "''"),
        ("a/b", "'a/b'"),
        ("a\nb", r"'a\nb'"),
        (".hidden", "'.hidden'"),
        ("x" * 101, "100 bytes"),
        ("WEB", "'WEB'"),
        (5, "5"),
    ],
)
def test_a_name_that_cannot_name_files_is_refused(name, named):
    recipe = bw.DatasetRecipe().add_ingredient(["a"], name="web")
    with refused(bw.SpecError, named, parameter="name"):
        recipe.add_ingredient(["b"], name=name)
    assert len(recipe.ingredients) == 1


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ([], "empty"),
        (iter(()), "empty"),
        ({"text": "a row"}, "a dict"),
        (b"bytes", "a bytes"),
        (None, "a NoneType"),
        (7, "a int"),
    ],
)
def test_what_is_not_a_source_is_refused(source, named):
    recipe = bw.DatasetRecipe()
    with refused(bw.SpecError, named, parameter="source"):
        recipe.add_ingredient(source)
    assert recipe.ingredients == []


def test_a_frame_that_cannot_be_arrow_is_refused_because_iterating_it_gives_names_of_columns():
    class Frame(list):
        columns = ("text",)

        def to_dict(self, how): ...

    with refused(bw.SpecError, "a Frame", parameter="source", remedy="pyarrow Table"):
        bw.DatasetRecipe().add_ingredient(Frame(["text"]))


def test_rows_come_from_any_iterable_and_from_arrow_tables():
    recipe = bw.DatasetRecipe()
    recipe.add_ingredient({"text": f"row {n}"} for n in range(3))
    recipe.add_ingredient(pa.table({"text": ["a", "b"], "n": [1, 2]}))
    assert recipe.ingredients[0].source == [{"text": "row 0"}, {"text": "row 1"}, {"text": "row 2"}]
    assert list(recipe.ingredients[1].source.read(None)) == [{"text": "a", "n": 1}, {"text": "b", "n": 2}]


@pytest.mark.parametrize("source", [["*.jsonl", "in/*.jsonl"], ["in/web.jsonl"], ["nowhere.txt"], [Path("nowhere")]])
def test_a_list_of_globs_or_missing_files_is_never_taken_for_text(tmp_path, quiet_bake, source):
    recipe = bw.DatasetRecipe().add_ingredient(source).prepare_step(bw.tokenize("bytes"))
    with refused(bw.SourceError, file=source[0], remedy="'data/**/*.jsonl'"):
        quiet_bake(recipe, tmp_path / "a.store")
    assert not (tmp_path / "a.store").exists()


def test_a_list_with_a_format_is_a_list_of_files(tmp_path, monkeypatch, quiet_bake):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").write_text("hello")
    recipe = bw.DatasetRecipe().add_ingredient(["notes"], format="text").prepare_step(bw.tokenize("bytes"))
    store = quiet_bake(recipe, "a.store")
    assert store.decode(store.tokens(0)) == "hello"


def test_a_list_that_could_be_files_or_texts_is_asked_about(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one").write_text("")
    with refused(bw.SourceError, "'one'", "'two'"):
        bw.DatasetRecipe().add_ingredient(["one", "two"])


@pytest.mark.parametrize(
    ("make", "parameter"),
    [
        (lambda recipe: recipe.add_ingredient(["a"], text=5), "text"),
        (lambda recipe: recipe.add_ingredient(["a"], where="x > 3"), "where"),
        (lambda recipe: recipe.prepare_step("bytes"), "step"),
        (lambda recipe: recipe.prepare_step(bw.tokenize("bytes")).prepare_step(lambda row: row), "step"),
        (lambda recipe: recipe.prepare_step(bw.tokenize("bytes")).prepare_step(bw.tokenize("bytes")), "step"),
        (lambda recipe: recipe.holdout(1.0), "fraction"),
        (lambda recipe: recipe.holdout(0), "fraction"),
        (lambda recipe: recipe.holdout("0.1"), "fraction"),
        (lambda recipe: bw.DatasetRecipe(seed="seven"), "seed"),
        (lambda recipe: bw.bake(recipe, "a.store"), "recipe"),
        (lambda recipe: bw.bake(recipe.add_ingredient(["a"]).holdout(0.5), "a.store"), "recipe"),
        (lambda recipe: bw.bake("recipe.py", "a.store"), "recipe"),
        (lambda recipe: _bake(recipe, workers=-1), "workers"),
        (lambda recipe: _bake(recipe, on_error="ignore"), "on_error"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(make, parameter, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refused(bw.SpecError, parameter=parameter):
        make(bw.DatasetRecipe())
    assert os.listdir(tmp_path) == []


def _bake(recipe: bw.DatasetRecipe, **settings):
    return bw.bake(recipe.add_ingredient(["a"]).prepare_step(bw.tokenize("bytes")), "a.store", **settings)


def test_an_unknown_format_is_answered_with_the_known_ones():
    with refused(bw.SpecError, "'jsnl'", "parquet", parameter="format", remedy="'jsonl'"):
        bw.DatasetRecipe().add_ingredient("a", format="jsnl")


def test_a_where_that_cannot_be_compared_asks_for_a_version():
    lock = threading.Lock()
    recipe = bw.DatasetRecipe()
    with refused(bw.SpecError, "_thread.lock", function="where=", remedy="version='1'"):
        recipe.add_ingredient(["a"], where=lambda row: lock.locked())
    recipe.add_ingredient(["a"], where=lambda row: lock.locked(), version="1")


def test_rows_that_cannot_be_compared_are_refused(tmp_path, quiet_bake):
    recipe = bw.DatasetRecipe().add_ingredient([{"text": "a", "value": object()}]).prepare_step(bw.tokenize("bytes"))
    with refused(bw.SpecError, "builtins.object", parameter="source", ingredient="memory", row=0, column="value"):
        quiet_bake(recipe, tmp_path / "a.store")


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"value": None}, {"value": float("nan")}),
        ({"value": float("inf")}, {"value": float("-inf")}),
        ({"value": b"hi"}, {"value": "aGk="}),
        ({"value": datetime.date(2024, 1, 1)}, {"value": "2024-01-01"}),
        ({"value": decimal.Decimal("1.5")}, {"value": "1.5"}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ],
)
def test_rows_that_differ_are_baked_again(tmp_path, quiet_bake, one, two):
    def version(more):
        recipe = bw.DatasetRecipe().add_ingredient(
            [{"text": "a", **more}], "{text} {value}" if "value" in more else "text"
        )
        return quiet_bake(recipe.prepare_step(bw.tokenize("bytes")), tmp_path / "a.store").version

    assert version(one) == version(one) != version(two)


def test_a_step_with_the_items_of_a_dict_in_another_order_is_baked_again(tmp_path, quiet_bake):
    def version(endings):
        step = lambda row: {**row, "text": row["text"] + "".join(endings.values())}
        recipe = bw.DatasetRecipe().add_ingredient([{"text": "a"}]).prepare_step(step, name="end")
        return quiet_bake(recipe.prepare_step(bw.tokenize("bytes")), tmp_path / "a.store").version

    assert version({"a": "x", "b": "y"}) == version({"a": "x", "b": "y"}) != version({"b": "y", "a": "x"})


repeats = {"where": 1, "step": 1, "tokenizer": 1}


@pytest.mark.parametrize("part", sorted(repeats))
def test_what_a_function_reads_is_compared_when_it_is_baked_not_when_it_is_added(
    tmp_path, quiet_bake, monkeypatch, part
):
    recipe = bw.DatasetRecipe().add_ingredient(["a", "bb"], where=lambda row: len(row["text"]) <= repeats["where"])
    recipe.prepare_step(lambda row: {"text": row["text"] * repeats["step"]})
    recipe.prepare_step(bw.tokenize(lambda text: [0] * len(text) * repeats["tokenizer"], vocab_size=1))
    assert quiet_bake(recipe, to=tmp_path / "c.store").num_tokens == 1
    monkeypatch.setitem(repeats, part, 2)
    assert quiet_bake(recipe, to=tmp_path / "c.store").num_tokens > 1


# Options of formats


def test_options_reach_the_format_and_are_part_of_what_a_store_was_made_of(tmp_path, quiet_bake):
    (tmp_path / "a.csv").write_text("text;id\none, two;1\n")

    def recipe(**options):
        made = bw.DatasetRecipe().add_ingredient(tmp_path / "a.csv", options=options or None)
        return made.prepare_step(bw.tokenize("bytes"))

    store = quiet_bake(recipe(delimiter=";"), tmp_path / "x.store")
    assert store.decode(store[0].tokens) == "one, two"
    assert store.manifest.recipe["ingredients"][0]["options"] == {"delimiter": ";"}
    assert recipe(delimiter=";").fingerprint != recipe().fingerprint
    assert "options" not in recipe().spec()["ingredients"][0]


def test_two_ingredients_can_read_one_format_in_two_ways(tmp_path, quiet_bake):
    (tmp_path / "a.csv").write_text("text;id\none, two;1\n")
    (tmp_path / "b.csv").write_text("text|id\nthree; four|1\n")
    recipe = bw.DatasetRecipe().add_ingredient(tmp_path / "a.csv", options={"delimiter": ";"})
    recipe.add_ingredient(tmp_path / "b.csv", options={"delimiter": "|"}).prepare_step(bw.tokenize("bytes"))
    store = quiet_bake(recipe, tmp_path / "x.store")
    assert [store.decode(row.tokens) for row in store.rows()] == ["one, two", "three; four"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"delimeter": ";"}, "'delimeter'"),
        ({"delimiter": object()}, "<object object"),
        (["delimiter"], "['delimiter']"),
    ],
)
def test_options_that_cannot_be_are_refused_when_they_are_said(tmp_path, options, named):
    recipe = bw.DatasetRecipe()
    with refused(bw.SpecError, named, parameter="options"):
        recipe.add_ingredient(tmp_path / "a.csv", format="csv", options=options)
    assert recipe.ingredients == []


def test_an_option_that_the_format_of_a_file_does_not_have_is_refused_before_anything_is_written(tmp_path, quiet_bake):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    recipe = bw.DatasetRecipe().add_ingredient(tmp_path / "a.jsonl", options={"delimiter": ";"})
    with refused(bw.SpecError, "'jsonl'", "'delimiter'", parameter="options"):
        quiet_bake(recipe.prepare_step(bw.tokenize("bytes")), tmp_path / "x.store")
    assert not (tmp_path / "x.store").exists()


def test_a_file_that_is_changed_while_it_is_read_is_refused(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "one"}\n' * 3)

    def writes(row):
        if row["text"] == "one":
            with open(file, "a") as more:
                more.write('{"text": "more"}\n')
        return row

    recipe = bw.DatasetRecipe().add_ingredient(file).prepare_step(writes, version="1")
    recipe.prepare_step(bw.tokenize("bytes"))
    with refused(bw.SourceError, file=file, remedy="bake again"):
        bw.bake(recipe, tmp_path / "s", workers=0, show_progress=False)
    with refused(bw.StoreError, folder=tmp_path / "s", remedy="bake"):
        bw.open_store(tmp_path / "s")
