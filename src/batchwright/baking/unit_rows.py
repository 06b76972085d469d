"""The rows of one unit of work: read, filtered with a reason for each dropped row, and changed by the user's steps.

Pure functions of (job, unit): the same in every process.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.base.errors import BatchwrightError, SourceError, SpecError, WorkerError
from batchwright.base.fingerprint import fingerprint_value, function_fingerprint
from batchwright.prepare.documents import TextColumn, read_documents
from batchwright.prepare.rows import RowStep
from batchwright.sources.formats import Format, Malformed
from batchwright.sources.memory import TableRows
from batchwright.sources.units import EndOfSpan, Unit, error_of, failure_of, place

Row = dict[str, Any]
RowAt = tuple[Unit, int, int]
"""The place of a row: its unit, the span of the unit, and its number in the span. Plain, because every row has one."""

_EXAMPLES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RowJob:
    """The description of reading and preparing one ingredient's rows. Sent to workers by value."""

    ingredient: str
    text: TextColumn | None
    """None for rows that need no text."""
    where: Callable[[Row], Any] | None
    steps: list[RowStep]
    seed: int
    on_error: str
    formats: dict[str, Format]
    columns: tuple[str, ...] | None
    """The columns that are needed; None means all, for functions that get the row."""

    def place(self, at: RowAt) -> dict[str, Any]:
        return place(*at, self.formats)

    def failure(self, what: str, error: Exception, at: RowAt) -> WorkerError:
        return failure_of(what, error, *at, self.formats)


@dataclass(slots=True)
class UnitReport:
    """Counts of a unit's rows."""

    key: str = ""
    rows_read: int = 0
    documents: int = 0
    tokens: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    """Dropped rows by reason."""
    examples: list[tuple[str, int, str]] = field(default_factory=list)
    """A few of the malformed: (file, row in span, reason)."""
    errors: int = 0
    """Malformed rows, passed over because on_error='skip'."""
    special: dict[str, int] = field(default_factory=dict)
    """Occurrences of each special token's name in the documents."""
    special_documents: int = 0
    span_rows: list[int] = field(default_factory=list)
    span_hashes: list[str] = field(default_factory=list)

    def drop(self, reason: str, number: int = 1) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + number

    def count_special(self, names: list[str]) -> None:
        """Count the names of special tokens in one document."""
        if names:
            self.special_documents += 1
            self.special = dict(Counter(self.special) + Counter(names))

    def finish(self, documents: int) -> None:
        self.documents, self.dropped = documents, dict(sorted(self.dropped.items()))


def total_report(
    units: Sequence[Unit], reports: Sequence[UnitReport], first_rows: Sequence[Sequence[int]]
) -> UnitReport:
    """The report of several units together. Its examples have the numbers of rows in their files."""
    total = UnitReport()
    for unit, report, rows in zip(units, reports, first_rows, strict=True):
        total.rows_read += report.rows_read
        total.tokens += report.tokens
        total.errors += report.errors
        total.special_documents += report.special_documents
        total.special = dict(Counter(total.special) + Counter(report.special))
        for reason, number in report.dropped.items():
            total.drop(reason, number)
        first_of = {span.path: row for span, row in zip(unit.spans, rows, strict=False)}
        total.examples += [(file, row + first_of.get(file, rows[0]), reason) for file, row, reason in report.examples]
    total.finish(sum(report.documents for report in reports))
    return total


def dropped_in_words(dropped: Mapping[str, int]) -> str:
    """
    >>> dropped_in_words({"empty text": 1200, "not where": 3})
    '1,200 empty text, 3 not where'
    """
    return ", ".join(f"{count:,} {reason}" for reason, count in dropped.items())


def examples_in_words(examples: Iterable[Sequence[Any]]) -> list[str]:
    """The first examples of malformed rows, a line for each."""
    return [f"  for example {file}, row {row}: {reason}" for file, row, reason in list(examples)[:3]]


def read_rows(job: RowJob, unit: Unit, selected: Any) -> tuple[UnitReport, list[Row], NDArray[np.int64]]:
    """(report, the rows of a unit after all steps, the span and number of each)."""
    report = UnitReport()
    rows: list[Row] = []
    places: list[tuple[int, int]] = []
    with unchanged_while_read(unit):
        for at, row in prepared_rows(job, unit, report, selected):
            rows.append(row)
            places.append(at[1:])
    report.finish(len(rows))
    return report, rows, np.array(places, np.int64).reshape(-1, 2)


def find_passing(job: RowJob, unit: Unit) -> tuple[Any, list[int]]:
    """((span, number) of every row that passes `where`, rows of each span). A quantity chooses from these."""
    if job.columns == () and isinstance(unit.rows, TableRows):  # no function looks at a value, so all of them pass
        numbers = np.arange(len(unit.rows))
        return np.column_stack([np.zeros_like(numbers), numbers]), [len(numbers)]
    report = UnitReport()
    passing = [at[1:] for at, _ in _passing_rows(job, unit, report)]
    return np.array(passing, np.int64).reshape(-1, 2), report.span_rows


