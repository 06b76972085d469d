"""The rows of a rollout log as a stream: in the order in which the journal says that they are used.

Which groups those are is decided when they are first asked for, and journaled before anybody gets them. So a position
gives the same rows for ever: on every rank, and again after a restart.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from batchwright.base.checks import at_least, one_of
from batchwright.base.errors import EndOfRun, NotReadyError, PlanError, SampleError, SpecError
from batchwright.batches.ranks import find_ranks
from batchwright.batches.settings import Asked
from batchwright.batches.types import TrainingBatch
from batchwright.loaders.budget import Budget, budget_of
from batchwright.loaders.interface import Made, Making, Record, state_at
from batchwright.loaders.rollout_batches import Maker, RolloutStream
from batchwright.loaders.run import Run
from batchwright.loaders.steps import Steps
from batchwright.order.budget import refuse_wide_rows
from batchwright.order.plan import Plan, PlanSource, State
from batchwright.order.schedule import ORDER_VERSION
from batchwright.order.split import Cut
from batchwright.rl.columns import Rollouts
from batchwright.rl.estimate import Advantages
from batchwright.rollouts.aligned import RolloutRows
from batchwright.rollouts.log.groups import Group
from batchwright.rollouts.log.log import RolloutLog

__all__ = ["LogRows", "LogStream", "Policy", "open_log", "plan_of_log"]

logger: logging.Logger = logging.getLogger("batchwright")

_WIDEST = 1 << 31
"""Stands for the longest row of a log, whose length is not known."""


def open_log(
    log: RolloutLog,
    read: Callable[..., Rollouts],
    policy: Policy,
    timeout: float,
    asked: Asked,
    of_data: Mapping[str, Any],
    ranks: tuple[int | None, int | None],
    how: dict[str, Any],
) -> tuple[LogStream, Asked]:
    """The stream over a log, and the settings for the cursor over it."""
    _refuse_whole(asked, of_data)
    budget = budget_of(
        asked["batch_tokens"],
        asked["row_multiple"],
        batch_size=asked["batch_size"],
        epoch_end="short",
        world=find_ranks(*ranks, asked["mesh"]).world_size,
        uneven=bool(asked["uneven"]) or asked["equal_counts"] is False,
    )
    rows = LogRows(log, read, how["estimator"], policy, timeout, by_count=budget is None)
    if budget is not None:  # the cursor counts rows: how many of them a batch has is found out on the way
        asked = asked.changed(batch_size=1, batch_tokens=None, row_multiple=None, uneven=True)
    return LogStream(plan_of_log(log, asked["epoch_end"]), asked, rows, budget, how), asked


class LogStream(RolloutStream):
    """The rows of a log: no epochs, no end that is known, and rows that are decided on when asked for."""

    def __init__(self, plan: Plan, asked: Asked, rows: LogRows, budget: Budget | None, how: dict[str, Any]) -> None:
        super().__init__(plan, asked, _WIDEST, **how)
        self.rows: LogRows = rows
        self.budget: Budget | None = budget

    @property
    def policy(self) -> Policy:
        return self.rows.policy

    @property
    def log(self) -> RolloutLog:
        return self.rows.log

    def open(self, run: Run, rows: int, record: Record, making: Making) -> LogBatches:
        return LogBatches(self, run.steps(rows, record), self.maker(making.framework), record)

    def widths_of(self, longest: NDArray[np.int64]) -> NDArray[np.int64]:
        widths = super().widths_of(longest)
        return np.where(widths < _WIDEST, widths, longest)  # a row over the largest of the widths that were given

    def why_uncounted(self) -> SpecError:
        return SpecError(
            "a log that grows has no number of batches",
            parameter="rollout_data",
            remedy="iterate until it ends, or read a finished set of rollouts",
        )

    def end_of_run(self, position: int) -> EndOfRun:
        return EndOfRun(
            f"the log is over: all its prompts are answered and used, {position:,} rows",
            remedy="RolloutLog(..., epochs=2) for another pass over the prompts, in a new folder",
        )

    def settings(self) -> dict[str, Any]:
        return {"log": self.plan.sources[0].fingerprint}

    def for_state(self, state: Mapping[str, Any]) -> Self:
        position = state["position"]
        if state["plan"] == self.plan.fingerprint:
            num_rows = self.log.num_uses * self.log.group_size
            if position > num_rows:  # other rows would come to stand there, and never be used
                raise PlanError(
                    f"this state has used {position:,} rows, and the log gave out {num_rows:,}: it is an older copy",
                    folder=self.log.path,
                    remedy="the folder as it was when the state was made, or a state from before the copy",
                )
        return super().for_state(state)

    def refusal(self, theirs: Mapping[str, Any]) -> PlanError | None:
        if "log" in theirs:
            return self.of_other_content(theirs)
        return PlanError(
            "this state belongs to a set of rollouts, and this loader reads a log",
            folder=self.log.path,
            remedy="open the loader with the data of that run",
        )

    def of_other_content(self, theirs: Mapping[str, Any]) -> PlanError:
        mine = self.settings()["log"]
        return PlanError(
            "this state belongs to another log" if theirs["log"] != mine else "this state has another epoch_end",
            folder=self.log.path,
            differs=f"{mine[:7]} here, {str(theirs['log'])[:7]} there",
            remedy="open the loader with the log and the settings of that run, or start anew, without the state",
        )

    def in_words(self, plan: Plan) -> str:
        how = self.estimator.in_words(self.rows.method)
        if self.rows.method is None and self.estimator.method:
            how = "advantages by what the first group has"
        return f"├─ {how}\n└─ " + repr(self.log).replace("\n", "\n ")


def _refuse_whole(asked: Asked, of_data: Mapping[str, Any]) -> None:
    """Refuse settings that only a finished set of rollouts has."""
    of_the_log = ("seed", "shuffle", "epochs", "group_size")
    plain = {"epochs": (1, None), "shuffle": (None, False, "none"), "seed": (None, 0)}
    for name, value in {"seed": asked["seed"], "shuffle": asked["shuffle"], **of_data}.items():
        if value in plain.get(name, (None,)):
            continue
        to_the_log = f", or say it to the log: RolloutLog({name}=...)" if name in of_the_log else ""
        raise SpecError(
            f"{name}={value!r} is not for a log: its rows, and their order, are in its journal",
            parameter=name,
            remedy=f"leave out {name}={to_the_log}",
        )
    if asked["pad_to"] == "max_length":
        raise SpecError(
            "the longest row of a log that grows is not known",
            parameter="pad_to",
            remedy="pad_to='longest', a number that widths are multiples of, or a list of widths",
        )


@dataclass(slots=True)
class Policy:
    """The trainer's weights, as far as data is concerned."""

    version: int | None = None
    max_staleness: int | None = None

    def is_now(self, version: int) -> None:
        """The trainer has these weights."""
        version = at_least(0, policy_version=version)
        if self.version is not None and version < self.version:
            raise SpecError(
                f"policy_version went backwards: {version} after {self.version}",
                parameter="policy_version",
                remedy="the number of updates so far; after going back to a checkpoint, load_state_dict(state) first",
            )
        self.version = version


