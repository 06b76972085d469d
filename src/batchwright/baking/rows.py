"""The rows of one unit of work: read, kept or dropped each with a reason, and changed by the user's steps.

Pure functions of (reading, unit): they run the same in this process or in any other. What becomes of the rows
(documents of a store, rows of a buffer, counts of an explanation) is not said here.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.base.errors import BatchwrightError, SourceError
from batchwright.prepare.documents import read_documents
from batchwright.prepare.rows import RowStep
from batchwright.prepare.text_column import TextColumn
from batchwright.sources.faults import error_of, failure_of, place
from batchwright.sources.formats import Format
from batchwright.sources.memory import TableRows
from batchwright.sources.units import EndOfSpan, Malformed, Unit

__all__ = [
    "Dropped",
    "Reading",
    "UnitReport",
    "apply_step",
    "find_passing",
    "is_selected",
    "kept_rows",
    "pass_over",
    "passing_rows",
    "read_rows",
    "stepped",
    "unchanged_while_read",
]

Row = dict[str, Any]
Placed = tuple[int, int, Row]
"""(span, row in span, row)."""

_EXAMPLES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What is read of one ingredient, and what its rows go through. Travels to workers by value."""

    ingredient: str
    text: TextColumn | None
    """None where rows are taken as they are."""
    where: Callable[[Row], Any] | None
    steps: list[RowStep]
    seed: int
    on_error: str
    formats: dict[str, Format]
    columns: tuple[str, ...] | None
    """Those that are needed; None means all, for functions that get the row."""


@dataclass(slots=True)
class UnitReport:
    """What became of a unit's rows."""

    key: str = ""
    rows_read: int = 0
    documents: int = 0
    tokens: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    examples: list[tuple[str, int, str]] = field(default_factory=list)
    """A few of the dropped: (file, row in span, reason)."""
    errors: int = 0
    """How many of the dropped were malformed, and passed over because on_error='skip'."""
    special: dict[str, int] = field(default_factory=dict)
    """How often the documents' texts hold the name of each special token."""
    special_documents: int = 0
    span_rows: list[int] = field(default_factory=list)
    span_hashes: list[str] = field(default_factory=list)

    def count_special(self, names: list[str]) -> None:
        """Count the names of special tokens in one document."""
        if names:
            self.special_documents += 1
            self.special = dict(Counter(self.special) + Counter(names))


@dataclass(frozen=True, slots=True)
class Dropped:
    """By which step a row was dropped."""

    step: str


def read_rows(job: Reading, unit: Unit, selected: Any) -> tuple[UnitReport, list[Row], NDArray[np.int64]]:
    """(what became of a unit's rows, those that are left, where each is: span and row in span)."""
    report, dropped = UnitReport(), Counter[str]()
    rows: list[Row] = []
    places: list[tuple[int, int]] = []
    with unchanged_while_read(unit):
        for span, row_number, row in kept_rows(job, unit, report, dropped, selected):
            after = stepped(job, unit, span, row_number, row)
            if isinstance(after, Dropped):
                dropped[f"dropped by step {after.step!r}"] += 1
            else:
                rows.append(after)
                places.append((span, row_number))
    report.dropped, report.documents = dict(sorted(dropped.items())), len(rows)
    return report, rows, np.array(places, np.int64).reshape(-1, 2)


def find_passing(job: Reading, unit: Unit) -> tuple[Any, list[int]]:
    """((span, row) of every row that passes `where`, rows of each span): what a quantity chooses from."""
    if job.columns == () and isinstance(unit.rows, TableRows):  # nobody looks at a value, so that all of them pass
        numbers = np.arange(len(unit.rows))
        return np.column_stack([np.zeros_like(numbers), numbers]), [len(numbers)]
    report = UnitReport()
    passing = [(span, row_number) for span, row_number, _ in passing_rows(job, unit, report, Counter())]
    return np.array(passing, np.int64).reshape(-1, 2), report.span_rows


