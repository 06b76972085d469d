"""penstock: plan rows over all lengths, then copy every sample to its place in padded arrays."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from penstock.assemble.pack import pack

PACKAGE = "penstock"


def pack_samples(tokens: np.ndarray, lengths: np.ndarray, capacity: int, method: str) -> dict[str, Any]:
    """With `method` "best_fit": input ids as int32, as TRL makes them.

    With "best_fit+": input ids, labels and position ids as int64, as torchtune makes them.
    """
    began = time.perf_counter()
    packing = pack(lengths, capacity, method.removesuffix("+"))
    shape, sizes = (packing.num_rows, capacity), lengths[packing.items]
    starts = (np.cumsum(lengths) - lengths)[packing.items]
    before = np.concatenate([[0], np.cumsum(sizes)])
    row_begins = before[packing.row_starts]
    used = np.diff(row_begins)
    padding_before = np.arange(packing.num_rows) * capacity - row_begins[:-1]
    places = before[:-1] + np.repeat(padding_before, np.diff(packing.row_starts))
    copies = zip(places.tolist(), starts.tolist(), sizes.tolist(), strict=True)
    if method.endswith("+"):
        ids, labels, positions = _with_labels(tokens, copies, shape, used)
        assert labels.shape == positions.shape == shape
    else:
        ids = np.zeros(shape, np.int32)
        flat = ids.reshape(-1)
        for place, start, size in copies:
            flat[place : place + size] = tokens[start : start + size]
    seconds = time.perf_counter() - began
    checksum = int(ids.sum(dtype=np.int64))
    return {"seconds": seconds, "rows": packing.num_rows, "tokens": int(lengths.sum()), "checksum": checksum}


def _with_labels(tokens: np.ndarray, copies: Any, shape: tuple[int, int], used: np.ndarray) -> list[np.ndarray]:
    ids, labels, positions = arrays = [np.empty(shape, np.int64) for _ in range(3)]
    flat_ids, flat_labels, flat_positions = (array.reshape(-1) for array in arrays)
    count = np.arange(shape[1])
    for place, start, size in copies:
        sample = tokens[start : start + size]
        flat_ids[place : place + size] = sample
        flat_labels[place : place + size] = sample
        flat_positions[place : place + size] = count[:size]
    for row, first in enumerate(used.tolist()):
        ids[row, first:] = 0
        labels[row, first:] = -100
        positions[row, first:] = count[: shape[1] - first]
    return arrays