@dataclass(frozen=True, slots=True)
class Fetched:
    """Some consecutive rows of the stream."""

    rows: RolloutRows
    first: int
    """Where in `rows` the first of them is."""
    count: int
    is_last: bool
    """Whether there will never be any after them."""
    facts: dict[str, NDArray[np.int64]]
    """Of every row of `rows`: which prompt it is of, and which answer to it."""


@dataclass(slots=True)
class LogRows:
    """Reads rows of a log by position, and takes them for the trainer where no rank has yet."""

    log: RolloutLog
    read: Callable[[list[dict[str, Any]]], Rollouts]
    estimator: Advantages
    policy: Policy
    timeout: float = 0.0
    by_count: bool = True
    """Whether batches are cut by rows, and not by tokens."""
    method: str | None = None
    """How advantages are computed: known when the first rows are."""

    def fetch(self, position: int, num_rows: int, *, needed: bool = True, decides: bool = True) -> Fetched | None:
        """So many rows from a position on; fewer where the log is over, and None where it has no more.

        What is not there yet is waited for, and then a NotReadyError; without `needed`, there are only fewer. Without
        `decides`, only what was decided on before.
        """
        size = self.log.group_size
        first_use, last_use = position // size, -(-(position + num_rows) // size)
        have = self.log.num_uses
        if decides and have < last_use:
            have = self.log.take_uses(
                last_use,
                policy_version=self.policy.version,
                max_staleness=self.policy.max_staleness,
                timeout=self.timeout if needed else 0.0,
            )
        is_over = have < last_use and self.log.is_over
        if is_over:
            have = self.log.num_uses  # another rank may have taken the last ones meanwhile
        if have < last_use and needed and not is_over:
            raise self._not_ready(max(have * size - position, 0), num_rows)
        count = min(have * size - position, num_rows)
        if count <= 0:
            return None
        uses = np.arange(first_use, min(last_use, have))
        groups = self.log.groups_at(uses)
        rows = [row for use, group in zip(uses.tolist(), groups, strict=True) for row in group.rows(use)]
        rollouts = self._read(rows, groups, first_use)
        facts = {name: np.repeat([getattr(g, name) for g in groups], size) for name in ("ordinal", "attempt", "row")}
        facts["answer"] = np.tile(np.arange(size), len(groups))
        first = position - first_use * size
        is_last = is_over and position + count == have * size  # others may have taken more than was asked for here
        self.method = self.estimator.method_for(rollouts)
        if self.method == "reinforce":  # the mean is that of the global batch
            chosen = np.arange(first, first + count)
            rollouts, first = rollouts.take(chosen), 0
            facts = {name: values[chosen] for name, values in facts.items()}
        return Fetched(RolloutRows(rollouts, self.estimator), first, count, is_last, facts)

    def _not_ready(self, num_there: int, num_rows: int) -> NotReadyError:
        there = f"{num_there:,} of {num_rows:,} rows are there" if self.by_count else f"{num_there:,} rows are there"
        more = "the others" if self.by_count else "the next one, which may fit into the batch,"
        return NotReadyError(
            f"{there}: generators have not added {more} yet",
            folder=self.log.path,
            waited=f"{self.timeout:g} seconds",
            remedy="add more groups to the log, or let the loader wait: RolloutDataLoader(..., timeout=600); "
            "generators with ahead= must be allowed as many groups as a batch has",
        )

    def _read(self, rows: list[dict[str, Any]], groups: list[Group], first_use: int) -> Rollouts:
        size = len(groups[0].responses)
        try:
            return self.read(rows)
        except SampleError as error:
            number = error.where.get("row")
            if isinstance(number, int):
                which, answer = divmod(number, size)
                found = groups[which]
                error.where |= {"row": found.row, "ordinal": found.ordinal, "answer": answer}
                error.where.pop("group", None)
                after = (first_use + which + 1) * size
                error.remedy = (
                    f"{error.remedy}; to go on behind this group: loader.seek(position={after}), on all ranks"
                )
            raise


