"""Refills of a pool, and the draws between them. The draw of each row of a sequence follows from numbers alone.

Rows come in shards. A pool holds entries, `factor` for each row, in the order in which they will be drawn. At the draw
that leaves `threshold` entries, whole shards are added while they fit, at least one. Then all entries, the remaining
ones first, are permuted under the key of this refill. If the limit of held rows has no room for the next shard at that
draw, the refill comes later, at the first draw with enough room. The stream depends on the number of draws alone, not
on a clock or on data, so seeking only permutes numbers.

If a stream is cut into lanes, row m of the sequence belongs to lane m mod L, and each lane has a pool of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.base.seeds import key_of, mix64

__all__ = [
    "Names",
    "NoRoom",
    "PoolSize",
    "Refill",
    "Refills",
    "generations",
    "lane_share",
    "mixed_in",
    "refill_key",
    "replay",
]

Names = tuple[str | int, ...] | None
_MIXED_AT_ONCE = 1 << 16
"""Hashes made at once: bounds what a permutation needs beside itself."""


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The size of a lane's pool, from some draw on."""

    at: int
    """Entries of the lane that were drawn when this came into force."""
    entries: int
    threshold: int
    most_rows: int | None = None
    """The largest number of rows that the pool may hold, regardless of `entries`; None: any number."""


@dataclass(frozen=True, slots=True)
class Refill:
    """The shards that are added to a pool at once."""

    number: int
    at: int
    """Entries of the lane that were drawn before it."""
    survivors: int
    """Entries that were left."""
    shards: range
    """The added shards, as places in the epoch's sequence."""
    first_row: int
    """The added rows are rows [first_row, first_row + num_rows) of the lane."""
    num_rows: int


class NoRoom(Exception):
    """A shard has more than `most_rows` rows; with `shard=None`, the rows held already do. Nothing was added."""

    most_rows: int
    shard_rows: int
    held_rows: int
    shard: int | None

    def __init__(self, shard: int | None, held_rows: int, shard_rows: int, most_rows: int) -> None:
        self.shard, self.held_rows, self.shard_rows, self.most_rows = shard, held_rows, shard_rows, most_rows
        super().__init__(f"{held_rows} rows and the {shard_rows} of shard {shard} are more than {most_rows}")


class Refills:
    """The refills of one lane in one epoch, one after another.

    >>> refills = Refills([6, 6, 6, 6].__getitem__, 4, [PoolSize(0, entries=12, threshold=8)])
    >>> refills.next(held_rows=0)
    Refill(number=0, at=0, survivors=0, shards=range(0, 2), first_row=0, num_rows=12)
    >>> refills.due()                            # 12 entries are 8 after 4 draws
    4
    >>> refills.next(held_rows=8)                # at least one, though only 4 would fit
    Refill(number=1, at=4, survivors=8, shards=range(2, 3), first_row=12, num_rows=6)
    """

    def __init__(
        self, rows_of: Callable[[int], int], num_shards: int, sizes: Sequence[PoolSize], factor: int = 1
    ) -> None:
        """`rows_of(i)` returns the number of rows of shard i that belong to this lane. It is called for one shard after
        another, when needed. `sizes` are in the order of their first draws; the first size begins at draw 0.
        """
        self._rows_of, self._num_shards, self._sizes = rows_of, num_shards, list(sizes)
        self.factor: int = factor
        self._shard = self._row = self._number = 0
        self._at = self._entries = self._held_rows = 0
        """The draw of the last refill, the entries in the pool after it, and their rows."""

    @property
    def is_limited(self) -> bool:
        """Whether the number of rows held matters to any refill."""
        return any(size.most_rows is not None for size in self._sizes)

    def due(self) -> int | None:
        """The draw at which the next refill happens; None when no shard is left."""
        if self._shard >= self._num_shards:
            return None
        return self._next()[0]

    def end(self) -> int:
        """The draw after which no entry of the added shards is left."""
        return self._at + self._entries

    def until(self) -> int:
        """The draw at which the next refill happens, or after which nothing is left."""
        due = self.due()
        if due is None:
            return self.end()
        return due

    def next(self, held_rows: int) -> Refill:
        """Make the refill that is due. `held_rows`: the number of rows with at least one entry left at that draw."""
        at, size = self._next()
        survivors = self.end() - at
        first_shard, shard, num_rows = self._shard, self._shard, 0
        while shard < self._num_shards:
            rows = self._rows_of(shard)
            is_first = shard == first_shard
            if not is_first and survivors + (num_rows + rows) * self.factor > size.entries:
                break
            if size.most_rows is not None and held_rows + num_rows + rows > size.most_rows:
                if is_first:
                    raise NoRoom(shard, held_rows, rows, size.most_rows)
                break
            shard, num_rows = shard + 1, num_rows + rows
        refill = Refill(self._number, at, survivors, range(first_shard, shard), self._row, num_rows)
        self._number, self._shard, self._row = self._number + 1, shard, self._row + num_rows
        self._at, self._entries = at, survivors + num_rows * self.factor
        self._held_rows = held_rows + num_rows
        return refill

    def _next(self) -> tuple[int, PoolSize]:
        for size, later in zip(self._sizes, [*self._sizes[1:], None], strict=True):
            due = max(self._at, size.at, self.end() - self._threshold(size))
            if later is None or due < later.at:
                return due, size
        raise AssertionError

    def _threshold(self, size: PoolSize) -> int:
        """Entries that are left when the next shard is added. There are fewer if held rows leave no room for the shard.

        >>> refills = Refills([6, 6].__getitem__, 2, [PoolSize(0, entries=12, threshold=8, most_rows=9)])
        >>> refills.next(held_rows=0).num_rows, refills.due()        # 3 entries are left after 3 draws
        (6, 3)
        """
        if size.most_rows is None:
            return size.threshold
        room = size.most_rows - self._rows_of(self._shard)
        if self._held_rows <= room:
            return size.threshold
        return min(size.threshold, max(0, room))


