"""MosaicML StreamingDataset over local MDS shards of uint16 rows, with its own StreamingDataLoader."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.peers.source import ROWS, SEED, Source, cut

# streaming imports its vision half, and with it torchvision, which has no CPU build beside this torch.
sys.modules.setdefault("streaming.vision", types.ModuleType("streaming.vision"))

from streaming import MDSWriter, StreamingDataLoader, StreamingDataset  # noqa: E402

PACKAGE = "mosaicml-streaming"
RESUMES_BY = "state_dict()"


def convert(source: Source) -> None:
    columns = {"tokens": f"ndarray:uint16:{source.row_tokens}"}
    with MDSWriter(out=str(source.folder), columns=columns, size_limit=64 << 20) as writer:
        for row in cut(source.tokens(), source.row_tokens):
            writer.write({"tokens": np.ascontiguousarray(row[:-1])})


def _collate(samples: list[dict[str, np.ndarray]]) -> torch.Tensor:
    return torch.from_numpy(np.stack([sample["tokens"] for sample in samples]).astype(np.int64))


def open_batches(source: Source, workers: int, state: Any) -> tuple[Iterator[Any], Callable[[], Any]]:
    dataset = StreamingDataset(local=str(source.folder), shuffle=True, shuffle_seed=SEED, batch_size=ROWS)
    loader = StreamingDataLoader(
        dataset, batch_size=ROWS, num_workers=workers, collate_fn=_collate, drop_last=True, persistent_workers=False
    )
    if state is not None:
        loader.load_state_dict(state)

    def batches() -> Iterator[Any]:
        while True:
            yield from loader

    return batches(), loader.state_dict
