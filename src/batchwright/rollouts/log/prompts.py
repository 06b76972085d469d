"""Prompts by number: the rows of any source, and which row is prompt number so and so of a run."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from batchwright.base.errors import SampleError, SourceError, SpecError
from batchwright.base.fingerprint import fingerprint, fingerprint_rows
from batchwright.order.permute import permutation
from batchwright.rollouts.log.groups import checked_prompt
from batchwright.sources import Malformed, cut_files, cut_rows, format_for, list_files, looks_like_paths, read_unit
from batchwright.sources.faults import place
from batchwright.sources.formats import known_extensions
from batchwright.sources.memory import TableRows, table_rows
from batchwright.sources.units import EndOfSpan

__all__ = ["Job", "Prompts", "read_prompts", "rows_of"]

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt that was leased: `group_size` responses to it are wanted."""

    ordinal: int
    """Number of the prompt in the run, epoch after epoch."""
    prompt: Any
    """Text, token ids, or messages."""
    attempt: int
    """From 1: how often it was issued."""
    epoch: int
    row: int
    """Row of the source."""
    fields: Row = field(repr=False)
    """The whole row: what a reward function needs."""
    log_id: str = field(repr=False)


def rows_of(ordinals: list[int], *, num_prompts: int, seed: int, shuffle: bool) -> tuple[list[int], list[int]]:
    """(epochs, rows) of prompts: every row once in each epoch, in an order of its own.

    >>> rows_of([0, 3, 6], num_prompts=4, seed=0, shuffle=False)
    ([0, 0, 1], [0, 3, 2])
    >>> sorted(rows_of([4, 5, 6, 7], num_prompts=4, seed=0, shuffle=True)[1])
    [0, 1, 2, 3]
    """
    epoch, number = np.divmod(np.array(ordinals, np.int64), num_prompts)
    if shuffle:
        for each in np.unique(epoch).tolist():
            mine = epoch == each
            number[mine] = permutation(num_prompts, seed, "prompts", each).at(number[mine])
    return epoch.tolist(), number.tolist()


class Prompts:
    """Rows that were read, and named by their content."""

    def __init__(self, rows: list[Row], column: str, vocab_size: int | None = None) -> None:
        self._rows, self.column = rows, column
        for number, row in enumerate(rows):
            _check(number, row, column, vocab_size)
        self.fingerprint: str = _named(rows, column)

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, number: int) -> Row:
        """A copy: whoever gets it may change it."""
        row: Row = _copied(self._rows[number])
        return row


_PLAIN = frozenset((bool, int, float, str, bytes, type(None)))


def _copied(value: Any) -> Any:
    """A deep copy. Lists of numbers, as prompts often are, are copied at once: `deepcopy` takes 1 us for each."""
    if type(value) in _PLAIN:
        return value
    if type(value) is dict:
        return {name: _copied(each) for name, each in value.items()}
    if type(value) is list:
        return value.copy() if _PLAIN.issuperset(map(type, value)) else [_copied(each) for each in value]
    return copy.deepcopy(value)


def read_prompts(
    source: Any, column: str = "prompt", format: str | None = None, vocab_size: int | None = None
) -> Prompts:
    """The prompts of a path, folder, glob or list of them; of rows (dicts or strings); or of a table."""
    if not isinstance(column, str) or not column:
        raise SpecError(
            f"prompt_column={column!r} is no name of a column", parameter="prompt_column", remedy="'prompt'"
        )
    return Prompts(list(_rows_of(source, column, format)), column, vocab_size)


def _rows_of(source: Any, column: str, format: str | None) -> Iterator[Row]:
    if isinstance(source, str | os.PathLike):
        yield from _rows_of_files(source, format)
        return
    table = table_rows(source)
    if table is not None:
        yield from _rows_of_table(table)
        return
    if isinstance(source, bytes | bytearray | Mapping) or not hasattr(source, "__iter__"):
        raise SpecError(
            f"a {type(source).__name__} is no source of prompts",
            parameter="prompts",
            remedy="a path, rows (dicts or strings), or a table",
        )
    rows = list(source)
    if not rows:
        raise SpecError("there are no prompts", parameter="prompts", remedy="at least one")
    if format is not None or (
        all(isinstance(row, os.PathLike) for row in rows) or looks_like_paths(rows, known_extensions())
    ):
        yield from _rows_of_files(rows, format)
        return
    for number, row in enumerate(rows):
        if isinstance(row, Mapping):
            yield copy.deepcopy(dict(row))
        elif isinstance(row, str):
            yield {column: row}
        else:
            raise SampleError(
                f"a prompt is a dict or text, got a {type(row).__name__}",
                row=number,
                column=column,
                remedy=f"{{{column!r}: ...}} with text, token ids or messages",
            )


def _rows_of_files(source: Any, format: str | None) -> Iterator[Row]:
    files = list_files(source)
    formats = {kind.name: kind for kind in (format_for(file.path, format) for file in files)}
    for unit in cut_files([(number, file.path, file.num_bytes) for number, file in enumerate(files)], format):
        for span, row_number, row in read_unit(unit, formats):
            if isinstance(row, EndOfSpan):
                continue
            if isinstance(row, Malformed):
                raise SourceError(
                    f"{row.kind}: {row.reason}" if row.reason else row.kind,
                    **place(unit, span, row_number, formats),
                    remedy=row.remedy or "mend the file: a prompt that cannot be read would be lost",
                )
            yield row


def _rows_of_table(table: TableRows) -> Iterator[Row]:
    for unit in cut_rows(table):
        for _, row_number, row in read_unit(unit, {}):
            if isinstance(row, Malformed):
                raise SourceError(
                    f"{row.kind}: {row.reason}", row=unit.first_row + row_number, remedy="mend the row of the table"
                )
            if not isinstance(row, EndOfSpan):
                yield row


def _check(number: int, row: Row, column: str, vocab_size: int | None) -> None:
    if column not in row:
        raise SampleError(
            f"a row without {column!r}",
            row=number,
            column=column,
            columns=", ".join(map(repr, row)) or "none",
            remedy="prompt_column= with the name of the column that holds the prompt",
        )
    try:
        checked_prompt(row[column], vocab_size)
    except ValueError as error:
        raise SampleError(
            f"a prompt that cannot be: {error}",
            row=number,
            column=column,
            remedy="text, token ids, or messages ({'role': ..., 'content': ...})",
        ) from None


def _named(rows: list[Row], column: str) -> str:
    return fingerprint([column, fingerprint_rows(rows, parameter="prompts")])
