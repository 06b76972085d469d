"""Measure one pool of positions in this process: rows a second, waits between batches, memory, resume.

The rows are made here too: 304 bytes each, in numbered npz shards of two directories, or the same as gzip pickles.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib
import itertools
import json
import os
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.peers.buffers import memory_bytes, touch_free_memory
from benchmarks.peers.processes import Watch

__all__ = ["BATCH_ROWS", "COLUMNS", "ROW_BYTES", "SEED", "Batch", "Pool", "make_shards", "measure_pool",
           "others_seconds", "pickled", "refill_draws", "shards_of"]  # fmt: skip

BATCH_ROWS = 1024
SEED = 7
COLUMNS: dict[str, tuple[str, tuple[int, ...]]] = {
    "board": ("uint8", (2, 11, 11)),
    "move": ("int32", ()),
    "number": ("int32", ()),
    "policy": ("float16", (25,)),
    "value": ("float32", ()),
}
ROW_BYTES = sum(np.dtype(dtype).itemsize * int(np.prod(shape)) for dtype, shape in COLUMNS.values())
_FIRST_SHARE = 5 / 8
"""Of the shards, in the first directory."""
_CHECKED_BATCHES = 20
_WORK_SECONDS = 0.001
_MADE = "made.json"

Batch = dict[str, Any]
"""Columns by name: arrays or tensors."""


class Pool(Protocol):
    """What a contender brings. Each call begins an epoch, or goes on where a state was loaded."""

    def batches(self) -> Iterator[Batch]: ...
    def rows(self) -> Iterator[dict[str, Any]]: ...
    def loader(self, workers: int) -> Iterator[Batch]:
        """Batches of tensors, by torch's DataLoader."""

    def seconds(self) -> dict[str, list[float]]:
        """What the pool itself has timed, if anything: "read" and "shuffle" of each refill."""

    def state(self) -> Any: ...
    def load_state(self, state: Any) -> None: ...


# Rows


def make_shards(folder: Path, num_rows: int, shard_rows: int) -> list[Path]:
    """Two directories of npz shards. What is there already is used again. `number` is 0, 1, 2 ... over all shards."""
    num_shards = num_rows // shard_rows
    first = round(num_shards * _FIRST_SHARE)
    folders = [folder / "first", folder / "second"]
    wanted = {"rows": num_rows, "shard_rows": shard_rows, "columns": [*COLUMNS]}
    if _made(folder) != wanted:
        for shard in range(num_shards):
            inside, number = (folders[0], shard) if shard < first else (folders[1], shard - first)
            inside.mkdir(parents=True, exist_ok=True)
            part = inside / f"part-{number:04d}.tmp"
            with part.open("wb") as writer:
                np.savez(writer, **_columns(shard, shard_rows))
            part.rename(inside / f"shard_{number:04d}.npz")
        (folder / _MADE).write_text(json.dumps(wanted))
    return folders


def pickled(folders: list[Path]) -> list[Path]:
    """The same rows as gzip pickles of {"examples": [dict, ...]}, in directories beside those of the npz shards."""
    beside = [folder.with_name(f"{folder.name}-pickled") for folder in folders]
    for folder, made in zip(folders, beside, strict=True):
        shards = shards_of(folder)
        if _made(made) == [path.name for path in shards]:
            continue
        made.mkdir(parents=True, exist_ok=True)
        for path in shards:
            # Level 1: it reads back as fast as level 9, and is written five times as fast.
            with gzip.open(made / f"{path.stem}.pkl.gz", "wb", compresslevel=1) as writer:
                pickle.dump({"examples": _examples(path)}, writer, protocol=pickle.HIGHEST_PROTOCOL)
        (made / _MADE).write_text(json.dumps([path.name for path in shards]))
    return beside


def shards_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name.startswith("shard_"))


def _made(folder: Path) -> Any:
    return json.loads((folder / _MADE).read_text()) if (folder / _MADE).exists() else None


