"""Lance: a fixed-size-list column, rows taken by number, a whole batch at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import lance
import numpy as np
import pyarrow as pa

from benchmarks.peers.source import ROWS, SEED, Source, cut

PACKAGE = "pylance"
RESUMES_BY = "own code: seed and position"


def convert(source: Source) -> None:
    rows = cut(source.tokens(), source.row_tokens)
    values = pa.array(np.ascontiguousarray(rows[:, :-1]).reshape(-1))
    table = pa.table({"tokens": pa.FixedSizeListArray.from_arrays(values, source.row_tokens)})
    lance.write_dataset(table, str(source.folder))


def open_batches(source: Source, workers: int, state: Any) -> tuple[Iterator[Any], Callable[[], Any]]:
    dataset = lance.dataset(str(source.folder))
    num_rows, done = dataset.count_rows(), state or 0
    batches_an_epoch = num_rows // ROWS

    def batches() -> Iterator[Any]:
        nonlocal done
        for epoch in itertools.count(done // batches_an_epoch):
            order = np.random.default_rng([SEED, epoch]).permutation(num_rows)
            for number in range(done % batches_an_epoch, batches_an_epoch):
                done += 1
                column = dataset.take(order[number * ROWS : number * ROWS + ROWS]).column("tokens")
                chunks = [chunk.flatten().to_numpy() for chunk in column.chunks]
                yield np.concatenate(chunks).reshape(ROWS, -1).astype(np.int64)

    return batches(), lambda: done
