"""The loader: one cursor over a stream of rows, and its batches.

The cursor is a position. It moves when a batch is handed to the caller, not when a batch is made ahead. Everything else
follows from the position: the next batch, the rows seen of each source, the contents of a checkpoint.

    stream    rows in a fixed order            interface.py: Stream, and one file for each kind of data
    run       where batches begin and end      run.py: arithmetic on positions
    batches   made from a position on          blocks.py
    loader    the cursor over them             this file
"""

from __future__ import annotations

import copy
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from inspect import GEN_CLOSED, getgeneratorstate
from operator import index
from typing import Any, Self, TypeVar

from batchwright.base.checks import at_least, whole_number
from batchwright.base.errors import PlanError, SpecError
from batchwright.base.words import shortened
from batchwright.batches.frameworks import adapter
from batchwright.batches.ranks import Standing, SyncReport, check_standing, digests_of_next, find_ranks
from batchwright.batches.settings import SETTINGS, Asked
from batchwright.loaders.interface import B, Batches, DataLoader, Made, Making, Record, Stream, state_at
from batchwright.loaders.run import Run
from batchwright.loaders.steps import budget_state, refuse_other_cut
from batchwright.order.budget import BudgetCut
from batchwright.order.plan import Plan, State
from batchwright.order.plan_text import refuse_state
from batchwright.order.schedule import NEVER
from batchwright.order.split import step_of_position
from batchwright.typing import Framework, ProcessGroup, Skip, SourceLike, WeightsLike

__all__ = ["Loader"]

log: logging.Logger = logging.getLogger("batchwright")

T = TypeVar("T")