def lane_share(first: int, rows: int, lane: int, lanes: int) -> tuple[int, int]:
    """(first row, number of rows) of the rows of a shard that belong to a lane: every `lanes`-th row.

    The shard begins at row `first` of the sequence.

    >>> [lane_share(10, 7, lane, 4) for lane in range(4)]        # rows 10 to 16 are of lanes 2, 3, 0, 1, 2, 3, 0
    [(2, 2), (3, 1), (0, 2), (1, 2)]
    """
    offset = (lane - first) % lanes
    return offset, max(0, -(-(rows - offset) // lanes))


def mixed_in(survivors: NDArray[Any], new: NDArray[Any], key: int | None) -> NDArray[Any]:
    """Remaining and new entries in one array, permuted under a key. None: not permuted.

    >>> mixed_in(np.array([10, 11]), np.array([0, 1, 2]), key=5).tolist()
    [0, 2, 10, 11, 1]
    """
    entries = np.concatenate([survivors, new])
    if key is None:
        return entries
    return entries.take(_permuted(len(entries), key))


def refill_key(names: Names, number: int) -> int | None:
    """The key of a refill of a stream with these names; None if `names` is None and nothing is permuted."""
    if names is None:
        return None
    return key_of(*names, number)


def _permuted(n: int, key: int) -> NDArray[np.int64]:
    """The numbers below n, sorted by their keyed hashes. The low bits of a hash are replaced by the number itself.

    Sorting such hashes is twice as fast as sorting numbers by hashes. No two are equal, so every sort gives the same
    result.
    """
    bits = max(n - 1, 1).bit_length()
    number, keep_high = np.uint64((1 << bits) - 1), np.uint64((1 << 64) - (1 << bits))
    hashes = np.arange(n, dtype=np.uint64)
    for start in range(0, n, _MIXED_AT_ONCE):
        part = hashes[start : start + _MIXED_AT_ONCE]
        part |= mix64(part, np.uint64(key)) & keep_high
    hashes.sort()
    hashes &= number
    return hashes.view(np.int64)


@dataclass(frozen=True, slots=True)
class Generation:
    """The entries that are drawn between two refills."""

    refill: Refill
    order: NDArray[Any]
    """Every entry of the pool, as row * factor + which, in the order of drawing."""
    until: int
    """The draw at which the next refill happens, or after which nothing is left."""


def generations(refills: Refills, names: Names) -> Iterator[Generation]:
    """The generations of a lane's epoch, one after each refill. `names` and the refill's number key each of them."""
    left = np.empty(0, np.int32)
    while refills.due() is not None:
        refill, order = _refilled(refills, left, names)
        until = refills.until()
        yield Generation(refill, order, until)
        left = order[until - refill.at :]


def replay(refills: Refills, drawn: int, names: Names) -> NDArray[Any]:
    """The entries left in the pool after some draws, in the order of drawing. `refills` is advanced to that draw.

    A refill that is due at just that draw has not happened yet.
    """
    order, at = np.empty(0, np.int32), 0
    while (due := refills.due()) is not None and due < drawn:
        refill, order = _refilled(refills, order[due - at :], names)
        at = refill.at
    return order[drawn - at :]


def _refilled(refills: Refills, left: NDArray[Any], names: Names) -> tuple[Refill, NDArray[Any]]:
    refill = refills.next(num_rows_of(left, refills.factor) if refills.is_limited else 0)
    first, last = (row * refills.factor for row in (refill.first_row, refill.first_row + refill.num_rows))
    new = np.arange(first, last, dtype=np.int32 if last < 1 << 31 else np.int64)
    return refill, mixed_in(left, new, refill_key(names, refill.number))


def num_rows_of(entries: NDArray[Any], factor: int) -> int:
    """The number of rows that these entries belong to.

    >>> num_rows_of(np.array([0, 5, 4]), factor=4)               # entry 0 is of row 0, entries 4 and 5 are of row 1
    2
    """
    if factor == 1 or not len(entries):
        return len(entries)
    rows = np.sort(entries // factor)
    return 1 + int(np.count_nonzero(rows[1:] != rows[:-1]))
