"""How fast are shuffled windows of tokens, beside a hand-written NumPy loop, torch's StatefulDataLoader and Grain?

    python -m benchmarks.loading              all claims, about 5 minutes
    python -m benchmarks.loading --pairs 5    quicker, noisier

Every rival reads the same tokens (one memory-mapped uint16 array of about 200M), delivers the same fields (input_ids,
labels as int64 views of one block, attention_mask, loss_mask as shared constants), and feeds the same consumer, which
sums input_ids. Runs are interleaved in pairs: ours, rival, ours, rival, ...; the median of the pairs' ratios is the
claim, and the quartiles are printed, because the machine may be noisy. Only the warm page cache is measured here.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

import batchwright as bw
from benchmarks.data import corpus_store

ROWS = 32


def ours(store: Path, tokens: np.ndarray, row_tokens: int) -> Iterator[Any]:
    loader = bw.PretrainDataLoader(
        store, chunk_size=row_tokens, batch_size=ROWS, seed=7, framework="numpy", epochs=None
    )
    while True:  # an iterator ends with its epoch
        yield from loader.get_iterator()


def hand_written(store: Path, tokens: np.ndarray, row_tokens: int) -> Iterator[Any]:
    """A permutation array and one gather per batch: what one writes without a library, and cannot resume or trace."""
    num_rows = (len(tokens) - 1) // row_tokens
    windows = np.lib.stride_tricks.as_strided(
        tokens, (num_rows, row_tokens + 1), (row_tokens * tokens.itemsize, tokens.itemsize)
    )
    attention, loss = np.ones((ROWS, row_tokens), np.int64), np.ones((ROWS, row_tokens), np.float32)
    for epoch in itertools.count():
        order = np.random.default_rng(epoch).permutation(num_rows)
        for first in range(0, num_rows - ROWS + 1, ROWS):
            block = windows[order[first : first + ROWS]].astype(np.int64)
            yield {"input_ids": block[:, :-1], "labels": block[:, 1:], "attention_mask": attention, "loss_mask": loss}


class _Windows:
    """A map-style dataset for torch and Grain."""

    def __init__(self, tokens: np.ndarray, row_tokens: int) -> None:
        self.tokens, self.row_tokens = tokens, row_tokens
        num_rows = (len(tokens) - 1) // row_tokens
        self.windows = np.lib.stride_tricks.as_strided(
            tokens, (num_rows, row_tokens + 1), (row_tokens * tokens.itemsize, tokens.itemsize)
        )

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.windows[index].astype(np.int64)

    def __getitems__(self, indices: list[int]) -> np.ndarray:
        return self.windows[np.asarray(indices)].astype(np.int64)


def stateful_dataloader(store: Path, tokens: np.ndarray, row_tokens: int) -> Iterator[Any]:
    """torchdata's StatefulDataLoader, 0 workers, with the batched __getitems__ (its best case)."""
    import torch
    from torchdata.stateful_dataloader import StatefulDataLoader

    attention, loss = torch.ones(ROWS, row_tokens, dtype=torch.int64), torch.ones(ROWS, row_tokens)

    def collate(block: np.ndarray) -> dict[str, Any]:
        tensor = torch.from_numpy(block)
        return {"input_ids": tensor[:, :-1], "labels": tensor[:, 1:], "attention_mask": attention, "loss_mask": loss}

    while True:
        yield from StatefulDataLoader(
            _Windows(tokens, row_tokens), batch_size=ROWS, shuffle=True, drop_last=True, collate_fn=collate
        )


def grain_dataset(store: Path, tokens: np.ndarray, row_tokens: int) -> Iterator[Any]:
    """Grain's MapDataset, shuffled, batched, read in this process (its fastest way for cheap data)."""
    import grain

    attention, loss = np.ones((ROWS, row_tokens), np.int64), np.ones((ROWS, row_tokens), np.float32)

    def fields(block: np.ndarray) -> dict[str, Any]:
        return {"input_ids": block[:, :-1], "labels": block[:, 1:], "attention_mask": attention, "loss_mask": loss}

    dataset = grain.MapDataset.source(_Windows(tokens, row_tokens)).shuffle(seed=7).repeat()
    batches = dataset.batch(ROWS, drop_remainder=True).map(fields)
    return (batches[i] for i in itertools.count())


def consume(batches: Iterator[Any], num_batches: int) -> float:
    """Tokens per second."""
    next(batches)
    total, delivered, began = 0, 0, time.perf_counter()
    for batch in itertools.islice(batches, num_batches):
        total += int(np.asarray(batch["input_ids"]).sum())
        delivered += 1
    seconds = time.perf_counter() - began
    assert total > 0
    assert delivered == num_batches, f"the data ended after {delivered} of {num_batches} batches"
    return num_batches * int(np.prod(batch["input_ids"].shape)) / seconds


Opened = Callable[[Path, np.ndarray, int], Iterator[Any]]


def compare(rival: Opened, store: Path, row_tokens: int, pairs: int, seconds: float) -> dict[str, Any]:
    """Our throughput over a rival's, pair by pair, each run about as long."""
    tokens = bw.open_store(store).stream("code").shard(0).tokens
    num_batches = {
        open_: max(20, int(seconds * consume(open_(store, tokens, row_tokens), 20) / (ROWS * row_tokens)))
        for open_ in (ours, rival)
    }
    rates: dict[Opened, list[float]] = {ours: [], rival: []}
    for _ in range(pairs):
        for open_ in (ours, rival):
            # Every run maps the file anew, so that both meet the same page tables.
            mapped = bw.open_store(store).stream("code").shard(0).tokens
            rates[open_].append(consume(open_(store, mapped, row_tokens), num_batches[open_]))
    ratios = np.array(rates[ours]) / np.array(rates[rival])
    return {
        "rival": rival.__name__,
        "row_tokens": row_tokens,
        "ours_mtok_s": float(np.median(rates[ours]) / 1e6),
        "rival_mtok_s": float(np.median(rates[rival]) / 1e6),
        "ratio": float(np.median(ratios)),
        "quartiles": [float(q) for q in np.percentile(ratios, (25, 75))],
    }


