"""Reused memory for blocks of tokens: a block returns to the pool only when nothing refers to it any more.

Fresh memory costs page faults, a quarter of the time of a gather. Every view that a user may hold (an array, a slice
of it, a tensor over it) holds a reference to the block's owner, so the owner's reference count says when it is free.
"""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

__all__ = ["ALIGNMENT", "BlockPool"]

ALIGNMENT = 64
_UNUSED_COUNT = 3
"""References to an owner that nobody uses: the pool's list, the loop variable, and getrefcount's own argument."""


class BlockPool:
    """int64 blocks, 64-byte aligned. One owner array per block stays here; users get views."""

    def __init__(self) -> None:
        self._owners: list[NDArray[np.int64]] = []
        self._next = 0

    def take(self, rows: int, width: int) -> NDArray[np.int64]:
        """A block that nobody else holds. Its content is arbitrary."""
        size = rows * width
        count = len(self._owners)
        for step in range(min(count, 4)):  # a trainer holds one or two batches; whoever keeps many gets fresh memory
            at = (self._next + step) % count
            owner = self._owners[at]
            if len(owner) >= size and sys.getrefcount(owner) == _UNUSED_COUNT:
                self._next = (at + 1) % count
                return owner[:size].reshape(rows, width)
        owner = _aligned(size)
        if count < 4:
            self._owners.append(owner)
        else:
            at = self._next % count
            self._owners[at] = owner  # the one it replaces lives as long as somebody holds it
            self._next = (at + 1) % count
        return owner[:size].reshape(rows, width)


def _aligned(size: int) -> NDArray[np.int64]:
    raw = np.empty(size + ALIGNMENT // 8, np.int64)
    skip = (-raw.ctypes.data % ALIGNMENT) // 8
    # An array that owns nothing, straight over the buffer: NumPy makes it the base of every view of a view, so that its
    # own reference count is the count of all that is held. (A slice would not do: views skip it and hold its base.)
    return np.frombuffer(raw.data, np.int64, count=size, offset=skip * 8)
