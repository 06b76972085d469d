"""torchtune: PackedDataset, in order, into padded tensors of tokens, labels and positions."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from torchtune.datasets import PackedDataset

PACKAGE = "torchtune"


class _Samples:
    """Samples as the lists that it takes. The time it takes to make these lists is kept, to be taken off."""

    def __init__(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        self.tokens, self.borders, self.seconds = tokens, np.concatenate([[0], np.cumsum(lengths)]), 0.0

    def __len__(self) -> int:
        return len(self.borders) - 1

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        if index >= len(self):
            raise IndexError(index)  # it goes over samples by number until there is no more
        began = time.perf_counter()
        ids = self.tokens[self.borders[index] : self.borders[index + 1]].tolist()
        self.seconds += time.perf_counter() - began
        return {"tokens": ids, "labels": ids}


def pack_samples(tokens: np.ndarray, lengths: np.ndarray, capacity: int, method: str) -> dict[str, Any]:
    samples = _Samples(tokens, lengths)
    began = time.perf_counter()
    packed = PackedDataset(samples, max_seq_len=capacity, split_across_pack=method == "split")
    seconds = time.perf_counter() - began - samples.seconds
    checksum = sum(int(row["tokens"].sum()) for row in packed.packs)
    return {"seconds": seconds, "rows": len(packed), "tokens": int(lengths.sum()), "checksum": checksum}
