"""Work done before it is needed, in order: by threads (cold data) or by processes (code that holds the interpreter).

Without either, work is done when it is asked for: for warm data that is fastest, because handing a batch between
threads costs more than gathering a small one.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
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
    """function(task) of every task, in order, with up to `ahead` of them begun before they are asked for."""
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
        # Without waiting: the garbage collector may end an abandoned generator in any thread, and one that is starting
        # holds the lock that a join takes.
        executor.shutdown(wait=False, cancel_futures=True)


def by_processes(
    function: Callable[[T], Arrays], tasks: Iterable[T], workers: int, slot_bytes: int, slots_each: int = 2
) -> Iterator[Arrays]:
    """function(task) of every task, in order; worker w of k does tasks w, w + k, ...

    Arrays come back through memory that parent and workers share. A slot is used again when the next result is asked
    for, so take what is needed before that. The memory has no name: nothing is left behind, whatever dies.
    """
    descriptor = shared_memory(workers * slots_each * slot_bytes)
    crew: list[Worker] = []
    memory: mmap.mmap | None = None
    try:
        memory = mmap.mmap(descriptor, workers * slots_each * slot_bytes)
        for _ in range(workers):
            into_slot = _IntoSlot(function, descriptor, workers * slots_each * slot_bytes, slot_bytes)
            crew.append(Worker(into_slot, doing="of this loader", share=[descriptor]))
        remaining = iter(tasks)
        sent = 0

        def send() -> None:
            nonlocal sent
            for task in remaining:
                worker, turn = sent % workers, sent // workers
                crew[worker].send(worker * slots_each + turn % slots_each, task)
                sent += 1
                return

        for _ in range(workers * slots_each):
            send()
        given = 0
        while given < sent:
            layout = crew[given % workers].receive()
            yield {
                name: np.frombuffer(memory, dtype, count, at).reshape(shape) for name, dtype, shape, count, at in layout
            }
            given += 1
            send()
    finally:
        for member in crew:
            member.close()
        os.close(descriptor)
        if memory is not None:
            with contextlib.suppress(BufferError):  # a view is still held: the map goes when it does
                memory.close()


class _IntoSlot:
    """Runs in a worker: does a task and writes its arrays into a slot of the shared memory."""

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
