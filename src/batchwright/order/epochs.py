"""Epochs and skipped positions of a stream. Together with the batch size they decide the cuts of the stream.

A skipped position counts as consumed and is never given out. So a row has two numbers. Its *position* is used by all
code outside this stage. Its *live* number does not count skipped rows; batches are cut by live numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Epochs", "Skips"]

NEVER = 1 << 62
"""The position of a row that is never given."""


class Skips:
    """Ranges [first, stop) of skipped positions.

    >>> skips = Skips([(3, 5), (9, 10)])
    >>> [skips.position(live) for live in range(8)]
    [0, 1, 2, 5, 6, 7, 8, 10]
    >>> skips.live(3), skips.live(4), skips.live(5), skips.live(11)
    (3, 3, 3, 8)
    """

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        merged: list[tuple[int, int]] = []
        for first, stop in sorted(ranges):
            if merged and first <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
            elif first < stop:
                merged.append((first, stop))
        self.ranges: tuple[tuple[int, int], ...] = tuple(merged)
        self._first = np.array([first for first, _ in merged], np.int64)
        self._skipped = np.concatenate([[0], np.cumsum([stop - first for first, stop in merged])]).astype(np.int64)
        """Positions skipped before each range, and in all."""
        self._live_first = self._first - self._skipped[:-1]

    def __bool__(self) -> bool:
        return bool(self.ranges)

    def __contains__(self, position: int) -> bool:
        return any(first <= position < stop for first, stop in self.ranges)

    def live(self, position: int) -> int:
        """Rows before a position that are not skipped."""
        if not self.ranges:
            return position
        passed = int(np.searchsorted(self._first, position))
        if not passed:
            return position
        return max(position - int(self._skipped[passed]), int(self._live_first[passed - 1]))

    def position(self, live: int) -> int:
        """The position of a live row."""
        if not self.ranges:
            return live
        return int(self.positions(np.array([live]))[0])

    def positions(self, live: NDArray[np.int64]) -> NDArray[np.int64]:
        if not self.ranges:
            return live
        found: NDArray[np.int64] = live + self._skipped[np.searchsorted(self._live_first, live, side="right")]
        return found


@dataclass(frozen=True)
class Epochs:
    """The epochs of a stream. Their length may change on the way.

    >>> epochs = Epochs(((0, 10), (20, 15)))      # two epochs of 10 rows, then epochs of 15
    >>> [epochs.span(position) for position in (0, 19, 20, 36)]
    [(0, 0, 10), (1, 10, 20), (2, 20, 35), (3, 35, 50)]
    """

    eras: tuple[tuple[int, int | None], ...] = ((0, None),)
    """(from position, rows of each epoch from there on; None: no end). A later era begins where an epoch does."""
    limit: int | None = None
    """The stream has no rows from this position on; None: it never ends."""
    skips: Skips = field(default_factory=Skips)

    @classmethod
    def of(cls, epoch_rows: int | None) -> Epochs:
        """Endless epochs of this length; None: a stream without epochs."""
        return cls(((0, epoch_rows),))

    @property
    def last_rows(self) -> int | None:
        """Live rows of the epochs that repeat for ever; None if there are none."""
        return self._live_eras[-1].rows

    @property
    def most_rows(self) -> int | None:
        """Live rows of the longest epochs; None if an epoch has no end."""
        rows = [era.rows for era in self._live_eras]
        if None in rows:
            return None
        return max(number for number in rows if number is not None)

    def number(self, position: int) -> int:
        """The number of the epoch of a position."""
        return self.span(self.skips.live(position))[0]

    def span(self, live: int) -> tuple[int, int, int | None]:
        """(number, first row, last row + 1) of the epoch of a live row; the last is None for an endless epoch."""
        start, rows, number = next(era for era in reversed(self._live_eras) if era.start <= live)
        if rows is None:
            return number, start, None
        more = (live - start) // max(rows, 1)
        return number + more, start + more * rows, start + (more + 1) * rows

    def era(self, live: int) -> tuple[int, int | None, int | None]:
        """(first row, rows of an epoch, first row of the next era) of the era of a live row."""
        following = next((era.start for era in self._live_eras if era.start > live), None)
        start, rows, _ = next(era for era in reversed(self._live_eras) if era.start <= live)
        return start, rows, following

    def end_of(self, num_epochs: int | None) -> int | None:
        """The live row at which a run of `num_epochs` epochs (None: of all) ends; None if it never ends."""
        end = NEVER
        if self.limit is not None:
            end = self.skips.live(self.limit)
        if num_epochs is not None:
            era = next(era for era in reversed(self._live_eras) if era.number < num_epochs or era.number == 0)
            if era.rows is not None:
                end = min(end, era.start + (num_epochs - era.number) * era.rows)
        if end == NEVER:
            return None
        return end

    def begin_of(self, number: int) -> int | None:
        """The position at which an epoch begins; None if the stream has no epochs by then."""
        era = next(era for era in reversed(self._live_eras) if era.number <= number)
        if era.rows is not None:
            return self.skips.position(era.start + (number - era.number) * era.rows)
        if number == era.number and number:
            return self.skips.position(era.start)
        return None

    @cached_property
    def _live_eras(self) -> list[_LiveEra]:
        """The eras without skipped rows. An epoch that has skipped rows is an era of its own."""
        number = 0
        found: list[_LiveEra] = []
        ends = [*(start for start, _ in self.eras[1:]), NEVER]
        for (start, rows), end in zip(self.eras, ends, strict=True):
            if rows is None:
                found.append(_LiveEra(self.skips.live(start), None, number))
                number += 1
                continue
            num_epochs = -(-(end - start) // max(rows, 1))
            touched = {epoch for span in self.skips.ranges for epoch in _touched(span, start, rows, end)}
            # An epoch that is touched, and the one after it, begin an era of their own.
            for epoch in sorted({0, *touched, *(epoch + 1 for epoch in touched)}):
                if epoch < num_epochs:
                    first, last = (self.skips.live(start + each * rows) for each in (epoch, epoch + 1))
                    found.append(_LiveEra(first, last - first, number + epoch))
            number += num_epochs
        return found


class _LiveEra(NamedTuple):
    """Epochs of one length, in live rows."""

    start: int
    rows: int | None
    number: int
    """The number of the first epoch."""


def _touched(span: tuple[int, int], start: int, rows: int, end: int) -> range:
    """The epochs of an era, counted from its start, that contain positions of a span."""
    first, stop = max(span[0], start), min(span[1], end)
    if first >= stop:
        return range(0)
    return range((first - start) // rows, -(-(stop - start) // rows))
