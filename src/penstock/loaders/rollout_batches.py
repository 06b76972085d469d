"""From rows of rollouts to the batch of one rank, with everything that a loss needs to know of the global batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.assemble.batch import Padding
from penstock.deliver.memory import BlockPool
from penstock.rl.rows import Laid, RolloutRows
from penstock.types import TrainingBatch

__all__ = ["GlobalBatch", "Maker", "told_of"]

_ARRAYS = 12
"""Of a batch, at most."""
_ALSO_MOVE = ("row", "ordinal", "attempt", "answer")
"""What is told of rows that goes with the batch: everything but positions, which are the loader's."""


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """The rows of one step, on all ranks together."""

    rows: NDArray[np.int64]
    """Row numbers, in the order in which ranks share them; those that fill the batch up repeat one."""
    weight: NDArray[np.float32] | None
    """0 for rows that only fill up; None: every row counts."""
    mine: NDArray[np.int64]
    """Which of these rows are this rank's."""
    width: int

    @property
    def real(self) -> NDArray[np.int64]:
        """The rows that count."""
        return self.rows if self.weight is None else self.rows[self.weight > 0]


@dataclass(slots=True)
class Maker:
    """What is the same for all batches of a loader, and the memory that they are made in."""

    padding: Padding
    pad: int
    alignment: str
    framework: str
    tokenizer: str | None = None
    pool: BlockPool = field(default_factory=lambda: BlockPool(_ARRAYS))

    def make(self, rows: RolloutRows, batch: GlobalBatch, facts: Callable[[], dict[str, Any]]) -> TrainingBatch:
        """This rank's rows. `facts` is what else the metadata has, made when somebody looks."""
        mine = batch.rows[batch.mine]
        laid = rows.lay(mine, batch.width, pad=self.pad, left=self.padding.left, allocate=self._allocate)
        if rows.whitening is not None:
            _whiten(rows, batch, laid)
        weight = None if batch.weight is None else batch.weight[batch.mine]
        if weight is not None and not weight.all():
            filled = weight == 0
            laid.labels[filled] = -100
            laid.loss_mask[filled] = 0
            for column in laid.columns.values():
                column[filled] = 0
        fields: dict[str, Any] = {
            "input_ids": laid.input_ids,
            "labels": laid.labels,
            "loss_mask": laid.loss_mask,
            "attention_mask": laid.attention_mask,
        }
        columns: dict[str, Any] = {**laid.columns, **_of_rows(rows, mine, weight)}
        made = self._converted(fields | columns)
        fields, columns = ({name: made[name] for name in names} for names in (fields, columns))
        return TrainingBatch(**fields, metadata=(self._metadata, columns, rows, batch, facts))

    def _metadata(
        self, columns: dict[str, Any], rows: RolloutRows, batch: GlobalBatch, facts: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        real = batch.real
        groups = rows.num_groups(real)
        told = facts()
        moving = {name: told[name] for name in _ALSO_MOVE if name in told}
        return {
            **columns,
            "global_rows": len(batch.rows),
            "global_sequences": len(real),
            "global_tokens": int(rows.trained_tokens[real].sum()),
            **({} if groups is None else {"global_groups": groups}),
            "alignment": self.alignment,
            **({"tokenizer": self.tokenizer} if self.tokenizer else {}),
            **told,
            **self._converted(moving),
        }

    def _converted(self, arrays: dict[str, NDArray[Any]]) -> dict[str, Any]:
        """Arrays of the loader's framework."""
        if self.framework == "numpy":
            return arrays
        made: dict[str, Any] = import_module(f"penstock.adapters.{self.framework}").numbers(arrays)
        return made

    def _allocate(self, shape: tuple[int, int], dtype: Any) -> NDArray[Any]:
        """Memory that was used before and is free again, in which pages need not be made anew."""
        rows, width = shape
        if dtype == np.int64:
            return self.pool.take(rows, width)
        floats = self.pool.take(1, (rows * width + 1) // 2).view(np.float32)
        return floats[0, : rows * width].reshape(shape)

    def __reduce__(self) -> tuple[Any, ...]:
        return Maker, (self.padding, self.pad, self.alignment, self.framework, self.tokenizer)


def _whiten(rows: RolloutRows, batch: GlobalBatch, laid: Laid) -> None:
    """Over the learned tokens of the global batch, of which only moments are needed."""
    assert rows.whitening is not None
    moments, advantages = rows.moments(batch.real), laid.columns["advantages"]
    advantages -= np.float32(moments.mean)
    advantages *= np.float32(1 / rows.whitening.whitening_divisor(moments.count, moments.squares))
    advantages *= laid.loss_mask


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


def told_of(imbalance: tuple[float, float] | None) -> dict[str, Any]:
    """What metadata says of how well a batch is balanced."""
    return {} if imbalance is None else {"imbalance": {"measured": imbalance[0], "bound": imbalance[1]}}
