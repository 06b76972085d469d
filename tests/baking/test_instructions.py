"""Instructions are values, a recipe is a list of them, and each is followed in its place."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import batchwright as bw
from refusals import refused


def upper(row):
    return {**row, "text": row["text"].upper()}


def is_long(row):
    return len(row["text"]) > 2


def texts_of_recipe(recipe, **settings):
    """The texts of a recipe's rows, in order."""
    return bw.bake(recipe, workers=0, show_progress=False, **settings).to_pydict()["text"]


def chained():
    recipe = bw.DatasetRecipe(seed=3).add_ingredient(["a", "bbb"], name="one", where=is_long)
    recipe.add_ingredient(["c", "d"], quantity=1).prepare_step(upper, select="one", name="shout")
    return recipe.prepare_step(upper, select=is_long).prepare_step(bw.tokenize("bytes"))


def listed():
    instructions = [
        bw.add_ingredient(["a", "bbb"], name="one", where=is_long),
        bw.add_ingredient(["c", "d"], quantity=1),
        bw.prepare_step(upper, select="one", name="shout"),
        bw.prepare_step(upper, select=is_long),
        bw.prepare_step(bw.tokenize("bytes")),
    ]
    return bw.DatasetRecipe(instructions=instructions, seed=3)


def test_a_list_of_instructions_is_the_recipe_that_the_methods_make():
    assert repr(listed()) == repr(chained())
    assert listed().fingerprint == chained().fingerprint
    assert listed().instructions[:-1] == chained().instructions[:-1]


def test_a_recipe_lists_its_instructions_in_the_order_in_which_they_are_followed():
    recipe = bw.DatasetRecipe().add_ingredient(["a"], name="one").prepare_step(upper)
    recipe.prepare_step(bw.tokenize("bytes")).add_ingredient(["b"], name="two")
    names = [getattr(each, "name", "tokenize") for each in recipe.instructions]
    assert names == ["one", "upper", "two", "tokenize"]
    recipe.instructions.clear()
    assert len(recipe.instructions) == 4


def test_one_instruction_can_be_part_of_two_recipes():
    words = bw.add_ingredient(["a"])
    assert bw.DatasetRecipe([words, words]).ingredients[1].name == "memory-2"
    assert bw.DatasetRecipe([words]).ingredients[0].name == "memory"


@pytest.mark.parametrize(
    ("instructions", "named", "where"),
    [
        (["web/*.jsonl"], "a str", {"parameter": "instructions", "instruction": "1 of 1"}),
        (
            [bw.add_ingredient(["a"]), None],
            "a NoneType",
            {"parameter": "instructions", "instruction": "2 of 2"},
        ),
        (
            [bw.add_ingredient(["a"], name="x"), bw.add_ingredient(["b"], name="X")],
            "'X'",
            {"parameter": "name", "instruction": "2 of 2"},
        ),
        (
            [bw.tokenize("bytes"), bw.prepare_step(upper)],
            "tokenize",
            {"parameter": "step", "instruction": "2 of 2"},
        ),
        (
            [bw.add_ingredient(["a"], name="web"), bw.prepare_step(upper, select="wbe")],
            "'wbe'",
            {"parameter": "select", "ingredients": "'web'", "instruction": "2 of 2"},
        ),
        ("web", "a str", {"parameter": "instructions"}),
        (bw.add_ingredient(["a"]), "a Ingredient", {"parameter": "instructions"}),
    ],
)
def test_what_is_not_an_instruction_is_refused_by_its_number(instructions, named, where):
    with refused(bw.SpecError, named, **where):
        bw.DatasetRecipe(instructions=instructions)


# In order


def test_a_step_is_for_the_ingredients_before_it_and_not_for_those_after():
    recipe = bw.DatasetRecipe().add_ingredient(["a"], name="one").prepare_step(upper).add_ingredient(["b"], name="two")
    assert texts_of_recipe(recipe) == ["A", "b"]


