"""Measure a queue of batches between processes: batches a second, CPU time of both sides, how long one call takes.

What a queue hands over is made here too: prepared batches that come round again, so that no sampling is measured.
"""

from __future__ import annotations

import importlib
import itertools
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.peers.pools import others_seconds

__all__ = ["BATCH_BYTES", "BATCH_SHAPE", "FILE_BATCHES", "PAUSE_SECONDS", "RING", "Contender", "aligned", "check",
           "prepared", "run_pair"]  # fmt: skip

BATCH_SHAPE = (64, 256)
BATCH_BYTES = 2 * 8 * BATCH_SHAPE[0] * BATCH_SHAPE[1]
FILE_BATCHES = 100
RING = 17
"""Prepared batches, 4 MB. No divisor of a file's batches: a file that is lost or comes twice is noticed."""
PAUSE_SECONDS = 0.0001
"""How long the hand-written queues sleep before they look again: next to nothing beside a file, so that they lose no
time by it, whatever CPU it takes."""
_LIMIT_SECONDS = 120
_SETTLED_SECONDS = 0.5

Batch = tuple[Any, Any]
"""x and y: arrays or tensors."""


class Contender(Protocol):
    """What a module brings. `place` is what both sides get: a folder, or a queue in memory."""

    def open_place(self, context: Any, task: dict[str, Any]) -> Any: ...
    def produce(self, place: Any, task: dict[str, Any]) -> None:
        """Goes on until it is terminated."""

    def consume(self, place: Any, task: dict[str, Any]) -> Iterator[Batch]: ...


