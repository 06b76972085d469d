"""Files of batches in memory: the current one, and the next one, read ahead by a thread."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from io import FileIO
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchwright.base.memory import BlockPool
from batchwright.queue.batch_file import FileFacts, pooled, read_batches

Arrays = list[NDArray[Any]]
"""Rows of a batch, an array for each field of the schema."""

_MOST_BYTES_AHEAD = 256 << 20
"""A larger file is read when it is needed: two of them in memory might be too much."""
_MOST_SECONDS_TO_FINISH = 60.0


class Position(NamedTuple):
    """A place in the stream of a split: a file, and the number of its rows before."""

    file: int
    row: int


@dataclass(frozen=True, slots=True)
class LoadedFile:
    """A file in memory, with every checksum verified."""

    facts: FileFacts
    columns: Arrays

    @property
    def num_rows(self) -> int:
        return self.facts.num_rows

    def rows(self, start: int, stop: int) -> Arrays:
        return [column[start:stop] for column in self.columns]


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A file that a thread reads: its result, and a signal that it is ready."""

    identity: tuple[int, ...]
    found: list[LoadedFile | BaseException] = field(default_factory=list)
    is_there: SimpleQueue[None] = field(default_factory=SimpleQueue)


class BatchFileReader:
    """Reads files into memory that is used again when no batch of them is held; the next one in a thread."""

    def __init__(self, memory: Callable[[int], NDArray[np.uint8]] | None = None) -> None:
        """`memory`: where to read files to; None for memory of this process that is used again."""
        self._memory = memory or pooled(BlockPool())
        self._ahead: _Ahead | None = None
        self._lock = threading.Lock()
        # Queues of C code, and no futures: an interrupt may come anywhere, and must not leave a lock behind.
        self._tasks: SimpleQueue[Callable[[], None] | None] | None = None

    def load(self, path: Path) -> LoadedFile:
        """Load a file. It may have been read ahead. Raises DamagedFile."""
        ahead = self._ahead
        if ahead is None or ahead.identity != _identity(os.stat(path)):
            self._ahead = None
            return self._read(path)
        while not ahead.found:
            with contextlib.suppress(Empty):
                ahead.is_there.get(timeout=1.0)
        self._ahead = None
        (found,) = ahead.found
        if isinstance(found, BaseException):
            raise found
        return found

    def read_ahead(self, path: Path) -> None:
        """Begin to read a file that will be needed soon. Nothing happens if it is not there, or is too large."""
        if self._ahead is not None:
            return
        try:
            file = FileIO(path)  # now: it will soon have another name
        except OSError:
            return
        identity = _identity(os.fstat(file.fileno()))
        if identity[2] > _MOST_BYTES_AHEAD:
            file.close()
            return
        ahead = _Ahead(identity)
        self.do_later(partial(self._fill, ahead, file))
        self._ahead = ahead

    @property
    def is_ahead(self) -> bool:
        return self._ahead is not None

    def finish(self) -> None:
        """Wait until all pending work is done."""
        if self._tasks is not None:
            done: SimpleQueue[None] = SimpleQueue()
            self._tasks.put(partial(done.put, None))
            with contextlib.suppress(Empty):  # if threads have ended already, with the interpreter
                done.get(timeout=_MOST_SECONDS_TO_FINISH)

    def end(self) -> None:
        """End the thread, and do not wait for it."""
        tasks, self._tasks, self._ahead = self._tasks, None, None
        if tasks is not None:
            tasks.put(None)

    def __del__(self) -> None:
        self.end()

    def do_later(self, work: Callable[[], None]) -> None:
        """Do something in the thread: to delete a large file takes milliseconds. What it raises is lost."""
        if self._tasks is None:
            tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
            threading.Thread(target=_work, args=(tasks,), name="batchwright-queue", daemon=True).start()
            self._tasks = tasks
        self._tasks.put(work)

    def _fill(self, ahead: _Ahead, file: FileIO) -> None:
        with file:
            try:
                ahead.found.append(self._read(file.fileno()))
            except BaseException as error:  # raised in the thread that needs the file
                ahead.found.append(error)
        ahead.is_there.put(None)

    def _read(self, file: Path | int) -> LoadedFile:
        with self._lock:  # the pool serves one at a time
            facts, columns = read_batches(file, self._memory)
        return LoadedFile(facts, list(columns.values()))


def _work(tasks: SimpleQueue[Callable[[], None] | None]) -> None:
    while (work := tasks.get()) is not None:
        with contextlib.suppress(Exception):
            work()
        del work


def _identity(status: os.stat_result) -> tuple[int, ...]:
    """The identity of a file, which does not depend on its name."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def joined(pieces: list[Arrays]) -> Arrays:
    """Rows of several files, as one batch."""
    if len(pieces) == 1:
        return pieces[0]
    return [np.concatenate(parts) for parts in zip(*pieces, strict=True)]
