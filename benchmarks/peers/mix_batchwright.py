"""batchwright: a store with several ingredients, and weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import batchwright as bw
from benchmarks.peers.source import ROWS, SEED, Source

PACKAGE = "batchwright"


def open_mixture(sources: Sequence[Source], weights: Sequence[float]) -> Iterator[Any]:
    store = sources[0].store
    loader = bw.PretrainDataLoader(
        store,
        chunk_size=sources[0].row_tokens,
        batch_size=ROWS,
        seed=SEED,
        framework="numpy",
        weights=dict(zip(bw.open_store(store).names, weights, strict=True)),
    )
    return (batch["input_ids"] for batch in loader.get_iterator())