def test_a_store_has_the_same_order_of_steps(tmp_path, quiet_bake):
    recipe = bw.DatasetRecipe().add_ingredient(["a"], name="one").prepare_step(upper).add_ingredient(["b"], name="two")
    store = quiet_bake(recipe.prepare_step(bw.tokenize("bytes")), tmp_path / "a.store")
    assert [store.decode(row.tokens) for row in store.rows()] == ["A", "b"]


def test_where_a_step_stands_is_part_of_what_a_recipe_is():
    first = bw.DatasetRecipe().add_ingredient(["a"], name="one").prepare_step(upper).add_ingredient(["b"], name="two")
    last = bw.DatasetRecipe().add_ingredient(["a"], name="one").add_ingredient(["b"], name="two").prepare_step(upper)
    assert first.fingerprint != last.fingerprint


def test_the_spec_of_a_recipe_with_its_steps_at_the_end_is_as_it_always_was():
    # Stores that were baked before are found by it: a change would read and tokenise all of them again.
    recipe = bw.DatasetRecipe(seed=3).add_ingredient(["a"], name="one", quantity=0.5).prepare_step(upper, version="1")
    recipe.prepare_step(bw.tokenize("bytes"))
    assert set(recipe.spec()["ingredients"][0]) == {"name", "text", "format", "where", "quantity", "memory"}
    assert [len(step) for step in recipe.spec()["steps"]] == [2, 2]
    assert recipe.fingerprint == "4b81dfe332581272"


def test_a_changed_step_lets_units_be_that_it_is_not_for(tmp_path, quiet_bake):
    read = []

    def recipe(word):
        made = bw.DatasetRecipe().add_ingredient(["a", "b"], name="one")
        for _ in word:
            made.prepare_step(lambda row: {"text": row["text"] + word})
        made.add_ingredient(["c"], name="two", where=lambda row: read.append("two") or True, version="1")
        made.add_ingredient(["d"], name="three", where=lambda row: read.append("three") or True, version="1")
        return made.prepare_step(lambda row: {"text": row["text"] + word}, select="three").prepare_step(
            bw.tokenize("bytes")
        )

    quiet_bake(recipe("x"), tmp_path / "a.store")
    quiet_bake(recipe("yz"), tmp_path / "a.store")
    assert read == ["two", "three", "three"]


# Select


@pytest.mark.parametrize(
    ("select", "found"),
    [
        (is_long, ["a", "BBB", "c", "DDD"]),
        ("one", ["A", "BBB", "c", "ddd"]),
        (["two"], ["a", "bbb", "C", "DDD"]),
        (("one", "two"), ["A", "BBB", "C", "DDD"]),
        (None, ["A", "BBB", "C", "DDD"]),
    ],
)
def test_a_step_sees_the_rows_that_it_selects_and_others_pass_by(select, found):
    seen = []

    def shout(row):
        seen.append(row["text"])
        return upper(row)

    recipe = bw.DatasetRecipe().add_ingredient(["a", "bbb"], name="one").add_ingredient(["c", "ddd"], name="two")
    assert texts_of_recipe(recipe.prepare_step(shout, select=select, version="1")) == found
    assert [text.upper() for text in seen] == [text for text in found if text.isupper()]


def test_a_store_selects_the_same_rows(tmp_path, quiet_bake):
    recipe = bw.DatasetRecipe().add_ingredient(["a", "bbb"], name="one").add_ingredient(["c", "ddd"], name="two")
    recipe.prepare_step(upper, select=is_long).prepare_step(bw.tokenize("bytes"))
    store = quiet_bake(recipe, tmp_path / "a.store", shuffle=False)
    assert [store.decode(row.tokens) for row in store.rows()] == ["a", "BBB", "c", "DDD"]


