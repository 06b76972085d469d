"""Files brought into the page cache before they are needed, and dropped from it afterwards.

Files are read in plain reads of 4 MB. These release the interpreter while they wait, work on every system, and were as
fast as advice to the kernel (`posix_fadvise`) in pieces of any size. The kernel's own read-ahead is off for them. It
would read past the end of every span, megabytes that are not needed soon.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from batchwright.base.machine import advise, is_cached

__all__ = ["FileReader", "Span", "cached_share"]

Span = tuple[Path, int, int]
"""(file, first byte, last byte)."""

_READ_BYTES = 4 << 20
_ASKED_BYTES = 16 << 20
"""The bytes requested before they are read, so that the disk has work while this thread waits for its turn."""
_ASK_BYTES = 1 << 20
"""The largest request. The kernel cuts longer ones short."""
_OPEN_FILES = 64


def cached_share(spans: Sequence[Span], samples: int = 64) -> float | None:
    """The share of some spans in the page cache, from a sample; None if the system does not tell."""
    ends = np.cumsum([last - first for _, first, last in spans])
    seen: list[bool] = []
    with FileReader() as files:
        # At a random place in each of several equal parts, because a test of a page brings it in, and only it.
        inside = np.random.default_rng().uniform(0.1, 0.9, samples)
        for place in ((np.arange(samples) + inside) * (int(ends[-1]) / samples)).astype(np.int64).tolist():
            number = int(np.searchsorted(ends, place, side="right"))
            path, _, last = spans[number]
            cached = files.is_cached(path, last - (int(ends[number]) - place))
            if cached is None:
                return None
            seen.append(cached)
    return sum(seen) / len(seen)


class FileReader:
    """Files kept open while parts of them are read ahead, requested or dropped.

    A file that cannot be opened or read is skipped: the code that needs its data reports it better.
    """

    def __init__(self) -> None:
        self._descriptors: OrderedDict[Path, int] = OrderedDict()
        self._buffer: memoryview | None = None

    def read(self, span: Span) -> None:
        """Read a span into the cache."""
        path, first, last = span
        descriptor = self._descriptor(path)
        if self._buffer is None:
            self._buffer = memoryview(bytearray(_READ_BYTES))
        asked = first
        while descriptor is not None and first < last:
            while asked < min(first + _ASKED_BYTES, last):
                advise(descriptor, "WILLNEED", asked, min(_ASK_BYTES, last - asked))
                asked += _ASK_BYTES
            try:
                os.lseek(descriptor, first, os.SEEK_SET)
                got = os.readv(descriptor, [self._buffer[: min(last - first, _READ_BYTES)]])
            except OSError:
                return
            if not got:
                return
            first += got

    def read_again(self, span: Span) -> None:
        """Read a span that was read before, if the cache has lost some of it."""
        path, first, last = span
        if any(self.is_cached(path, place) is False for place in range(first, last, max((last - first) // 16, 1))):
            self.read(span)

    def ask_for(self, path: Path, offsets: NDArray[np.int64], num_bytes: int) -> None:
        """Request many small parts of a file, without waiting for any."""
        descriptor = self._descriptor(path)
        if descriptor is not None:
            for offset in offsets.tolist():
                advise(descriptor, "WILLNEED", offset, num_bytes)

    def drop(self, spans: Iterable[Span]) -> None:
        """Drop some spans from the cache, except pages that a process has mapped."""
        for path, first, last in spans:
            descriptor = self._descriptor(path)
            if descriptor is not None:
                advise(descriptor, "DONTNEED", first, last - first)

    def is_cached(self, path: Path, offset: int) -> bool | None:
        descriptor = self._descriptor(path)
        if descriptor is None:
            return None
        return is_cached(descriptor, offset)

    def _descriptor(self, path: Path) -> int | None:
        if path not in self._descriptors:
            try:
                self._descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                return None
            advise(self._descriptors[path], "RANDOM")
            if len(self._descriptors) > _OPEN_FILES:
                os.close(self._descriptors.popitem(last=False)[1])
        return self._descriptors[path]

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
