"""What does a mixture cost? 4 and 256 sources beside a single one of as many tokens, and the time to build a pattern.

    python -m benchmarks.mixing               about 3 minutes
    python -m benchmarks.mixing --rounds 5    quicker, noisier

Every loader reads 200M tokens in rows of one length, 32 in a batch; the consumer sums input_ids. All files are read
into the page cache the same way before, and every loader goes over its data once before the clock starts, because what
a first touch of mapped memory costs depends on how the kernel came by the page. Rounds go over all loaders in turn (one
source, 4, 256, one source, ...). The ratio is the mixture's throughput over that of the single source in the same
round, by the clock and by CPU time; the median of the rounds is the claim, and the quartiles are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

import batchwright as bw
from benchmarks.cold import drop, shard_files
from benchmarks.data import mixture_store
from benchmarks.loading import ROWS, consume

SOURCES = (1, 4, 256)
NUM_TOKENS = 200_000_000


def weights_of(num_sources: int) -> dict[str, float] | None:
    """No two alike, the largest three times the smallest; a single source needs none."""
    if num_sources == 1:
        return None
    return {f"source{i:03d}": 1 + 2 * i / (num_sources - 1) for i in range(num_sources)}


def open_mixture(store: Path, num_sources: int, row_tokens: int) -> Iterator[Any]:
    weights = weights_of(num_sources)
    more: dict[str, Any] = {"epochs": None} if weights is None else {"weights": weights}
    loader = bw.PretrainDataLoader(store, chunk_size=row_tokens, batch_size=ROWS, seed=7, framework="numpy", **more)
    while True:  # an iterator ends with its epoch
        yield from loader.get_iterator()


def read_anew(store: Path) -> None:
    """Files that were just written lie in the page cache in other pieces than files that were read."""
    drop(store)
    for file in shard_files(store):
        with open(file, "rb") as raw:
            while raw.read(1 << 20):
                pass


def compare(row_tokens: int, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Throughput of each number of sources, round by round, each run about as long."""
    batches, alone = {}, 0.0
    for num in SOURCES:
        store = mixture_store(num)
        read_anew(store)
        batches[num] = open_mixture(store, num, row_tokens)
        rate = consume(batches[num], NUM_TOKENS // (ROWS * row_tokens))
        alone = alone or rate
    num_batches = max(200, int(seconds * alone / (ROWS * row_tokens)))
    rates: dict[int, list[float]] = {num: [] for num in SOURCES}
    cpu_rates: dict[int, list[float]] = {num: [] for num in SOURCES}
    for _ in range(rounds):
        for num in SOURCES:
            began = time.process_time()
            rates[num].append(consume(batches[num], num_batches))
            cpu_rates[num].append(1 / (time.process_time() - began))
    ratios = {num: np.array(rates[num]) / np.array(rates[1]) for num in SOURCES}
    cpu_ratios = {num: np.array(cpu_rates[num]) / np.array(cpu_rates[1]) for num in SOURCES}
    return [
        {
            "row_tokens": row_tokens,
            "sources": num,
            "mtok_s": float(np.median(rates[num]) / 1e6),
            "ratio": np.percentile(ratios[num], (25, 50, 75)),
            "cpu_ratio": np.percentile(cpu_ratios[num], (25, 50, 75)),
        }
        for num in SOURCES
    ]


_PATTERNS = """
import json, time
import numpy as np
from batchwright.base.errors import SpecError
from batchwright.order.mix import build_pattern
from batchwright.order.mix import integer_shares

def mixtures():
    names = [str(i) for i in range(256)]
    yield "equal", integer_shares([1.0] * 256, names)
    yield "Zipf", integer_shares([1 / (i + 1) for i in range(256)], names)
    for seed in range(1000):  # some Dirichlet draws have a share that is too small to be kept
        try:
            yield "Dirichlet(1)", integer_shares(np.random.default_rng(seed).dirichlet(np.ones(256)).tolist(), names)
            break
        except SpecError:
            pass
    yield "one of 1.2e-05, the others equal", integer_shares([1.0] * 255 + [255 * 1.2e-5], names)

found = []
for name, (slots, counts) in mixtures():
    began, cpu_began = time.perf_counter(), time.process_time()
    pattern = build_pattern(tuple(counts))
    built, cpu_built = time.perf_counter(), time.process_time()
    pattern.at(np.arange(4096))
    times = {"build_s": built - began, "cpu_s": cpu_built - cpu_began, "tables_s": time.perf_counter() - built}
    found.append({"weights": name, "slots": slots, **times})
print(json.dumps(found))
"""


def pattern_facts(runs: int = 3) -> list[dict[str, Any]]:
    """Seconds to build patterns of 256 sources, each time in a process of its own. Nothing is kept between them."""
    found: list[list[dict[str, Any]]] = []
    for _ in range(runs):
        done = subprocess.run([sys.executable, "-c", _PATTERNS], capture_output=True, text=True, check=True)
        found.append(json.loads(done.stdout))
    return [
        {**same[0], **{key: float(np.median([run[key] for run in same])) for key in ("build_s", "cpu_s", "tables_s")}}
        for same in zip(*found, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.5, help="length of one run")
    parser.add_argument("--only", choices=["loading", "patterns"])
    options = parser.parse_args()
    packages = ", ".join(f"{name} {version(name)}" for name in ("numpy", "pyarrow"))
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs"
    print(f"{machine}, Python {platform.python_version()}, {packages}")
    if options.only in (None, "loading"):
        print(f"{'row':>6}{'sources':>9}{'M tokens/s':>12}   of one source, clock   of one source, CPU")
        for row_tokens in (2048, 512, 128):
            for got in compare(row_tokens, options.rounds, options.seconds):
                shown = ["{1:.2f} ({0:.2f} - {2:.2f})".format(*got[key]) for key in ("ratio", "cpu_ratio")]
                print(
                    f"{row_tokens:>6}{got['sources']:>9}{got['mtok_s']:>12.0f}   {shown[0]:<21}  {shown[1]}", flush=True
                )
    if options.only in (None, "patterns"):
        print(f"{'256 sources, weights':<34}{'slots':>9}{'build, s':>10}{'CPU, s':>8}{'tables':>8}")
        for got in pattern_facts():
            times = "".join(f"{got[key]:>8.3f}" for key in ("cpu_s", "tables_s"))
            print(f"{got['weights']:<34}{got['slots']:>9}{got['build_s']:>10.3f}{times}")


if __name__ == "__main__":
    main()
