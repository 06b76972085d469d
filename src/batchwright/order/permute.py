"""Shuffle n numbers without a list of them. A keyed bijection of [0, n) is computed for each index, both ways.

It is a Feistel network over pairs (left, right) with left < a, right < b and a * b just above n. An image outside
[0, n) is mapped again; this happens to about one index in sqrt(n). The cost of an index does not depend on n. Up to
4,096 numbers, a small table of sorted keyed hashes is used, because a network over few pairs does not look random.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from math import isqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from batchwright.base.seeds import U64, key_of, mix64, scale_to

__all__ = ["permutation"]

_ROUNDS = 6
_LARGEST_TABLE = 4096
_LARGEST = 1 << 62


@lru_cache(maxsize=2048)
def permutation(n: int, *names: str | int) -> Permutation:
    """The permutation of [0, n) that these names key. Cheap, and remembered.

    >>> shuffled = permutation(10, 7, "web", 0)
    >>> sorted(shuffled.at(range(10)).tolist()) == list(range(10))
    True
    >>> shuffled.inverse(shuffled.at([3, 4])).tolist()
    [3, 4]
    """
    return Permutation(n, key_of("permute", *names))


class Network(NamedTuple):
    """The parameters of a Feistel network: numbers for one network, or arrays with a network for each index."""

    n: U64 | np.uint64
    a: U64 | np.uint64
    b: U64 | np.uint64
    keys: Sequence[U64 | np.uint64]


class Permutation:
    """A bijection of [0, n), fixed by (n, key)."""

    def __init__(self, n: int, key: int) -> None:
        if not 0 < n <= _LARGEST:
            raise ValueError(f"a permutation has 1 to 2^62 elements, got {n}")
        self.n = n
        self.table: NDArray[np.int16] | None = None
        """The image of each index, if n is small."""
        if n <= _LARGEST_TABLE:
            noise = mix64(np.arange(n, dtype=np.uint64), np.uint64(key))
            self.table = np.argsort(noise, kind="stable").astype(np.int16)
            return
        a = isqrt(n - 1) + 1
        b = -(-n // a)
        keys = mix64(np.arange(1, _ROUNDS + 1, dtype=np.uint64), np.uint64(key))
        self.network: Network = Network(np.uint64(n), np.uint64(a), np.uint64(b), list(keys))

    @cached_property
    def _inverse_table(self) -> NDArray[np.int16]:
        assert self.table is not None
        return np.argsort(self.table, kind="stable").astype(np.int16)

    def at(self, index: ArrayLike) -> NDArray[np.int64]:
        """The image of each index."""
        if self.table is not None:
            looked_up: NDArray[np.int64] = self.table[np.asarray(index)].astype(np.int64)
            return looked_up
        return _walk(np.asarray(index, dtype=np.uint64), self.network, _forward)

    def inverse(self, image: ArrayLike) -> NDArray[np.int64]:
        """The index of each image."""
        if self.table is not None:
            looked_up: NDArray[np.int64] = self._inverse_table[np.asarray(image)].astype(np.int64)
            return looked_up
        return _walk(np.asarray(image, dtype=np.uint64), self.network, _backward)


class Shuffles:
    """The permutations of many sources and epochs, applied in one pass.

    The parameters of the last few epochs of every source are kept as arrays. Each index takes the parameters of its
    own permutation from them. 256 permutations then cost about as much as one. Safe to use from several threads.

    >>> def made(source, epoch):
    ...     return permutation([10, 10**6][source], 7, ["web", "code"][source], epoch)
    >>> Shuffles(2).at(np.array([1, 0, 1]), np.array([0, 0, 3]), np.array([0, 3, 5]), made).tolist()
    [800495, 6, 354339]
    """

    EPOCHS = 4
    """Epochs of a source that are remembered: each has a slot, by its number modulo this."""
    TABLE_ITEMS = 1 << 25
    """Length of all tables together, at most, before they are begun anew. Memory is used as they grow."""

    def __init__(self, num_sources: int) -> None:
        self._num_sources = num_sources
        self._known = _Known.of_none(num_sources * self.EPOCHS)

    def __reduce__(self) -> tuple[type[Shuffles], tuple[int]]:
        return Shuffles, (self._num_sources,)

    def at(
        self,
        source: NDArray[np.int32],
        epoch: NDArray[np.int64],
        index: NDArray[np.int64],
        made: Callable[[int, int], Permutation],
    ) -> NDArray[np.int64]:
        """The image of each index in the permutation of its source and epoch, which `made` makes."""
        slot = source * np.int64(self.EPOCHS)
        slot += epoch % self.EPOCHS
        known = self._known
        is_known = known.epoch[slot] == epoch
        if not is_known.all():
            known = self._add(_pairs(source[~is_known], epoch[~is_known]), made)
            is_known = known.epoch[slot] == epoch
        if is_known.all():
            return known.at(slot, index)
        # Rows of many epochs of a small source, or of permutations that new tables have replaced.
        image = np.empty(len(index), np.int64)
        here = np.flatnonzero(is_known)
        image[here] = known.at(slot[here], index[here])
        for s, e in _pairs(source[~is_known], epoch[~is_known]):
            mine = np.flatnonzero((source == s) & (epoch == e))
            image[mine] = made(s, e).at(index[mine])
        return image

    def _add(self, pairs: list[tuple[int, int]], made: Callable[[int, int], Permutation]) -> _Known:
        permutations = [(s * self.EPOCHS + e % self.EPOCHS, e, made(s, e)) for s, e in pairs]
        with _adding:
            known = self._known
            num_items = sum(each.n for _, _, each in permutations if each.table is not None)
            if known.used + num_items > len(known.tables):
                room = max(min(len(known.epoch) * _LARGEST_TABLE, self.TABLE_ITEMS), num_items)
                known = _Known.of_none(len(known.epoch))._replace(tables=np.empty(room, np.int16))
            self._known = known.with_more(permutations)
            return self._known


_adding = threading.Lock()
"""One for all: it is held for microseconds, and objects without a lock of their own can go to other processes."""


def _pairs(source: NDArray[np.int32], epoch: NDArray[np.int64]) -> list[tuple[int, int]]:
    return sorted(set(zip(source.tolist(), epoch.tolist(), strict=True)))


class _Known(NamedTuple):
    """Permutations by slot, as arrays. Only the unused end of `tables` ever changes."""

    epoch: NDArray[np.int64]
    """The epoch whose permutation a slot has; -1 for none."""
    start: NDArray[np.int64]
    """The first index of a slot's table in `tables`; -1 for a network."""
    networks: U64
    """[n, a, b and the keys, slot]."""
    tables: NDArray[np.int16]
    used: int
    num_networks: int

    @classmethod
    def of_none(cls, num_slots: int) -> _Known:
        none = np.full(num_slots, -1, np.int64)
        return cls(none, none, np.zeros((3 + _ROUNDS, num_slots), np.uint64), np.empty(0, np.int16), 0, 0)

    def with_more(self, permutations: list[tuple[int, int, Permutation]]) -> _Known:
        epochs, starts, networks, used = self.epoch.copy(), self.start.copy(), self.networks, self.used
        if any(each.table is None for _, _, each in permutations):
            networks = networks.copy()
        for slot, epoch, each in permutations:
            epochs[slot] = epoch
            if each.table is None:
                n, a, b, keys = each.network
                starts[slot], networks[:, slot] = -1, (n, a, b, *keys)
            else:
                self.tables[used : used + each.n] = each.table
                starts[slot], used = used, used + each.n
        num_networks = int(((epochs >= 0) & (starts < 0)).sum())
        return _Known(epochs, starts, networks, self.tables, used, num_networks)

    def at(self, slot: NDArray[np.int64], index: NDArray[np.int64]) -> NDArray[np.int64]:
        if not self.used:
            return self._by_network(slot, index)
        start = self.start[slot]
        if not self.num_networks:
            looked_up: NDArray[np.int64] = self.tables[start + index].astype(np.int64)
            return looked_up
        image = np.empty(len(index), np.int64)
        mine = np.flatnonzero(start >= 0)
        image[mine] = self.tables[start[mine] + index[mine]]
        mine = np.flatnonzero(start < 0)
        image[mine] = self._by_network(slot[mine], index[mine])
        return image

    def _by_network(self, slot: NDArray[np.int64], index: NDArray[np.int64]) -> NDArray[np.int64]:
        return _walk_many(index.astype(np.uint64), self.networks.take(slot, axis=1))


