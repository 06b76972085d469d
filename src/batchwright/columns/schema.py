"""Schemas of columns, the selection of wanted rows, and the checks that every format shares."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.base.checks import at_least
from batchwright.base.errors import SourceError, SpecError
from batchwright.base.words import listed, suggest

__all__ = [
    "DAMAGED",
    "Column",
    "Rows",
    "Schema",
    "Wanted",
    "blocks_of",
    "check_dtype",
    "check_shape",
    "chosen",
    "column_error",
    "count_below",
    "numbers_of",
    "other_shape",
    "pieces",
    "row_bytes",
    "row_numbers",
    "row_shape",
    "rows_of",
    "sorted_schema",
    "take_rows",
]

Wanted = slice | NDArray[np.int64]
"""Rows that a caller asks for: a slice with a step of 1 or more, or sorted row numbers."""
Rows = range | NDArray[np.int64]
"""Numbers of rows, ascending."""

DAMAGED = "copy it again, or write it again"
"""The remedy for a file that is not as it was written."""


@dataclass(frozen=True, slots=True)
class Column:
    """Dtype and shape of one row of a column."""

    dtype: np.dtype[Any]
    """Numbers or booleans, in the byte order of this machine."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


Schema = dict[str, Column]
"""Columns by name, in the order of the names."""


def sorted_schema(columns: dict[str, Column]) -> Schema:
    return {name: columns[name] for name in sorted(columns)}


def row_bytes(schema: Schema) -> int:
    """Bytes of one row, its columns one after another.

    >>> row_bytes({"board": Column(np.dtype(np.uint8), (3, 3)), "value": Column(np.dtype(np.float32), ())})
    13
    """
    return sum(column.num_bytes for column in schema.values())


# Checks


def chosen(known: Iterable[str], columns: Sequence[str] | None, file: str) -> list[str]:
    """Names of the columns to read, sorted: `columns`, or all of a file."""
    names = list(known)
    if isinstance(columns, str) or (columns is not None and not columns):
        what = f"columns={columns!r} is no list of names"
        raise SpecError(what, parameter="columns", remedy="columns=['board', 'value'], or None")
    if not names:
        raise SourceError("a shard without columns", file=file, remedy="write it again, or ranges without its number")
    wanted = names if columns is None else list(columns)
    for name in wanted:
        if name not in names:
            raise _no_column(name, names, wanted, file)
        if names.count(name) > 1:
            what = f"two columns are called {name!r}"
            raise SourceError(what, file=file, column=name, remedy="give each its own name")
    return sorted(set(wanted))


def _no_column(name: str, names: list[str], wanted: list[str], file: str) -> SourceError:
    near = suggest(str(name), names)
    remedy = "columns= with names from those"
    if near is not None:
        remedy = f"columns={[near if other == name else other for other in wanted]!r}"
    return SourceError(f"no column {name!r}", file=file, column=name, columns=listed(sorted(names), 20), remedy=remedy)


def column_error(what: str, *, file: str, column: str, row: int | None = None, remedy: str = "") -> SourceError:
    """An error of one column. The remedy that always works comes last: read the other columns."""
    others = f"columns=[...] without {column!r}"
    return SourceError(what, file=file, row=row, column=column, remedy=f"{remedy}, or {others}" if remedy else others)


def check_dtype(dtype: np.dtype[Any], *, file: str, column: str) -> np.dtype[Any]:
    """The dtype in native byte order, if it is one of numbers or booleans."""
    if dtype.kind in "biuf" and dtype.itemsize <= 8:
        return dtype.newbyteorder("=")
    what, remedy = f"{dtype}", "save it as numbers or booleans"
    if dtype.hasobject:
        what = "Python objects, which are pickles"
    elif dtype.names is not None:
        what, remedy = f"records of {listed(dtype.names)}", "save each field as a column of its own"
    raise column_error(f"column {column!r} holds {what}", file=file, column=column, remedy=remedy)


def row_shape(shape: tuple[int, ...], *, file: str, column: str) -> tuple[int, ...]:
    """The shape of one row of an array whose first axis is rows."""
    if not shape:
        what = f"column {column!r} is a single value, not one for each row"
        raise column_error(what, file=file, column=column, remedy="save an array of one value a row")
    return check_shape(shape[1:], file=file, column=column)


