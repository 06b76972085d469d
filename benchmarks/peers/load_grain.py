"""Grain: a MapDataset over the bare array, shuffled and batched, read by an iterator whose state it keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grain

from benchmarks.peers.source import ROWS, SEED, Source, Windows

PACKAGE = "grain"
RESUMES_BY = "get_state()"


def open_batches(source: Source, workers: int, state: Any) -> tuple[Iterator[Any], Callable[[], Any]]:
    dataset = grain.MapDataset.source(Windows(source)).shuffle(seed=SEED).repeat().batch(ROWS, drop_remainder=True)
    # Its default threads hand over element by element, which costs far more than the copy they hide.
    rows = dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    if workers:
        rows = rows.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
    iterator = iter(rows)
    if state is not None:
        iterator.set_state(state)
    return (batch[:, :-1] for batch in iterator), iterator.get_state
