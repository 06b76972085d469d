"""Queues of files, written by hand: one file a batch with torch.save, and the limit, bare bytes in files of many.

The next file's name is known, so nobody lists a folder. A file appears by rename and is deleted when it was read; a
producer that is as far ahead as it may be waits for a file to go.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.peers.queues import BATCH_BYTES, BATCH_SHAPE, FILE_BATCHES, PAUSE_SECONDS, Batch, aligned, prepared

PACKAGE = "torch"


def open_place(context: Any, task: dict[str, Any]) -> str:
    return str(task["folder"])


def produce(place: str, task: dict[str, Any]) -> None:
    ring = prepared()
    folder = Path(place)
    if task["how"] == "torch.save":
        import torch

        tensors = [{"x": torch.from_numpy(x), "y": torch.from_numpy(y)} for x, y in ring]
        ahead = task["backlog_files"] * FILE_BATCHES
        for number in itertools.count():
            _wait_while(folder / f"{number - ahead:08d}", is_there=True)
            part = folder / f".{number:08d}.part"
            torch.save(tensors[number % len(tensors)], part)
            os.rename(part, folder / f"{number:08d}")
    batches = itertools.cycle(ring)
    for number in itertools.count():
        _wait_while(folder / f"{number - task['backlog_files']:08d}", is_there=True)
        part = folder / f".{number:08d}.part"
        # Batch by batch: what was just made is still in the processor's cache.
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        if task["how"] == "reserved":
            os.posix_fallocate(descriptor, 0, FILE_BATCHES * BATCH_BYTES)
        for x, y in itertools.islice(batches, FILE_BATCHES):
            os.write(descriptor, x)
            os.write(descriptor, y)
        os.close(descriptor)
        os.rename(part, folder / f"{number:08d}")


def consume(place: str, task: dict[str, Any]) -> Iterator[Batch]:
    folder = Path(place)
    return _saved(folder) if task["how"] == "torch.save" else _bare(folder)


def _saved(folder: Path) -> Iterator[Batch]:
    import torch

    for number in itertools.count():
        path = folder / f"{number:08d}"
        _wait_while(path, is_there=False)
        batch = torch.load(path)
        os.unlink(path)
        yield batch["x"], batch["y"]


def _bare(folder: Path) -> Iterator[Batch]:
    memory = aligned(FILE_BATCHES * BATCH_BYTES)
    batches = memory.view("int64").reshape(FILE_BATCHES, 2, *BATCH_SHAPE)
    for number in itertools.count():
        path = folder / f"{number:08d}"
        _wait_while(path, is_there=False)
        descriptor = os.open(path, os.O_RDONLY)
        filled = 0
        while filled < len(memory):
            filled += os.readv(descriptor, [memory[filled:]])
        os.close(descriptor)
        os.unlink(path)
        for batch in batches:
            yield batch[0], batch[1]


def _wait_while(path: Path, *, is_there: bool) -> None:
    name = str(path)
    while os.path.exists(name) == is_there:
        time.sleep(PAUSE_SECONDS)
