"""Work done ahead of need, in order: by threads (for cold data) or by processes (for code that holds the interpreter).

Without either, work is done on request. This is fastest for warm data, because passing a batch between threads costs
more than gathering a small one.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from batchwright.base.machine import shared_memory
from batchwright.base.processes import Worker

__all__ = ["by_processes", "by_threads"]

T = TypeVar("T")
R = TypeVar("R")
Arrays = dict[str, NDArray[Any]]


def by_threads(function: Callable[[T], R], tasks: Iterable[T], ahead: int, threads: int = 1) -> Iterator[R]:
    """Yield function(task) for every task, in order. Up to `ahead` tasks begin before their results are requested."""
    waiting: deque[Future[R]] = deque()
    remaining = iter(tasks)
    executor = ThreadPoolExecutor(threads, thread_name_prefix="batchwright-ahead")
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
    descriptor = shared_memory(workers * slots_each * slot_bytes)
    crew: list[Worker] = []
    memory: mmap.mmap | None = None
    try:
        memory = mmap.mmap(descriptor, workers * slots_each * slot_bytes)
        for _ in range(workers):
            into_slot = _IntoSlot(function, descriptor, workers * slots_each * slot_bytes, slot_bytes)
            crew.append(Worker(into_slot, doing="of this loader", share=[descriptor]))
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
    finally:
        for member in crew:
            member.close()
        os.close(descriptor)
        if memory is not None:
            with contextlib.suppress(BufferError):  # a view still exists: the map is freed with it
                memory.close()


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
