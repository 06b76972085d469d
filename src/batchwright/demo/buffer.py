"""`batchwright demo buffer`: train on the hardest half, let bad rows in, find them, roll back, and lose nothing.

Writing, reading and training happen in processes of their own, and those that write are killed. The demo checks what it
says of them: what a killed process had acknowledged is compared with what is in the folder.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import batchwright as bw
from batchwright.base.errors import BusyError, WorkerError
from batchwright.cli.main import main as batchwright
from batchwright.demo.digits import drawn
from batchwright.demo.hardest import BATCH_ROWS, ROWS, after_epoch, train
from batchwright.demo.runs import check_end, perform, python_process, reports
from batchwright.demo.screen import COLUMNS, exit_code_of, head, near, say
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


def main(argv: list[str] | None = None) -> int:
    """Run the demo. 0: everything it promises held; 1: something did not; 2: not done; 130: Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="batchwright demo buffer",
        description="Train a small classifier over epochs on rows that change: losses are written back, the hardest "
        "half stays, fresh rows come in. Bad rows spoil an epoch, are found and rolled back; processes that write are "
        "killed, and nothing is lost. No network, no torch, under a minute.",
    )
    parser.add_argument("--folder", type=Path, default=Path(".demo"), help="where everything goes (default: .demo)")
    asked = parser.parse_args(argv)
    title = "batchwright demo buffer: a dataset that changes while a model trains on it."
    return exit_code_of(lambda: perform(title, asked.folder, lambda: _tell(asked.folder / "runs")))


def _tell(folder: Path) -> bool:
    folder.mkdir(exist_ok=True)
    run = _Run(folder / "buffer", folder / "checkpoints")
    with bw.DatasetBuffer(path=run.buffer):
        pass  # an empty one, for a reader to watch from the beginning
    with _process("watch", run.buffer, log=folder / "watch.txt") as watching:
        held = [_train_and_kill(run, folder), _find_what_came_in(run), _roll_back(run)]
        held.append(_says_what_was_seen(watching, run))
    held += [_add_one_by_one(folder), _shows_the_folder(run)]
    return all(held)


@dataclass(slots=True)
class _Run:
    """A training run as seen from outside: its folders, and what its process said."""

    buffer: Path
    folder: Path
    acknowledged: dict[int, float] = field(default_factory=dict)
    """Losses by id, of which the process said in this epoch that they are written."""
    step: int = 0
    """The last step of which it said so,"""
    number: int = 0
    """and the last change."""
    accuracy: dict[int, float] = field(default_factory=dict)
    loss: dict[int, float] = field(default_factory=dict)
    end: dict[str, Any] = field(default_factory=dict)
    """The content of the buffer and the weights, once it is through."""
    refusal: str = ""
    """What a second writer was told while it ran."""

    def watch(self, epochs: int, *settings: str, kill_at: tuple[int, int] | None = None) -> int:
        """Start a process, follow it, and kill it at (epoch, step) or wait for its end. Returns its id."""
        self.folder.mkdir(parents=True, exist_ok=True)
        log = self.folder / "stderr.txt"
        with _process("train", self.buffer, self.folder, "--epochs", str(epochs), *settings, log=log) as process:
            for report in reports(process):
                self._follow(report)
                if kill_at is not None and (report.get("epoch"), report.get("step")) == kill_at:
                    os.kill(process.pid, signal.SIGKILL)  # what it said before is still to be read
            code = process.wait()
        check_end("the training process", code, kill_at is not None, log)
        return process.pid

    def _follow(self, report: dict[str, Any]) -> None:
        if "from_step" in report:
            self.acknowledged.clear()
        elif "step" in report:
            self.step, self.number = report["step"], report["number"]
            self.acknowledged.update(zip(report["ids"], report["losses"], strict=True))
            if not self.refusal:
                self.refusal = _told_to_a_second_writer(self.buffer)
        elif "accuracy" in report:
            self.accuracy[report["epoch"]], self.loss[report["epoch"]] = report["accuracy"], report["loss"]
            say(
                f"  epoch {report['epoch']}   {report['rows']:,} rows   mean loss {report['loss']:.3f}   "
                f"accuracy {100 * report['accuracy']:.1f} %"
            )
        elif "content" in report:
            self.end = report


def _told_to_a_second_writer(path: Path) -> str:
    try:
        with bw.DatasetBuffer(path=path):
            return "nothing: it was let in"
    except BusyError as error:
        return str(error.where["process"])


# 1. Train, and kill it


