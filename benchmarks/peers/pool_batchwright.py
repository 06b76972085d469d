"""batchwright: StreamingMixedShardDataset over the same shards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import batchwright as bw
from benchmarks.peers.pools import BATCH_ROWS, SEED, Batch

PACKAGE = "batchwright"


class Contender:
    """`benchmarks.peers.pools.Pool`."""

    def __init__(self, dataset: bw.StreamingMixedShardDataset, how: str) -> None:
        self.dataset, self.how = dataset, how

    def rows(self) -> Iterator[dict[str, Any]]:
        return iter(self.dataset)

    def batches(self) -> Iterator[Batch]:
        return self.dataset.batches(BATCH_ROWS)

    def loader(self, workers: int) -> Iterator[Batch]:
        if self.how == "row by row":
            from torch.utils.data import DataLoader

            return iter(DataLoader(self.dataset, batch_size=BATCH_ROWS, num_workers=workers))
        return iter(self.dataset.loader(workers, batch_size=BATCH_ROWS))

    def seconds(self) -> dict[str, list[float]]:
        return {}

    def state(self) -> Any:
        return self.dataset.state_dict()

    def load_state(self, state: Any) -> None:
        self.dataset.load_state_dict(state)


def open_pool(task: dict[str, Any]) -> Contender:
    dataset = bw.StreamingMixedShardDataset(
        task["folders"],
        ["all"] * len(task["folders"]),
        pool_size=task["pool_rows"],
        refill_threshold=task["threshold"],
        max_memory_gb=task.get("max_memory_gb", 5.0),
        enable_augmentation=False,
        random_seed=SEED,
        allow_pickle=task["how"] == "pickles",
    )
    return Contender(dataset, task["how"])
