"""Windows over a token stream: concatenate the documents, cut every row_tokens, add one token for the last target.

Epoch 0 cuts from 0 on. Later epochs cut from another offset, fixed by (seed, source, epoch), so that documents are not
split at the same places again. The stream is then a ring: one row of the epoch crosses its end into its beginning.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from batchwright.base.checks import at_least
from batchwright.base.errors import SpecError
from batchwright.base.seeds import key_of
from batchwright.batches.gather import gather_windows
from batchwright.store.stream import MappedShard, TokenStream

__all__ = ["Place", "WindowFeed", "WindowRows"]


class WindowRows:
    """The rows of one token stream: row i of an epoch is row_tokens + 1 consecutive tokens.

    `name` keys the random offsets, and is the stream's own name by default. `num_tokens` is for a stream that grew: one
    entry (first epoch, tokens then) for each length. Rows of an epoch are in the tokens that the stream had then.
    """

    def __init__(
        self,
        stream: TokenStream,
        row_tokens: int,
        *,
        seed: int,
        recut: bool = True,
        name: str | None = None,
        num_tokens: tuple[tuple[int, int], ...] = (),
    ) -> None:
        self.stream: TokenStream = stream
        is_whole = len(num_tokens) < 2 and all(tokens == stream.num_tokens for _, tokens in num_tokens)
        self._grown = () if is_whole else num_tokens
        self.row_tokens: int = at_least(1, chunk_size=row_tokens)
        self.seed: int = seed
        self.recut: bool = recut
        self.name: str = name or stream.name
        self.split: str = stream.split
        self.fingerprint: str = stream.fingerprint
        self.num_tokens: int = stream.num_tokens
        self.num_rows: int = max(stream.num_tokens - 1, 0) // row_tokens
        if not self.num_rows:
            shorter = f"chunk_size={stream.num_tokens - 1} or less, or " if stream.num_tokens > 1 else ""
            raise SpecError(
                f"chunk_size={row_tokens} needs {row_tokens + 1:,} tokens; "
                f"source {stream.name!r} ({stream.split}) has {stream.num_tokens:,}",
                parameter="chunk_size",
                source=stream.name,
                remedy=f"{shorter}more text",
            )

    def offset(self, epoch: int) -> int:
        """The start of an epoch's first row."""
        if not self.recut or not epoch:
            return 0
        return _offset(self.seed, self.name, epoch, self.row_tokens)

    def ring(self, epoch: int) -> tuple[int, int]:
        """(start of an epoch's first row, tokens after which the stream repeats)."""
        return self.offset(epoch), self._tokens(epoch)

    def _tokens(self, epoch: int) -> int:
        """The number of tokens of the stream in an epoch."""
        if not self._grown:
            return self.num_tokens
        return next(tokens for first, tokens in reversed(self._grown) if first <= epoch)

    def starts(self, index: NDArray[np.int64], epoch: NDArray[np.int64]) -> NDArray[np.int64]:
        """The start of each row in the stream."""
        starts = index * self.row_tokens
        if self.recut and epoch.any():
            for e in np.unique(epoch).tolist():
                starts[epoch == e] += self.offset(e)
        return starts  # inside the stream also with an offset: only the end of a row can lie beyond the stream's end

    def addresses(
        self, index: NDArray[np.int64], epoch: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_], list[Any], NDArray[np.int64]]:
        """(address, whether the whole row is there, object that keeps it mapped, start in the stream) of each row."""
        starts = self.starts(index, epoch)
        address, is_whole, mapped = self.stream.addresses(starts, self.row_tokens + 1)
        if self._grown:
            for e in np.unique(epoch).tolist():
                is_whole &= (epoch != e) | (starts + self.row_tokens + 1 <= self._tokens(e))
        return address, is_whole, mapped, starts

    def read_row(self, start: int, out: NDArray[np.int64], epoch: int = 0) -> None:
        """One row, which may cross the border of a shard or the end of the stream."""
        here = min(len(out), self._tokens(epoch) - start)
        self.stream.read(start, start + here, out[:here])
        if here < len(out):
            self.stream.read(0, len(out) - here, out[here:])

    def gather(self, index: NDArray[np.int64], epoch: NDArray[np.int64], out: NDArray[np.int64]) -> None:
        address, is_whole, _mapped, starts = self.addresses(index, epoch)
        if is_whole.all():
            gather_windows(address, self.stream.dtype, out)
            return
        if is_whole.any():
            rows = np.flatnonzero(is_whole)
            part = np.empty((len(rows), out.shape[1]), np.int64)
            gather_windows(address[rows], self.stream.dtype, part)
            out[rows] = part
        for row in np.flatnonzero(~is_whole).tolist():
            self.read_row(int(starts[row]), out[row], int(epoch[row]))

    def pieces(self, start: int, epoch: int = 0) -> list[tuple[int, int, int]]:
        """(window offset, stream start, stream stop): one piece, or two if the row crosses the stream's end."""
        length = self.row_tokens + 1
        here = min(length, self._tokens(epoch) - start)
        pieces = [(0, start, start + here)]
        if here < length:
            pieces.append((here, 0, length - here))
        return pieces

    def pieces_of(self, index: int, epoch: int = 0) -> list[tuple[int, int, int]]:
        """The pieces of a row, by its number."""
        return self.pieces(self.offset(epoch) + index * self.row_tokens, epoch)

    def stretch(self, first: int, last: int, epoch: int) -> list[tuple[int, int]]:
        """The tokens [start, stop) of the stream in rows [first, last) of an epoch: one piece, or two."""
        start, stop = (self.offset(epoch) + row * self.row_tokens for row in (first, last))
        over = max(stop + 1 - self._tokens(epoch), 0)
        stretches = [(start, stop + 1 - over)]
        if over:
            stretches.append((0, over))
        return stretches

    def borders(self, start: int, epoch: int = 0) -> NDArray[np.int64]:
        """The offsets of document starts inside the window of the row at `start`, without 0."""
        found = [self.stream.borders(begin, stop) - begin + at for at, begin, stop in self.pieces(start, epoch)]
        offsets = np.concatenate(found)
        return offsets[offsets > 0]

    def rows_touching(self, start: int, stop: int, epoch: int) -> list[int]:
        """Rows of an epoch whose window has tokens of [start, stop) of the stream."""
        (offset, tokens), length = self.ring(epoch), self.row_tokens
        found: set[int] = set()
        # On the ring the epoch's windows cover [offset, offset + num_rows * length], the last token as a target only.
        stop = min(stop, tokens)
        for begin, end in ((start - offset, stop - offset), (start - offset + tokens, stop - offset + tokens)):
            first = max(-(-(begin - length) // length), 0)
            last = min((end - 1) // length, (tokens - 1) // length - 1)
            found.update(range(first, last + 1))
        return sorted(found)


class JointWindows:
    """The rows of several sources, found in one lookup for any number of sources and epochs.

    Token t of source s has the number base[s] + t, so shards of all sources are end to end in these numbers. Uses only
    `ring`, `row_tokens` and `stream` of the rows. Safe to use from several threads. Shards stay mapped once found.
    """

    MOST_SHARDS = 16_384
    """The largest number of mapped shards. Sources with more are found one by one."""

    def __init__(self, rows: Sequence[WindowRows]) -> None:
        self.rows: list[WindowRows] = list(rows)
        streams = [each.stream for each in rows]
        self.length: int = rows[0].row_tokens + 1
        self.itemsize: int = streams[0].dtype.itemsize
        sizes = np.array([int(stream.token_starts[-1]) for stream in streams], np.int64)
        self._base = np.cumsum(sizes) - sizes
        num_shards = [len(stream.token_starts) - 1 for stream in streams]
        self._shards = [
            (stream, shard) for stream, num in zip(streams, num_shards, strict=True) for shard in range(num)
        ]
        self._shard_start = np.concatenate(
            [base + stream.token_starts[:-1] for base, stream in zip(self._base, streams, strict=True)]
        )
        self._shard_stop = np.concatenate(
            [base + stream.token_starts[1:] for base, stream in zip(self._base, streams, strict=True)]
        )
        self._one_each = max(num_shards) == 1
        self._token_0 = np.zeros(len(self._shards), np.int64)
        """For each shard, its address less the bytes of all tokens numbered before it; 0: not mapped yet."""
        self._mapped: list[MappedShard | None] = [None] * len(self._shards)
        self._rings = _Rings(rows)

    @classmethod
    def can(cls, rows: Sequence[WindowRows]) -> bool:
        """Whether these rows can be found together."""
        streams = [each.stream for each in rows]
        return (
            len({(stream.dtype, each.row_tokens) for stream, each in zip(streams, rows, strict=True)}) == 1
            and sum(len(stream.token_starts) - 1 for stream in streams) <= cls.MOST_SHARDS
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return JointWindows, (self.rows,)  # maps cannot be sent to another process

    def find(
        self, source: NDArray[np.int32], index: NDArray[np.int64], epoch: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.int64]]:
        """(address, whether the whole row is there, start in its stream) of each row."""
        offset, end = self._rings.of(source, epoch)
        start = index * (self.length - 1)
        start += offset
        number = self._base[source]
        is_whole = start + self.length <= end
        number += start
        shard = source if self._one_each else np.searchsorted(self._shard_start, number, side="right") - 1
        is_whole &= number + self.length <= self._shard_stop[shard]
        token_0 = self._token_0[shard]
        if not token_0.all():
            for each in np.unique(shard[token_0 == 0]).tolist():
                self._map(each)
            token_0 = self._token_0[shard]
        number *= self.itemsize
        number += token_0
        return number, is_whole, start

    def _map(self, shard: int) -> None:
        stream, number = self._shards[shard]
        self._mapped[shard] = mapped = stream.shard(number)
        # Last: a thread that sees an address relies on the map.
        self._token_0[shard] = mapped.address - int(self._shard_start[shard]) * self.itemsize


class _Rings:
    """`ring` of each (source, epoch), as arrays. The last few epochs of every source are cached."""

    EPOCHS = 4

    def __init__(self, rows: Sequence[WindowRows]) -> None:
        self.rows = rows
        shape = len(rows) * self.EPOCHS
        # (epoch, offset, end): never changed in place, so that other threads read three consistent arrays.
        self._cached = np.full(shape, -1, np.int64), np.zeros(shape, np.int64), np.zeros(shape, np.int64)

    def of(self, source: NDArray[np.int32], epoch: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(offset, end) of each row."""
        place = source * np.int64(self.EPOCHS)
        place += epoch % self.EPOCHS
        epochs, offsets, ends = self._cached
        offset, end = offsets[place], ends[place]
        is_cached = epochs[place] == epoch
        if not is_cached.all():
            rest = np.flatnonzero(~is_cached)
            pairs = list(zip(source[rest].tolist(), epoch[rest].tolist(), strict=True))
            found = {(s, e): self.rows[s].ring(e) for s, e in set(pairs)}
            offset[rest], end[rest] = np.array([found[pair] for pair in pairs], np.int64).T
            epochs, offsets, ends = epochs.copy(), offsets.copy(), ends.copy()
            for (s, e), ring in found.items():
                slot = s * self.EPOCHS + e % self.EPOCHS
                epochs[slot], (offsets[slot], ends[slot]) = e, ring
            self._cached = epochs, offsets, ends
        return offset, end


@lru_cache(maxsize=4096)
def _offset(seed: int, name: str, epoch: int, row_tokens: int) -> int:
    return key_of("recut", seed, name, epoch) % row_tokens


# Rows of documents that arrive one after another, whose end is not known


D = TypeVar("D")


@dataclass(frozen=True, slots=True)
class Place(Generic[D]):
    """The place of a token in a sequence of documents: its document, and the number of tokens before it there."""

    document: D
    skip: int


@dataclass(frozen=True, slots=True)
class Taken(Generic[D]):
    """Some rows: tokens [rows, row_tokens + 1], the place of each row, and that of the next one."""

    tokens: NDArray[Any]
    places: list[Place[D]]
    """One place per row, and one more: the beginning of the next row. Empty without tokens."""
    borders: list[NDArray[np.int64]]
    """For each row, the offsets of document starts inside its window, except 0."""

    def __len__(self) -> int:
        return len(self.tokens)


class WindowFeed(Generic[D]):
    """Rows of row_tokens + 1 tokens, each beginning with the last token of the one before.

    >>> feed = WindowFeed(iter([("a", np.array([1, 2, 3])), ("b", np.array([4, 5, 6, 7]))]), row_tokens=2)
    >>> taken = feed.take(2)
    >>> taken.tokens.tolist(), taken.places[2], taken.borders[1].tolist()
    ([[1, 2, 3], [3, 4, 5]], Place(document='b', skip=1), [1])
    >>> len(feed.take(2))       # 5, 6, 7 are left: one row
    1
    """

    def __init__(self, documents: Iterator[tuple[D, NDArray[Any]]], row_tokens: int, skip: int = 0) -> None:
        """`skip` is the number of tokens at the beginning that rows do not use. They still count in places."""
        self.row_tokens = row_tokens
        self._documents = documents
        self._pieces: list[NDArray[Any]] = []
        self._have = 0
        """Tokens in the pieces. The next row begins with the first one."""
        self._names: list[D] = []
        self._begins: list[int] = []
        """The start of each document with tokens here, counted from the first token; negative if it began before."""
        while skip >= self._have and self._pull():
            pass
        self._drop(min(skip, self._have))

    def take(self, rows: int) -> Taken[D]:
        """The next rows. At the end of the documents there may be fewer."""
        width = self.row_tokens
        while self._have < rows * width + 1 and self._pull():
            pass
        rows = min(rows, max(self._have - 1, 0) // width)
        if not self._have:
            return Taken(np.empty((0, width + 1), np.int64), [], [])
        if len(self._pieces) > 1:
            self._pieces = [np.concatenate(self._pieces)]
        (tokens,) = self._pieces
        windows = np.empty((rows, width + 1), tokens.dtype)
        windows[:, :width] = tokens[: rows * width].reshape(rows, width)
        windows[:, width] = tokens[width : rows * width + 1 : width]
        starts = range(0, rows * width + 1, width)
        taken = Taken(windows, [self._place(at) for at in starts], [self._borders(at) for at in starts[:-1]])
        self._drop(rows * width)
        return taken

    def _pull(self) -> bool:
        """Add the next document. Returns False if there is none."""
        for name, tokens in self._documents:
            if len(tokens):
                self._names.append(name)
                self._begins.append(self._have)
                self._pieces.append(tokens)
                self._have += len(tokens)
            return True
        return False

    def _place(self, at: int) -> Place[D]:
        number = bisect_right(self._begins, at) - 1
        return Place(self._names[number], at - self._begins[number])

    def _borders(self, at: int) -> NDArray[np.int64]:
        first, last = bisect_right(self._begins, at), bisect_left(self._begins, at + self.row_tokens + 1)
        return np.array(self._begins[first:last], np.int64) - at

    def _drop(self, count: int) -> None:
        """Forget the tokens before the next row."""
        if not count:
            return
        rest = np.concatenate(self._pieces)[count:].copy()  # not a view: it would hold the memory of the others
        self._pieces, self._have = [rest], len(rest)
        gone = max(bisect_right(self._begins, count) - 1, 0)
        if not self._have:
            self._pieces, gone = [], len(self._begins)
        self._names = self._names[gone:]
        self._begins = [begin - count for begin in self._begins[gone:]]
