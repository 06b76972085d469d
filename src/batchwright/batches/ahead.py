"""Work done before it is needed: by threads, by processes, and by the disk, which brings files into the page cache.

Threads serve cold data, processes serve code that holds the interpreter. Without either, work is done on request. This
is fastest for warm data, because passing a batch between threads costs more than gathering a small one.

Files are read ahead in plain reads of 4 MB. These release the interpreter while they wait, work on every system, and
were as fast as advice to the kernel (`posix_fadvise`) in pieces of any size. The kernel's own read-ahead is off for
them. It would read past the end of every span, megabytes that are not needed soon.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from batchwright.base.machine import advise, is_cached, shared_memory
from batchwright.base.processes import Worker

__all__ = ["FileReader", "Span", "by_processes", "by_threads", "cached_share"]

T = TypeVar("T")
R = TypeVar("R")
Arrays = dict[str, NDArray[Any]]


def by_threads(function: Callable[[T], R], tasks: Iterable[T], ahead: int) -> Iterator[R]:
    """Yield function(task) for every task, in order. A thread begins up to `ahead` tasks before they are requested."""
    waiting: deque[Future[R]] = deque()
    remaining = iter(tasks)
    executor = ThreadPoolExecutor(1, thread_name_prefix="batchwright-ahead")
    try:
        while True:
            for task in remaining:
                waiting.append(executor.submit(function, task))
                if len(waiting) > ahead:
                    break
            if not waiting:
                return
            yield waiting.popleft().result()
    finally:
        # Without waiting: the garbage collector may end an abandoned generator in any thread, and a starting thread
        # holds the lock that a join takes.
        executor.shutdown(wait=False, cancel_futures=True)


def by_processes(
    function: Callable[[T], Arrays], tasks: Iterable[T], workers: int, slot_bytes: int, slots_each: int = 2
) -> Iterator[Arrays]:
    """Yield function(task) for every task, in order. Worker w of k does tasks w, w + k, ...

    Arrays come back through memory that parent and workers share. A slot is reused when the next result is requested,
    so copy a result before that. The memory has no name: nothing is left behind if a process dies.
    """
    num_bytes = workers * slots_each * slot_bytes
    with contextlib.ExitStack() as stack:
        descriptor = shared_memory(num_bytes)
        stack.callback(os.close, descriptor)
        memory = mmap.mmap(descriptor, num_bytes)  # freed with the last view of it
        into_slot = _IntoSlot(function, descriptor, num_bytes, slot_bytes)
        crew = [
            stack.enter_context(Worker(into_slot, doing="of this loader", share=[descriptor])) for _ in range(workers)
        ]
        numbered = enumerate(tasks)
        waiting: deque[Worker] = deque()

        def send(most: int) -> None:
            for number, task in islice(numbered, most):
                turn, worker = divmod(number, workers)
                crew[worker].send(worker * slots_each + turn % slots_each, task)
                waiting.append(crew[worker])

        send(workers * slots_each)
        while waiting:
            layout = waiting.popleft().receive()
            yield {
                name: np.frombuffer(memory, dtype, count, at).reshape(shape) for name, dtype, shape, count, at in layout
            }
            send(1)


class _IntoSlot:
    """The function in a worker. Does a task and writes its arrays into a slot of the shared memory."""

    def __init__(self, function: Callable[[Any], Arrays], descriptor: int, num_bytes: int, slot_bytes: int) -> None:
        self.function, self.descriptor, self.num_bytes, self.slot_bytes = function, descriptor, num_bytes, slot_bytes
        self.memory: mmap.mmap | None = None

    def __call__(self, slot: int, task: Any) -> list[tuple[str, str, tuple[int, ...], int, int]]:
        if self.memory is None:
            self.memory = mmap.mmap(self.descriptor, self.num_bytes)
        at = slot * self.slot_bytes
        end = at + self.slot_bytes
        layout = []
        for name, array in self.function(task).items():
            if at + array.nbytes > end:
                raise RuntimeError(f"a block of {array.nbytes:,} bytes does not fit its slot of {self.slot_bytes:,}")
            np.frombuffer(self.memory, array.dtype, array.size, at)[:] = array.ravel()
            layout.append((name, array.dtype.str, array.shape, array.size, at))
            at += -(-array.nbytes // 64) * 64
        return layout


# The page cache


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
