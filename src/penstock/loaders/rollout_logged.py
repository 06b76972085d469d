"""The rows of a rollout log as a stream: in the order in which the journal says that they are used.

Which groups those are is decided when they are first asked for, and journaled before anybody gets them. So a position
gives the same rows for ever: on every rank, and again after a restart.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import NotReadyError, SampleError, SpecError
from penstock.loaders.budget import Budget
from penstock.loaders.rollout_batches import GlobalBatch, Maker, told_of
from penstock.loaders.steps import AnyCut, Steps
from penstock.order.budget import refuse_wide_rows
from penstock.order.schedule import ORDER_VERSION
from penstock.order.split import Cut
from penstock.plan import Plan, PlanSource
from penstock.rl.columns import Rollouts
from penstock.rl.estimate import Estimator
from penstock.rl.groups import Group
from penstock.rl.rows import RolloutRows
from penstock.rollout_log import RolloutLog
from penstock.spec import one_of
from penstock.types import TrainingBatch

__all__ = ["LogRows", "LogStream", "Policy", "plan_of_log"]

Record = list[list[int]]


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
    alignment: str
    policy: Policy
    timeout: float = 0.0
    method: str | None = None
    """How advantages are computed: known when the first rows are."""

    def fetch(self, position: int, num_rows: int, *, needed: bool = True) -> Fetched | None:
        """So many rows from a position on; fewer where the log is over, and None where it has no more.

        What is not there yet is waited for, and then a NotReadyError; without `needed`, there are only fewer.
        """
        size = self.log.group_size
        first_use, last_use = position // size, -(-(position + num_rows) // size)
        try:
            have = self.log.take_uses(
                last_use,
                policy_version=self.policy.version,
                max_staleness=self.policy.max_staleness,
                timeout=self.timeout if needed else 0.0,
            )
        except SpecError:  # this trainer may not decide: what is on record may be enough for it
            if needed:
                raise
            have = self.log.num_uses
        is_over = have < last_use and self.log.is_over
        if is_over:
            have = self.log.num_uses  # another rank may have taken the last ones meanwhile
        if have < last_use and needed and not is_over:
            raise NotReadyError(
                f"{max(have * size - position, 0):,} of {num_rows:,} rows are there: generators have not added the "
                "others yet",
                folder=self.log.path,
                waited=f"{self.timeout:g} seconds",
                remedy="add more groups to the log, or let the loader wait: RolloutDataLoader(..., timeout=600); "
                "generators with ahead= must be allowed as many groups as a batch has",
            )
        count = min(have * size - position, num_rows)
        if count <= 0:
            return None
        uses = np.arange(first_use, min(last_use, have))
        groups = self.log.groups_at(uses)
        rows = [row for use, group in zip(uses.tolist(), groups, strict=True) for row in group.rows(use)]
        rollouts = self._read(rows, groups, first_use)
        facts = {
            "ordinal": np.repeat([group.ordinal for group in groups], size),
            "attempt": np.repeat([group.attempt for group in groups], size),
            "row": np.repeat([group.row for group in groups], size),
            "answer": np.tile(np.arange(size), len(groups)),
        }
        first = position - first_use * size
        is_last = is_over and position + count == have * size  # others may have taken more than was asked for here
        self.method = self.estimator.method(rollouts)
        if self.method == "reinforce":  # the mean is that of the global batch
            chosen = np.arange(first, first + count)
            rollouts, first = rollouts.take(chosen), 0
            facts = {name: values[chosen] for name, values in facts.items()}
        return Fetched(RolloutRows(rollouts, self.estimator, alignment=self.alignment), first, count, is_last, facts)

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
    state: Callable[[int, Record], dict[str, Any]]
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
        is_short = fetched is not None and fetched.count < self.cut.rows_per_step
        return None if is_short and self.epoch_end == "drop" else fetched

    def _fetch_budget(self, position: int, budget: Budget) -> Fetched | None:
        """As many of the next rows as fit: it is known that the next one does not, or that there is none."""
        most = self._guess
        while True:
            fetched = self.source.fetch(position, most, needed=False)
            count, fits = (0, 0) if fetched is None else (fetched.count, self._rows_that_fit(fetched, position, budget))
            if fetched is not None and (fits < count or fetched.is_last):
                self._guess = fits + self.source.log.group_size
                if self.source.method == "reinforce":  # a mean over these rows, and no others
                    return self.source.fetch(position, fits)
                return replace(fetched, count=fits)
            if count == most:
                most *= 2
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

    def _batch(self, fetched: Fetched, position: int, state: dict[str, Any]) -> TrainingBatch:
        if self.budget is None:
            assert isinstance(self.cut, Cut)
            num_rows = self.cut.rows_per_step
        else:
            num_rows = -(-fetched.count // self.budget.row_multiple) * self.budget.row_multiple
        place = np.arange(num_rows)
        weight = (place < fetched.count).astype(np.float32) if num_rows > fetched.count else None
        row = np.minimum(place, fetched.count - 1)  # what fills up repeats the last one
        lengths = fetched.rows.lengths[fetched.first + row]
        order, borders, imbalance = self.steps.shared(lengths, weight)
        mine = np.arange(borders[self.steps.rank], borders[self.steps.rank + 1])
        batch = GlobalBatch(
            fetched.first + row[order],
            None if weight is None else weight[order],
            mine,
            int(self.steps.widths_of(lengths.max(keepdims=True))[0]),
        )
        positions = position + row[order][mine]
        return self.maker.make(fetched.rows, batch, partial(_facts, fetched, batch, positions, imbalance, state))


def _facts(
    fetched: Fetched,
    batch: GlobalBatch,
    positions: NDArray[np.int64],
    imbalance: tuple[float, float] | None,
    state: dict[str, Any],
) -> dict[str, Any]:
    mine = batch.rows[batch.mine]
    of_rows = {name: values[mine] for name, values in fetched.facts.items()}
    return {"position": positions, **of_rows, **told_of(imbalance), "state": state}


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
        epoch_end=one_of(("pad", "drop"), epoch_end=epoch_end or "pad"),
        sources=(source,),
        segments=((0, (("rollouts", 1.0),)),),
        order_version=ORDER_VERSION,
    )
