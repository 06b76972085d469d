"""LitData CombinedStreamingDataset over a StreamingDataset for each source."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from litdata import CombinedStreamingDataset, StreamingDataLoader, StreamingDataset, TokensLoader

from benchmarks.peers import load_litdata
from benchmarks.peers.source import ROWS, SEED, Source

PACKAGE = "litdata"

convert = load_litdata.convert


def open_mixture(sources: Sequence[Source], weights: Sequence[float]) -> Iterator[Any]:
    datasets = [
        StreamingDataset(
            str(source.folder),
            item_loader=TokensLoader(block_size=source.row_tokens),
            shuffle=True,
            seed=SEED,
            drop_last=True,
        )
        for source in sources
    ]
    dataset = CombinedStreamingDataset(datasets, seed=SEED, weights=list(weights), iterate_over_all=False)
    loader = StreamingDataLoader(
        dataset, batch_size=ROWS, num_workers=0, collate_fn=load_litdata._collate, drop_last=True
    )
    while True:
        yield from loader
