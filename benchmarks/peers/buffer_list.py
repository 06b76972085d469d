"""A Python list of dicts, which keeps the caller's arrays unless they are copied."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.buffers import BATCH_ROWS, rows_of_dicts

PACKAGE = "numpy"


class Dicts:
    def __init__(self) -> None:
        self.kept: list[dict[str, Any]] = []
        self.generator = np.random.default_rng(0)

    def blocks(self, label: np.ndarray, obs: np.ndarray, block_rows: int) -> Sequence[Any]:
        return [(label[at : at + block_rows], obs[at : at + block_rows]) for at in range(0, len(label), block_rows)]

    def rows(self, label: np.ndarray, obs: np.ndarray) -> Sequence[Any]:
        return rows_of_dicts(label, obs)

    def extend(self, block: tuple[np.ndarray, np.ndarray]) -> None:
        label, obs = block
        self.kept += rows_of_dicts(label, obs.copy())

    def append(self, row: dict[str, Any]) -> None:
        self.kept.append({"label": row["label"], "obs": row["obs"].copy()})

    def extend_dicts(self, dicts: list[dict[str, Any]]) -> None:
        self.kept += [{"label": row["label"], "obs": row["obs"].copy()} for row in dicts]

    def settle(self) -> None:
        """It can be read at any time."""

    def sample(self) -> tuple[np.ndarray, np.ndarray]:
        return self.read(self.generator.integers(0, len(self.kept), BATCH_ROWS))

    def read(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows = [self.kept[index] for index in indices.tolist()]
        return np.array([row["label"] for row in rows]), np.stack([row["obs"] for row in rows])


def open_buffer(how: str, num_rows: int, folder: Path) -> Dicts:
    return Dicts()