def _train_and_kill(run: _Run, folder: Path) -> bool:
    head(1, f"{ROWS:,} small pictures of digits; each epoch, losses are written back and the hardest half stays")
    say("  after each step    buffer.set(batch.ids, loss=losses)")
    say('  after each epoch   buffer.commit("after epoch 1")')
    say('  before the next    buffer.extend(fresh, retain_prior=0.5, retain_prior_by="-loss", origin=...)')
    say()
    pid = run.watch(SCRAPE_EPOCH - 1, kill_at=(KILL_EPOCH, KILL_STEP))
    say(f"kill -9: process {pid} got SIGKILL in epoch {KILL_EPOCH}; it had acknowledged {run.step} of {STEPS} steps.")
    held = [_says_all_is_there(run), _says_who_writes(run, pid)]
    again = run.watch(SCRAPE_EPOCH - 1)
    say(f"Process {again} went on from a checkpoint: the model, and the loader's state in mid-epoch.")

    alone = _train_here(folder / "uninterrupted", SCRAPE_EPOCH - 1)
    held.append(alone == run.end)
    say(
        "Beside a run that nobody killed: the same rows and losses, and the same weights, in every bit."
        if held[-1]
        else f"DIFFERENT: {run.end} here, {alone} in a run that nobody killed"
    )
    return all(held)


def _train_here(folder: Path, epochs: int) -> dict[str, Any]:
    """The content and weights of a run in this process."""
    folder.mkdir()
    with bw.DatasetBuffer(path=folder / "buffer") as buffer, contextlib.redirect_stdout(io.StringIO()) as said:
        train(buffer, folder, epochs=epochs)
    end: dict[str, Any] = json.loads(said.getvalue().splitlines()[-1])
    return end


def _says_all_is_there(run: _Run) -> bool:
    """Of what a killed process had acknowledged nothing is missing; of what it had not, there is one change at most."""
    with bw.DatasetBuffer(path=run.buffer) as buffer:
        found = dict(zip(buffer.ids.tolist(), buffer.to_numpy()["loss"].tolist(), strict=True))
        rows, more = len(buffer), buffer.number - run.number
    lost = [row for row, loss in run.acknowledged.items() if found.get(row) != loss]
    if lost or more not in (0, 1) or rows != ROWS:
        say(f"NOT AS EXPECTED: {len(lost)} losses are not there; {rows:,} rows; {more} changes more")
        return False
    say(f"Opened again: {rows:,} rows, and all {len(run.acknowledged):,} losses that this epoch had written back.")
    return True


def _says_who_writes(run: _Run, pid: int) -> bool:
    if run.refusal != f"pid {pid}":
        say(f"NOT AS EXPECTED: a second writer was told {run.refusal!r}")
        return False
    say(f"While it ran, a second writer was refused and told who writes: {run.refusal}.")
    return True


# 2. Bad rows


