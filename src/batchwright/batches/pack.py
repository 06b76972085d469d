"""Choose which whole samples share a row: a plan over all lengths at once, and nothing is cut.

    >>> packing = pack(np.array([5, 4, 3, 2]), capacity=8)
    >>> [packing.row(number).tolist() for number in range(packing.num_rows)]
    [[0, 2], [1, 3]]

Methods (seconds and fill of each are measured by `benchmarks/packing.py`):

    best_fit     longest first, each into the row with the least room that still takes it. The default.
    first_fit    longest first, each into the first row that takes it.
    greedy       in the order given; a new row when the next does not fit. Keeps neighbours together, wastes more.

Rows are numbered in the order in which they were opened. Items inside a row stand as they were placed: by decreasing
length in best_fit and first_fit, as given in greedy. Equal lengths go by item number. Rows with equal room are taken by
best_fit in the order in which they came to have it. All is integer arithmetic without chance, so that every machine
plans the same rows: positions that running jobs saved point into them. A change of any of this is a new PACK_VERSION.

best_fit and first_fit work on the histogram of lengths. Equal items follow each other, so a row that takes one takes as
many as it has room for, and rows with equal room take equally many: one step fills a whole range of rows. The number of
steps goes with distinct lengths and rooms, not with items. first_fit also looks at all ranges of open rows once for
every distinct length: seconds, where 100,000 items are all of different lengths.
"""

from __future__ import annotations

from array import array
from collections import deque
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["pack"]

PACK_VERSION = 1
PACKINGS = ("best_fit", "first_fit", "greedy")


class Packing(NamedTuple):
    """The items of each row, as two arrays: every item once."""

    items: NDArray[np.int64]
    """Item numbers, row after row."""
    row_starts: NDArray[np.int64]
    """The first item of each row in `items`, and the end of the last row: num_rows + 1 numbers."""

    @property
    def num_rows(self) -> int:
        return len(self.row_starts) - 1

    def row(self, number: int) -> NDArray[np.int64]:
        """The items of one row."""
        return self.items[self.row_starts[number] : self.row_starts[number + 1]]


class _Fills(NamedTuple):
    """Steps of a packing: each puts `per_row` of the next items into each row of a range, and together they use all."""

    first_rows: NDArray[np.int64]
    num_rows: NDArray[np.int64]
    per_row: NDArray[np.int64]


def pack(lengths: NDArray[np.integer], capacity: int, method: str = "best_fit") -> Packing:
    """Rows of items whose lengths sum to `capacity` at most. No items give no rows.

    `plan_rows` has cut or dropped longer items, and left out empty ones.
    """
    items = lengths.astype(np.int64)
    if not len(items):
        return Packing(np.empty(0, np.int64), np.zeros(1, np.int64))
    assert 1 <= items.min() <= items.max() <= capacity, "an item that no row can have"
    capacity = min(capacity, int(items.sum()))  # a wider row holds no more, and all numbers fit into 64 bits
    if method == "greedy":
        return Packing(np.arange(len(items), dtype=np.int64), _greedy_starts(items, capacity))
    longest_first = _stable_order(capacity - items)
    distinct, counts = _histogram(items[longest_first])
    fill = {"best_fit": _best_fit, "first_fit": _first_fit}[method]
    fills = fill(distinct, counts, capacity)
    row_of = _row_of_each(fills)
    row_starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(row_of))])
    return Packing(longest_first[_stable_order(row_of)], row_starts)


