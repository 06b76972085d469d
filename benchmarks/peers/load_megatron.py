"""Megatron-core GPTDataset over its own .bin/.idx, its indices built once and kept; torch's DataLoader delivers."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from benchmarks.peers.source import ROWS, SEED, Source

PACKAGE = "megatron-core"
RESUMES_BY = "own code: consumed samples"

_MEAN_DOCUMENT_TOKENS = 2000


def convert(source: Source) -> None:
    """Documents of about 2,000 tokens: the format needs some."""
    source.folder.mkdir(parents=True)
    tokens = source.tokens()
    builder = IndexedDatasetBuilder(str(source.folder / "data.bin"), dtype=np.uint16)
    count = 2 * len(tokens) // _MEAN_DOCUMENT_TOKENS
    ends = np.cumsum(np.random.default_rng(0).integers(1, 2 * _MEAN_DOCUMENT_TOKENS, count))
    start = 0
    for end in [*ends[ends < len(tokens)].tolist(), len(tokens)]:
        builder.add_document(torch.from_numpy(tokens[start:end].astype(np.int32)), [end - start])
        start = end
    builder.finalize(str(source.folder / "data.idx"))
    _dataset(source)


def _dataset(source: Source) -> Any:
    return dataset_of(
        ([str(source.folder / "data")], None), source.num_rows, source.row_tokens, source.folder / "cache"
    )


def dataset_of(blend: tuple[list[str], list[float] | None], num_rows: int, row_tokens: int, cache: Path) -> Any:
    tokenizer = types.SimpleNamespace(eod=256, pad=0, unique_identifiers={"tokenizer": "bytes"}, vocab_size=257)
    config = GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=row_tokens,
        blend=blend,
        split="1,0,0",
        path_to_cache=str(cache),
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, [num_rows, 0, 0], lambda: True, config).build()[0]


def open_batches(source: Source, workers: int, state: Any) -> tuple[Iterator[Any], Callable[[], Any]]:
    dataset, done = _dataset(source), state or 0

    def batches() -> Iterator[Any]:
        nonlocal done
        while True:
            first = done % (len(dataset) // ROWS)
            numbers = [range(n * ROWS, n * ROWS + ROWS) for n in range(first, len(dataset) // ROWS)]
            for batch in torch.utils.data.DataLoader(dataset, batch_sampler=numbers, num_workers=workers):
                done += 1
                yield batch["tokens"]

    return batches(), lambda: done
