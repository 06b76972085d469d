"""torch's own DataLoader, a sample at a time, as most datasets are written. Keeps no state: we replay the sampler."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from benchmarks.peers.source import ROWS, SEED, Source, Windows

PACKAGE = "torch"
RESUMES_BY = "own code: replays the sampler"


def _collate(rows: list[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.stack(rows))


class _From(BatchSampler):
    """A batch sampler that begins with batch number `first`, once."""

    first = 0

    def __iter__(self) -> Iterator[list[int]]:
        first, self.first = self.first, 0
        return itertools.islice(super().__iter__(), first, None)


def open_batches(source: Source, workers: int, state: Any) -> tuple[Iterator[Any], Callable[[], Any]]:
    dataset, done = Windows(source), state or 0
    sampler = _From(RandomSampler(dataset, generator=torch.Generator().manual_seed(SEED)), ROWS, drop_last=True)
    sampler.first = done
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=_collate, num_workers=workers)

    def batches() -> Iterator[Any]:
        nonlocal done
        while True:
            for batch in loader:
                done += 1
                yield batch[:, :-1]

    return batches(), lambda: done
