"""Mixing of sources: by weight, as a pattern of L slots, or whole sources in proportion to their sizes.

By weight, shares are fractions k_i / L, and the pattern repeats for ever. In every prefix each source is within one row
of its share. With n sources and s = 1 / (2n - 2), the j-th row of source i is released at slot
ceil((j - 1 + s) L / k_i) and due at (j - s) L / k_i; each slot takes the released row with the earliest due date, ties
by source order. (Taking the largest deficit instead is not enough: with 11 sources of weight 59 and 28 of weight 1 it
strays 1.57 rows.)

Without weights, an epoch has every row of every source once. Row j of a source with n rows has the time
(2j + 1) * (2^62 // n); the epoch is all rows by (time, source). Times are 64-bit integers. Both directions have a
closed form, so any position is found at once without materialised tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from heapq import heappop, heappush, heappushpop
from math import gcd, isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.base.errors import SpecError

__all__ = ["draw_slots"]

_FIRST_SLOTS = 1 << 16
_MOST_SLOTS = 1 << 22
_FEWEST_ROWS = 50
"""A source has at least this many slots of the pattern, so that its effective share is within 1 % of what was asked."""
_WORD_BITS = 64
_SLOTS_AT_ONCE = 1 << 18
"""Slots whose rows are Python numbers at the same time: bounds the memory of the queue."""
_END = 1 << 62
_STRETCH = 1 << 16
"""Positions that are merged at once, at most: bounds the memory of `Natural.at`."""
_WIDE_GAP = 4096
"""Positions between two others from which on merging them costs more than finding the second one anew."""


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
        self.source_of_slot: NDArray[Any] = source_of_slot.astype(_source_dtype(num_sources), copy=False)
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

    def at(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """(source, number of earlier rows of that source) of each position."""
        cycle, slot = np.divmod(positions, self.num_slots)
        source = self.source_of_slot[slot].astype(np.int32)
        cycle *= self.counts_per_cycle[source]
        cycle += self.occurrence[slot]
        return source, cycle

    def position(self, source: int, ordinals: NDArray[np.int64]) -> NDArray[np.int64]:
        """The positions of the rows of a source, by their number inside it."""
        first, count = self._first[source], self.counts_per_cycle[source]
        slots = self._by_source[first : first + count]
        cycle, within = np.divmod(ordinals, count)
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


# The slots of a pattern


def draw_slots(counts: tuple[int, ...], num_slots: int | None = None) -> NDArray[Any]:
    """The source that each of sum(counts) slots draws. Source i has counts[i] slots. `num_slots` limits the result.

    >>> draw_slots((3, 1)).tolist(), draw_slots((3, 1), 2).tolist()
    ([0, 0, 1, 0], [0, 0])
    """
    dtype = _source_dtype(len(counts))
    slots = sum(counts)
    if num_slots is not None:
        slots = min(num_slots, slots)
    live = [i for i, count in enumerate(counts) if count]
    if len(live) == 1:
        return np.full(slots, live[0], dtype)
    released, rows = _rows(counts, live, slots)
    drawn = _draw_in_turn(slots, len(live), released, rows)
    sources: NDArray[Any] = np.array(live, dtype)[drawn]
    return sources


def _source_dtype(num_sources: int) -> np.dtype[Any]:
    """The smallest type for the numbers of this many sources."""
    return np.min_scalar_type(max(num_sources - 1, 0))


def _rows(counts: tuple[int, ...], live: list[int], last: int) -> tuple[NDArray[np.int32], NDArray[Any]]:
    """(slot of release, (due date, place in `live`) as one integer) of each row up to a slot.

    With u = 2n - 2, row j (from 1) of source i is released at ceil(((j - 1) u + 1) L / (u k_i)) and due at
    (j u - 1) L / (u k_i). Due dates are compared as (j u - 1) / k_i, in binary. Two different values differ by at
    least 1 / (k_i k_j), which is at least (2 / L)^2. So 2 log2(L) - 2 bits after the point keep different values
    apart, and equal ones equal.
    """
    slots, unit, source_bits = sum(counts), 2 * len(live) - 2, _source_bits(len(live))
    log_slots = (slots - 1).bit_length()
    bits = 2 * log_slots - 2
    fits = max(log_slots, unit.bit_length() + source_bits) + bits <= _WORD_BITS
    needed = [min(counts[i], last * counts[i] // slots + 2) for i in live]  # at most one row more than its share
    released = np.empty(sum(needed), np.int32)
    rows = np.empty(sum(needed), np.uint64 if fits else object)
    first = 0
    for place, i in enumerate(live):
        count = counts[i]
        mine, number = slice(first, first + needed[place]), np.arange(needed[place], dtype=np.int64)
        released[mine] = -((number * unit + 1) * slots // -(unit * count))
        due = (number + 1) * unit - 1
        if fits:
            whole = due // count
            rest = (due - whole * count).astype(np.uint64)
            exact = (whole.astype(np.uint64) << np.uint64(bits)) + (rest << np.uint64(bits)) // np.uint64(count)
            rows[mine] = exact << np.uint64(source_bits) | np.uint64(place)
        else:  # Python's integers are large enough
            rows[mine] = [((number << bits) // count) << source_bits | place for number in due.tolist()]
        first += needed[place]
    return released, rows


def _source_bits(num_sources: int) -> int:
    return (num_sources - 1).bit_length()


def _draw_in_turn(slots: int, num_sources: int, released: NDArray[np.int32], rows: NDArray[Any]) -> NDArray[Any]:
    """Draw the smallest waiting row of each slot, slot by slot."""
    in_order = np.argsort(released, kind="stable")
    arrivals = np.bincount(released, minlength=slots + 1)
    ends = np.cumsum(arrivals)
    drawn, waiting = np.empty(slots, np.int32), list[int]()
    for first in range(0, slots, _SLOTS_AT_ONCE):
        last = min(first + _SLOTS_AT_ONCE, slots)
        row = iter(rows[in_order[ends[first] : ends[last]]].tolist()).__next__
        out: list[int] = []
        add = out.append
        for num_arrivals in arrivals[first + 1 : last + 1].tolist():  # slot t ends the prefix of t draws: from 1 on
            if num_arrivals == 1:  # most slots have one
                add(heappushpop(waiting, row()))
                continue
            for _ in range(num_arrivals):
                heappush(waiting, row())
            add(heappop(waiting))
        drawn[first:last] = np.array(out, rows.dtype) & ((1 << _source_bits(num_sources)) - 1)
    return drawn


# Without weights


class Natural:
    """The interleaving of sources with these sizes, epoch after epoch, with the methods of a Pattern."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.num_rows: int = sum(sizes)
        self.counts_per_cycle: NDArray[np.int64] = np.array(sizes, np.int64)
        self._step = [_END // max(n, 1) * (n > 0) for n in sizes]
        self._live = np.flatnonzero(sizes)
        self._size = self.counts_per_cycle[self._live]
        self._times = np.array(self._step, np.int64)[self._live]
        self._rows_per_time = sum(0.5 / step for step in self._step if step)

    def at(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """(source, number of earlier rows of that source) of each position."""
        if len(self.counts_per_cycle) == 1:
            return np.zeros(len(positions), np.int32), positions
        epoch, within = np.divmod(positions, self.num_rows)
        source, ordinal = self._at(within)
        epoch *= self.counts_per_cycle[source]
        ordinal += epoch
        return source, ordinal

    def _at(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """(source, number inside its epoch) of each position in [0, num_rows)."""
        order = np.argsort(positions, kind="stable")
        ordered = positions[order]
        source = np.empty(len(positions), np.int32)
        ordinal = np.empty(len(positions), np.int64)
        # Nearby positions are merged together, but never more than one stretch of the stream.
        stretch = ordered // _STRETCH
        cuts = np.flatnonzero((np.diff(ordered) > _WIDE_GAP) | (np.diff(stretch) > 0)) + 1
        for run in np.split(np.arange(len(ordered)), cuts):
            if len(run):
                first, last = int(ordered[run[0]]), int(ordered[run[-1]])
                begun, merged_source, merged_ordinal = self._merge(first, last + 1)
                picked = ordered[run] - int(begun.sum())
                source[order[run]] = merged_source[picked]
                ordinal[order[run]] = merged_ordinal[picked]
        return source, ordinal

    def position(self, source: int, ordinals: NDArray[np.int64]) -> NDArray[np.int64]:
        """The positions of the rows of a source, by their number inside it."""
        epoch, within = np.divmod(ordinals, self.counts_per_cycle[source])
        time = (2 * within + 1) * self._step[source]
        result: NDArray[np.int64] = epoch * self.num_rows + within
        for other, step in enumerate(self._step):
            if other != source and step:
                before = time if other < source else time - 1  # equal times go by source order
                result += np.minimum((before // step + 1) // 2, self.counts_per_cycle[other])
        return result

    def counts(self, position: int) -> list[int]:
        """Rows of each source before a position."""
        if len(self.counts_per_cycle) == 1:
            return [position]
        epoch, within = divmod(position, self.num_rows)
        begun, source, _ = self._merge(within, within)
        counts = epoch * self.counts_per_cycle
        counts[self._live] += begun
        counts += np.bincount(source[: within - int(begun.sum())], minlength=len(counts))
        found: list[int] = counts.tolist()
        return found

    def _merge(self, first: int, last: int) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int64]]:
        """Rows of each live source by a time before position `first`; then all rows from there to `last`, or past it.

        At any time a source has given its share within one row, so the times around a position are nearly known.
        """
        margin = len(self._live) + 1
        while int((begins := self._until(first - margin)).sum()) > first:
            margin *= 2
        while int((ends := self._until(last + margin)).sum()) < last:
            margin *= 2
        lengths = ends - begins
        which = np.repeat(np.arange(len(lengths)), lengths)
        ordinal = np.arange(len(which)) + (begins - (np.cumsum(lengths) - lengths))[which]
        time = (2 * ordinal + 1) * self._times[which]
        order = np.argsort(time, kind="stable")  # stable: equal times keep source order
        return begins, self._live[which[order]].astype(np.int32), ordinal[order]

    def _until(self, position: int) -> NDArray[np.int64]:
        """Rows of each live source by the time at which about `position` rows have come."""
        if position <= 0:
            return np.zeros_like(self._size)
        if position >= self.num_rows:
            return self._size
        time = min(int(position / self._rows_per_time), 2 * _END - 1)
        return np.minimum((time // self._times + 1) // 2, self._size)
