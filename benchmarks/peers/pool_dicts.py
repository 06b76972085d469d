"""A pool that is a list of dicts, one for each position: the design that the columns are compared with.

Shards of several directories in proportion to their counts, in order inside each. All positions of a shard become dicts
in a list. When the list is down to the threshold the consumer fills it up with whole shards and shuffles it; positions
are popped from its end. With workers, each has every n-th shard and an n-th of the pool.

Rows of npz shards are views of the shard's arrays ("views"), or arrays of their own ("copies"): views are made sooner,
and each keeps its whole shard in memory. Pickles hold arrays of their own.
"""

from __future__ import annotations

import gzip
import pickle
import random
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.pools import BATCH_ROWS, COLUMNS, SEED, Batch, shards_of

PACKAGE = "numpy"
Example = dict[str, Any]


class ListOfDicts:
    """Iterate for positions."""

    def __init__(self, folders: list[Path], pool_rows: int, threshold: int, form: str) -> None:
        self.folders, self.pool_rows, self.threshold, self.form = folders, pool_rows, threshold, form
        self.read_seconds: list[float] = []
        self.shuffle_seconds: list[float] = []

    def __iter__(self) -> Iterator[Example]:
        return self.share(0, 1)

    def share(self, worker: int, workers: int) -> Iterator[Example]:
        shards = deque(in_proportion([shards_of(folder) for folder in self.folders])[worker::workers])
        pool_rows, threshold = self.pool_rows // workers, self.threshold // workers
        shuffler = random.Random(SEED + worker)
        pool: list[Example] = []
        while True:
            if len(pool) <= threshold and shards:
                self.refill(pool, shards, pool_rows, shuffler)
            if not pool:
                return
            yield pool.pop()

    def refill(self, pool: list[Example], shards: deque[Path], pool_rows: int, shuffler: random.Random) -> None:
        began = time.perf_counter()
        while shards and len(pool) < pool_rows:
            pool.extend(read_examples(shards.popleft(), self.form))
        read = time.perf_counter()
        shuffler.shuffle(pool)
        self.read_seconds.append(read - began)
        self.shuffle_seconds.append(time.perf_counter() - read)


def in_proportion(directories: list[list[Path]]) -> list[Path]:
    """Shard j of n is due at (2j + 1) / 2n."""
    due = [
        ((2 * at + 1) / (2 * len(shards)), number, shard)
        for number, shards in enumerate(directories)
        for at, shard in enumerate(shards)
    ]
    return [shard for _, _, shard in sorted(due)]


def read_examples(path: Path, form: str) -> list[Example]:
    if form == "pickles":
        with gzip.open(path, "rb") as reader:
            return pickle.load(reader)["examples"]  # type: ignore[no-any-return]
    with np.load(path) as shard:
        columns = {name: shard[name] for name in COLUMNS}
    boards: Any = columns["board"]
    policies: Any = columns["policy"]
    if form == "copies":
        boards, policies = (board.copy() for board in boards), (policy.copy() for policy in policies)
    # Python's own numbers are smaller than NumPy's, and sooner made.
    numbers = (columns[name].tolist() for name in ("move", "number", "value"))
    return [
        {"board": board, "move": move, "number": number, "policy": policy, "value": value}
        for board, policy, move, number, value in zip(boards, policies, *numbers, strict=True)
    ]


def stack(examples: list[Example]) -> Batch:
    """A batch as arrays, column by column."""
    return {
        name: np.stack([example[name] for example in examples])
        if shape
        else np.array([example[name] for example in examples], dtype)
        for name, (dtype, shape) in COLUMNS.items()
    }


class Contender:
    """`benchmarks.peers.pools.Pool`; there is no state to save."""

    def __init__(self, pool: ListOfDicts) -> None:
        self.pool = pool

    def rows(self) -> Iterator[Example]:
        return iter(self.pool)

    def batches(self) -> Iterator[Batch]:
        examples: list[Example] = []
        for example in self.pool:
            examples.append(example)
            if len(examples) == BATCH_ROWS:
                yield stack(examples)
                examples = []  # not clear(): the dicts die with the list, after the batch is made
        if examples:
            yield stack(examples)

    def loader(self, workers: int) -> Iterator[Batch]:
        from torch.utils.data import DataLoader, IterableDataset, get_worker_info

        pool = self.pool

        class Dataset(IterableDataset):  # type: ignore[misc]
            def __iter__(self) -> Iterator[Example]:
                worker = get_worker_info()
                return pool.share(worker.id, worker.num_workers) if worker else pool.share(0, 1)

        return iter(DataLoader(Dataset(), batch_size=BATCH_ROWS, num_workers=workers))

    def seconds(self) -> dict[str, list[float]]:
        return {"read": self.pool.read_seconds, "shuffle": self.pool.shuffle_seconds}

    def state(self) -> Any:
        raise TypeError("a list of dicts has no state")

    def load_state(self, state: Any) -> None:
        raise TypeError("a list of dicts has no state")


def open_pool(task: dict[str, Any]) -> Contender:
    folders = [Path(folder) for folder in task["folders"]]
    return Contender(ListOfDicts(folders, task["pool_rows"], task["threshold"], task["how"]))
