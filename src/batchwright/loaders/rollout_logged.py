"""The rows of a rollout log as a stream, in the order of use that the journal records.

A group is chosen on first request, and journaled before any trainer gets it. So the rows of a position never change, on
any rank and after a restart.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from batchwright.base.checks import at_least, one_of
from batchwright.base.errors import EndOfRun, NotReadyError, PlanError, SampleError, SpecError
from batchwright.batches.ranks import find_ranks
from batchwright.batches.settings import Asked
from batchwright.batches.types import TrainingBatch
from batchwright.loaders.interface import Made, Making, Record, state_at
from batchwright.loaders.rollout_data import RolloutBatches, RolloutStream
from batchwright.loaders.run import Run
from batchwright.loaders.steps import Budget, budget_of
from batchwright.order.budget import refuse_wide_rows
from batchwright.order.plan import Plan, PlanSource, State
from batchwright.order.split import Cut
from batchwright.rl.columns import Rollouts
from batchwright.rl.estimate import Advantages
from batchwright.rollouts.aligned import RolloutRows
from batchwright.rollouts.log.groups import Group
from batchwright.rollouts.log.log import RolloutLog

logger: logging.Logger = logging.getLogger("batchwright")

_WIDEST = 1 << 31
"""Stands for the unknown longest row of a log."""


def open_log(
    log: RolloutLog,
    read: Callable[..., Rollouts],
    max_staleness: int | None,
    timeout: float,
    asked: Asked,
    of_data: Mapping[str, Any],
    ranks: tuple[int | None, int | None],
    how: dict[str, Any],
) -> tuple[LogStream, Asked]:
    """The stream over a log, and the settings for the cursor over it. Settings in `of_data` are refused."""
    _refuse_settings_of_a_set(asked, of_data)
    budget = budget_of(asked, epoch_end="short", world=find_ranks(*ranks, asked["mesh"]).world_size)
    reader = LogReader(log, read, how["estimator"], max_staleness, timeout, by_count=budget is None)
    if budget is not None:  # the cursor counts rows; the number of rows of a batch is learned by reading
        asked = asked.changed(batch_size=1, batch_tokens=None, row_multiple=None, uneven=True)
    return LogStream(_plan_of_log(log, asked.get("epoch_end", "short")), asked, reader, budget, how), asked


def _refuse_settings_of_a_set(asked: Asked, of_data: Mapping[str, Any]) -> None:
    no_effect = {"epochs": (1, None), "shuffle": (None, False, "none"), "seed": (None, 0)}
    for name, value in {"seed": asked["seed"], "shuffle": asked["shuffle"], **of_data}.items():
        if value in no_effect.get(name, (None,)):
            continue
        remedy = f"leave out {name}="
        if name in ("seed", "shuffle", "epochs", "group_size"):
            remedy += f", or say it to the log: RolloutLog({name}=...)"
        what = f"{name}={value!r} is not for a log: its rows, and their order, are in its journal"
        raise SpecError(what, parameter=name, remedy=remedy)
    if asked["pad_to"] == "max_length":
        raise SpecError(
            "the longest row of a log that grows is not known",
            parameter="pad_to",
            remedy="pad_to='longest', a number that widths are multiples of, or a list of widths",
        )


def _plan_of_log(log: RolloutLog, epoch_end: str) -> Plan:
    """A stream without epochs and without a known end. Its rows are fixed by the journal of one log."""
    source = PlanSource(
        name="rollouts",
        split="train",
        fingerprint=log.fingerprint,
        num_rows=log.group_size,
        num_tokens=log.group_size,
        rows=(("log", True),),
    )
    return Plan(
        row_tokens=1,
        seed=0,
        shuffle="none",
        epoch_end=one_of(("short", "pad", "drop"), epoch_end=epoch_end),
        sources=(source,),
        segments=((0, (("rollouts", 1.0),)),),
    )


class LogStream(RolloutStream):
    """The rows of a log, without epochs and without a known end. Rows are chosen on request."""

    of_another_plan = "open the loader with the epoch_end= of that run, the only setting of a log's plan"

    def __init__(self, plan: Plan, asked: Asked, reader: LogReader, budget: Budget | None, how: dict[str, Any]) -> None:
        super().__init__(plan, asked, _WIDEST, **how)
        self.reader: LogReader = reader
        self.log: RolloutLog = reader.log
        self.budget: Budget | None = budget

    def open(self, run: Run, rows: int, record: Record, making: Making) -> LogBatches:
        return LogBatches(self, run, rows, record, making)

    def check_workers(self, run: Run) -> None:
        what = "worker processes cannot read a rollout log: what they would read ahead is decided when it is needed"
        raise SpecError(what, parameter="num_workers", remedy="num_workers=0")

    def widths_of(self, longest: NDArray[np.int64]) -> NDArray[np.int64]:
        widths = super().widths_of(longest)
        return np.where(widths < _WIDEST, widths, longest)  # a row over the largest of the given widths

    def why_uncounted(self) -> SpecError:
        remedy = "iterate until it ends, or read a finished set of rollouts"
        return SpecError("a log that grows has no number of batches", parameter="rollout_data", remedy=remedy)

    def end_of_run(self, position: int) -> EndOfRun:
        return EndOfRun(
            f"the log is over: all its prompts are answered and used, {position:,} rows",
            remedy="RolloutLog(..., epochs=2) for another pass over the prompts, in a new folder",
        )

    def settings(self) -> dict[str, Any]:
        return {"log": self.plan.sources[0].fingerprint}

    def for_state(self, state: Mapping[str, Any]) -> Self:
        num_rows = self.log.num_uses * self.log.group_size
        if state["plan"] == self.plan.fingerprint and state["position"] > num_rows:
            raise PlanError(  # these positions would get other rows, which would never be used
                f"this state has used {state['position']:,} rows, and this older copy of the log gave out {num_rows:,}",
                folder=self.log.path,
                remedy="the folder as it was when the state was made, or a state from before the copy",
            )
        return super().for_state(state)

    def of_other_content(self, theirs: Mapping[str, Any]) -> PlanError:
        error = super().of_other_content(theirs)
        error.where["folder"] = self.log.path
        return error

    def in_words(self, plan: Plan) -> str:
        how = self.estimator.in_words(self.reader.method)
        if self.reader.method is None and self.estimator.method:
            how = "advantages by what the first group has"
        return f"├─ {how}\n└─ " + repr(self.log).replace("\n", "\n ")


@dataclass(frozen=True, slots=True)
class LogRows:
    """Some consecutive rows of the stream."""

    rows: RolloutRows
    first: int
    """The first of them in `rows`."""
    count: int
    is_last: bool
    """Whether no row will ever follow."""
    facts: dict[str, NDArray[np.int64]]
    """For every row of `rows`: its prompt, and which answer to it."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self.rows.lengths[self.first : self.first + self.count]


