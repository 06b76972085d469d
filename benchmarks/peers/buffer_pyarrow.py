"""pyarrow: a list of tables, concatenated before the first batch, or also combined into one chunk for each column."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.peers.buffers import BATCH_ROWS, OBS, copied

PACKAGE = "pyarrow"
SCHEMA = pa.schema([("label", pa.int64()), ("obs", pa.list_(pa.float32(), OBS))])


class Tables:
    def __init__(self, is_combined: bool) -> None:
        self.is_combined, self.tables, self.table = is_combined, [], SCHEMA.empty_table()
        self.generator = np.random.default_rng(0)

    def blocks(self, label: np.ndarray, obs: np.ndarray, block_rows: int) -> Sequence[Any]:
        return [(label[at : at + block_rows], obs[at : at + block_rows]) for at in range(0, len(label), block_rows)]

    def rows(self, label: np.ndarray, obs: np.ndarray) -> Sequence[Any]:
        return self.blocks(label, obs, 1)

    def extend(self, block: tuple[np.ndarray, np.ndarray]) -> None:
        """Arrow would keep the caller's memory: it gets a copy."""
        label, obs = block
        columns = [
            pa.array(copied(label)),
            pa.FixedSizeListArray.from_arrays(pa.array(copied(obs).reshape(-1)), OBS),
        ]
        self.tables.append(pa.Table.from_arrays(columns, schema=SCHEMA))

    append = extend

    def extend_dicts(self, dicts: list[dict[str, Any]]) -> None:
        self.tables.append(pa.Table.from_pylist(dicts, schema=SCHEMA))

    def settle(self) -> None:
        self.table = pa.concat_tables(self.tables)
        if self.is_combined:
            self.tables, self.table = [], self.table.combine_chunks()

    def sample(self) -> tuple[np.ndarray, np.ndarray]:
        return self.read(self.generator.integers(0, len(self.table), BATCH_ROWS))

    def read(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows = self.table.take(pa.array(indices)).combine_chunks()
        return rows["label"].to_numpy(), rows["obs"].chunk(0).flatten().to_numpy().reshape(-1, OBS)


def open_buffer(how: str, num_rows: int, folder: Path) -> Tables:
    return Tables(how == "combined")
