"""The rollout streams: the batch of one rank, and a finished set, whose order (rows, seed, epoch) fix.

A batch has the sums over the global batch that a loss divides by. The stream of a log is in rollout_logged.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.base.checks import one_of, whole_number
from batchwright.base.errors import PlanError, SpecError
from batchwright.base.memory import BlockPool
from batchwright.base.words import counted
from batchwright.batches.batch import Padding
from batchwright.batches.frameworks import adapter
from batchwright.batches.settings import Asked
from batchwright.batches.types import TrainingBatch
from batchwright.loaders.interface import Made, Making, Record, UnkeptStream
from batchwright.loaders.planning import refuse_other_settings, shuffle_of
from batchwright.loaders.run import Run
from batchwright.loaders.steps import Step, Steps, end_without_meaning
from batchwright.loaders.stored import padding_of
from batchwright.order.plan import Plan, PlanSource, State
from batchwright.order.split import EPOCH_ENDS
from batchwright.rl.columns import Rollouts
from batchwright.rl.estimate import Advantages
from batchwright.rollouts.aligned import IGNORED, PaddedRollouts, RolloutRows
from batchwright.rollouts.log.folder import LEDGER_NAME
from batchwright.store.plans import find_plan, with_state_read
from batchwright.typing import PlanLike

_MAX_ARRAYS = 12
"""Arrays of a batch, at most."""
_LOOKED_UP_ROWS = 4096
"""Rows that are looked up in the order at once: the order then costs a batch next to nothing."""
_FIELDS = ("input_ids", "targets", "loss_mask", "attention_mask")


class RolloutBatches:
    """One rank's batches of rollouts, and the memory for making them.

    Positions in metadata stay NumPy arrays, because they are for the loader, not for the model.
    """

    def __init__(self, stream: RolloutStream, run: Run, rows: int, record: Record, making: Making) -> None:
        self.stream: RolloutStream = stream
        self.steps: Steps = run.steps(rows, record)
        self.record: Record = record
        self.framework: str = making.framework
        self.pool: BlockPool = BlockPool(_MAX_ARRAYS)

    def make(
        self,
        rows: RolloutRows,
        index: NDArray[np.int64],
        step: Step,
        facts: Mapping[str, NDArray[np.int64]],
        state: State,
    ) -> TrainingBatch:
        """This rank's part of a step.

        `index` has the row of each position of the step, on all ranks; `facts` are further columns, one number per row.
        """
        mine, real = index[step.mine], index
        pad, left = self.stream.pad, self.stream.padding.left
        padded = rows.padded(mine, step.width, pad=pad, left=left, allocate=self._allocate)
        weight = np.ones(len(mine), np.float32)
        if step.weight is not None:
            real, weight = index[step.weight > 0], step.weight[step.mine]
        if rows.whitening is not None:
            _whiten(rows, real, padded)
        _mask_rows(padded, weight == 0)
        fields = {name: getattr(padded, name) for name in _FIELDS}
        columns = {**padded.columns, "weight": weight, **rows.row_columns(mine)}
        columns |= {name: values[mine] for name, values in facts.items()}
        made = self._converted(fields | columns)
        fields, columns = ({name: made[name] for name in names} for names in (fields, columns))
        return TrainingBatch(**fields, metadata=(self._metadata, columns, rows, real, step, state))

    def _metadata(
        self, columns: dict[str, Any], rows: RolloutRows, real: NDArray[np.int64], step: Step, state: State
    ) -> dict[str, Any]:
        metadata = {
            **columns,
            "position": step.positions[step.mine],
            "global_rows": len(real),
            "global_sequences": len(real),
            "global_tokens": int(rows.trained_tokens[real].sum()),
        }
        if rows.rollouts.group is not None:
            metadata["global_groups"] = len(np.unique(rows.rollouts.group[real]))
        metadata |= step.told()
        if self.stream.tokenizer:
            metadata["tokenizer"] = self.stream.tokenizer
        return {**metadata, "state": state}

    def _converted(self, arrays: dict[str, NDArray[Any]]) -> dict[str, Any]:
        """Arrays of the loader's framework."""
        if self.framework == "numpy":
            return arrays
        made: dict[str, Any] = adapter(self.framework).numbers(arrays)
        return made

    def _allocate(self, shape: tuple[int, int], dtype: Any) -> NDArray[Any]:
        """Allocate memory from the pool. Reused memory already has its pages."""
        rows, width = shape
        if dtype == np.int64:
            return self.pool.take(rows, width)
        floats = self.pool.take(1, (rows * width + 1) // 2).view(np.float32)
        return floats[0, : rows * width].reshape(shape)


class RolloutStream(UnkeptStream[TrainingBatch]):
    """The common part of a set of rollouts and a log: the widths of batches."""

    mark = "rollouts"
    has_lengths = True

    def __init__(
        self, plan: Plan, asked: Asked, longest: int, *, estimator: Advantages, pad: int, tokenizer: str | None
    ) -> None:
        """`longest`: tokens of the longest row."""
        self.plan: Plan = plan
        self.estimator: Advantages = estimator
        self.pad: int = pad
        self.tokenizer: str | None = tokenizer
        pad_to = asked.get("pad_to", "longest")
        self.widest: int = _widest(pad_to, longest)
        self.padding: Padding = padding_of(pad_to, asked.get("padding_side", "right"), self.widest)
        self.pad_to: Any = self.padding.as_json

    def widths_of(self, longest: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.maximum(self.padding.widths(longest, self.widest), longest)

    def of_other_content(self, theirs: Mapping[str, Any]) -> PlanError:
        return PlanError(
            "this state belongs to other rollouts, or to another log",
            differs=f"{_content(self.settings())} here, {_content(theirs)} there",
            remedy="open the loader with the rollouts or the log of that run, or start anew, without the state",
        )

    def settings_to_compare(self) -> dict[str, Any]:
        return {"advantages": str(self.estimator), "pad_to": self.pad_to}


def _content(settings: Mapping[str, Any]) -> str:
    if "log" in settings:
        return f"the log {str(settings['log'])[:7]}"
    return f"the rollouts {str(settings.get('content'))[:7]}"


def _widest(pad_to: str | int | list[int], longest: int) -> int:
    """Tokens of the widest batch. Rollouts have no maximal length, so `pad_to` holds even if all are shorter."""
    if isinstance(pad_to, int):
        return -(-longest // pad_to) * pad_to
    if isinstance(pad_to, list):
        return max([longest, *pad_to])
    return longest


def _whiten(rows: RolloutRows, real: NDArray[np.int64], padded: PaddedRollouts) -> None:
    """Whiten advantages over the learned tokens of the global batch, whose `real` rows these are."""
    assert rows.whitening is not None
    moments, advantages = rows.moments(real), padded.columns["advantages"]
    advantages -= np.float32(moments.mean)
    advantages *= np.float32(1 / rows.whitening.whitening_divisor(moments.count, moments.squares))
    np.copyto(advantages, 0, where=padded.loss_mask == 0)


def _mask_rows(padded: PaddedRollouts, filled: NDArray[np.bool_]) -> None:
    """Learn nothing from rows that only fill the batch up."""
    if not filled.any():
        return
    padded.targets[filled] = IGNORED
    padded.loss_mask[filled] = 0
    for column in padded.columns.values():
        column[filled] = 0


# A finished set


def open_rollouts(
    rollout_data: Any,
    read: Callable[[Any], Rollouts],
    plan: PlanLike | None,
    asked: Asked,
    of_a_log: Mapping[str, Any],
    how: dict[str, Any],
) -> RolloutSetStream:
    """The stream over a finished set of rollouts. Settings in `of_a_log` are refused."""
    _refuse_log(rollout_data, of_a_log)
    if asked["batch_tokens"] is not None and asked["epoch_end"] == "drop":
        raise end_without_meaning("drop")
    rollouts = read(rollout_data)
    return RolloutSetStream(_plan_of(rollouts, asked, plan), asked, RolloutRows(rollouts, how["estimator"]), how)


class RolloutSetStream(RolloutStream):
    """A finished set of rollouts, shuffled in epochs."""

    def __init__(self, plan: Plan, asked: Asked, rows: RolloutRows, how: dict[str, Any]) -> None:
        super().__init__(plan, asked, int(rows.lengths.max()), **how)
        self.rows: RolloutRows = rows
        self.facts: dict[str, NDArray[np.int64]] = {"row": np.arange(len(rows))}
        self._looked_up: tuple[int, NDArray[np.int64]] | None = None

    def open(self, run: Run, rows: int, record: Record, making: Making) -> RolloutSetBatches:
        return RolloutSetBatches(self, run, rows, record, making)

    def rows_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows at some positions. Thousands are looked up together, which mostly covers a whole step."""
        first = int(positions.min()) // _LOOKED_UP_ROWS * _LOOKED_UP_ROWS
        last = first + 2 * _LOOKED_UP_ROWS
        if int(positions.max()) >= last:
            return self.plan.order.at(positions).index
        if self._looked_up is None or self._looked_up[0] != first:
            self._looked_up = first, self.plan.order.at(np.arange(first, last)).index
        rows: NDArray[np.int64] = self._looked_up[1][positions - first]
        return rows

    def lengths_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        lengths: NDArray[np.int64] = self.rows.lengths[self.rows_at(positions)]
        return lengths

    def longest_row(self) -> tuple[int, dict[str, Any]]:
        row = int(self.rows.lengths.argmax())
        return int(self.rows.lengths[row]), {"row": row}

    def in_words(self, plan: Plan) -> str:
        rollouts = self.rows.rollouts
        groups = "no groups" if rollouts.group is None else counted(len(rollouts.group_names), "group")
        return (
            f"├─ {self.estimator.in_words(self.rows.method)}\n"
            f"└─ {counted(len(rollouts), 'rollout')} of {int(self.rows.lengths.max()):,} tokens at most, {groups}, "
            f"{self.order_in_words}, content {plan.sources[0].fingerprint[:7]}"
        )


class RolloutSetBatches(RolloutBatches):
    """One rank's batches of a finished set."""

    stream: RolloutSetStream

    def batches(self, position: int, skipped: int = 0, every: int = 1, stop: int | None = None) -> Made[TrainingBatch]:
        for step in self.steps.planned(self.steps.cut.after(position, skipped), every=every, stop=stop):
            yield self._batch(step), step.after

    def _batch(self, step: Step) -> TrainingBatch:
        stream = self.stream
        state = self.steps.state(step) | stream.extra_state(step.after)
        return self.make(stream.rows, stream.rows_at(step.positions), step, stream.facts, state)


def _refuse_log(rollout_data: Any, of_a_log: Mapping[str, Any]) -> None:
    """Refuse settings that only a log has, and the folder of a log, which must be opened."""
    if isinstance(rollout_data, str | os.PathLike) and os.path.isfile(os.path.join(rollout_data, LEDGER_NAME)):
        what = f"{os.fspath(rollout_data)!r} is the folder of a rollout log, which must be opened"
        remedy = f"RolloutDataLoader(RolloutLog({os.fspath(rollout_data)!r}), ...)"
        raise SpecError(what, parameter="rollout_data", remedy=remedy)
    for name, value in of_a_log.items():
        if value:
            what = f"{name}={value!r} is for a RolloutLog, and these rollouts are a finished set"
            raise SpecError(what, parameter=name, remedy=f"leave out {name}=, or RolloutDataLoader(log, ...)")


# The plan


def _plan_of(rollouts: Rollouts, asked: Asked, plan: Any = None) -> Plan:
    """The plan of a stream of rollouts: from the settings, or from a plan for the same rollouts."""
    if plan is None:
        scope = shuffle_of(asked["shuffle"], "train")
        return _plan(rollouts, asked.get("seed", 0), scope, asked.get("epoch_end", "short"))
    plan = with_state_read(plan)
    if isinstance(plan, Mapping):
        made = _plan_of_state(rollouts, plan)
    else:
        made = find_plan((), plan)
    mine, theirs = rollouts.fingerprint(), made.sources[0].fingerprint
    if mine != theirs:
        what = f"plan {made.fingerprint} is of other rollouts"
        remedy = "the rollouts that it was made with, or no plan="
        raise PlanError(what, parameter="plan", differs=f"{mine[:7]} here, {theirs[:7]} there", remedy=remedy)
    refuse_other_settings(made, asked, ["rollouts"])
    return made


def _plan(rollouts: Rollouts, seed: int, shuffle: str, epoch_end: str) -> Plan:
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
        shuffle=one_of(("global", "none"), shuffle=shuffle),
        epoch_end=one_of(EPOCH_ENDS, epoch_end=epoch_end),
        sources=(source,),
    )


def _plan_of_state(rollouts: Rollouts, state: Mapping[str, Any]) -> Plan:
    """The plan of a run, from the settings in its state. Plans of rollouts are not stored."""
    try:
        settings = dict(state["rollouts"])
        content = str(settings.pop("content"))
        made = _plan(rollouts, **settings)
    except (KeyError, TypeError, ValueError):
        raise PlanError(
            "this is not a state of rollouts", parameter="plan", remedy="what state_dict() of such a loader returned"
        ) from None
    return replace(made, sources=(replace(made.sources[0], fingerprint=content),))
