"""HF IterableDataset: shuffled shards, a shuffle buffer of 1,000 rows; StatefulDataLoader where it has workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from datasets import load_from_disk
from torchdata.stateful_dataloader import StatefulDataLoader

from benchmarks.peers import load_hf
from benchmarks.peers.source import ROWS, SEED, Source

PACKAGE = "datasets"
RESUMES_BY = "state_dict()"

convert = load_hf.convert


def _tensor(batch: dict[str, np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.asarray(batch["tokens"]).astype(np.int64))


def open_batches(source: Source, workers: int, state: Any) -> tuple[Iterator[Any], Callable[[], Any]]:
    dataset = load_from_disk(str(source.folder)).to_iterable_dataset(num_shards=64)
    dataset = dataset.shuffle(seed=SEED, buffer_size=1000).with_format("numpy").batch(ROWS, drop_last_batch=True)
    if workers:
        keeper: Any = StatefulDataLoader(dataset, batch_size=None, num_workers=workers, collate_fn=_tensor)
    else:
        keeper = dataset
    if state is not None:
        keeper.load_state_dict(state)

    def batches() -> Iterator[Any]:
        while True:
            for batch in keeper:
                yield batch if workers else _tensor(batch)

    return batches(), keeper.state_dict
