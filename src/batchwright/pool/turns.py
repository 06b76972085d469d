"""Turns of lanes, and the cursor of a run, as each of its processes computes it.

The next turn belongs to the lane with the fewest entries drawn, the lowest number first. No other state is kept, so a
resumed run, on the same number of processes or on fewer, takes the same turns as the original run. Lane l
belongs to rank l mod R.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from batchwright.base.errors import PlanError, SpecError
from batchwright.base.words import counted
from batchwright.pool.plan import PoolPlan
from batchwright.pool.state import Cursor


def lanes_of_rank(lanes: int, rank: int, world_size: int) -> list[int]:
    return list(range(rank, lanes, world_size))


def lanes_of_worker(drawn: Sequence[int], mine: Sequence[int], worker: int, workers: int) -> list[int]:
    """The lanes of one worker of a rank: torch asks worker 0 first, so it has the lane whose turn is next.

    >>> lanes_of_worker(drawn=[64, 64, 64, 0], mine=[1, 3], worker=0, workers=2)
    [3]
    """
    by_turn = sorted(mine, key=lambda lane: (drawn[lane], lane))
    return sorted(by_turn[worker::workers])


def next_lane(drawn: Sequence[int], ends: Sequence[int], lanes: Sequence[int]) -> int | None:
    """The lane whose turn is next; None if all are at their end."""
    live = [lane for lane in lanes if drawn[lane] < ends[lane]]
    return min(live, key=lambda lane: (drawn[lane], lane), default=None)


def take_turns(drawn: Sequence[int], ends: Sequence[int], lanes: Sequence[int], num_turns: int, rows: int) -> list[int]:
    """Entries drawn from each lane after `num_turns` more turns of `rows` entries.

    >>> take_turns([64, 0, 0, 0], [999] * 4, [0, 2], num_turns=2, rows=64)           # lane 2, then lane 0
    [128, 0, 64, 0]
    """
    after = list(drawn)
    while num_turns and (lane := next_lane(after, ends, lanes)) is not None:
        live = [other for other in lanes if after[other] < ends[other]]
        rounds = min(num_turns // len(live), *((ends[other] - after[other]) // rows for other in live))
        is_in_step = max(after[other] for other in live) - after[lane] <= rows  # then each has one turn in a round
        if rounds and is_in_step:
            for other in live:
                after[other] += rounds * rows
            num_turns -= rounds * len(live)
        else:
            after[lane] += min(rows, ends[lane] - after[lane])
            num_turns -= 1
    return after


def worker_turns(
    drawn: Sequence[int], ends: Sequence[int], workers: Sequence[Sequence[int]], num_turns: int, rows: int
) -> list[int]:
    """`take_turns` where each of the workers has some lanes, and torch asks the workers one after another.

    The two differ where some lanes are far behind: one worker has those, and is asked no more often for it.

    >>> worker_turns([10, 0], [999] * 2, [[1], [0]], num_turns=4, rows=4)
    [18, 8]
    >>> take_turns([10, 0], [999] * 2, [0, 1], num_turns=4, rows=4)
    [14, 12]
    """
    most = [sum(-(-max(0, ends[lane] - drawn[lane]) // rows) for lane in lanes) for lanes in workers]
    rounds = bisect_right(range(num_turns + 1), num_turns, key=lambda each: sum(min(own, each) for own in most)) - 1
    left = num_turns - sum(min(own, rounds) for own in most)
    after = list(drawn)
    for lanes, own in zip(workers, most, strict=True):
        has_one_more = own > rounds and left > 0
        left -= has_one_more
        after = take_turns(after, ends, lanes, min(own, rounds) + has_one_more, rows)
    return after


def even_ends(drawn: Sequence[int], sizes: Sequence[int], rows: int, world_size: int) -> list[int]:
    """The ends of lanes if every batch is full and every rank has equally many, from here to the end of the epoch.

    >>> even_ends([0, 0, 0], sizes=[31, 30, 29], rows=10, world_size=3)
    [20, 20, 20]
    """
    full = min(sizes) // rows * rows
    ends = [max(full, at) for at in drawn]
    ranks = [lanes_of_rank(len(ends), rank, world_size) for rank in range(world_size)]
    left = [sum((ends[lane] - drawn[lane]) // rows for lane in lanes) for lanes in ranks]
    for lanes, steps in zip(ranks, left, strict=True):
        for _ in range(steps - min(left)):  # after a change of ranks in mid-round some are a step ahead
            longest = max(lanes, key=lambda lane: ends[lane] - drawn[lane])
            ends[longest] -= rows
    return [at + (end - at) // rows * rows for at, end in zip(drawn, ends, strict=True)]


# The cursor


class Process(NamedTuple):
    """One process of a run."""

    rank: int
    world_size: int
    worker: int | None = None
    """None for the process of the training loop itself."""
    workers: int = 0

    @property
    def num_processes(self) -> int:
        """The number of processes that draw."""
        return self.world_size * max(1, self.workers)


class RunState:
    """The cursor of one dataset, as one process knows it: exact for its own lanes; it takes the other processes to have
    had as many turns as itself."""

    def __init__(self) -> None:
        self.go_to(Cursor(), is_loaded=False)
        self._turn_rows, self._workers = 1, 1

    def go_to(self, cursor: Cursor, *, is_loaded: bool, own_lanes: list[int] | None = None) -> None:
        self.cursor: Cursor = cursor
        self.own_lanes: list[int] | None = own_lanes
        """The lanes that a worker in mid-epoch began with. Its view of the others' lanes is old."""
        self._even_ends: list[int] | None = None
        """The end of each lane in this pass, if every rank shall have as many full batches."""
        self._lanes_are_loaded = is_loaded and cursor.lanes > 0
        """The number of lanes came with a state: other numbers of processes must divide it."""
        self._base = list(cursor.drawn)
        """Entries drawn from each lane when the pass began; since then there were turns of `_turn_rows`."""

    def end_epoch(self) -> None:
        self.go_to(self.cursor.next_epoch(), is_loaded=self._lanes_are_loaded)

    def ends(self, plan: PoolPlan) -> list[int]:
        """The end of each lane in this epoch."""
        return self._even_ends or plan.lane_sizes(self.cursor.lanes)

    def lanes_for(self, num_processes: int) -> int:
        """The number of lanes of a pass. In mid-epoch those that there are; at the beginning of an epoch as many as
        processes, unless a state has a number that they divide."""
        lanes = self.cursor.lanes
        keeps_lanes = self._lanes_are_loaded and lanes % num_processes == 0
        if self.cursor.is_at_start and not keeps_lanes:
            return num_processes
        return lanes

    def begin(self, plan: PoolPlan, process: Process, rows: int, is_even: bool) -> list[int]:
        """Begin a pass with turns of `rows`: fixes the number of lanes, and the size of their pools.

        Returns the lanes that this process draws from.
        """
        cursor = self.cursor
        lanes = self.lanes_for(process.num_processes)
        if cursor.is_at_start:
            begun = Cursor(cursor.epoch, [0] * lanes)
        else:
            self._refuse_uneven(process)
            # If a pass was broken off, the others' lanes advanced, too.
            begun = Cursor(cursor.epoch, self._drawn_by_all(plan, process), list(cursor.sizes))
        size = plan.size(begun.drawn, lanes // process.world_size)
        if size.entries < rows and not plan.in_order:
            raise SpecError(
                f"a pool of {size.entries:,} entries is smaller than a batch of {rows:,}: "
                f"pool_size={plan.pool_entries:,} is shared by {counted(lanes, 'lane')}",
                parameter="pool_size",
                remedy=f"pool_size={rows * lanes * 4}, or smaller batches",
            )
        begun.with_size(size)
        self.cursor, self._base = begun, list(begun.drawn)
        self._turn_rows, self._workers = rows, max(1, process.workers)
        self._even_ends = None
        if is_even:
            self._even_ends = even_ends(begun.drawn, plan.lane_sizes(lanes), rows, process.world_size)
        mine = self._lanes_of(process)
        self.own_lanes = None
        if process.worker is not None:
            self.own_lanes = list(mine)
        return mine

    def _refuse_uneven(self, process: Process) -> None:
        lanes = self.cursor.lanes
        if lanes % process.num_processes == 0:
            return
        divisors = ", ".join(str(n) for n in range(1, lanes + 1) if lanes % n == 0)
        raise PlanError(
            f"this stream is in mid-epoch with {counted(lanes, 'lane')}, "
            f"which {process.num_processes} processes cannot share evenly",
            parameter="num_workers" if process.workers else "world_size",
            lanes=lanes,
            processes=f"ranks: {process.world_size}, workers of each: {process.workers}",
            remedy=f"ranks x workers that divide {lanes}: {divisors}; or "
            f"reset(epoch={self.cursor.epoch + 1}), which leaves out the rest of this epoch",
        )

    def _lanes_of(self, process: Process) -> list[int]:
        of_rank = lanes_of_rank(self.cursor.lanes, process.rank, process.world_size)
        if process.worker is None:
            return of_rank
        if self.own_lanes is not None:
            return list(self.own_lanes)
        return lanes_of_worker(self.cursor.drawn, of_rank, process.worker, process.workers)

    def _drawn_by_all(self, plan: PoolPlan, process: Process) -> list[int]:
        """Entries drawn from each lane, if every rank and worker has taken as many turns as this one."""
        drawn, ends = list(self.cursor.drawn), self.ends(plan)
        num_turns = sum(-(-(at - base) // self._turn_rows) for at, base in zip(drawn, self._base, strict=True))
        if not num_turns:
            return drawn
        if process.worker is not None:
            num_turns *= process.workers
        mine = self.own_lanes
        if mine is None:
            mine = lanes_of_rank(len(drawn), process.rank, process.world_size)
        for rank in range(process.world_size):
            lanes = lanes_of_rank(len(drawn), rank, process.world_size)
            workers = [lanes_of_worker(self._base, lanes, worker, self._workers) for worker in range(self._workers)]
            after = worker_turns(self._base, ends, workers, num_turns, self._turn_rows)
            for lane in set(lanes).difference(mine):
                drawn[lane] = after[lane]
        return drawn

    def to_save(self, plan: PoolPlan, process: Process) -> Cursor:
        """The cursor for a state. After the last batch of an epoch it is in the next one, even before the pass has
        found that it is at its end."""
        saved = self.cursor.copy()
        saved.drawn = self._drawn_by_all(plan, process)
        is_at_end = all(at >= end for at, end in zip(saved.drawn, self.ends(plan), strict=True))
        # A worker at its end must not begin the next epoch while others continue this one.
        if saved.lanes and is_at_end and self.own_lanes is None:
            return saved.next_epoch()
        return saved
