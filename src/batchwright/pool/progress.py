"""How far a run is, and which part of it one process draws: of the lanes of its rank, those of its worker."""

from __future__ import annotations

from typing import NamedTuple

from batchwright.base.errors import PlanError, SpecError
from batchwright.pool.plan import PoolPlan
from batchwright.pool.state import Cursor
from batchwright.pool.turns import even_ends, lanes_of_rank, lanes_of_worker, worker_turns

__all__ = ["Process", "Progress"]


class Process(NamedTuple):
    """Which process of a run this is."""

    rank: int
    world_size: int
    worker: int | None = None
    """None: the process of the training loop itself."""
    workers: int = 0

    @property
    def num_processes(self) -> int:
        """How many processes draw."""
        return self.world_size * max(1, self.workers)


class Progress:
    """The cursor of one dataset, as far as this process knows: exact for its own lanes; the others' are taken to be as
    many turns further as it is itself."""

    def __init__(self) -> None:
        self.cursor: Cursor = Cursor()
        self.ends: list[int] | None = None
        """Where each lane ends in this pass, if every rank shall have as many whole batches."""
        self.own_lanes: list[int] | None = None
        """Of a worker in mid-epoch: the lanes that it began with. Its view of the others' lanes is old."""
        self._lanes_are_loaded = False
        """The number of lanes came with a state: other numbers of processes must divide it."""
        self._base: list[int] = []
        """What was drawn from each lane when the pass began; since then there were turns of `_turn_rows`."""
        self._turn_rows, self._workers = 1, 1

    def go_to(self, cursor: Cursor, *, is_loaded: bool, own_lanes: list[int] | None = None) -> None:
        self.cursor, self._lanes_are_loaded, self.own_lanes = cursor, is_loaded and cursor.lanes > 0, own_lanes
        self._base, self.ends = list(cursor.drawn), None

    def end_epoch(self) -> None:
        self.cursor = self.cursor.next_epoch()
        self._base, self.ends, self.own_lanes = list(self.cursor.drawn), None, None

    def lanes_for(self, num_processes: int) -> int:
        """How many lanes a pass of so many processes has. In mid-epoch those that there are; at the beginning of an
        epoch as many as processes, unless a state says it, and they divide its lanes."""
        lanes = self.cursor.lanes
        is_free = self.cursor.is_at_start and not (self._lanes_are_loaded and lanes % num_processes == 0)
        return num_processes if is_free else lanes

    def begin(self, plan: PoolPlan, process: Process, rows: int, is_even: bool) -> list[int]:
        """Begin a pass with turns of `rows`: fixes how many lanes there are, and how large their pools.

        Returns the lanes that this process draws from.
        """
        cursor = self.cursor
        drawn = self.drawn_by_all(plan, process)  # where a pass was broken off, the others' lanes went on, too
        lanes, is_new = self.lanes_for(process.num_processes), cursor.is_at_start
        if is_new:
            drawn = [0] * lanes
        elif lanes % process.num_processes:
            raise PlanError(
                f"this stream is in mid-epoch with {cursor.lanes} lane{'s' * (cursor.lanes > 1)}, "
                f"which {process.num_processes} processes cannot share evenly",
                parameter="num_workers" if process.workers else "world_size",
                lanes=cursor.lanes,
                processes=f"ranks: {process.world_size}, workers of each: {process.workers}",
                remedy=f"ranks x workers that divide {cursor.lanes}: {_divisors(cursor.lanes)}; or "
                f"reset(epoch={cursor.epoch + 1}), which leaves out the rest of this epoch",
            )
        size = plan.size(drawn, len(drawn) // process.world_size)
        if size.entries < rows and not plan.in_order:
            shared = f": pool_size={plan.pool_entries:,} is shared by {len(drawn)} lanes" if len(drawn) > 1 else ""
            raise SpecError(
                f"a pool of {size.entries:,} entries is smaller than a batch of {rows:,}{shared}",
                parameter="pool_size",
                remedy=f"pool_size={rows * len(drawn) * 4}, or smaller batches",
            )
        sizes = [] if is_new else cursor.sizes
        if not sizes or not sizes[-1].is_like(size):
            sizes = [*sizes, size]
        self.cursor = Cursor(cursor.epoch, drawn, sizes)
        self._turn_rows, self._workers, self._base = rows, max(1, process.workers), list(drawn)
        self.ends = even_ends(drawn, plan.lane_sizes(len(drawn)), rows, process.world_size) if is_even else None
        mine = self._lanes_of(process)
        self.own_lanes = None if process.worker is None else list(mine)
        return mine

    def _lanes_of(self, process: Process) -> list[int]:
        if process.worker is None:
            process = process._replace(worker=0, workers=1)
        elif self.own_lanes is not None:
            return list(self.own_lanes)
        of_rank = lanes_of_rank(self.cursor.lanes, process.rank, process.world_size)
        return lanes_of_worker(self.cursor.drawn, of_rank, process.worker or 0, process.workers)

    def drawn_by_all(self, plan: PoolPlan, process: Process) -> list[int]:
        """What was drawn from each lane, if every rank and worker has taken as many turns as this one."""
        drawn, ends = list(self.cursor.drawn), self._lane_ends(plan)
        turns = [-(-(at - base) // self._turn_rows) for at, base in zip(drawn, self._base, strict=True)]
        num_turns = sum(turns) * (1 if process.worker is None else process.workers)
        for rank in range(process.world_size) if num_turns else ():
            lanes = lanes_of_rank(len(drawn), rank, process.world_size)
            of_workers = [lanes_of_worker(self._base, lanes, worker, self._workers) for worker in range(self._workers)]
            after = worker_turns(self._base, ends, of_workers, num_turns, self._turn_rows)
            for lane in lanes:
                if rank != process.rank or (self.own_lanes is not None and lane not in self.own_lanes):
                    drawn[lane] = after[lane]
        return drawn

    def to_save(self, plan: PoolPlan, process: Process) -> Cursor:
        """The cursor for a state. After the last batch of an epoch it is in the next one, also before the pass itself
        has found that it is at its end."""
        cursor, ends = self.cursor.copy(), self._lane_ends(plan)
        cursor.drawn = self.drawn_by_all(plan, process)
        if not cursor.lanes or ends is None or self.own_lanes is not None:
            return cursor  # a worker that is at its end must not begin the next epoch while others go on with this one
        is_at_end = all(at >= end for at, end in zip(cursor.drawn, ends, strict=True))
        return cursor.next_epoch() if is_at_end else cursor

    def _lane_ends(self, plan: PoolPlan) -> list[int] | None:
        """Where each lane ends in this epoch; None where only decoding would tell."""
        if self.ends is not None:
            return self.ends
        return None if plan.shards.known_rows is None else plan.lane_sizes(self.cursor.lanes)


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
