"""batchwright: the store that `benchmarks.data` bakes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import batchwright as bw
from benchmarks.peers.source import ROWS, SEED, Source

PACKAGE = "batchwright"
RESUMES_BY = "state_dict()"


def open_batches(source: Source, workers: int, state: Any) -> tuple[Iterator[Any], Callable[[], Any]]:
    loader = bw.PretrainDataLoader(
        source.store,
        chunk_size=source.row_tokens,
        batch_size=ROWS,
        seed=SEED,
        framework="numpy",
        epochs=None,
        delivery=bw.Delivery(workers=workers),
    )
    if state is not None:
        loader.load_state_dict(state)

    def batches() -> Iterator[Any]:
        while True:
            for batch in loader.get_iterator():
                yield batch["input_ids"]

    return batches(), loader.state_dict
