"""Shards whose columns are arrays in a file, row after row (npz, safetensors), read by `pread`.

Files are not mapped. Memory is limited to the buffers, and a file that is cut short is an error; as a map it would end
the process with SIGBUS.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.base.errors import SourceError
from batchwright.columns.schema import DAMAGED, Column, Rows, Wanted, pieces, row_numbers, rows_of, sorted_schema
from batchwright.columns.shard import ShardReader

__all__ = ["Fill", "FlatColumn", "FlatShard", "closed_on_error", "read_at"]

_SCRATCH_BYTES = 1 << 20
"""Read at once where only some rows are wanted: a span that stays in the processor's cache while they are picked."""
_GAP_BYTES = 16 << 10
"""A gap between wanted rows that is read over: to begin a read costs about as much."""

Fill = Callable[[memoryview, int], None]
"""Fill a buffer with the bytes of a column from an offset on, which never goes back."""


def read_at(descriptor: int, buffer: memoryview, offset: int, *, file: str) -> None:
    """Fill a buffer from a file. A file that ends before is an error."""
    done = 0
    while done < len(buffer):
        try:
            got = os.preadv(descriptor, [buffer[done:]], offset + done)
        except OSError as error:
            raise SourceError(f"the file cannot be read: {error.strerror}", file=file, remedy=DAMAGED) from None
        if not got:
            ends = os.fstat(descriptor).st_size
            raise SourceError(f"the file ends at byte {ends:,}, in the middle of a column", file=file, remedy=DAMAGED)
        done += got


@contextlib.contextmanager
def closed_on_error() -> Iterator[contextlib.ExitStack]:
    """Files of a shard that is being opened: closed if that fails, and left to the shard otherwise."""
    opened = contextlib.ExitStack()
    try:
        yield opened
    except BaseException:
        opened.close()
        raise


@dataclass(frozen=True, slots=True)
class FlatColumn:
    """An array in a file, whose first axis is rows."""

    dtype: np.dtype[Any]
    """The stored dtype."""
    rows: int
    shape: tuple[int, ...]
    """The shape of one row."""
    open: Callable[[], Fill]
    """Begin to read its bytes."""
    is_fortran: bool = False

    @property
    def num_bytes(self) -> int:
        return self.rows * math.prod(self.shape) * self.dtype.itemsize


class FlatShard(ShardReader):
    """Arrays in one open file."""

    path: str

    def __init__(self, path: str, columns: dict[str, FlatColumn], opened: contextlib.ExitStack) -> None:
        self.path, self._columns, self._opened = path, columns, opened
        self.rows: int = rows_of({name: column.rows for name, column in columns.items()}, file=path)
        self.schema = sorted_schema(
            {name: Column(column.dtype.newbyteorder("="), column.shape) for name, column in columns.items()}
        )
        in_memory = sum(2 * column.num_bytes for column in columns.values() if column.is_fortran)
        self.decode_bytes: int = in_memory + 2 * _SCRATCH_BYTES * len(columns)

    def chunks(self, wanted: Wanted, rows_per_chunk: int) -> Iterator[dict[str, NDArray[Any]]]:
        readers = {name: _RowReader(self._columns[name], rows_per_chunk) for name in self.schema}
        for rows in pieces(wanted, self.rows, rows_per_chunk):
            yield {name: reader.take(rows) for name, reader in readers.items()}
        for reader in readers.values():
            reader.finish()

    def close(self) -> None:
        self._opened.close()


class _RowReader:
    """The rows of one column, read in order. The next call overwrites its result."""

    def __init__(self, column: FlatColumn, most_rows: int) -> None:
        self._column = column
        self._fill = _by_rows(column) if column.is_fortran else column.open()
        self._row_bytes: int = column.dtype.itemsize * math.prod(column.shape)
        self._out: NDArray[np.uint8] = np.empty((min(column.rows, most_rows), self._row_bytes), np.uint8)
        self._next_row = 0

    def take(self, rows: Rows) -> NDArray[Any]:
        out = self._out[: len(rows)]
        if isinstance(rows, range) and rows.step == 1:
            self._read(out, rows.start)
        else:
            self._pick(row_numbers(rows), out)
        return self._typed(out)

    def finish(self) -> None:
        """Read the rest if it is small. The last byte of a column may come with the checksum of all."""
        left = self._column.rows - self._next_row
        if 0 < left * self._row_bytes <= _GAP_BYTES:
            self._read(np.empty((left, self._row_bytes), np.uint8), self._next_row)

    @functools.cached_property
    def _scratch(self) -> NDArray[np.uint8]:
        return np.empty((2 + (_SCRATCH_BYTES + _GAP_BYTES) // self._row_bytes, self._row_bytes), np.uint8)

    def _pick(self, rows: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
        is_far = np.diff(rows) * self._row_bytes > _GAP_BYTES
        is_next_span = np.diff(rows * self._row_bytes // _SCRATCH_BYTES) > 0
        cuts = np.flatnonzero(is_far | is_next_span) + 1
        for start, stop in zip([0, *cuts.tolist()], [*cuts.tolist(), len(rows)], strict=True):
            first, last = int(rows[start]), int(rows[stop - 1])
            if 0 <= (first - self._next_row) * self._row_bytes <= _GAP_BYTES:
                first = self._next_row  # without holes: a column that is read in full can be checked
            span = self._scratch[: last + 1 - first]
            self._read(span, first)
            np.take(span, rows[start:stop] - first, axis=0, out=out[start:stop], mode="clip")

    def _read(self, into: NDArray[np.uint8], first_row: int) -> None:
        self._fill(into.reshape(-1).data, first_row * self._row_bytes)
        self._next_row = first_row + len(into)

    def _typed(self, out: NDArray[np.uint8]) -> NDArray[Any]:
        dtype = self._column.dtype
        if dtype.kind == "b":
            np.not_equal(out, 0, out=out.view(np.bool_))  # a byte of 2 is not a boolean: sums would be wrong
        typed = out.reshape(-1).view(dtype).reshape(len(out), *self._column.shape)
        return typed.astype(dtype.newbyteorder("="), copy=False)


def _by_rows(column: FlatColumn) -> Fill:
    """The bytes of an array in Fortran order, row after row. A row is all over the file, so it is read in full."""

    @functools.cache
    def transposed() -> memoryview:
        data = np.empty(column.num_bytes, np.uint8)
        column.open()(data.data, 0)
        stored = data.view(column.dtype).reshape((column.rows, *column.shape), order="F")
        return np.ascontiguousarray(stored).reshape(-1).view(np.uint8).data

    def fill(buffer: memoryview, offset: int) -> None:
        buffer[:] = transposed()[offset : offset + len(buffer)]

    return fill
