"""penstock: plan rows over all lengths, then gather them some at a time into padded arrays."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from penstock.assemble.pack import pack

PACKAGE = "penstock"

_ROWS_AT_ONCE = 64


def pack_samples(tokens: np.ndarray, lengths: np.ndarray, capacity: int, method: str) -> dict[str, Any]:
    """`method` is one of `pack`, and "+" at its end asks for labels and position ids too, as torchtune makes them."""
    began = time.perf_counter()
    borders = np.concatenate([[0], np.cumsum(lengths)])
    packing = pack(lengths, capacity, method.removesuffix("+"))
    row_starts, num_rows = packing.row_starts, packing.num_rows
    ids = np.zeros((num_rows, capacity), np.int64)
    labels, positions = (np.empty_like(ids), np.empty_like(ids)) if method.endswith("+") else (None, None)
    for row in range(0, num_rows, _ROWS_AT_ONCE):
        starts = row_starts[row : row + _ROWS_AT_ONCE + 1]
        items = packing.items[starts[0] : starts[-1]]
        sizes = lengths[items]
        ends = np.cumsum(sizes)
        begins = ends - sizes
        count = np.arange(ends[-1])
        used = np.diff(np.concatenate([[0], ends])[starts - starts[0]])
        is_used = np.arange(capacity) < used[:, None]
        here = slice(row, row + len(used))
        got = tokens[count + np.repeat(borders[items] - begins, sizes)]
        ids[here][is_used] = got
        if labels is not None and positions is not None:
            labels[here] = -100
            labels[here][is_used] = got
            positions[here] = np.arange(capacity)
            positions[here][is_used] = count - np.repeat(begins, sizes)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "rows": num_rows, "tokens": int(lengths.sum()), "checksum": int(ids.sum())}
