"""Rows of files, one after another: a file in memory, the next one read ahead, and any number of rows at a time."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.memory import BlockPool
from penstock.queue.batch_file import FileFacts, pooled, read_batches

__all__ = ["Arrays", "FileShape", "LoadedFile", "Position", "Reader", "joined"]

Arrays = list[NDArray[Any]]
"""Rows of a batch, an array for each field of the schema."""

_MOST_BYTES_AHEAD = 256 << 20
"""A larger file is read when it is needed: two of them in memory might be too much."""


class Position(NamedTuple):
    """A place in the stream of a split: a file, and rows of it that lie before."""

    file: int
    row: int


class FileShape(NamedTuple):
    """How the rows of a file were cut. A state counts in these batches, so it belongs to files that have them."""

    batch_size: int
    num_batches: int


@dataclass(frozen=True, slots=True)
class LoadedFile:
    """A file in memory, with every checksum verified."""

    facts: FileFacts
    columns: Arrays

    @property
    def num_rows(self) -> int:
        return self.facts.num_rows

    @property
    def shape(self) -> FileShape:
        return FileShape(self.facts.batch_size, self.facts.num_batches)

    def rows(self, start: int, stop: int) -> Arrays:
        return [column[start:stop] for column in self.columns]


class Reader:
    """Reads files into memory that is used again when no batch of them is held; the next one in a thread."""

    def __init__(self, memory: Callable[[int], NDArray[np.uint8]] | None = None) -> None:
        """`memory`: where to read files to; None for memory of this process that is used again."""
        self._memory = memory or pooled(BlockPool())
        self._ahead: tuple[tuple[int, ...], Future[LoadedFile]] | None = None
        self._lock = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None
        self._to_do: deque[Future[None]] = deque()

    def load(self, path: Path) -> LoadedFile:
        """A file: from what was read ahead, if it is that one. Raises DamagedFile."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == _identity(os.stat(path)):
            return ahead[1].result()
        return self._read(path)

    def read_ahead(self, path: Path) -> None:
        """Begin to read a file that will be needed soon. Nothing happens where it is not there, or too large."""
        if self._ahead is not None:
            return
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # now: it will soon have another name
        except OSError:
            return
        identity = _identity(os.fstat(descriptor))
        if identity[2] > _MOST_BYTES_AHEAD:
            os.close(descriptor)
            return
        self._ahead = identity, self._in_thread().submit(self._read_and_close, descriptor)

    @property
    def is_ahead(self) -> bool:
        return self._ahead is not None

    def do_later(self, work: Callable[[], None]) -> None:
        """Do something in the thread: to delete a large file takes milliseconds."""
        while self._to_do and self._to_do[0].done():
            self._to_do.popleft().result()
        self._to_do.append(self._in_thread().submit(work))

    def finish(self) -> None:
        """Wait for what is to be done."""
        while self._to_do:
            self._to_do.popleft().result()

    def close(self) -> None:
        """End the thread, after what is to be done. The reader can be used again."""
        self._ahead = None
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        self._to_do.clear()

    def _in_thread(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="penstock-queue")
        return self._thread

    def _read_and_close(self, descriptor: int) -> LoadedFile:
        try:
            return self._read(descriptor)
        finally:
            os.close(descriptor)

    def _read(self, file: Path | int) -> LoadedFile:
        with self._lock:  # the pool serves one at a time
            facts, columns = read_batches(file, self._memory)
        return LoadedFile(facts, list(columns.values()))


def _identity(status: os.stat_result) -> tuple[int, ...]:
    """A file by what it is: it may get another name."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def joined(pieces: list[Arrays]) -> Arrays:
    """Rows that lie in several files, as one batch."""
    if len(pieces) == 1:
        return pieces[0]
    return [np.concatenate(parts) for parts in zip(*pieces, strict=True)]
