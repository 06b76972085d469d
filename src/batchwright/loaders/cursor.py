"""What every loader does: one cursor over a stream of rows, and batches handed over from it.

The cursor is a position. It moves when a batch is handed to the caller, never when one is made ahead of need. All
else follows from the position: what comes next, how much of each source was seen, what a checkpoint must hold.
"""

from __future__ import annotations

import copy
import logging
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from inspect import GEN_CLOSED, getgeneratorstate
from operator import index
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from batchwright.deliver.ranks import Ranks
from batchwright.deliver.sync import Standing, SyncReport, check_standing, digests_of_next
from batchwright.errors import EndOfRun, PlanError, SpecError
from batchwright.loaders.budget import (
    budget_of,
    budget_state,
    check_budget_state,
    cost_of,
    position_of_budget_step,
    refuse_other_kind,
    step_of_budget_position,
    with_budget,
)
from batchwright.loaders.steps import AnyCut, Steps
from batchwright.loaders.verdict import refuse_state
from batchwright.order.budget import Blocks, BudgetCut, refuse_wide_rows
from batchwright.order.epochs import Epochs
from batchwright.order.schedule import NEVER
from batchwright.order.sharding import Sharding, Share, sharding_of
from batchwright.order.split import Cut, position_of_step, step_of_position
from batchwright.plan import Plan, State
from batchwright.spec import at_least, one_of, whole_number
from batchwright.typing import Balance, Framework, ProcessGroup, ShardingLike

__all__ = ["CursorLoader", "Stream"]

log: logging.Logger = logging.getLogger("batchwright")

T = TypeVar("T")
B = TypeVar("B")
B_co = TypeVar("B_co", covariant=True)

Made = Generator[tuple[B, int], None, None]
"""(batch, position after it), and so on."""


class Stream(Protocol[B_co]):
    """One rank's batches of a run that is cut one way: a function of the position that they begin at."""

    @property
    def cut(self) -> AnyCut: ...

    def is_over(self, position: int) -> bool: ...

    def batches(self, position: int, record: list[list[int]]) -> Generator[tuple[B_co, int], None, None]:
        """(batch, position after it) from a position to the end of the run."""
        ...

    def turns(self, position: int, stop: int | None, every: int, record: list[list[int]]) -> Iterator[B_co]:
        """Each `every`-th batch from a position up to `stop`: for processes that take turns."""
        ...


