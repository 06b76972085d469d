"""Megatron-core BlendedDataset over a GPTDataset for each source, its indices built once and kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.peers import load_megatron
from benchmarks.peers.source import ROWS, Source

PACKAGE = "megatron-core"
CUTS_AT_MULTIPLES = False
"""It shuffles documents first: its rows are no rows of the others."""

convert = load_megatron.convert


def open_mixture(sources: Sequence[Source], weights: Sequence[float]) -> Iterator[Any]:
    # Its blend asks for the rank, even in one process.
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    blend = [str(source.folder / "data") for source in sources], list(weights)
    num_rows = sum(source.num_rows for source in sources)
    dataset = load_megatron.dataset_of(blend, num_rows, sources[0].row_tokens, sources[0].folder / "cache")
    numbers = [range(n * ROWS, n * ROWS + ROWS) for n in range(len(dataset) // ROWS)]
    while True:
        for batch in torch.utils.data.DataLoader(dataset, batch_sampler=numbers):
            yield batch["tokens"]
