"""Cold data: how long it takes to become warm, and what each shuffle gets from a store twice as large as memory.

python -m benchmarks.cold                     needs Linux; the second part also a cgroup that it may make (as root)

Every measurement is a process of its own that first drops the store's files from the page cache. The limits are those
of real cgroups: memory of half the store, and in a second pass a slower disk, so that the disk is what one waits for.
Where none can be made, run it under `systemd-run --scope -p MemoryMax=1400M`; it uses the limit that it finds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import batchwright as bw
from batchwright.base.machine import available_bytes
from benchmarks.data import corpus_store

__all__ = ["main"]

ROW_TOKENS, BATCH_ROWS = 2048, 32
ROW_BYTES = 2 * ROW_TOKENS
CGROUPS = Path("/sys/fs/cgroup")


def shard_files(store: Path) -> list[Path]:
    opened = bw.Store(store)
    return [opened.shard_path(row) for row in range(len(opened.shards["num_tokens"]))]


def drop(store: Path) -> None:
    """Let the page cache forget a store."""
    for path in shard_files(store):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)  # what is not on disk yet stays
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


# What one process measures


def sequential(store: Path) -> dict[str, float]:
    """A plain read of the files, 4 MB at a time."""
    paths, buffer, read = shard_files(store), bytearray(4 << 20), 0
    began = time.perf_counter()
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while got := file.readinto(buffer):
                read += got
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "mb_s": read / seconds / 1e6}


def warm(store: Path) -> dict[str, float]:
    """From nothing to a loader whose data is all in memory."""
    began = time.perf_counter()
    loader = bw.PretrainDataLoader(store, chunk_size=ROW_TOKENS, batch_size=BATCH_ROWS, framework="numpy")
    opened = time.perf_counter() - began
    threads = [thread for thread in threading.enumerate() if thread.name == "batchwright-read-ahead"]
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    assert len(loader.get_batch()) == BATCH_ROWS
    return {"seconds": seconds, "open_ms": 1e3 * opened, "threads": len(threads)}


def load(
    store: Path, seconds: float, shuffle: Any, pool_rows: int | None = None, read_ahead: bool | None = None
) -> dict[str, float]:
    """Batches, summed, for one epoch or some seconds."""
    began = time.perf_counter()
    loader = bw.PretrainDataLoader(
        store,
        chunk_size=ROW_TOKENS,
        batch_size=BATCH_ROWS,
        framework="numpy",
        shuffle=bw.Shuffle(shuffle, pool_rows=pool_rows),
        delivery=bw.Delivery(read_ahead=read_ahead),
    )
    rows = total = 0
    for batch in loader:
        total += int(batch.input_ids.sum())
        rows += BATCH_ROWS
        if time.perf_counter() - began > seconds:
            break
    took = time.perf_counter() - began
    return {"rows_s": rows / took, "mb_s": rows * ROW_BYTES / took / 1e6, "read_mb": _read_bytes() / 1e6}


def _read_bytes() -> int:
    """Bytes that this process made the disk read."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"])