def _find_what_came_in(run: _Run) -> bool:
    head(2, f"The fresh rows of epoch {SCRAPE_EPOCH} are mislabelled, and nobody knows")
    run.watch(SCRAPE_EPOCH, "--scrape", str(SCRAPE_EPOCH))
    before, after = run.accuracy[SCRAPE_EPOCH - 1], run.accuracy[SCRAPE_EPOCH]
    held = [after < before - 0.05]
    say(f"Accuracy fell from {100 * before:.1f} % to {100 * after:.1f} %." if held[0] else "NOT AS EXPECTED: no fall")
    older, newer = after_epoch(SCRAPE_EPOCH - 1), after_epoch(SCRAPE_EPOCH)
    with bw.DatasetBuffer(path=run.buffer, read_only=True) as buffer:
        diff = buffer.diff(older, newer)
        say()
        say(f'buffer.diff("{older}", "{newer}"):')
        say(f"  {diff}")
        came = _origins(buffer, diff.added)
        say(f"buffer.provenance(...) of the rows added: {_in_words(came)}.")
        hardest = np.argsort(-buffer.to_numpy()["loss"])[: len(buffer) // 2]
        would_stay = _origins(buffer, buffer.ids[hardest])
        _say_folded(f"The hardest half, which would stay for the next epoch: {_in_words(would_stay)}.")
        held += [set(came) == {"scrape-2"}, would_stay["scrape-2"] > 0.6 * len(hardest)]
        _show_clearest([buffer[int(index)] for index in hardest[:500]])
    if not all(held[1:]):
        say("NOT AS EXPECTED: the rows that came in are not those that were planted, or are not the hardest")
    return all(held)


def _origins(buffer: bw.DatasetBuffer, ids: Any) -> Counter[str]:
    return Counter(buffer.provenance(buffer.index_of(ids))["origin"].to_pylist())


def _in_words(origins: Counter[str]) -> str:
    return ", ".join(f"{count:,} from {name!r}" for name, count in origins.most_common())


def _show_clearest(rows: list[dict[str, Any]]) -> None:
    """Some rows that can be read, beside each other, with the labels that they came with."""
    rows = sorted(rows, key=lambda row: float(np.abs(row["pixels"] - (row["pixels"] > 0.5)).mean()))[:6]
    say("Of the 500 rows with the largest losses those that one can read best, and what their labels say:")
    for lines in zip(*(drawn(row["pixels"]) for row in rows), strict=True):
        say(("    " + "      ".join(lines)).rstrip())
    say("    " + "      ".join(f"label {row['label']}" for row in rows))


# 3. Back


def _roll_back(run: _Run) -> bool:
    version = after_epoch(SCRAPE_EPOCH - 1)
    head(3, f'buffer.rollback("{version}"), and on without them')
    with bw.DatasetBuffer(path=run.buffer) as buffer:
        planted = set(buffer.diff(version, after_epoch(SCRAPE_EPOCH)).added.tolist())
        began = time.perf_counter()
        buffer.rollback(version)
        took = f"{1000 * (time.perf_counter() - began):.1f} ms"
        same = buffer.content_fingerprint() == buffer.at(version).content_fingerprint()
        say(f"{len(buffer):,} rows as they were, in {took}; and the model of then, from its checkpoint.")
    shutil.copy(run.folder / f"{version}.npz", run.folder / CHECKPOINT)
    spoiled = run.accuracy[SCRAPE_EPOCH]
    run.watch(LAST_EPOCH, "--again", AGAIN)
    with bw.DatasetBuffer(path=run.buffer, read_only=True) as buffer:
        left = planted & set(buffer.ids.tolist())
        kept = planted & set(buffer.at(after_epoch(SCRAPE_EPOCH)).ids.tolist())
    better = run.accuracy[LAST_EPOCH] > run.accuracy[SCRAPE_EPOCH - 1] > spoiled
    if not same or left or kept != planted or not better:
        say(f"NOT AS EXPECTED: {same=}, {better=}, {len(left)} rows of scrape-2, {len(kept)} in its version")
        return False
    _say_folded(
        f"Epoch {SCRAPE_EPOCH} with other rows: {100 * run.accuracy[SCRAPE_EPOCH]:.1f} % in place of "
        f"{100 * spoiled:.1f} %. No row of scrape-2 is in the buffer, and none of their ids was used again; "
        f'buffer.at("{after_epoch(SCRAPE_EPOCH)}") still has them, to look at.'
    )
    return True


# The reader


def _says_what_was_seen(watching: subprocess.Popen[str], run: _Run) -> bool:
    assert watching.stdin is not None
    watching.stdin.close()  # it looks once more, and ends
    seen = list(reports(watching))[-1]
    with bw.DatasetBuffer(path=run.buffer, read_only=True) as buffer:
        saw_the_end = seen.get("last") == buffer.number
    say()
    if not saw_the_end or seen["faults"] or not set(seen["rows"]) <= {0, ROWS}:
        say(f"NOT AS EXPECTED: the reader saw {seen}")
        return False
    _say_folded(
        f"All the while process {watching.pid} was reading: {seen['versions']:,} states, each of them whole."
        f" After the first it never saw other than {ROWS:,} rows: half of them leave and as many come in one change."
    )
    return True


# 4. One by one


def _add_one_by_one(folder: Path) -> bool:
    head(4, "Rows that come one by one, from processes that are killed")
    path = folder / "arrivals"
    for _ in range(KILLS):
        acknowledged = _kill_an_arrival(path, folder / "arrive.txt")
        with bw.DatasetBuffer(path=path, read_only=True) as buffer:
            rows = buffer.to_pydict()
        whole = rows["text"] == [f"row {serial}" for serial in rows["serial"]] and rows["serial"] == [
            *range(len(rows["serial"]))
        ]
        more = len(rows["serial"]) - acknowledged
        if not whole or more not in (0, 1):
            say(f"NOT AS EXPECTED: {acknowledged:,} rows were acknowledged, {len(rows['serial']):,} are there")
            return False
        unsaid = " (and one more)" if more else ""
        say(f"  kill -9 after {acknowledged:,} acknowledged rows: all of them are there, whole{unsaid}")
    return True


def _kill_an_arrival(path: Path, log: Path) -> int:
    """Rows of which the process had said that they are written, counted from the first process on."""
    last = -1
    with _process("arrive", path, log=log) as process:
        first = None
        for last in reports(process):
            first = last if first is None else first
            if last == first + ROWS_BEFORE_KILL:
                os.kill(process.pid, signal.SIGKILL)
        if process.wait() != -signal.SIGKILL:
            raise WorkerError(
                "the process that adds rows ended before it was killed",
                output=log.read_text().strip()[-2000:] or None,
                remedy="run the demo again",
            )
    return int(last) + 1


def _shows_the_folder(run: _Run) -> bool:
    head(5, "What is left")
    say(f"$ batchwright info {near(run.buffer)}")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = batchwright(["info", str(run.buffer)])
    for line in printed.getvalue().splitlines():
        _say_folded(line)
    return code == 0


def _say_folded(text: str) -> None:
    indent = " " * (len(text) - len(text.lstrip()) + 4)
    say(textwrap.fill(text, COLUMNS, subsequent_indent=indent if text.startswith(" ") else ""))


# Processes


def _process(role: str, *arguments: Path | str, log: Path) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    """A process of this demo."""
    return python_process("batchwright.demo.hardest", role, *map(str, arguments), log=log, stdin=subprocess.PIPE)


if __name__ == "__main__":
    sys.exit(main())