def _columns(shard: int, num_rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([SEED, shard])
    return {
        "board": rng.integers(0, 2, (num_rows, *COLUMNS["board"][1]), dtype=np.uint8),
        "move": rng.integers(0, 25, num_rows, dtype=np.int32),
        "number": np.arange(shard * num_rows, (shard + 1) * num_rows, dtype=np.int32),
        "policy": rng.random((num_rows, 25), dtype=np.float32).astype(np.float16),
        "value": rng.random(num_rows, dtype=np.float32),
    }


def _examples(path: Path) -> list[dict[str, Any]]:
    """One dict a position, as a self-play program writes it: arrays of its own, and Python numbers."""
    with np.load(path) as shard:
        columns = {name: shard[name] for name in COLUMNS}
    board, policy = columns["board"], columns["policy"]
    numbers = zip(*(columns[name].tolist() for name in ("move", "number", "value")), strict=True)
    return [
        {"board": board[row].copy(), "move": move, "number": number, "policy": policy[row].copy(), "value": value}
        for row, (move, number, value) in enumerate(numbers)
    ]


# Measuring


def refill_draws(num_rows: int, shard_rows: int, pool_rows: int, threshold: int) -> list[int]:
    """After how many draws a refill is due, of an epoch of equal shards. The first fill is not among them.

    >>> refill_draws(40, shard_rows=5, pool_rows=20, threshold=10)
    [10, 20]
    """
    inside = left = drawn = 0
    left, draws = num_rows, []
    while left:
        added = min(max((pool_rows - inside) // shard_rows, 1) * shard_rows, left)
        inside, left = inside + added, left - added
        if left:
            drawn, inside = drawn + inside - threshold, threshold
            draws.append(drawn)
    return draws


def measure_pool(peer: Any, task: dict[str, Any]) -> dict[str, Any]:
    """An epoch, or half of one, or what comes after a resume; and the most memory that it took, with its children."""
    if task.get("torch"):
        importlib.import_module("torch")
    if task.get("touched_bytes"):
        touch_free_memory(task["touched_bytes"])
        for folder in task["folders"]:
            _read_into_cache(Path(folder))
    watch = Watch(os.getpid())
    if task.get("has_children"):
        watch.start()
    others, began = -others_seconds(), time.perf_counter()
    pool: Pool = peer.open_pool(task)
    found = _WAYS[task["way"]](pool, task)
    seconds = time.perf_counter() - began
    watch.is_over.set()
    own_mb = memory_bytes()["VmHWM"] / 1e6
    return {
        **found,
        "most_mb": max(own_mb, watch.peaks()["peak_mb"]),
        # Children that still run would be taken for others.
        "others": None if task.get("has_children") else (others + others_seconds()) / seconds,
    }


def _epoch_in_batches(pool: Pool, task: dict[str, Any]) -> dict[str, Any]:
    """Rates of the epoch, the wait for each batch, and which waits fell on refills."""
    began = time.perf_counter()
    stream = pool.loader(task["workers"]) if task["way"] == "loader" else pool.batches()
    work = _one_millisecond() if task.get("work") else None
    waits, rows, total = [], 0, 0
    asked = began
    for batch in stream:
        waits.append(time.perf_counter() - asked)
        total += _touch(batch)
        rows += len(batch["number"])
        if work is not None:
            work()
        asked = time.perf_counter()
    seconds = asked - began
    _check(rows, total, task["num_rows"])
    return {
        "rows_s": rows / seconds,
        "later_rows_s": (rows - BATCH_ROWS) / (seconds - waits[0]),
        "first_s": waits[0],
        **_waits_ms(np.array(waits[1:]), task),
        "pool_s": pool.seconds(),
    }


def _epoch_of_rows(pool: Pool, task: dict[str, Any]) -> dict[str, Any]:
    """Rates of the epoch, one position after the other."""
    began = time.perf_counter()
    stream = pool.rows()
    total = int(next(stream)["number"])
    first = time.perf_counter() - began
    rows = 1
    for row in stream:
        total += int(row["number"])
        rows += 1
    seconds = time.perf_counter() - began
    _check(rows, total, task["num_rows"])
    return {
        "rows_s": rows / seconds,
        "later_rows_s": (rows - 1) / (seconds - first),
        "first_s": first,
        "pool_s": pool.seconds(),
    }


def _half(pool: Pool, task: dict[str, Any]) -> dict[str, Any]:
    """Draw half of the epoch, save the state, and say what comes next."""
    stream = pool.batches()
    for _ in itertools.islice(stream, task["num_rows"] // BATCH_ROWS // 2):
        pass
    state = pickle.dumps(pool.state())
    Path(task["state"]).write_bytes(state)
    return {"hashes": _hashes(stream), "state_bytes": len(state)}


def _resumed(pool: Pool, task: dict[str, Any]) -> dict[str, Any]:
    """From the state to the first batch."""
    began = time.perf_counter()
    pool.load_state(pickle.loads(Path(task["state"]).read_bytes()))
    stream = pool.batches()
    first = next(stream)
    seconds = time.perf_counter() - began
    return {"resume_s": seconds, "hashes": _hashes(itertools.chain([first], stream))}


_WAYS: dict[str, Callable[[Pool, dict[str, Any]], dict[str, Any]]] = {
    "batches": _epoch_in_batches,
    "loader": _epoch_in_batches,
    "rows": _epoch_of_rows,
    "half": _half,
    "resumed": _resumed,
}


def _touch(batch: Batch) -> int:
    """The consumer: looks at every cache line of the boards, and adds up the numbers, by which rows are counted."""
    board = np.asarray(batch["board"])
    assert board.reshape(-1)[::64].max() <= 1
    return int(np.asarray(batch["number"]).sum(dtype=np.int64))


def _check(rows: int, total: int, num_rows: int) -> None:
    assert rows == num_rows, f"{rows} rows came, of {num_rows}"
    assert total == num_rows * (num_rows - 1) // 2, "other rows came"


def _hashes(stream: Iterator[Batch]) -> list[str]:
    return [
        hashlib.sha256(b"".join(np.ascontiguousarray(batch[name]).tobytes() for name in COLUMNS)).hexdigest()
        for batch in itertools.islice(stream, _CHECKED_BATCHES)
    ]


def _waits_ms(waits: np.ndarray, task: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds. The wait of a refill is the longest of the batch in which it is due and its two neighbours."""
    waits = waits * 1000
    on_refills = np.zeros(len(waits), bool)
    refills = []
    for drawn in refill_draws(task["num_rows"], task["shard_rows"], task["pool_rows"], task["threshold"]):
        at = drawn // BATCH_ROWS - 1  # waits begin with the second batch
        near = slice(max(at - 1, 0), at + 2)
        on_refills[near] = True
        refills.append(float(waits[near].max()))
    return {
        "p50_ms": float(np.percentile(waits, 50)),
        "p99_ms": float(np.percentile(waits, 99)),
        "p999_ms": float(np.percentile(waits, 99.9)),
        "max_ms": float(waits.max()),
        "refills_ms": refills,
        "max_elsewhere_ms": float(waits[~on_refills].max()),
        "over_50": int((waits > 50).sum()),
        "batches": len(waits) + 1,
    }


def _one_millisecond() -> Callable[[], None]:
    """What works for a millisecond, in calls that let other threads run as those of a trainer do."""
    left = np.random.default_rng(0).random((96, 96), dtype=np.float32)
    out = np.empty_like(left)

    def work() -> None:
        until = time.perf_counter() + _WORK_SECONDS
        while time.perf_counter() < until:
            np.matmul(left, left, out=out)

    return work


def _read_into_cache(folder: Path) -> None:
    buffer = bytearray(1 << 20)
    for path in shards_of(folder):
        with path.open("rb", buffering=0) as reader:
            while reader.readinto(buffer):
                pass


def others_seconds() -> float:
    """CPU seconds since the machine started that were not of this process: of all others, and of the host."""
    user, nice, system, _, _, *interrupts = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9])
    own = os.times()
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK") - own.user - own.system
