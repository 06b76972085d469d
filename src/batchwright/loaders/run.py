"""A run: one plan, cut into batches and shared among ranks. Arithmetic on positions, without a cursor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.base.errors import EndOfRun, PlanError, SpecError
from batchwright.base.words import counted
from batchwright.batches.ranks import Ranks
from batchwright.batches.settings import SETTINGS, Asked
from batchwright.loaders.interface import Record, Stream
from batchwright.loaders.steps import AnyCut, Budget, Steps, budget_of, cost_of
from batchwright.order.balance import Balancing
from batchwright.order.budget import Blocks, BudgetCut, refuse_wide_rows
from batchwright.order.epochs import Epochs
from batchwright.order.plan import Plan
from batchwright.order.sharding import Sharding, Share, sharding_of
from batchwright.order.split import Cut

__all__ = ["DEFAULT_BATCH"]

DEFAULT_BATCH: int = SETTINGS["batch_size"].default
"""Rows of a batch, over all ranks together."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A stream and the settings of a loader: the borders of batches, and the rows of each rank."""

    stream: Stream[Any]
    ranks: Ranks
    batch_size: int
    """Rows of a batch over all ranks together; 0 with a token budget."""
    num_epochs: int | None
    """None never ends."""
    budget: Budget | None
    cost: Balancing | None
    equal_counts: bool
    uneven: bool
    sharding: Sharding

    @classmethod
    def of(cls, stream: Stream[Any], asked: Asked, ranks: Ranks, epochs: int | None) -> Run:
        """The run of a loader with these settings. They are checked against the stream before anything is read."""
        sharding = sharding_of(asked["sharding"])
        budget = budget_of(asked, epoch_end=stream.plan.epoch_end, world=ranks.world_size)
        batch_size = 0
        if budget is None:
            batch_size = asked["batch_size"] or _default_batch(stream.plan)
        run = cls(
            stream=stream,
            ranks=ranks,
            batch_size=batch_size,
            num_epochs=epochs,
            budget=budget,
            cost=cost_of(asked, sharding),
            equal_counts=asked.get("equal_counts", True),
            uneven=asked.get("uneven", False),
            sharding=sharding,
        )
        run.check_share(run.batch_size, 0)
        run._refuse_long_rows()
        if run.begin(0, run.first_record())[1]:
            what = f"batch_size={run.batch_size} is more than the whole run, which has {run.end} rows"
            raise SpecError(what, parameter="batch_size", remedy=f"batch_size={run.end} or less, or more epochs")
        return run

    @property
    def plan(self) -> Plan:
        return self.stream.plan

    # Steps, by count or by tokens

    def first_record(self) -> Record:
        return [[0, 0, *self._step_size(self.batch_size)]]

    def _step_size(self, rows: int) -> list[int]:
        """The end of a record's entries: the rows of a step, or this run's budget."""
        if self.budget is None:
            return [rows]
        return [self.budget.batch_tokens, self.budget.row_multiple]

    def step_of(self, record: Record, position: int) -> int:
        """The step that uses a position, or would use it next."""
        from_step, from_position, rows, *_ = max(entry for entry in record if entry[1] <= position)
        return from_step + self.cut(rows, record).steps_until(from_position, position)

    def position_of(self, record: Record, step: int) -> int:
        """The position at which a step begins."""
        if step < 0:
            raise PlanError(f"step {step} does not exist", step=step, remedy="a step of 0 or more")
        from_step, from_position, rows, *_ = max(entry for entry in record if entry[0] <= step)
        cut = self.cut(rows, record)
        if isinstance(cut, Cut):
            return cut.after(from_position, step - from_step)
        position = cut.after(from_position, step - from_step, self.end)
        if self.end is not None and position >= self.end:
            last = from_step + cut.steps_until(from_position, position)
            if step > last:
                raise PlanError(f"step {step} is outside this run", step=step, remedy=f"a step from 0 to {last}")
        return position

    def continued(self, record: Record, position: int, rows: int) -> Record:
        """A record of steps, continued from `position` with `rows` rows a step, or with this run's budget."""
        how = self._step_size(rows)
        step = self.step_of(record, position)
        at = self.position_of(record, step)
        if at == position and record[-1][2:] == how:
            return record
        step += at < position  # a position inside a step: that step counts as used
        return [*(entry for entry in record if entry[0] < step), [step, position, *how]]

    def renumbered(self, record: Record, position: int, step: int) -> Record:
        """A record in which the next batch is number `step`, even if the ends of epochs have moved."""
        if self.position_of(record, step) == position:
            return record
        return [*(entry for entry in record if entry[0] < step), [step, position, record[-1][2]]]

    def cut(self, rows: int, record: Record) -> AnyCut:
        if self.budget is None:
            return self.cut_by_count(rows)
        return BudgetCut(record, self.blocks)

    def cut_by_count(self, rows: int) -> Cut:
        return Cut(rows_per_step=rows, **self.plan.epoch_spec)

    @cached_property
    def blocks(self) -> Blocks:
        """The cuts of blocks by tokens."""
        return Blocks(self.epochs, self.plan.seed, self.stream.lengths_at, self._tokens_of)

    def _tokens_of(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.stream.widths_of(lengths) * self.stream.sequences

    def _refuse_long_rows(self) -> None:
        """Refuse a budget that is too small for the longest row."""
        if self.is_planned and not self.stream.has_lengths:
            raise self.stream.without_lengths()
        if self.budget is None or (longest := self.stream.longest_row()) is None:
            return
        tokens, place = longest
        try:
            refuse_wide_rows(self._tokens_of(np.array([tokens])), self.budget.batch_tokens, self.budget.row_multiple)
        except SpecError as error:
            error.where.update(place)
            raise

    @property
    def is_planned(self) -> bool:
        """Whether each step is planned from the lengths of its rows."""
        return self.budget is not None or self.cost is not None

    def steps(self, rows: int, record: Record) -> Steps:
        """The steps of this run, planned from the lengths of rows."""
        return Steps(self, self.cut(rows, record), record)

    # Ends

    @property
    def epochs(self) -> Epochs:
        epochs: Epochs = self.plan.epoch_spec["epochs"]
        return epochs

    @property
    def end(self) -> int | None:
        """The position at which the run ends; None for an endless one."""
        return self._position(self.epochs.end_of(self.num_epochs))

    def epoch_end(self, position: int) -> int | None:
        """The end of the epoch that a position lies in; None for a stream without epochs."""
        return self._position(self._epoch_span(position)[1])

    def _position(self, live: int | None) -> int | None:
        """The position of a live row, if there is one."""
        if live is None:
            return None
        return self.epochs.skips.position(live)

    def _epoch_span(self, position: int) -> tuple[int, int | None]:
        """(first, last + 1) of the live rows of the epoch that a position lies in."""
        return self.epochs.span(self.epochs.skips.live(position))[1:]

    def begin(self, position: int, record: Record) -> tuple[int, bool]:
        """(position of the next batch at or after a position, whether the run is over there)."""
        cut = self.cut(self.batch_size, record)
        position = cut.settle(position)
        return position, cut.is_over(position, self.end)

    def after_pass(self, position: int, record: Record) -> int:
        """The position of the pass after the one that begins at a position. (An endless pass is begun again.)"""
        if self.plan.sources[0].split == "val":
            return 0
        start, is_over = self.begin(position, record)
        stop = self.epoch_end(start)
        if stop is None or is_over:
            return start
        cut = self.cut(self.batch_size, record)
        if not isinstance(cut, Cut) or not cut.is_linear:
            return stop
        live, rows = cut.epochs.skips.live, cut.rows_per_step
        steps = -(-(live(stop) - live(start)) // rows)  # the last step crosses into the next epoch
        if self.end is not None:
            steps = min(steps, (live(self.end) - live(start)) // rows)
        return cut.after(start, steps)

    def begin_of_epoch(self, epoch: int) -> int:
        """The position at which an epoch begins."""
        begin = self.epochs.begin_of(epoch)
        if begin is None or (self.num_epochs is not None and epoch >= self.num_epochs):
            raise PlanError(f"this run has no epoch {epoch}", parameter="epoch", remedy="reset(), or more epochs")
        return begin

    def num_batches(self, position: int, rows: int, record: Record) -> int:
        """Batches of the epoch that a position lies in."""
        if self.epoch_end(position) is None:
            what = "a mixture by weights has no end, so no number of batches"
            remedy = "Mixture(weights, num_rows=), num_tokens=, or stop='first_exhausted' or 'all_exhausted'"
            raise SpecError(what, parameter="num_rows", remedy=remedy)
        live, end = self.epochs.skips.live(position), self.epochs.end_of(self.num_epochs)
        if end is not None:
            live = min(live, end - 1)
        return self.cut(rows, record).steps_of_epoch(live)

    def end_of_run(self, position: int) -> EndOfRun:
        """The error for a batch after the last one."""
        epochs, remedy = "", "amend(max_epochs=...) allows its sources more, and reset() starts again"
        if self.num_epochs is not None:
            epochs = f"{counted(self.num_epochs, 'epoch')}, "
            if self.epochs.limit is None:
                remedy = f"epochs={self.num_epochs + 1} for more, epochs=None for no end, or reset() to start again"
        error = EndOfRun(f"the run is over: {epochs}{position:,} rows", remedy=remedy)
        return self.stream.end_of_run(position) or error

    # Shares of ranks

    @property
    def share(self) -> Callable[[int], Share]:
        """A function from a batch size to this rank's rows. Batches hold the function, so it does not hold the run."""
        return partial(_rows_of_rank, self.sharding, self.ranks.rank, self.ranks.world_size)

    def check_share(self, rows: int, position: int) -> None:
        """Refuse a size of full batches that ranks cannot share."""
        world = self.ranks.world_size
        if rows % world and not self.uneven and self.equal_counts:
            up = -(-rows // world) * world
            sizes = " or ".join(str(size) for size in (up - world, up) if size)
            what = f"batch_size={rows} does not divide by world_size={world}"
            remedy = f"batch_size={sizes} (it is global: each rank gets its share), or Batching(uneven=True)"
            raise SpecError(what, parameter="batch_size", remedy=remedy)
        self.sharding.share(rows, rank=self.ranks.rank, world=world, uneven=self.uneven)
        if self.plan.epoch_end == "short" and (partial := self.partial_rows(rows, position)):
            self.share(partial)  # checked now, not at the end of the epoch, because a strategy may fail for it

    def partial_rows(self, rows: int, position: int) -> int:
        """Rows of the last, partial batch of an epoch, or of a run whose steps cross epochs; 0 without one."""
        if self.budget is not None:
            return 0
        start, stop = self._epoch_span(position)
        if self.cut_by_count(rows).is_linear:
            start, stop = 0, self.epochs.end_of(self.num_epochs)
        if stop is None:
            return 0
        return (stop - start) % rows

    def dropped_in_words(self, position: int) -> str:
        """The dropped rows, in words; empty if there are none."""
        if self.plan.epoch_end not in ("drop", "wrap") or not (rows := self.partial_rows(self.batch_size, position)):
            return ""
        where = "each epoch"
        if self.cut_by_count(self.batch_size).is_linear:
            where = "the run"
        return f"drops the last {counted(rows, 'row')} of {where}"

    # Reports

    def settings_to_compare(self) -> dict[str, Any]:
        """The settings that must be equal on all ranks, by name."""
        world = self.ranks.world_size
        settings = {
            "plan": self.plan.fingerprint,
            "batch_size": self.batch_size,
            "epochs": self.num_epochs,
            "world_size": world,
            "sharding": self.sharding.describe(self.batch_size or world, world),
            "balance": self.cost and [str(self.cost), self.equal_counts],
            **self.stream.settings_to_compare(),
        }
        if self.is_planned:  # steps or shares depend on it
            settings["pad_to"] = self.stream.pad_to
        return settings

    def in_words(self, position: int, record: Record, framework: str) -> str:
        """The first line of a loader's repr."""
        size = self._size_in_words()
        return f"batches of {size} ({framework}){self._rank_in_words()}, {self._length_in_words(position, record)}"

    def _size_in_words(self) -> str:
        budget = self.budget or self.stream.budget
        pairs = " pairs" * (self.stream.sequences > 1)
        size = f"{self.batch_size}{pairs} {self.stream.row_in_words}"
        if budget is not None:
            size = f"at most {budget.batch_tokens:,} tokens"
        return size + ", balanced" * (self.cost is not None)

    def _rank_in_words(self) -> str:
        if self.ranks.world_size == 1:
            return ""
        rank = f", rank {self.ranks.rank} of {self.ranks.world_size}"
        if self.is_planned or self.stream.budget:
            return rank
        return f"{rank} gets {len(self.share(self.batch_size))}"

    def _length_in_words(self, position: int, record: Record) -> str:
        is_counted = self.stream.why_uncounted() is None
        has_epochs = is_counted and self.epoch_end(position) is not None
        length = counted(self.num_epochs or 1, "epoch")
        if self.num_epochs is None or (is_counted and not has_epochs):
            length = "endless"
        if not has_epochs:
            return length
        steps = counted(self.num_batches(position, self.batch_size, record), "step")
        if dropped := self.dropped_in_words(position):
            dropped = f" ({dropped})"
        return f"{length}, {steps} an epoch{dropped}"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "blocks"}


def _default_batch(plan: Plan) -> int:
    """The default number of rows of a batch: the one of the plan's run."""
    if len(plan.runs) == 1:
        return plan.steps[-1][2]
    return DEFAULT_BATCH


def _rows_of_rank(sharding: Sharding, rank: int, world: int, rows: int) -> Share:
    """A rank's rows of a batch of `rows`. A rank without rows gets the row after the last, with weight 0."""
    return sharding.share(rows, rank=rank, world=world) or range(rows, rows + 1)