@dataclass(slots=True)
class LogBatches:
    """One rank's batches of a log, by count or by token budget."""

    stream: LogStream
    steps: Steps
    """Who shares a batch, and how."""
    maker: Maker
    record: Record
    _guess: int = field(init=False)
    """Rows to look at for the next batch of a budget."""

    def __post_init__(self) -> None:
        self._guess = self.stream.log.group_size + (self.stream.budget.row_multiple if self.stream.budget else 0)

    def batches(self, position: int) -> Made[TrainingBatch]:
        while (fetched := self._fetch(position)) is not None:
            after = position + fetched.count
            record = self._counted_on(position, after)
            state = state_at(after, self.stream.plan.fingerprint, record) | self.stream.extra_state(after)
            batch = self._batch(fetched, position, state)
            self.record = record
            yield batch, after
            position = after

    def _counted_on(self, position: int, after: int) -> Record:
        """How batches were cut, where one more has these rows: as many as the record says, or noted in it."""
        record = self.record
        from_step, from_position, rows = record[-1]
        if after - position == rows and self.stream.budget is None:
            return record
        step = from_step + (position - from_position) // rows
        kept = (
            record if self.stream.budget is None else record[:1]
        )  # of a budget every step is noted: the last one will do
        return [*kept, [step + 1, after, rows]]

    def turns(self, position: int, skipped: int, every: int, stop: int | None) -> Iterator[TrainingBatch]:
        raise SpecError(
            "worker processes cannot read a rollout log: what they would read ahead is decided when it is needed",
            parameter="num_workers",
            remedy="num_workers=0",
        )

    def _fetch(self, position: int) -> Fetched | None:
        if self.stream.budget is not None:
            return self._fetch_budget(position, self.stream.budget)
        assert isinstance(self.steps.cut, Cut)
        fetched = self.stream.rows.fetch(position, self.steps.cut.rows_per_step)
        rows = self.steps.cut.rows_per_step
        if fetched is None or fetched.count == rows or self.stream.plan.epoch_end != "drop":
            return fetched
        if not self.steps.rank:
            logger.warning(
                "batch_size=%d drops the last %d rows of the log; epoch_end='short' keeps them", rows, fetched.count
            )
        return None

    def _fetch_budget(self, position: int, budget: Budget) -> Fetched | None:
        """As many of the next rows as fit: it is known that the next one does not, or that there is none."""
        most, decides = self._guess, False
        while True:
            fetched = self.stream.rows.fetch(position, most, needed=False, decides=decides)
            count, fits = (0, 0) if fetched is None else (fetched.count, self._rows_that_fit(fetched, position, budget))
            if fetched is not None and (fits < count or fetched.is_last):
                self._guess = fits + self.stream.rows.log.group_size
                if self.stream.rows.method == "reinforce":  # a mean over these rows, and no others
                    return self.stream.rows.fetch(position, fits)
                return replace(fetched, count=fits)
            if count == most:
                most *= 2
            elif not decides:  # what is on record does not say it
                decides = True
            elif self.stream.rows.fetch(position, count + 1) is None:  # waits for what may still fit
                return None

    def _rows_that_fit(self, fetched: Fetched, position: int, budget: Budget) -> int:
        """The number of rows, from the first on, that make a batch: a multiple of row_multiple if there are enough."""
        rows = slice(fetched.first, fetched.first + fetched.count)
        widths = self.steps.widths_of(np.maximum.accumulate(fetched.rows.lengths[rows]))
        try:
            # Only where no batch can be made without such a row: what comes before it is a batch first.
            refuse_wide_rows(widths[: budget.row_multiple], budget.batch_tokens, budget.row_multiple)
        except SpecError as error:
            place, size = int(str(error.where["row"])), self.stream.rows.log.group_size
            number = fetched.first + place
            after = ((position + place) // size + 1) * size
            error.where |= {name: int(fetched.facts[name][number]) for name in ("row", "ordinal", "answer")}
            error.remedy = (
                f"{str(error.remedy).partition(',')[0]}: the group is in the stream, and stays there; to go on behind "
                f"it: loader.seek(position={after}), on all ranks"
            )
            raise
        counts, multiple = np.arange(1, len(widths) + 1), budget.row_multiple
        does_fit = -(-counts // multiple) * multiple * widths <= budget.batch_tokens
        fits = int(np.count_nonzero(does_fit))  # of growing batches, those that fit come first
        return fits if fits == fetched.count else fits // multiple * multiple

    def _batch(self, fetched: Fetched, position: int, state: State) -> TrainingBatch:
        if self.stream.budget is None:
            assert isinstance(self.steps.cut, Cut)
            num_rows = fetched.count if self.stream.plan.epoch_end == "short" else self.steps.cut.rows_per_step
        else:
            num_rows = -(-fetched.count // self.stream.budget.row_multiple) * self.stream.budget.row_multiple
        row = np.arange(fetched.count)
        lengths = fetched.rows.lengths[fetched.first + row]
        step = self.steps.of(position + row, lengths, num_rows, position + fetched.count)
        return self.maker.make(fetched.rows, step.positions - position + fetched.first, step, fetched.facts, state)


def plan_of_log(log: RolloutLog, epoch_end: str | None) -> Plan:
    """A stream without epochs, whose end is not known. Its rows are fixed by the journal of one log."""
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
        epoch_end=one_of(("short", "pad", "drop"), epoch_end="short" if epoch_end is None else epoch_end),
        sources=(source,),
        segments=((0, (("rollouts", 1.0),)),),
        order_version=ORDER_VERSION,
    )
