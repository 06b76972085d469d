"""The prompts of a log: checked rows of any source, with a fingerprint of their content."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from batchwright.base.errors import SampleError, SpecError
from batchwright.base.fingerprint import fingerprint, fingerprint_rows
from batchwright.rollouts.log.groups import checked_prompt
from batchwright.sources import Malformed, cut_files, cut_rows, format_for, list_files, looks_like_paths, read_unit
from batchwright.sources.faults import error_of
from batchwright.sources.formats import known_extensions
from batchwright.sources.memory import table_rows
from batchwright.sources.units import EndOfSpan

__all__ = ["Prompts", "read_prompts"]

Row = dict[str, Any]


class Prompts:
    """Checked rows of prompts, with a fingerprint of their content."""

    column: str

    def __init__(self, rows: list[Row], column: str, vocab_size: int | None = None) -> None:
        self._rows, self.column = rows, column
        for number, row in enumerate(rows):
            _check(number, row, column, vocab_size)
        self.fingerprint: str = fingerprint([column, fingerprint_rows(rows, parameter="prompts")])

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, number: int) -> Row:
        """A copy, which the caller may change."""
        row: Row = _copied(self._rows[number])
        return row


_PLAIN = frozenset((bool, int, float, str, bytes, type(None)))


def _copied(value: Any) -> Any:
    """A deep copy. Lists of numbers, as prompts often are, are copied at once: `deepcopy` takes 1 us for each."""
    if type(value) in _PLAIN:
        return value
    if type(value) is dict:
        return {name: _copied(each) for name, each in value.items()}
    if type(value) is not list:
        return copy.deepcopy(value)
    if _PLAIN.issuperset(map(type, value)):
        return value.copy()
    return [_copied(each) for each in value]


def read_prompts(
    source: Any, column: str = "prompt", format: str | None = None, vocab_size: int | None = None
) -> Prompts:
    """The prompts of a path, folder, glob or list of them; of rows (dicts or strings); or of a table."""
    if not isinstance(column, str) or not column:
        raise SpecError(
            f"prompt_column={column!r} is not the name of a column", parameter="prompt_column", remedy="'prompt'"
        )
    rows = list(_rows_of(source, column, format))
    if not rows:
        raise SpecError("there are no prompts", parameter="prompts", remedy="at least one")
    return Prompts(rows, column, vocab_size)


def _rows_of(source: Any, column: str, format: str | None) -> Iterable[Row]:
    if isinstance(source, str | os.PathLike):
        return _rows_of_files(source, format)
    table = table_rows(source)
    if table is not None:
        return _rows_of_units(cut_rows(table), {})
    if isinstance(source, bytes | bytearray | Mapping) or not hasattr(source, "__iter__"):
        raise SpecError(
            f"a {type(source).__name__} is not a source of prompts",
            parameter="prompts",
            remedy="a path, rows (dicts or strings), or a table",
        )
    rows = list(source)
    if format is not None or looks_like_paths(rows, known_extensions()):
        return _rows_of_files(rows, format)
    return [_row(number, row, column) for number, row in enumerate(rows)]


def _row(number: int, row: Any, column: str) -> Row:
    if isinstance(row, Mapping):
        return copy.deepcopy(dict(row))
    if isinstance(row, str):
        return {column: row}
    raise SampleError(
        f"a prompt is a dict or text, got a {type(row).__name__}",
        row=number,
        column=column,
        remedy=f"{{{column!r}: ...}} with text, token ids or messages",
    )


def _rows_of_files(source: Any, format: str | None) -> Iterator[Row]:
    files = list_files(source)
    formats = {kind.name: kind for kind in (format_for(file.path, format) for file in files)}
    return _rows_of_units(cut_files([(n, file.path, file.num_bytes) for n, file in enumerate(files)], format), formats)


def _rows_of_units(units: Iterable[Any], formats: Mapping[str, Any]) -> Iterator[Row]:
    for unit in units:
        for span, number, row in read_unit(unit, formats):
            if isinstance(row, Malformed):
                error = error_of(row, unit, span, number, formats)
                error.remedy = row.remedy or "mend the row: a prompt that cannot be read would be lost"
                raise error
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
            f"a prompt cannot be used: {error}",
            row=number,
            column=column,
            remedy="text, token ids, or messages ({'role': ..., 'content': ...})",
        ) from None
