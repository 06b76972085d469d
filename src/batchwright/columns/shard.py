"""Shards, files of rows in six formats, read as columns in chunks of rows.

    with open_shard("games/shard_0001.npz") as shard:
        for columns in shard.chunks(slice(0, None, 4), rows_per_chunk=8192):    # every fourth row
            pool.add(columns)                                                   # before asking for the next chunk

A fault is a SourceError that names the file, and the row and the column if known.
"""

from __future__ import annotations

import abc
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from batchwright.base.checks import at_least, local_path
from batchwright.base.errors import SourceError, SpecError
from batchwright.base.words import first_line, listed, suggest

__all__ = [
    "EXTENSIONS",
    "Column",
    "Schema",
    "ShardReader",
    "content_mark",
    "format_of",
    "open_shard",
    "peek",
    "row_bytes",
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


def row_bytes(schema: Schema) -> int:
    """Bytes of one row, its columns one after another.

    >>> row_bytes({"board": Column(np.dtype(np.uint8), (3, 3)), "value": Column(np.dtype(np.float32), ())})
    13
    """
    return sum(column.num_bytes for column in schema.values())


# Checks


def chosen(known: Iterable[str], columns: Sequence[str] | None, file: str) -> list[str]:
    """Names of the columns to read: `columns`, or all of a file. They are sorted, as every schema is."""
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
    if remedy:
        others = f"{remedy}, or {others}"
    return SourceError(what, file=file, row=row, column=column, remedy=others)


def damaged(format: str, file: str, reason: object, column: str | None = None, **where: object) -> SourceError:
    """An error of a file, or of one of its columns. `format`: "an npz", say."""
    what = f"not {format} file, or damaged"
    if column is not None:
        what = f"column {column!r} is damaged"
    return SourceError(what, file=file, column=column, **where, reason=first_line(reason), remedy=DAMAGED)


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
    if isinstance(rows, range):
        return np.arange(rows.start, rows.stop, rows.step)  # np.asarray asks a range for one number after the other
    return rows


def take_rows(values: NDArray[Any], rows: Rows, first: int) -> NDArray[Any]:
    """Some rows of an array that begins with row `first`; a view if they are evenly spaced."""
    if isinstance(rows, range):
        return values[rows.start - first : rows.stop - first : rows.step]
    return values[rows - first]


# Shards

_ENDINGS = {
    "npz": (".npz",),
    "arrow": (".arrow", ".feather", ".ipc"),
    "parquet": (".parquet",),
    "safetensors": (".safetensors",),
    "jsonl": (".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson", ".ndjson.gz", ".ndjson.zst"),
    "pickle": (".pkl", ".pkl.gz", ".pickle", ".pickle.gz"),
}
EXTENSIONS: dict[str, str] = {ending: kind for kind, endings in _ENDINGS.items() for ending in endings}
"""The file name endings of shards, and the format of each."""


class ShardReader(abc.ABC):
    """An open shard. Close it: it holds a file, and some formats a child process."""

    path: str
    rows: int
    schema: Schema
    """The schema of the requested columns."""
    decode_bytes: int
    """The most memory for reading beyond the arrays handed out, a child's included. Computed from the file alone, so
    it is the same on every machine."""

    @abc.abstractmethod
    def chunks(self, wanted: Wanted, rows_per_chunk: int) -> Iterator[dict[str, NDArray[Any]]]:
        """The columns of the wanted rows: a slice with a step of 1 or more, or sorted row numbers.

        At most `rows_per_chunk` rows at a time, in order. The arrays are only to be read, and only until the next
        chunk is requested: their memory is used again. Formats that can seek read only wanted rows.
        """

    @abc.abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """The facts of a shard that are known before it is decoded."""

    format: str
    rows: int | None
    """None if only decoding can tell."""
    schema: Schema | None
    decode_bytes: int


def format_of(name: str | Path) -> str | None:
    """The format that a file's name means, if it is one of a shard.

    >>> format_of("shard_0007.pkl.gz"), format_of("notes.txt")
    ('pickle', None)
    """
    lowered = os.path.basename(name).lower()
    return next((kind for ending, kind in EXTENSIONS.items() if lowered.endswith(ending)), None)


def open_shard(
    path: str | Path,
    *,
    allow_pickle: bool = False,
    columns: Sequence[str] | None = None,
    budget: int | None = None,
) -> ShardReader:
    """A shard, ready to be read. Columns that are not in `columns` are neither read nor checked.

    `budget` is the memory in bytes that decoding may take in a child process, if the format needs one.
    """
    file, kind = _checked(path, allow_pickle)
    return _open(file, kind, columns, budget)


def peek(path: str | Path, *, allow_pickle: bool = False, columns: Sequence[str] | None = None) -> ShardHeader:
    """Read the header of a shard. No row is decoded. For JSONL and pickle only the memory is known, about."""
    file, kind = _checked(path, allow_pickle)
    if kind in ("jsonl", "pickle"):
        from batchwright.columns.row_shard import expected_bytes

        return ShardHeader(kind, None, None, expected_bytes(file, kind))
    with _open(file, kind, columns, None) as shard:
        return ShardHeader(kind, shard.rows, shard.schema, shard.decode_bytes)


def content_mark(path: str | Path) -> str:
    """A cheap name for a file's content: its size, and a hash of its ends and of 16 blocks spread over it."""
    file = os.fspath(path)
    try:
        with open(file, "rb", buffering=0) as raw:
            size, ends, block = os.fstat(raw.fileno()).st_size, 64 << 10, 4 << 10
            mark = xxhash.xxh3_128(str(size).encode())
            for offset in (0, max(0, size - ends)):
                mark.update(os.pread(raw.fileno(), ends, offset))
            for number in range(16):
                mark.update(os.pread(raw.fileno(), block, size * (number + 1) // 17))
    except OSError as error:
        raise _unreadable(file, error) from None
    return f"{size}-{mark.hexdigest()}"


def _checked(path: str | Path, allow_pickle: bool) -> tuple[str, str]:
    """The path and the format of an existing file with content."""
    file = str(local_path(path=path))
    kind, name = format_of(file), os.path.basename(file.rstrip("/"))
    endings = "files named " + ", ".join(f"*{ending}" for ending in EXTENSIONS)
    if os.path.isdir(file):
        raise SourceError(f"{name} is a directory, not a shard", file=file, remedy=endings)
    if kind is None:
        raise SourceError(f"{name} is in no format that shards have", file=file, remedy=endings)
    if kind == "pickle" and not allow_pickle:
        folder = os.path.dirname(file) or "."
        raise SourceError(
            f"{name} is a pickle, which can run code when read. If you made it: allow_pickle=True, or once: "
            "batchwright shards convert DIR OUT --allow-pickle",
            file=file,
            remedy=f"allow_pickle=True, or once: batchwright shards convert {folder} {folder}-npz --allow-pickle",
        )
    if os.path.exists(file) and not os.path.isfile(file):
        raise SourceError(f"{name} is no regular file", file=file, remedy="copy it into a file")
    try:
        with open(file, "rb") as stream:
            is_empty = not stream.read(1)
    except OSError as error:
        raise _unreadable(file, error) from None
    if is_empty:
        raise SourceError(f"{name} is empty", file=file, remedy="write it again, or ranges without its number")
    return file, kind


def _open(file: str, kind: str, columns: Sequence[str] | None, budget: int | None) -> ShardReader:
    # Each format is imported when a shard of it is met: pyarrow alone takes longer than everything else.
    match kind:
        case "npz":
            from batchwright.columns.flat import open_npz

            return open_npz(file, columns)
        case "safetensors":
            from batchwright.columns.flat import open_safetensors

            return open_safetensors(file, columns)
        case "arrow":
            from batchwright.columns.arrow_shards import ArrowShard

            return ArrowShard(file, columns)
        case "parquet":
            from batchwright.columns.arrow_shards import ParquetShard

            return ParquetShard(file, columns)
        case _:
            from batchwright.columns.row_shard import RowShard

            return RowShard(file, kind, columns, budget)


def _unreadable(file: str, error: OSError) -> SourceError:
    name = os.path.basename(file)
    if isinstance(error, FileNotFoundError):
        return SourceError(f"{name} is not there", file=file, remedy="put it back, or start again without it")
    return SourceError(f"{name} cannot be read: {error.strerror}", file=file, remedy="make it readable")
