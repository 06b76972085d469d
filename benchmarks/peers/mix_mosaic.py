"""MosaicML StreamingDataset with a Stream for each source, mixed by proportion."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.peers import load_mosaic  # first: it makes streaming importable
from benchmarks.peers.source import ROWS, SEED, Source

from streaming import Stream, StreamingDataLoader, StreamingDataset  # isort: skip

PACKAGE = "mosaicml-streaming"

convert = load_mosaic.convert


def open_mixture(sources: Sequence[Source], weights: Sequence[float]) -> Iterator[Any]:
    streams = [
        Stream(local=str(source.folder), proportion=weight) for source, weight in zip(sources, weights, strict=True)
    ]
    dataset = StreamingDataset(streams=streams, shuffle=True, shuffle_seed=SEED, batch_size=ROWS)
    loader = StreamingDataLoader(dataset, batch_size=ROWS, collate_fn=load_mosaic._collate, drop_last=True)
    while True:
        yield from loader
