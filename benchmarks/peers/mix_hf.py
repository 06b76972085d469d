"""HF interleave_datasets, map-style: an index over all rows, taken a batch at a time in NumPy format."""

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
    datasets = [load_from_disk(str(source.folder)).shuffle(seed=SEED) for source in sources]
    dataset = interleave_datasets(datasets, probabilities=list(weights), seed=SEED).with_format("numpy")
    while True:
        for first in range(0, len(dataset) - ROWS + 1, ROWS):
            yield dataset[first : first + ROWS]["tokens"].astype(np.int64)
