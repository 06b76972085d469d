"""`bake(..., check=True)` names a user function whose results depend on more than its row, and writes nothing."""

from __future__ import annotations

import itertools
import json
import random
import time

import numpy as np
import pytest

import batchwright as bw
from refusals import refused
from shared import slow

ROWS = [{"text": f"row {n}"} for n in range(300)]


def remembers():
    seen: set[str] = set()

    def step(row):
        if row["text"] in seen:
            return None
        seen.add(row["text"])
        return row

    return step


def counts():
    numbers = itertools.count()
    return lambda row: {**row, "text": f"{next(numbers)}"}


def keeps_the_first():
    first: dict[str, str] = {}
    return lambda row: {**row, "text": first.setdefault("text", row["text"])}


def shares_a_generator():
    numbers = random.Random(0)
    return lambda row: {**row, "text": f"{numbers.random()}"}


IMPURE = {
    "remembers": remembers,
    "counts": counts,
    "keeps the first": keeps_the_first,
    "shares a generator": shares_a_generator,
    "draws numbers": lambda: lambda row: row if random.random() < 0.5 else None,
    "hashes text": lambda: lambda row: {**row, "text": str(hash(row["text"]))},
    "orders a set": lambda: lambda row: {**row, "text": "".join(set(row["text"]))},
    "reads the clock": lambda: lambda row: {**row, "at": time.time_ns()},
}


def recipe_of(*steps, rows=ROWS, where=None, tokenizer="bytes"):
    recipe = bw.DatasetRecipe().add_ingredient(rows, name="rows", where=where)
    for number, step in enumerate(steps):
        recipe.prepare_step(step, name=f"step {number}", version="1")
    return recipe if tokenizer is None else recipe.prepare_step(bw.tokenize(tokenizer))


@pytest.mark.parametrize(
    "kind", [slow(kind) if kind in ("keeps the first", "draws numbers", "orders a set") else kind for kind in IMPURE]
)
def test_a_step_that_is_not_a_function_of_its_row_is_named(tmp_path, kind):
    recipe = recipe_of(lambda row: {**row, "text": row["text"].upper()}, IMPURE[kind](), lambda row: dict(row))
    with refused(bw.SpecError, function="step 'step 1'", ingredient="rows", file="<memory>"):
        bw.bake(recipe, tmp_path / "a.store", workers=0, check=True, show_progress=False)
    assert not (tmp_path / "a.store").exists()


def test_functions_of_their_rows_pass_and_the_store_is_the_same(tmp_path):
    def step(row):
        row["text"] += f" {random.Random(row['text']).random()}"  # changes the row that it was given
        return {**row, "nan": float("nan"), "odd": "\ud800", ("a", "key"): {3, 4}, "array": np.arange(3)}

    recipe = recipe_of(step, lambda row: row, where=lambda row: len(row["text"]) > 5)
    checked, plain = (
        bw.bake(recipe, tmp_path / f"{check}.store", workers=0, check=check, show_progress=False)
        for check in (True, False)
    )
    assert len(checked) == 290
    assert checked.fingerprint == plain.fingerprint


def test_rows_of_a_buffer_are_checked_too():
    rows = [{"label": n, "array": np.arange(3)} for n in range(5)]
    pure, impure = (lambda row: {**row, "label": -row["label"]}, remembers())
    assert len(bw.bake(recipe_of(pure, rows=rows, tokenizer=None), check=True, show_progress=False)) == 5
    with refused(bw.SpecError, function="step 'step 0'"):
        bw.bake(recipe_of(impure, rows=[{"text": "a"}], tokenizer=None), check=True, show_progress=False)


def test_a_filter_is_named_with_its_ingredient(tmp_path):
    with refused(bw.SpecError, function="where= of 'rows'"):
        bw.bake(recipe_of(where=remembers()), tmp_path / "a.store", workers=0, check=True)


def test_a_selection_is_named_with_its_step(tmp_path):
    recipe = bw.DatasetRecipe().add_ingredient(ROWS, name="rows")
    recipe.prepare_step(lambda row: row, name="some", select=remembers(), version="1")
    with refused(bw.SpecError, function="select= of step 'some'"):
        bw.bake(recipe, check=True, show_progress=False)


@pytest.mark.parametrize("chat", [False, True])
def test_a_tokenizer_that_is_a_function_is_checked_too(tmp_path, chat):
    ids = itertools.count()
    if chat:
        tokenizer = lambda text, numbers=ids: [next(numbers) % 97 for _ in text]
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        step = bw.chat(bw.prepare.resolve_tokenizer(tokenizer, vocab_size=97, version="1"), "chatml")
        recipe = bw.DatasetRecipe().add_ingredient([{"messages": messages}] * 3, name="rows").prepare_step(step)
    else:
        step = bw.tokenize(lambda text, numbers=ids: [next(numbers) % 7], vocab_size=9, version="1")
        recipe = bw.DatasetRecipe().add_ingredient(ROWS, name="rows").prepare_step(step)
    with refused(bw.SpecError, "the tokenizer"):
        bw.bake(recipe, tmp_path / "a.store", workers=0, check=True)


def test_the_row_that_differs_is_named_by_file_and_line(tmp_path):
    texts = [json.dumps({"text": f"row {n % 9}"}) for n in range(20)]
    (tmp_path / "a.jsonl").write_text("\n".join(texts) + "\n")

    seen = remembers()

    def step(row):
        return row if row["text"] != "row 4" else seen(row)

    with refused(bw.SpecError, file=tmp_path / "a.jsonl", line=5):
        bw.bake(recipe_of(step, rows=tmp_path / "a.jsonl"), tmp_path / "a.store", workers=0, check=True)


def test_a_function_that_fails_fails_as_in_a_bake(tmp_path):
    with refused(bw.WorkerError, "step 0", "ZeroDivisionError", file="<memory>", row=0):
        bw.bake(recipe_of(lambda row: 1 / 0), tmp_path / "a.store", workers=0, check=True)


def test_malformed_rows_are_for_the_bake_to_judge(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\nnot JSON\n{"text": "better"}\n')
    recipe = recipe_of(lambda row: row, rows=tmp_path / "a.jsonl")
    store = bw.bake(recipe, tmp_path / "a.store", workers=0, on_error="skip", check=True, show_progress=False)
    assert len(store) == 2


def test_the_functions_of_this_process_are_left_as_they_were(tmp_path):
    step = remembers()
    with refused(bw.SpecError):
        bw.bake(recipe_of(step), tmp_path / "a.store", workers=0, check=True)
    assert step({"text": "row 0"}) is not None
