"""A user's function as a step: it gets a row, and returns a row or None."""

from __future__ import annotations

import pytest

import batchwright as bw
from refusals import refused
from shared import sorted_texts


@pytest.fixture
def bake(tmp_path):
    def run(*steps, rows=("one", "two", "three"), **settings):
        recipe = bw.DatasetRecipe().add_ingredient(list(rows), name="a")
        for step in steps:
            recipe.prepare_step(step)
        recipe.prepare_step(bw.tokenize("bytes"))
        return bw.bake(recipe, tmp_path / "a.store", workers=0, show_progress=False, **settings)

    return run


def test_steps_run_in_their_order(bake):
    store = bake(lambda row: {"text": row["text"] + "!"}, lambda row: {"text": row["text"].upper()})
    assert sorted_texts(store) == ["ONE!", "THREE!", "TWO!"]


def test_none_drops_a_row_and_the_report_counts_it_under_the_step(bake):
    def short(row):
        return row if len(row["text"]) < 4 else None

    store = bake(short)
    assert sorted_texts(store) == ["one", "two"]
    assert store.report["ingredients"]["a"]["dropped"] == {"dropped by step 'short'": 1}


def test_a_text_that_a_step_empties_is_dropped_and_counted(bake):
    store = bake(lambda row: {"text": row["text"].replace("two", "")})
    assert store.report["ingredients"]["a"]["dropped"] == {"empty text": 1}


@pytest.mark.parametrize(("returned", "kind"), [(True, "bool"), ("text", "str"), ([], "list")])
def test_a_step_that_returns_no_row_is_told_so_with_the_row(bake, returned, kind):
    with refused(bw.SourceError, kind, step="<lambda>", file="<memory>", row=1, remedy="None"):
        bake(lambda row: returned if row["text"] == "two" else row)


def test_a_step_that_fails_is_named_with_the_row_and_its_own_line(bake):
    def careless(row):
        return {"text": row["body"]}

    with refused(bw.WorkerError, "'careless'", "KeyError: 'body'", row=0) as caught:
        bake(careless)
    assert caught.value.where["at"].startswith(__file__)


def test_where_sees_the_text_column_under_its_own_name_and_as_text(tmp_path):
    seen = []
    recipe = bw.DatasetRecipe().add_ingredient(
        [{"body": "hello"}], text="body", where=lambda row: seen.append(dict(row)) or True, version="1"
    )
    bw.bake(recipe.prepare_step(bw.tokenize("bytes")), tmp_path / "a.store", workers=0, show_progress=False)
    assert seen == [{"body": "hello", "text": "hello"}]