@dataclass(slots=True)
class LogReader:
    """The reader of a log. It reads rows by position, and takes rows for the trainer that no rank has taken yet."""

    log: RolloutLog
    read: Callable[[list[dict[str, Any]]], Rollouts]
    estimator: Advantages
    max_staleness: int | None
    timeout: float = 0.0
    by_count: bool = True
    """Whether batches are cut by rows, not by tokens."""
    method: str | None = None
    """The method of advantages: known when the first rows are."""
    policy_version: int | None = None
    """The version of the trainer's weights."""

    def update(self, version: int) -> None:
        """Note the version of the trainer's weights."""
        version = at_least(0, policy_version=version)
        if self.policy_version is not None and version < self.policy_version:
            what = f"policy_version went backwards: {version} after {self.policy_version}"
            remedy = "the number of updates so far; after going back to a checkpoint, load_state_dict(state) first"
            raise SpecError(what, parameter="policy_version", remedy=remedy)
        self.policy_version = version

    def fetch(self, position: int, num_rows: int, *, needed: bool = True, decides: bool = True) -> LogRows | None:
        """`num_rows` rows from a position on; fewer at the end of the log, and None if it has no more.

        It waits for missing rows, and raises NotReadyError after the timeout. Without `needed`, missing rows are left
        out. Without `decides`, only rows that were chosen before are read.
        """
        size = self.log.group_size
        first_use, last_use = position // size, -(-(position + num_rows) // size)
        num_uses = self._take(last_use, needed, decides)
        is_over = num_uses < last_use and self.log.is_over
        if is_over:
            num_uses = self.log.num_uses  # another rank may have taken the last ones meanwhile
        num_there = num_uses * size - position
        if num_uses < last_use and needed and not is_over:
            raise self._not_ready(max(num_there, 0), num_rows)
        count = min(num_there, num_rows)
        if count <= 0:
            return None
        rollouts, facts = self._read_uses(first_use, min(last_use, num_uses))
        first = position - first_use * size
        self.method = self.estimator.method_for(rollouts)
        if self.method == "reinforce":  # the mean is over the global batch
            chosen = np.arange(first, first + count)
            rollouts, first = rollouts.take(chosen), 0
            facts = {name: values[chosen] for name, values in facts.items()}
        is_last = is_over and count == num_there  # others may have taken more than was asked for here
        return LogRows(RolloutRows(rollouts, self.estimator), first, count, is_last, facts)

    def _take(self, last_use: int, needed: bool, decides: bool) -> int:
        """Take the groups that the uses [0, last_use) need. Return the number of known uses."""
        num_uses = self.log.num_uses
        if not decides or num_uses >= last_use:
            return num_uses
        return self.log.take_uses(
            last_use,
            policy_version=self.policy_version,
            max_staleness=self.max_staleness,
            timeout=self.timeout if needed else 0.0,
        )

    def _not_ready(self, num_there: int, num_rows: int) -> NotReadyError:
        what = (
            f"{num_there:,} rows are there: generators have not added the next one, which may fit into the batch, yet"
        )
        if self.by_count:
            what = f"{num_there:,} of {num_rows:,} rows are there: generators have not added the others yet"
        remedy = (
            "add more groups to the log, or let the loader wait: RolloutDataLoader(..., timeout=600); "
            "generators with ahead= must be allowed as many groups as a batch has"
        )
        return NotReadyError(what, folder=self.log.path, waited=f"{self.timeout:g} seconds", remedy=remedy)

    def _read_uses(self, first_use: int, last_use: int) -> tuple[Rollouts, dict[str, NDArray[np.int64]]]:
        """(the rollouts of some uses, facts of each row)."""
        size, uses = self.log.group_size, range(first_use, last_use)
        groups = self.log.groups_at(uses)
        rows = [row for use, group in zip(uses, groups, strict=True) for row in group.rows(use)]
        try:
            rollouts = self.read(rows)
        except SampleError as error:
            number = error.where.get("row")
            if isinstance(number, int):
                which, answer = divmod(number, size)
                self._locate(error, groups[which], answer, first_use + which)
            raise
        facts = {name: np.repeat([getattr(g, name) for g in groups], size) for name in ("ordinal", "attempt", "row")}
        return rollouts, facts | {"answer": np.tile(np.arange(size), len(groups))}

    def _locate(self, error: SampleError, group: Group, answer: int, use: int) -> None:
        """Add to an error its prompt and answer, and a way to continue after the group."""
        error.where |= {"row": group.row, "ordinal": group.ordinal, "answer": answer}
        error.where.pop("group", None)
        after = (use + 1) * self.log.group_size
        error.remedy = f"{error.remedy}; to go on behind this group: loader.seek(position={after}), on all ranks"


