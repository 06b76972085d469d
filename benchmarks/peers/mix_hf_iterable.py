"""HF interleave_datasets over IterableDatasets: shuffled shards, a shuffle buffer of 1,000 rows each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from datasets import interleave_datasets, load_from_disk

from benchmarks.peers import load_hf
from benchmarks.peers.source import ROWS, SEED, Source

PACKAGE = "datasets"

convert = load_hf.convert


def open_mixture(sources: Sequence[Source], weights: Sequence[float]) -> Iterator[Any]:
    datasets = [
        load_from_disk(str(source.folder)).to_iterable_dataset(num_shards=16).shuffle(seed=SEED, buffer_size=1000)
        for source in sources
    ]
    dataset = interleave_datasets(datasets, probabilities=list(weights), seed=SEED)
    batches = dataset.with_format("numpy").batch(ROWS, drop_last_batch=True)
    while True:
        for batch in batches:
            yield np.asarray(batch["tokens"]).astype(np.int64)
