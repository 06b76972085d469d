"""Passes over a mixed stream, one at a time, and the run state that they advance."""

from __future__ import annotations

import logging
import mmap
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np

from batchwright.base.errors import MemoryLimitError, PlanError, SpecError
from batchwright.batches.ranks import Ranks, find_ranks
from batchwright.order.refills import NoRoom
from batchwright.pool.augment import Augmentation, apply
from batchwright.pool.memory import MachineFull
from batchwright.pool.plan import PoolPlan
from batchwright.pool.refilled import RefilledPool
from batchwright.pool.shards import Columns
from batchwright.pool.state import Cursor, SavedState, ShardNames, State, state_of
from batchwright.pool.turns import Process, RunState, lanes_of_rank, next_lane

log: logging.Logger = logging.getLogger("batchwright")
Transform = Callable[[Columns], Mapping[str, Any]]
_ROWS_AT_ONCE = 1024
"""The rows drawn at once when they are handed out one by one."""


@dataclass(kw_only=True)
class Passes:
    """A stream, and the position of this process in it. A newer pass ends the one before."""

    plan: PoolPlan
    num_directories: int
    augmentation: Augmentation | None
    transform: Transform | None
    is_seed_given: bool
    can_stop: bool
    """The memory limit may end a pass without an error."""
    given_ranks: Ranks | None

    def __post_init__(self) -> None:
        shards = self.plan.shards
        self.names: ShardNames = ShardNames(shards.files, shards.marks, self.num_directories)
        self.run: RunState = RunState()
        self.stopped_early: bool = False
        """Whether the last pass ended at the memory limit, before its epoch did."""
        self.reports_stops: bool = False
        """Whether the reader of this worker learns that it stopped early."""
        self._pass = 0
        """The number of the last pass."""
        self._pools: dict[int, RefilledPool] = {}
        self._has_warned = False
        self._workers = WorkerNotes()

    # Passes

    def turns(self, rows: int, is_even: bool) -> Iterator[tuple[int, int, Columns]]:
        """(lane, rows, batch) of each turn of this process, until the end of the epoch."""
        with self._passing(rows, is_even) as lanes:
            number, drawn, ends = self._pass, self.run.cursor.drawn, self.run.ends(self.plan)
            while (lane := next_lane(drawn, ends, lanes)) is not None:
                columns, count = self._draw(number, lane, rows)
                if count < rows and not self._pools[lane].is_at_end:  # something stopped the reader: raise that
                    self._draw(number, lane, rows)
                drawn[lane] += count
                yield lane, count, columns

    def positions(self) -> Iterator[dict[str, Any]]:
        """The positions of this process, one by one, until the end of the epoch."""
        with self._passing(1, is_even=False) as lanes:
            number, drawn, ends = self._pass, self.run.cursor.drawn, self.run.ends(self.plan)
            ahead: dict[int, Iterator[dict[str, Any]]] = {lane: iter(()) for lane in lanes}
            most = None
            if len(lanes) > 1:
                most = 1  # lanes take turns, a position each
            while (lane := next_lane(drawn, ends, lanes)) is not None:
                before = drawn[lane]
                for position in islice(ahead[lane], most):
                    if number != self._pass:
                        raise _ended_by_newer()
                    drawn[lane] += 1
                    yield position
                if drawn[lane] == before:
                    columns, _ = self._draw(number, lane, _ROWS_AT_ONCE)
                    ahead[lane] = iter(_rows_maker(tuple(columns))(columns.values()))

    def follow(self, turns: Iterator[tuple[int, int, Any]]) -> Generator[Any, None, bool]:
        """Hand over batches that workers draw, (lane, rows, columns) each; the cursor moves with them.

        Returns whether this pass came to the end of its epoch.
        """
        number = self._new_pass()
        try:
            for lane, rows, columns in turns:
                if number != self._pass:
                    raise _ended_by_newer()
                if lane < 0:
                    self.stopped_early = True
                    return False
                self.run.cursor.drawn[lane] += rows
                yield columns
        except Exception as error:  # a name that is still there when an interpreter ends in mid-pass
            if isinstance(error, MemoryLimitError):
                error.state = self.state_dict()  # torch makes a worker's error anew, from its text
            raise
        if number != self._pass:
            return False
        self.run.end_epoch()
        return True

    def begin(self, rows: int, is_even: bool, *, workers: int = 0) -> list[int]:
        """Begin a pass. Returns the lanes that this process draws from, if it has no `workers`."""
        process = self._process()
        if workers:
            process = process._replace(workers=workers)
        if not self.is_seed_given and process.world_size > 1:
            what = f"random_seed=None with {process.world_size} ranks: each would draw a seed of its own"
            remedy = "random_seed=0, or another number, the same on all ranks"
            raise SpecError(what, parameter="random_seed", remedy=remedy)
        lanes = self.run.begin(self.plan, process, rows, is_even)
        is_first_worker = process.worker == 0 and not self.reports_stops
        if not self._has_warned and (process.worker is None or is_first_worker):
            self._has_warned = True
            self._warn(process, rows, is_even)
        return lanes

    @contextmanager
    def _passing(self, rows: int, is_even: bool) -> Iterator[list[int]]:
        """A pass of this process over its lanes. At its end comes the next epoch.

        If memory runs out, the error is raised or logged, and the cursor stays at its place.
        """
        lanes = self.begin(rows, is_even)
        number = self._new_pass()
        worker = self._process().worker
        is_plain_worker = worker is not None and not self.reports_stops
        leaves_notes = is_plain_worker and worker == 0
        if leaves_notes:
            self._workers.begin(self.run.cursor)
        pools: dict[int, RefilledPool] = {}
        try:
            pools = self._pools = self.plan.open(self.run.cursor, lanes, self.lanes_here)
            yield lanes
        except MemoryLimitError as error:
            if not self.can_stop or is_plain_worker:
                raise
            self.stopped_early = True
            log.warning("the stream ends before its epoch does: %s", error)
            return
        finally:
            _close(pools)
            if self._pools is pools:
                self._pools = {}
        if number == self._pass:
            if leaves_notes:
                self._workers.finish(self.run.cursor)
            self.run.end_epoch()

    def _draw(self, number: int, lane: int, most: int) -> tuple[Columns, int]:
        """The next entries of a lane, augmented and transformed; and how many they are."""
        if number != self._pass:
            raise _ended_by_newer()
        try:
            columns, which, count = self._pools[lane].draw(most)
        except (NoRoom, MachineFull, MemoryError) as refused:
            error = self.plan.limit_error(refused, self.run.cursor, self.lanes_here, self.pool_bytes)
            error.state = self.state_dict()
            raise error from None
        if not count:
            return columns, 0
        if self.augmentation is not None:
            columns = apply(self.augmentation, columns, which)
        if self.transform is not None:
            columns = _checked_result(self.transform(columns), count)
        return columns, count

    def _new_pass(self) -> int:
        """End the pass that is under way, if there is one: its pools are freed, even if a caller still holds it.

        Returns the number of the next pass.
        """
        self._pass += 1
        pools, self._pools, self.stopped_early = self._pools, {}, False
        _close(pools)
        return self._pass

    # Warnings

    def _warn(self, process: Process, rows: int, is_even: bool) -> None:
        """Report, before anything is read, the settings that will fail."""
        if rows > 1 and not is_even and not self.plan.in_order:
            self._warn_of_uneven_ranks(process, rows)
        warning = self.plan.limit_warning(self.run.cursor, self.lanes_here)
        if warning is not None:
            log.warning("%s", warning)

    def _warn_of_uneven_ranks(self, process: Process, rows: int) -> None:
        lanes = self.run.cursor.lanes
        of_lanes = [-(-size // rows) for size in self.plan.lane_sizes(lanes)]
        ranks = range(process.world_size)
        batches = [sum(of_lanes[lane] for lane in lanes_of_rank(lanes, rank, process.world_size)) for rank in ranks]
        if len(set(batches)) > 1:
            log.warning(
                "ranks have from %d to %d batches in an epoch: training that waits for all of them (DDP) would hang; "
                "drop_last=True gives all as many",
                *(min(batches), max(batches)),
            )

    # Ranks and lanes

    @property
    def ranks(self) -> Ranks:
        return self.given_ranks or find_ranks()

    @property
    def lanes_here(self) -> int:
        """Lanes of this rank."""
        return max(1, self.run.cursor.lanes // self.ranks.world_size)

    def _process(self) -> Process:
        return Process(self.ranks.rank, self.ranks.world_size, *_torch_worker())

    # State

    def state_dict(self) -> State:
        process = self._process()
        if process.worker is None and self._workers.num_passes and self.run.cursor.is_at_start:
            log.warning(
                "workers of a DataLoader draw from this dataset, and what they drew is not in this state: use "
                "ds.loader(...), or torchdata's StatefulDataLoader and its state_dict()"
            )
        state = state_of(self.run.to_save(self.plan, process), self.names, seed=self.plan.seed, **self._settings)
        if self.run.own_lanes is not None:
            state["own_lanes"] = self.run.own_lanes
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved = SavedState.of(state)
        self.names.refuse_others(saved.shards)
        if self.is_seed_given:
            _refuse_other("random_seed", saved.seed, self.plan.seed)
        for name, now in self._settings.items():
            _refuse_other(name, state.get(name), now)
        sizes = self.plan.lane_sizes(saved.lanes)
        if any(at > size for at, size in zip(saved.by_lane, sizes, strict=True)):
            what = f"this state has {saved.drawn:,} draws of an epoch, which has {sum(sizes):,}"
            raise PlanError(what, parameter="state", remedy="what state_dict() returned")
        self.plan, self.is_seed_given = replace(self.plan, seed=saved.seed), True
        self.go_to(saved.cursor, is_loaded=True, own_lanes=saved.own_lanes)

    def go_to(self, cursor: Cursor, *, is_loaded: bool, own_lanes: list[int] | None = None) -> None:
        self._new_pass()
        self._workers = WorkerNotes()
        self.run.go_to(cursor, is_loaded=is_loaded, own_lanes=own_lanes)

    def planned_cursor(self) -> Cursor:
        """The cursor now, or the cursor at the start of the next pass."""
        cursor, world_size = self.run.cursor.copy(), self.ranks.world_size
        cursor.drawn = cursor.drawn or [0] * world_size
        cursor.with_size(self.plan.size(cursor.drawn, max(1, cursor.lanes // world_size)))
        return cursor

    @property
    def _settings(self) -> dict[str, Any]:
        """The settings that must be the same to load a state, besides shards and seed."""
        return {
            "augmentation": self.augmentation and self.augmentation.name,
            "factor": self.plan.factor,
            "max_examples_unaugmented": self.plan.shards.most_rows,
            "is_validation": self.plan.in_order,
        }

    @property
    def pool_bytes(self) -> int:
        """Memory of the pools of this process."""
        return sum(pool.num_bytes for pool in self._pools.values())

    def __getstate__(self) -> dict[str, Any]:
        # The state that workers get. A script's own function travels by value; ranks are known here, not there.
        import cloudpickle

        sent = {**self.__dict__, "_pools": {}, "given_ranks": self.ranks, "run": deepcopy(self.run)}
        return sent | {"transform": cloudpickle.dumps(self.transform)}

    def __setstate__(self, sent: dict[str, Any]) -> None:
        import cloudpickle

        self.__dict__.update(sent, transform=cloudpickle.loads(sent["transform"]))


class WorkerNotes:
    """Notes of forked workers to the process that they were forked from: that they draw, and the epoch they finished.

    A torch DataLoader copies its dataset into every worker, and the copies do not share their progress. A few bytes of
    shared memory are enough to notice two mistakes that are invisible otherwise. Spawned workers share no memory.
    """

    def __init__(self) -> None:
        self._numbers = np.frombuffer(mmap.mmap(-1, 16), np.int64)
        """Passes that workers have begun; and one more than the last epoch that a worker finished."""

    def __reduce__(self) -> tuple[type[WorkerNotes], tuple[()]]:
        return WorkerNotes, ()

    @property
    def num_passes(self) -> int:
        return int(self._numbers[0])

    def begin(self, cursor: Cursor) -> None:
        """Note that a worker draws. Warn if it draws entries that were drawn before."""
        if self._numbers[1] > cursor.epoch and cursor.is_at_start:
            log.warning(
                "epoch %d was read before by workers of this DataLoader: call ds.set_epoch(n) before each pass, or use "
                "ds.loader(...), which goes on to the next epoch by itself",
                cursor.epoch,
            )
        self._numbers[0] += 1

    def finish(self, cursor: Cursor) -> None:
        self._numbers[1] = cursor.epoch + 1


def _close(pools: Mapping[int, RefilledPool]) -> None:
    for pool in pools.values():
        pool.stop()
    for pool in pools.values():
        pool.close()


def _checked_result(result: Any, count: int) -> Columns:
    if not isinstance(result, Mapping) or not result:
        what = f"transform returned {type(result).__name__}, and not a dict of columns"
        raise SpecError(what, parameter="transform", remedy="return a dict of columns: {**columns, 'planes': planes}")
    for name, column in result.items():
        length = len(column) if hasattr(column, "__len__") else "no"
        if length != count:
            what = f"transform gave column {name!r} {length} rows, for a batch of {count}"
            raise SpecError(what, parameter="transform", column=name, remedy="one row for each that was given")
    return dict(result)


def _refuse_other(parameter: str, saved: Any, now: Any) -> None:
    if saved != now:
        what = f"this state was saved with {parameter}={saved!r}, and here it is {now!r}"
        remedy = f"{parameter}={saved!r}, as it was; or begin again, without this state"
        raise PlanError(what, parameter=parameter, remedy=remedy)


def _ended_by_newer() -> PlanError:
    return PlanError(
        "this pass was ended: another one was begun over the same dataset, or its cursor was moved",
        remedy="one pass at a time; make a second dataset to read twice",
    )


def _torch_worker() -> tuple[int | None, int]:
    """(number of this worker, number of workers) in a worker of torch's DataLoader; else (None, 0)."""
    torch = sys.modules.get("torch.utils.data")
    info = torch and torch.get_worker_info()
    if info is None:
        return None, 0
    return info.id, info.num_workers


@lru_cache(maxsize=64)
def _rows_maker(names: tuple[str, ...]) -> Callable[[Any], list[dict[str, Any]]]:
    """A function that makes a dict of each row of some columns, written out for their names: a third faster than
    dict(zip(names, values)).

    >>> _rows_maker(("move", "value"))([[3, 4], [1.0, -1.0]])
    [{'move': 3, 'value': 1.0}, {'move': 4, 'value': -1.0}]
    """
    values = [f"v{place}" for place in range(len(names))]
    pairs = ", ".join(f"{name!r}: {value}" for name, value in zip(names, values, strict=True))
    made: Callable[[Any], list[dict[str, Any]]] = eval(
        f"lambda columns: [{{{pairs}}} for {', '.join(values)}, in zip(*columns)]"
    )
    return made
