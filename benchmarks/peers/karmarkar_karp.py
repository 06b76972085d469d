"""Divide numbers into k sets of equal count by largest differencing (Karmarkar and Karp 1982; Michiels et al. 2003)."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace
from typing import Any

__all__ = ["karmarkar_karp"]


def karmarkar_karp(numbers: Sequence[int], k: int) -> list[list[int]]:
    """The places of the numbers in each set, ascending.

    Each k numbers that are next to each other in sorted order are one division. The two divisions whose sets differ
    the most are joined, the largest set of one with the smallest of the other, until there is one.

    >>> karmarkar_karp([8, 1, 7, 2], 2)
    [[0, 1], [2, 3]]
    """
    assert len(numbers) % k == 0
    order = sorted(range(len(numbers)), key=numbers.__getitem__)
    heap: list[Any] = []
    for first in range(0, len(order), k):
        places = order[first : first + k]
        heap.append((numbers[places[0]] - numbers[places[-1]], first, [(numbers[place], place) for place in places]))
    heapify(heap)  # the largest difference first
    while len(heap) > 1:
        _, _, first_sets = heappop(heap)
        _, number, second_sets = heap[0]
        # A set is (sum, what it was joined of): lists would be copied at every join. Ascending by sum.
        joined = [(a[0] + b[0], (a[1], b[1])) for a, b in zip(first_sets, reversed(second_sets), strict=True)]
        joined.sort(key=_sum)
        heapreplace(heap, (joined[0][0] - joined[-1][0], number, joined))
    return [sorted(_places(tree)) for _, tree in heap[0][2]] if heap else [[] for _ in range(k)]


def _sum(one: tuple[int, Any]) -> int:
    return one[0]


def _places(tree: Any) -> list[int]:
    found, waiting = [], [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, tuple):
            waiting.extend(node)
        else:
            found.append(node)
    return found
