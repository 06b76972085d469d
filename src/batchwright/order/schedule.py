"""The order: position -> (source, row, epoch) and back, as a pure function with O(1) memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from batchwright.base.checks import one_of
from batchwright.order.epochs import NEVER, Epochs, Skips
from batchwright.order.permute import Permutation, Shuffles, permutation
from batchwright.order.sweep import Binding, MixLeg, OrderChange, Schedule, Size, sweep
from batchwright.order.windows import Windows, groups, window_shuffle

__all__ = ["NEVER", "Draw", "Order", "Stretch"]

ORDER_VERSION = 1
"""Saved positions of running jobs depend on the order: a new algorithm is a new version, never a changed one."""


class Draw(NamedTuple):
    """The rows at some positions, one entry each."""

    source: NDArray[np.int32]
    index: NDArray[np.int64]  # type: ignore[assignment]  # shadows tuple.index, which is not used here
    epoch: NDArray[np.int64]


class Stretch(NamedTuple):
    """Consecutive rows of a source and their places in it. They can be read before they are needed."""

    source: int
    epoch: int
    first: int
    """[first, last): how many rows the source gave before, counted through its epochs."""
    last: int
    rows: list[tuple[int, int]]
    """Rows [first, last) of the source, which are all that this stretch gives."""


class Order:
    """The row and the source at each position of the global stream.

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
        weights: Mapping[str, float] | Schedule | None = None,
        shuffle: str = "global",
        pool: tuple[int, int] | None = None,
        max_epochs: Mapping[str, int] | None = None,
        exhausted: str = "repeat",
        num_rows: int | None = None,
        skips: Sequence[tuple[int, int]] = (),
        changes: Sequence[OrderChange] = (),
    ) -> None:
        """`pool`: (rows of a block, blocks of a window), for shuffle="pool". `skips`: ranges [first, stop)."""
        self.seed = seed
        self.shuffle: str = one_of(("global", "pool", "none"), shuffle=shuffle)
        assert (shuffle == "pool") == (pool is not None), "a plan has blocks if and only if its shuffle is a pool"
        self.pool = pool
        schedule = weights if isinstance(weights, tuple) else ((0, weights),)
        swept = sweep(
            sizes,
            schedule,
            max_epochs=max_epochs or {},
            exhausted=one_of(("repeat", "stop", "renormalise"), exhausted=exhausted),
            num_rows=num_rows,
            changes=changes,
        )
        self.names: tuple[str, ...] = tuple(swept.names)
        self.growth: tuple[tuple[Size, ...], ...] = tuple(map(tuple, swept.sizes))
        """For each source, how many rows its epochs have, and from which on."""
        self.sizes: tuple[int, ...] = tuple(growth[-1].num_rows for growth in swept.sizes)
        """Rows of an epoch of each source, with all that it has got."""
        self.legs: tuple[MixLeg, ...] = tuple(swept.legs)
        self.bindings: tuple[Binding, ...] = tuple(swept.bindings)
        self.skips: Skips = Skips(skips)
        self.epochs: Epochs = Epochs(tuple(swept.eras), swept.limit, self.skips)
        self._size = np.array(self.sizes, np.int64)
        self._shuffles = Shuffles(len(self.names))
        self._has_grown = [len(growth) > 1 for growth in swept.sizes]
        self._leg_starts = np.array([leg.start for leg in self.legs], np.int64)
        self._before = np.array([leg.before for leg in self.legs], np.int64)

    @property
    def shares(self) -> list[float]:
        """The share of each source at the end of the stream."""
        rows = self.legs[-1].mix.counts_per_cycle.tolist()
        rows += [0] * (len(self.names) - len(rows))
        return [count / sum(rows) for count in rows]

    def at(self, positions: ArrayLike) -> Draw:
        """The rows at these positions. Vectorised: ask for many at once."""
        positions = np.asarray(positions, dtype=np.int64)
        if len(self.legs) == 1:
            source, ordinal = self._at_leg(self.legs[0], positions)
        else:
            source, ordinal = np.empty(len(positions), np.int32), np.empty(len(positions), np.int64)
            for number, mine in groups(np.searchsorted(self._leg_starts, positions, side="right") - 1):
                source[mine], ordinal[mine] = self._at_leg(self.legs[number], positions[mine])
        epoch, within = self._epoch_of(source, ordinal)
        return Draw(source, self._permute(source, within, epoch), epoch)

    def _at_leg(self, leg: MixLeg, positions: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """(source, number of earlier rows of that source) of positions of a leg."""
        if leg.start != leg.phase:
            positions = positions - (leg.start - leg.phase)
        source, ordinal = leg.mix.at(positions)
        if leg.start:
            ordinal = ordinal + np.array(leg.base, np.int64)[source]
        return source, ordinal

    def _epoch_of(
        self, source: NDArray[np.int32], ordinal: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(epoch of the source, number inside that epoch) of rows that are counted through epochs."""
        epoch, within = np.divmod(ordinal, self._size[source])
        for number, has_grown in enumerate(self._has_grown):
            if has_grown:
                mine = np.flatnonzero(source == number)
                epoch[mine], within[mine] = self.epoch_of(number, ordinal[mine])
        return epoch, within

    def epoch_of(self, source: int, ordinals: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(epoch, number inside that epoch) of rows of one source, counted through its epochs."""
        growth = self.growth[source]
        which = np.searchsorted([size.first_row for size in growth], ordinals, side="right") - 1
        first_row, first_epoch, num_rows = (np.array(column, np.int64)[which] for column in zip(*growth, strict=True))
        epoch, within = np.divmod(ordinals - first_row, num_rows)
        return epoch + first_epoch, within

    def epoch_size(self, source: int, epoch: int) -> tuple[int, int]:
        """(rows that a source gave before one of its epochs, rows of that epoch)."""
        size = next(s for s in reversed(self.growth[source]) if s.first_epoch <= epoch)
        return size.first_row + (epoch - size.first_epoch) * size.num_rows, size.num_rows

    def _permute(
        self, source: NDArray[np.int32], within: NDArray[np.int64], epoch: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        if self.shuffle == "none" or not len(within):
            return within
        if len(self.sizes) == 1 and epoch[0] == epoch[-1] and (epoch == epoch[0]).all():
            return self._permutation(0, int(epoch[0])).at(within)
        if self.pool is None:
            return self._shuffles.at(source, epoch, within, self._whole_permutation)
        index = np.empty_like(within)
        num_sources = len(self.sizes)
        for key, mine in groups(epoch * num_sources + source):
            e, which = divmod(key, num_sources)
            index[mine] = self._permutation(which, e).at(within[mine])
        return index

    def _permutation(self, source: int, epoch: int) -> Permutation | Windows:
        if self.pool is None:
            return self._whole_permutation(source, epoch)
        return window_shuffle(self.epoch_size(source, epoch)[1], *self.pool, self.seed, self.names[source], epoch)

    def _whole_permutation(self, source: int, epoch: int) -> Permutation:
        return permutation(self.epoch_size(source, epoch)[1], self.seed, self.names[source], epoch)

    def positions(self, source: int, index: ArrayLike, epoch: int) -> NDArray[np.int64]:
        """Positions of rows of a source in an epoch, the inverse of `at`; NEVER for rows that are not given."""
        within = np.asarray(index, dtype=np.int64)
        if self.shuffle != "none":
            within = self._permutation(source, epoch).inverse(within)
        return self.position_of(source, within + self.epoch_size(source, epoch)[0])

    def position_of(self, source: int, ordinals: NDArray[np.int64]) -> NDArray[np.int64]:
        """The positions of rows of a source. `ordinals` number the rows through its epochs."""
        positions = np.empty(len(ordinals), np.int64)
        which = np.searchsorted(self._before[:, source], ordinals, side="right") - 1
        for number, mine in groups(which):
            leg = self.legs[number]
            per_cycle = leg.mix.counts_per_cycle
            if source >= len(per_cycle) or not per_cycle[source]:
                positions[mine] = NEVER
                continue
            found = leg.mix.position(source, ordinals[mine] - leg.base[source])
            positions[mine] = leg.start - leg.phase + found
        return np.minimum(positions, NEVER)

    def stretches(self, source: int, ordinal: int, longest: int) -> Iterator[Stretch]:
        """The stretches of a source from row number `ordinal` on: windows, or `longest` rows at a time if not shuffled.

        The iterator has no end. If rows are shuffled over a whole epoch, a stretch is an epoch.
        """
        while True:
            epoch = int(self.epoch_of(source, np.array([ordinal]))[0][0])
            start, size = self.epoch_size(source, epoch)
            within = ordinal - start
            if self.shuffle == "none":
                first, last = within, min(within + longest, size)
                rows = [(first, last)]
            elif self.pool is None:
                first, last, rows = 0, size, [(0, size)]
            else:
                windows = self._permutation(source, epoch)
                assert isinstance(windows, Windows)
                window = int(windows.window_of(np.array([within]))[0])
                first, last = windows.window_start(window), windows.window_start(window + 1)
                rows = windows.blocks(window)
            yield Stretch(source, epoch, start + first, start + last, rows)
            ordinal = start + last

    def counts(self, position: int) -> list[int]:
        """Rows of each source before a position, skipped ones too."""
        number = int(np.searchsorted(self._leg_starts, position, side="right")) - 1
        counts = self.legs[number].counts(position)
        return counts + [0] * (len(self.names) - len(counts))

    def given(self, position: int) -> list[int]:
        """Rows of each source that were given out before a position, without skipped rows."""
        counts = self.counts(position)
        for first, stop in self.skips.ranges:
            if first < position:
                skipped = zip(self.counts(first), self.counts(min(stop, position)), strict=True)
                counts = [count - (b - a) for count, (a, b) in zip(counts, skipped, strict=True)]
        return counts

    def first_epoch_ends_at(self, source: int) -> int:
        """The position after which a source has given every row of its first epoch; beyond NEVER if it never has."""
        return int(self.position_of(source, np.array([self.epoch_size(source, 0)[1] - 1]))[0]) + 1

    def epochs_begun(self, source: int, position: int) -> int:
        """Epochs of a source that have begun before a position."""
        rows = self.counts(position)[source]
        if not rows:
            return 0
        return 1 + int(self.epoch_of(source, np.array([rows - 1]))[0][0])

    def exhausted_at(self, *, first: bool) -> int:
        """Rows after which the first (or the last) source with a weight has given its last row of its first epoch."""
        ends = sorted(self.first_epoch_ends_at(source) for source in range(len(self.names)))
        ends = [end for end in ends if end <= NEVER]
        return ends[0 if first else -1]

    def views(self, rank: int, world_size: int) -> list[Order]:
        """The orders in which a rank meets its rows. All ranks have the same order, except with lanes."""
        return [self]
