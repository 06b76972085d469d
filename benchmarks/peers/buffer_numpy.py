"""Plain NumPy: one array for each column, which doubles when it is full; or as large as needed from the start."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.buffers import BATCH_ROWS, OBS

PACKAGE = "numpy"


class Growable:
    def __init__(self, capacity: int) -> None:
        self.label, self.obs, self.num_rows = np.empty(capacity, np.int64), np.empty((capacity, OBS), np.float32), 0
        self.generator = np.random.default_rng(0)

    def grow(self, num_rows: int) -> None:
        """One column after the other, so that the old and the new array of one column are alive at a time."""
        capacity = max(2 * len(self.label), num_rows)
        for name in ("label", "obs"):
            old = getattr(self, name)
            new = np.empty((capacity, *old.shape[1:]), old.dtype)
            new[: self.num_rows] = old[: self.num_rows]
            setattr(self, name, new)

    def blocks(self, label: np.ndarray, obs: np.ndarray, block_rows: int) -> Sequence[Any]:
        return [(label[at : at + block_rows], obs[at : at + block_rows]) for at in range(0, len(label), block_rows)]

    def rows(self, label: np.ndarray, obs: np.ndarray) -> Sequence[Any]:
        return list(zip(label.tolist(), obs, strict=True))

    def extend(self, block: tuple[np.ndarray, np.ndarray]) -> None:
        label, obs = block
        begin, end = self.num_rows, self.num_rows + len(label)
        if end > len(self.label):
            self.grow(end)
        self.label[begin:end] = label
        self.obs[begin:end] = obs
        self.num_rows = end

    def append(self, row: tuple[int, np.ndarray]) -> None:
        at = self.num_rows
        if at == len(self.label):
            self.grow(at + 1)
        self.label[at], self.obs[at] = row
        self.num_rows = at + 1

    def extend_dicts(self, dicts: list[dict[str, Any]]) -> None:
        self.extend((np.array([row["label"] for row in dicts]), np.stack([row["obs"] for row in dicts])))

    def settle(self) -> None:
        """It can be read at any time."""

    def sample(self) -> tuple[np.ndarray, np.ndarray]:
        return self.read(self.generator.integers(0, self.num_rows, BATCH_ROWS))

    def read(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.label.take(indices), self.obs.take(indices, axis=0)


def open_buffer(how: str, num_rows: int, folder: Path) -> Growable:
    return Growable(num_rows if how == "preallocated" else 1024)
