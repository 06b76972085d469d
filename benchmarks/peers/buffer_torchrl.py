"""TorchRL: ReplayBuffer over tensors in memory, in memory-mapped files, or over a list of TensorDicts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("RL_LOGGING_LEVEL", "ERROR")

import numpy as np
import torch
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, ListStorage, ReplayBuffer

from benchmarks.peers.buffers import BATCH_ROWS

PACKAGE = "torchrl"


class Replay:
    def __init__(self, how: str, num_rows: int, folder: Path) -> None:
        options: dict[str, Any]
        if how.endswith("1 thread"):
            torch.set_num_threads(1)
        if how == "list":  # keeps the TensorDicts themselves, so that they must be the caller's own no longer
            options = {"storage": ListStorage(num_rows), "collate_fn": torch.stack}
        elif how.startswith("memmap"):
            options = {"storage": LazyMemmapStorage(num_rows, scratch_dir=folder)}
        else:
            options = {"storage": LazyTensorStorage(num_rows)}
        self.buffer = ReplayBuffer(batch_size=BATCH_ROWS, **options)
        self.is_list = how == "list"

    def blocks(self, label: np.ndarray, obs: np.ndarray, block_rows: int) -> Sequence[Any]:
        tensors = {"label": torch.from_numpy(label), "obs": torch.from_numpy(obs)}
        starts = range(0, len(label), block_rows)
        return [
            TensorDict(
                {name: tensor[at : at + block_rows] for name, tensor in tensors.items()},
                [min(block_rows, len(label) - at)],
            )
            for at in starts
        ]

    def rows(self, label: np.ndarray, obs: np.ndarray) -> Sequence[Any]:
        pairs = zip(torch.from_numpy(label), torch.from_numpy(obs), strict=True)
        return [TensorDict({"label": number, "obs": row}, []) for number, row in pairs]

    def extend(self, block: TensorDict) -> None:
        self.buffer.extend(list(block.clone().unbind(0)) if self.is_list else block)

    def append(self, row: TensorDict) -> None:
        self.buffer.add(row.clone() if self.is_list else row)

    def extend_dicts(self, dicts: list[dict[str, Any]]) -> None:
        """By way of two arrays: a stack of 1,000 TensorDicts is twenty times as slow."""
        label, obs = torch.tensor([row["label"] for row in dicts]), np.stack([row["obs"] for row in dicts])
        self.extend(TensorDict({"label": label, "obs": torch.from_numpy(obs)}, [len(dicts)]))

    def settle(self) -> None:
        """It can be read at any time."""

    def sample(self) -> tuple[torch.Tensor, torch.Tensor]:
        batch = self.buffer.sample()
        return batch["label"], batch["obs"]

    def read(self, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.buffer[torch.from_numpy(indices)]
        if self.is_list:
            rows = torch.stack(rows)
        return rows["label"], rows["obs"]


def open_buffer(how: str, num_rows: int, folder: Path) -> Replay:
    return Replay(how, num_rows, folder)
