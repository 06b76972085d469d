"""Windows over a token stream: concatenate the documents, cut every row_tokens, give one token more for the last label.

Epoch 0 cuts at 0. Later epochs cut at another offset that (seed, source, epoch) fixes, so that documents are not split
at the same places again; the stream is a ring then, and one row of the epoch runs over its end into its beginning.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.assemble.gather import gather_windows
from penstock.errors import SpecError
from penstock.seeds import key_of
from penstock.spec import at_least

__all__ = ["Stream", "WindowRows"]


class Stream(Protocol):
    """Documents end to end, somewhere in mapped memory."""

    name: str
    split: str
    num_tokens: int
    num_documents: int
    fingerprint: str
    dtype: np.dtype[Any]

    def addresses(
        self, starts: NDArray[np.int64], length: int
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_], list[Any]]: ...
    def read(self, start: int, stop: int, out: NDArray[Any] | None = None) -> NDArray[Any]: ...
    def borders(self, start: int, stop: int) -> NDArray[np.int64]: ...
    def documents_in(self, start: int, stop: int) -> list[tuple[int, int, int]]: ...


class WindowRows:
    """The rows of one token stream: row i of an epoch is row_tokens + 1 consecutive tokens."""

    def __init__(self, stream: Stream, row_tokens: int, *, seed: int, recut: bool = True) -> None:
        self.stream = stream
        self.row_tokens = at_least(1, chunk_size=row_tokens)
        self.seed, self.recut = seed, recut
        self.name, self.split = stream.name, stream.split
        self.fingerprint = stream.fingerprint
        self.num_tokens = stream.num_tokens
        self.num_rows = max(stream.num_tokens - 1, 0) // row_tokens
        if not self.num_rows:
            raise SpecError(
                f"chunk_size={row_tokens} needs {row_tokens + 1:,} tokens; "
                f"source {stream.name!r} ({stream.split}) has {stream.num_tokens:,}",
                parameter="chunk_size",
                source=stream.name,
                remedy=f"chunk_size={max(stream.num_tokens - 1, 1)} or less, or more text"
                if stream.num_tokens > 1
                else "more text",
            )

    def offset(self, epoch: int) -> int:
        """Where the first row of an epoch begins."""
        return _offset(self.seed, self.name, epoch, self.row_tokens) if self.recut and epoch else 0

    def starts(self, index: NDArray[np.int64], epoch: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where each row begins in the stream."""
        starts = index * self.row_tokens
        if self.recut and epoch.any():
            for e in np.unique(epoch).tolist():
                starts[epoch == e] += self.offset(e)
        return starts  # inside the stream also with an offset: only the end of a row can lie beyond the stream's end

    def addresses(
        self, index: NDArray[np.int64], epoch: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_], list[Any], NDArray[np.int64]]:
        """(address, whether the row lies whole there, what keeps it mapped, start in the stream) of each row."""
        starts = self.starts(index, epoch)
        address, whole, held = self.stream.addresses(starts, self.row_tokens + 1)
        return address, whole, held, starts

    def read_row(self, start: int, out: NDArray[np.int64]) -> None:
        """One row, from wherever its tokens lie: over the border of a shard, or the end of the stream."""
        here = min(len(out), self.num_tokens - start)
        self.stream.read(start, start + here, out[:here])
        if here < len(out):
            self.stream.read(0, len(out) - here, out[here:])

    def gather(self, index: NDArray[np.int64], epoch: NDArray[np.int64], out: NDArray[np.int64]) -> None:
        address, whole, _held, starts = self.addresses(index, epoch)
        if whole.all():
            gather_windows(address, self.stream.dtype, out)
            return
        if whole.any():
            rows = np.flatnonzero(whole)
            part = np.empty((len(rows), out.shape[1]), np.int64)
            gather_windows(address[rows], self.stream.dtype, part)
            out[rows] = part
        for row in np.flatnonzero(~whole).tolist():
            self.read_row(int(starts[row]), out[row])

    def pieces(self, start: int) -> list[tuple[int, int, int]]:
        """(window offset, stream start, stream stop): one piece, or two where the row runs over the stream's end."""
        length = self.row_tokens + 1
        here = min(length, self.num_tokens - start)
        return [(0, start, start + here)] + ([(here, 0, length - here)] if here < length else [])

    def stretch(self, first: int, last: int, epoch: int) -> list[tuple[int, int]]:
        """Tokens [start, stop) of the stream that rows [first, last) of an epoch lie in: one piece, or two."""
        start, stop = (self.offset(epoch) + row * self.row_tokens for row in (first, last))
        over = max(stop + 1 - self.num_tokens, 0)
        return [(start, stop + 1 - over)] + ([(0, over)] if over else [])

    def borders(self, start: int) -> NDArray[np.int64]:
        """Offsets inside the window of the row at `start` at which a document begins (0 left out)."""
        found = [self.stream.borders(begin, stop) - begin + at for at, begin, stop in self.pieces(start)]
        offsets = np.concatenate(found)
        return offsets[offsets > 0]

    def rows_touching(self, start: int, stop: int, epoch: int) -> list[int]:
        """Rows of an epoch whose window has tokens of [start, stop) of the stream."""
        offset, length = self.offset(epoch), self.row_tokens
        found: set[int] = set()
        # On the ring the epoch's windows cover [offset, offset + num_rows * length], the last token as a label only.
        for begin, end in (
            (start - offset, stop - offset),
            (start - offset + self.num_tokens, stop - offset + self.num_tokens),
        ):
            first = max(-(-(begin - length) // length), 0)
            last = min((end - 1) // length, self.num_rows - 1)
            found.update(range(first, last + 1))
        return sorted(found)


@lru_cache(maxsize=1024)
def _offset(seed: int, name: str, epoch: int, row_tokens: int) -> int:
    return key_of("recut", seed, name, epoch) % row_tokens