class Loader(DataLoader[B]):
    """A cursor over a stream of rows, and the batches from there on. Its state is a few bytes of JSON.

    Batch sizes are global: each rank gets its share of every batch.
    """

    def __new__(cls, *_: Any, **settings: Any) -> Self:
        if "alignment" in settings:  # a setting of earlier builds
            raise SpecError(
                "alignment= is gone: every batch has labels and targets",
                parameter="alignment",
                remedy="leave it out, and use batch.labels for models that shift labels (Hugging Face), "
                "batch.targets for a loop of your own",
            )
        return super().__new__(cls)

    def __init__(
        self,
        stream: Stream[B],
        asked: Asked,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        epochs: int | None = 1,
        framework: Framework | None = None,
    ) -> None:
        """Read `stream` with the settings in `asked`, `epochs` times, as arrays of `framework`. `rank` and
        `world_size` are the launcher's by default."""
        if framework is None:
            framework = _default_framework()
        self.making: Making = Making(
            SETTINGS["framework"].checked(framework), asked.get("prefetch", stream.prefetch), asked.get("workers", 0)
        )
        if framework != "numpy":
            adapter(framework)  # raises now if it is not installed
        ranks = find_ranks(rank, world_size, asked["mesh"])
        self.this_run: Run = Run.of(stream, asked, ranks, SETTINGS["epochs"].checked(epochs))
        self.record: Record = self.this_run.first_record()
        """The record of the run's steps so far."""
        self._position = 0
        self._batches: Batches[B] | None = None
        self._made: Made[B] | None = None
        self._made_rows = 0
        self._generation = 0
        self._handed_any = False
        self._started_seconds: float | None = None
        self._wait_seconds = 0.0
        self._log_opening()
        self._turn_to(stream.keep(self.plan))
        self.stream.start_background_work(self, asked)

    def _log_opening(self) -> None:
        ranks, run, name = self.this_run.ranks, self.this_run, type(self).__name__
        log.info("%s: rank %d of %d (%s)", name, ranks.rank, ranks.world_size, ranks.found_in)
        if ranks.world_size > 1 and run.batch_size and not self.stream.budget:
            mine = "balanced"
            if not run.cost:
                mine = f"{len(run.share(run.batch_size))} on this rank"
            log.info("%s: batch_size=%d over %d ranks, %s", name, run.batch_size, ranks.world_size, mine)
        self._warn_of_dropped_rows()

    def _warn_of_dropped_rows(self) -> None:
        dropped = self.this_run.dropped_in_words(0)
        if dropped and not self.rank:
            name = type(self).__name__
            log.warning("%s: batch_size=%d %s; epoch_end='short' keeps them", name, self.batch_size, dropped)

    # Settings and place

    @property
    def stream(self) -> Stream[B]:
        """The rows that are read."""
        return self.this_run.stream

    @property
    def rank(self) -> int:
        return self.this_run.ranks.rank

    @property
    def world_size(self) -> int:
        return self.this_run.ranks.world_size

    @property
    def framework(self) -> str:
        return self.making.framework

    @property
    def epochs(self) -> int | None:
        """The number of passes over the data; None never ends."""
        return self.this_run.num_epochs

    @property
    def batch_size(self) -> int:
        """Rows of a batch over all ranks together; 0 if batches are cut by tokens."""
        return self.this_run.batch_size

    @property
    def batch_tokens(self) -> int | None:
        """The largest number of tokens of a batch over all ranks, with padding; None if batches are cut by count."""
        budget = self.this_run.budget or self.stream.budget
        return getattr(budget, "batch_tokens", None)

    @property
    def plan(self) -> Plan:
        """The plan of the rows, with the record of this loader's steps."""
        run, world_size = self.this_run, self.world_size
        if run.cost:  # the ranks of balanced rows do not follow from their places in the batch
            world_size = 1
        return run.plan.cut_as(self.record, world_size, run.sharding)

    @property
    def position(self) -> int:
        """The number of rows of the global stream that were handed over, on all ranks together."""
        return self._position

    @property
    def step(self) -> int:
        """The number of batches that were handed over."""
        return self.this_run.step_of(self.record, self._position)

    @property
    def epoch(self) -> int:
        return self.this_run.epochs.number(self._position)

    def get_num_batches(self, batch_size: int | None = None) -> int:
        """The number of batches of `batch_size` rows in the cursor's epoch. It is the same on every rank."""
        rows = self._rows_asked(batch_size)
        if unknown := self.stream.why_uncounted():
            raise unknown
        return self.this_run.num_batches(self._position, rows, self.record)

    def __len__(self) -> int:
        try:
            return self.get_num_batches()
        except SpecError as error:
            raise TypeError(str(error)) from None  # list(loader) asks for a length, and accepts a TypeError

    # Batches

    def get_batch(self, batch_size: int | None = None) -> B:
        """The next batch, of `batch_size` rows over all ranks together. It continues into the next epoch, if any."""
        rows = self._rows_asked(batch_size)
        began = time.perf_counter()
        self._generation += 1
        ready = next(self._ready(rows), None)
        if ready is None:
            self._close()  # the end of an epoch of raw files is known only now
            if not self.is_over:
                ready = next(self._ready(rows), None)
        if ready is None:
            raise self.this_run.end_of_run(self._position)
        self._waited(began)
        return self._hand_over(ready)

    def get_iterator(self) -> Iterator[B]:
        """Batches from the cursor to the end of the current epoch; the next call starts the next epoch. Over a
        validation split, each call starts at its first row.

        A loader has one cursor: opening a second iterator ends the first one with an error.
        """
        position, is_over = self.begin_pass()
        if is_over:
            if self._handed_any:
                raise self.this_run.end_of_run(self._position)
            return iter(())  # a finished run was restored: no batch is left, which is not an error
        self._generation += 1
        return self._iterate(self._generation, self.this_run.epoch_end(position))

    @property
    def is_over(self) -> bool:
        """Whether the run has no more batches."""
        return self.this_run.begin(self._position, self.record)[1]

    def begin_pass(self) -> tuple[int, bool]:
        """(position of the next pass, whether the run is over). A validation split is read from its first row."""
        position, is_over = self.this_run.begin(self._position, self.record)
        if self.this_run.plan.sources[0].split == "val" and (self._handed_any or is_over):
            self.reset()
            return self.this_run.begin(0, self.record)
        return position, is_over

    def _iterate(self, generation: int, end: int | None) -> Iterator[B]:
        clock = time.perf_counter
        if self._started_seconds is None:
            self._started_seconds = clock()
        made, plan = None, self.stream.plan.fingerprint
        while True:
            began = clock()
            if generation != self._generation:
                raise _ended_by_newer()
            if plan != self.stream.plan.fingerprint:  # amended: this epoch may end elsewhere now
                plan = self.stream.plan.fingerprint
                end = self.this_run.epoch_end(self.this_run.begin(self._position, self.record)[0])
            if end is not None and self._position >= end:
                return
            if made is None or made is not self._made:
                made = self._ready(self.batch_size)
            ready = next(made, None)
            if ready is None:
                self._close()
                return
            batch = self._hand_over(ready)
            self._wait_seconds += clock() - began
            yield batch

    def _hand_over(self, ready: tuple[B, int]) -> B:
        assert self._batches is not None
        batch, self._position = ready
        self.record, self._handed_any = self._batches.record, True
        return batch

    def _rows_asked(self, batch_size: int | None) -> int:
        """The number of rows of a batch: `batch_size`, or the loader's own number."""
        if batch_size is None:
            return self.batch_size
        if (tokens := self.batch_tokens) is not None:
            what = f"batches of this loader are cut at {tokens:,} tokens, not at a number of rows"
            raise SpecError(what, parameter="batch_size", remedy="leave batch_size= out")
        rows = at_least(1, batch_size=batch_size)
        self.this_run.check_share(rows, self._position)
        return rows

    def _ready(self, rows: int) -> Made[B]:
        """The batches from the cursor on. The cursor moves with each taken batch. A jump closes the iterator."""
        if self._made is not None and getgeneratorstate(self._made) == GEN_CLOSED:
            self._made = None  # a read failed in it and is repeated
        if self._made is None or self._made_rows != rows:
            self._close()
            self._made_rows, self._batches = rows, self._batches_of(rows)
            self._made = self._batches.batches(self._position)
        return self._made

    def _batches_of(self, rows: int) -> Batches[B]:
        """Batches of `rows` rows from the cursor on."""
        return self.stream.open(self.this_run, rows, self._record(rows), self.making)

    def _close(self) -> None:
        if self._made is not None:
            self._made.close()
            self._made = None
        if (learned := self.stream.with_facts_learned()) is not self.stream:
            self._turn_to(learned)
            self._warn_of_dropped_rows()

    def _turn_to(self, stream: Stream[B]) -> None:
        if stream is not self.stream:  # else the run keeps its cached blocks
            self.this_run = replace(self.this_run, stream=stream)

    def _record(self, rows: int) -> Record:
        """The record of the run's steps so far, continued from the cursor with steps of `rows` rows."""
        if self.this_run.budget is not None or rows == self.record[-1][2]:
            return [list(entry) for entry in self.record]
        return self.this_run.continued(self.record, self._position, rows)

    def turns(self, worker: int, workers: int, taken: int = 0) -> Iterator[B]:
        """Batches worker, worker + workers, ... from the cursor to the end of its epoch, less the first `taken`.

        Processes take turns with it: together they give the batches of get_iterator. The cursor does not move.
        """
        start, is_over = self.this_run.begin(self._position, self.record)
        if is_over:
            return iter(())
        self.stream.check_workers(self.this_run)
        batches, skipped = self._batches_of(self.batch_size), worker + taken * workers
        return (batch for batch, _ in batches.batches(start, skipped, workers, self.this_run.epoch_end(start)))

    def follow(self, begin: Callable[[], Iterable[T]]) -> Iterator[T]:
        """Hand over batches that other processes make, one for each step from the cursor on, and move the cursor.

        `begin` starts to make them from the cursor on. It is called again if the plan is amended on the way.
        """
        rows, clock = self.batch_size, time.perf_counter
        self.begin_pass()
        self._close()
        self._generation += 1
        generation, began, plan = self._generation, clock(), None
        while True:
            if plan != self.stream.plan.fingerprint:
                plan, cut = self.stream.plan.fingerprint, self.this_run.cut(rows, self.record)
                batches = iter(begin())
            batch = next(batches, None)
            if batch is None:
                return
            if generation != self._generation:
                raise _ended_by_newer()
            self.record, after = self._record(rows), self.stream.note_batch(batch)
            self._position = cut.settle(cut.after(self._position, 1)) if after is None else after
            self._handed_any = True
            self._waited(began)
            yield batch
            began = clock()

    def learn_from(self, twin: Self) -> None:
        """Take over the facts that a twin's stream has learned while it was read."""
        if twin.stream.plan == self.stream.plan:
            self._turn_to(twin.stream)

    # The cursor

    def state_dict(self) -> State:
        """The state of this loader: tens of bytes of JSON, valid for any number of ranks and workers."""
        state = state_at(self._position, self.stream.plan.fingerprint, self.record)
        if self.this_run.budget is not None:
            batch_in_block = BudgetCut(self.record, self.this_run.blocks).in_block(self._position)
            assert batch_in_block is not None
            state |= budget_state(batch_in_block, self.stream.pad_to)
        return state | self.stream.extra_state(self._position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly at the `state` of a loader of the same plan. The batch size (or token budget) and the
        numbers of ranks and workers may differ."""
        position, plan, steps = _read(state)
        stream = self.stream.for_state(state)
        run, mine = replace(self.this_run, stream=stream), stream.plan
        is_amended = plan != mine.fingerprint
        if is_amended:
            refuse_state(mine, plan, position, stream.known_plan, stream.of_another_plan)
        if is_amended and run.budget is not None:
            raise PlanError(
                "this state belongs to the plan before it was amended: an amendment changes the rows of a block, "
                "of which this run, by tokens, may have handed over some",
                parameter="batch_tokens",
                remedy="open the loader with the plan of the state, or start anew, without it",
            )
        refuse_other_cut(state, position, steps, run)
        if run.budget is not None or steps[-1][2] != run.batch_size:
            continued = run.continued(steps, position, run.batch_size)
        else:
            continued = steps
        if is_amended:  # the ends of epochs may have moved; steps keep their numbers
            older = replace(mine, amendments=mine.amendments[: mine.lineage.index(plan)])
            continued = run.renumbered(continued, position, step_of_position(steps, position, **older.epoch_spec))
        self._turn_to(stream)
        self.go_to(position, continued)

    def seek(self, *, step: int | None = None, position: int | None = None) -> None:
        """Go to a `step` or a `position` directly. (With a token budget, all earlier blocks are cut for it, once.)"""
        if (step is None) == (position is None):
            raise SpecError("seek takes step= or position=", parameter="step", remedy="seek(step=1000)")
        if self.stream.budget is not None and step is not None:
            what = "batches of a log by tokens have no place that follows from their number"
            raise SpecError(what, parameter="step", remedy="load_state_dict(state) of that step, or seek(position=...)")
        run = self.this_run
        if step is not None:
            position = run.position_of(self.record, whole_number(step=step))
        position, end = whole_number(position=position), run.end or NEVER
        if not 0 <= position <= end:
            remedy = f"a position from 0 to {end}"
            raise PlanError(f"position {position} is outside this run", step=step, position=position, remedy=remedy)
        kept = [entry for entry in self.record if entry[1] <= position]
        if step is not None:
            kept = [entry for entry in self.record if entry[0] <= step]
        if step is None or run.budget is not None or kept[-1][2] != run.batch_size:
            kept = run.continued(kept, position, run.batch_size)
        self.go_to(position, kept)

    def reset(self, epoch: int = 0) -> None:
        """Go back to the first row of an `epoch`. Steps are counted as if all earlier rows were read."""
        begin, record = 0, self.this_run.first_record()
        if at_least(0, epoch=epoch):
            begin = self.this_run.begin_of_epoch(epoch)
            record = self.this_run.continued(record, begin, self.batch_size)
        self.go_to(begin, record)

    def go_to(self, position: int, record: Record) -> None:
        """Put the cursor at a `position`. `record` has the steps before it."""
        self._close()
        self._position, self.record, self._handed_any = position, record, False
        self._generation += 1

    def amend(
        self,
        *,
        at: int | None = None,
        weights: WeightsLike | None = None,
        add: Mapping[str, SourceLike] | None = None,
        skip: Skip | None = None,
        max_epochs: Mapping[str, int] | None = None,
        num_rows: int | None = None,
        num_tokens: int | None = None,
    ) -> Plan:
        """Change the plan from the cursor on (or from a later position `at`). Return the new plan.

        `weights` are as when opening, from `at` on. `add` has new or grown sources, by name. `skip` is (first, last), a
        position, or a list of these. `max_epochs` replaces the caps. `num_rows` or `num_tokens` sets the end of the
        stream, counted from its beginning. docs/mixing.md has a table.

        Earlier rows do not change, every source continues from its current row, and saved states still load. A running
        iteration continues with the amended plan. Make the same call on every rank; `check_sync` verifies it.
        """
        if self.this_run.budget is not None:
            raise SpecError(
                "a run by tokens cannot be amended: rows of the block in which it is would change, of which it has "
                "handed over some",
                parameter="batch_tokens",
                remedy="batch_size=, or a new run",
            )
        step, ends = self.step, {"num_rows": num_rows, "num_tokens": num_tokens}
        amended = self.stream.amended(
            self._position, self.epochs, at=at, weights=weights, add=add, skip=skip, max_epochs=max_epochs, **ends
        )
        self._close()
        self._turn_to(amended)
        self.record = self.this_run.renumbered(self.record, self._position, step)
        self._turn_to(self.stream.keep(self.plan))
        return self.plan

    # Statistics

    def stats(self) -> dict[str, Any]:
        """The progress of the run, from the position alone (so valid after a resume), and the caller's waiting time."""
        waited, now = 0.0, time.perf_counter()
        if self._started_seconds is not None and now > self._started_seconds:
            waited = 100 * self._wait_seconds / (now - self._started_seconds)
        return {
            "step": self.step,
            "position": self._position,
            "epoch": self.epoch,
            **self.stream.stats(self._position),
            "data_wait_percent": waited,
        }

    def _waited(self, began: float) -> None:
        now = time.perf_counter()
        if self._started_seconds is None:
            self._started_seconds = began
        self._wait_seconds += now - began

    # Ranks and processes

    def check_sync(self, group: ProcessGroup | None = None) -> SyncReport:
        """Verify, under torch.distributed, that all ranks belong to one run. Call it on every rank: all raise, or none.

        All ranks must have the same plan, position, batch size and sharding. Every share of a batch must have its rank.
        Replicas (tensor, pipeline, context parallel) must get an equal next batch. The cursor does not move.
        `group` is the group of processes that train together, by default all.
        """
        batch, failure = digests_of_next(lambda: self.stream.part_to_compare(self.twin(alone=True).get_batch()))
        settings = {**self.this_run.settings_to_compare(), "position": self._position, "steps": self.record}
        mine = Standing(rank=self.rank, step=self.step, settings=settings, batch=batch, failure=failure)
        return check_standing(mine, self.stream.plan, group)

    def twin(self, framework: Framework | None = None, *, alone: bool = False) -> Self:
        """A loader at the same position with its own cursor. It can be for another `framework`. With `alone` it has no
        helper threads or processes, for use in a process that is itself a helper."""
        twin = copy.copy(self)  # shares no batches in the making: see __getstate__
        twin._turn_to(copy.copy(self.stream))  # with its own memory
        name = framework or self.making.framework
        twin.making = Making(name) if alone else replace(self.making, framework=name)
        return twin

    def torch(self) -> Any:
        """This loader as a torch IterableDataset of whole batches: `DataLoader(loader.torch(), batch_size=None)`."""
        return adapter("torch").TorchBatches(self)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_made": None, "_batches": None}  # another process makes its own

    def __repr__(self) -> str:
        at = f"at step {self.step:,} (position {self._position:,})"
        run = self.this_run.in_words(self._position, self.record, self.framework)
        return f"{type(self).__name__}: {run}, {at}\n{self.stream.in_words(self.plan)}"


def asked_of(keywords: Mapping[str, Any]) -> Asked:
    """The settings among the keywords of a constructor."""
    return Asked(**{name: keywords[name] for name in keywords if name in SETTINGS or name in ("fields", "delivery")})


def _read(state: Mapping[str, Any]) -> tuple[int, str, Record]:
    """(position, plan, steps) of a state."""
    try:
        position, plan = index(state["position"]), state["plan"]
        steps = [[index(number) for number in entry] for entry in state["steps"]]
        if not 0 <= position <= NEVER or not _is_record(steps) or steps[-1][1] > position:
            raise ValueError
    except (KeyError, IndexError, TypeError, ValueError):
        raise PlanError(
            "this is not a loader's state", got=shortened(state), remedy="what state_dict() returned"
        ) from None
    return position, plan, steps


def _is_record(steps: Record) -> bool:
    """Whether the entries have one kind (rows or tokens) and are in order, from step 0 at position 0 on."""
    lengths = {len(entry) for entry in steps}
    sizes = [size for entry in steps for size in entry[2:]]
    return lengths in ({3}, {4}) and min(sizes) >= 1 and steps[0][:2] == [0, 0] and steps == sorted(steps)


def _default_framework() -> Framework:
    if sys.modules.get("torch"):
        return "torch"
    return "numpy"


def _ended_by_newer() -> PlanError:
    remedy = "open a second loader to read twice at once"
    return PlanError("this iterator was ended by a newer one (or by get_batch): a loader has one cursor", remedy=remedy)
