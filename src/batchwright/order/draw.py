"""Which source each slot of a mixture draws, so that every prefix is within one row of its share.

With n sources and s = 1 / (2n - 2), the j-th row of source i is released at slot ceil((j - 1 + s) L / k_i) and due at
(j - s) L / k_i; each slot takes the released row with the earliest due date, ties by source order. (Taking the largest
deficit instead is not enough: with 11 sources of weight 59 and 28 of weight 1 it strays 1.57 rows.)

A queue draws slot after slot. Long patterns are drawn in a thousand places at once, each from a guess of the rows that
wait there; where each place ends as the next one was guessed to begin, every guess was right.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush, heappushpop
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["draw_slots", "source_dtype"]

_WORD_BITS = 64
_NOTHING = np.uint64(2**64 - 1)
_SLOTS_AT_ONCE = 1 << 18
"""Slots whose rows are Python numbers at the same time: bounds the memory of the queue."""
_LONG = 1 << 19
"""Slots from which on a pattern is drawn in many places at once."""
_PART_SLOTS = 2048
"""Slots of each of these places, and how many before it its guess is made: mistakes are forgotten in fewer."""
_LEAD_SLOTS = 512
_MOST_AT_ONCE = 512
"""Sources up to which that is faster than the queue: each slot looks at all of them."""


def draw_slots(counts: tuple[int, ...], num_slots: int | None = None) -> NDArray[Any]:
    """The source that each of sum(counts) slots draws; source i is in counts[i] of them. Or only the first of them.

    >>> draw_slots((3, 1)).tolist(), draw_slots((3, 1), 2).tolist()
    ([0, 0, 1, 0], [0, 0])
    """
    dtype = source_dtype(len(counts))
    slots = sum(counts) if num_slots is None else min(num_slots, sum(counts))
    live = [i for i, count in enumerate(counts) if count]
    if len(live) == 1:
        return np.full(slots, live[0], dtype)
    released, rows = _rows(counts, live, slots)
    drawn = None
    if (
        slots == sum(counts)
        and slots >= _LONG
        and slots % _PART_SLOTS == 0
        and len(live) <= _MOST_AT_ONCE
        and rows.dtype != object
    ):
        drawn = _draw_in_parts(np.array([counts[i] for i in live]), released, rows)
    if drawn is None:
        drawn = _draw_in_turn(slots, len(live), released, rows)
    sources: NDArray[Any] = np.array(live, dtype)[drawn]
    return sources


def source_dtype(num_sources: int) -> np.dtype[Any]:
    """The smallest type that has the numbers of this many sources."""
    return np.min_scalar_type(max(num_sources - 1, 0))


def _rows(counts: tuple[int, ...], live: list[int], last: int) -> tuple[NDArray[np.int32], NDArray[Any]]:
    """(slot from which it may be drawn, (due date, place in `live`) as one integer) of the rows up to a slot.

    With u = 2n - 2, row j (from 1) of source i is released at ceil(((j - 1) u + 1) L / (u k_i)) and due at
    (j u - 1) L / (u k_i): compared as (j u - 1) / k_i, in binary. Two of these that differ do so by 1 / (k_i k_j) or
    more, which is at least (2 / L)^2, so 2 log2(L) - 2 bits after the point keep them apart, and equal ones equal.
    """
    slots, unit, source_bits = sum(counts), 2 * len(live) - 2, _source_bits(len(live))
    log_slots = (slots - 1).bit_length()
    bits = 2 * log_slots - 2
    fits = max(log_slots, unit.bit_length() + source_bits) + bits <= _WORD_BITS
    needed = [min(counts[i], last * counts[i] // slots + 2) for i in live]  # a row more than its share, at most
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
        else:  # Python's integers have as many bits as it takes
            rows[mine] = [((number << bits) // count) << source_bits | place for number in due.tolist()]
        first += needed[place]
    return released, rows


def _source_bits(num_sources: int) -> int:
    return (num_sources - 1).bit_length()


def _draw_in_turn(slots: int, num_sources: int, released: NDArray[np.int32], rows: NDArray[Any]) -> NDArray[Any]:
    """Slot after slot: of the rows that wait, the smallest is drawn."""
    in_order = np.argsort(released, kind="stable")
    arrivals = np.bincount(released, minlength=slots + 1)
    ends = np.cumsum(arrivals)
    drawn, waiting = np.empty(slots, np.int32), list[int]()
    for first in range(0, slots, _SLOTS_AT_ONCE):
        last = min(first + _SLOTS_AT_ONCE, slots)
        row = iter(rows[in_order[ends[first] : ends[last]]].tolist()).__next__
        out = [  # most slots have one arrival, or none, and are a single call
            heappushpop(waiting, row()) if num == 1 else heappop(waiting) if num == 0 else _draw(waiting, row, num)
            for num in arrivals[first + 1 : last + 1].tolist()  # slot t ends the prefix of t draws: they count from 1
        ]
        drawn[first:last] = np.array(out, rows.dtype) & ((1 << _source_bits(num_sources)) - 1)
    return drawn


def _draw(waiting: list[int], row: Callable[[], int], num_arrivals: int) -> int:
    for _ in range(num_arrivals - 1):
        heappush(waiting, row())
    return heappushpop(waiting, row())


def _draw_in_parts(
    counts: NDArray[np.int64], released: NDArray[np.int32], rows: NDArray[np.uint64]
) -> NDArray[Any] | None:
    """The same, a slot of every part at a time; None if some part did not begin with the rows that waited there."""
    num_sources, num_parts = len(counts), len(rows) // _PART_SLOTS
    part = (released - 1) >> np.int32(_PART_SLOTS.bit_length() - 1)  # a power of two: no division
    step = ((released - 1) & np.int32(_PART_SLOTS - 1)).astype(np.uint16)
    by_step = np.argsort(step, kind="stable")  # of 16 bits: NumPy's radix sort
    part *= num_sources
    part += np.repeat(np.arange(num_sources, dtype=np.int32), counts)
    place, row = part[by_step], rows[by_step]
    ends = np.concatenate([[0], np.cumsum(np.bincount(step, minlength=_PART_SLOTS))]).tolist()

    waiting = np.full((num_parts, num_sources), _NOTHING)  # [part, source]: its row that waits
    before = np.arange(1, num_parts) * _PART_SLOTS - _LEAD_SLOTS
    waiting[1:] = _guess_waiting(before, counts, rows)
    for number in range(_PART_SLOTS - _LEAD_SLOTS, _PART_SLOTS):  # every part but the first: the end of the one before
        arrived = slice(ends[number], ends[number + 1])
        inside = place[arrived] < waiting[1:].size
        _draw_slot(waiting[1:], place[arrived][inside], row[arrived][inside])
    begun = waiting.copy()
    drawn = np.empty((_PART_SLOTS, num_parts), source_dtype(num_sources))
    for number in range(_PART_SLOTS):
        arrived = slice(ends[number], ends[number + 1])
        taken = _draw_slot(waiting, place[arrived], row[arrived])
        if taken is None:
            return None
        drawn[number] = taken
    # The first part began with nothing, which is right; so if each ends as the next began, all of them are.
    return drawn.T.reshape(-1) if np.array_equal(waiting[:-1], begun[1:]) else None


def _draw_slot(
    waiting: NDArray[np.uint64], place: NDArray[np.int32], row: NDArray[np.uint64]
) -> NDArray[np.intp] | None:
    """Rows arrive at places of `waiting`, and every part draws one; None if a source had two that wait after that.

    A row that arrives where one still waits is due later: the other one must be what this slot draws.
    """
    flat = waiting.reshape(-1)
    earlier = flat[place]
    late = np.flatnonzero(earlier != _NOTHING)
    flat[place] = row
    flat[place[late]] = earlier[late]
    taken: NDArray[np.intp] = waiting.argmin(axis=1)
    flat[taken + np.arange(len(waiting)) * waiting.shape[1]] = _NOTHING
    if late.size:
        is_free = bool((flat[place[late]] == _NOTHING).all())
        flat[place[late]] = row[late]
        return taken if is_free else None
    return taken


def _guess_waiting(
    before: NDArray[np.int64], counts: NDArray[np.int64], rows: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """[slot, source]: the row that waits after so many slots, if those that are due first were drawn first."""
    slots, unit = len(rows), 2 * len(counts) - 2
    time = before[:, None] * unit * counts
    num_released = np.clip((time // slots - 1) // unit + 1, 0, counts)
    newest = rows[np.cumsum(counts) - counts + np.maximum(num_released, 1) - 1]
    may_wait = (num_released > 0) & ((num_released * unit - 1) * slots > time)  # not due yet
    newest = np.where(may_wait, newest, np.uint64(0))
    num_waiting = num_released.sum(axis=1) - before
    by_due = np.argsort(newest, axis=1)
    waits = np.empty(newest.shape, bool)
    np.put_along_axis(waits, by_due, np.arange(len(counts)) >= len(counts) - num_waiting[:, None], axis=1)
    return np.where(waits & may_wait, newest, _NOTHING)
