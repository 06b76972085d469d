"""Rows that lie one after another in a file, read by `pread`: nothing is mapped, so memory is what the buffers take.

A map would cost less code, but a file that is cut short while it is mapped ends the process with SIGBUS.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.base.errors import SourceError
from batchwright.columns.schema import Wanted

__all__ = ["DAMAGED", "SCRATCH_BYTES", "Fill", "RowReader", "read_at"]

SCRATCH_BYTES = 1 << 20
"""Read at once where only some rows are wanted: a span that stays in the processor's cache while they are picked."""
_GAP_BYTES = 16 << 10
"""A gap between wanted rows that is read over: to begin a read costs about as much."""

DAMAGED = "copy it again, or write it again"
"""The remedy for a file that is not as it was written."""

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


class RowReader:
    """Rows of one column, asked for in order. What it returns is overwritten by the next call."""

    def __init__(self, fill: Fill, dtype: np.dtype[Any], shape: tuple[int, ...], rows: int, most_rows: int) -> None:
        """`dtype`: as stored. `most_rows`: of one call."""
        self.fill, self.dtype, self.shape, self.rows = fill, dtype, shape, rows
        self.row_bytes: int = dtype.itemsize * math.prod(shape)
        self._most = min(rows, most_rows)
        self._out: NDArray[np.uint8] | None = None
        self._scratch: NDArray[np.uint8] | None = None
        self._next_row = 0

    def take(self, piece: Wanted) -> NDArray[Any]:
        if self._out is None:
            self._out = np.empty((self._most, self.row_bytes), np.uint8)
        if isinstance(piece, slice) and piece.step == 1:
            out = self._out[: piece.stop - piece.start]
            self._read(out, piece.start)
        else:
            rows = np.arange(piece.start, piece.stop, piece.step) if isinstance(piece, slice) else piece
            out = self._out[: len(rows)]
            self._pick(rows, out)
        return self._typed(out)

    def finish(self) -> None:
        """Read what is left, if little is: the last byte of a column may come with the checksum of all."""
        left = (self.rows - self._next_row) * self.row_bytes
        if 0 < left <= _GAP_BYTES:
            self._read(np.empty((self.rows - self._next_row, self.row_bytes), np.uint8), self._next_row)

    def _pick(self, rows: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
        if self._scratch is None:
            self._scratch = np.empty((2 + (SCRATCH_BYTES + _GAP_BYTES) // self.row_bytes, self.row_bytes), np.uint8)
        is_far = np.diff(rows) * self.row_bytes > _GAP_BYTES
        is_next_span = np.diff(rows * self.row_bytes // SCRATCH_BYTES) > 0
        cuts = np.flatnonzero(is_far | is_next_span) + 1
        for start, stop in zip([0, *cuts.tolist()], [*cuts.tolist(), len(rows)], strict=True):
            first, last = int(rows[start]), int(rows[stop - 1])
            if 0 <= (first - self._next_row) * self.row_bytes <= _GAP_BYTES:
                first = self._next_row  # without holes: what is read whole can be checked
            span = self._scratch[: last + 1 - first]
            self._read(span, first)
            np.take(span, rows[start:stop] - first, axis=0, out=out[start:stop], mode="clip")

    def _read(self, into: NDArray[np.uint8], first_row: int) -> None:
        self.fill(into.reshape(-1).data, first_row * self.row_bytes)
        self._next_row = first_row + len(into)

    def _typed(self, out: NDArray[np.uint8]) -> NDArray[Any]:
        if self.dtype.kind == "b":
            np.not_equal(out, 0, out=out.view(np.bool_))  # a byte of 2 is no boolean: sums would be wrong
        typed = out.reshape(-1).view(self.dtype).reshape(len(out), *self.shape)
        return typed if self.dtype.isnative else typed.astype(self.dtype.newbyteorder("="))