def prepared() -> list[tuple[np.ndarray, np.ndarray]]:
    """Batch number n is the n-th of these, modulo their number, and says so in its first and last element."""
    rng = np.random.default_rng(7)
    ring = []
    for number in range(RING):
        x, y = (aligned(BATCH_BYTES // 2).view(np.int64).reshape(BATCH_SHAPE) for _ in range(2))
        for part in (x, y):
            part[:] = rng.integers(0, 50_000, BATCH_SHAPE)
        x[0, 0] = y[-1, -1] = number
        ring.append((x, y))
    return ring


def check(batch: Batch, number: int) -> None:
    """It is the one that is due: by two numbers, so that looking is not what is measured."""
    x, y = batch
    assert x.shape == y.shape == BATCH_SHAPE, (x.shape, y.shape)
    found = int(x[0, 0]), int(y[-1, -1])
    assert found == (number % RING, number % RING), (*found, number)


def aligned(num_bytes: int) -> np.ndarray:
    """Memory that begins a page. Some processors copy between memory and files several times as slowly where one begins
    up to 16 bytes after the other, in their pages: a large NumPy array that a file is read into does."""
    raw = np.zeros(num_bytes + 4096, np.uint8)
    skip = -raw.ctypes.data % 4096
    return raw[skip : skip + num_bytes]


# Two processes


def run_pair(contender: str, task: dict[str, Any]) -> dict[str, Any]:
    """What the consumer found, beside as many producers as the task asks for; or {"error": one line}.

    The task's "do" says what the consumer does: take ("rate"), call ("calls") or wait ("idle")."""
    context = multiprocessing.get_context("spawn")
    try:
        place = importlib.import_module(f"benchmarks.peers.{contender}").open_place(context, task)
    except ImportError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    here, there = context.Pipe(duplex=False)
    before, began = _others_now(), time.perf_counter()
    producers = [
        context.Process(target=_produce, args=(contender, place, task)) for _ in range(task.get("producers", 1))
    ]
    consumer = context.Process(target=_consume, args=(contender, place, task, there))
    try:
        for producer in producers:
            producer.start()
        consumer.start()
        there.close()
        here.poll(_LIMIT_SECONDS)
        found: dict[str, Any] = here.recv() if here.poll() else {"error": f"not done after {_LIMIT_SECONDS} s"}
    except EOFError:
        found = {"error": "the consumer ended without a word"}
    finally:
        for process in (consumer, *producers):
            _end(process, is_stuck=task["do"] == "idle")
    if "error" not in found:
        found["others"] = (_others_now() - before) / (time.perf_counter() - began)
    return found


def _others_now() -> float:
    """CPU seconds of everything but this process and its children that have ended."""
    times = os.times()
    return others_seconds() - times.children_user - times.children_system


def _end(process: Any, *, is_stuck: bool) -> None:
    if process.pid is not None:
        process.kill() if is_stuck else process.terminate()
        process.join(10)
        if process.exitcode is None:
            process.kill()
            process.join()


def _produce(contender: str, place: Any, task: dict[str, Any]) -> None:
    importlib.import_module(f"benchmarks.peers.{contender}").produce(place, task)


def _consume(contender: str, place: Any, task: dict[str, Any], there: Connection) -> None:
    os.environ.update(task.get("env", {}))
    try:
        module = importlib.import_module(f"benchmarks.peers.{contender}")
        found = _WAYS[task["do"]](module, place, task)
    except BaseException as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"}
    there.send(found)
    there.close()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(_LIMIT_SECONDS)  # until it is terminated: queues in memory mind when one side leaves before the other


# What a consumer measures


def _rate(module: Contender, place: Any, task: dict[str, Any]) -> dict[str, Any]:
    """Batches a second after a warm-up, which also takes what lay ready; CPU microseconds a batch of both sides."""
    batches = module.consume(place, task)
    warm, last = task["warm_batches"], task["num_batches"]
    is_ordered = task.get("producers", 1) == 1
    began, spent = 0.0, {}
    for number, batch in enumerate(itertools.islice(batches, last + 1)):
        if number in (warm, last):
            now, cpu = time.perf_counter(), _cpu_seconds()
            if number == last:
                break
            began, spent = now, cpu
        check(batch, number if is_ordered else int(batch[0][0, 0]))
        del batch  # a consumer that holds the last one while it asks for the next needs twice the memory
    count = last - warm
    return {
        "batches_s": count / (now - began),
        "us": 1e6 * (now - began) / count,
        **{f"{side}_us": 1e6 * (cpu[side] - spent[side]) / count for side in cpu},
    }


def _calls(module: Contender, place: Any, task: dict[str, Any]) -> dict[str, Any]:
    """Microseconds of each call where everything is ready: all files were made before, and no producer runs."""
    module.produce(place, task)
    batches = module.consume(place, task)
    work_seconds = task.get("work_seconds", 0.0)
    first = _timed(batches, 0)
    seconds = np.array([_timed(batches, number, work_seconds) for number in range(1, task["num_batches"])])
    changes = np.arange(1, task["num_batches"]) % FILE_BATCHES == 0
    whole = seconds[FILE_BATCHES - 1 :]  # from the first change on, so that every file has its change
    return {
        "first_us": 1e6 * first,
        "median_us": 1e6 * float(np.median(seconds)),
        "p99_us": 1e6 * float(np.percentile(seconds, 99)),
        "inside_p99_us": 1e6 * float(np.percentile(seconds[~changes], 99)),
        "change_us": 1e6 * float(np.median(seconds[changes])),
        "longest_us": 1e6 * float(seconds.max()),
        "mean_us": 1e6 * float(whole.mean()),
    }


def _timed(batches: Iterator[Batch], number: int, work_seconds: float = 0.0) -> float:
    began = time.perf_counter()
    batch = next(batches)
    seconds = time.perf_counter() - began
    check(batch, number)
    if work_seconds:
        time.sleep(work_seconds)
    return seconds


def _idle(module: Any, place: Any, task: dict[str, Any]) -> dict[str, Any]:
    """The share of a CPU that a consumer takes, all its threads together, while it waits for a file."""
    wait = module.waiting(place, task)
    time.sleep(_SETTLED_SECONDS)
    began, spent = time.perf_counter(), time.process_time()
    wait()
    seconds = time.perf_counter() - began
    return {"waited_s": seconds, "idle_percent": 100 * (time.process_time() - spent) / seconds}


_WAYS = {"rate": _rate, "calls": _calls, "idle": _idle}


def _cpu_seconds() -> dict[str, float]:
    """Of this process, and of all producers together, which are the other children of our parent (beside one that only
    waits for shared memory to be left behind)."""
    own, parent = os.getpid(), os.getppid()
    found = {"consumer": time.process_time(), "producer": 0.0}
    for pid in _children(parent):
        if pid != own:
            found["producer"] += _ran_seconds(pid)
    return found


def _children(pid: int) -> list[int]:
    try:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:  # no Linux
        return []


def _ran_seconds(pid: int) -> float:
    try:
        threads = [(task / "schedstat").read_text().split()[0] for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return 0.0
    return sum(map(int, threads)) / 1e9