class LogBatches(RolloutBatches):
    """One rank's batches of a log, by count or by token budget."""

    stream: LogStream

    def __init__(self, stream: LogStream, run: Run, rows: int, record: Record, making: Making) -> None:
        super().__init__(stream, run, rows, record, making)
        self._guess: int = stream.log.group_size
        """Rows to look at for the next batch of a budget."""
        if self.stream.budget is not None:
            self._guess += self.stream.budget.row_multiple

    def batches(self, position: int, skipped: int = 0, every: int = 1, stop: int | None = None) -> Made[TrainingBatch]:
        while (found := self._fetch(position)) is not None:
            after = position + found.count
            record = self._record_with(position, after)
            state = state_at(after, self.stream.plan.fingerprint, record) | self.stream.extra_state(after)
            batch = self._batch(found, position, state)
            self.record = record
            yield batch, after
            position = after

    def _record_with(self, position: int, after: int) -> Record:
        """The record of steps, with a step of these rows. A step size that differs from the record is added to it."""
        from_step, from_position, rows = self.record[-1]
        step = from_step + (position - from_position) // rows
        if self.stream.budget is not None:  # every step differs, so the last one is enough
            return [self.record[0], [step + 1, after, rows]]
        if after - position == rows:
            return self.record
        return [*self.record, [step + 1, after, rows]]

    def _fetch(self, position: int) -> LogRows | None:
        if self.stream.budget is not None:
            return self._fetch_budget(position, self.stream.budget)
        assert isinstance(self.steps.cut, Cut)
        rows = self.steps.cut.rows_per_step
        found = self.stream.reader.fetch(position, rows)
        if found is None or found.count == rows or self.stream.plan.epoch_end != "drop":
            return found
        if not self.steps.run.ranks.rank:
            text = "batch_size=%d drops the last %d rows of the log; epoch_end='short' keeps them"
            logger.warning(text, rows, found.count)
        return None

    def _fetch_budget(self, position: int, budget: Budget) -> LogRows | None:
        """As many of the next rows as fit. The row after them does not fit or does not exist."""
        reader, most, decides = self.stream.reader, self._guess, False
        while True:
            found = reader.fetch(position, most, needed=False, decides=decides)
            count = fits = 0
            if found is not None:
                count, fits = found.count, self._rows_that_fit(found, position, budget)
                if fits < count or found.is_last:
                    self._guess = fits + reader.log.group_size
                    if reader.method == "reinforce":  # a mean over these rows, and no others
                        return reader.fetch(position, fits)
                    return replace(found, count=fits)
            if count == most:
                most *= 2
            elif not decides:  # the record does not tell
                decides = True
            elif reader.fetch(position, count + 1) is None:  # waits for what may still fit
                return None

    def _rows_that_fit(self, found: LogRows, position: int, budget: Budget) -> int:
        """The number of rows, from the first on, that make a batch: a multiple of row_multiple if there are enough."""
        widths = self.stream.widths_of(np.maximum.accumulate(found.lengths))
        try:
            # Only if no batch can be made without such a row. Otherwise the rows before it are a batch first.
            refuse_wide_rows(widths[: budget.row_multiple], budget.batch_tokens, budget.row_multiple)
        except SpecError as error:
            place, size = int(str(error.where["row"])), self.stream.log.group_size
            after = ((position + place) // size + 1) * size
            facts = {name: int(found.facts[name][found.first + place]) for name in ("row", "ordinal", "answer")}
            error.where |= facts
            error.remedy = (
                f"{str(error.remedy).partition(',')[0]}: the group is in the stream, and stays there; to go on behind "
                f"it: loader.seek(position={after}), on all ranks"
            )
            raise
        counts, multiple = np.arange(1, len(widths) + 1), budget.row_multiple
        does_fit = -(-counts // multiple) * multiple * widths <= budget.batch_tokens
        fits = int(np.count_nonzero(does_fit))  # batches grow, so those that fit come first
        if fits == found.count:
            return fits
        return fits // multiple * multiple

    def _batch(self, found: LogRows, position: int, state: State) -> TrainingBatch:
        multiple = 1
        if self.stream.budget is not None:
            multiple = self.stream.budget.row_multiple
        elif self.stream.plan.epoch_end != "short":
            assert isinstance(self.steps.cut, Cut)
            multiple = self.steps.cut.rows_per_step
        num_rows = -(-found.count // multiple) * multiple
        positions = position + np.arange(found.count)
        step = self.steps.of(positions, found.lengths, num_rows, position + found.count)
        return self.make(found.rows, step.positions - position + found.first, step, found.facts, state)
