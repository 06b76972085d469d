"""What a recipe will do, with counts, before it is done."""

from __future__ import annotations

import os

import numpy as np
import pytest

import batchwright as bw
from refusals import refused


def numbered(count):
    return [{"text": f"row {n}", "n": n} for n in range(count)]


def is_even(row):
    return row["n"] % 2 == 0


def test_an_explanation_says_what_every_instruction_does_in_order():
    recipe = bw.DatasetRecipe(seed=3).add_ingredient(numbered(10), name="one", where=is_even, quantity=4)
    recipe.prepare_step(lambda row: {**row, "n": 0}, name="zero", select=lambda row: row["n"] > 0)
    recipe.add_ingredient(["late", ""], name="two").prepare_step(lambda row: row if row["text"] else None, name="full")
    explanation = bw.explain(recipe)
    zero = sum(n > 0 for n in bw.bake(bw.DatasetRecipe(recipe.instructions[:1], seed=3), workers=0).to_pydict()["n"])
    assert str(explanation).splitlines() == [
        "DatasetRecipe, seed 3",
        "├─ one: 10 rows from memory, where is_even, 4 of them: 10 rows read, 5 not where, 1 beyond quantity, 4 kept",
        f"├─ then zero, only where <lambda>: {zero} seen, {4 - zero} passed by, {zero} changed, 0 dropped",
        "├─ two: 2 rows from memory: 2 rows read, 2 kept",
        "├─ then full: 6 seen, 0 passed by, 0 changed, 1 dropped",
        "└─ 5 rows in the end",
    ]
    assert explanation.num_rows == 5 == len(bw.bake(recipe, workers=0, show_progress=False))


def test_steps_by_name_pass_by_the_other_ingredients():
    recipe = bw.DatasetRecipe().add_ingredient(numbered(2), name="one").add_ingredient(numbered(3), name="two")
    recipe.prepare_step(lambda row: {**row, "n": -1}, select="two", name="mark")
    assert bw.explain(recipe).instructions[-1].counts == {"seen": 3, "passed by": 2, "changed": 3, "dropped": 0}


def test_documents_are_counted_as_a_bake_counts_them_and_nothing_is_written(tmp_path, monkeypatch, quiet_bake):
    monkeypatch.chdir(tmp_path)
    recipe = bw.DatasetRecipe().add_ingredient(["a", "", "b"], name="one").prepare_step(bw.tokenize("bytes"))
    explanation = bw.explain(recipe)
    assert explanation.instructions[-1].counts == {"seen": 3, "empty text": 1, "documents": 2}
    assert os.listdir(tmp_path) == []
    assert explanation.num_rows == quiet_bake(recipe, tmp_path / "a.store").num_rows


def test_conversations_are_counted_by_what_can_be_rendered():
    rows = [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]},
        {"messages": [{"role": "user"}]},
    ]
    recipe = bw.DatasetRecipe().add_ingredient(rows).prepare_step(bw.chat("bytes", "plain"))
    explanation = bw.explain(recipe, on_error="skip")
    assert explanation.num_rows == 1
    assert explanation.instructions[-1].counts["seen"] == 2


@pytest.mark.parametrize(
    ("step", "changed"),
    [
        (lambda row: row, 0),
        (lambda row: dict(row), 0),
        (lambda row: {**row, "a": row["a"].copy()}, 0),
        (lambda row: {**row, "a": row["a"] + 1}, 1),
        (lambda row: {**row, "a": row["a"].astype(np.float64)}, 1),
        (lambda row: {**row, "new": None}, 1),
        (lambda row: row["nested"].append(3) or row, 1),
    ],
)
def test_a_row_is_changed_when_a_value_or_its_type_is(step, changed):
    rows = [{"a": np.arange(3, dtype=np.float32), "nan": float("nan"), "nested": [1, 2]}]
    recipe = bw.DatasetRecipe().add_ingredient(rows).prepare_step(step, name="step")
    assert bw.explain(recipe).instructions[-1].counts["changed"] == changed


def test_malformed_rows_are_raised_or_counted_as_by_a_bake(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"n": 1}\nno json\n')
    recipe = bw.DatasetRecipe().add_ingredient(tmp_path / "a.jsonl")
    with refused(bw.SourceError, "JSON", file=tmp_path / "a.jsonl", line=2):
        bw.explain(recipe)
    counts = bw.explain(recipe, on_error="skip").instructions[0].counts
    assert counts == {"rows read": 2, "malformed row": 1, "kept": 1}


@pytest.mark.parametrize("recipe", [bw.DatasetRecipe(), "recipe", None])
def test_what_cannot_be_baked_cannot_be_explained(recipe):
    with refused(bw.SpecError, parameter="recipe"):
        bw.explain(recipe)
