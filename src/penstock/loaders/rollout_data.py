"""Rollouts that are there whole, as a stream: rows in an order that (rows, seed, epoch) fix."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PlanError
from penstock.loaders.planning import refuse_other_settings
from penstock.loaders.rollout_batches import GlobalBatch, Maker, told_of
from penstock.loaders.steps import AnyCut, Step, Steps
from penstock.order.schedule import ORDER_VERSION
from penstock.plan import Plan, PlanSource
from penstock.plans import find_plan
from penstock.rl.columns import Rollouts
from penstock.rl.rows import RolloutRows
from penstock.spec import one_of, whole_number
from penstock.types import TrainingBatch

__all__ = ["DataStream", "plan_of_data"]

Record = list[list[int]]


def plan_of_data(
    rollouts: Rollouts, *, seed: int, shuffle: bool | str | None, epoch_end: str | None, plan: Any = None
) -> Plan:
    """What fixes row p of a stream of rollouts: as asked for, or as a plan says that was made of the same rollouts."""
    if isinstance(shuffle, bool):
        shuffle = "global" if shuffle else "none"
    if plan is not None:
        made = find_plan((), plan)
        if made.sources[0].fingerprint != rollouts.fingerprint():
            raise PlanError(
                f"plan {made.fingerprint} is of other rollouts",
                parameter="plan",
                differs=f"{rollouts.fingerprint()[:7]} here, {made.sources[0].fingerprint[:7]} there",
                remedy="the rollouts that it was made with, or no plan=",
            )
        refuse_other_settings(
            made,
            seed=(seed, 0, made.seed),
            shuffle=(shuffle, None, made.shuffle),
            epoch_end=(epoch_end, None, made.epoch_end),
        )
        return made
    source = PlanSource(
        name="rollouts",
        split="train",
        fingerprint=rollouts.fingerprint(),
        num_rows=len(rollouts),
        num_tokens=len(rollouts.tokens),
        rows=(("rollouts", True),),
    )
    return Plan(
        row_tokens=int(rollouts.lengths().max()),
        seed=whole_number(seed=seed),
        shuffle=one_of(("global", "none"), shuffle=shuffle or "global"),
        epoch_end=one_of(("drop", "pad", "wrap"), epoch_end=epoch_end or "pad"),
        sources=(source,),
        order_version=ORDER_VERSION,
    )


@dataclass(slots=True)
class DataStream:
    """One rank's batches of a run that is cut one way."""

    rows: RolloutRows
    rows_at: Callable[[NDArray[np.int64]], NDArray[np.int64]]
    """Which rows lie at some positions."""
    plan: str
    """Fingerprint, for the states in batches' metadata."""
    steps: Steps
    maker: Maker
    settings: dict[str, Any]
    """What a state says of what it belongs to."""

    @property
    def cut(self) -> AnyCut:
        return self.steps.cut

    def is_over(self, position: int) -> bool:
        return self.steps.is_over(position)

    def batches(self, position: int, record: Record) -> Generator[tuple[TrainingBatch, int], None, None]:
        """(batch, position after it) from a position to the end of the run."""
        for step in self.steps.planned(position):
            yield self._batch(step, record), step.after

    def turns(self, position: int, stop: int | None, every: int, record: Record) -> Iterator[TrainingBatch]:
        """Each `every`-th batch from a position up to `stop`: for processes that take turns."""
        for step in self.steps.planned(position, every=every, stop=stop):
            yield self._batch(step, record)

    def _batch(self, step: Step, record: Record) -> TrainingBatch:
        rows = self.rows_at(step.positions)
        batch = GlobalBatch(rows, step.weight, step.mine, step.width)
        return self.maker.make(self.rows, batch, partial(self._facts, step, rows[step.mine], record))

    def _facts(self, step: Step, rows: NDArray[np.int64], record: Record) -> dict[str, Any]:
        return {
            "row": rows,
            "position": step.positions[step.mine],
            **told_of(step.imbalance),
            "state": {**self.steps.state(step, self.plan, record), "rollouts": dict(self.settings)},
        }
