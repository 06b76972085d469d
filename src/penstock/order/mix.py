"""Mix sources by weight as a lookup: a pattern of L slots in which every prefix is within one row of its share.

Shares are integers k_i / L. With n sources and s = 1 / (2n - 2), the j-th row of source i is released at slot
ceil((j - 1 + s) L / k_i) and due at (j - s) L / k_i; each slot takes the released row with the earliest due date,
ties by source order. (Taking the largest deficit instead is not enough: with 11 sources of weight 59 and 28 of
weight 1 it strays 1.57 rows.) The pattern repeats for ever; counts of occurrences give the index inside a source.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from heapq import heappop, heappush, heappushpop
from math import gcd, isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import SpecError
from penstock.order.kept import kept_pattern

__all__ = ["Pattern", "build_pattern", "integer_shares"]

_FIRST_SLOTS = 1 << 16
_MOST_SLOTS = 1 << 22
_FEWEST_ROWS = 50
"""A source has at least this many slots of the pattern, so that its effective share is within 1 % of what was asked."""
_SLOTS_AT_ONCE = 1 << 18
"""Slots whose rows are Python numbers at the same time: bounds the memory of building to some 100 MB."""
_WORD_BITS = 64
_WORTH_KEEPING = 1 << 18
"""Patterns from this many slots on are kept on disk: building one takes 0.1 s or more, reading it a millisecond."""


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
    """Which source each slot draws, for ever. `at` and `position` are inverses of each other.

    A run whose weights change holds many of these: only `source_of_slot` is there from the start, a byte or two each
    slot, and the tables that `at` and `position` look into (4 bytes each slot) are made when first used.
    """

    def __init__(self, source_of_slot: NDArray[Any], num_sources: int) -> None:
        self.num_slots = len(source_of_slot)
        self.source_of_slot = source_of_slot.astype(_smallest_dtype(num_sources), copy=False)
        self.counts_per_cycle = np.bincount(source_of_slot, minlength=num_sources).astype(np.int64)

    @cached_property
    def _by_source(self) -> NDArray[np.int32]:
        """All slots: first those of source 0 in order, then those of source 1, ..."""
        return np.argsort(self.source_of_slot, kind="stable").astype(np.int32)

    @cached_property
    def _first(self) -> NDArray[np.int64]:
        """Where in `_by_source` each source begins."""
        first: NDArray[np.int64] = np.cumsum(self.counts_per_cycle) - self.counts_per_cycle
        return first

    @cached_property
    def occurrence(self) -> NDArray[np.int32]:
        """How many slots of the same source come before each slot."""
        by_source = np.argsort(self.source_of_slot, kind="stable")
        occurrence = np.empty(self.num_slots, np.int32)
        occurrence[by_source] = np.arange(self.num_slots) - np.repeat(self._first, self.counts_per_cycle)
        return occurrence

    def slots_of(self, source: int) -> NDArray[np.int32]:
        """The slots that draw a source."""
        first = int(self._first[source])
        return self._by_source[first : first + int(self.counts_per_cycle[source])]

    def at(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """(source, how many rows of that source came before) of each position."""
        cycle, slot = np.divmod(positions, self.num_slots)
        source = self.source_of_slot[slot].astype(np.int32)
        cycle *= self.counts_per_cycle[source]
        cycle += self.occurrence[slot]
        return source, cycle

    def position(self, source: int, ordinals: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where the rows of a source lie, by their number inside it."""
        slots = self.slots_of(source)
        cycle, within = np.divmod(ordinals, len(slots))
        positions: NDArray[np.int64] = cycle * self.num_slots + slots[within]
        return positions

    def counts(self, position: int) -> list[int]:
        """Rows of each source before a position."""
        cycle, slot = divmod(position, self.num_slots)
        counts: list[int] = (
            cycle * self.counts_per_cycle
            + np.bincount(self.source_of_slot[:slot], minlength=len(self.counts_per_cycle))
        ).tolist()
        return counts


