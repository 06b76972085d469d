"""A test for user functions whose results depend on more than the row, which would make a store depend on `workers`.

A sample of rows goes through all functions three times: in order, in order again, and backwards in another process.
A function that remembers rows or draws random numbers gives another result the second time; one that depends on earlier
rows, on the process or on its hash seed gives another result the third time.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice, zip_longest
from typing import Any, NamedTuple

from batchwright.baking.recipe import DatasetRecipe, check_recipe
from batchwright.baking.unit import DocumentJob, document_of
from batchwright.baking.unit_rows import RowAt, RowJob, follow_steps, result_fingerprint
from batchwright.baking.work import RowWork, plan_dry, run_tasks
from batchwright.base.errors import SpecError
from batchwright.prepare.documents import read_documents
from batchwright.sources.formats import Malformed

__all__ = ["check_functions"]

_ROWS, _PLACES = 1000, 4
"""The number of sample rows of each ingredient, and the number of units they come from."""

Answers = list[tuple[str, str]]
"""(function, fingerprint of its result) of each function that saw a row, in order."""


class _Sample(NamedTuple):
    job: RowJob
    at: RowAt
    row: dict[str, Any]


def check_functions(recipe: DatasetRecipe, *, on_error: str = "raise") -> None:
    """Raise a SpecError that names the first function with different results for the same row. Writes nothing."""
    check_recipe(recipe)
    samples = [sample for part in plan_dry(recipe, on_error) if _has_functions(part.job) for sample in _samples(part)]
    if not samples:
        return
    answers = dict(run_tasks(partial(_answers, samples), [(1, 2), (-1, 1)], workers=2))
    for sample, first, again, elsewhere in zip(samples, *answers[0], *answers[1], strict=True):
        _compare(sample, first, again, "called again with the same row, it gave another result")
        _compare(sample, first, elsewhere, "in another process, after other rows, it gave another result for this row")


def _compare(sample: _Sample, first: Answers, other: Answers, what: str) -> None:
    if first == other:
        return
    pairs = zip_longest(first, other, fillvalue=("", ""))
    one, another = next(pair for pair in pairs if pair[0] != pair[1])
    # No name: it failed, in another way each time.
    name = one[0] or another[0] or f"a function of {sample.job.ingredient!r}"
    remedy = (
        "use nothing but the row: keep nothing of other rows, draw numbers from random.Random(row['text']), and "
        "sort a set; hash() of text differs between processes"
    )
    place = {"ingredient": sample.job.ingredient, **sample.job.place(sample.at)}
    raise SpecError(f"{name} is not a function of its row: {what}", function=name, **place, remedy=remedy)


def _has_functions(job: RowJob) -> bool:
    return job.where is not None or bool(job.steps) or _has_own_tokenizer(job)


def _has_own_tokenizer(job: RowJob) -> bool:
    return isinstance(job, DocumentJob) and job.tokenize.tokenizer.kind in ("callable", "plugin")


def _samples(part: RowWork) -> Iterator[_Sample]:
    units = part.units[:: max(-(-len(part.units) // _PLACES), 1)]
    for unit in units:
        light = replace(unit, rows=())
        rows = (
            _Sample(part.job, (light, span, number), row)
            for span, number, text, row in read_documents(unit, part.job.formats, part.job.text, part.job.columns)
            if isinstance(text, str)
        )
        yield from islice(rows, -(-_ROWS // len(units)))


def _answers(samples: list[_Sample], step: int, times: int) -> list[list[Answers]]:
    """The answers of the functions to every sample, for each of several times. Step -1 asks them backwards."""
    return [[_answers_to(sample) for sample in samples[::step]][::step] for _ in range(times)]


def _answers_to(sample: _Sample) -> Answers:
    answers = []
    row = copy.deepcopy(sample.row)  # a step may change the row that it gets
    try:
        for name, value in _results(sample.job, sample.at, row):
            answers.append((name, result_fingerprint(value)))
    except Exception as error:  # a failure is an answer too: the bake will name the row
        answers.append(("", type(error).__name__))
    return answers


def _results(job: RowJob, at: RowAt, row: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(function, result) of each function that sees a row."""
    if job.where is not None:
        passed = bool(job.where(row))
        yield f"where= of {job.ingredient!r}", passed
        if not passed:
            return
    for step, seen, after in follow_steps(job, at, row):
        yield f"select= of step {step.name!r}", seen
        if seen:
            yield f"step {step.name!r}", after
        if after is None:
            return
        row = after
    if isinstance(job, DocumentJob) and _has_own_tokenizer(job):
        document: Any = document_of(job, at, row)
        if document and not isinstance(document, Malformed):
            (encoded,) = job.tokenize.encode([document])
            yield f"the tokenizer {job.tokenize.tokenizer.name!r}", getattr(encoded, "tokens", encoded)
