"""penstock: plan rows over all lengths, then copy every sample to its place in padded arrays, batch after batch."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from benchmarks.peers.source import ROWS
from penstock.assemble.pack import Packing, pack

PACKAGE = "penstock"


def pack_samples(tokens: np.ndarray, lengths: np.ndarray, capacity: int, method: str) -> dict[str, Any]:
    """`method` is that of `pack`; input ids are int32 then, as TRL makes them.

    With "+" after it: input ids, labels and position ids as int64, as torchtune makes them. With " kept" at the end:
    all rows are kept in memory, as both do; else a batch is summed, and the next is made in its place.
    """
    began = time.perf_counter()
    is_kept, has_labels = method.endswith(" kept"), "+" in method
    packing = pack(lengths, capacity, method.removesuffix(" kept").removesuffix("+"))
    starts, sizes = (np.cumsum(lengths) - lengths)[packing.items], lengths[packing.items]
    shape = (packing.num_rows if is_kept else ROWS, capacity)
    arrays = [np.empty(shape, np.int64 if has_labels else np.int32) for _ in range(3 if has_labels else 1)]
    checksum = 0
    for row in range(0, packing.num_rows, ROWS):
        num_rows = min(ROWS, packing.num_rows - row)
        batch = [array[row : row + num_rows] if is_kept else array[:num_rows] for array in arrays]
        _fill(batch, tokens, packing, row, starts, sizes)
        checksum += 0 if is_kept else int(batch[0].sum(dtype=np.int64))
    seconds = time.perf_counter() - began
    checksum = int(arrays[0].sum(dtype=np.int64)) if is_kept else checksum
    return {"seconds": seconds, "rows": packing.num_rows, "tokens": int(lengths.sum()), "checksum": checksum}


def _fill(
    batch: list[np.ndarray], tokens: np.ndarray, packing: Packing, row: int, starts: np.ndarray, sizes: np.ndarray
) -> None:
    """Rows from `row` on, sample after sample."""
    ids, labels, positions = batch if len(batch) == 3 else (batch[0], None, None)
    capacity = ids.shape[1]
    count = np.arange(capacity)
    borders = packing.row_starts[row : row + len(ids) + 1].tolist()
    all_starts, all_sizes = (part[borders[0] : borders[-1]].tolist() for part in (starts, sizes))
    for number in range(len(ids)):
        at, here = 0, slice(borders[number] - borders[0], borders[number + 1] - borders[0])
        for start, size in zip(all_starts[here], all_sizes[here], strict=True):
            ids[number, at : at + size] = tokens[start : start + size]
            if positions is not None:
                positions[number, at : at + size] = count[:size]
            at += size
        ids[number, at:] = 0
        if labels is not None and positions is not None:
            labels[number] = ids[number]
            labels[number, at:] = -100
            positions[number, at:] = count[: capacity - at]
