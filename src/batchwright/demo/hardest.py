"""The processes of `batchwright demo buffer`: one trains on a buffer that it changes, one reads along, one adds rows.

    python -m batchwright.demo.hardest train BUFFER CHECKPOINTS     each epoch: the hardest half, and fresh rows
    python -m batchwright.demo.hardest watch BUFFER                 until its stdin ends
    python -m batchwright.demo.hardest arrive BUFFER                one row at a time, until it is killed

Each writes JSON lines to stdout, and knows nothing of the process that watches and kills it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import select
import signal
import sys
from pathlib import Path

import numpy as np

import batchwright as bw
from batchwright.base.machine import die_with_parent
from batchwright.demo.digits import accuracy_of, losses_and_gradients, new_weights, pictures
from batchwright.demo.model import Adam
from batchwright.demo.train import CHECKPOINT, Checkpoint, digest_of, read_checkpoint, report, write_checkpoint

__all__ = ["after_epoch", "arrive", "main", "train", "watch"]

ROWS = 4000
FRESH_ROWS = ROWS // 2
BATCH_ROWS = 80
TEST_ROWS = 2000
LEARNING_RATE = 0.007
CHECKPOINT_STEPS = 8
SECONDS_BETWEEN_LOOKS = 0.04


def train(buffer: bw.DatasetBuffer, folder: Path, *, epochs: int, scrape: int | None = None, again: str = "") -> None:
    """Train up to an epoch, from the checkpoint in `folder` if there is one.

    The fresh rows of epoch `scrape` are mislabelled. `again` marks the versions of epochs that are done once more.
    """
    path, test = folder / CHECKPOINT, pictures(TEST_ROWS, seed=1_000_000)
    run = read_checkpoint(path) if path.exists() else Checkpoint(new_weights(), Adam(), {"epoch": 1, "state": None})
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
            losses, gradients = losses_and_gradients(run.weights, batch["pixels"], batch["label"])
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
        report(epoch=epoch, accuracy=accuracy_of(run.weights, test), loss=loss, rows=len(buffer))
    report(content=buffer.content_fingerprint(), weights=digest_of(run.weights))


def after_epoch(epoch: int) -> str:
    return f"after epoch {epoch}"


def _bring_rows(buffer: bw.DatasetBuffer, epoch: int, *, is_scrape: bool) -> None:
    """The rows of an epoch. A process that was killed after it wrote them down does not write them again."""
    origin = "scrape-2" if is_scrape else "scrape-1" if epoch == 1 else f"fresh for epoch {epoch}"
    if len(buffer) and buffer.provenance([-1])["origin"][0].as_py() == origin:
        return
    if epoch == 1:
        buffer.extend(pictures(ROWS, seed=1), origin=origin)
        return
    fresh = pictures(FRESH_ROWS, seed=epoch, mislabelled=is_scrape)
    buffer.extend(fresh, retain_prior=0.5, retain_prior_by="-loss", origin=origin)


def watch(buffer: bw.DatasetBuffer) -> None:
    """Look at the rows again and again until stdin ends, and say what there was to see."""
    versions, rows, faults = set(), set(), []
    report(watches=os.getpid())
    while True:
        ended = bool(select.select([sys.stdin], [], [], SECONDS_BETWEEN_LOOKS)[0])  # so the last look sees everything
        before = buffer.number
        seen = buffer.refresh().to_numpy()
        versions.add(buffer.number)
        rows.add(len(buffer))
        if buffer.number < before:
            faults.append(f"change {buffer.number} after change {before}")
        if len(set(map(len, [*seen.values(), buffer.ids]))) > 1 or (np.diff(buffer.ids) <= 0).any():
            faults.append(f"change {buffer.number} is not whole")
        if ended:
            break
    report(versions=len(versions), rows=sorted(rows), last=buffer.number, faults=faults)


def arrive(buffer: bw.DatasetBuffer) -> None:
    """Add rows until somebody kills this process: each is acknowledged once it is written."""
    for serial in itertools.count(len(buffer)):
        buffer.append({"serial": serial, "text": f"row {serial}"})
        os.write(1, b"%d\n" % serial)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m batchwright.demo.hardest")
    roles = parser.add_subparsers(dest="role", required=True)
    for name in ("train", "watch", "arrive"):
        role = roles.add_parser(name)
        role.add_argument("buffer", type=Path)
        if name == "train":
            role.add_argument("folder", type=Path, help="where checkpoints are written, and read if there is one")
            role.add_argument("--epochs", type=int, required=True)
            role.add_argument("--scrape", type=int, help="the epoch whose fresh rows are mislabelled")
            role.add_argument("--again", default="", help="marks the versions of epochs that are done once more")
    asked = vars(parser.parse_args(argv))
    role, path = asked.pop("role"), asked.pop("buffer")
    with bw.DatasetBuffer(path=path, read_only=role == "watch") as buffer:
        if role == "train":
            train(buffer, **asked)
        else:
            (watch if role == "watch" else arrive)(buffer)
    return 0


if __name__ == "__main__":
    die_with_parent(os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches this process too; the one that watches it speaks
    sys.exit(main())
