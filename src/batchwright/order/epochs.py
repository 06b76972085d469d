"""Where epochs begin and end, and which positions are skipped: what cuts a stream of rows besides the batch size.

A skipped position counts as consumed and is never given out. So two numbers name a row: its *position*, which all code
outside this stage uses, and its *live* number, which leaves out what is skipped and in which batches are cut.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

__all__ = ["Epochs", "Skips"]


class Skips:
    """Ranges [first, stop) of positions that are passed over.

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
        """Positions skipped by the first so many ranges."""
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
        live = position - int(self._skipped[passed])
        return live if not passed else max(live, int(self._live_first[passed - 1]))

    def position(self, live: int) -> int:
        """The position of a live row."""
        return live if not self.ranges else int(self.positions(np.array([live]))[0])

    def positions(self, live: NDArray[np.int64]) -> NDArray[np.int64]:
        if not self.ranges:
            return live
        found: NDArray[np.int64] = live + self._skipped[np.searchsorted(self._live_first, live, side="right")]
        return found

    def next_from(self, position: int) -> int | None:
        """The first skipped position from a position on."""
        return next((max(first, position) for first, stop in self.ranges if stop > position), None)


@dataclass(frozen=True)
class Epochs:
    """How a stream is divided into epochs, which may change their length on the way.

    >>> epochs = Epochs(((0, 10), (20, 15)))      # two epochs of 10 rows, then epochs of 15
    >>> [epochs.span(position) for position in (0, 19, 20, 36)]
    [(0, 0, 10), (1, 10, 20), (2, 20, 35), (3, 35, 50)]
    """

    eras: tuple[tuple[int, int | None], ...] = ((0, None),)
    """(from position, rows of each epoch from there on; None: no end). A later era begins where an epoch does."""
    limit: int | None = None
    """The stream has no rows from this position on; None: it goes on for ever."""
    skips: Skips = field(default_factory=Skips)

    @classmethod
    def of(cls, epoch_rows: int | None) -> Epochs:
        """Epochs of so many rows for ever; None: a stream without epochs."""
        return cls(((0, epoch_rows),))

    @property
    def last_rows(self) -> int | None:
        """Live rows of the epochs that go on for ever; None where there are none."""
        return self._live_eras[-1][1]

    @property
    def most_rows(self) -> int | None:
        """Live rows of the longest epochs; None where some have no end."""
        rows = [rows for _, rows, _ in self._live_eras]
        return None if None in rows else max(r for r in rows if r is not None)

    def number(self, position: int) -> int:
        """The number of the epoch that a position lies in."""
        return self.span(self.skips.live(position))[0]

    def span(self, live: int) -> tuple[int, int, int | None]:
        """(number, first row, last row + 1) of the epoch that a live row lies in; no last row where it has no end."""
        for start, rows, number in reversed(self._live_eras):
            if start <= live:
                if rows is None:
                    return number, start, None
                more = (live - start) // rows if rows else 0
                return number + more, start + more * rows, start + (more + 1) * rows
        raise ValueError(f"row {live} does not exist")

    def era(self, live: int) -> tuple[int, int | None, int | None]:
        """(first row, rows of an epoch, first row of the next era) of the era that a live row lies in."""
        eras = self._live_eras
        for i in reversed(range(len(eras))):
            if eras[i][0] <= live:
                return eras[i][0], eras[i][1], eras[i + 1][0] if i + 1 < len(eras) else None
        raise ValueError(f"row {live} does not exist")

    def end_of(self, num_epochs: int | None) -> int | None:
        """The live row at which a run of so many epochs (None: of all there are) ends; None where it never does."""
        limit = None if self.limit is None else self.skips.live(self.limit)
        if num_epochs is None:
            return limit
        for start, rows, number in reversed(self._live_eras):
            if number < num_epochs or number == 0:
                if rows is None:
                    return limit
                end = start + (num_epochs - number) * rows
                return end if limit is None else min(end, limit)
        raise ValueError(f"{num_epochs} epochs are none")

    def begin_of(self, number: int) -> int | None:
        """The position at which an epoch begins; None where the stream has no epochs by then."""
        for start, rows, first in reversed(self._live_eras):
            if first <= number:
                if rows is None:
                    return self.skips.position(start) if number == first and number else None
                return self.skips.position(start + (number - first) * rows)
        return None

    @cached_property
    def _live_eras(self) -> list[tuple[int, int | None, int]]:
        """(first live row, live rows of each epoch, number of the first epoch) of each era, skipped rows left out."""
        live, number = self.skips.live, 0
        found: list[tuple[int, int | None, int]] = []
        for i, (start, rows) in enumerate(self.eras):
            following = self.eras[i + 1][0] if i + 1 < len(self.eras) else None
            if rows is None:
                found.append((live(start), None, number))
                number += 1
                continue
            until = None if following is None else -(-(following - start) // rows)
            at = 0  # epochs of this era that are written down
            for touched in sorted({e for span in self.skips.ranges for e in _touched(span, start, rows, following)}):
                if touched > at:
                    found.append((live(start + at * rows), rows, number + at))
                begin = live(start + touched * rows)
                found.append((begin, live(start + (touched + 1) * rows) - begin, number + touched))
                at = touched + 1
            if until is None or at < until:
                found.append((live(start + at * rows), rows, number + at))
            number += until or 0
        return found


def _touched(span: tuple[int, int], start: int, rows: int, following: int | None) -> range:
    """Epochs of an era, counted from its start, that have positions of a span."""
    first, stop = max(span[0], start), span[1] if following is None else min(span[1], following)
    return range((first - start) // rows, -(-(stop - start) // rows)) if first < stop else range(0)
