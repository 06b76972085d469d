"""Mix sources by weight as a lookup: a pattern of L slots in which every prefix is within one row of its share.

Shares are integers k_i / L. With n sources and s = 1 / (2n - 2), the j-th row of source i is released at slot
ceil((j - 1 + s) L / k_i) and due at (j - s) L / k_i; each slot takes the released row with the earliest due date,
ties by source order. (Taking the largest deficit instead is not enough: with 11 sources of weight 59 and 28 of
weight 1 it strays 1.57 rows.) The pattern repeats for ever; counts of occurrences give the index inside a source.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from heapq import heappop, heappush
from math import gcd, isfinite

import numpy as np
from numpy.typing import NDArray

from penstock.errors import SpecError

__all__ = ["Pattern", "build_pattern", "integer_shares"]

_FIRST_SLOTS = 1 << 16
_MOST_SLOTS = 1 << 22
_FEWEST_ROWS = 50
"""A source has at least this many slots of the pattern, so that its effective share is within 1 % of what was asked."""


def integer_shares(weights: Sequence[float], names: Sequence[str]) -> tuple[int, list[int]]:
    """Slots L, and for each source its k_i, with sum(k) == L, by largest remainder.

    >>> integer_shares([0.75, 0.25], ["web", "code"])
    (65536, [49152, 16384])
    """
    for name, weight in zip(names, weights, strict=True):
        if not isfinite(weight) or weight < 0:
            raise SpecError(f"the weight of {name!r} is {weight}", source=name, remedy="a number of 0 or more")
    total = sum(weights)
    if total <= 0:
        raise SpecError("all weights are 0", sources=", ".join(names), remedy="give at least one source a weight")
    shares = [weight / total for weight in weights]
    slots = _FIRST_SLOTS
    while min(share for share in shares if share > 0) * slots < _FEWEST_ROWS:
        slots *= 2
        if slots > _MOST_SLOTS:
            smallest = min((share, name) for share, name in zip(shares, names, strict=True) if share > 0)
            raise SpecError(
                f"the weight of {smallest[1]!r} is {smallest[0]:.3g} of the mixture, too small to be kept exactly",
                source=smallest[1],
                remedy=f"a share of at least {_FEWEST_ROWS / _MOST_SLOTS:.2g}, or 0 to leave it out",
            )
    counts = [int(share * slots) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: (counts[i] - shares[i] * slots, i))
    for i in by_remainder[: slots - sum(counts)]:
        counts[i] += 1
    return slots, counts


class Pattern:
    """Which source each slot draws, for ever. `at` and `position` are inverses of each other."""

    def __init__(self, source_of_slot: NDArray[np.int32], num_sources: int) -> None:
        self.num_slots = len(source_of_slot)
        self.source_of_slot = source_of_slot
        self.counts_per_cycle = np.bincount(source_of_slot, minlength=num_sources).astype(np.int64)
        self.slots_of = [np.flatnonzero(source_of_slot == i) for i in range(num_sources)]
        self.occurrence = np.empty(self.num_slots, np.int64)
        for slots in self.slots_of:
            self.occurrence[slots] = np.arange(len(slots))

    def at(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """(source, how many rows of that source came before) of each position."""
        cycle, slot = np.divmod(positions, self.num_slots)
        source = self.source_of_slot[slot]
        return source, cycle * self.counts_per_cycle[source] + self.occurrence[slot]

    def position(self, source: int, ordinals: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where the rows of a source lie, by their number inside it."""
        slots = self.slots_of[source]
        cycle, within = np.divmod(ordinals, len(slots))
        return cycle * self.num_slots + slots[within]

    def counts(self, position: int) -> list[int]:
        """Rows of each source before a position."""
        cycle, slot = divmod(position, self.num_slots)
        return [cycle * len(slots) + int(np.searchsorted(slots, slot)) for slots in self.slots_of]


@lru_cache(maxsize=16)
def build_pattern(counts: tuple[int, ...]) -> Pattern:
    """The pattern in which source i has counts[i] of sum(counts) slots.

    >>> build_pattern((3, 1)).source_of_slot.tolist()
    [0, 0, 1, 0]
    """
    common = gcd(*counts)  # shares with a common divisor repeat sooner, and in the same order
    counts = tuple(count // common for count in counts)
    slots = sum(counts)
    live = [i for i, count in enumerate(counts) if count]
    if len(live) == 1:
        return Pattern(np.full(slots, live[0], np.int32), len(counts))
    # In units of 1 / ((2n - 2) k_i) of a slot everything is an integer: row j (from 1) of source i is released at
    # ceil(((j - 1) u + 1) L / (u k_i)) and due at (j u - 1) L / (u k_i), with u = 2n - 2.
    unit = 2 * len(live) - 2
    arrivals: list[list[int]] = [[] for _ in range(slots + 1)]
    drawn = np.empty(slots, np.int32)
    for i in live:
        numbers = np.arange(counts[i], dtype=np.int64)
        divisor = unit * counts[i]
        released = -((numbers * unit + 1) * slots // -divisor)
        for slot in released.tolist():
            arrivals[slot].append(i)
    waiting: list[tuple[int, int, int]] = []  # (due date, source, row): due dates as integers, exact to compare
    issued = [0] * len(counts)
    precision = 64  # two different due dates differ by more than 2^-44 of L, so 64 bits keep them apart, and ties equal
    for slot in range(1, slots + 1):  # slot t ends the prefix of t draws
        for i in arrivals[slot]:
            issued[i] += 1
            heappush(waiting, (((issued[i] * unit - 1) << precision) // counts[i], i, issued[i]))
        drawn[slot - 1] = heappop(waiting)[1]
    return Pattern(drawn, len(counts))
