"""Shuffle inside windows of a few blocks. Rows near in the stream are then in few places on disk, known beforehand.

This is the shuffle scope "pool". The rows of an epoch are cut into blocks of consecutive rows. Blocks are permuted and
grouped into windows, and rows are permuted inside their window. The place of a position is computed by arithmetic. Only
the last block can be short, so the borders after its permuted place are shifted by its missing rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from batchwright.order.permute import Permutation, permutation

__all__ = ["blocks_for"]

_BLOCKS_IN_WINDOW = 16
"""Blocks that a window is made of: each is 1/16 of it, and comes from its own place in the epoch."""


def blocks_for(pool_rows: int) -> tuple[int, int]:
    """(rows of a block, blocks of a window) for windows of `pool_rows` rows, rounded up to whole blocks.

    >>> blocks_for(262_144), blocks_for(100), blocks_for(3)
    ((16384, 16), (7, 16), (1, 3))
    """
    window_blocks = min(pool_rows, _BLOCKS_IN_WINDOW)
    return -(-pool_rows // window_blocks), window_blocks


def groups(keys: NDArray[np.int64]) -> Iterator[tuple[int, slice | NDArray[np.intp]]]:
    """Each key of an array, with its places. Arrays of consecutive positions nearly always have one key.

    >>> [(key, where.tolist()) for key, where in groups(np.array([7, 3, 7]))]
    [(3, [1]), (7, [0, 2])]
    """
    if len(keys) and (keys == keys[0]).all():
        yield int(keys[0]), slice(None)
        return
    for key in np.unique(keys).tolist():
        yield key, np.flatnonzero(keys == key)


@lru_cache(maxsize=256)
def window_shuffle(n: int, block_rows: int, window_blocks: int, *names: str | int) -> WindowShuffle:
    """The shuffle of [0, n) in windows that these names key. Cheap, and remembered.

    >>> shuffled = window_shuffle(10, 2, 2, 7, "web", 0)
    >>> sorted(shuffled.at(range(10)).tolist()) == list(range(10))
    True
    >>> shuffled.blocks(0)                             # window 0 has the rows of these blocks, and no others
    [(0, 2), (8, 10)]
    >>> shuffled.at(range(4)).tolist()
    [0, 9, 1, 8]
    """
    return WindowShuffle(n, block_rows, window_blocks, *names)


class Windows(ABC):
    """Positions in windows, each permuted under its own key."""

    n: int
    _names: tuple[str | int, ...]

    @abstractmethod
    def window_start(self, window: int) -> int:
        """The first position of a window; n for the window after the last one."""

    @abstractmethod
    def window_of(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The window of each position."""

    @abstractmethod
    def blocks(self, window: int) -> list[tuple[int, int]]:
        """Rows [first, last) of each piece of a block in a window, in the order of the rows."""

    @abstractmethod
    def _rows_in(self, window: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows at some places of a window, before it is shuffled."""

    @abstractmethod
    def _windows_of(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(window, place in it before it is shuffled) of some rows."""

    def at(self, index: ArrayLike) -> NDArray[np.int64]:
        """The row at each position."""
        positions = np.asarray(index, dtype=np.int64)
        rows = np.empty_like(positions)
        for window, mine in groups(self.window_of(positions)):
            within = positions[mine] - self.window_start(window)
            rows[mine] = self._rows_in(window, self._shuffle(window).at(within))
        return rows

    def inverse(self, image: ArrayLike) -> NDArray[np.int64]:
        """The position of each row."""
        windows, places = self._windows_of(np.asarray(image, dtype=np.int64))
        positions = np.empty_like(places)
        for window, mine in groups(windows):
            positions[mine] = self.window_start(window) + self._shuffle(window).inverse(places[mine])
        return positions

    def _shuffle(self, window: int) -> Permutation:
        return permutation(self.window_start(window + 1) - self.window_start(window), *self._names, "window", window)


class WindowShuffle(Windows):
    """A bijection of [0, n), fixed by (n, block_rows, window_blocks, names)."""

    def __init__(self, n: int, block_rows: int, window_blocks: int, *names: str | int) -> None:
        if min(block_rows, window_blocks) < 1:
            raise ValueError(f"a window has at least one block of one row, got {window_blocks} of {block_rows}")
        self.n = n
        self._names = names
        self.block_rows: int = min(block_rows, max(n, 1))
        self._num_blocks = -(-n // self.block_rows)
        self._order = permutation(self._num_blocks, *names, "blocks")
        self.window_blocks: int = min(window_blocks, self._num_blocks)
        self.window_rows: int = self.window_blocks * self.block_rows
        self.num_windows: int = -(-self._num_blocks // self.window_blocks)
        self._lacking = self._num_blocks * self.block_rows - n
        """Rows that the last block lacks."""
        self._short_slot = int(self._order.inverse([self._num_blocks - 1])[0])
        """The slot of the last block among the permuted blocks."""
        self._short_window = self._short_slot // self.window_blocks

    def window_start(self, window: int) -> int:
        if window >= self.num_windows:
            return self.n
        return window * self.window_rows - self._lacking * (window > self._short_window)

    def window_of(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        after_short = positions >= self.window_start(self._short_window + 1)
        windows: NDArray[np.int64] = (positions + self._lacking * after_short) // self.window_rows
        return windows

    def blocks(self, window: int) -> list[tuple[int, int]]:
        firsts = sorted(self._block_starts(window).tolist())
        return [(first, min(first + self.block_rows, self.n)) for first in firsts]

    def rows_at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows at some places of all permuted blocks laid end to end, before windows are shuffled."""
        short_stop = (self._short_slot + 1) * self.block_rows - self._lacking
        padded = places + self._lacking * (places >= short_stop)
        slot = padded // self.block_rows
        rows: NDArray[np.int64] = self._order.at(slot) * self.block_rows + padded - slot * self.block_rows
        return rows

    def places_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The inverse of `rows_at`."""
        block = rows // self.block_rows
        slot = self._order.inverse(block)
        places: NDArray[np.int64] = slot * self.block_rows + rows - block * self.block_rows
        return places - self._lacking * (slot > self._short_slot)

    def _windows_of(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        places = self.places_of(rows)
        windows = self.window_of(places)
        starts = windows * self.window_rows - self._lacking * (windows > self._short_window)
        return windows, places - starts

    def _rows_in(self, window: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        if window == self._short_window and self._lacking:
            short_end = (self._short_slot - window * self.window_blocks + 1) * self.block_rows - self._lacking
            places = places + self._lacking * (places >= short_end)
        block = places // self.block_rows
        rows: NDArray[np.int64] = self._block_starts(window)[block] + places - block * self.block_rows
        return rows

    def _block_starts(self, window: int) -> NDArray[np.int64]:
        """The first row of each block of a window, in the order of the permuted blocks."""
        first = window * self.window_blocks
        return self._order.at(np.arange(first, min(first + self.window_blocks, self._num_blocks))) * self.block_rows