def measure(what: str, store: Path, groups: list[Path], **settings: Any) -> dict[str, float]:
    """Measure in a new process, inside some cgroups."""

    def enter() -> None:
        for group in groups:
            (group / "cgroup.procs").write_text("0")

    command = [sys.executable, "-m", "benchmarks.cold", "--measure", json.dumps([what, str(store), settings])]
    ran = subprocess.run(command, preexec_fn=enter, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise SystemExit(f"{what} failed:\n{ran.stderr}")
    found: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    return found


# Limits


@contextlib.contextmanager
def limited(memory_bytes: int, disk_mb_s: int | None, store: Path) -> Iterator[list[Path] | str]:
    """Cgroups below our own, with these limits; a text that says why, where they cannot be made."""
    groups: list[Path] = []
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = {line.split(":")[1]: line.strip().split(":", 2)[2] for line in lines}
    name = f"batchwright-cold-{os.getpid()}"
    try:
        try:
            if "memory" in own:
                groups.append(_make(CGROUPS / "memory" / own["memory"].lstrip("/") / name))
                (groups[-1] / "memory.limit_in_bytes").write_text(str(memory_bytes))
            else:
                groups.append(_make(CGROUPS / own[""].lstrip("/") / name))
                (groups[-1] / "memory.max").write_text(str(memory_bytes))
            if disk_mb_s is not None:
                device = os.stat(store).st_dev
                limit = f"{os.major(device)}:{os.minor(device)}"
                if "blkio" in own:
                    groups.append(_make(CGROUPS / "blkio" / own["blkio"].lstrip("/") / name))
                    (groups[-1] / "blkio.throttle.read_bps_device").write_text(f"{limit} {disk_mb_s * 10**6}")
                else:
                    (groups[-1] / "io.max").write_text(f"{limit} rbps={disk_mb_s * 10**6}")
        except (OSError, KeyError) as error:
            yield f"no cgroup with a limit can be made here: {error}"
        else:
            yield groups
    finally:
        for group in groups:
            with contextlib.suppress(OSError):
                (group / "memory.force_empty").write_text("0")  # version 1: what it cached would keep it alive
            group.rmdir()


def _make(group: Path) -> Path:
    group.mkdir()
    return group


# What is printed


def print_warm(store: Path, runs: int) -> None:
    ratios, opens = [], []
    for _ in range(runs):
        plain = measure("sequential", store, [])
        ours = measure("warm", store, [])
        ratios.append(ours["seconds"] / plain["seconds"])
        opens.append(ours["open_ms"])
        print(f"  sequential {plain['mb_s']:6.0f} MB/s   time to warm / sequential {ratios[-1]:.2f}", flush=True)
    print(f"time to warm / sequential read: median {statistics.median(ratios):.2f}   (goal: at most 1.25)")


def print_limited(store: Path, groups: list[Path], memory_bytes: int, runs: int) -> None:
    pool_rows = memory_bytes // (6 * ROW_BYTES)
    ratios, by_loader = [], []
    for _ in range(runs):
        plain = measure("sequential", store, groups)
        none = measure("load", store, groups, shuffle="none", seconds=60)
        pool = measure("load", store, groups, shuffle="pool", pool_rows=pool_rows, seconds=60)
        after = measure("sequential", store, groups)
        ratios.append(2 * pool["mb_s"] / (plain["mb_s"] + after["mb_s"]))
        by_loader.append(pool["mb_s"] / none["mb_s"])
        print(
            f"  sequential read {plain['mb_s']:5.0f} and {after['mb_s']:5.0f} MB/s   loader, none {none['mb_s']:5.0f}"
            f"   pool {pool['mb_s']:5.0f} (read {pool['read_mb']:.0f} MB)   pool / sequential {ratios[-1]:.2f}",
            flush=True,
        )
    print(f"  pool / sequential read: median {statistics.median(ratios):.2f}   (goal: at least 0.8)")
    print(f"  pool / the same loader, sequential: median {statistics.median(by_loader):.2f}")
    for name, settings in {
        "pool, nothing read ahead": {"shuffle": "pool", "pool_rows": pool_rows, "read_ahead": False},
        "global": {"shuffle": "global"},
        "global, nothing read ahead": {"shuffle": "global", "read_ahead": False},
    }.items():
        got = measure("load", store, groups, seconds=12, **settings)
        print(f"  {name:<28}{got['rows_s']:>8.0f} rows/s{got['mb_s']:>7.0f} MB/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=1_500_000_000, help="of the store, 2 bytes each")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--disk", type=int, default=100, metavar="MB/S", help="of the slower disk")
    parser.add_argument("--only", choices=("warm", "memory", "disk"), help="one part")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that cgroups are removed
    if options.measure:
        what, path, settings = json.loads(options.measure)
        drop(Path(path))
        print(json.dumps({"sequential": sequential, "warm": warm, "load": load}[what](Path(path), **settings)))
        return
    store = corpus_store(options.tokens)
    size = sum(path.stat().st_size for path in shard_files(store))
    print(f"{size / 1e6:.0f} MB of tokens, {available_bytes() / 1e6:.0f} MB of memory free, {os.cpu_count()} CPUs")
    if options.only in (None, "warm"):
        print_warm(store, options.runs)
    for disk_mb_s in (None, options.disk):
        if options.only not in (None, "memory" if disk_mb_s is None else "disk"):
            continue
        with limited(size // 2, disk_mb_s, store) as groups:
            print(f"memory of {size / 2e6:.0f} MB, disk {'as it is' if disk_mb_s is None else f'of {disk_mb_s} MB/s'}")
            if isinstance(groups, list):
                print_limited(store, groups, size // 2, options.runs)
            elif disk_mb_s is None and available_bytes() < size:
                print_limited(store, [], available_bytes(), options.runs)
            else:
                print(f"  {groups}")


if __name__ == "__main__":
    main()
