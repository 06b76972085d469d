"""How fast do mixed positions come out of shards, how long are the waits, what does the pool weigh? Beside a list of
dicts.

    python -m benchmarks.pool                            4M positions, a pool of 2M, 3 rounds: about 25 minutes
    python -m benchmarks.pool --rounds 1 --only batches rows
    python -m benchmarks.pool --large                    20M positions (6 GB on disk): pool sizes, resume
    python -m benchmarks.pool --data FOLDER              keep the shards there, and use them again

A position has 304 bytes: board uint8[2, 11, 11], policy float16[25], value float32, move and number int32. Shards of
100,000 lie as npz (not compressed) in two directories, 5 : 3, and are in the page cache. Pool 2M, refilled at 1.5M.

The list of dicts (`benchmarks/peers/pool_dicts.py`) is the design that such programs begin with: a dict for each
position in a list, which the consumer fills up and shuffles when it is down to the threshold, and pops from. Rows are
views of a shard's arrays, or copies (slower, and lighter, because a view keeps its whole shard), or come from gzip
pickles of dicts. Batches of 1,024 are stacked column by column with NumPy, or by torch's DataLoader; its workers have
every n-th shard and an n-th of the pool. There are no resume and no state.

Every measurement is a process of its own that goes through one epoch; every row must come once. The consumer looks at
each cache line of the boards and adds up the numbers. "Rows/s" is the whole epoch, from the call that opens the pool
until its end, first fill included; imports are not. Free memory is touched before the clock starts, because its first
touch can wait for the host of a virtual machine (2 s for the 608 MB of a pool here, 0.07 s the second time).

A wait is the time in `next()`; the first batch is on its own. A refill's wait is the longest of the batch in which it
is due and its two neighbours. "1 ms of work" multiplies matrices for 1 ms after each batch, on one thread. Peak RSS is
VmHWM of the process, interpreter and NumPy included; where there are workers, or a child that decodes pickles, it is
what all processes together had at some moment, looked at every 0.1 s.

Where others use the machine, a measurement waits for them, up to two minutes; one during which they used more than a
fifth of a CPU all the same is made again, at most twice. Printed is the median of the rounds, with the least and the
most; a ratio is between two of one round, ours over theirs.
Not shown: cold files, several ranks, augmentation, other formats, other shapes of rows.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.peers.pools import BATCH_ROWS, ROW_BYTES, make_shards, others_seconds, pickled
from benchmarks.peers.processes import run_child
from benchmarks.peers.source import bench_home, version_of
from benchmarks.peers.table import Row, markdown, missing, spread

SHARD_ROWS = 100_000
POOL_ROWS = 2_000_000
LARGE_ROWS = 20_000_000
POOL_SIZES = (500_000, 2_000_000, 8_000_000, 20_000_000)
OURS, THEIRS = "pool_batchwright", "pool_dicts"
LIMIT_SECONDS = 600
TOUCHED_BYTES = 4 << 30
TRIES, FEW_CPUS = 3, 0.2
"""A measurement in which others used more CPUs than this is made again."""
PATIENCE_SECONDS = 120


class Way(NamedTuple):
    name: str
    module: str
    part: str
    """Rows of one part are compared with the first of ours in it."""
    how: str
    task: dict[str, Any]


BATCHES, ROWS = {"way": "batches"}, {"way": "rows"}
WORKING, DECODING = {**BATCHES, "work": True}, {**BATCHES, "has_children": True}
IN_PROCESS, TWO_WORKERS = (
    {"way": "loader", "workers": workers, "torch": True, "has_children": workers > 0} for workers in (0, 2)
)
WAYS = (
    Way("batchwright, `batches(1024)`", OURS, "batches", "npz", BATCHES),
    Way("batchwright, torch imported", OURS, "batches", "npz", {**BATCHES, "torch": True}),
    Way("list of dicts, views", THEIRS, "batches", "views", BATCHES),
    Way("list of dicts, copies", THEIRS, "batches", "copies", BATCHES),
    Way("batchwright, one by one", OURS, "rows", "npz", ROWS),
    Way("list of dicts, views, one by one", THEIRS, "rows", "views", ROWS),
    Way("list of dicts, copies, one by one", THEIRS, "rows", "copies", ROWS),
    Way("batchwright, `loader()`", OURS, "torch", "npz", IN_PROCESS),
    Way("batchwright one by one, torch's DataLoader", OURS, "torch", "row by row", IN_PROCESS),
    Way("list of dicts, views, torch's DataLoader", THEIRS, "torch", "views", IN_PROCESS),
    Way("batchwright, `loader(2)`", OURS, "torch, 2 workers", "npz", TWO_WORKERS),
    Way("list of dicts, views, torch's DataLoader, 2 workers", THEIRS, "torch, 2 workers", "views", TWO_WORKERS),
    Way("batchwright, gzip pickles", OURS, "pickles", "pickles", DECODING),
    Way("list of dicts, gzip pickles", THEIRS, "pickles", "pickles", DECODING),
    Way("batchwright, 1 ms of work", OURS, "work", "npz", WORKING),
    Way("list of dicts, views, 1 ms of work", THEIRS, "work", "views", WORKING),
)
PARTS = tuple(dict.fromkeys(way.part for way in WAYS))


def measure(
    ways: Sequence[Way], rounds: int, num_rows: int, folders: dict[str, list[Path]], say: Callable[[str], None]
) -> list[Row]:
    """A row for each way. One that cannot run keeps its row, which says why."""
    rows = {way.name: Row(way.name) for way in ways}
    for number in range(rounds):
        for way in ways:
            if rows[way.name].why_not is None:
                found = run_quietly(way, num_rows, folders["pickles" if way.how == "pickles" else "npz"])
                rows[way.name].add(found)
                shown = found.get("error") or f"{found['rows_s']:,.0f} rows/s"
                say(f"round {number + 1}: {way.name}: {shown}; CPUs of others: {found.get('others') or 0:.1f}")
    return list(rows.values())


def run_quietly(way: Way, num_rows: int, folders: Sequence[Path], *more: Any, **options: Any) -> dict[str, Any]:
    """The one that others disturbed least, of three; of one, where nobody did."""
    tried: list[dict[str, Any]] = []
    while len(tried) < TRIES:
        wait_for_quiet()
        tried.append(run_way(way, num_rows, folders, *more, **options))
        if (tried[-1].get("others") or 0) < FEW_CPUS:
            return tried[-1]
    return min(tried, key=lambda found: found["others"])


def wait_for_quiet() -> None:
    """Until others use little of the machine, or for a while."""
    until = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < until:
        before, began = others_seconds(), time.monotonic()
        time.sleep(2)
        if others_seconds() - before < FEW_CPUS * (time.monotonic() - began):
            return


def run_way(
    way: Way, num_rows: int, folders: Sequence[Path], pool_rows: int = POOL_ROWS, **more: Any
) -> dict[str, Any]:
    task = {
        "peer": way.module,
        "do": "pool",
        "how": way.how,
        "folders": [str(folder) for folder in folders],
        "num_rows": num_rows,
        "shard_rows": SHARD_ROWS,
        "pool_rows": pool_rows,
        "threshold": pool_rows * 3 // 4,
        "touched_bytes": max(TOUCHED_BYTES, pool_rows * ROW_BYTES * 5 // 4),
        **way.task,
        **more,
    }
    return run_child(task, limit_seconds=LIMIT_SECONDS, env={"OPENBLAS_NUM_THREADS": "1"})


# Tables


def show_rates(ways: Sequence[Way], rows: Sequence[Row]) -> str:
    """Rows/s, first batch and memory; a ratio is ours of the same part and round over this."""
    by_name = {row.name: row for row in rows}
    header = ["", "rows/s", "batchwright over it", "rows/s after the first batch", "first batch, s", "peak RSS, MB",
              "batchwright over it"]  # fmt: skip
    lines = []
    for way in ways:
        row, ours = by_name[way.name], by_name[_ours_of(way, ways).name]
        if row.why_not is not None:
            lines.append([way.name, row.why_not, *[""] * (len(header) - 2)])
            continue
        is_ours = way.module == OURS
        lines.append(
            [
                f"**{way.name}**" if is_ours else way.name,
                spread(row.measured["rows_s"], ",.0f"),
                "" if is_ours else _ratios(ours, row, "rows_s"),
                spread(row.measured["later_rows_s"], ",.0f"),
                spread(row.measured["first_s"], ".2f"),
                spread(row.measured["most_mb"], ",.0f"),
                "" if is_ours else _ratios(ours, row, "most_mb", ".2f"),
            ]
        )
    return markdown(header, lines)


def show_waits(ways: Sequence[Way], rows: Sequence[Row]) -> str:
    """How long `next()` took, and what of it fell on refills."""
    header = ["waits, ms", "median", "99 %", "99.9 %", "longest", "of refills: median", "longest elsewhere",
              "over 50 ms, of refills"]  # fmt: skip
    by_name = {row.name: row for row in rows}
    lines = []
    for way in ways:
        row = by_name[way.name]
        if way.task["way"] != "batches" or row.why_not is not None:
            continue
        refills = [wait for waits in row.measured["refills_ms"] for wait in waits]
        lines.append(
            [
                f"**{way.name}**" if way.module == OURS else way.name,
                spread(row.measured["p50_ms"], ".2f"),
                spread(row.measured["p99_ms"], ".2f"),
                spread(row.measured["p999_ms"], ".1f"),
                spread(row.measured["max_ms"], ",.0f"),
                spread(refills, ",.1f"),
                spread(row.measured["max_elsewhere_ms"], ".1f"),
                f"{sum(row.measured['over_50'])}, {len(refills)}",
            ]
        )
    return markdown(header, lines)


def show_shuffles(rows: Sequence[Row], rounds: int) -> str:
    """What mixes 2M entries at a refill."""
    theirs = [s for row in rows for timed in row.measured.get("pool_s", ()) for s in timed.get("shuffle", ())]
    lines = [["`random.shuffle` of the list of dicts", spread([1000 * seconds for seconds in theirs], ",.0f")]]
    lines += [
        [f"**batchwright, {entries:,} entries**", spread(permutation_ms(entries, rounds), ",.0f")]
        for entries in (POOL_ROWS, LARGE_ROWS)
    ]
    return markdown(["mixing at a refill", "ms"], lines)


def permutation_ms(entries: int, rounds: int) -> list[float]:
    from batchwright.order.refills import mixed_in

    survivors, new = np.arange(entries * 3 // 4), np.arange(entries * 3 // 4, entries)
    found = []
    for key in range(rounds):
        began = time.perf_counter()
        mixed_in(survivors, new, key)
        found.append(1000 * (time.perf_counter() - began))
    return found


def _ours_of(way: Way, ways: Sequence[Way]) -> Way:
    return next(other for other in ways if other.part == way.part and other.module == OURS)


def _ratios(ours: Row, row: Row, name: str, form: str = ".1f") -> str:
    if ours.why_not is not None:
        return ""
    return spread([mine / other for mine, other in zip(ours.measured[name], row.measured[name], strict=True)], form)


# 20M positions


def measure_sizes(rounds: int, folders: Sequence[Path], say: Callable[[str], None]) -> str:
    """An epoch of 20M positions with pools of several sizes."""
    lines = []
    for pool_rows in POOL_SIZES:
        row = Row(f"{pool_rows:,}")
        for number in range(rounds):
            row.add(run_quietly(WAYS[0], LARGE_ROWS, folders, pool_rows, max_memory_gb=16))
            say(f"round {number + 1}: pool of {pool_rows:,}: {row.why_not or row.last('most_mb')}")
        if row.why_not is not None:
            lines.append([row.name, row.why_not, *[""] * 6])
            continue
        raw_mb = pool_rows * ROW_BYTES / 1e6
        refills = [wait for waits in row.measured["refills_ms"] for wait in waits]
        lines.append(
            [
                row.name,
                f"{raw_mb:,.0f}",
                spread(row.measured["most_mb"], ",.0f"),
                spread([peak / raw_mb for peak in row.measured["most_mb"]], ".2f"),
                spread(row.measured["rows_s"], ",.0f"),
                spread(row.measured["first_s"], ".2f"),
                spread(row.measured["max_ms"], ",.0f"),
                spread(refills, ",.1f"),
            ]
        )
    header = ["pool", "raw, MB", "peak RSS, MB", "of raw", "rows/s", "first batch, s", "longest wait, ms",
              "waits of refills, ms"]  # fmt: skip
    return markdown(header, lines)


def measure_resume(rounds: int, folders: Sequence[Path], say: Callable[[str], None]) -> str:
    """Stop at half of 20M positions, and go on in a new process: the next 20 batches must have the same bytes."""
    lines = []
    for pool_rows in POOL_SIZES[:3]:
        row = Row(f"{pool_rows:,}")
        with tempfile.TemporaryDirectory(prefix="batchwright-pool-") as scratch:
            state = str(Path(scratch, "state"))
            half = Way("", OURS, "", "npz", {"way": "half", "state": state, "max_memory_gb": 16})
            stopped = run_way(half, LARGE_ROWS, folders, pool_rows)
            if "error" in stopped:
                row.add(stopped)
            for _ in range(rounds if row.why_not is None else 0):
                resumed = half._replace(task={**half.task, "way": "resumed"})
                row.add(run_quietly(resumed, LARGE_ROWS, folders, pool_rows))
                say(f"resume with a pool of {pool_rows:,}: {row.why_not or row.last('resume_s')}")
        if row.why_not is not None:
            lines.append([row.name, row.why_not, "", ""])
            continue
        is_exact = all(hashes == stopped["hashes"] for hashes in row.measured["hashes"])
        lines.append(
            [
                row.name,
                spread(row.measured["resume_s"], ".2f"),
                "yes" if is_exact else "**no**",
                f"{stopped['state_bytes']:,}",
            ]
        )
    return markdown(["resume at 10M of 20M, pool", "state to first batch, s", "exact", "state, bytes"], lines)


# The program


def require_disk(folder: Path, num_bytes: float) -> None:
    free = shutil.disk_usage(folder).free
    if free < 1.2 * num_bytes:
        sys.exit(f"{folder} has {free / 1e9:.1f} GB free; the shards need {num_bytes / 1e9:.1f}: --data elsewhere")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--only", nargs="+", choices=PARTS)
    parser.add_argument("--ours", action="store_true", help="without the list of dicts, which takes most of the time")
    parser.add_argument("--large", action="store_true", help="pool sizes and resume with 20M positions, instead")
    parser.add_argument("--data", type=Path, help="where shards are kept; without it they are deleted at the end")
    parser.add_argument("--out", type=Path, help="write the tables to this file too")
    options = parser.parse_args()
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}"
    versions = ", ".join(f"{name} {version_of(name)}" for name in ("batchwright", "numpy", "torch", "numba"))
    num_rows = LARGE_ROWS if options.large else options.rows
    pieces = [f"{machine}, {versions}; {num_rows:,} positions, pool {POOL_ROWS:,}, batches of {BATCH_ROWS:,}"]
    print(pieces[0], flush=True)

    def show(piece: str) -> None:
        pieces.append(piece)
        print(f"\n{piece}", flush=True)

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    absent: list[str] = []
    (options.data or bench_home()).mkdir(parents=True, exist_ok=True)
    home = options.data or Path(tempfile.mkdtemp(prefix="pool-", dir=bench_home()))
    try:
        shards = home / f"pool-{num_rows}"
        require_disk(home, 0 if shards.exists() else num_rows * ROW_BYTES * (1 if options.large else 2))
        folders = make_shards(shards, num_rows, SHARD_ROWS)
        if options.large:
            show(measure_sizes(options.rounds, folders, say))
            show(measure_resume(options.rounds, folders, say))
        else:
            ways = [way for way in WAYS if way.part in (options.only or PARTS)]
            ways = [way for way in ways if way.module == OURS or not options.ours]
            beside = pickled(folders) if any(way.how == "pickles" for way in ways) else []
            rows = measure(ways, options.rounds, num_rows, {"npz": folders, "pickles": beside}, say)
            absent += missing([way.name for way in ways], rows, "rows_s")
            absent += [row.name for row in rows if row.name.startswith("batchwright") and row.why_not is not None]
            show(show_rates(ways, rows))
            show(show_waits(ways, rows))
            show(show_shuffles(rows, options.rounds))
    finally:
        if options.data is None:
            shutil.rmtree(home)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text("\n\n".join(pieces) + "\n")
    if absent:
        print(f"missing: {', '.join(absent)}", file=sys.stderr)
    return 1 if absent else 0


if __name__ == "__main__":
    sys.exit(main())
