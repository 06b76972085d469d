"""Mixing of sources by weight as a lookup in a pattern of L slots. Every prefix is within one row of its share.

Shares are fractions k_i / L; draw.py assigns a source to each of the L slots. The pattern repeats for ever. Counts of
occurrences give the index inside a source.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from math import gcd, isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.base.errors import SpecError
from batchwright.order.draw import draw_slots, source_dtype

__all__ = ["Pattern", "build_pattern", "integer_shares"]

_FIRST_SLOTS = 1 << 16
_MOST_SLOTS = 1 << 22
_FEWEST_ROWS = 50
"""A source has at least this many slots of the pattern, so that its effective share is within 1 % of what was asked."""


def integer_shares(weights: Sequence[float], names: Sequence[str]) -> tuple[int, list[int]]:
    """The number of slots L, and k_i of each source, with sum(k) == L, by largest remainder.

    >>> integer_shares([0.75, 0.25], ["web", "code"])
    (65536, [49152, 16384])
    """
    for name, weight in zip(names, weights, strict=True):
        if not isfinite(weight) or weight < 0:
            raise SpecError(
                f"the weight of {name!r} is {weight}", parameter="weights", source=name, remedy="a number of 0 or more"
            )
    largest = max(weights, default=0.0)
    if largest <= 0:
        every = ", ".join(names)
        raise SpecError("all weights are 0", parameter="weights", sources=every, remedy="give at least one a weight")
    if largest > 1e150:  # their sum must be a number
        weights = [weight / largest for weight in weights]
    total = sum(weights)
    shares = [weight / total for weight in weights]
    smallest, name = min((share, name) for share, name in zip(shares, names, strict=True) if share > 0)
    slots = _FIRST_SLOTS
    while smallest * slots < _FEWEST_ROWS:
        slots *= 2
    if slots > _MOST_SLOTS:
        raise SpecError(
            f"the weight of {name!r} is {smallest:.3g} of the mixture, too small to be kept exactly",
            parameter="weights",
            source=name,
            remedy=f"a share of at least {_FEWEST_ROWS / _MOST_SLOTS:.2g}, or 0 to leave it out",
        )
    return slots, _by_largest_remainder(shares, slots)


def _by_largest_remainder(shares: Sequence[float], slots: int) -> list[int]:
    counts = [int(share * slots) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: (counts[i] - shares[i] * slots, i))
    for i in by_remainder[: slots - sum(counts)]:
        counts[i] += 1
    return counts


class Pattern:
    """The source of each slot, repeated for ever. `at` and `position` are inverses of each other.

    A run whose weights change holds many patterns. So only `source_of_slot`, a byte or two for each slot, exists from
    the start. The tables of `at` and `position` (4 bytes for each slot) are made on first use.
    """

    def __init__(self, source_of_slot: NDArray[Any], num_sources: int) -> None:
        self.num_slots: int = len(source_of_slot)
        self.source_of_slot: NDArray[Any] = source_of_slot.astype(source_dtype(num_sources), copy=False)
        self.counts_per_cycle: NDArray[np.int64] = np.bincount(source_of_slot, minlength=num_sources).astype(np.int64)

    @cached_property
    def _by_source(self) -> NDArray[np.int32]:
        """All slots, by source: first those of source 0 in order, then those of source 1, ..."""
        return np.argsort(self.source_of_slot, kind="stable").astype(np.int32)

    @cached_property
    def _first(self) -> NDArray[np.int64]:
        """The first index of each source in `_by_source`."""
        first: NDArray[np.int64] = np.cumsum(self.counts_per_cycle) - self.counts_per_cycle
        return first

    @cached_property
    def occurrence(self) -> NDArray[np.int32]:
        """The number of earlier slots of the same source, for each slot."""
        by_source = np.argsort(self.source_of_slot, kind="stable")
        occurrence = np.empty(self.num_slots, np.int32)
        occurrence[by_source] = np.arange(self.num_slots) - np.repeat(self._first, self.counts_per_cycle)
        return occurrence

    def slots_of(self, source: int) -> NDArray[np.int32]:
        """The slots that draw a source."""
        first = int(self._first[source])
        return self._by_source[first : first + int(self.counts_per_cycle[source])]

    def at(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """(source, number of earlier rows of that source) of each position."""
        cycle, slot = np.divmod(positions, self.num_slots)
        source = self.source_of_slot[slot].astype(np.int32)
        cycle *= self.counts_per_cycle[source]
        cycle += self.occurrence[slot]
        return source, cycle

    def position(self, source: int, ordinals: NDArray[np.int64]) -> NDArray[np.int64]:
        """The positions of the rows of a source, by their number inside it."""
        slots = self.slots_of(source)
        cycle, within = np.divmod(ordinals, len(slots))
        cycle *= self.num_slots
        cycle += slots[within]
        return cycle

    def counts(self, position: int) -> list[int]:
        """Rows of each source before a position."""
        cycle, slot = divmod(position, self.num_slots)
        counts: list[int] = (
            cycle * self.counts_per_cycle
            + np.bincount(self.source_of_slot[:slot], minlength=len(self.counts_per_cycle))
        ).tolist()
        return counts


def build_pattern(counts: tuple[int, ...], num_slots: int | None = None) -> Pattern:
    """The pattern in which source i has counts[i] of sum(counts) slots. Only `num_slots` of them are needed.

    >>> build_pattern((3, 1)).source_of_slot.tolist()
    [0, 0, 1, 0]
    """
    common = gcd(*counts)  # shares with a common divisor repeat sooner, and in the same order
    counts = tuple(count // common for count in counts)
    return _built(counts, min(num_slots or sum(counts), sum(counts)))


@lru_cache(maxsize=128)
def _built(counts: tuple[int, ...], num_slots: int) -> Pattern:
    return Pattern(draw_slots(counts, num_slots), len(counts))