def _walk_many(x: U64, networks: U64) -> NDArray[np.int64]:
    n, a, b, *keys = networks
    y = _forward(x, Network(n, a, b, keys))
    outside = np.flatnonzero(y >= n)
    if outside.size:
        y[outside] = _walk_many(y[outside], networks[:, outside])
    return y.view(np.int64)


def _walk(x: U64, network: Network, rounds: Callable[[U64, Network], U64]) -> NDArray[np.int64]:
    """Map numbers, again and again while the result is outside of [0, n)."""
    y = rounds(x, network)
    outside = np.flatnonzero(y >= network.n)
    while outside.size:
        y[outside] = rounds(y[outside], network)
        outside = outside[y[outside] >= network.n]
    return y.view(np.int64)


def _forward(x: U64, network: Network) -> U64:
    _, a, b, keys = network
    left = x // b
    right = x - left * b
    for r in range(0, _ROUNDS, 2):
        left += scale_to(mix64(right, keys[r]), a)
        np.minimum(left, left - a, out=left)  # unsigned: left - a wraps to a huge number where left < a
        right += scale_to(mix64(left, keys[r + 1]), b)
        np.minimum(right, right - b, out=right)
    left *= b
    left += right
    return left


def _backward(y: U64, network: Network) -> U64:
    _, a, b, keys = network
    left = y // b
    right = y - left * b
    for r in range(_ROUNDS - 2, -1, -2):
        right -= scale_to(mix64(left, keys[r + 1]), b)
        np.minimum(right, right + b, out=right)  # a negative difference wrapped to a huge number
        left -= scale_to(mix64(right, keys[r]), a)
        np.minimum(left, left + a, out=left)
    left *= b
    left += right
    return left
