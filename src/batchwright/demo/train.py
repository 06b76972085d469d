"""The process that trains: `python -m batchwright.demo.train STORE FOLDER`. Restarted, it goes on from its checkpoint.

It writes one JSON line for each step to stdout, and knows nothing of the process that watches, kills and restarts it.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import batchwright as bw
from batchwright.base.files import write_whole
from batchwright.base.machine import die_with_parent
from batchwright.demo.model import Adam, Weights, new_weights, row_losses_and_gradients

__all__ = [
    "Checkpoint",
    "digest_of",
    "kept_checkpoint",
    "main",
    "read_checkpoint",
    "report",
    "train",
    "write_checkpoint",
]

CHECKPOINT = "checkpoint.npz"
BATCH_ROWS = 8
ROW_TOKENS = 128
LEARNING_RATE = 0.005
WARM_UP_STEPS = 20


@dataclass(slots=True)
class Checkpoint:
    """All that a run needs to go on: the model, the optimiser, and where the data is."""

    weights: Weights
    adam: Adam
    loader: dict[str, Any]
    """What `loader.state_dict()` returned."""


def write_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write all of it or nothing: a process killed in the middle of this leaves the checkpoint before."""
    parts = {
        "weights": checkpoint.weights,
        "mean": checkpoint.adam.mean,
        "square": checkpoint.adam.square,
    }
    arrays = {f"{part}/{name}": array for part, named in parts.items() for name, array in named.items()}
    numbers = {"num_updates": checkpoint.adam.num_updates, "loader": checkpoint.loader}
    data = io.BytesIO()
    np.savez(data, json=np.frombuffer(json.dumps(numbers).encode(), np.uint8), **arrays)  # type: ignore[arg-type]
    write_whole(path, data.getbuffer())


def read_checkpoint(path: Path) -> Checkpoint:
    with np.load(path, allow_pickle=False) as arrays:
        numbers = json.loads(arrays["json"].tobytes())
        parts: dict[str, Weights] = {"weights": {}, "mean": {}, "square": {}}
        for key in arrays.files:
            if key != "json":
                part, name = key.split("/")
                parts[part][name] = arrays[key]
    return Checkpoint(parts["weights"], Adam(numbers["num_updates"], parts["mean"], parts["square"]), numbers["loader"])


def kept_checkpoint(folder: Path, num_steps: int) -> Path:
    """The checkpoint after `num_steps`, in a run that keeps all of them."""
    return folder / f"after-{num_steps:06d}.npz"


def train(
    store: Path,
    folder: Path,
    *,
    num_steps: int,
    checkpoint_steps: int,
    keep_all: bool = False,
    plan: str | None = None,
    row_tokens: int = ROW_TOKENS,
    batch_rows: int = BATCH_ROWS,
    seed: int = 7,
) -> None:
    """Train from the checkpoint in `folder`, or from nothing, to step `num_steps`; write a line for each step.

    `plan`, a fingerprint, stands for `row_tokens` and `seed`.
    """
    which: dict[str, Any] = {"chunk_size": row_tokens, "seed": seed} if plan is None else {"plan": plan}
    loader = bw.PretrainDataLoader(
        store, **which, batch_size=batch_rows, epochs=None, framework="numpy", rank=0, world_size=1
    )
    path = folder / CHECKPOINT
    if path.exists():
        checkpoint = read_checkpoint(path)
        weights, adam = checkpoint.weights, checkpoint.adam
        loader.load_state_dict(checkpoint.loader)
    else:
        weights, adam = new_weights(loader.store.vocab_size), Adam()
    started, first_step = time.perf_counter(), adam.num_updates
    for step in range(first_step, num_steps):
        batch = loader.get_batch()
        losses, gradients = row_losses_and_gradients(weights, batch.input_ids, batch.targets)
        adam.update(weights, gradients, rate=_learning_rate(step, num_steps))
        if (step + 1) % checkpoint_steps == 0 or step + 1 == num_steps:
            checkpoint = Checkpoint(weights, adam, loader.state_dict())
            write_checkpoint(path, checkpoint)
            if keep_all:
                write_checkpoint(kept_checkpoint(folder, step + 1), checkpoint)
        report(
            step=step,
            loss=float(losses.mean()).hex(),
            row_losses=losses.round(4).tolist(),
            tokens_per_second=(step + 1 - first_step) * batch.input_ids.size / (time.perf_counter() - started),
            data_wait_percent=loader.stats()["data_wait_percent"],
        )
    report(weights=digest_of(weights))


def _learning_rate(step: int, num_steps: int) -> float:
    """Up in the first steps, then down to a tenth."""
    return LEARNING_RATE * min(1.0, (step + 1) / WARM_UP_STEPS) * (1 - 0.9 * step / num_steps)


def digest_of(weights: Weights) -> str:
    """Names weights: equal ones, bit for bit, have the same."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(np.ascontiguousarray(weights[name]).data)
    return digest.hexdigest()[:16]


def report(**what: Any) -> None:
    """Print one line of JSON for the parent process."""
    print(json.dumps(what), flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m batchwright.demo.train")
    parser.add_argument("store", type=Path)
    parser.add_argument("folder", type=Path, help="where the checkpoint is written, and read if there is one")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--checkpoint-steps", type=int, default=50)
    parser.add_argument("--keep-all", action="store_true", help="keep every checkpoint, not only the last")
    parser.add_argument("--plan", help="a plan that is kept with the store, instead of --row-tokens and --seed")
    parser.add_argument("--row-tokens", type=int, default=ROW_TOKENS)
    parser.add_argument("--batch-rows", type=int, default=BATCH_ROWS)
    parser.add_argument("--seed", type=int, default=7)
    asked = vars(parser.parse_args(argv))
    asked["folder"].mkdir(parents=True, exist_ok=True)
    train(num_steps=asked.pop("steps"), **asked)
    return 0


if __name__ == "__main__":
    die_with_parent(os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches this process too; the one that watches it speaks
    sys.exit(main())
