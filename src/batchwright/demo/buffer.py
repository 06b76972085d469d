"""`batchwright demo buffer`: train on the hardest half, let bad rows in, find them, roll back, and lose nothing.

Writing, reading and training happen in processes of their own, and those that write are killed. The demo checks what it
says of them: what a killed process had acknowledged is compared with what is in the folder.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import batchwright as bw
from batchwright.base.errors import BusyError
from batchwright.demo.digits import drawn
from batchwright.demo.hardest import BATCH_ROWS, ROWS, after_epoch, train
from batchwright.demo.harness import Demo, check_exit, expect, head, python_process, reports, say, show_verb
from batchwright.demo.train import CHECKPOINT

__all__ = ["main"]

KILL_EPOCH, KILL_STEP = 2, 12
"""Early enough: a pipe holds what a process says of 30 steps, and so far can it be ahead of what was read."""
STEPS = ROWS // BATCH_ROWS
SCRAPE_EPOCH = 4
LAST_EPOCH = 5
AGAIN = ", without scrape-2"
KILLS = 2
ROWS_BEFORE_KILL = 400


_process = partial(python_process, "batchwright.demo.hardest", stdin=subprocess.PIPE)


def _tell(folder: Path) -> None:
    folder = folder / "runs"
    run = _Run(folder / "buffer", folder / "checkpoints")
    with bw.DatasetBuffer(path=run.buffer):
        pass  # an empty one, for a reader to watch from the beginning
    with _process("watch", run.buffer, log=folder / "watch.txt") as watching:
        _train_and_kill(run, folder)
        _find_new_rows(run)
        _roll_back(run)
        _expect_whole_changes(watching, run)
    _add_one_by_one(folder)
    head(5, "What is left")
    show_verb("info", run.buffer)


DEMO = Demo(
    name="buffer",
    title="a dataset that changes while a model trains on it.",
    description="Train a small classifier over epochs on rows that change: losses are written back, the hardest half "
    "stays, fresh rows come in. Bad rows spoil an epoch, are found and rolled back; processes that write are killed, "
    "and nothing is lost.",
    tell=_tell,
)
main = DEMO.main


@dataclass(slots=True)
class _Run:
    """A training run as seen from outside: its folders, and the reports of its process."""

    buffer: Path
    folder: Path
    acknowledged: dict[int, float] = field(default_factory=dict)
    """Losses by id that the process reported as written in this epoch."""
    step: int = 0
    """The last step that it reported."""
    number: int = 0
    """The last change of the buffer that it reported."""
    accuracy: dict[int, float] = field(default_factory=dict)
    loss: dict[int, float] = field(default_factory=dict)
    end: dict[str, Any] = field(default_factory=dict)
    """The content of the buffer and the weights at the end."""
    refusal: str = ""
    """The process that a second writer was refused for."""

    def watch(self, epochs: int, *settings: object, kill_at: tuple[int, int] | None = None) -> int:
        """Start a process, follow it, and kill it at (epoch, step) or wait for its end. Returns its id."""
        log = self.folder / "stderr.txt"
        with _process("train", self.buffer, self.folder, "--epochs", epochs, *settings, log=log) as process:
            for report in reports(process):
                self._follow(report)
                if kill_at is not None and (report.get("epoch"), report.get("step")) == kill_at:
                    os.kill(process.pid, signal.SIGKILL)  # its earlier reports are still to be read
            check_exit(process, "the training process", log, killed=kill_at is not None)
        return process.pid

    def _follow(self, report: dict[str, Any]) -> None:
        if "from_step" in report:
            self.acknowledged.clear()
        elif "step" in report:
            self.step, self.number = report["step"], report["number"]
            self.acknowledged.update(zip(report["ids"], report["losses"], strict=True))
            if not self.refusal:
                self.refusal = _refuse_second_writer(self.buffer)
        elif "accuracy" in report:
            self.accuracy[report["epoch"]], self.loss[report["epoch"]] = report["accuracy"], report["loss"]
            say(
                f"  epoch {report['epoch']}   {report['rows']:,} rows   mean loss {report['loss']:.3f}   "
                f"accuracy {100 * report['accuracy']:.1f} %"
            )
        elif "content" in report:
            self.end = report


def _refuse_second_writer(path: Path) -> str:
    try:
        with bw.DatasetBuffer(path=path):
            return "nobody: it was let in"
    except BusyError as error:
        return str(error.where["process"])


# 1. Train, and kill it


def _train_and_kill(run: _Run, folder: Path) -> None:
    head(1, f"{ROWS:,} small pictures of digits; each epoch, losses are written back and the hardest half stays")
    say("  after each step    buffer.set(batch.ids, loss=losses)")
    say('  after each epoch   buffer.commit("after epoch 1")')
    say('  before the next    buffer.extend(fresh, retain_prior=0.5, retain_prior_by="-loss", origin=...)')
    say()
    pid = run.watch(SCRAPE_EPOCH - 1, kill_at=(KILL_EPOCH, KILL_STEP))
    say(f"kill -9: process {pid} got SIGKILL in epoch {KILL_EPOCH}; it had acknowledged {run.step} of {STEPS} steps.")
    _expect_nothing_lost(run)
    expect(run.refusal == f"pid {pid}", f"a second writer was refused for {run.refusal!r}")
    say(f"While it ran, a second writer was refused and told who writes: {run.refusal}.")
    again = run.watch(SCRAPE_EPOCH - 1)
    say(f"Process {again} went on from a checkpoint: the model, and the loader's state in mid-epoch.")
    alone = _train_here(folder / "uninterrupted", SCRAPE_EPOCH - 1)
    expect(alone == run.end, f"{run.end} here, {alone} in an undisturbed run")
    say("Beside an undisturbed run: the same rows and losses, and the same weights, in every bit.")


def _train_here(folder: Path, epochs: int) -> dict[str, Any]:
    """The content and weights of a run in this process."""
    folder.mkdir()
    with bw.DatasetBuffer(path=folder / "buffer") as buffer, contextlib.redirect_stdout(io.StringIO()) as printed:
        train(buffer, folder, epochs=epochs)
    end: dict[str, Any] = json.loads(printed.getvalue().splitlines()[-1])
    return end


def _expect_nothing_lost(run: _Run) -> None:
    """Every acknowledged change is there, and at most one that was not acknowledged."""
    with bw.DatasetBuffer(path=run.buffer) as buffer:
        found = dict(zip(buffer.ids.tolist(), buffer.to_numpy()["loss"].tolist(), strict=True))
        rows, more = len(buffer), buffer.number - run.number
    lost = [row for row, loss in run.acknowledged.items() if found.get(row) != loss]
    is_whole = not lost and more in (0, 1) and rows == ROWS
    expect(is_whole, f"{len(lost)} losses are missing; {rows:,} rows; {more} changes were not acknowledged")
    say(f"Opened again: {rows:,} rows, and all {len(run.acknowledged):,} losses that this epoch had written back.")


# 2. Bad rows


def _find_new_rows(run: _Run) -> None:
    head(2, f"The fresh rows of epoch {SCRAPE_EPOCH} are mislabelled, and nobody knows")
    run.watch(SCRAPE_EPOCH, "--scrape", SCRAPE_EPOCH)
    before, after = run.accuracy[SCRAPE_EPOCH - 1], run.accuracy[SCRAPE_EPOCH]
    expect(after < before - 0.05, f"accuracy went from {before:.3f} to {after:.3f}")
    say(f"Accuracy fell from {100 * before:.1f} % to {100 * after:.1f} %.")
    older, newer = after_epoch(SCRAPE_EPOCH - 1), after_epoch(SCRAPE_EPOCH)
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
        _show_clearest([buffer[int(index)] for index in hardest[:500]])
    planted_only = set(added) == {"scrape-2"} and would_stay["scrape-2"] > 0.6 * len(hardest)
    expect(planted_only, "the new rows are not the planted ones, or are not the hardest")


def _origins(buffer: bw.DatasetBuffer, ids: Any) -> Counter[str]:
    return Counter(buffer.provenance(buffer.index_of(ids))["origin"].to_pylist())


def _counts(origins: Counter[str]) -> str:
    return ", ".join(f"{count:,} from {name!r}" for name, count in origins.most_common())


def _show_clearest(rows: list[dict[str, Any]]) -> None:
    """Draw the most legible rows side by side, with their labels."""
    rows = sorted(rows, key=lambda row: float(np.abs(row["pixels"] - (row["pixels"] > 0.5)).mean()))[:6]
    say("The most legible of the 500 rows with the largest losses, with their labels:")
    for lines in zip(*(drawn(row["pixels"]) for row in rows), strict=True):
        say(("    " + "      ".join(lines)).rstrip())
    say("    " + "      ".join(f"label {row['label']}" for row in rows))


# 3. Back


def _roll_back(run: _Run) -> None:
    version = after_epoch(SCRAPE_EPOCH - 1)
    head(3, f'buffer.rollback("{version}"), and on without them')
    with bw.DatasetBuffer(path=run.buffer) as buffer:
        planted = set(buffer.diff(version, after_epoch(SCRAPE_EPOCH)).added.tolist())
        began = time.perf_counter()
        buffer.rollback(version)
        took = f"{1000 * (time.perf_counter() - began):.1f} ms"
        same = buffer.content_fingerprint() == buffer.at(version).content_fingerprint()
        expect(same, "the rows are not those of the version")
        say(f"{len(buffer):,} rows as they were, in {took}; and the model of then, from its checkpoint.")
    shutil.copy(run.folder / f"{version}.npz", run.folder / CHECKPOINT)
    spoiled = run.accuracy[SCRAPE_EPOCH]
    run.watch(LAST_EPOCH, "--again", AGAIN)
    with bw.DatasetBuffer(path=run.buffer, read_only=True) as buffer:
        left = planted & set(buffer.ids.tolist())
        stored = planted & set(buffer.at(after_epoch(SCRAPE_EPOCH)).ids.tolist())
    expect(not left and stored == planted, f"{len(left)} rows of scrape-2 are left, {len(stored)} in their version")
    expect(run.accuracy[LAST_EPOCH] > run.accuracy[SCRAPE_EPOCH - 1] > spoiled, f"accuracy: {run.accuracy}")
    say(
        f"Epoch {SCRAPE_EPOCH} with other rows: {100 * run.accuracy[SCRAPE_EPOCH]:.1f} % instead of "
        f"{100 * spoiled:.1f} %. The rows of scrape-2 are gone, and none of their ids was used again; "
        f'buffer.at("{after_epoch(SCRAPE_EPOCH)}") still has them, to look at.',
        hang=0,
    )


# The reader


def _expect_whole_changes(watching: subprocess.Popen[str], run: _Run) -> None:
    """The process that read all the while must have seen whole changes only."""
    assert watching.stdin is not None
    watching.stdin.close()  # it looks once more, and ends
    seen = list(reports(watching))[-1]
    with bw.DatasetBuffer(path=run.buffer, read_only=True) as buffer:
        is_whole = seen.get("last") == buffer.number and not seen["faults"] and set(seen["rows"]) <= {0, ROWS}
    expect(is_whole, f"the reader saw {seen}")
    say()
    say(
        f"All the while process {watching.pid} was reading: {seen['versions']:,} states, each of them whole."
        f" After the first it always saw {ROWS:,} rows: half of them leave and as many come in one change.",
        hang=0,
    )


# 4. One by one


def _add_one_by_one(folder: Path) -> None:
    head(4, "Rows that come one by one, from processes that are killed")
    path = folder / "arrivals"
    for _ in range(KILLS):
        acknowledged = _kill_an_arrival(path, folder / "arrive.txt")
        with bw.DatasetBuffer(path=path, read_only=True) as buffer:
            rows = buffer.to_pydict()
        count = len(rows["serial"])
        expected = {"serial": list(range(count)), "text": [f"row {serial}" for serial in range(count)]}
        survived = rows == expected and count - acknowledged in (0, 1)
        expect(survived, f"{acknowledged:,} rows were acknowledged, {count:,} are there")
        say(f"  kill -9 after {acknowledged:,} acknowledged rows: all of them are there, whole")


def _kill_an_arrival(path: Path, log: Path) -> int:
    """Kill a process that adds rows. Returns the rows that were acknowledged, by it and by those before it."""
    last = -1
    with _process("arrive", path, log=log) as process:
        first = None
        for last in reports(process):
            first = last if first is None else first
            if last == first + ROWS_BEFORE_KILL:
                os.kill(process.pid, signal.SIGKILL)
        check_exit(process, "the process that adds rows", log, killed=True)
    return int(last) + 1


if __name__ == "__main__":
    sys.exit(main())
