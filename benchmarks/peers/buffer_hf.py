"""HF datasets: a list of datasets in memory, concatenated before the first batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from benchmarks.peers.buffers import BATCH_ROWS

PACKAGE = "datasets"


class Datasets:
    def __init__(self) -> None:
        self.parts: list[datasets.Dataset] = []
        self.whole = datasets.Dataset.from_dict({})
        self.generator = np.random.default_rng(0)

    def blocks(self, label: np.ndarray, obs: np.ndarray, block_rows: int) -> Sequence[Any]:
        starts = range(0, len(label), block_rows)
        return [{"label": label[at : at + block_rows], "obs": obs[at : at + block_rows]} for at in starts]

    def rows(self, label: np.ndarray, obs: np.ndarray) -> Sequence[Any]:
        return self.blocks(label, obs, 1)

    def extend(self, block: dict[str, np.ndarray]) -> None:
        """Without `features`, which would go over every number. It would keep the caller's memory: it gets a copy."""
        self.parts.append(datasets.Dataset.from_dict({name: column.copy() for name, column in block.items()}))

    append = extend

    def extend_dicts(self, dicts: list[dict[str, Any]]) -> None:
        self.parts.append(datasets.Dataset.from_list(dicts))

    def settle(self) -> None:
        self.whole = datasets.concatenate_datasets(self.parts).with_format("numpy")

    def sample(self) -> tuple[np.ndarray, np.ndarray]:
        return self.read(self.generator.integers(0, len(self.whole), BATCH_ROWS))

    def read(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows = self.whole[indices]
        return rows["label"], rows["obs"]


def open_buffer(how: str, num_rows: int, folder: Path) -> Datasets:
    return Datasets()