class CursorLoader(ABC, Generic[B]):
    """Batches from one cursor: `get_batch`, `get_iterator`, `get_num_batches`, `reset`; `state_dict` and back.

    Whoever inherits says what a batch is made of: `_batches`. Where it also says how long rows are (`_lengths_at`,
    `_widths_of`), batches can be cut by tokens and balanced over ranks: `_steps_of` plans them.
    """

    prefetch = 0
    workers = 0
    batch_size: int
    """Rows of a batch over all ranks together; 0 where `batch_tokens` says how large a batch is."""
    _sequences = 1
    """Rows of a batch that one row of the order is: two for preference pairs."""
    _position = 0
    _steps: list[list[int]]
    _stream: Made[B] | None = None
    _stream_rows: int
    _stream_steps: list[list[int]]
    _cut_blocks: Blocks | None = None
    _of_another_plan = "open the loader with the settings of that run, or with plan= (its fingerprint or file)"
    """What to do about a state of another plan."""

    def __new__(cls, *_: Any, **settings: Any) -> Self:
        if "alignment" in settings:
            raise SpecError(
                "alignment= is gone: every batch has labels and targets",
                parameter="alignment",
                remedy="leave it out, and use batch.labels for models that shift labels (Hugging Face), "
                "batch.targets for a loop of your own",
            )
        return super().__new__(cls)

    def __init__(
        self,
        plan: Plan,
        *,
        batch_size: int | None = None,
        ranks: Ranks | None = None,
        epochs: int | None = 1,
        framework: Framework | None = None,
        uneven: bool = False,
        sharding: ShardingLike | None = None,
        batch_tokens: int | None = None,
        row_multiple: int | None = None,
        balance: Balance | None = None,
        equal_counts: bool = True,
    ) -> None:
        """`batch_size` is 8, if nothing else is said. `batch_tokens` cuts by tokens with padding in its place, into
        batches whose rows are a multiple of `row_multiple`; `balance` (True, or (a, b): a row of n tokens costs
        a * n + b * n * n) shares rows by cost, equally many to each rank unless `equal_counts` is False.
        """
        self._plan = plan
        self._ranks = ranks or Ranks(0, 1, "nothing says otherwise")
        self._sharding = sharding_of(sharding)
        self._cost, self._equal_counts = (
            cost_of(balance, equal_counts=equal_counts, sharding=self._sharding),
            equal_counts,
        )
        self._budget = budget_of(
            batch_tokens,
            row_multiple,
            batch_size=batch_size,
            epoch_end=plan.epoch_end,
            world=self.world_size,
            uneven=uneven or not equal_counts,
        )
        self.batch_size = at_least(1, batch_size=8 if batch_size is None else batch_size) if self._budget is None else 0
        self.epochs: int | None = None if epochs is None else at_least(1, epochs=epochs)
        self.framework: str = one_of(
            ("numpy", "torch", "jax", "mlx"),
            framework=framework or ("torch" if sys.modules.get("torch") else "numpy"),
        )
        self.uneven = uneven
        self._check_share(self.batch_size)
        self._generation = 0
        self._handed_any = False
        self._refuse_long_rows()
        self._go_to(0, self._first_record())
        if self._next_start()[1]:
            raise SpecError(
                f"batch_size={self.batch_size} is more than the whole run, which has {self._end} rows",
                parameter="batch_size",
                remedy=f"batch_size={self._end} or less, or more epochs",
            )
        self._started_seconds: float | None = None
        self._wait_seconds = 0.0
        log.info("%s: rank %d of %d (%s)", type(self).__name__, self.rank, self.world_size, self._ranks.found_in)
        self._warn_of_dropped_rows()

    # What inherits says

    @abstractmethod
    def _batches(self, rows: int) -> Stream[B]:
        """Batches of `rows` rows over all ranks together."""

    def _hand_over(self, made: Made[B]) -> Made[B]:
        """The stream of batches as the caller gets it, where they are converted on the caller's thread."""
        return made

    def _known_plan(self, fingerprint: str) -> Plan | None:
        """A plan by its name, where plans are kept."""
        return None

    def _lengths_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens of the rows at some positions, where rows have lengths."""
        raise _without_lengths(type(self).__name__)

    def _widths_of(self, longest: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens that each row has of batches whose longest rows have so many: never less, and never less for more."""
        raise _without_lengths(type(self).__name__)

    def _longest_row(self) -> tuple[int, dict[str, Any]] | None:
        """(tokens of the longest row there is, which one it is), where that is known without going through all."""
        return None

    def _settings_of_batches(self) -> dict[str, Any]:
        """What else must be the same on all ranks, by name."""
        return {}

    def _pad_to(self) -> Any:
        """How widths follow from lengths, as JSON: a state goes on only where it is the same."""
        return None

    # What this loader is

    @property
    def rank(self) -> int:
        return self._ranks.rank

    @property
    def world_size(self) -> int:
        return self._ranks.world_size

    @property
    def plan(self) -> Plan:
        """What fixes every row of the stream, with how this loader cut it into batches."""
        # Of a balanced batch, rows alone do not say which rank had which.
        return self._plan.cut_as(self._steps, 1 if self._cost else self.world_size, self._sharding)

    @property
    def position(self) -> int:
        """Rows of the global stream that were handed over, on all ranks together."""
        return self._position

    @property
    def step(self) -> int:
        """Batches that were handed over."""
        return self._step_of(self._steps, self._position)

    @property
    def batch_tokens(self) -> int | None:
        """Tokens that a batch has at most over all ranks, padding included; None where batches are by count."""
        return None if self._budget is None else self._budget.batch_tokens

    @property
    def row_multiple(self) -> int | None:
        return None if self._budget is None else self._budget.row_multiple

    @property
    def epoch(self) -> int:
        return self._epochs.number(self._position)

    def get_num_batches(self) -> int:
        """Batches per epoch (of the one that the cursor is in): the same on every rank."""
        cut = self._cut(self.batch_size)
        if self._epochs.span(self._epochs.skips.live(self._position))[2] is None:
            raise SpecError(
                "a mixture by weights has no end, so no number of batches",
                parameter="num_rows",
                remedy="num_rows=, num_tokens=, or stop='first_exhausted' or 'all_exhausted' gives it one",
            )
        live, end = self._epochs.skips.live(self._position), self._epochs.end_of(self.epochs)
        return cut.steps_of_epoch(live if end is None else min(live, end - 1))

    def __len__(self) -> int:
        try:
            return self.get_num_batches()
        except SpecError as error:
            raise TypeError(str(error)) from None  # list(loader) asks, and takes this as an answer

    # Batches

    def get_batch(self, batch_size: int | None = None) -> B:
        """The next batch, of `batch_size` rows over all ranks together. Goes on into the next epoch, if one is left."""
        if batch_size is not None and self._budget is not None:
            raise SpecError(
                f"this loader has batches of {self._budget.batch_tokens:,} tokens at most, not of so many rows",
                parameter="batch_size",
                remedy="leave batch_size= out",
            )
        rows = self.batch_size if batch_size is None else at_least(1, batch_size=batch_size)
        if batch_size is not None:
            self._check_share(rows)
        began = time.perf_counter()
        self._generation += 1
        ready = next(self._ready(rows), None)
        if ready is None:
            self._close_stream()
            raise self._end_of_run()
        batch, self._position = ready
        self._steps, self._handed_any = self._stream_steps, True
        self._waited(began)
        return batch

    def get_iterator(self) -> Iterator[B]:
        """Batches from the cursor to the end of the current epoch; the next call starts the next epoch.

        A loader has one cursor: opening a second iterator ends the first one with an error.
        """
        position, is_over = self._next_start()
        if is_over:
            if self._handed_any:
                raise self._end_of_run()
            return iter(())  # a finished run, restored: there is nothing left to do, and that is no fault
        self._generation += 1
        return self._iterate(self._generation, self._epoch_end(position))

    def __iter__(self) -> Iterator[B]:
        return self.get_iterator()

    def _iterate(self, generation: int, end: int | None) -> Iterator[B]:
        clock = time.perf_counter
        if self._started_seconds is None:
            self._started_seconds = clock()
        stream, plan = None, self._plan.fingerprint
        while True:
            began = clock()
            if generation != self._generation:
                raise _ended_by_newer()
            if plan != self._plan.fingerprint:  # amended: this epoch may end elsewhere now
                plan, end = self._plan.fingerprint, self._epoch_end(self._next_start()[0])
            if end is not None and self._position >= end:
                return
            if stream is None or stream is not self._stream:
                stream = self._ready(self.batch_size)
            ready = next(stream, None)
            if ready is None:
                self._close_stream()
                return
            batch, self._position = ready
            self._steps, self._handed_any = self._stream_steps, True
            self._wait_seconds += clock() - began
            yield batch

    def _ready(self, rows: int) -> Made[B]:
        """What is ready at the cursor. The cursor follows each batch that is taken from it; elsewhere it is closed."""
        if self._stream is not None and getgeneratorstate(self._stream) == GEN_CLOSED:
            self._stream = None  # a read failed in it, and is tried again
        if self._stream is None or self._stream_rows != rows:
            self._close_stream()
            self._stream_rows, self._stream_steps = rows, self._record(rows)
            made = self._batches(rows).batches(self._position, self._stream_steps)
            self._stream = self._hand_over(made)
        return self._stream

    def _close_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _record(self, rows: int) -> list[list[int]]:
        """How the run cut batches so far, and goes on from the cursor with `rows` a step."""
        if self._budget is not None or rows == self._steps[-1][2]:
            return self._steps
        return self._with_cut(self._steps, self._position, rows)

    def _turns(self, worker: int, workers: int, taken: int = 0) -> Iterator[B]:
        """Batches worker, worker + workers, ... from the cursor to the end of its epoch, less the first `taken`.

        For processes that take turns: together they give what get_iterator gives. The cursor stays where it is.
        """
        batches = self._batches(self.batch_size)
        start = batches.cut.settle(self._position)
        if batches.is_over(start):
            return iter(())
        first = batches.cut.after(start, worker + taken * workers)
        return batches.turns(first, self._epoch_end(start), workers, self._record(self.batch_size))

    def _follow(self, begin: Callable[[], Iterable[T]]) -> Iterator[T]:
        """Hand over batches that are made elsewhere: one for each step from the cursor on, which moves with them.

        `begin` starts to make them from the cursor on; it is asked again where the plan is amended on the way.
        """
        rows = self.batch_size
        cut, clock = self._cut(rows), time.perf_counter
        self._close_stream()
        self._generation += 1
        generation, began, plan = self._generation, clock(), self._plan.fingerprint
        batches = iter(begin())
        while True:
            if plan != self._plan.fingerprint:
                plan, cut = self._plan.fingerprint, self._cut(rows)
                batches = iter(begin())
            batch = next(batches, None)
            if batch is None:
                return
            if generation != self._generation:
                raise _ended_by_newer()
            self._steps = self._record(rows)
            self._position = cut.settle(cut.after(self._position, 1))
            self._handed_any = True
            self._waited(began)
            yield batch
            began = clock()

    # The cursor

    def state_dict(self) -> State:
        """Where this loader is: JSON, tens of bytes, for any number of ranks and workers."""
        state = {"position": self._position, "plan": self._plan.fingerprint, "steps": [list(t) for t in self._steps]}
        if self._budget is None:
            return state
        batch_in_block = BudgetCut(self._steps, self._blocks).in_block(self._position)
        assert batch_in_block is not None
        return state | budget_state(batch_in_block, self._pad_to())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at `state`, exactly where a loader of the same plan was. Another batch size (with batch_tokens:
        another budget), other ranks or workers are fine."""
        try:
            position, plan = index(state["position"]), state["plan"]
            steps = [[index(number) for number in triple] for triple in state["steps"]]
            if not 0 <= position <= NEVER or any(
                len(t) not in (3, 4) or len(t) != len(steps[0]) or min(t[2:]) < 1 for t in steps
            ):
                raise ValueError
            if steps[0][:2] != [0, 0] or steps != sorted(steps):
                raise ValueError
        except (KeyError, IndexError, TypeError, ValueError):
            raise PlanError(
                "this is not a loader's state", got=_shortened(state), remedy="what state_dict() returned"
            ) from None
        step = None
        if plan != self._plan.fingerprint:
            refuse_state(self._plan, plan, position, self._known_plan, self._of_another_plan)
            if self._budget is not None:
                raise PlanError(
                    "this state belongs to the plan before it was amended: an amendment changes the rows of a block, "
                    "of which this run, by tokens, may have handed over some",
                    parameter="batch_tokens",
                    remedy="open the loader with the plan of the state, or start anew, without it",
                )
        refuse_other_kind(steps, self._budget)
        if self._budget is not None:
            check_budget_state(state, position, steps, self._blocks, self._pad_to())
            self._go_to(position, self._with_cut(steps, position, 0))
            self._handed_any = False
            return
        if plan != self._plan.fingerprint:
            older = replace(self._plan, amendments=self._plan.amendments[: self._plan.lineage.index(plan)])
            step = step_of_position(steps, position, **older.epoch_spec)
        if steps[-1][2] != self.batch_size:
            steps = self._with_cut(steps, position, self.batch_size)
        self._go_to(position, steps)
        if step is not None:
            self._count_on(step)
        self._handed_any = False

    def _count_on(self, step: int) -> None:
        """After the plan was amended: the next batch is number `step`, also where epochs now end elsewhere."""
        spec = self._plan.epoch_spec
        if position_of_step(self._steps, step, **spec)[0] != self._position:
            kept = [t for t in self._steps if t[0] < step] if step else []
            self._steps = [*kept, [step, self._position, self._steps[-1][2]]]

    def seek(self, *, step: int | None = None, position: int | None = None) -> None:
        """Go to a `step` or a `position`, at once. (By tokens, all blocks before are cut for it, once.)"""
        if (step is None) == (position is None):
            raise SpecError("seek takes step= or position=", parameter="step", remedy="seek(step=1000)")
        if step is not None:
            position = self._position_of(self._steps, whole_number(step=step))
        position = whole_number(position=position)
        if position > NEVER:
            raise PlanError(f"position {position} is outside any run", remedy="a position below 2^62")
        if position < 0 or (self._end is not None and position > self._end):
            raise PlanError(
                f"position {position} is outside this run",
                step=step,
                position=position,
                remedy=f"a position from 0 to {self._end}",
            )
        kept = (
            [t for t in self._steps if t[1] <= position] if step is None else [t for t in self._steps if t[0] <= step]
        )
        if step is None or self._budget is not None or kept[-1][2] != self.batch_size:
            kept = self._with_cut(kept, position, self.batch_size)
        self._go_to(position, kept)
        self._handed_any = False

    def reset(self) -> None:
        """Back to position 0."""
        self._go_to(0, self._first_record())
        self._handed_any = False

    def _go_to(self, position: int, steps: list[list[int]]) -> None:
        self._close_stream()
        self._position, self._steps = position, steps
        self._generation += 1

    # Steps, by count or by tokens

    def _first_record(self) -> list[list[int]]:
        return [[0, 0, self.batch_size] if self._budget is None else self._budget.entry(0, 0)]

    def _step_of(self, steps: list[list[int]], position: int) -> int:
        """The step that uses (or would use next) a position."""
        if self._budget is not None:
            return step_of_budget_position(steps, position, self._blocks)
        return step_of_position(steps, position, **self._plan.epoch_spec)

    def _position_of(self, steps: list[list[int]], step: int) -> int:
        if self._budget is not None:
            return position_of_budget_step(steps, step, self._blocks, self._end)
        return position_of_step(steps, step, **self._plan.epoch_spec)[0]

    def _with_cut(self, steps: list[list[int]], position: int, rows: int) -> list[list[int]]:
        """A record of steps that goes on from `position` with `rows` a step, or with this loader's budget."""
        if self._budget is not None:
            return with_budget(steps, position, self._budget, self._blocks)
        return _with_cut(steps, position, rows, **self._plan.epoch_spec)

    def _cut(self, rows: int) -> AnyCut:
        return self._cut_by_count(rows) if self._budget is None else BudgetCut(self._steps, self._blocks)

    def _cut_by_count(self, rows: int) -> Cut:
        return Cut(rows_per_step=rows, **self._plan.epoch_spec)

    @property
    def _blocks(self) -> Blocks:
        """The cuts of blocks by tokens."""
        if self._cut_blocks is None:
            self._cut_blocks = Blocks(self._epochs, self._plan.seed, self._lengths_at, self._tokens_of)
        return self._cut_blocks

    def _tokens_of(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._widths_of(lengths) * self._sequences

    def _refuse_long_rows(self) -> None:
        """Refuse a budget that some row does not fit into, before anything is read."""
        if self._is_planned:
            self._widths_of(np.array([1]))  # refuses where rows have no lengths
        longest = None if self._budget is None else self._longest_row()
        if self._budget is None or longest is None:
            return
        try:
            refuse_wide_rows(
                self._tokens_of(np.array([longest[0]])), self._budget.batch_tokens, self._budget.row_multiple
            )
        except SpecError as error:
            error.where.update(longest[1])
            raise

    @property
    def _is_planned(self) -> bool:
        """Whether steps are planned one by one, from the lengths of their rows."""
        return self._budget is not None or self._cost is not None

    def _steps_of(self, rows: int) -> Steps:
        """The steps of this run, planned from the lengths of rows: what they are made of, and who gets what."""
        return Steps(
            cut=self._cut(rows),
            end=self._end,
            rank=self.rank,
            world=self.world_size,
            sharding=self._sharding,
            lengths_at=self._lengths_at,
            widths_of=self._widths_of,
            cost=self._cost,
            equal_counts=self._equal_counts,
            pad_to=self._pad_to(),
        )

    # Ends and shares

    @property
    def _epochs(self) -> Epochs:
        epochs: Epochs = self._plan.epoch_spec["epochs"]
        return epochs

    @property
    def _end(self) -> int | None:
        """The position at which the run ends; None for an endless one."""
        end = self._epochs.end_of(self.epochs)
        return None if end is None else self._epochs.skips.position(end)

    def _epoch_end(self, position: int) -> int | None:
        """The end of the epoch that a position lies in; None for a stream without epochs."""
        skips = self._epochs.skips
        end = self._epochs.span(skips.live(position))[2]
        return None if end is None else skips.position(end)

    def _next_start(self) -> tuple[int, bool]:
        """Where the next batch starts, and whether the run is over there."""
        cut = self._cut(self.batch_size)
        position = cut.settle(self._position)
        return position, cut.is_over(position, self._end)

    def _end_of_run(self) -> EndOfRun:
        epochs = "" if self.epochs is None else f"{self.epochs} epoch{'s' if self.epochs != 1 else ''}, "
        return EndOfRun(
            f"the run is over: {epochs}{self._position:,} rows",
            remedy="reset() to start again; its sources have given what they may: amend(max_epochs=...) allows more"
            if self.epochs is None or self._epochs.limit is not None
            else f"epochs={self.epochs + 1} for more, epochs=None for no end, or reset() to start again",
        )

    @property
    def _share(self) -> Callable[[int], Share]:
        """This rank's rows of a batch of some size. Streams keep it, so it does not keep the loader."""
        return partial(_rows_of_rank, self._sharding, self.rank, self.world_size)

    def _check_share(self, rows: int) -> None:
        """Refuse a size of full batches that ranks cannot share."""
        world = self.world_size
        if rows % world and not self.uneven and self._equal_counts:
            up = -(-rows // world) * world
            down = f"{up - world} or " if up > world else ""
            raise SpecError(
                f"batch_size={rows} does not divide by world_size={world}",
                parameter="batch_size",
                remedy=f"batch_size={down}{up} (it is global: each rank gets its share), or uneven=True",
            )
        self._sharding.share(rows, rank=self.rank, world=world, uneven=self.uneven)
        if self._plan.epoch_end == "short" and (partial := self._partial_rows(rows)):
            self._share(partial)  # now, not at the end of the epoch: a strategy may fail for it

    def _partial_rows(self, rows: int) -> int:
        """Rows of the last, partial batch of this epoch, or of a run whose steps cross epochs; 0: there is none."""
        if self._budget is not None:
            return 0
        live = self._epochs.skips.live
        if self._cut_by_count(rows).is_linear:
            return 0 if self._end is None else live(self._end) % rows
        _, start, stop = self._epochs.span(live(self._position))
        return 0 if stop is None else (stop - start) % rows

    def _dropped_in_words(self) -> str:
        """Which rows no batch has; nothing where all are handed over."""
        dropped = self._partial_rows(self.batch_size) if self._plan.epoch_end in ("drop", "wrap") else 0
        where = "the run" if self._cut_by_count(self.batch_size or 1).is_linear else "each epoch"
        return f"drops the last {dropped:,} row{'s' * (dropped != 1)} of {where}" if dropped else ""

    def _warn_of_dropped_rows(self) -> None:
        if not self.rank and (dropped := self._dropped_in_words()):
            name = type(self).__name__
            log.warning("%s: batch_size=%d %s; epoch_end='short' keeps them", name, self.batch_size, dropped)

    def _steps_in_words(self) -> str:
        steps, dropped = self.get_num_batches(), self._dropped_in_words()
        return f"{steps:,} step{'s' * (steps != 1)} an epoch{f' ({dropped})' if dropped else ''}"

    # Ranks and processes

    def check_sync(self, group: ProcessGroup | None = None) -> SyncReport:
        """Prove, under torch.distributed, that all ranks belong to one run. Call it on every rank: all raise, or none.

        All must hold the same plan, position, batch size and sharding; every share of a batch must have its rank; and
        replicas (tensor, pipeline, context parallel) must get an equal next batch. The cursor stays where it is.
        `group` is the processes that train together: by default all.
        """
        batch, failure = digests_of_next(self._peek)
        settings = {
            "plan": self._plan.fingerprint,
            "position": self._position,
            "batch_size": self.batch_size,
            "steps": self._steps,
            "epochs": self.epochs,
            "world_size": self.world_size,
            "sharding": self._sharding.describe(self.batch_size or self.world_size, self.world_size),
            "balance": None if self._cost is None else [str(self._cost), self._equal_counts],
            **self._settings_of_batches(),
        }
        if self._is_planned:  # what a step is made of, or who gets what of it, depends on it
            settings["pad_to"] = self._pad_to()
        mine = Standing(rank=self.rank, step=self.step, settings=settings, batch=batch, failure=failure)
        return check_standing(mine, self._plan, group)

    def _peek(self) -> B:
        """The next batch; the cursor stays where it is."""
        twin = copy.copy(self)  # with a cursor and memory of its own, like one that was pickled
        twin.prefetch = twin.workers = 0
        batch = twin.get_batch()
        twin._close_stream()
        return batch

    def _waited(self, began: float) -> None:
        now = time.perf_counter()
        if self._started_seconds is None:
            self._started_seconds = began
        self._wait_seconds += now - began

    def torch(self) -> Any:
        """This loader as a torch IterableDataset of whole batches: `DataLoader(loader.torch(), batch_size=None)`."""
        from batchwright.adapters.torch import TorchBatches

        return TorchBatches(self)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()  # without threads, maps or memory: another process makes its own
        state.pop("_stream", None)
        state.pop("_cut_blocks", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def _rows_of_rank(sharding: Sharding, rank: int, world: int, rows: int) -> Share:
    """A rank's rows of a batch of `rows`; the one after the last, which has weight 0, where it gets none."""
    return sharding.share(rows, rank=rank, world=world) or range(rows, rows + 1)


def _with_cut(steps: list[list[int]], position: int, rows: int, *, epochs: Epochs, epoch_end: str) -> list[list[int]]:
    """A record of steps that goes on from `position` with `rows` a step."""
    spec: dict[str, Any] = {"epochs": epochs, "epoch_end": epoch_end}
    step = step_of_position(steps, position, **spec)
    at, _ = position_of_step(steps, step, **spec)
    if at == position and steps[-1][2] == rows:
        return steps
    step += at < position  # inside a step: what was used of it counts as a step
    return [*(t for t in steps if t[0] < step), [step, position, rows]]


def _without_lengths(loader: str) -> SpecError:
    return SpecError(
        f"rows of {loader} have no lengths of their own: its batches are cut by count, and not balanced",
        parameter="batch_tokens",
        remedy="batch_size=; batch_tokens= and balance= are for conversations and rollouts",
    )


def _ended_by_newer() -> PlanError:
    return PlanError(
        "this iterator was ended by a newer one (or by get_batch): a loader has one cursor",
        remedy="open a second loader to read twice at once",
    )


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
