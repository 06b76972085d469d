"""HF datasets, map-style: rows taken by number, in NumPy format, a whole batch at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, load_from_disk

from benchmarks.peers.source import ROWS, SEED, Source, cut

PACKAGE = "datasets"
RESUMES_BY = "own code: seed and position"


def convert(source: Source) -> None:
    """As few record batches as can be: a take over many is much slower."""
    rows = cut(source.tokens(), source.row_tokens)
    values = pa.array(np.ascontiguousarray(rows[:, :-1]).reshape(-1))
    table = pa.table({"tokens": pa.FixedSizeListArray.from_arrays(values, source.row_tokens)})
    Dataset(table).save_to_disk(str(source.folder), num_shards=1)


def open_batches(source: Source, workers: int, state: Any) -> tuple[Iterator[Any], Callable[[], Any]]:
    dataset = load_from_disk(str(source.folder)).with_format("numpy")
    batches_an_epoch = len(dataset) // ROWS
    done = state or 0

    def batches() -> Iterator[Any]:
        nonlocal done
        for epoch in itertools.count(done // batches_an_epoch):
            order = np.random.default_rng([SEED, epoch]).permutation(len(dataset))
            for number in range(done % batches_an_epoch, batches_an_epoch):
                done += 1
                yield dataset[order[number * ROWS : number * ROWS + ROWS]]["tokens"].astype(np.int64)

    return batches(), lambda: done
