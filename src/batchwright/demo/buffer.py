"""`batchwright demo buffer`: train on the hardest half, let bad rows in, find them, roll back, and lose nothing.

The process that trains and writes is killed. Its acknowledged changes are compared with the content of the folder.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import batchwright as bw
from batchwright.demo.harness import Demo, Report, expect, follow, head, report, reported, say, show_verb
from batchwright.demo.model import CHECKPOINT, Weights, classified, digest_of, layers, resumed, write_checkpoint

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
KILL_EPOCH, KILL_STEP = 2, 12
"""Early: a pipe holds the reports of 30 steps, so the process may be that far ahead of what was read."""
STEPS = ROWS // BATCH_ROWS
SCRAPE_EPOCH = 4
LAST_EPOCH = 5
AGAIN = ", without scrape-2"


def _tell(folder: Path) -> None:
    run = _Run(folder / "runs" / "buffer", folder / "runs" / "checkpoints")
    _train_and_kill(run)
    _find_new_rows(run)
    _roll_back(run)
    head(4, "What is left")
    show_verb("info", run.buffer)


main = Demo(
    name="buffer",
    title="a dataset that changes while a model trains on it.",
    description="Train a small classifier over epochs on rows that change: losses are written back, the hardest half "
    "stays, fresh rows come in. The process is killed, and nothing is lost. Bad rows spoil an epoch, are found and "
    "rolled back.",
    tell=_tell,
).main


@dataclass(slots=True)
class _Run:
    """A training run as seen from outside: its folders, and the reports of its process."""

    buffer: Path
    folder: Path
    acknowledged: dict[int, float] = field(default_factory=dict)
    """Losses by id that the process reported as written in this epoch."""
    last: Report = field(default_factory=dict)
    """The last step that it reported, and the change of the buffer."""
    accuracy: dict[int, float] = field(default_factory=dict)
    end: Report = field(default_factory=dict)
    """The content of the buffer and the weights at the end."""

    def watch(self, epochs: int, *, kill_at: tuple[int, int] | None = None, **settings: Any) -> int:
        """Start a process, follow it, and kill it at (epoch, step) or wait for its end. Returns its id."""

        def take(report: Report) -> bool:
            self._take(report)
            return kill_at is not None and (report.get("epoch"), report.get("step")) == kill_at

        named = {"buffer": self.buffer, "folder": self.folder, "epochs": epochs, **settings}
        return follow(train, take, log=self.folder / "stderr.txt", **named)

    def _take(self, report: Report) -> None:
        if "from_step" in report:
            self.acknowledged.clear()
        elif "step" in report:
            self.last = report
            self.acknowledged.update(zip(report["ids"], report["losses"], strict=True))
        elif "accuracy" in report:
            self.accuracy[report["epoch"]] = report["accuracy"]
            say(
                f"  epoch {report['epoch']}   {report['rows']:,} rows   mean loss {report['loss']:.3f}   "
                f"accuracy {100 * report['accuracy']:.1f} %"
            )
        else:
            self.end = report


# 1. Train, and kill it


def _train_and_kill(run: _Run) -> None:
    head(1, f"{ROWS:,} small pictures of digits; each epoch, losses are written back and the hardest half stays")
    say("  after each step    buffer.set(batch.ids, loss=losses)")
    say('  after each epoch   buffer.commit("after epoch 1")')
    say('  before the next    buffer.extend(fresh, retain_prior=0.5, retain_prior_by="-loss", origin=...)')
    say()
    pid = run.watch(SCRAPE_EPOCH - 1, kill_at=(KILL_EPOCH, KILL_STEP))
    acknowledged = f"it had acknowledged {run.last['step']} of {STEPS} steps"
    say(f"kill -9: process {pid} got SIGKILL in epoch {KILL_EPOCH}; {acknowledged}.")
    _expect_nothing_lost(run)
    again = run.watch(SCRAPE_EPOCH - 1)
    say(f"Process {again} went on from a checkpoint: the model, and the loader's state in mid-epoch.")
    alone_in = run.folder.with_name("uninterrupted")
    alone_in.mkdir()
    *_, alone = reported(train, str(alone_in / "buffer"), str(alone_in), SCRAPE_EPOCH - 1)
    expect(alone == run.end, f"{run.end} here, {alone} in an undisturbed run")
    say("Compared with an undisturbed run: the same rows and losses, and the same weights, in every bit.")


def _expect_nothing_lost(run: _Run) -> None:
    """Every acknowledged change is there, and at most one that was not acknowledged."""
    with bw.DatasetBuffer(path=run.buffer) as buffer:
        found = dict(zip(buffer.ids.tolist(), buffer.to_numpy()["loss"].tolist(), strict=True))
        rows, more = len(buffer), buffer.number - run.last["number"]
    lost = [row for row, loss in run.acknowledged.items() if found.get(row) != loss]
    is_whole = not lost and more in (0, 1) and rows == ROWS
    expect(is_whole, f"{len(lost)} losses are missing; {rows:,} rows; {more} changes were not acknowledged")
    say(f"Opened again: {rows:,} rows, and all {len(run.acknowledged):,} losses that this epoch had written back.")


# 2. Bad rows


def _find_new_rows(run: _Run) -> None:
    head(2, f"The fresh rows of epoch {SCRAPE_EPOCH} are mislabelled, and nobody knows")
    run.watch(SCRAPE_EPOCH, scrape=SCRAPE_EPOCH)
    before, after = run.accuracy[SCRAPE_EPOCH - 1], run.accuracy[SCRAPE_EPOCH]
    expect(after < before - 0.05, f"accuracy went from {before:.3f} to {after:.3f}")
    say(f"Accuracy fell from {100 * before:.1f} % to {100 * after:.1f} %.")
    older, newer = _after_epoch(SCRAPE_EPOCH - 1), _after_epoch(SCRAPE_EPOCH)
    with bw.DatasetBuffer(path=run.buffer, read_only=True) as buffer:
        diff = buffer.diff(older, newer)
        say()
        say(f'buffer.diff("{older}", "{newer}"):')
        say(f"  {diff}")
        added = _origins(buffer, diff.added)
        say(f"buffer.provenance(...) of the rows added: {_counts(added)}.")
        hardest = np.argsort(-buffer.to_numpy()["loss"])[: len(buffer) // 2]
        would_stay = _origins(buffer, buffer.ids[hardest])
        say(f"The hardest half, which would stay for the next epoch: {_counts(would_stay)}.", hang=0)
    planted_only = set(added) == {"scrape-2"} and would_stay["scrape-2"] > 0.6 * len(hardest)
    expect(planted_only, "the new rows are not the planted ones, or are not the hardest")


def _origins(buffer: bw.DatasetBuffer, ids: Any) -> Counter[str]:
    return Counter(buffer.provenance(buffer.index_of(ids))["origin"].to_pylist())


def _counts(origins: Counter[str]) -> str:
    return ", ".join(f"{count:,} from {name!r}" for name, count in origins.most_common())


# 3. Back


def _roll_back(run: _Run) -> None:
    version = _after_epoch(SCRAPE_EPOCH - 1)
    head(3, f'buffer.rollback("{version}"), and on without them')
    with bw.DatasetBuffer(path=run.buffer) as buffer:
        planted = set(buffer.diff(version, _after_epoch(SCRAPE_EPOCH)).added.tolist())
        began = time.perf_counter()
        buffer.rollback(version)
        took = f"{1000 * (time.perf_counter() - began):.1f} ms"
        same = buffer.content_fingerprint() == buffer.at(version).content_fingerprint()
        expect(same, "the rows are not those of the version")
        say(f"{len(buffer):,} rows as they were, in {took}; and the model of then, from its checkpoint.")
    shutil.copy(run.folder / f"{version}.npz", run.folder / CHECKPOINT)
    spoiled = run.accuracy[SCRAPE_EPOCH]
    run.watch(LAST_EPOCH, again=AGAIN)
    with bw.DatasetBuffer(path=run.buffer, read_only=True) as buffer:
        left = planted & set(buffer.ids.tolist())
        stored = planted & set(buffer.at(_after_epoch(SCRAPE_EPOCH)).ids.tolist())
    expect(not left and stored == planted, f"{len(left)} rows of scrape-2 are left, {len(stored)} in their version")
    expect(run.accuracy[LAST_EPOCH] > run.accuracy[SCRAPE_EPOCH - 1] > spoiled, f"accuracy: {run.accuracy}")
    say(
        f"Epoch {SCRAPE_EPOCH} with other rows: {100 * run.accuracy[SCRAPE_EPOCH]:.1f} % instead of "
        f"{100 * spoiled:.1f} %. The rows of scrape-2 are gone, and none of their ids was used again; "
        f'buffer.at("{_after_epoch(SCRAPE_EPOCH)}") still has them.',
        hang=0,
    )


# The process that trains


def train(buffer: str, folder: str, epochs: int, *, scrape: int | None = None, again: str = "") -> None:
    """Train up to an epoch, from the checkpoint in `folder` if there is one.

    The fresh rows of epoch `scrape` are mislabelled. `again` marks the versions of epochs that are done once more.
    """
    with bw.DatasetBuffer(path=buffer) as opened:
        _train(opened, Path(folder), epochs, scrape, again)


def _train(buffer: bw.DatasetBuffer, folder: Path, epochs: int, scrape: int | None, again: str) -> None:
    path, test = folder / CHECKPOINT, pictures(TEST_ROWS, seed=1_000_000)
    run = resumed(path, layers(np.random.default_rng(0), HEIGHT * WIDTH, HIDDEN, 10))
    run.loader = run.loader or {"epoch": 1, "state": None}
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
        if _after_epoch(epoch) + again not in committed:
            buffer.commit(_after_epoch(epoch) + again)
        run.loader = {"epoch": epoch + 1, "state": None}
        write_checkpoint(folder / f"{_after_epoch(epoch)}{again}.npz", run)
        write_checkpoint(path, run)
        loss = float(buffer.to_numpy()["loss"].mean())
        report(epoch=epoch, accuracy=_accuracy(run.weights, test), loss=loss, rows=len(buffer))
    report(content=buffer.content_fingerprint(), weights=digest_of(run.weights))


def _after_epoch(epoch: int) -> str:
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
