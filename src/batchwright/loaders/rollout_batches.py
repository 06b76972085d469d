"""From rows of rollouts to the batch of one rank, with everything that a loss needs to know of the global batch."""

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
from batchwright.rollouts.aligned import Laid, RolloutRows

__all__ = ["Maker", "RolloutStream"]

_ARRAYS = 12
"""Of a batch, at most."""


@dataclass(slots=True)
class Maker:
    """What is the same for all batches of a loader, and the memory that they are made in.

    Of metadata only positions stay NumPy's: they are the loader's, not the model's.
    """

    padding: Padding
    pad: int
    framework: str
    tokenizer: str | None = None
    pool: BlockPool = field(default_factory=lambda: BlockPool(_ARRAYS))

    def make(
        self,
        rows: RolloutRows,
        index: NDArray[np.int64],
        step: Step,
        facts: Mapping[str, NDArray[np.int64]],
        state: State,
    ) -> TrainingBatch:
        """This rank's part of a step. `index` has the row of each of its positions, on all ranks; `facts` are arrays
        with what else is known of each of `rows`."""
        mine = index[step.mine]
        laid = rows.lay(mine, step.width, pad=self.pad, left=self.padding.left, allocate=self._allocate)
        real = index if step.weight is None else index[step.weight > 0]
        if rows.whitening is not None:
            _whiten(rows, real, laid)
        weight = None if step.weight is None else step.weight[step.mine]
        if weight is not None and not weight.all():
            filled = weight == 0
            laid.targets[filled] = -100
            laid.loss_mask[filled] = 0
            for column in laid.columns.values():
                column[filled] = 0
        fields: dict[str, Any] = {
            "input_ids": laid.input_ids,
            "targets": laid.targets,
            "loss_mask": laid.loss_mask,
            "attention_mask": laid.attention_mask,
        }
        columns: dict[str, Any] = {**laid.columns, **_of_rows(rows, mine, weight)}
        columns |= {name: values[mine] for name, values in facts.items()}
        made = self._converted(fields | columns)
        fields, columns = ({name: made[name] for name in names} for names in (fields, columns))
        return TrainingBatch(**fields, metadata=(self._metadata, columns, rows, real, step, state))

    def _metadata(
        self, columns: dict[str, Any], rows: RolloutRows, real: NDArray[np.int64], step: Step, state: State
    ) -> dict[str, Any]:
        groups = rows.num_groups(real)
        return {
            **columns,
            "position": step.positions[step.mine],
            "global_rows": len(real),
            "global_sequences": len(real),
            "global_tokens": int(rows.trained_tokens[real].sum()),
            **({} if groups is None else {"global_groups": groups}),
            **step.told(),
            **({"tokenizer": self.tokenizer} if self.tokenizer else {}),
            "state": state,
        }

    def _converted(self, arrays: dict[str, NDArray[Any]]) -> dict[str, Any]:
        """Arrays of the loader's framework."""
        if self.framework == "numpy":
            return arrays
        made: dict[str, Any] = adapter(self.framework).numbers(arrays)
        return made

    def _allocate(self, shape: tuple[int, int], dtype: Any) -> NDArray[Any]:
        """Memory that was used before and is free again, in which pages need not be made anew."""
        rows, width = shape
        if dtype == np.int64:
            return self.pool.take(rows, width)
        floats = self.pool.take(1, (rows * width + 1) // 2).view(np.float32)
        return floats[0, : rows * width].reshape(shape)

    def __reduce__(self) -> tuple[Any, ...]:
        return Maker, (self.padding, self.pad, self.framework, self.tokenizer)


class RolloutStream(UnkeptStream[TrainingBatch]):
    """The part that a set of rollouts and a log share: how wide batches are."""

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

    def maker(self, framework: str) -> Maker:
        return Maker(self.padding, self.pad, framework, self.tokenizer)

    def widths_of(self, longest: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.maximum(self.padding.widths(longest, self.widest), longest)

    def settings_to_compare(self) -> dict[str, Any]:
        return {"advantages": str(self.estimator), "pad_to": self.pad_to}


def _widest(pad_to: Any, longest: int) -> int:
    """Tokens of the widest batch. No length was set for rollouts: `pad_to` is kept, however short they are."""
    if isinstance(pad_to, int) and pad_to > 0:
        return -(-longest // pad_to) * pad_to
    if isinstance(pad_to, list | tuple):
        return max([longest, *(width for width in pad_to if isinstance(width, int))])
    return longest


def _whiten(rows: RolloutRows, real: NDArray[np.int64], laid: Laid) -> None:
    """Over the learned tokens of the global batch, whose `real` rows are these: only moments of them are needed."""
    assert rows.whitening is not None
    moments, advantages = rows.moments(real), laid.columns["advantages"]
    advantages -= np.float32(moments.mean)
    advantages *= np.float32(1 / rows.whitening.whitening_divisor(moments.count, moments.squares))
    np.copyto(advantages, 0, where=laid.loss_mask == 0)


def _of_rows(rows: RolloutRows, mine: NDArray[np.int64], weight: NDArray[np.float32] | None) -> dict[str, Any]:
    rollouts = rows.rollouts
    found: dict[str, Any] = {"weight": np.ones(len(mine), np.float32) if weight is None else weight.copy()}
    if rollouts.reward is not None:
        found["reward"] = rollouts.reward[mine].astype(np.float32)
    if rollouts.group is not None:
        found["group"] = rollouts.group[mine]
    if rollouts.policy_version is not None:
        found["policy_version"] = rollouts.policy_version[mine]
    return found
