"""The order: position -> (source, row, epoch) and back, as a pure function with O(1) memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.errors import SpecError
from penstock.order.mix import Pattern, build_pattern, integer_shares
from penstock.order.natural import Natural
from penstock.order.permute import Permutation, permutation
from penstock.order.pool import Pool, pool
from penstock.spec import one_of, suggest

__all__ = ["ORDER_VERSION", "Draw", "Order", "Stretch"]

ORDER_VERSION = 1
"""Saved positions of running jobs depend on the order: a new algorithm is a new version, never a changed one."""


class Draw(NamedTuple):
    """What lies at some positions, one entry each."""

    source: NDArray[np.int32]
    index: NDArray[np.int64]  # type: ignore[assignment]  # shadows tuple.index, which nobody needs here
    epoch: NDArray[np.int64]


class Stretch(NamedTuple):
    """Consecutive rows that a source gives, and where those rows lie: what can be read before it is needed."""

    source: int
    epoch: int
    first: int
    """[first, last): how many rows the source gave before, counted through its epochs."""
    last: int
    rows: list[tuple[int, int]]
    """Rows [first, last) of the source, which are all that this stretch gives."""


class Order:
    """Which row of which source lies at each position of the global stream.

    >>> order = Order({"web": 6, "code": 2}, seed=7)
    >>> draw = order.at(range(8))                      # one epoch: every row of every source once
    >>> draw.source.tolist()                           # in natural proportion
    [0, 0, 1, 0, 0, 0, 1, 0]
    >>> order.positions(0, draw.index[:2], 0).tolist() # and back
    [0, 1]
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        *,
        seed: int,
        weights: Mapping[str, float] | None = None,
        shuffle: str = "global",
        pool: tuple[int, int] | None = None,
    ) -> None:
        """`pool`: (rows of a block, blocks of a window), for shuffle="pool"."""
        self.names = tuple(sizes)
        self.sizes = tuple(sizes.values())
        self.seed = seed
        self.shuffle = one_of(("global", "pool", "none"), shuffle=shuffle)
        if (shuffle == "pool") != (pool is not None):
            raise SpecError(
                f"shuffle={shuffle!r} {'needs' if pool is None else 'has no'} windows of blocks",
                parameter="pool",
                remedy="pool=(block_rows, window_blocks), with shuffle='pool' only",
            )
        self.pool = pool
        self._size = np.array(self.sizes, np.int64)
        self.pattern: Pattern | None = None
        self.natural: Natural | None = None
        self.epoch_rows: int | None = None
        if weights is None:
            self.natural = Natural(self.sizes)
            self.epoch_rows = sum(self.sizes)
            self.shares = [size / self.epoch_rows for size in self.sizes]
        else:
            counts = self._counts(weights)
            self.pattern = build_pattern(counts)
            self.shares = [count / sum(counts) for count in counts]

    def _counts(self, weights: Mapping[str, float]) -> tuple[int, ...]:
        for name in weights:
            if name not in self.names:
                raise SpecError(
                    f"weights name a source {name!r} that is not there",
                    sources=", ".join(self.names),
                    remedy=f"{suggest(name, self.names) or self.names[0]!r}",
                )
        counts = tuple(integer_shares([weights.get(name, 0.0) for name in self.names], self.names)[1])
        for name, size, count in zip(self.names, self.sizes, counts, strict=True):
            if count and not size:
                raise SpecError(
                    f"source {name!r} has a weight but no rows", source=name, remedy=f"weights without {name!r}"
                )
        return counts

    def at(self, positions: ArrayLike) -> Draw:
        """What lies at these positions. Vectorised: ask for many at once."""
        positions = np.asarray(positions, dtype=np.int64)
        if self.pattern is not None:
            source, ordinal = self.pattern.at(positions)
            epoch, within = np.divmod(ordinal, self._size[source])
        else:
            assert self.natural is not None
            assert self.epoch_rows is not None
            epoch, within_epoch = np.divmod(positions, self.epoch_rows)
            if len(self.sizes) == 1:
                source, within = np.zeros(len(positions), np.int32), within_epoch
            else:
                source, within = self.natural.at(within_epoch)
        return Draw(source, self._permute(source, within, epoch), epoch)

    def _permute(
        self, source: NDArray[np.int32], within: NDArray[np.int64], epoch: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        if self.shuffle == "none" or not len(within):
            return within
        if len(self.sizes) == 1 and epoch[0] == epoch[-1] and (epoch == epoch[0]).all():
            return self._permutation(0, int(epoch[0])).at(within)
        index = np.empty_like(within)
        pairs = np.unique(np.stack([source.astype(np.int64), epoch], axis=1), axis=0)
        for which, e in pairs.tolist():
            chosen = np.flatnonzero((source == which) & (epoch == e))
            index[chosen] = self._permutation(which, e).at(within[chosen])
        return index

    def _permutation(self, source: int, epoch: int) -> Permutation | Pool:
        names = (self.seed, self.names[source], epoch)
        if self.pool is not None:
            return pool(self.sizes[source], *self.pool, *names)
        return permutation(self.sizes[source], *names)

    def positions(self, source: int, index: ArrayLike, epoch: int) -> NDArray[np.int64]:
        """Where these rows of a source lie in its given epoch: the inverse of `at`."""
        within = np.asarray(index, dtype=np.int64)
        if self.shuffle != "none":
            within = self._permutation(source, epoch).inverse(within)
        return self.position_of(source, within + epoch * self.sizes[source])

    def position_of(self, source: int, ordinals: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where a source gives its rows number `ordinals`, counted through its epochs."""
        if self.pattern is not None:
            return self.pattern.position(source, ordinals)
        assert self.natural is not None
        assert self.epoch_rows is not None
        epoch, within = np.divmod(ordinals, self.sizes[source])
        positions: NDArray[np.int64] = self.natural.position(source, within) + epoch * self.epoch_rows
        return positions

    def stretches(self, source: int, ordinal: int, longest: int) -> Iterator[Stretch]:
        """What a source gives from its row number `ordinal` on: windows, or `longest` rows at a time if not shuffled.

        Without an end. Rows that are shuffled over a whole epoch lie anywhere in it: there a stretch is an epoch.
        """
        size = self.sizes[source]
        while True:
            epoch, within = divmod(ordinal, size)
            if self.shuffle == "none":
                first, last = within, min(within + longest, size)
                rows = [(first, last)]
            elif self.pool is None:
                first, last, rows = 0, size, [(0, size)]
            else:
                windows = pool(size, *self.pool, self.seed, self.names[source], epoch)
                window = int(windows.window_of(np.array([within]))[0])
                first, last = windows.window_start(window), windows.window_start(window + 1)
                rows = windows.blocks(window)
            yield Stretch(source, epoch, epoch * size + first, epoch * size + last, rows)
            ordinal = epoch * size + last

    def counts(self, position: int) -> list[int]:
        """Rows of each source that lie before a position."""
        if self.pattern is not None:
            return self.pattern.counts(position)
        assert self.natural is not None
        assert self.epoch_rows is not None
        epoch, within = divmod(position, self.epoch_rows)
        return [epoch * n + c for n, c in zip(self.sizes, self.natural.counts(within), strict=True)]

    def exhausted_at(self, *, first: bool) -> int:
        """Rows after which the first (or the last) source with a weight has given its last row of its first epoch."""
        assert self.pattern is not None
        ends = [
            int(self.pattern.position(i, np.array([size - 1]))[0]) + 1
            for i, size in enumerate(self.sizes)
            if self.pattern.counts_per_cycle[i]
        ]
        return min(ends) if first else max(ends)
