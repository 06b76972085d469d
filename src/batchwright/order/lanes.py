"""A stream in C parallel lanes. Each lane has its own windows, so a rank reads only the windows of its lanes.

Rows are dealt to the lanes in turn, `lane_rows` at a time. A batch of lanes * lane_rows rows has one stretch of rows
for each lane. In an epoch a source's blocks are permuted as for one pool, and each lane gets its own stretch of them;
the lanes' stretches tile the epoch. Each lane is an order of its own over its stretches. The lane of a position does
not depend on ranks. If the number of ranks divides the lanes, each rank reads whole lanes; the rows are always the
same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from batchwright.base.errors import SpecError
from batchwright.order.epochs import Epochs, Skips
from batchwright.order.schedule import Draw, Order, Stretch
from batchwright.order.sweep import MixLeg, OrderChange, Schedule, Size
from batchwright.order.windows import Windows, WindowShuffle, groups, window_shuffle

__all__ = ["LaneView"]

_ENDLESS = (1 << 63) - 1


class LaneWindows(Windows):
    """One lane's stretch [start, stop) of a source's permuted blocks, shuffled inside windows."""

    def __init__(self, whole: WindowShuffle, start: int, stop: int, *names: str | int) -> None:
        self.whole: WindowShuffle = whole
        self.start: int = start
        self.n: int = stop - start
        self._names = names
        self.window_rows: int = min(whole.window_rows, self.n)

    def window_start(self, window: int) -> int:
        return min(window * self.window_rows, self.n)

    def window_of(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        windows: NDArray[np.int64] = positions // self.window_rows
        return windows

    def blocks(self, window: int) -> list[tuple[int, int]]:
        rows = np.sort(self._rows_in(window, np.arange(self.window_start(window + 1) - self.window_start(window))))
        borders = np.flatnonzero(np.diff(rows) != 1) + 1
        return [(int(part[0]), int(part[-1]) + 1) for part in np.split(rows, borders)]

    def _rows_in(self, window: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.whole.rows_at(places + (self.start + self.window_start(window)))

    def _windows_of(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        places = self.whole.places_of(rows) - self.start
        windows = self.window_of(places)
        return windows, places - windows * self.window_rows


@lru_cache(maxsize=1024)
def _lane_windows(
    n: int, block_rows: int, window_blocks: int, start: int, stop: int, lane: int, *names: str | int
) -> LaneWindows:
    return LaneWindows(window_shuffle(n, block_rows, window_blocks, *names), start, stop, *names, "lane", lane)


class _Lane(Order):
    """The order of one lane, in its own positions."""

    def __init__(
        self, lane: int, cuts: NDArray[np.int64], sizes: Mapping[str, int], schedule: Schedule, **others: Any
    ) -> None:
        """`cuts`: the borders of the stretches of each source's permuted blocks, [source, lane + 1]."""
        self.lane, self.cuts = lane, cuts
        self.num_lanes = cuts.shape[1] - 1
        self.turns = schedule[0][1] is not None
        """Stretches differ in length by a row, and lanes change them in turn with every epoch: none runs ahead."""
        super().__init__(sizes, weights=schedule, **others)
        self._has_grown = [self.turns] * len(self.names)

    def bounds(self, source: int, epoch: int) -> tuple[int, int]:
        """The lane's stretch of a source's permuted blocks in an epoch: [start, stop)."""
        stretch = (self.lane + epoch) % self.num_lanes if self.turns else self.lane
        return int(self.cuts[source, stretch]), int(self.cuts[source, stretch + 1])

    def epoch_of(self, source: int, ordinals: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        if not self.turns:
            return super().epoch_of(source, ordinals)
        round_, rest = np.divmod(ordinals, int(self.cuts[source, -1]))  # a round: an epoch per lane, each row once
        starts = self._starts(source)
        epoch = np.searchsorted(starts, rest, side="right") - 1
        return round_ * self.num_lanes + epoch, rest - starts[epoch]

    def epoch_size(self, source: int, epoch: int) -> tuple[int, int]:
        if not self.turns:
            return super().epoch_size(source, epoch)
        round_, number = divmod(epoch, self.num_lanes)
        start, stop = self.bounds(source, epoch)
        return round_ * int(self.cuts[source, -1]) + int(self._starts(source)[number]), stop - start

    def _starts(self, source: int) -> NDArray[np.int64]:
        """The rows that the lane gave before each epoch of a round."""
        lengths = np.diff(self.cuts[source])[(self.lane + np.arange(self.num_lanes)) % self.num_lanes]
        starts: NDArray[np.int64] = np.cumsum(lengths) - lengths
        return starts

    def _permutation(self, source: int, epoch: int) -> Windows:
        assert self.pool is not None
        start, stop = self.bounds(source, epoch)
        whole = int(self.cuts[source, -1])
        return _lane_windows(whole, *self.pool, start, stop, self.lane, self.seed, self.names[source], epoch)


class LanedOrder:
    """An order in lanes, with the methods of `Order` that other modules use."""

    pool: tuple[int, int]
    shuffle: str
    lane_rows: int
    num_lanes: int

    def __init__(
        self,
        sizes: Mapping[str, int],
        *,
        seed: int,
        weights: Schedule,
        pool: tuple[int, int],
        lanes: tuple[int, int],
        num_rows: int | None,
        skips: Sequence[tuple[int, int]],
        changes: Sequence[OrderChange] = (),
    ) -> None:
        self.num_lanes, self.lane_rows = lanes
        self.names: tuple[str, ...] = tuple(sizes)
        self.sizes: tuple[int, ...] = tuple(sizes.values())
        self.seed: int = seed
        self.shuffle, self.pool = "pool", pool
        self.growth: tuple[tuple[Size], ...] = tuple((Size(0, 0, n),) for n in self.sizes)
        self.bindings: tuple[()] = ()
        self.skips: Skips = Skips(skips)
        total = sum(self.sizes)
        self._is_natural = weights[0][1] is None
        self._epoch_rows = _ENDLESS
        """Rows after which lanes are dealt anew: an epoch, where every row comes once in it."""
        if self._is_natural:
            self._epoch_rows = total
        ends = [self._before(lane, self._epoch_rows) for lane in range(self.num_lanes + 1)]
        self._lane_epochs: NDArray[np.int64] = np.diff(ends)
        """Rows of an epoch in each lane."""
        # The epochs are the same as those of the mixture without lanes.
        self.epochs: Epochs = Order(
            sizes, seed=seed, weights=weights, num_rows=num_rows, skips=skips, changes=changes
        ).epochs
        self._refuse_small_sources()
        if not self._is_natural:
            ends = list(range(self.num_lanes + 1))
        cuts = _table(self.sizes, ends, exact=self._is_natural)
        self.lanes: list[_Lane] = [
            _Lane(
                lane,
                cuts,
                {name: int(cuts[i, lane + 1] - cuts[i, lane]) for i, name in enumerate(self.names)},
                tuple({self._lane_position(lane, at): mapping for at, mapping in weights}.items()),
                seed=seed,
                shuffle="pool",
                pool=pool,
            )
            for lane in range(self.num_lanes)
        ]

    def _refuse_small_sources(self) -> None:
        for name, n in zip(self.names, self.sizes, strict=True):
            if n < 4 * self.num_lanes:
                raise SpecError(
                    f"source {name!r} has {n} rows, too few for {self.num_lanes} lanes",
                    parameter="lanes",
                    source=name,
                    remedy=f"lanes={max(n // 4, 1)} or fewer, or without lanes",
                )

    # Positions and lanes

    def _split(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(lane, position in that lane) of positions."""
        epoch, within = np.divmod(positions, self._epoch_rows)
        turn, within = np.divmod(within, self.num_lanes * self.lane_rows)
        lane, row = np.divmod(within, self.lane_rows)
        local: NDArray[np.int64] = turn * self.lane_rows + row + epoch * self._lane_epochs[lane]
        return lane, local

    def _join(self, lane: int, local: NDArray[np.int64]) -> NDArray[np.int64]:
        """The positions in the whole stream of a lane's own positions."""
        epoch, local = np.divmod(local, self._lane_epochs[lane])
        turn, row = np.divmod(local, self.lane_rows)
        joined: NDArray[np.int64] = (turn * self.num_lanes + lane) * self.lane_rows + row + epoch * self._epoch_rows
        return joined

    def _before(self, lane: int, positions: int) -> int:
        """The number of the first `positions` positions that belong to earlier lanes."""
        turns, rest = divmod(positions, self.num_lanes * self.lane_rows)
        return turns * lane * self.lane_rows + min(rest, lane * self.lane_rows)

    def _lane_position(self, lane: int, position: int) -> int:
        """The number of positions of a lane before a position."""
        epoch, within = divmod(position, self._epoch_rows)
        here = self._before(lane + 1, within) - self._before(lane, within)
        return epoch * int(self._lane_epochs[lane]) + here

    # The methods of Order

    @property
    def shares(self) -> list[float]:
        if self._is_natural:
            return [n / sum(self.sizes) for n in self.sizes]
        return self.lanes[0].shares

    def at(self, positions: ArrayLike) -> Draw:
        positions = np.asarray(positions, dtype=np.int64)
        lane, local = self._split(positions)
        source = np.empty(len(positions), np.int32)
        index, epoch = np.empty(len(positions), np.int64), np.empty(len(positions), np.int64)
        for number, mine in groups(lane):
            source[mine], index[mine], epoch[mine] = self.lanes[number].at(local[mine])
        return Draw(source, index, epoch)

    def positions(self, source: int, index: ArrayLike, epoch: int) -> NDArray[np.int64]:
        rows = np.asarray(index, dtype=np.int64)
        shuffled = window_shuffle(self.sizes[source], *self.pool, self.seed, self.names[source], epoch)
        lane = np.searchsorted(self.lanes[0].cuts[source, 1:], shuffled.places_of(rows), side="right")
        if self.lanes[0].turns:
            lane = (lane - epoch) % self.num_lanes
        found = np.empty(len(rows), np.int64)
        for number, mine in groups(lane):
            found[mine] = self._join(number, self.lanes[number].positions(source, rows[mine], epoch))
        return found

    def counts(self, position: int) -> list[int]:
        each = [lane.counts(self._lane_position(number, position)) for number, lane in enumerate(self.lanes)]
        return [sum(column) for column in zip(*each, strict=True)]

    given = Order.given

    @property
    def legs(self) -> list[MixLeg]:
        """The legs of lane 0, with their first positions in the whole stream."""
        starts = self._join(0, np.array([leg.start for leg in self.lanes[0].legs]))
        return [leg._replace(start=start) for leg, start in zip(self.lanes[0].legs, starts.tolist(), strict=True)]

    def epochs_begun(self, source: int, position: int) -> int:
        return max(lane.epochs_begun(source, self._lane_position(n, position)) for n, lane in enumerate(self.lanes))

    def first_epoch_ends_at(self, source: int) -> int:
        return max(
            int(self._join(n, np.array([lane.first_epoch_ends_at(source) - 1]))[0]) + 1
            for n, lane in enumerate(self.lanes)
        )

    def exhausted_at(self, *, first: bool) -> int:
        ends = sorted(self.first_epoch_ends_at(i) for i, share in enumerate(self.shares) if share)
        return ends[0 if first else -1]

    def views(self, rank: int, world_size: int) -> list[LaneView]:
        """The lanes of a rank's contiguous share of a batch. Ranks that do not divide the lanes share some."""
        first, last = rank * self.num_lanes // world_size, -(-(rank + 1) * self.num_lanes // world_size)
        return [LaneView(self, lane) for lane in range(first, last)]


class LaneView:
    """One lane, in positions of the whole stream, as reading ahead needs it."""

    def __init__(self, order: LanedOrder, lane: int) -> None:
        self.order: LanedOrder = order
        self.lane: int = lane
        self.sizes: tuple[int, ...] = order.lanes[lane].sizes

    def counts(self, position: int) -> list[int]:
        return self.order.lanes[self.lane].counts(self.order._lane_position(self.lane, position))

    def position_of(self, source: int, ordinals: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.order._join(self.lane, self.order.lanes[self.lane].position_of(source, ordinals))

    def stretches(self, source: int, ordinal: int, longest: int) -> Iterator[Stretch]:
        return self.order.lanes[self.lane].stretches(source, ordinal, longest)


def _table(sizes: Sequence[int], shares: Sequence[int], *, exact: bool) -> NDArray[np.int64]:
    """The borders of each lane's stretch of each source: [source, lane + 1].

    `shares` is cumulative over lanes. With `exact` lane l gets exactly its share of all rows, otherwise an even part of
    each source.
    """
    if not exact:
        return np.array([[n * share // shares[-1] for share in shares] for n in sizes], np.int64)
    rows = list(accumulate(sizes, initial=0))  # Python's integers: products are large
    corner = np.array([[row * share // rows[-1] for share in shares] for row in rows], np.int64)
    return np.diff(corner, axis=0)
