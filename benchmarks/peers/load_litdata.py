"""LitData StreamingDataset with its TokensLoader (one run of tokens, cut when read), and its StreamingDataLoader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from litdata import StreamingDataLoader, StreamingDataset, TokensLoader, optimize

from benchmarks.peers.source import ROWS, SEED, Source

PACKAGE = "litdata"
RESUMES_BY = "state_dict()"

_PIECE_TOKENS = 1 << 20


def _piece(start: int, source: Source) -> Iterator[torch.Tensor]:
    yield torch.from_numpy(source.tokens()[start : start + _PIECE_TOKENS].copy())


def convert(source: Source) -> None:
    optimize(
        fn=partial(_piece, source=source),
        inputs=list(range(0, len(source.tokens()), _PIECE_TOKENS)),
        output_dir=str(source.folder),
        chunk_size=_PIECE_TOKENS * 32,
        item_loader=TokensLoader(),
        num_workers=1,
    )


def _collate(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.from_numpy(np.stack([np.asarray(row) for row in rows]).astype(np.int64))


def open_batches(source: Source, workers: int, state: Any) -> tuple[Iterator[Any], Callable[[], Any]]:
    dataset = StreamingDataset(
        str(source.folder),
        item_loader=TokensLoader(block_size=source.row_tokens),
        shuffle=True,
        seed=SEED,
        drop_last=True,
    )
    loader = StreamingDataLoader(dataset, batch_size=ROWS, num_workers=workers, collate_fn=_collate, drop_last=True)
    if state is not None:
        loader.load_state_dict(state)

    def batches() -> Iterator[Any]:
        while True:
            yield from loader

    return batches(), loader.state_dict
