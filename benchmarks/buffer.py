"""How fast do rows go into a buffer and come out, and what do they weigh? 1M rows of {label: int64, obs: float32[84]}.

    .venv-peers/bin/python -m benchmarks.buffer                   what `make bench-peers` builds has all peers
    python -m benchmarks.buffer --only numpy batchwright             contenders whose file is named so
    python -m benchmarks.buffer --ways blocks_10000 --rounds 1    one part of it, noisier
    python -m benchmarks.buffer --clock cpu                       CPU seconds, where others use the machine too

Every measurement is a process of its own: the rows are made, then the form that the contender takes (views of them as
dicts, TensorDicts ...; not counted), a small buffer is filled and read (imports are not counted), and the clock starts.

In: columns in blocks of 10,000 and of 100 rows, rows one by one (100,000), lists of 1,000 dicts (100,000 rows). A
contender that needs more than 10 s is stopped there, and its numbers are those of the rows that it took. Afterwards the
caller's arrays are overwritten, and 1,000 rows must come back as they went in: a contender that would keep the caller's
memory gets a copy, which is counted, because in a training loop the caller fills the same arrays again.

Memory: resident bytes more than before the first row, over the raw bytes (344 a row); "anonymous" leaves mapped files
out, "peak" is the most that there was.

Out: batches of 256 rows drawn at random, both columns as arrays or tensors. Tables that must be joined before they can
be read are joined first; "ready" says how long that took. It is in no rate, and would be due again after every write.

Plain NumPy that doubles its arrays runs right before each contender; ratios are between such neighbours, because fresh
memory is dear and its price changes from minute to minute. A measurement that waited for a CPU is made again, at most
twice. Printed is the median of the rounds, with the least and the most. Rounds go over all contenders.

Not shown: readers beside a writer, rows of many small columns or text, buffers larger than memory, dropping rows.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.peers.buffers import CLOCKS
from benchmarks.peers.processes import run_child
from benchmarks.peers.source import bench_home, version_of
from benchmarks.peers.table import Row, markdown, missing, spread


class Contender(NamedTuple):
    name: str
    module: str
    how: str


class Way(NamedTuple):
    title: str
    task: dict[str, Any]


PLAIN = Contender("plain NumPy, doubling", "buffer_numpy", "doubling")
CONTENDERS = (
    Contender("NumPy, preallocated (the limit)", "buffer_numpy", "preallocated"),
    Contender("batchwright", "buffer_batchwright", "memory"),
    Contender("batchwright, path=", "buffer_batchwright", "path"),
    Contender("TorchRL LazyTensorStorage", "buffer_torchrl", "memory"),
    Contender("TorchRL LazyTensorStorage, 1 thread", "buffer_torchrl", "memory, 1 thread"),
    Contender("TorchRL LazyMemmapStorage", "buffer_torchrl", "memmap"),
    Contender("TorchRL LazyMemmapStorage, 1 thread", "buffer_torchrl", "memmap, 1 thread"),
    Contender("TorchRL ListStorage", "buffer_torchrl", "list"),
    Contender("pyarrow, tables concatenated", "buffer_pyarrow", "concatenated"),
    Contender("pyarrow, chunks combined", "buffer_pyarrow", "combined"),
    Contender("Polars, vstack", "buffer_polars", "stacked"),
    Contender("Polars, rechunked", "buffer_polars", "rechunked"),
    Contender("HF datasets, concatenated", "buffer_hf", "concatenated"),
    Contender("Python list of dicts", "buffer_list", "dicts"),
)
WAYS = {
    "blocks_10000": Way("Columns in blocks of 10,000", {"way": "blocks", "block_rows": 10_000, "num_rows": 1_000_000}),
    "blocks_100": Way("Columns in blocks of 100", {"way": "blocks", "block_rows": 100, "num_rows": 1_000_000}),
    "rows": Way("Rows one by one", {"way": "rows", "num_rows": 100_000}),
    "dicts": Way("Lists of 1,000 dicts", {"way": "dicts", "num_rows": 100_000}),
}
_LIMIT_SECONDS = 10
_TRIES = 3
_WAITED_TOO_LONG = 0.05


def measure(
    contenders: Iterable[Contender], way: Way, rounds: int, clock: str, say: Callable[[str], None]
) -> list[Row]:
    """A row for each contender, plain NumPy first. A contender that cannot run keeps its row, which says why."""
    rows = {contender.name: Row(contender.name) for contender in (PLAIN, *contenders)}
    for number in range(rounds):
        for contender in contenders:
            if rows[contender.name].why_not is not None:
                continue
            plain = _run(PLAIN, way, clock)
            assert "error" not in plain, plain["error"]
            rows[PLAIN.name].add(plain)
            found = _run(contender, way, clock)
            rows[contender.name].add({**found, **{f"plain_{name}": plain[name] for name in ("rows_s", "batches_s")}})
            shown = found.get("error") or f"{_rates(found)} (plain NumPy {_rates(plain)})"
            say(f"round {number + 1}: {way.title}: {contender.name}: {shown}")
    return list(rows.values())


def _rates(found: dict[str, Any]) -> str:
    return f"{found['rows_s']:,.0f} rows/s, {found['batches_s']:,.0f} batches/s, waited {found['waited']:.0%}"


def _run(contender: Contender, way: Way, clock: str) -> dict[str, Any]:
    """The measurement that waited the least for a CPU, of at most three: others may use the machine."""
    tried: list[dict[str, Any]] = []
    bench_home().mkdir(parents=True, exist_ok=True)
    while not tried or (clock == "wall" and len(tried) < _TRIES and tried[-1].get("waited", 0) > _WAITED_TOO_LONG):
        with tempfile.TemporaryDirectory(prefix="buffer-", dir=bench_home()) as folder:
            task = {"do": "buffer", "peer": contender.module, "how": contender.how, "folder": folder, "clock": clock}
            tried.append(run_child({**task, **way.task, "limit_seconds": _LIMIT_SECONDS}, limit_seconds=300))
    return min(tried, key=lambda found: found.get("waited", 0))


def show(rows: Iterable[Row], way: Way) -> str:
    """The table, the fastest first, plain NumPy where it belongs; those without numbers last, with the reason."""
    header = ["", "rows/s", "over plain NumPy", "batches of 256 /s", "over plain NumPy", "memory over raw (anonymous)",
              "peak over raw", "ready, s", "version"]  # fmt: skip
    lines = []
    for row in sorted(rows, key=lambda row: -(row.middle("rows_s") or 0) if row.why_not is None else 1):
        if row.why_not is not None:
            lines.append([row.name, row.why_not, "", "", "", "", "", "", ""])
            continue
        is_cut = min(row.measured["rows"]) < way.task["num_rows"]
        lines.append(
            [
                row.name,
                _counted(row.measured["rows_s"]) + (f", {row.last('rows'):,} rows" if is_cut else ""),
                _over(row, "rows_s"),
                _counted(row.measured["batches_s"]),
                _over(row, "batches_s"),
                f"{row.middle('resident'):.2f} ({row.middle('anonymous'):.2f})",
                f"{row.middle('peak'):.2f}",
                f"{row.middle('settle_s'):.2f}" if (row.middle("settle_s") or 0) >= 0.005 else "",
                row.last("version"),
            ]
        )
    return markdown(header, lines)


def _over(row: Row, name: str) -> str:
    if f"plain_{name}" not in row.measured:
        return "1"
    return spread((np.array(row.measured[name]) / np.array(row.measured[f"plain_{name}"])).tolist(), ".2g")


def _counted(values: list[float]) -> str:
    """Rates with three figures: 1,230,000 (1,100,000 - 1,340,000)."""
    return spread([float(f"{value:.3g}") for value in values], ",.0f")


def goals(found: dict[str, list[Row]]) -> str:
    """batchwright over plain NumPy, over the fastest library and over the fastest TorchRL of this run, by medians."""
    is_library = {c.name for c in CONTENDERS if c.module not in ("buffer_numpy", "buffer_list", "buffer_batchwright")}
    is_torchrl = {c.name for c in CONTENDERS if c.module == "buffer_torchrl" and c.how != "list"}
    lines = []
    for way, number, others, goal in (
        ("blocks_10000", "rows_s", {PLAIN.name}, "0.7"),
        ("blocks_10000", "rows_s", is_library, "1"),
        ("blocks_100", "rows_s", {PLAIN.name}, "0.7"),
        ("blocks_100", "rows_s", is_library, "1"),
        ("rows", "rows_s", is_torchrl, "10"),
        ("blocks_10000", "batches_s", is_torchrl, "2"),
        ("blocks_100", "batches_s", is_torchrl, "2"),
    ):
        rates = {row.name: row.middle(number) or 0.0 for row in found.get(way, ()) if row.why_not is None}
        best = max(others & rates.keys(), key=lambda name: rates[name], default=None)
        if best is not None and "batchwright" in rates:
            ratio = rates["batchwright"] / rates[best]
            if best == PLAIN.name:
                ours = next(row for row in found[way] if row.name == "batchwright").measured
                ratio = float(np.median(np.array(ours[number]) / np.array(ours[f"plain_{number}"])))
            lines.append([WAYS[way].title, number.replace("_s", "/s"), best, f"{ratio:.2f}", goal])
    return markdown(["", "", "batchwright over", "ratio", "goal"], lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="numpy, batchwright, torchrl, pyarrow ..."
    )
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="cpu: for a machine that is not quiet")
    parser.add_argument("--out", type=Path, help="write the tables to this file too")
    options = parser.parse_args()
    chosen = [c for c in CONTENDERS if not options.only or c.module.removeprefix("buffer_") in options.only]
    versions = ", ".join(f"{name} {version_of(name)}" for name in ("numpy", "torch", "tensordict"))
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}"
    pieces = [f"{machine}, {versions}; {options.clock} seconds"]
    print(pieces[0], flush=True)
    found, absent = {}, []
    for name in options.ways:
        found[name] = measure(
            chosen, WAYS[name], options.rounds, options.clock, lambda line: print(line, file=sys.stderr, flush=True)
        )
        absent += missing([contender.name for contender in chosen], found[name], "rows_s")
        pieces.append(f"### {WAYS[name].title}\n\n{show(found[name], WAYS[name])}")
        print(f"\n{pieces[-1]}", flush=True)
    pieces.append(goals(found))
    print(f"\n{pieces[-1]}", flush=True)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text("\n\n".join(pieces) + "\n")
    if absent:
        print(f"missing without a reason: {', '.join(absent)}", file=sys.stderr)
    return 1 if absent else 0


if __name__ == "__main__":
    sys.exit(main())
