"""The rows of a rollout log as a stream: in the order in which the journal says that they are used.

Which groups those are is decided when they are first asked for, and journaled before anybody gets them. So a position
gives the same rows for ever: on every rank, and again after a restart.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.errors import EndOfRun, NotReadyError, PlanError, SampleError, SpecError
from batchwright.loaders.budget import Budget, budget_of
from batchwright.loaders.rollout import Asked, Read, RolloutDataLoader
from batchwright.loaders.rollout_batches import Maker
from batchwright.loaders.steps import AnyCut, Steps
from batchwright.order.budget import refuse_wide_rows
from batchwright.order.schedule import ORDER_VERSION
from batchwright.order.split import Cut
from batchwright.plan import Plan, PlanSource, State
from batchwright.rl.columns import Rollouts
from batchwright.rl.estimate import Estimator
from batchwright.rl.groups import Group
from batchwright.rl.rows import RolloutRows
from batchwright.rollout_log import RolloutLog
from batchwright.spec import at_least, one_of
from batchwright.types import TrainingBatch

__all__ = ["LogRows", "LogStream", "LoggedRollouts", "Policy", "plan_of_log"]

log: logging.Logger = logging.getLogger("batchwright")

Record = list[list[int]]

_WIDEST = 1 << 31
"""Tokens of the longest row of a log, of which nobody knows."""


class LoggedRollouts(RolloutDataLoader):
    """A RolloutDataLoader over a log: no epochs, no end that is known, and rows that are decided on when asked for."""

    _budget_of_log: Budget | None = None
    """Of a log the cursor counts rows: how many of them a batch by tokens has is found out on the way."""

    def _open(self, rollout_data: RolloutLog, read: Read, asked: Asked) -> Plan:
        _refuse_whole(asked)
        self._log, self._longest = rollout_data, _WIDEST
        self._policy = Policy()
        if asked.max_staleness is not None:
            self._policy.max_staleness = at_least(0, max_staleness=asked.max_staleness)
        self._rows = LogRows(self._log, read, self._estimator, self._policy, asked.timeout)
        self._budget_of_log = budget_of(
            asked.batch_tokens,
            asked.row_multiple,
            batch_size=asked.batch_size,
            epoch_end="short",
            world=asked.ranks.world_size,
            uneven=asked.uneven or not asked.equal_counts,
        )
        if self._budget_of_log is not None:
            self._rows.by_count = False
            asked.batch_size, asked.batch_tokens, asked.row_multiple, asked.uneven = 1, None, None, True
        asked.epochs = None
        return plan_of_log(self._log, asked.epoch_end)

    @property
    def policy_version(self) -> int | None:
        """Which weights the trainer has now: `max_staleness` counts from there. Never lower than it was."""
        return self._policy.version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        version = at_least(0, policy_version=version)
        if self._policy.version is not None and version < self._policy.version:
            raise SpecError(
                f"policy_version went backwards: {version} after {self._policy.version}",
                parameter="policy_version",
                remedy="the number of updates so far; after going back to a checkpoint, load_state_dict(state) first",
            )
        self._policy.version = version

    def get_batch(self, batch_size: int | None = None, *, policy_version: int | None = None) -> TrainingBatch:
        """The next batch, of `batch_size` rows over all ranks together. `policy_version`: the trainer's weights."""
        if batch_size is not None and self._budget_of_log is not None:
            raise SpecError(
                f"this loader has batches of {self._budget_of_log.batch_tokens:,} tokens at most, not of so many rows",
                parameter="batch_size",
                remedy="leave batch_size= out",
            )
        return super().get_batch(batch_size, policy_version=policy_version)

    def _batches(self, rows: int) -> LogStream:
        return LogStream(
            source=self._rows,
            maker=self._maker,
            steps=self._steps_of(rows),
            state=self._state_at,
            budget=self._budget_of_log,
            epoch_end=self._plan.epoch_end,
        )

    def _state_at(self, position: int, steps: Record) -> State:
        state = {"position": position, "plan": self._plan.fingerprint, "steps": [list(entry) for entry in steps]}
        return {**state, "rollouts": self._settings()}

    def _record(self, rows: int) -> Record:
        return [list(entry) for entry in super()._record(rows)]  # the stream notes steps in it: it is nobody else's

    def _widths_of(self, longest: NDArray[np.int64]) -> NDArray[np.int64]:
        widths = super()._widths_of(longest)
        return np.where(widths < _WIDEST, widths, longest)  # a row over the largest of the widths that were given

    @property
    def batch_tokens(self) -> int | None:
        return None if self._budget_of_log is None else self._budget_of_log.batch_tokens

    @property
    def row_multiple(self) -> int | None:
        return None if self._budget_of_log is None else self._budget_of_log.row_multiple

    def get_num_batches(self) -> int:
        """A log has no such number."""
        raise SpecError(
            "a log that grows has no number of batches",
            parameter="rollout_data",
            remedy="iterate until it ends, or read rollouts that are there whole",
        )

    def seek(self, *, step: int | None = None, position: int | None = None) -> None:
        """Go anywhere, at once. By tokens, only to positions."""
        if self._budget_of_log is not None and step is not None:
            raise SpecError(
                "batches of a log by tokens have no place that follows from their number",
                parameter="step",
                remedy="load_state_dict(state) of that step, or seek(position=...)",
            )
        super().seek(step=step, position=position)

    def reset(self) -> None:
        """Back to position 0. The trainer's version is asked anew."""
        super().reset()
        self._policy.version = None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where a loader of the same log was; the trainer's version is asked anew.

        Another batch size, other ranks or another number of generators are fine.
        """
        position = state.get("position") if isinstance(state, Mapping) else None
        if isinstance(position, int) and state.get("plan") == self._plan.fingerprint:
            num_rows = self._log.num_uses * self._log.group_size
            if position > num_rows:  # other rows would come to stand there, and never be used
                raise PlanError(
                    f"this state has used {position:,} rows, and the log gave out {num_rows:,}: it is an older copy",
                    folder=self._log.path,
                    remedy="the folder as it was when the state was made, or a state from before the copy",
                )
        super().load_state_dict(state)
        self._policy.version = None

    def _settings(self) -> dict[str, Any]:
        return {"log": self._plan.sources[0].fingerprint}

    def _refuse(self, theirs: Mapping[str, Any]) -> PlanError | None:
        mine = self._settings()["log"]
        if "log" not in theirs:
            return PlanError(
                "this state belongs to a set of rollouts, and this loader reads a log",
                folder=self._log.path,
                remedy="open the loader with the data of that run",
            )
        return PlanError(
            "this state belongs to another log" if theirs["log"] != mine else "this state has another epoch_end",
            folder=self._log.path,
            differs=f"{mine[:7]} here, {str(theirs['log'])[:7]} there",
            remedy="open the loader with the log and the settings of that run, or start anew, without the state",
        )

    def _end_of_run(self) -> EndOfRun:
        return EndOfRun(
            f"the log is over: all its prompts are answered and used, {self._position:,} rows",
            remedy="RolloutLog(..., epochs=2) for another pass over the prompts, in a new folder",
        )

    def _in_words(self) -> list[str]:
        how = self._estimator.in_words(self._rows.method)
        if self._rows.method is None and self._estimator.asked:
            how = "advantages by what the first group has"
        return ["", how, repr(self._log)]


def _refuse_whole(asked: Asked) -> None:
    """Refuse what only rollouts that are there whole can have."""
    of_the_log = {"seed": 0, "shuffle": None, "epochs": 1, "group_size": None}
    for name, plain in (*of_the_log.items(), ("plan", None), ("columns", None)):
        value = getattr(asked, name)
        if value in (plain, None) or (name == "shuffle" and value in (False, "none")):
            continue
        to_the_log = f", or say it to the log: RolloutLog({name}=...)" if name in of_the_log else ""
        raise SpecError(
            f"{name}={value!r} is not for a log: its rows, and their order, are in its journal",
            parameter=name,
            remedy=f"leave out {name}={to_the_log}",
        )
    if asked.pad_to == "max_length":
        raise SpecError(
            "nobody knows the longest row of a log that grows",
            parameter="pad_to",
            remedy="pad_to='longest', a number that widths are multiples of, or a list of widths",
        )


@dataclass(slots=True)
class Policy:
    """The trainer's weights, as far as data is concerned."""

    version: int | None = None
    max_staleness: int | None = None


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
    """Reads rows of a log by position, and takes them for the trainer where nobody has yet."""

    log: RolloutLog
    read: Callable[[list[dict[str, Any]]], Rollouts]
    estimator: Estimator
    policy: Policy
    timeout: float = 0.0
    by_count: bool = True
    """Whether batches have so many rows, not so many tokens."""
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
        self.method = self.estimator.method(rollouts)
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
class LogStream:
    """One rank's batches of a log, by count or by token budget."""

    source: LogRows
    maker: Maker
    steps: Steps
    """Who shares a batch, and how."""
    state: Callable[[int, Record], State]
    """(position after a batch, how batches were cut) -> the loader's state there."""
    budget: Budget | None
    epoch_end: str
    _guess: int = field(init=False)
    """Rows to look at for the next batch of a budget."""

    def __post_init__(self) -> None:
        self._guess = self.source.log.group_size + (self.budget.row_multiple if self.budget else 0)

    @property
    def cut(self) -> AnyCut:
        return self.steps.cut

    def is_over(self, position: int) -> bool:
        return False  # found out when rows are asked for

    def batches(self, position: int, record: Record) -> Generator[tuple[TrainingBatch, int], None, None]:
        while True:
            fetched = self._fetch(position)
            if fetched is None:
                return
            after = position + fetched.count
            steps = self._counted_on(record, position, after)
            batch = self._batch(fetched, position, self.state(after, steps))
            record[:] = steps
            yield batch, after
            position = after

    def _counted_on(self, record: Record, position: int, after: int) -> Record:
        """How batches were cut, where one more has these rows: as many as the record says, or noted in it."""
        from_step, from_position, rows = record[-1]
        if after - position == rows and self.budget is None:
            return record
        step = from_step + (position - from_position) // rows
        kept = record if self.budget is None else record[:1]  # of a budget every step is noted: the last one will do
        return [*kept, [step + 1, after, rows]]

    def turns(self, position: int, stop: int | None, every: int, record: Record) -> Iterator[TrainingBatch]:
        raise SpecError(
            "worker processes cannot read a rollout log: what they would read ahead is decided when it is needed",
            parameter="num_workers",
            remedy="num_workers=0",
        )

    def _fetch(self, position: int) -> Fetched | None:
        if self.budget is not None:
            return self._fetch_budget(position, self.budget)
        assert isinstance(self.cut, Cut)
        fetched = self.source.fetch(position, self.cut.rows_per_step)
        rows = self.cut.rows_per_step
        if fetched is None or fetched.count == rows or self.epoch_end != "drop":
            return fetched
        if not self.steps.rank:
            log.warning(
                "batch_size=%d drops the last %d rows of the log; epoch_end='short' keeps them", rows, fetched.count
            )
        return None

    def _fetch_budget(self, position: int, budget: Budget) -> Fetched | None:
        """As many of the next rows as fit: it is known that the next one does not, or that there is none."""
        most, decides = self._guess, False
        while True:
            fetched = self.source.fetch(position, most, needed=False, decides=decides)
            count, fits = (0, 0) if fetched is None else (fetched.count, self._rows_that_fit(fetched, position, budget))
            if fetched is not None and (fits < count or fetched.is_last):
                self._guess = fits + self.source.log.group_size
                if self.source.method == "reinforce":  # a mean over these rows, and no others
                    return self.source.fetch(position, fits)
                return replace(fetched, count=fits)
            if count == most:
                most *= 2
            elif not decides:  # what is on record does not say it
                decides = True
            elif self.source.fetch(position, count + 1) is None:  # waits for what may still fit
                return None

    def _rows_that_fit(self, fetched: Fetched, position: int, budget: Budget) -> int:
        """How many of the rows are a batch, from the first on: a multiple of row_multiple, if so many are there."""
        rows = slice(fetched.first, fetched.first + fetched.count)
        widths = self.steps.widths_of(np.maximum.accumulate(fetched.rows.lengths[rows]))
        try:
            # Only where no batch can be made without such a row: what comes before it is a batch first.
            refuse_wide_rows(widths[: budget.row_multiple], budget.batch_tokens, budget.row_multiple)
        except SpecError as error:
            place, size = int(str(error.where["row"])), self.source.log.group_size
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
        if self.budget is None:
            assert isinstance(self.cut, Cut)
            num_rows = fetched.count if self.epoch_end == "short" else self.cut.rows_per_step
        else:
            num_rows = -(-fetched.count // self.budget.row_multiple) * self.budget.row_multiple
        row = np.arange(fetched.count)
        lengths = fetched.rows.lengths[fetched.first + row]
        step = self.steps.of(position + row, lengths, num_rows, position + fetched.count)
        return self.maker.make(fetched.rows, step.positions - position + fetched.first, step, fetched.facts, state)


def plan_of_log(log: RolloutLog, epoch_end: str | None) -> Plan:
    """A stream without epochs, of which nobody knows the end. Its rows are fixed by the journal of this one log."""
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
