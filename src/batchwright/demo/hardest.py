"""The process that trains in `batchwright demo buffer`: a classifier of small pictures, on rows that it changes.

Each epoch it writes losses back, keeps the hardest half of the rows, and adds fresh ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import batchwright as bw
from batchwright.demo.harness import report
from batchwright.demo.model import (
    CHECKPOINT,
    Adam,
    Checkpoint,
    Weights,
    classified,
    digest_of,
    layers,
    read_checkpoint,
    write_checkpoint,
)

__all__ = ["BATCH_ROWS", "ROWS", "after_epoch", "pictures", "train"]

ROWS = 4000
FRESH_ROWS = ROWS // 2
BATCH_ROWS = 80
TEST_ROWS = 2000
LEARNING_RATE = 0.007
CHECKPOINT_STEPS = 8

FONT = """\
01110 00100 01110 11111 00010 11111 00110 11111 01110 01110
10001 01100 10001 00010 00110 10000 01000 00001 10001 10001
10011 00100 00001 00100 01010 11110 10000 00010 10001 10001
10101 00100 00010 00010 10010 00001 11110 00100 01110 01111
11001 00100 00100 00001 11111 00001 10001 01000 10001 00001
10001 00100 01000 10001 00010 10001 10001 01000 10001 00010
01110 01110 11111 01110 00010 01110 01110 01000 01110 01100"""
HEIGHT, WIDTH = 9, 7
"""A digit has 7 x 5 dots, anywhere in its picture."""
HIDDEN = 64
LARGEST_NOISE = 0.9


def train(buffer: str, folder: str, epochs: int, *, scrape: int | None = None, again: str = "") -> None:
    """Train up to an epoch, from the checkpoint in `folder` if there is one.

    The fresh rows of epoch `scrape` are mislabelled. `again` marks the versions of epochs that are done once more.
    """
    with bw.DatasetBuffer(path=buffer) as opened:
        _train(opened, Path(folder), epochs, scrape, again)


def _train(buffer: bw.DatasetBuffer, folder: Path, epochs: int, scrape: int | None, again: str) -> None:
    path, test = folder / CHECKPOINT, pictures(TEST_ROWS, seed=1_000_000)
    if path.exists():
        run = read_checkpoint(path)
    else:
        weights = layers(np.random.default_rng(0), HEIGHT * WIDTH, HIDDEN, 10)
        run = Checkpoint(weights, Adam(), {"epoch": 1, "state": None})
    for epoch in range(run.loader["epoch"], epochs + 1):
        committed = [version.name for version in buffer.versions()]
        begin = f"epoch {epoch}{again}"
        if begin not in committed:
            _bring_rows(buffer, epoch, is_scrape=epoch == scrape)
            buffer.commit(begin)
        # Losses are written back while this reads: it reads the version that was committed, and can resume there.
        loader = buffer.at(begin).loader(batch_size=BATCH_ROWS, seed=epoch, rank=0, world_size=1)
        if run.loader["state"] is not None:
            loader.load_state_dict(run.loader["state"])
        report(epoch=epoch, from_step=loader.step, rows=len(buffer))
        for batch in loader.get_iterator():
            losses, gradients = losses_and_gradients(run.weights, batch)
            run.adam.update(run.weights, gradients, rate=LEARNING_RATE)
            buffer.set(batch.ids, loss=losses)
            report(epoch=epoch, step=loader.step, number=buffer.number, ids=batch.ids.tolist(), losses=losses.tolist())
            if loader.step % CHECKPOINT_STEPS == 0:
                run.loader = {"epoch": epoch, "state": loader.state_dict()}
                write_checkpoint(path, run)
        if after_epoch(epoch) + again not in committed:
            buffer.commit(after_epoch(epoch) + again)
        run.loader = {"epoch": epoch + 1, "state": None}
        write_checkpoint(folder / f"{after_epoch(epoch)}{again}.npz", run)
        write_checkpoint(path, run)
        loss = float(buffer.to_numpy()["loss"].mean())
        report(epoch=epoch, accuracy=_accuracy(run.weights, test), loss=loss, rows=len(buffer))
    report(content=buffer.content_fingerprint(), weights=digest_of(run.weights))


def after_epoch(epoch: int) -> str:
    return f"after epoch {epoch}"


def _bring_rows(buffer: bw.DatasetBuffer, epoch: int, *, is_scrape: bool) -> None:
    """The rows of an epoch. A process that was killed after it wrote them does not write them again."""
    origin = f"fresh for epoch {epoch}"
    if is_scrape:
        origin = "scrape-2"
    elif epoch == 1:
        origin = "scrape-1"
    if len(buffer) and buffer.provenance([-1])["origin"][0].as_py() == origin:
        return
    if epoch == 1:
        buffer.extend(pictures(ROWS, seed=1), origin=origin)
        return
    fresh = pictures(FRESH_ROWS, seed=epoch, mislabelled=is_scrape)
    buffer.extend(fresh, retain_prior=0.5, retain_prior_by="-loss", origin=origin)


def pictures(count: int, *, seed: int, mislabelled: bool = False) -> dict[str, NDArray[Any]]:
    """Noisy pictures of digits, and the digits. The label of a mislabelled one is the next digit."""
    random = np.random.default_rng(seed)
    label = random.integers(0, 10, count)
    pixels = np.zeros((count, HEIGHT, WIDTH), np.float32)
    glyphs = np.array([[list(map(int, line.split()[digit])) for line in FONT.split("\n")] for digit in range(10)])
    top, left = random.integers(0, HEIGHT - 6, count), random.integers(0, WIDTH - 4, count)
    for number in range(count):
        pixels[number, top[number] : top[number] + 7, left[number] : left[number] + 5] = glyphs[label[number]]
    noise = random.uniform(0.1, LARGEST_NOISE, count).astype(np.float32)  # some pictures are harder than others
    pixels += random.standard_normal(pixels.shape).astype(np.float32) * noise[:, None, None]
    if mislabelled:
        label = (label + 1) % 10
    return {"pixels": pixels, "label": label}


def losses_and_gradients(weights: Weights, columns: Any) -> tuple[NDArray[np.float32], Weights]:
    """Cross-entropy of each row in nats, and the gradient of its mean by every weight."""
    pixels, labels = columns["pixels"], columns["label"]
    everything = np.ones(len(labels), weights["hidden"].dtype)
    losses, gradients, _ = classified(weights, pixels.reshape(len(pixels), -1), labels, everything)
    return losses, gradients


def _accuracy(weights: Weights, columns: dict[str, NDArray[Any]]) -> float:
    """The share of pictures that are classified correctly."""
    inputs = columns["pixels"].reshape(len(columns["label"]), -1)
    hidden = np.maximum(inputs @ weights["hidden"] + weights["hidden_bias"], 0)
    found = (hidden @ weights["output"] + weights["output_bias"]).argmax(axis=1)
    return float((found == columns["label"]).mean())
