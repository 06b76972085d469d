"""The order: position -> (source, row, epoch) and back, as a pure function with O(1) memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.errors import SpecError
from penstock.order.mix import Pattern, build_pattern, integer_shares
from penstock.order.natural import Natural
from penstock.order.permute import Permutation, permutation
from penstock.spec import one_of, suggest

__all__ = ["ORDER_VERSION", "Draw", "Order"]

ORDER_VERSION = 1
"""Saved positions of running jobs depend on the order: a new algorithm is a new version, never a changed one."""


class Draw(NamedTuple):
    """What lies at some positions, one entry each."""

    source: NDArray[np.int32]
    index: NDArray[np.int64]  # type: ignore[assignment]  # shadows tuple.index, which nobody needs here
    epoch: NDArray[np.int64]


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
    ) -> None:
        self.names = tuple(sizes)
        self.sizes = tuple(sizes.values())
        self.seed = seed
        self.shuffle = one_of(("global", "none"), shuffle=shuffle)
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

    def _permutation(self, source: int, epoch: int) -> Permutation:
        return permutation(self.sizes[source], self.seed, self.names[source], epoch)

    def positions(self, source: int, index: ArrayLike, epoch: int) -> NDArray[np.int64]:
        """Where these rows of a source lie in its given epoch: the inverse of `at`."""
        within = np.asarray(index, dtype=np.int64)
        if self.shuffle != "none":
            within = self._permutation(source, epoch).inverse(within)
        if self.pattern is not None:
            return self.pattern.position(source, within + epoch * self.sizes[source])
        assert self.natural is not None
        assert self.epoch_rows is not None
        return self.natural.position(source, within) + epoch * self.epoch_rows

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
