"""What one writes without a library: a permutation array, and one gather for each batch. Cannot trace or mix."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.peers.source import ROWS, SEED, Source, cut

PACKAGE = "numpy"
RESUMES_BY = "own code: seed and position"


def open_batches(source: Source, workers: int, state: Any) -> tuple[Iterator[Any], Callable[[], Any]]:
    rows = cut(source.tokens(), source.row_tokens)
    batches_an_epoch = len(rows) // ROWS
    done = state or 0

    def batches() -> Iterator[Any]:
        nonlocal done
        for epoch in itertools.count(done // batches_an_epoch):
            order = np.random.default_rng([SEED, epoch]).permutation(len(rows))
            for number in range(done % batches_an_epoch, batches_an_epoch):
                done += 1
                yield rows[order[number * ROWS : number * ROWS + ROWS]].astype(np.int64)[:, :-1]

    return batches(), lambda: done
