"""Shuffle n numbers without a list of them: a keyed bijection of [0, n) that is computed per index, both ways.

A Feistel network over pairs (left, right) with left < a, right < b and a * b just above n, so that the rare image
outside [0, n) is walked on: about one index in sqrt(n). Any index costs the same, whatever n is. Up to 4,096 a
small table of sorted keyed hashes is used instead, because a network over so few pairs does not look random.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import isqrt

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.seeds import U64, key_of, mix64, scale_to

__all__ = ["Permutation", "permutation"]

_ROUNDS = 6
_LARGEST_TABLE = 4096
_LARGEST = 1 << 62


@lru_cache(maxsize=256)
def permutation(n: int, *names: str | int) -> Permutation:
    """The permutation of [0, n) that these names key. Cheap, and remembered.

    >>> shuffled = permutation(10, 7, "web", 0)
    >>> sorted(shuffled.at(range(10)).tolist()) == list(range(10))
    True
    >>> shuffled.inverse(shuffled.at([3, 4])).tolist()
    [3, 4]
    """
    return Permutation(n, key_of("permute", *names))


class Permutation:
    """A bijection of [0, n), fixed by (n, key)."""

    def __init__(self, n: int, key: int) -> None:
        if not 0 < n <= _LARGEST:
            raise ValueError(f"a permutation has 1 to 2^62 elements, got {n}")
        self.n = n
        if n <= _LARGEST_TABLE:
            noise = mix64(np.arange(n, dtype=np.uint64), np.uint64(key))
            self._table: NDArray[np.int64] | None = np.argsort(noise, kind="stable").astype(np.int64)
            self._inverse_table: NDArray[np.int64] = np.argsort(self._table, kind="stable").astype(np.int64)
            return
        self._table = None
        a = isqrt(n - 1) + 1
        b = -(-n // a)
        self._n, self._a, self._b = np.uint64(n), np.uint64(a), np.uint64(b)
        keys = mix64(np.arange(1, _ROUNDS + 1, dtype=np.uint64), np.uint64(key))
        self._keys = [np.uint64(k) for k in keys]

    def at(self, index: ArrayLike) -> NDArray[np.int64]:
        """Where each index goes."""
        if self._table is not None:
            looked_up: NDArray[np.int64] = self._table[np.asarray(index)]
            return looked_up
        return self._walk(np.asarray(index, dtype=np.uint64), self._forward)

    def inverse(self, image: ArrayLike) -> NDArray[np.int64]:
        """The index that goes to each image."""
        if self._table is not None:
            looked_up: NDArray[np.int64] = self._inverse_table[np.asarray(image)]
            return looked_up
        return self._walk(np.asarray(image, dtype=np.uint64), self._backward)

    def _walk(self, x: U64, once: Callable[[U64], U64]) -> NDArray[np.int64]:
        y = once(x)
        outside = np.flatnonzero(y >= self._n)
        while outside.size:
            y[outside] = once(y[outside])
            outside = outside[y[outside] >= self._n]
        result: NDArray[np.int64] = y.view(np.int64)
        return result

    def _forward(self, x: U64) -> U64:
        a, b = self._a, self._b
        left = x // b
        right = x - left * b
        for r in range(0, _ROUNDS, 2):
            left += scale_to(mix64(right, self._keys[r]), a)
            np.minimum(left, left - a, out=left)  # unsigned: left - a wraps to a huge number where left < a
            right += scale_to(mix64(left, self._keys[r + 1]), b)
            np.minimum(right, right - b, out=right)
        left *= b
        left += right
        return left

    def _backward(self, y: U64) -> U64:
        a, b = self._a, self._b
        left = y // b
        right = y - left * b
        for r in range(_ROUNDS - 2, -1, -2):
            right -= scale_to(mix64(left, self._keys[r + 1]), b)
            np.minimum(right, right + b, out=right)  # a negative difference wrapped to a huge number
            left -= scale_to(mix64(right, self._keys[r]), a)
            np.minimum(left, left + a, out=left)
        left *= b
        left += right
        return left
