"""Rollouts with every column of a batch, each aligned with targets, and the token counts of each row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.rl.columns import Rollouts
from batchwright.rl.dialects import Dialect
from batchwright.rl.estimate import Advantages, last_trained

__all__ = ["IGNORED", "PaddedRollouts", "RolloutRows"]

Allocate = Callable[[tuple[int, int], Any], NDArray[Any]]
"""(shape, dtype) -> uninitialised memory."""

IGNORED = -100
"""The target at places where nothing is learned."""


@dataclass(frozen=True, slots=True)
class Moments:
    """The number of some values, their mean, and the sum of their squared distances from it."""

    count: float
    mean: float
    squares: float


@dataclass(frozen=True, slots=True)
class PaddedRollouts:
    """Some rows as padded arrays, [rows, width] each."""

    input_ids: NDArray[np.int64]
    targets: NDArray[np.int64]
    loss_mask: NDArray[np.float32]
    attention_mask: NDArray[np.int64]
    columns: dict[str, NDArray[np.float32]]


class RolloutRows:
    """Rows of rollouts, and batches of them. Place t of a row describes the token that place t predicts."""

    def __init__(self, rollouts: Rollouts, estimator: Advantages) -> None:
        self.rollouts = rollouts
        self.method: str | None = estimator.method_for(rollouts)
        self.whitening: Dialect | None = estimator.conventions if estimator.whitens(self.method) else None
        """The conventions for whitening advantages over a global batch; None: no whitening."""
        estimate = estimator(rollouts)
        self.lengths: NDArray[np.int64] = rollouts.lengths()
        self._trained = rollouts.trained
        begins = rollouts.starts[:-1]
        if self._trained[begins].any():
            self._trained = self._trained.copy()
            self._trained[begins] = False  # no token before it could predict it
        # As 32-bit numbers: NumPy sums flags in 64 bits three times as slowly.
        counts = np.add.reduceat(self._trained.view(np.uint8), begins, dtype=np.int32)
        self.trained_tokens: NDArray[np.int64] = counts.astype(np.int64)
        """Learned tokens of each row."""
        self._last_place = last_trained(rollouts) - begins - 1
        columns = {
            "rewards": estimate.rewards,
            "advantages": estimate.advantages,
            "returns": estimate.returns,
            "values": rollouts.values,
            "old_log_probs": rollouts.old_log_probs,
            "ref_log_probs": rollouts.ref_log_probs,
        }
        self._columns = {name: column for name, column in columns.items() if column is not None}
        """One number per token; or one per row, as an Estimate may have them."""

    def __len__(self) -> int:
        return len(self.lengths)

    def _is_per_row(self, name: str) -> bool:
        return len(self._columns[name]) == len(self.lengths)

    def row_columns(self, rows: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """The columns of some rows with one number per row."""
        found = {"group": self.rollouts.group, "policy_version": self.rollouts.policy_version}
        columns = {name: column[rows] for name, column in found.items() if column is not None}
        if self.rollouts.reward is not None:
            columns["reward"] = self.rollouts.reward[rows].astype(np.float32)
        return columns

    def padded(
        self, rows: NDArray[np.int64], width: int, *, pad: int, left: bool, allocate: Allocate
    ) -> PaddedRollouts:
        """Some rows as [rows, width]: one copy for each row and column."""
        starts, lengths = self.rollouts.starts[rows], self.lengths[rows]
        offsets = width - lengths if left else np.zeros(len(rows), np.int64)
        shape = (len(rows), width)
        spans = list(zip(starts.tolist(), (starts + lengths).tolist(), offsets.tolist(), strict=True))

        def copied(flat: NDArray[Any], out: NDArray[Any], shift: int = 1) -> NDArray[Any]:
            """Place t gets the number of the token after it. Nothing is written elsewhere."""
            for row, (start, stop, offset) in enumerate(spans):
                out[row, offset : offset + stop - start - shift] = flat[start + shift : stop]
            return out

        tokens, loss, attention = (allocate(shape, dtype) for dtype in (np.int64, np.float32, np.int64))
        tokens[:] = pad
        copied(self.rollouts.tokens, tokens, shift=0)
        loss[:] = 0
        copied(self._trained, loss)
        place = np.arange(width, dtype=np.int32)
        is_real = place < (offsets + lengths).astype(np.int32)[:, None]
        if left:
            is_real &= place >= offsets.astype(np.int32)[:, None]
        attention[:] = is_real
        is_ignored = loss == 0
        targets = allocate(shape, np.int64)
        targets[:, : width - 1] = tokens[:, 1:]
        np.copyto(targets, IGNORED, where=is_ignored)
        columns = {}
        for name, column in self._columns.items():
            out = columns[name] = allocate(shape, np.float32)
            if not self._is_per_row(name):
                copied(column, out)
                np.copyto(out, 0, where=is_ignored)
            elif name == "rewards":
                out[:] = 0
                learned = np.flatnonzero(self.trained_tokens[rows])
                out[learned, (offsets + self._last_place[rows])[learned]] = column[rows][learned]
            else:
                np.multiply(loss, column[rows][:, None], out=out)
                out += 0  # -0 becomes 0
        return PaddedRollouts(tokens, targets, loss, attention, columns)

    def moments(self, rows: NDArray[np.int64]) -> Moments:
        """Moments of the advantages of the learned tokens of some rows, for whitening over them.

        They are sums over rows in ascending order, so that every rank gets the same bits.
        """
        rows = np.sort(rows)
        counts, means, squares = (column[rows] for column in self._row_moments)
        count = counts.sum()
        if not count:
            return Moments(0.0, 0.0, 0.0)
        mean = float((counts * means).sum() / count)
        return Moments(float(count), mean, float((squares + counts * (means - mean) ** 2).sum()))

    @cached_property
    def _row_moments(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """(count, mean, squared distances) of each row's advantages, over its learned tokens."""
        starts, counts = self.rollouts.starts[:-1], self.trained_tokens.astype(np.float64)
        advantages = self._columns["advantages"].astype(np.float64)
        if self._is_per_row("advantages"):
            return counts, advantages, np.zeros(len(counts))
        means = np.add.reduceat(advantages, starts) / np.maximum(counts, 1)
        apart = np.where(self._trained, advantages - np.repeat(means, self.lengths), 0)
        return counts, means, np.add.reduceat(apart * apart, starts)