def kept_rows(
    job: Reading, unit: Unit, report: UnitReport, dropped: Counter[str], selected: Any = None
) -> Iterator[Placed]:
    """Rows that pass `where` and, where a quantity has chosen, were `selected`: by their numbers among those."""
    rows = passing_rows(job, unit, report, dropped)
    if selected is None:
        yield from rows
        return
    keep = set(selected.tolist())
    for ordinal, row in enumerate(rows):
        if ordinal in keep:
            yield row
        else:
            dropped["beyond quantity"] += 1


def passing_rows(job: Reading, unit: Unit, report: UnitReport, dropped: Counter[str]) -> Iterator[Placed]:
    """Rows that can be read, have text, and pass `where`. All others are counted, or raised."""
    report.span_rows = [0] * max(len(unit.spans), 1)
    for span, row_number, text, row in read_documents(unit, job.formats, job.text, job.columns):
        if isinstance(text, EndOfSpan):
            report.span_rows[span] = row_number
            continue
        if isinstance(text, Malformed):
            pass_over(job, unit, span, row_number, text, report, dropped)
            report.rows_read += max(text.rows, 1)
            continue
        report.rows_read += 1
        if job.where is not None:
            try:
                passes = job.where(row)
            except Exception as error:
                what = f"where= of {job.ingredient!r}"
                raise failure_of(what, error, unit, span, row_number, job.formats) from error
            if not passes:
                dropped["not where"] += 1
                continue
        yield span, row_number, row


def pass_over(
    job: Reading, unit: Unit, span: int, row_number: int, fault: Malformed, report: UnitReport, dropped: Counter[str]
) -> None:
    """Raise what is wrong with a row, or count it where on_error says so."""
    if job.on_error == "raise":
        raise error_of(fault, unit, span, row_number, job.formats)
    lost = max(fault.rows, 1)
    dropped[fault.kind] += lost
    report.errors += lost
    if len(report.examples) < _EXAMPLES:
        file = unit.spans[span].path if unit.spans else "<memory>"
        why = f"{fault.kind}: {fault.reason}" if fault.reason else fault.kind
        report.examples.append((file, row_number, why if fault.turn is None else f"{why} (message {fault.turn})"))


def stepped(job: Reading, unit: Unit, span: int, row_number: int, row: Row) -> Row | Dropped:
    """A row after the user's steps."""
    for step in job.steps:
        if not is_selected(job, step, unit, span, row_number, row):
            continue
        after = apply_step(job, step, unit, span, row_number, row)
        if after is None:
            return Dropped(step.name)
        row = after
    return row


def is_selected(job: Reading, step: RowStep, unit: Unit, span: int, row_number: int, row: Row) -> bool:
    """Whether a step sees a row."""
    if step.select is None:
        return True
    if isinstance(step.select, tuple):
        return job.ingredient in step.select
    try:
        return bool(step.select(row))
    except Exception as error:
        what = f"select= of step {step.name!r}"
        raise failure_of(what, error, unit, span, row_number, job.formats) from error


def apply_step(job: Reading, step: RowStep, unit: Unit, span: int, row_number: int, row: Row) -> Row | None:
    """What a step makes of a row. An error says which row it was."""
    try:
        return step(row)
    except BatchwrightError as error:
        error.where |= place(unit, span, row_number, job.formats)
        raise
    except Exception as error:
        raise failure_of(f"step {step.name!r}", error, unit, span, row_number, job.formats) from error


@contextlib.contextmanager
def unchanged_while_read(unit: Unit) -> Iterator[None]:
    """See that nobody writes to a unit's files while they are read."""
    before = [_state_of(span.path) for span in unit.spans]
    yield
    for span, state in zip(unit.spans, before, strict=True):
        if _state_of(span.path) != state:
            raise SourceError(
                "this file was changed while it was read",
                file=span.path,
                remedy="bake again when nobody writes to it: what is done already is kept",
            )


def _state_of(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns
