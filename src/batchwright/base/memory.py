"""Reused memory for blocks of tokens: a block returns to the pool once nothing refers to it.

Fresh memory costs page faults, a quarter of the time of a gather. Every view that a user may hold (an array, a slice
of it, a memoryview, a tensor over it) holds a reference to the block's owner, so the owner's reference count says when
it is free. Code that has only an address, such as a copy to a device in progress, must hold the array too.
"""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

__all__ = ["ALIGNMENT", "BlockPool"]

ALIGNMENT = 64
_MOST_OWNERS = 4
"""A trainer holds one or two batches. One that keeps many gets fresh memory."""


class BlockPool:
    """int64 blocks, 64-byte aligned. One owner array per block stays here; users get views."""

    def __init__(self, arrays_per_block: int = 1) -> None:
        """`arrays_per_block`: how many are taken for the rows of a batch."""
        self._most_owners = _MOST_OWNERS * arrays_per_block
        self._owners: list[NDArray[np.int64]] = []
        self._next = 0

    def take(self, rows: int, width: int) -> NDArray[np.int64]:
        """A block without other users. Its content is arbitrary."""
        size = rows * width
        count = len(self._owners)
        for step in range(count):
            at = (self._next + step) % count
            owner = self._owners[at]
            # Two threads that look at one owner both see the other's `owner`, so neither takes it.
            if len(owner) >= size and sys.getrefcount(owner) == _UNUSED_COUNT:
                self._next = at + 1
                return owner[:size].reshape(rows, width)
        owner = _aligned(size)
        if count < self._most_owners:
            self._owners.append(owner)
        else:
            at = self._next % count
            self._owners[at] = owner  # the one it replaces lives as long as somebody holds it
            self._next = at + 1
        return owner[:size].reshape(rows, width)


def _aligned(size: int) -> NDArray[np.int64]:
    raw = np.empty(size + ALIGNMENT // 8, np.int64)
    skip = (-raw.ctypes.data % ALIGNMENT) // 8
    # An array that owns nothing, straight over the buffer: NumPy makes it the base of every view of a view, so that its
    # own reference count is the count of all that is held. (A slice would not do: views skip it and hold its base.)
    return np.frombuffer(raw.data, np.int64, count=size, offset=skip * 8)


def _count_when_unused() -> int:
    """What getrefcount says of an owner that only the list and a local variable hold.

    Measured, not written down: it differs between interpreters (3.14 does not count some references on the stack), and
    one too many would hand out memory that is in use. Without a global lock counts are not exact: nothing is reused.
    """
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return -1
    owners = [_aligned(1)]
    for at in range(1):
        owner = owners[at]
        return sys.getrefcount(owner)
    raise AssertionError


_UNUSED_COUNT = _count_when_unused()