_FIRST_BATCH = """
import time; began = time.perf_counter()
import batchwright as bw
imported = time.perf_counter()
import numpy, pyarrow
from batchwright.base.machine import anonymous_bytes
bw.PretrainDataLoader
ready, before = time.perf_counter(), anonymous_bytes()
loader = bw.PretrainDataLoader({store!r}, chunk_size=2048, batch_size=32, seed=7, epochs=None)
batch = next(loader.get_iterator())
first = time.perf_counter()
resume = []
for position in (10**3, 10**6, 10**9, 10**12, 5 * 10**6, 7 * 10**9, 3 * 10**5):
    again = time.perf_counter()
    loader.load_state_dict({{"position": position, "plan": loader.plan.fingerprint, "steps": [[0, 0, 32]]}})
    next(loader.get_iterator())
    resume.append(time.perf_counter() - again)
for _ in zip(range(3000), loader.get_iterator()):
    pass
import json, sys
print(json.dumps({{
    "import_s": imported - began, "first_batch_s": first - began, "resume_ms": 1e3 * sorted(resume)[len(resume) // 2],
    "longest_resume_ms": 1e3 * max(resume),
    "anonymous_mb": (anonymous_bytes() - before) / 1e6, "torch": "torch" in sys.modules,
}}))
"""


def process_facts(store: Path, runs: int = 7) -> dict[str, Any]:
    """What a fresh process pays: import, start to first batch (with the interpreter's own start), resume, memory."""
    facts = []
    for _ in range(runs):
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", _FIRST_BATCH.format(store=str(store))], capture_output=True, text=True, check=True
        )
        fact = json.loads(done.stdout)
        empty = time.perf_counter()
        subprocess.run([sys.executable, "-c", "pass"], check=True)
        fact["first_batch_s"] += time.perf_counter() - empty  # the interpreter itself
        fact["whole_s"] = empty - began
        facts.append(fact)
    assert not any(fact["torch"] for fact in facts)
    return {name: float(np.median([fact[name] for fact in facts])) for name in facts[0] if name != "torch"}


def scale_facts() -> dict[str, Any]:
    """Order, resume and find of a source of 10^12 rows; a step of a store of 10^6 shards and 10^13 tokens."""
    code = """
import time, json, resource, numpy as np
from batchwright.order.schedule import Order
from batchwright.base.machine import anonymous_bytes
order = Order({"huge": 10**12}, seed=7); order.at([0])
before = anonymous_bytes()
began = time.perf_counter()
draw = order.at(np.arange(4096) + 10**11)
back = order.positions(0, draw.index, 0)
seconds = time.perf_counter() - began
assert (back == np.arange(4096) + 10**11).all()
tokens = np.full(10**6, 10**7, np.int64)
starts = np.concatenate([[0], np.cumsum(tokens)])
order = Order({"shards": (10**13 - 1) // 2048}, seed=7)
times = []
for step in (0, 10**3, 10**6, 10**8):
    began = time.perf_counter()
    rows = order.at(np.arange(step * 32, step * 32 + 32)).index * 2048
    shard = np.searchsorted(starts, rows, side="right") - 1
    times.append(time.perf_counter() - began)
grown = (anonymous_bytes() - before) / 1e6 - 16  # without the two arrays of 10^6 shards
print(json.dumps({"order_4096_ms": 1e3 * seconds, "order_mb": grown, "step_ms": 1e3 * max(times)}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.5, help="length of one run")
    parser.add_argument("--only", choices=["hand_written", "stateful_dataloader", "grain_dataset", "process", "scale"])
    options = parser.parse_args()
    store = corpus_store()
    packages = ", ".join(f"{name} {version(name)}" for name in ("numpy", "pyarrow", "torch", "torchdata", "grain"))
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs"
    print(f"{machine}, Python {platform.python_version()}, {packages}")
    print(f"{'rival':<22}{'row':>6}{'ours M tok/s':>14}{'rival':>9}{'ratio':>8}   quartiles")
    for rival, row_tokens in (
        (hand_written, 2048),
        (hand_written, 256),
        (stateful_dataloader, 2048),
        (stateful_dataloader, 256),
        (grain_dataset, 2048),
        (grain_dataset, 256),
    ):
        if options.only in (None, rival.__name__):
            got = compare(rival, store, row_tokens, options.pairs, options.seconds)
            low, high = got["quartiles"]
            print(
                f"{got['rival']:<22}{row_tokens:>6}{got['ours_mtok_s']:>14.0f}{got['rival_mtok_s']:>9.0f}"
                f"{got['ratio']:>8.2f}   {low:.2f} - {high:.2f}",
                flush=True,
            )
    if options.only in (None, "process"):
        print(json.dumps({name: round(value, 4) for name, value in process_facts(store).items()}))
    if options.only in (None, "scale"):
        print(json.dumps({name: round(value, 3) for name, value in scale_facts().items()}))


if __name__ == "__main__":
    main()
