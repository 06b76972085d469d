"""Sources of the slots of a mixture. In every prefix each source is within one row of its share.

With n sources and s = 1 / (2n - 2), the j-th row of source i is released at slot ceil((j - 1 + s) L / k_i) and due at
(j - s) L / k_i; each slot takes the released row with the earliest due date, ties by source order. (Taking the largest
deficit instead is not enough: with 11 sources of weight 59 and 28 of weight 1 it strays 1.57 rows.)
"""

from __future__ import annotations

from heapq import heappop, heappush, heappushpop
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["draw_slots", "source_dtype"]

_WORD_BITS = 64
_SLOTS_AT_ONCE = 1 << 18
"""Slots whose rows are Python numbers at the same time: bounds the memory of the queue."""


def draw_slots(counts: tuple[int, ...], num_slots: int | None = None) -> NDArray[Any]:
    """The source that each of sum(counts) slots draws. Source i has counts[i] slots. `num_slots` limits the result.

    >>> draw_slots((3, 1)).tolist(), draw_slots((3, 1), 2).tolist()
    ([0, 0, 1, 0], [0, 0])
    """
    dtype = source_dtype(len(counts))
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


def source_dtype(num_sources: int) -> np.dtype[Any]:
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