def test_what_is_selected_is_part_of_what_a_recipe_is():
    def recipe(**settings):
        return bw.DatasetRecipe().add_ingredient(["a"], name="one").prepare_step(upper, **settings)

    made = [recipe(), recipe(select="one"), recipe(select=is_long), recipe(select=lambda row: len(row["text"]) > 3)]
    assert len({each.fingerprint for each in made}) == 4
    assert recipe(select=is_long).fingerprint == recipe(select=is_long).fingerprint


def test_a_select_that_cannot_be_compared_asks_for_a_version_which_names_both_functions():
    lock = threading.Lock()
    recipe = bw.DatasetRecipe().add_ingredient(["a"])
    with refused(bw.SpecError, function="select= of step 'upper'", remedy="version='1'"):
        recipe.prepare_step(upper, select=lambda row: lock.locked())
    recipe.prepare_step(upper, select=lambda row: lock.locked(), version="1")
    other = bw.DatasetRecipe().add_ingredient(["a"])
    other.prepare_step(upper, select=lambda row: not lock.locked(), version="2")
    assert recipe.fingerprint != other.fingerprint


@pytest.mark.parametrize("select", [5, [], ["one", 5], {"one"}, b"one", True])
def test_a_select_of_another_type_is_refused(select):
    recipe = bw.DatasetRecipe().add_ingredient(["a"], name="one")
    with refused(bw.SpecError, f"select={select!r}", parameter="select", remedy="select=lambda row"):
        recipe.prepare_step(upper, select=select)
    assert recipe.steps == []


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("wbe", "select='web'"), ("later", "after the ingredients")],
)
def test_an_ingredient_that_is_not_there_before_the_step_is_refused(name, remedy):
    recipe = bw.DatasetRecipe().add_ingredient(["a"], name="web")
    with refused(bw.SpecError, f"'{name}'", parameter="select", ingredients="'web'", remedy=remedy):
        recipe.prepare_step(upper, select=["web", name])
    assert recipe.steps == []


def test_tokenize_is_for_all_rows():
    with refused(bw.SpecError, "tokenize", parameter="select", remedy="select="):
        bw.DatasetRecipe().add_ingredient(["a"], name="one").prepare_step(bw.tokenize("bytes"), select="one")


def test_a_select_that_fails_says_at_which_row(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a", "n": 1}\n{"text": "b"}\n')
    recipe = bw.DatasetRecipe().add_ingredient(tmp_path / "a.jsonl")
    recipe.prepare_step(upper, select=lambda row: row["n"] > 0)
    with refused(bw.WorkerError, "select= of step 'upper'", "KeyError: 'n'", file=tmp_path / "a.jsonl", line=2):
        texts_of_recipe(recipe)


# What rows from memory may hold


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.zeros(2, np.float32), np.zeros(2, np.float64)),
        (np.zeros((2, 3)), np.zeros((3, 2))),
        (np.zeros(2), np.ones(2)),
        (np.float32(0.5), np.float32(0.25)),
        (np.int8(1), np.int16(1)),
        (b"one", b"two"),
        (None, np.zeros(0)),
        ([np.zeros(1)], [np.ones(1)]),
        ({"deep": np.zeros(1)}, {"deep": np.ones(1)}),
    ],
)
def test_rows_are_named_by_type_shape_and_content_of_what_they_hold(one, other):
    def named(value):
        return bw.DatasetRecipe().add_ingredient([{"text": "a", "value": value}]).fingerprint

    assert named(one) == named(one)
    assert named(one) != named(other)


def test_tensors_are_named_by_their_content_wherever_it_lies():
    torch = pytest.importorskip("torch")

    def named(value):
        return bw.DatasetRecipe().add_ingredient([{"value": value}]).fingerprint

    assert named(torch.arange(4)[1:3]) == named(torch.tensor([1, 2]))
    assert named(torch.ones(2, dtype=torch.bfloat16)) != named(torch.ones(2, dtype=torch.float16))
    assert named(torch.ones(2, dtype=torch.bfloat16)) != named(torch.zeros(2, dtype=torch.bfloat16))
