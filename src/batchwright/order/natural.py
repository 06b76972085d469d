"""Interleave whole sources in proportion to their sizes, without weights. An epoch has every row of every source once.

Row j of a source with n rows has the time (2j + 1) * (2^62 // n); the epoch is all rows by (time, source). Times are
64-bit integers. Both directions have a closed form, so any position is found at once without materialised tables.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["Natural"]

_END = 1 << 62
_STRETCH = 1 << 16
"""Positions that are merged at once, at most: bounds the memory of `at`."""
_WIDE_GAP = 4096
"""Positions between two others from which on merging them costs more than finding the second one anew."""


class Natural:
    """The interleaving of sources with these sizes. A Pattern's methods, for one epoch instead of for ever."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self.num_rows: int = sum(sizes)
        self._step = [_END // max(n, 1) * (n > 0) for n in sizes]
        self._live = np.flatnonzero(sizes)
        self._size = np.array(sizes, np.int64)[self._live]
        self._times = np.array(self._step, np.int64)[self._live]
        self._rows_per_time = sum(0.5 / step for step in self._step if step)

    def at(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """(source, number of earlier rows of that source) of each position in [0, num_rows)."""
        if len(self.sizes) == 1:
            return np.zeros(len(positions), np.int32), positions
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
                merged_source, merged_ordinal = self._between(first, last + 1)
                picked = ordered[run] - first
                source[order[run]] = merged_source[picked]
                ordinal[order[run]] = merged_ordinal[picked]
        return source, ordinal

    def position(self, source: int, ordinals: NDArray[np.int64]) -> NDArray[np.int64]:
        """The positions of the rows of a source, by their number inside it."""
        time = (2 * ordinals + 1) * self._step[source]
        result = ordinals.copy()
        for other, step in enumerate(self._step):
            if other != source and step:
                before = time if other < source else time - 1  # equal times go by source order
                result += np.minimum((before // step + 1) // 2, self.sizes[other])
        return result

    def counts(self, position: int) -> list[int]:
        """Rows of each source before a position in [0, num_rows]."""
        if len(self.sizes) == 1:
            return [position]
        begun, source, _ = self._merge(position, position)
        counts = np.zeros(len(self.sizes), np.int64)
        counts[self._live] = begun
        counts += np.bincount(source[: position - int(begun.sum())], minlength=len(counts))
        found: list[int] = counts.tolist()
        return found

    def _between(self, first: int, last: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """(source, ordinal) of positions [first, last)."""
        begun, source, ordinal = self._merge(first, last)
        before = first - int(begun.sum())
        return source[before : before + last - first], ordinal[before : before + last - first]

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
