"""Polars: frames stacked on a frame (vstack), in chunks, or also in one chunk before the first batch (rechunk)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from benchmarks.peers.buffers import BATCH_ROWS, OBS, copied

PACKAGE = "polars"
SCHEMA = {"label": pl.Int64, "obs": pl.Array(pl.Float32, OBS)}


class Frame:
    def __init__(self, is_rechunked: bool) -> None:
        self.is_rechunked, self.frame = is_rechunked, pl.DataFrame(schema=SCHEMA)
        self.generator = np.random.default_rng(0)

    def blocks(self, label: np.ndarray, obs: np.ndarray, block_rows: int) -> Sequence[Any]:
        return [(label[at : at + block_rows], obs[at : at + block_rows]) for at in range(0, len(label), block_rows)]

    def rows(self, label: np.ndarray, obs: np.ndarray) -> Sequence[Any]:
        return self.blocks(label, obs, 1)

    def extend(self, block: tuple[np.ndarray, np.ndarray]) -> None:
        """Polars would keep the caller's memory: it gets a copy."""
        label, obs = block
        self.frame.vstack(pl.DataFrame({"label": copied(label), "obs": copied(obs)}), in_place=True)

    append = extend

    def extend_dicts(self, dicts: list[dict[str, Any]]) -> None:
        self.frame.vstack(pl.DataFrame(dicts, schema=SCHEMA), in_place=True)

    def settle(self) -> None:
        if self.is_rechunked:
            self.frame = self.frame.rechunk()

    def sample(self) -> tuple[np.ndarray, np.ndarray]:
        return self.read(self.generator.integers(0, len(self.frame), BATCH_ROWS))

    def read(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows = self.frame[indices]
        return rows["label"].to_numpy(), rows["obs"].to_numpy()


def open_buffer(how: str, num_rows: int, folder: Path) -> Frame:
    return Frame(how == "rechunked")