def check_shape(shape: tuple[int, ...], *, file: str, column: str) -> tuple[int, ...]:
    """The shape of one row, if it has values."""
    if 0 in shape:
        raise column_error(f"column {column!r} has no values: each row has shape {shape}", file=file, column=column)
    return shape


def other_shape(file: str, column: str, row: int, got: tuple[int, ...], shape: tuple[int, ...]) -> SourceError:
    what = f"row {row:,} of column {column!r} has shape {got}, the rows before have {shape}"
    return column_error(what, file=file, column=column, row=row, remedy="pad it to one shape")


def rows_of(lengths: dict[str, int], *, file: str) -> int:
    """The number of rows, which must be the same in every column."""
    (first, rows), *others = lengths.items()
    for name, length in others:
        if length != rows:
            what = f"columns of unequal length: {first!r} has {rows:,} rows, {name!r} has {length:,}"
            raise column_error(what, file=file, column=name, remedy="write the shard again")
    return rows


# Rows


def numbers_of(wanted: Wanted, rows: int) -> Rows:
    """The numbers of the wanted rows, checked to be ascending and in the file."""
    if isinstance(wanted, slice):
        start, stop, step = wanted.indices(rows)
        if step < 1:
            raise SpecError(f"rows are read forwards, got {wanted}", parameter="wanted", remedy="a step of 1 or more")
        return range(start, stop, step)
    numbers = np.asarray(wanted, dtype=np.int64)
    if len(numbers) and (numbers[0] < 0 or numbers[-1] >= rows or (np.diff(numbers) < 0).any()):
        what = f"row numbers that are not sorted, or not below {rows:,}"
        raise SpecError(what, parameter="wanted", remedy="sort them")
    return numbers


def pieces(wanted: Wanted, rows: int, rows_per_chunk: int) -> Iterator[Rows]:
    """The numbers of the wanted rows, a chunk at a time.

    >>> list(pieces(slice(1, None, 3), 10, 2))
    [range(1, 7, 3), range(7, 10, 3)]
    """
    numbers = numbers_of(wanted, rows)
    for first in range(0, len(numbers), at_least(1, rows_per_chunk=rows_per_chunk)):
        yield numbers[first : first + rows_per_chunk]


def blocks_of(rows: Rows, starts: Sequence[int], most_span: int | None = None) -> Iterator[tuple[int, Rows]]:
    """(block, its rows): block i has the rows from starts[i] to starts[i + 1]. No part spans more than `most_span`.

    >>> list(blocks_of(range(1, 9, 3), [0, 5, 10]))
    [(0, range(1, 7, 3)), (1, range(7, 10, 3))]
    >>> list(blocks_of(range(0, 8), [0, 8], most_span=5))
    [(0, range(0, 5)), (0, range(5, 8))]
    """
    at = 0
    while at < len(rows):
        block = int(np.searchsorted(starts, rows[at], side="right")) - 1
        end = starts[block + 1]
        if most_span is not None:
            end = min(end, int(rows[at]) + most_span)
        stop = count_below(rows, end)
        yield block, rows[at:stop]
        at = stop


def count_below(rows: Rows, limit: int) -> int:
    """
    >>> count_below(range(1, 10, 3), 5), count_below(range(1, 10, 3), 100)
    (2, 3)
    """
    if isinstance(rows, range):
        return len(range(rows.start, min(rows.stop, limit), rows.step))
    return int(np.searchsorted(rows, limit, side="left"))


def row_numbers(rows: Rows) -> NDArray[np.int64]:
    # Not np.asarray, which asks a range for one number after the other.
    return np.arange(rows.start, rows.stop, rows.step) if isinstance(rows, range) else rows


def take_rows(values: NDArray[Any], rows: Rows, first: int) -> NDArray[Any]:
    """Some rows of an array that begins with row `first`; a view if they are evenly spaced."""
    if isinstance(rows, range):
        return values[rows.start - first : rows.stop - first : rows.step]
    return values[rows - first]
