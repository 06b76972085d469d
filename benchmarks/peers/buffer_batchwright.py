"""batchwright: DatasetBuffer in memory, or in a folder that survives the process (path=)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.buffers import BATCH_ROWS, rows_of_dicts

PACKAGE = "batchwright"


class Ours:
    def __init__(self, path: Path | None) -> None:
        import batchwright as bw

        self.buffer, self.step = bw.DatasetBuffer(path=path), 0

    def blocks(self, label: np.ndarray, obs: np.ndarray, block_rows: int) -> Sequence[Any]:
        starts = range(0, len(label), block_rows)
        return [{"label": label[at : at + block_rows], "obs": obs[at : at + block_rows]} for at in starts]

    def rows(self, label: np.ndarray, obs: np.ndarray) -> Sequence[Any]:
        return rows_of_dicts(label, obs)

    def extend(self, block: dict[str, np.ndarray]) -> None:
        self.buffer.extend(block)

    def append(self, row: dict[str, Any]) -> None:
        self.buffer.append(row)

    def extend_dicts(self, dicts: list[dict[str, Any]]) -> None:
        self.buffer.append(dicts)

    def settle(self) -> None:
        """It can be read at any time."""

    def sample(self) -> tuple[np.ndarray, np.ndarray]:
        """Uniform, with the ids and weights that come with it."""
        batch = self.buffer.sample(BATCH_ROWS, step=self.step)
        self.step += 1
        return batch["label"], batch["obs"]

    def read(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows = self.buffer.select(indices).to_numpy()
        return rows["label"], rows["obs"]


def open_buffer(how: str, num_rows: int, folder: Path) -> Ours:
    return Ours(folder if how == "path" else None)
