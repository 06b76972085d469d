"""Find user functions whose results depend on more than the row: a store would then depend on how its work was cut.

A sample of rows goes through all functions three times: in order, in order again, and backwards in another process.
A function that remembers rows or draws random numbers gives another result the second time; one that depends on earlier
rows, on the process or on its hash seed gives another result the third time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice, zip_longest
from typing import Any, NamedTuple

from batchwright.baking.engine import run_tasks
from batchwright.baking.recipe import DatasetRecipe, check_recipe
from batchwright.baking.rows import Reading, apply_step, is_selected
from batchwright.baking.unit import Job, document_of
from batchwright.baking.work import Cut, plan_dry
from batchwright.base.errors import SpecError
from batchwright.base.fingerprint import fingerprint_value, function_fingerprint
from batchwright.prepare.documents import read_documents
from batchwright.sources.faults import place
from batchwright.sources.units import Malformed, Unit

__all__ = ["check_functions"]

_ROWS, _PLACES = 1000, 4
"""Of each ingredient, and from how many of its units."""

Answers = list[tuple[str, str]]
"""(function, fingerprint of its result) of each function that saw a row, in order."""


class _Sample(NamedTuple):
    job: Reading
    unit: Unit
    span: int
    row_number: int
    row: dict[str, Any]


def check_functions(recipe: DatasetRecipe, *, on_error: str = "raise") -> None:
    """Raise a SpecError that names the first function that does not answer every row alike. Writes nothing."""
    check_recipe(recipe)
    samples = [sample for part in plan_dry(recipe, on_error) if _has_functions(part.job) for sample in _samples(part)]
    if not samples:
        return
    answers = dict(run_tasks(partial(_answers, samples), [(False, 2), (True, 1)], workers=2))
    for sample, first, again, elsewhere in zip(samples, *answers[0], *answers[1], strict=True):
        _compare(sample, first, again, "called again with the same row, it gave another result")
        _compare(sample, first, elsewhere, "in another process, after other rows, it gave another result for this row")


def _compare(sample: _Sample, first: Answers, other: Answers, what: str) -> None:
    for one, another in zip_longest(first, other):
        if one != another:
            named = [name for name, _ in filter(None, (one, another)) if name]
            name = named[0] if named else f"a function of {sample.job.ingredient!r}"  # it failed, each time otherwise
            raise SpecError(
                f"{name} is not a function of its row: {what}",
                function=name,
                ingredient=sample.job.ingredient,
                **place(sample.unit, sample.span, sample.row_number, sample.job.formats),
                remedy="use nothing but the row: keep nothing of other rows, draw numbers from "
                "random.Random(row['text']), and sort a set; hash() of text differs between processes",
            )


def _has_functions(job: Reading) -> bool:
    return job.where is not None or bool(job.steps) or _has_own_tokenizer(job)


def _has_own_tokenizer(job: Reading) -> bool:
    return isinstance(job, Job) and job.tokenize.tokenizer.kind in ("callable", "plugin")


def _samples(part: Cut) -> Iterator[_Sample]:
    units = part.units[:: max(-(-len(part.units) // _PLACES), 1)]
    for unit in units:
        documents = read_documents(unit, part.job.formats, part.job.text, part.job.columns)
        light = Unit(unit.spans, unit.num_bytes, None if unit.rows is None else (), unit.first_row)
        rows = (
            _Sample(part.job, light, span, row_number, row)
            for span, row_number, text, row in documents
            if isinstance(text, str)
        )
        yield from islice(rows, -(-_ROWS // len(units)))


def _answers(samples: list[_Sample], backwards: bool, times: int) -> list[list[Answers]]:
    """What the functions answer to every sample, in the order of the samples, for each time that they are asked."""
    step = -1 if backwards else 1
    return [[_answers_to(sample) for sample in samples[::step]][::step] for _ in range(times)]


def _answers_to(sample: _Sample) -> Answers:
    own = sample._replace(row=copy.deepcopy(sample.row))  # a step may change the row that it is given
    answers = []
    try:
        for name, value in _results(*own):
            answers.append((name, _fingerprint_of(value)))
    except Exception as error:  # an answer too: the bake will say of which row
        answers.append(("", type(error).__name__))
    return answers


def _results(job: Reading, unit: Unit, span: int, row_number: int, row: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(function, result) of each function that sees a row."""
    if job.where is not None:
        passed = bool(job.where(row))
        yield f"where= of {job.ingredient!r}", passed
        if not passed:
            return
    for step in job.steps:
        seen = is_selected(job, step, unit, span, row_number, row)
        yield f"select= of step {step.name!r}", seen
        if not seen:
            continue
        after = apply_step(job, step, unit, span, row_number, row)
        yield f"step {step.name!r}", after
        if after is None:
            return
        row = after
    if isinstance(job, Job) and _has_own_tokenizer(job):
        document = document_of(job, unit, span, row_number, row)
        if document and not isinstance(document, Malformed):
            encode: Callable[[list[Any]], list[Any]] = job.tokenize.encode
            (encoded,) = encode([document])
            yield f"the tokenizer {job.tokenize.tokenizer.name!r}", getattr(encoded, "tokens", encoded)


def _fingerprint_of(value: Any) -> str:
    """As rows are compared, or as what a function holds; a value that neither knows is not judged."""
    try:
        return fingerprint_value(value)
    except (TypeError, ValueError, RecursionError):
        pass
    try:
        return function_fingerprint(value, name="a result")
    except SpecError:
        return ""
