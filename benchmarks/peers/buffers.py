"""Measure one buffer in this process: rows in, what they weigh, random batches out. Rows come back as they went in."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

__all__ = ["BATCH_ROWS", "CLOCKS", "OBS", "RAW_ROW_BYTES", "Buffer", "copied", "measure_buffer", "memory_bytes",
           "rows_of_dicts", "touch_free_memory"]  # fmt: skip

OBS = 84
BATCH_ROWS = 256
RAW_ROW_BYTES = 8 + 4 * OBS
_DICTS_AT_ONCE = 1_000
_CHECKED_ROWS = 1_000
_SAMPLING_SECONDS = 1.0
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
"""By the wall, or by the CPU time of all threads: for a machine that others use too."""


class Buffer(Protocol):
    """What a contender brings. `blocks` and `rows` make the form that it takes; that is not counted."""

    def blocks(self, label: np.ndarray, obs: np.ndarray, block_rows: int) -> Sequence[Any]: ...
    def rows(self, label: np.ndarray, obs: np.ndarray) -> Sequence[Any]: ...
    def extend(self, block: Any) -> object: ...
    def append(self, row: Any) -> object: ...
    def extend_dicts(self, dicts: list[dict[str, Any]]) -> object: ...

    def settle(self) -> object:
        """What must be done before the first batch is read: nothing, for most."""

    def sample(self) -> tuple[Any, Any]:
        """(label, obs) of 256 rows drawn at random, as arrays or tensors."""

    def read(self, indices: np.ndarray) -> tuple[Any, Any]: ...


def copied(array: np.ndarray) -> np.ndarray:
    """For libraries that would keep the caller's memory instead of the rows."""
    return np.array(array, order="C")


def rows_of_dicts(label: np.ndarray, obs: np.ndarray) -> list[dict[str, Any]]:
    return [{"label": number, "obs": row} for number, row in zip(label.tolist(), obs, strict=True)]


def measure_buffer(open_buffer: Callable[..., Buffer], task: dict[str, Any]) -> dict[str, Any]:
    """Rates of one way in ("blocks", "rows" or "dicts"), memory, and batches/s. Stops early where it takes too long."""
    label, obs = _source(task["num_rows"])
    folders = (Path(task["folder"], name) for name in ("warm", "measured"))
    _fill(open_buffer(task["how"], 3_000, next(folders)), label[:3_000], obs[:3_000], task)
    buffer = open_buffer(task["how"], task["num_rows"], next(folders))
    call, items, item_rows = _way_in(buffer, label, obs, task)
    touch_free_memory(3 * task["num_rows"] * RAW_ROW_BYTES)
    before, queue = memory_bytes(), _Queue()
    num_rows, seconds = _time_calls(call, items, item_rows, task["limit_seconds"], CLOCKS[task["clock"]])
    waited = queue.share_waited()
    written = memory_bytes()
    began = time.perf_counter()
    buffer.settle()
    settled = time.perf_counter() - began
    after = memory_bytes()
    del items
    _compare(buffer, label, obs, num_rows)
    raw = num_rows * RAW_ROW_BYTES
    return {
        "rows_s": num_rows / seconds,
        "rows": num_rows,
        "settle_s": settled,
        "resident": (after["VmRSS"] - before["VmRSS"]) / raw,
        "anonymous": (after["RssAnon"] - before["RssAnon"]) / raw,
        "peak": (max(written["VmHWM"], after["VmHWM"]) - before["VmRSS"]) / raw,
        "batches_s": _sample(buffer, CLOCKS[task["clock"]]),
        "waited": max(waited, queue.share_waited()),
    }


def _source(num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows, in memory that was touched before anything is measured."""
    return np.arange(num_rows), np.random.default_rng(7).random((num_rows, OBS), dtype=np.float32)


def touch_free_memory(num_bytes: int) -> None:
    """On a virtual machine the first touch of a page can wait for the host, ten times as long as a page fault does, and
    it is luck who meets it. So free pages are touched right before the clock starts; their page faults stay."""
    with mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)  # as NumPy asks for large arrays
        for at in range(0, num_bytes, mmap.PAGESIZE):
            memory[at] = 1
    Path("/proc/self/clear_refs").write_text("5")  # the peak (VmHWM) is that of now


def _way_in(buffer: Buffer, label: np.ndarray, obs: np.ndarray, task: dict[str, Any]) -> tuple[Any, Sequence[Any], int]:
    """(the call, what it gets one after the other, rows in each)."""
    if task["way"] == "rows":
        return buffer.append, buffer.rows(label, obs), 1
    if task["way"] == "dicts":
        dicts = rows_of_dicts(label, obs)
        return (
            buffer.extend_dicts,
            [dicts[at : at + _DICTS_AT_ONCE] for at in range(0, len(dicts), _DICTS_AT_ONCE)],
            _DICTS_AT_ONCE,
        )
    return buffer.extend, buffer.blocks(label, obs, task["block_rows"]), task["block_rows"]


def _fill(buffer: Buffer, label: np.ndarray, obs: np.ndarray, task: dict[str, Any]) -> None:
    """A small buffer first, so that imports and first calls are not counted."""
    call, items, _ = _way_in(buffer, label, obs, {**task, "block_rows": min(task.get("block_rows", 1), len(label))})
    for item in items:
        call(item)
    buffer.settle()
    for _ in range(3):
        buffer.sample()


def _time_calls(
    call: Callable[[Any], object],
    items: Sequence[Any],
    item_rows: int,
    limit_seconds: float,
    clock: Callable[[], float],
) -> tuple[int, float]:
    """(rows, seconds). The clock is looked at after every 1 % of the calls only."""
    stride, done = max(1, len(items) // 100), 0
    began = now = clock()
    while done < len(items) and now - began < limit_seconds:
        for item in items[done : done + stride]:
            call(item)
        done, now = min(done + stride, len(items)), clock()
    return done * item_rows, now - began


def _compare(buffer: Buffer, label: np.ndarray, obs: np.ndarray, num_rows: int) -> None:
    """The caller uses its arrays again; the buffer must still have the rows."""
    indices = np.random.default_rng(8).permutation(num_rows)[:_CHECKED_ROWS]
    wanted = label[indices], obs[indices]
    label[:], obs[:] = -1, -1
    found = buffer.read(indices)
    for want, have in zip(wanted, found, strict=True):
        assert np.array_equal(want, np.asarray(have)), "other rows came back"
    for have, dtype, shape in zip(
        buffer.sample(), ("int64", "float32"), ((BATCH_ROWS,), (BATCH_ROWS, OBS)), strict=True
    ):
        assert str(have.dtype).removeprefix("torch.") == dtype, have.dtype
        assert tuple(have.shape) == shape, have.shape


def _sample(buffer: Buffer, clock: Callable[[], float]) -> float:
    """Batches per second."""
    num_batches, began = 0, clock()
    while (now := clock()) - began < _SAMPLING_SECONDS:
        buffer.sample()
        num_batches += 1
    return num_batches / (now - began)


class _Queue:
    """Knows for which share of the time since the last look this thread was ready and had no CPU: others had them."""

    def __init__(self) -> None:
        self.seen = self._now()

    def share_waited(self) -> float:
        (began, waited_before), self.seen = self.seen, self._now()
        return (self.seen[1] - waited_before) / (self.seen[0] - began)

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.perf_counter(), int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def memory_bytes() -> dict[str, int]:
    """Bytes now ("VmRSS", of which "RssAnon" are no file's), and the most that there were ("VmHWM")."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1] == "kB"}