@lru_cache(maxsize=128)
def build_pattern(counts: tuple[int, ...]) -> Pattern:
    """The pattern in which source i has counts[i] of sum(counts) slots.

    >>> build_pattern((3, 1)).source_of_slot.tolist()
    [0, 0, 1, 0]
    """
    common = gcd(*counts)  # shares with a common divisor repeat sooner, and in the same order
    counts = tuple(count // common for count in counts)
    dtype = _smallest_dtype(len(counts))
    if sum(counts) < _WORTH_KEEPING or max(counts) == sum(counts):
        return Pattern(draw_slots(counts), len(counts))
    return Pattern(kept_pattern(counts, dtype, draw_slots), len(counts))


def draw_slots(counts: tuple[int, ...]) -> NDArray[Any]:
    """The source that each of sum(counts) slots draws."""
    slots, dtype = sum(counts), _smallest_dtype(len(counts))
    live = [i for i, count in enumerate(counts) if count]
    if len(live) == 1:
        return np.full(slots, live[0], dtype)
    # A row is one integer, (due date, source): of those that wait, the smallest is drawn.
    source_bits = len(counts).bit_length()
    released, rows = _rows(counts, live, source_bits)
    in_order = np.argsort(released, kind="stable")
    arrivals = np.bincount(released, minlength=slots + 1)
    ends = np.cumsum(arrivals)
    drawn, waiting = np.empty(slots, dtype), list[int]()
    for first in range(0, slots, _SLOTS_AT_ONCE):
        last = min(first + _SLOTS_AT_ONCE, slots)
        row = iter(rows[in_order[ends[first] : ends[last]]].tolist()).__next__
        out = [  # most slots have one arrival, or none, and are a single call
            heappushpop(waiting, row()) if num == 1 else heappop(waiting) if num == 0 else _draw(waiting, row, num)
            for num in arrivals[first + 1 : last + 1].tolist()  # slot t ends the prefix of t draws: they count from 1
        ]
        drawn[first:last] = np.array(out, rows.dtype) & ((1 << source_bits) - 1)
    return drawn


def _draw(waiting: list[int], row: Callable[[], int], num_arrivals: int) -> int:
    for _ in range(num_arrivals - 1):
        heappush(waiting, row())
    return heappushpop(waiting, row())


def _rows(counts: tuple[int, ...], live: list[int], source_bits: int) -> tuple[NDArray[np.int32], NDArray[Any]]:
    """(slot from which it may be drawn, (due date, source) as one integer) of every row, source by source.

    With u = 2n - 2, row j (from 1) of source i is released at ceil(((j - 1) u + 1) L / (u k_i)) and due at
    (j u - 1) L / (u k_i): compared as (j u - 1) / k_i, in binary. Two of these that differ do so by 1 / (k_i k_j) or
    more, which is at least (2 / L)^2, so 2 log2(L) - 2 bits after the point keep them apart, and equal ones equal.
    """
    slots, unit = sum(counts), 2 * len(live) - 2
    log_slots = (slots - 1).bit_length()
    bits = 2 * log_slots - 2
    fits = max(log_slots, unit.bit_length() + source_bits) + bits <= _WORD_BITS
    released = np.empty(slots, np.int32)
    rows = np.empty(slots, np.uint64 if fits else object)
    first = 0
    for i in live:
        count = counts[i]
        mine, number = slice(first, first + count), np.arange(count, dtype=np.int64)
        released[mine] = -((number * unit + 1) * slots // -(unit * count))
        due = (number + 1) * unit - 1
        if fits:
            whole = due // count
            rest = (due - whole * count).astype(np.uint64)
            exact = (whole.astype(np.uint64) << np.uint64(bits)) + (rest << np.uint64(bits)) // np.uint64(count)
            rows[mine] = exact << np.uint64(source_bits) | np.uint64(i)
        else:  # Python's integers have as many bits as it takes
            rows[mine] = [((number << bits) // count) << source_bits | i for number in due.tolist()]
        first += count
    return released, rows


def _smallest_dtype(num_sources: int) -> np.dtype[Any]:
    return np.min_scalar_type(max(num_sources - 1, 0))