def prepared_rows(job: RowJob, unit: Unit, report: UnitReport, selected: Any = None) -> Iterator[tuple[RowAt, Row]]:
    """Kept rows after the user's steps. Rows that a step drops are counted."""
    for at, row in kept_rows(job, unit, report, selected):
        for step, _, after in follow_steps(job, at, row):
            if after is None:
                report.drop(f"dropped by step {step.name!r}")
                break
            row = after
        else:
            yield at, row


def kept_rows(job: RowJob, unit: Unit, report: UnitReport, selected: Any = None) -> Iterator[tuple[RowAt, Row]]:
    """Rows that pass `where`; with `selected`, those with these numbers among them."""
    rows = _passing_rows(job, unit, report)
    if selected is None:
        return rows
    return _selected(rows, set(selected.tolist()), report)


def _selected(rows: Iterator[tuple[RowAt, Row]], numbers: set[int], report: UnitReport) -> Iterator[tuple[RowAt, Row]]:
    for number, row in enumerate(rows):
        if number in numbers:
            yield row
        else:
            report.drop("beyond quantity")


def _passing_rows(job: RowJob, unit: Unit, report: UnitReport) -> Iterator[tuple[RowAt, Row]]:
    """Rows that can be read, have text, and pass `where`. Others are counted, or raise an error."""
    report.span_rows = [0] * max(len(unit.spans), 1)
    for span, number, text, row in read_documents(unit, job.formats, job.text, job.columns):
        if isinstance(text, EndOfSpan):
            report.span_rows[span] = number
            continue
        at = (unit, span, number)
        if isinstance(text, Malformed):
            pass_over(job, at, text, report)
            report.rows_read += max(text.rows, 1)
            continue
        report.rows_read += 1
        if job.where is None or _passes(job, job.where, at, row):
            yield at, row
        else:
            report.drop("not where")


def _passes(job: RowJob, where: Callable[[Row], Any], at: RowAt, row: Row) -> bool:
    try:
        return bool(where(row))
    except Exception as error:
        raise job.failure(f"where= of {job.ingredient!r}", error, at) from error


def pass_over(job: RowJob, at: RowAt, fault: Malformed, report: UnitReport) -> None:
    """Raise for a malformed row, or count it with on_error='skip'."""
    if job.on_error == "raise":
        raise error_of(fault, *at, job.formats)
    report.drop(fault.kind, max(fault.rows, 1))
    report.errors += max(fault.rows, 1)
    if len(report.examples) < _EXAMPLES:
        unit, span, number = at
        file = unit.spans[span].path if unit.spans else "<memory>"
        why = fault.kind
        if fault.reason:
            why += f": {fault.reason}"
        if fault.turn is not None:
            why += f" (message {fault.turn})"
        report.examples.append((file, number, why))


def follow_steps(job: RowJob, at: RowAt, row: Row) -> Iterator[tuple[RowStep, bool, Row | None]]:
    """(step, whether it saw the row, the row after it) for each step. The row is None, at last, for a dropped one."""
    for step in job.steps:
        if not is_selected(job, step, at, row):
            yield step, False, row
            continue
        after = apply_step(job, step, at, row)
        yield step, True, after
        if after is None:
            return
        row = after


def is_selected(job: RowJob, step: RowStep, at: RowAt, row: Row) -> bool:
    """Whether a step sees a row."""
    if step.select is None:
        return True
    if isinstance(step.select, tuple):
        return job.ingredient in step.select
    try:
        return bool(step.select(row))
    except Exception as error:
        raise job.failure(f"select= of step {step.name!r}", error, at) from error


def apply_step(job: RowJob, step: RowStep, at: RowAt, row: Row) -> Row | None:
    """The row after a step. An error names the row."""
    try:
        return step(row)
    except BatchwrightError as error:
        error.where |= job.place(at)
        raise
    except Exception as error:
        raise job.failure(f"step {step.name!r}", error, at) from error


def result_fingerprint(value: Any) -> str:
    """The fingerprint of a function's result; empty for a value that cannot be compared."""
    try:
        return fingerprint_value(value)
    except (TypeError, ValueError, RecursionError):
        pass
    try:
        return function_fingerprint(value, name="a result")
    except SpecError:
        return ""


@contextlib.contextmanager
def unchanged_while_read(unit: Unit) -> Iterator[None]:
    """Raise if a file of the unit was written to inside the block."""
    before = [_state_of(span.path) for span in unit.spans]
    yield
    for span, state in zip(unit.spans, before, strict=True):
        if _state_of(span.path) != state:
            remedy = "bake again when nobody writes to it: what is done already is kept"
            raise SourceError("this file was changed while it was read", file=span.path, remedy=remedy)


def _state_of(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns
