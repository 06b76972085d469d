"""torchdata's StatefulDataLoader over a hand-written dataset with the batched `__getitems__`: its best case."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from benchmarks.peers.source import ROWS, SEED, BatchedWindows, Source

PACKAGE = "torchdata"
RESUMES_BY = "state_dict()"


def open_batches(source: Source, workers: int, state: Any) -> tuple[Iterator[Any], Callable[[], Any]]:
    loader = StatefulDataLoader(
        BatchedWindows(source),
        batch_size=ROWS,
        shuffle=True,
        drop_last=True,
        collate_fn=torch.from_numpy,
        num_workers=workers,
        generator=torch.Generator().manual_seed(SEED),
    )
    if state is not None:
        loader.load_state_dict(state)

    def batches() -> Iterator[Any]:
        while True:
            for batch in loader:
                yield batch[:, :-1]

    return batches(), loader.state_dict
