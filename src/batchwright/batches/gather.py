"""One gather for windows anywhere in memory, in any number of mapped files.

NumPy gathers rows of one array. All mapped shards share one address space, so a strided view that begins at the lowest
window and steps by one token is such an array. Its rows are windows, by address. Memory outside the windows is never
touched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.columns.addresses import Memory

__all__ = ["fresh"]

Allocate = Callable[[int, int], NDArray[np.int64]]
"""(rows, width) -> uninitialised memory, fresh or reused."""

_LONG_RUN = 32
"""The length in tokens from which a separate copy is cheaper than an index for each token."""


def fresh(rows: int, width: int) -> NDArray[np.int64]:
    return np.empty((rows, width), np.int64)


def floats(allocate: Allocate, rows: int, width: int) -> NDArray[np.float32]:
    """Memory for float32, from a function that allocates int64."""
    return allocate(rows, (width + 1) // 2).view(np.float32)[:, :width]


def windows_at(
    addresses: NDArray[np.int64], length: int, dtype: np.dtype[Any]
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """An array whose rows are windows of `length` tokens, and the numbers of its rows at these addresses.

    The caller guarantees that each window is inside one live, aligned buffer of `dtype`.

    >>> tokens = np.arange(10, dtype=np.uint16)
    >>> windows, rows = windows_at(tokens.ctypes.data + 2 * np.array([6, 1]), 3, tokens.dtype)
    >>> windows[rows].tolist()
    [[6, 7, 8], [1, 2, 3]]
    """
    lowest = int(addresses.min())
    rows = (addresses - lowest) // dtype.itemsize
    return np.asarray(Memory(lowest, (int(rows.max()) + 1, length), dtype)), rows


def gather_windows(addresses: NDArray[np.int64], dtype: np.dtype[Any], out: NDArray[np.int64]) -> None:
    """Copy out.shape[1] tokens from each address to a row of `out`, widened. The conditions of `windows_at` hold."""
    windows, rows = windows_at(addresses, out.shape[1], dtype)
    np.copyto(out, windows[rows])


def copy_runs(
    addresses: NDArray[np.int64],
    lengths: NDArray[np.int64],
    dtype: np.dtype[Any],
    out: NDArray[np.int64],
    starts: NDArray[np.int64],
) -> None:
    """Copy runs of different lengths: lengths[i] tokens from addresses[i] to out[starts[i]:], widened.

    As in `windows_at`, the caller guarantees that the addresses stay mapped.

    >>> tokens, out = np.arange(10, dtype=np.uint16), np.zeros(6, np.int64)
    >>> copy_runs(tokens.ctypes.data + 2 * np.array([7, 2]), np.array([3, 2]), tokens.dtype, out, np.array([0, 4]))
    >>> out.tolist()
    [7, 8, 9, 0, 2, 3]
    """
    if not len(addresses):
        return
    lowest = int(addresses.min())
    places = (addresses - lowest) // dtype.itemsize
    table = np.asarray(Memory(lowest, (int((places + lengths).max()),), dtype))
    total = int(lengths.sum())
    if total >= _LONG_RUN * len(lengths):
        for place, to, length in zip(places.tolist(), starts.tolist(), lengths.tolist(), strict=True):
            out[to : to + length] = table[place : place + length]
        return
    run = np.arange(total)
    before = np.cumsum(lengths) - lengths
    out[run + np.repeat(starts - before, lengths)] = table[run + np.repeat(places - before, lengths)]
