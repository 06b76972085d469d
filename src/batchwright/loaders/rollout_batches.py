"""The batch of one rank from rows of rollouts, with the sums over the global batch that a loss divides by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.base.memory import BlockPool
from batchwright.batches.batch import Padding
from batchwright.batches.frameworks import adapter
from batchwright.batches.settings import Asked
from batchwright.batches.types import TrainingBatch
from batchwright.loaders.interface import UnkeptStream
from batchwright.loaders.steps import Step
from batchwright.loaders.stored import padding_of
from batchwright.order.plan import Plan, State
from batchwright.rl.estimate import Advantages
from batchwright.rollouts.aligned import IGNORED, PaddedRollouts, RolloutRows

__all__ = ["BatchMaker", "RolloutStream"]

_MAX_ARRAYS = 12
"""Arrays of a batch, at most."""
_FIELDS = ("input_ids", "targets", "loss_mask", "attention_mask")


@dataclass(slots=True)
class BatchMaker:
    """The common part of all batches of a loader, and the memory for making them.

    Positions in metadata stay NumPy arrays, because they are for the loader, not for the model.
    """

    padding: Padding
    pad: int
    framework: str
    tokenizer: str | None = None
    pool: BlockPool = field(default_factory=lambda: BlockPool(_MAX_ARRAYS))

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
        padded = rows.padded(mine, step.width, pad=self.pad, left=self.padding.left, allocate=self._allocate)
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
        if self.tokenizer:
            metadata["tokenizer"] = self.tokenizer
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

    def __reduce__(self) -> tuple[Any, ...]:
        return BatchMaker, (self.padding, self.pad, self.framework, self.tokenizer)


class RolloutStream(UnkeptStream[TrainingBatch]):
    """The common part of a set of rollouts and a log: the widths of batches."""

    mark = "rollouts"
    has_lengths = True

    def __init__(
        self,
        plan: Plan,
        asked: Asked,
        longest: int,
        *,
        estimator: Advantages,
        pad: int,
        tokenizer: str | None,
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

    def maker(self, framework: str) -> BatchMaker:
        return BatchMaker(self.padding, self.pad, framework, self.tokenizer)

    def widths_of(self, longest: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.maximum(self.padding.widths(longest, self.widest), longest)

    def settings_to_compare(self) -> dict[str, Any]:
        return {"advantages": str(self.estimator), "pad_to": self.pad_to}


def _widest(pad_to: Any, longest: int) -> int:
    """Tokens of the widest batch. Rollouts have no maximal length, so `pad_to` holds even if all are shorter."""
    if isinstance(pad_to, int) and pad_to > 0:
        return -(-longest // pad_to) * pad_to
    if isinstance(pad_to, list | tuple):
        return max([longest, *(width for width in pad_to if isinstance(width, int))])
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
