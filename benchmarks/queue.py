"""How fast do batches cross from one process to another, how long is one call, what does waiting cost? Beside files of
torch.save, queues in memory, and the bare bytes.

    python -m benchmarks.queue                           5 rounds: about 8 minutes
    python -m benchmarks.queue --rounds 1 --only rates
    python -m benchmarks.queue --data /dev/shm           another file system than that of the temporary folder
    python -m benchmarks.queue --quick                   does it run? A minute; the numbers mean nothing

A batch is x, y int64[64, 256]: 256 KB. Every measurement starts a producer and a consumer, processes of their own. The
producer gives prepared batches, 17 that come round again, so that no sampling is measured. The consumer looks at two
numbers that say which batch it is: one that is lost or comes twice ends the run.

"one file a batch" is what people write: torch.save under another name, rename; torch.load, delete. "the limit" is
write() and read() of the same bytes in files of 100 batches, from memory that is in the cache into memory that is used
again and begins a page; rename, delete, at most 2 files ahead; no header, no checksum, no claim, no record of what was
taken. Both know the next file's name, and look for it every 0.1 ms. "space reserved": the same with posix_fallocate
before the first write, for information; so does batchwright. Queues in memory hold at most 8 batches (with 200 they
were no faster); torch's gets a fresh tensor each time, because it would send the same memory again.

Rates are taken after 300 batches, at which nothing lies ready that was made before the clock started. "CPU us" is what
a side computes for each batch, all its threads together, waiting not included but for what it costs.

"Calls" times `get_batch` alone, where 20 files lie ready and no provider runs: calls inside of a file, calls that
change to the next one (which is every hundredth), and the mean of all calls of whole files, changes included.

"Waiting" is the CPU time of a consumer, over 6 s in which its provider is alive and makes nothing.

Where others use the machine, a measurement waits for them; one during which they used more than a fifth of a CPU all
the same is made again, at most twice. Printed is the median of the rounds, with the least and the most; a ratio is
between two of one round, ours over theirs. Not shown: several machines, network file systems, disks that are slower
than what is written (the files of a queue are deleted before most of them reach the disk, unless durable=True).
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
from statistics import median
from typing import Any, NamedTuple

from benchmarks.peers.buffers import touch_free_memory
from benchmarks.peers.pools import others_seconds
from benchmarks.peers.queues import BATCH_BYTES, FILE_BATCHES, run_pair
from benchmarks.peers.source import bench_home, version_of
from benchmarks.peers.table import Row, markdown, missing, spread

BACKLOG_FILES = 2
WARM_BATCHES = 300
READY_FILES = 20
TOUCHED_BYTES = 2 << 30
FEW_CPUS = 0.2
"""A measurement in which others used more CPUs than this is made again."""


class Way(NamedTuple):
    name: str
    module: str
    part: str
    task: dict[str, Any]


OURS = "queue_batchwright"
ARRAYS, TENSORS = "batchwright, arrays", "batchwright, tensors"
ONE_FILE, LIMIT, TORCH_QUEUE = (
    "one file a batch, torch.save",
    "the limit: write(), read()",
    "torch.multiprocessing.Queue",
)
IN_MEMORY = {"most_batches": 8}
MS_OF_WORK = {"work_seconds": 0.001}
PORTABLE = {"env": {"BATCHWRIGHT_PORTABLE": "1"}}
WAYS = (
    Way(ARRAYS, OURS, "rates", {"framework": "numpy", "num_batches": 10_000}),
    Way(LIMIT, "queue_files", "rates", {"how": "bare", "num_batches": 10_000}),
    Way("the limit, space reserved", "queue_files", "rates", {"how": "reserved", "num_batches": 10_000}),
    Way(TENSORS, OURS, "rates", {"framework": "torch", "num_batches": 10_000}),
    Way(ONE_FILE, "queue_files", "rates", {"how": "torch.save", "num_batches": 2_500}),
    Way(TORCH_QUEUE, "queue_memory", "rates", {"how": "torch", "num_batches": 2_000, **IN_MEMORY}),
    Way("multiprocessing.Queue, arrays", "queue_memory", "rates", {"how": "python", "num_batches": 3_000, **IN_MEMORY}),
    Way("batchwright, two providers", OURS, "rates", {"framework": "numpy", "num_batches": 10_000, "producers": 2}),
    Way("batchwright, durable=True", OURS, "rates", {"framework": "numpy", "num_batches": 2_000, "durable": True}),
    Way("batchwright, arrays, calls", OURS, "calls", {"framework": "numpy"}),
    Way("batchwright, tensors, calls", OURS, "calls", {"framework": "torch"}),
    Way("batchwright, tensors, 1 ms of pause after each call", OURS, "calls", {"framework": "torch", **MS_OF_WORK}),
    Way("batchwright, inotify", OURS, "idle", {}),
    Way("batchwright, BATCHWRIGHT_PORTABLE=1", OURS, "idle", PORTABLE),
)
DO = {"rates": "rate", "calls": "calls", "idle": "idle"}


def measure(
    ways: Sequence[Way],
    rounds: int,
    home: Path,
    say: Callable[[str], None],
    *,
    tries: int,
    patience_seconds: float,
    is_quick: bool,
) -> list[Row]:
    """A row for each way. One that cannot run keeps its row, which says why."""
    rows = {way.name: Row(way.name) for way in ways}
    for number in range(rounds):
        for way in ways:
            if rows[way.name].why_not is None:
                found = run_quietly(way, home, tries, patience_seconds, is_quick=is_quick)
                rows[way.name].add(found)
                shown = found.get("error") or ", ".join(f"{name} {value:,.1f}" for name, value in found.items())
                say(f"round {number + 1}: {way.name}: {shown}")
    return list(rows.values())


def run_quietly(way: Way, home: Path, tries: int, patience_seconds: float, *, is_quick: bool = False) -> dict[str, Any]:
    """The one that others disturbed least, of so many; of one, where nobody did."""
    tried: list[dict[str, Any]] = []
    while len(tried) < tries:
        wait_for_quiet(patience_seconds)
        tried.append(run_way(way, home, is_quick=is_quick))
        if "error" in tried[-1] or tried[-1]["others"] < FEW_CPUS:
            return tried[-1]
    return min(tried, key=lambda found: found["others"])


def wait_for_quiet(patience_seconds: float) -> None:
    """Until others use little of the machine, or for a while."""
    until = time.monotonic() + patience_seconds
    while time.monotonic() < until:
        before, began = others_seconds(), time.monotonic()
        time.sleep(1)
        if others_seconds() - before < FEW_CPUS * (time.monotonic() - began):
            return


def run_way(way: Way, home: Path, *, is_quick: bool = False) -> dict[str, Any]:
    ready_files = 3 if is_quick else READY_FILES
    task = {"do": DO[way.part], "backlog_files": BACKLOG_FILES, "warm_batches": WARM_BATCHES, **way.task}
    if way.part == "calls":
        # The consumer's process makes the files itself before it takes them.
        task |= {"producers": 0, "backlog_files": ready_files, "num_files": ready_files}
        task |= {"num_batches": ready_files * FILE_BATCHES}
    elif way.part == "idle":
        task |= {"slow_seconds": 3600, "timeout_seconds": 1 if is_quick else 6}
    elif is_quick:
        task |= {"warm_batches": FILE_BATCHES, "num_batches": 3 * FILE_BATCHES}
    with tempfile.TemporaryDirectory(prefix="queue-", dir=home) as folder:
        return run_pair(way.module, {**task, "folder": folder})


# Tables


def show_rates(rows: Sequence[Row]) -> str:
    """Batches/s and CPU time; a ratio is ours of the same round over this."""
    by_name = {row.name: row for row in rows}
    header = [
        "",
        "batches/s",
        "MB/s",
        "batchwright over it, arrays",
        "tensors",
        "CPU us of the producer",
        "of the consumer",
    ]
    lines = []
    for row in rows:
        if row.why_not is not None:
            lines.append([row.name, row.why_not, *[""] * (len(header) - 2)])
            continue
        is_ours = row.name.startswith("batchwright")
        rates = row.measured["batches_s"]
        lines.append(
            [
                f"**{row.name}**" if is_ours else row.name,
                spread(rates, ",.0f"),
                f"{median(rates) * BATCH_BYTES / 1e6:,.0f}",
                *("" if is_ours else spread(ratios(by_name.get(ours), row), ".2f") for ours in (ARRAYS, TENSORS)),
                *(spread(row.measured[f"{side}_us"], ",.0f") for side in ("producer", "consumer")),
            ]
        )
    return markdown(header, lines)


def ratios(ours: Row | None, theirs: Row | None) -> list[float]:
    """Ours over theirs, round by round."""
    if ours is None or theirs is None or ours.why_not or theirs.why_not:
        return []
    return [mine / other for mine, other in zip(ours.measured["batches_s"], theirs.measured["batches_s"], strict=True)]


def show_calls(rows: Sequence[Row]) -> str:
    names = {
        "median_us": "median",
        "inside_p99_us": "99 % inside of files",
        "p99_us": "99 % of all",
        "change_us": "change to the next file",
        "longest_us": "longest",
        "mean_us": "mean over whole files",
        "first_us": "the first",
    }
    lines = [
        [f"**{row.name}**", *(row.why_not or spread(row.measured[name], ",.0f") for name in names)]
        if row.why_not is None
        else [row.name, row.why_not, *[""] * (len(names) - 1)]
        for row in rows
    ]
    return markdown(["one call, us", *names.values()], lines)


def show_idle(rows: Sequence[Row]) -> str:
    lines = [[f"**{row.name}**", row.why_not or spread(row.measured["idle_percent"], ".2f")] for row in rows]
    return markdown(["a waiting consumer", "% of a CPU"], lines)


def show_goals(rows: Sequence[Row]) -> str:
    """What was asked for, what was measured, and whether that is enough."""
    by_name = {row.name: row for row in rows}
    lines = []
    for goal, ours, theirs, least in (
        ("3 times one file a batch, torch.save", TENSORS, ONE_FILE, 3.0),
        ("0.7 of write() and read()", ARRAYS, LIMIT, 0.7),
        ("3 times torch.multiprocessing.Queue", TENSORS, TORCH_QUEUE, 3.0),
    ):
        found = ratios(by_name.get(ours), by_name.get(theirs))
        if found:
            lines.append([goal, spread(found, ".2f"), "yes" if median(found) >= least else "**no**"])
    for goal, name, measured, most in (
        ("a call under 50 us, median, arrays", "batchwright, arrays, calls", "median_us", 50.0),
        ("a call under 50 us, median, tensors", "batchwright, tensors, calls", "median_us", 50.0),
        ("the mean over whole files under 50 us, arrays", "batchwright, arrays, calls", "mean_us", 50.0),
        ("a waiting consumer under 1 % of a CPU", "batchwright, inotify", "idle_percent", 1.0),
        ("the same without inotify", "batchwright, BATCHWRIGHT_PORTABLE=1", "idle_percent", 1.0),
    ):
        if name in by_name and by_name[name].why_not is None:
            values = by_name[name].measured[measured]
            lines.append([goal, spread(values, ".2f"), "yes" if median(values) < most else "**no**"])
    return markdown(["goal", "measured", "reached"], lines)


# The program


def file_system(folder: Path) -> str:
    """'ext4', 'tmpfs': of the mount that the folder lies in; nothing where the system does not say."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return "?"
    return max((len(at), kind) for at, kind in mounts if folder.resolve().is_relative_to(at))[1]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=[*DO])
    parser.add_argument("--match", nargs="+", help="only the ways whose names contain one of these")
    parser.add_argument("--data", type=Path, help="where the queues lie while they are measured")
    parser.add_argument("--out", type=Path, help="write the tables to this file too")
    parser.add_argument("--patience", type=float, default=60, help="how long a measurement waits for others, seconds")
    parser.add_argument("--tries", type=int, default=3, help="how often a measurement is made that others disturb")
    parser.add_argument("--quick", action="store_true", help="one short round, to see whether it runs")
    options = parser.parse_args(arguments)
    ways = [way for way in WAYS if way.part in (options.only or DO)]
    ways = [way for way in ways if not options.match or any(word in way.name for word in options.match)]
    (options.data or bench_home()).mkdir(parents=True, exist_ok=True)
    home = Path(tempfile.mkdtemp(prefix="queues-", dir=options.data or bench_home()))
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}"
    versions = ", ".join(f"{name} {version_of(name)}" for name in ("batchwright", "numpy", "torch"))
    rounds = 1 if options.quick else options.rounds
    pieces = [f"{machine}, {versions}; batches of {BATCH_BYTES:,} bytes, {rounds} rounds, {file_system(home)}"]
    print(pieces[0], flush=True)

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    try:
        if not options.quick:
            touch_free_memory(TOUCHED_BYTES)
        tries, patience_seconds = (1, 0.0) if options.quick else (options.tries, options.patience)
        rows = measure(ways, rounds, home, say, tries=tries, patience_seconds=patience_seconds, is_quick=options.quick)
    finally:
        shutil.rmtree(home)
    part_of = {way.name: way.part for way in ways}
    for part, show in (("rates", show_rates), ("calls", show_calls), ("idle", show_idle)):
        if shown := [row for row in rows if part_of[row.name] == part]:
            pieces.append(show(shown))
    pieces.append(show_goals(rows))
    print("\n" + "\n\n".join(pieces[1:]))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text("\n\n".join(pieces) + "\n")
    absent = missing([way.name for way in ways], rows, "others")
    absent += [row.name for row in rows if row.why_not is not None]
    if absent:
        print(f"missing: {', '.join(absent)}", file=sys.stderr)
    return 1 if absent else 0


if __name__ == "__main__":
    sys.exit(main())