def _stable_order(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """np.argsort(keys, kind="stable") for keys of 0 or more, but faster: NumPy sorts numbers of 16 bits by radix."""
    order = np.argsort((keys & 0xFFFF).astype(np.uint16), kind="stable")
    for shift in range(16, int(keys.max()).bit_length(), 16):
        digits = ((keys >> shift) & 0xFFFF).astype(np.uint16)
        order = order[np.argsort(digits[order], kind="stable")]
    return order


def _histogram(decreasing: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(the distinct lengths, how many there are of each), longest first."""
    starts = np.flatnonzero(np.diff(decreasing, prepend=-1))
    return decreasing[starts], np.diff(starts, append=len(decreasing))


def _row_of_each(fills: _Fills) -> NDArray[np.int64]:
    """The row of every item, in the order in which the steps used the items."""
    ends = np.cumsum(fills.num_rows)
    rows = np.arange(ends[-1]) + np.repeat(fills.first_rows - (ends - fills.num_rows), fills.num_rows)
    return np.repeat(rows, np.repeat(fills.per_row, fills.num_rows))


def _best_fit(distinct: NDArray[np.int64], counts: NDArray[np.int64], capacity: int) -> _Fills:
    """Best-fit decreasing.

    Rows are grouped by the room that they have left. The rooms that fit the current length are a stack with the
    smallest on top, and a length fills rows from the top. A smaller length first moves rooms from `too_small` to it.
    """
    steps = array("q")
    rows_with: dict[int, deque[tuple[int, int]]] = {}  # room -> ranges of rows, oldest first
    fitting: list[int] = []
    too_small: list[int] = []  # negated: a heap with the largest room on top
    num_rows, smallest = 0, int(distinct[-1])

    def set_aside(room: int, start: int, stop: int) -> None:
        """Keep full rows for smaller lengths, unless no length fits."""
        if room < smallest:
            return
        if room not in rows_with:
            rows_with[room] = deque()
            heappush(too_small, -room)
        _append(rows_with[room], start, stop)

    for length, count in zip(distinct.tolist(), counts.tolist(), strict=True):
        while too_small and -too_small[0] >= length:
            fitting.append(-heappop(too_small))
        while count:
            is_open = bool(fitting)
            if is_open:
                room = fitting[-1]
                per_row = room // length
                start, stop = rows_with[room].popleft()
            else:
                room, per_row = capacity, capacity // length
                start, num_rows = num_rows, num_rows + (count + per_row - 1) // per_row
                stop = num_rows
            full = min(stop - start, count // per_row)
            if full:
                steps.extend((start, full, per_row))
                count -= full * per_row
                set_aside(room - per_row * length, start, start + full)
                start += full
            in_last = 0
            if start < stop:  # this row takes what is left, if anything
                in_last, count = count, 0
            if in_last:
                steps.extend((start, 1, in_last))
                start += 1
            if is_open:
                if start < stop:
                    rows_with[room].appendleft((start, stop))
                if not rows_with[room]:
                    del rows_with[room]
                    fitting.pop()
            if in_last:
                fitting.append(room - in_last * length)
                rows_with[fitting[-1]] = deque([(start - 1, start)])
    return _fills(steps)


def _append(ranges: deque[tuple[int, int]], start: int, stop: int) -> None:
    """Add a range of rows. It is joined with the last range if the two are neighbours."""
    if ranges and ranges[-1][1] == start:
        start, _ = ranges.pop()
    ranges.append((start, stop))


def _first_fit(distinct: NDArray[np.int64], counts: NDArray[np.int64], capacity: int) -> _Fills:
    """First-fit decreasing.

    Neighbouring rows with equal room form a run. Each length visits the runs once, from the first row on, and fills
    each row as far as it can.
    """
    steps = array("q")
    runs = np.zeros((3, 64), np.int64)  # first row, number of rows, room; unused columns have no room
    num_runs, num_rows, smallest = 0, 0, int(distinct[-1])
    for length, count in zip(distinct.tolist(), counts.tolist(), strict=True):
        fits = np.flatnonzero(runs[2, :num_runs] >= length)[:count]  # each takes at least one
        first_rows, sizes, rooms = runs[:, fits]
        per_row = rooms // length
        taken = np.cumsum(sizes * per_row)
        num_full = int(np.searchsorted(taken, count, side="right"))  # runs that take all they can
        if num_full:
            steps.frombytes(np.stack([first_rows[:num_full], sizes[:num_full], per_row[:num_full]], axis=1).tobytes())
            runs[2, fits[:num_full]] -= per_row[:num_full] * length
            count -= int(taken[num_full - 1])
        if not count:
            continue
        if num_full < len(fits):
            at, run = int(fits[num_full]), runs[:, fits[num_full]].tolist()
        else:
            at, run = num_runs, [num_rows, -(-count // (capacity // length)), capacity]
            num_runs, num_rows = num_runs + 1, num_rows + run[1]
        pieces = _fill_part(run, length, count, steps)
        more = len(pieces) - 1
        if more:
            runs[:, at + 1 + more : num_runs + more] = runs[:, at + 1 : num_runs]
        runs[:, at : at + 1 + more] = np.array(pieces).T
        num_runs += more
        if num_runs + 3 > runs.shape[1]:  # one length adds three at most
            still_open = runs[:, runs[2] >= smallest]
            num_runs = still_open.shape[1]
            runs = np.pad(still_open, ((0, 0), (0, num_runs + 64)))
    return _fills(steps)


def _fill_part(run: list[int], length: int, count: int, steps: array[int]) -> list[tuple[int, int, int]]:
    """Put `count` items into the first rows of a run, which has room for them. Returns the runs that it splits into."""
    start, size, room = run
    per_row = room // length
    full, in_last = divmod(count, per_row)
    used = full + (in_last > 0)
    if full:
        steps.extend((start, full, per_row))
    if in_last:
        steps.extend((start + full, 1, in_last))
    pieces = [
        (start, full, room - per_row * length),
        (start + full, used - full, room - in_last * length),
        (start + used, size - used, room),
    ]
    return [piece for piece in pieces if piece[1]]


def _fills(steps: array[int]) -> _Fills:
    return _Fills(*np.frombuffer(steps, np.int64).reshape(-1, 3).T)


def _greedy_starts(lengths: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """The first items of rows that are filled in order, and the end of the last row."""
    ends = np.cumsum(lengths)
    # For every item: the first item of the next row, if a row began here. The rows are one walk along these.
    following = np.searchsorted(ends, ends - lengths + capacity, side="right").data
    starts, at = array("q", [0]), 0
    while at < len(lengths):
        at = following[at]
        starts.append(at)
    return np.array(starts, np.int64)
