"""Interleave whole sources in proportion to their sizes: every row of every source once per epoch, no weights asked.

Row j of a source with n rows has the time (2j + 1) * (2^62 // n); the epoch is all rows by (time, source). Times are
64-bit integers and both directions have a closed form, so nothing is materialised and any position is found at once.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["Natural"]

_END = 1 << 62
_STRETCH = 1 << 16
"""Positions that are merged at once, at most: bounds the memory of `at`."""
_WIDE_GAP = 4096
"""Merging what lies between two positions costs more than finding the second one anew, if it is more than this."""


class Natural:
    """The interleaving of sources with these sizes. A Pattern's methods, for one epoch instead of for ever."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self.num_rows = sum(sizes)
        self._step = [_END // n if n else 0 for n in sizes]

    def at(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """(source, how many rows of that source came before) of each position in [0, num_rows)."""
        if len(self.sizes) == 1:
            return np.zeros(len(positions), np.int32), positions
        order = np.argsort(positions, kind="stable")
        ordered = positions[order]
        source = np.empty(len(positions), np.int32)
        ordinal = np.empty(len(positions), np.int64)
        # Nearby positions are merged in one go, but never more than one stretch of the stream, whatever is asked for.
        stretch = ordered // _STRETCH
        cuts = np.flatnonzero((np.diff(ordered) > _WIDE_GAP) | (np.diff(stretch) > 0)) + 1
        for run in np.split(np.arange(len(ordered)), cuts):
            if len(run):
                first, last = int(ordered[run[0]]), int(ordered[run[-1]])
                merged_source, merged_ordinal = self._merge(first, last + 1)
                picked = ordered[run] - first
                source[order[run]] = merged_source[picked]
                ordinal[order[run]] = merged_ordinal[picked]
        return source, ordinal

    def position(self, source: int, ordinals: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where the rows of a source lie, by their number inside it."""
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
        low, high = 0, 2 * _END  # the smallest time by which more than `position` rows have come
        while low < high:
            middle = (low + high) // 2
            if sum(self._until(middle)) > position:
                high = middle
            else:
                low = middle + 1
        counts = self._until(low - 1)
        for i, (now, then) in enumerate(zip(counts, self._until(low), strict=True)):
            if sum(counts) < position and then > now:  # rows at exactly this time, in source order
                counts[i] += 1
        return counts

    def _until(self, time: int) -> list[int]:
        return [min((time // step + 1) // 2, n) if step else 0 for step, n in zip(self._step, self.sizes, strict=True)]

    def _merge(self, first: int, last: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        begins, ends = self.counts(first), self.counts(last)
        lengths = [end - begin for begin, end in zip(begins, ends, strict=True)]
        source = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        ordinal = np.concatenate([np.arange(b, e, dtype=np.int64) for b, e in zip(begins, ends, strict=True)])
        time = (2 * ordinal + 1) * np.array(self._step, np.int64)[source]
        order = np.argsort(time, kind="stable")  # stable: equal times keep source order
        return source[order], ordinal[order]
