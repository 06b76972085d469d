"""How fast is packing, and how full are the rows? Methods on 1M lengths; with tokens moved, beside TRL and torchtune.

    .venv-peers/bin/python -m benchmarks.packing             what `make bench-peers` builds has all peers
    python -m benchmarks.packing --only methods              a few seconds
    python -m benchmarks.packing --rounds 1 --samples 10000  quicker, noisier

Lengths are log-normal, 490 on average, cut at 4096; a row holds 4096. The first table plans rows and moves nothing.

In the second, each runs in a process of its own and gets the same samples in memory, in the form that it takes; making
that form is not counted. batchwright plans rows and makes each batch of 32 with the functions its loaders use:
padded int64 input ids, labels, attention mask, segment and position ids, a loss mask, where samples begin. TRL makes
ragged int32 input ids and lengths (padding is not counted), torchtune padded int64 input ids, labels and positions, and
lengths; beside it batchwright makes no segment ids. The peers make all rows
before the first is used, and keep them in memory; batchwright's batches are summed, and their memory is reused. "All
kept" is the ratio with batchwright keeping its arrays too: that is mostly the price of fresh memory. The sum of all
ids must be equal, so that none is lost. batchwright runs both ways right before each peer, and a ratio is between such
neighbours; printed is the median of the rounds, with the least and the most.

Not shown: reading samples from disk, and shuffling rows. One thread each.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from batchwright.batches.pack import pack
from benchmarks.peers.processes import run_child
from benchmarks.peers.table import Row, markdown, missing, spread

CAPACITY = 4096
NUM_LENGTHS = 1_000_000


class Peer(NamedTuple):
    name: str
    module: str
    method: str
    ours: str = "best_fit"


PEERS = (
    Peer("TRL bfd, its windows of 1000", "pack_trl", "bfd"),
    Peer("TRL bfd, one window over all", "pack_trl", "bfd, whole"),
    Peer("torchtune PackedDataset", "pack_torchtune", "in order", "best_fit without segment_ids"),
)


def realistic_lengths(num_items: int) -> np.ndarray:
    drawn = np.random.default_rng(7).lognormal(5.77, 0.93, num_items)
    return np.clip(drawn, 1, CAPACITY).astype(np.int64)


def fill_of(num_tokens: int, num_rows: int) -> str:
    return f"{100 * num_tokens / (num_rows * CAPACITY):.3f} %"


def measure_methods(rounds: int) -> str:
    """Seconds and fill of each method for 1M lengths."""
    lengths = realistic_lengths(NUM_LENGTHS)
    seconds: dict[str, list[float]] = {"best_fit": [], "first_fit": [], "greedy": []}
    num_rows = {method: pack(lengths, CAPACITY, method).num_rows for method in seconds}
    for _ in range(rounds):
        for method, taken in seconds.items():
            began = time.perf_counter()
            pack(lengths, CAPACITY, method)
            taken.append(time.perf_counter() - began)
    print(f"{NUM_LENGTHS:,} lengths, {lengths.mean():.0f} on average, {len(np.unique(lengths)):,} distinct", flush=True)
    lines = [
        [method, spread(taken, ".3f"), f"{num_rows[method]:,}", fill_of(int(lengths.sum()), num_rows[method])]
        for method, taken in seconds.items()
    ]
    return markdown(["method", "seconds", "rows", "fill"], lines)


def measure_peers(rounds: int, num_samples: int, say: Callable[[str], None]) -> str:
    """Seconds to pack samples with their tokens. A peer that cannot run keeps its line, which then says why."""
    lengths = realistic_lengths(num_samples)
    tokens = np.random.default_rng(8).integers(1, 50_000, lengths.sum(), dtype=np.int32)
    total = int(tokens.sum(dtype=np.int64))
    rows = {peer.name: Row(peer.name) for peer in PEERS}
    with tempfile.TemporaryDirectory(prefix="batchwright-packing-") as folder:
        np.save(Path(folder, "tokens.npy"), tokens)
        np.save(Path(folder, "lengths.npy"), lengths)
        task = {"do": "pack", "folder": folder, "capacity": CAPACITY}
        for number in range(rounds):
            for peer in PEERS:
                if rows[peer.name].why_not is None:
                    kept = run_child({**task, "peer": "pack_batchwright", "method": f"{peer.ours} kept"})
                    ours = run_child({**task, "peer": "pack_batchwright", "method": peer.ours})
                    found = run_child({**task, "peer": peer.module, "method": peer.method})
                    for who, got in (("batchwright", kept), ("batchwright", ours), (peer.name, found)):
                        assert "error" not in got or who != "batchwright", got["error"]
                        assert got.get("checksum", total) == total, f"{who} lost tokens"
                    beside = {"ours_s": ours["seconds"], "kept_s": kept["seconds"], "ours_rows": ours["rows"]}
                    rows[peer.name].add({**found, **beside})
                    say(f"round {number + 1}: {peer.name}: {found.get('error') or round(found['seconds'], 2)}")
    lacking = missing([peer.name for peer in PEERS], rows.values(), "seconds")
    assert not lacking, lacking
    print(f"{num_samples:,} samples, {len(tokens):,} tokens", flush=True)
    lines = [line_of(row) for row in rows.values()]
    header = ["", "seconds", "fill", "batchwright, seconds", "its fill", "batchwright over it", "all kept", "version"]
    return markdown(header, lines)


def line_of(row: Row) -> list[Any]:
    if row.why_not is not None:
        return [row.name, row.why_not, "", "", "", "", "", ""]
    theirs, ours, kept = (np.array(row.measured[name]) for name in ("seconds", "ours_s", "kept_s"))
    return [
        row.name,
        spread(theirs.tolist(), ".2f"),
        fill_of(row.last("tokens"), row.last("rows")),
        spread(ours.tolist(), ".2f"),
        fill_of(row.last("tokens"), row.last("ours_rows")),
        spread((theirs / ours).tolist(), ".1f"),
        spread((theirs / kept).tolist(), ".1f"),
        row.last("version"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=50_000, help="of the comparison with peers")
    parser.add_argument("--only", choices=["methods", "peers"])
    options = parser.parse_args()
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs"
    print(f"{machine}, Python {platform.python_version()}, numpy {version('numpy')}")
    if options.only in (None, "methods"):
        print(measure_methods(options.rounds), flush=True)
    if options.only in (None, "peers"):
        print(measure_peers(options.rounds, options.samples, lambda text: print(text, flush=True)))


if __name__ == "__main__":
    main()
