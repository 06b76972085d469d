"""What the columns of a shard are, and the checks that every format makes of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.base.checks import at_least
from batchwright.base.errors import SourceError, SpecError
from batchwright.base.words import suggest

__all__ = [
    "Column",
    "Schema",
    "Wanted",
    "check_dtype",
    "check_shape",
    "chosen",
    "numbers_of",
    "parts_of",
    "pieces",
    "row_bytes",
    "rows_of",
    "sorted_schema",
    "without",
]

Wanted = slice | NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Column:
    """What one position has in a column."""

    dtype: np.dtype[Any]
    """Numbers and booleans only, in the byte order of this machine."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


Schema = dict[str, Column]
"""By name, in the order of the names."""


def sorted_schema(columns: dict[str, Column]) -> Schema:
    return {name: columns[name] for name in sorted(columns)}


def row_bytes(schema: Schema) -> int:
    """Bytes of one position, its columns one after another.

    >>> row_bytes({"board": Column(np.dtype(np.uint8), (3, 3)), "value": Column(np.dtype(np.float32), ())})
    13
    """
    return sum(column.num_bytes for column in schema.values())


def chosen(known: Iterable[str], columns: Sequence[str] | None, file: str) -> list[str]:
    """The names of the columns to read, sorted: those asked for, or all there are."""
    names = list(known)
    if isinstance(columns, str) or (columns is not None and not columns):
        raise SpecError(
            f"columns={columns!r} is no list of names",
            parameter="columns",
            remedy="columns=['board', 'value'], or None",
        )
    if not names:
        raise SourceError("a shard without columns", file=file, remedy="write it again, or ranges without its number")
    for name in columns or ():
        if name not in names:
            near = suggest(str(name), names)
            fixed = [near if other == name else other for other in columns or ()]
            raise SourceError(
                f"no column {name!r}",
                file=file,
                column=name,
                columns=_listed(names),
                remedy=f"columns={fixed!r}" if near else "columns= with names from those",
            )
    twice = {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else set()
    if columns is not None:
        twice &= set(columns)
    if twice:
        raise SourceError(
            f"two columns are called {min(twice)!r}", file=file, column=min(twice), remedy="give each its own name"
        )
    return sorted(set(names if columns is None else columns))


def _listed(names: Sequence[str], most: int = 20) -> str:
    listed = ", ".join(sorted(names)[:most])
    return listed if len(names) <= most else f"{listed} and {len(names) - most:,} more"


def without(name: str) -> str:
    """The remedy that always works: read the other columns."""
    return f"columns=[...] without {name!r}"


def check_dtype(dtype: np.dtype[Any], *, file: str, column: str, row: int | None = None) -> np.dtype[Any]:
    """The dtype in native byte order, if it is one of numbers or booleans."""
    if dtype.kind in "biuf" and dtype.itemsize <= 8:
        return dtype.newbyteorder("=")
    if dtype.hasobject:
        what, remedy = "Python objects, which are pickles", "save it as an array of numbers"
    elif dtype.names is not None:
        what, remedy = f"records of {', '.join(map(str, dtype.names[:5]))}", "save each field as a column of its own"
    else:
        what, remedy = f"{dtype}", "save it as numbers or booleans"
    raise SourceError(
        f"column {column!r} holds {what}",
        file=file,
        column=column,
        row=row,
        remedy=f"{remedy}, or {without(column)}",
    )


def check_shape(shape: tuple[int, ...], *, file: str, column: str) -> tuple[int, ...]:
    """The shape of one position, if there is anything in it."""
    if 0 in shape:
        raise SourceError(
            f"column {column!r} has no values: each row has shape {shape}",
            file=file,
            column=column,
            remedy=without(column),
        )
    return shape


def rows_of(lengths: dict[str, int], *, file: str) -> int:
    """How many rows a shard has, of which every column says the same."""
    (first, rows), *others = lengths.items()
    for name, length in others:
        if length != rows:
            raise SourceError(
                f"columns of unequal length: {first!r} has {rows:,} rows, {name!r} has {length:,}",
                file=file,
                column=name,
                remedy=f"write the shard again, or {without(name)}",
            )
    return rows


def numbers_of(wanted: Wanted, rows: int) -> range | NDArray[np.int64]:
    """The numbers of the wanted rows, if they can be read in one go forwards."""
    if isinstance(wanted, slice):
        start, stop, step = wanted.indices(rows)
        if step < 1:
            raise SpecError(f"rows are read forwards, got {wanted}", parameter="wanted", remedy="a step of 1 or more")
        return range(start, stop, step)
    numbers = np.asarray(wanted, dtype=np.int64)
    if len(numbers) and (numbers[0] < 0 or numbers[-1] >= rows or (np.diff(numbers) < 0).any()):
        raise SpecError(
            f"row numbers that are not sorted, or not below {rows:,}", parameter="wanted", remedy="sort them"
        )
    return numbers


def pieces(wanted: Wanted, rows: int, rows_per_chunk: int) -> Iterator[Wanted]:
    """What is wanted, a chunk at a time: slices of a slice, or parts of the sorted row numbers.

    >>> list(pieces(slice(1, None, 3), 10, 2))
    [slice(1, 5, 3), slice(7, 8, 3)]
    """
    numbers = numbers_of(wanted, rows)
    for first in range(0, len(numbers), at_least(1, rows_per_chunk=rows_per_chunk)):
        part = numbers[first : first + rows_per_chunk]
        yield slice(part[0], part[-1] + 1, part.step) if isinstance(part, range) else part


def parts_of(wanted: Wanted, starts: list[int], most_span: int | None = None) -> Iterator[tuple[int, Wanted]]:
    """Row numbers by the block that holds them: (block, wanted rows counted from its first). Block i: starts[i] to
    starts[i + 1]. `most_span`: rows from the first to the last of a part, at most.

    >>> list(parts_of(slice(1, 9, 3), [0, 5, 10]))
    [(0, slice(1, 5, 3)), (1, slice(2, 3, 3))]
    >>> list(parts_of(slice(0, 8, 1), [0, 8], most_span=5))
    [(0, slice(0, 5, 1)), (0, slice(5, 8, 1))]
    """
    if isinstance(wanted, slice):
        numbers: Any = range(wanted.start, wanted.stop, wanted.step)
    else:
        numbers = wanted
    at = 0
    while at < len(numbers):
        first = int(numbers[at])
        block = int(np.searchsorted(starts, first, side="right")) - 1
        end = starts[block + 1] if most_span is None else min(starts[block + 1], first + most_span)
        if isinstance(wanted, slice):
            stop = min(len(numbers), at + -(-(end - first) // wanted.step))
            base = starts[block]
            yield block, slice(first - base, numbers[stop - 1] + 1 - base, wanted.step)
        else:
            stop = int(np.searchsorted(wanted, end, side="left"))
            yield block, wanted[at:stop] - starts[block]
        at = stop
