"""Grain: MapDataset.mix over a shuffled MapDataset for each source, batched, read in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import grain

from benchmarks.peers.source import ROWS, SEED, Source, Windows

PACKAGE = "grain"


def open_mixture(sources: Sequence[Source], weights: Sequence[float]) -> Iterator[Any]:
    datasets = [grain.MapDataset.source(Windows(source)).shuffle(seed=SEED).repeat() for source in sources]
    dataset = grain.MapDataset.mix(datasets, weights=list(weights)).batch(ROWS, drop_remainder=True)
    # Its default threads hand over element by element, which costs far more than the copy they hide.
    rows = dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    return (batch[:, :-1] for batch in rows)
