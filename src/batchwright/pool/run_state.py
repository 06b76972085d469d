"""State of a run: its cursor, and the part of it that one process draws."""

from __future__ import annotations

from typing import NamedTuple

from batchwright.base.errors import PlanError, SpecError
from batchwright.base.words import counted
from batchwright.pool.plan import PoolPlan
from batchwright.pool.state import Cursor
from batchwright.pool.turns import even_ends, lanes_of_rank, lanes_of_worker, worker_turns

__all__ = ["Process", "RunState"]


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
        raise PlanError(
            f"this stream is in mid-epoch with {counted(lanes, 'lane')}, "
            f"which {process.num_processes} processes cannot share evenly",
            parameter="num_workers" if process.workers else "world_size",
            lanes=lanes,
            processes=f"ranks: {process.world_size}, workers of each: {process.workers}",
            remedy=f"ranks x workers that divide {lanes}: {_divisors(lanes)}; or "
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


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
