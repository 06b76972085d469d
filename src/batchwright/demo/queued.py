"""The processes of `batchwright demo queue`: providers and a trainer, and their project."""

from __future__ import annotations

import argparse
import inspect
import textwrap
from pathlib import Path
from typing import Any

import xxhash

import batchwright as bw
from batchwright.demo.harness import report
from batchwright.demo.model import (
    CHECKPOINT,
    Adam,
    Checkpoint,
    digest_of,
    loss_and_gradients,
    new_weights,
    read_checkpoint,
    write_checkpoint,
)
from batchwright.queue.provider_file import open_provider

__all__ = ["BATCHES_PER_FILE", "CONFIG", "NUM_STEPS", "PROVIDER", "provide", "train", "train_on", "write_project"]

NUM_STEPS = 400
BATCHES_PER_FILE = 40
CHECKPOINT_STEPS = 60

CONFIG = f"""\
dataset = "code"
batch_size = 8
block_size = 64
batches_per_file = {BATCHES_PER_FILE}
seconds_per_batch = 0.01
learning_rate = 0.005
"""

PROVIDER = """\
import time
import numpy as np
import batchwright as bw

class CodeProvider(bw.DataProviderBase):
    def build_meta(self):
        fields = [{"name": name, "dtype": "int64", "shape": [self.block_size]} for name in "xy"]
        return {"vocab_size": 256, "batch_schema": fields}

    def sample_batch(self, split, rng):
        time.sleep(self.seconds_per_batch)  # stands for what takes time
        text = np.frombuffer(self.input_files()[0].read_bytes(), np.uint8)
        first = rng.integers(0, len(text) - self.block_size, size=(self.batch_size, 1))
        rows = text[first + np.arange(self.block_size + 1)].astype(np.int64)
        return {"x": rows[:, :-1], "y": rows[:, 1:]}
"""


def write_project(folder: Path) -> Path:
    """A config, a provider, and a text that every machine has. Returns the config's path."""
    files = {
        "config/train_code.py": CONFIG,
        "data/code/prepare_streaming.py": PROVIDER,
        "data/code/input.py": inspect.getsource(argparse) + inspect.getsource(textwrap),
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "config" / "train_code.py"


def provide(config: str, data: str) -> None:
    """Make batches, as `batchwright prepare` does, until SIGTERM."""
    open_provider(bw.load_config(config, data=data)).run()


def train(config: str, data: str, folder: str) -> None:
    """Train on the queue. The checkpoint is in `folder`."""
    shared: Any = bw.load_config(config, data=data)
    with bw.DatasetConsumer(shared.data_dir, shared.batch_size, shared.block_size, framework="numpy") as consumer:
        train_on(consumer, Path(folder), learning_rate=shared.learning_rate)


def train_on(consumer: bw.DatasetConsumer, folder: Path, *, learning_rate: float) -> None:
    """Train from the checkpoint in `folder`, or from nothing. Report the batch and the loss of each step."""
    path = folder / CHECKPOINT
    if path.exists():
        checkpoint = read_checkpoint(path)
        weights, adam = checkpoint.weights, checkpoint.adam
        consumer.load_state_dict(checkpoint.loader)
    else:
        weights, adam = new_weights(consumer.meta["vocab_size"]), Adam()
    for step in range(adam.num_updates, NUM_STEPS):
        x, y = consumer.get_batch("train")
        loss, gradients = loss_and_gradients(weights, x, y)
        adam.update(weights, gradients, rate=learning_rate)
        state = consumer.state_dict()
        if (step + 1) % CHECKPOINT_STEPS == 0:
            write_checkpoint(path, Checkpoint(weights, adam, state))
        digest = xxhash.xxh3_128_hexdigest(x.tobytes() + y.tobytes())
        report(step=step, digest=digest, loss=loss.hex(), **state["train"])  # file and batch: what comes next
    report(weights=digest_of(weights), stats=consumer.stats()["train"])
