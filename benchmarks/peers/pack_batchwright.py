"""batchwright: plan rows over all lengths, then make every batch of them as a loader does, with all of its fields."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from batchwright.base.memory import BlockPool
from batchwright.batches.batch import Block, add_sample_fields
from batchwright.batches.gather import fresh
from batchwright.batches.row_index import RowSpec, plan_rows
from batchwright.batches.samples import SampleRows
from batchwright.batches.settings import Fields
from benchmarks.peers.source import ROWS

PACKAGE = "batchwright"


class _Samples:
    """Samples end to end in memory, where a store would have them mapped."""

    name = split = fingerprint = "samples"

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens, self.dtype = tokens, tokens.dtype

    def addresses(self, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        return (
            self.tokens.ctypes.data + self.dtype.itemsize * starts,
            np.ones(len(starts), bool),
            [self.tokens],
        )


def pack_samples(tokens: np.ndarray, lengths: np.ndarray, capacity: int, method: str) -> dict[str, Any]:
    """`method` is that of `pack`, and what to leave out: "best_fit", "best_fit without segment_ids".

    With " kept" after it all batches are kept in memory, as the peers do; otherwise a batch is summed, and its memory
    is used for a later one.
    """
    began = time.perf_counter()
    is_kept = method.endswith(" kept")
    method, _, left_out = method.removesuffix(" kept").partition(" without ")
    fields = Fields(segment_ids=left_out != "segment_ids", position_ids=True, cu_seqlens=True)
    borders = np.concatenate([[0], np.cumsum(lengths)])
    spec = RowSpec(capacity, method, "drop")
    rows = SampleRows(_Samples(tokens), plan_rows(borders, spec), spec, borders)
    allocate = fresh if is_kept else BlockPool(7).take
    kept, checksum = [], 0
    for first in range(0, rows.num_rows, ROWS):
        index = np.arange(first, min(first + ROWS, rows.num_rows))
        laid = rows.lay(
            index, np.full(len(index), capacity), allocate(len(index), capacity + 1), pad=0, allocate=allocate
        )
        block = Block(laid.tokens, np.zeros(len(index), np.int32), index, None)
        add_sample_fields(block, laid, fields, allocate)
        if is_kept:
            kept.append(block)
        else:
            checksum += int(block.tokens.sum())
    seconds = time.perf_counter() - began
    checksum += sum(int(block.tokens.sum()) for block in kept)
    return {"seconds": seconds, "rows": rows.num_rows, "tokens": int(lengths.sum()), "checksum": checksum}
