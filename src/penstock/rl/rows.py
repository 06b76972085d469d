"""Rollouts with everything that a batch takes of them: each column aligned with labels, and what a row counts for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.rl.columns import Rollouts
from penstock.rl.dialects import Dialect
from penstock.rl.estimate import Estimator, last_trained

__all__ = ["Laid", "Moments", "RolloutRows"]

Allocate = Callable[[tuple[int, int], Any], NDArray[Any]]
"""(shape, dtype) -> memory of any content."""

IGNORED = -100
"""The label of what is not learned."""


@dataclass(frozen=True, slots=True)
class Moments:
    """How many numbers there are, their mean, and the sum of their squared distances from it."""

    count: float
    mean: float
    squares: float


@dataclass(frozen=True, slots=True)
class Laid:
    """Some rows one below the other, [rows, width] each."""

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    loss_mask: NDArray[np.float32]
    attention_mask: NDArray[np.int64]
    columns: dict[str, NDArray[np.float32]]


class RolloutRows:
    """Rows of rollouts. Columns of tokens are shifted once, here, so that a batch only copies: place t of a row has
    what belongs to the token that place t predicts."""

    def __init__(self, rollouts: Rollouts, estimator: Estimator, *, alignment: str = "next") -> None:
        self.rollouts = rollouts
        self.method = estimator.method(rollouts)
        self.whitening: Dialect | None = estimator.dialect if estimator.whitens(self.method) else None
        """By whose rules advantages are whitened over a global batch; None: they are not."""
        estimate = estimator(rollouts)
        self.lengths = rollouts.lengths()
        self._shift = int(alignment == "next")
        trained = rollouts.trained.copy()
        trained[rollouts.starts[:-1]] = False  # nothing comes before it that could predict it
        # As numbers of 32 bits: of flags, NumPy sums 64 bits three times as slowly.
        counts = np.add.reduceat(trained.view(np.uint8), rollouts.starts[:-1], dtype=np.int32)
        self.trained_tokens = counts.astype(np.int64)
        """Learned tokens of each row."""
        self._is_learned = self._aligned(trained, trained, np.zeros(len(trained), bool))
        self._labels = self._aligned(rollouts.tokens, trained, np.full(len(trained), IGNORED, np.int32))
        columns = {
            "rewards": estimate.rewards,
            "advantages": estimate.advantages,
            "returns": estimate.returns,
            "values": rollouts.values,
            "old_log_probs": rollouts.old_log_probs,
            "ref_log_probs": rollouts.ref_log_probs,
        }
        given = {name: column for name, column in columns.items() if column is not None}
        self._of_rows = {name: column for name, column in given.items() if len(column) == len(self.lengths)}
        """What is the same for all learned tokens of a row; of rewards, what stands at the last of them."""
        self._of_tokens = {
            name: self._aligned(column, trained, np.zeros(len(trained), np.float32))
            for name, column in given.items()
            if name not in self._of_rows
        }
        self._names = tuple(given)
        self._last_place = last_trained(rollouts) - rollouts.starts[:-1] - self._shift

    def _aligned(self, column: NDArray[Any], trained: NDArray[np.bool_], out: NDArray[Any]) -> NDArray[Any]:
        """What belongs to the token that each place predicts, where that is learned; else what `out` has."""
        # No row's first token is learned, so nothing moves over the border of a row.
        np.copyto(out[: len(out) - self._shift], column[self._shift :], where=trained[self._shift :])
        return out

    def __len__(self) -> int:
        return len(self.lengths)

    def lay(self, rows: NDArray[np.int64], width: int, *, pad: int, left: bool, allocate: Allocate) -> Laid:
        """Some rows as [rows, width]: one copy for each row and column."""
        starts, lengths = self.rollouts.starts[rows], self.lengths[rows]
        offsets = width - lengths if left else np.zeros(len(rows), np.int64)
        shape = (len(rows), width)
        spans = list(zip(starts.tolist(), lengths.tolist(), offsets.tolist(), strict=True))

        def laid(flat: NDArray[Any], dtype: Any, fill: Any) -> NDArray[Any]:
            out = allocate(shape, dtype)
            out[:] = fill
            for row, (start, length, offset) in enumerate(spans):
                out[row, offset : offset + length] = flat[start : start + length]
            return out

        attention = allocate(shape, np.int64)
        place = np.arange(width)
        np.less(place, (offsets + lengths)[:, None], out=attention, casting="unsafe")
        if left:
            attention *= place >= offsets[:, None]
        loss = laid(self._is_learned, np.float32, 0)
        columns = {}
        for name in self._names:
            if name in self._of_tokens:
                columns[name] = laid(self._of_tokens[name], np.float32, 0)
                continue
            columns[name] = allocate(shape, np.float32)
            values = self._of_rows[name][rows]
            if name == "rewards":
                columns[name][:] = 0
                learned = np.flatnonzero(self.trained_tokens[rows])
                columns[name][learned, (offsets + self._last_place[rows])[learned]] = values[learned]
            else:
                np.multiply(loss, values[:, None], out=columns[name])
        return Laid(
            laid(self.rollouts.tokens, np.int64, pad), laid(self._labels, np.int64, IGNORED), loss, attention, columns
        )

    def num_groups(self, rows: NDArray[np.int64]) -> int | None:
        """How many groups some rows are of."""
        return None if self.rollouts.group is None else len(np.unique(self.rollouts.group[rows]))

    def moments(self, rows: NDArray[np.int64]) -> Moments:
        """Of the advantages of the learned tokens of some rows: what whitening over them needs.

        Sums of each row's, so that every rank gets the same for the same rows, in whatever order it has them.
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
        if "advantages" in self._of_rows:
            return counts, self._of_rows["advantages"].astype(np.float64), np.zeros(len(counts))
        advantages = self._of_tokens["advantages"].astype(np.float64)
        means = np.add.reduceat(advantages, starts) / np.maximum(counts, 1)
        apart = np.where(self._is_learned, advantages - np.repeat(means, self.lengths), 0)
        return counts, means, np.add.reduceat(apart * apart, starts)
