"""The queue of batchwright: a provider that gives prepared batches, and a consumer that takes them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from batchwright import DataProviderBase, DatasetConsumer, NotReadyError
from benchmarks.peers.queues import BATCH_SHAPE, FILE_BATCHES, Batch, prepared

PACKAGE = "batchwright"


class Prepared(DataProviderBase):
    """Its batches come round again, whatever `rng` is; with `slow_seconds` the first is long in coming."""

    reproducible = False

    def build_meta(self) -> dict[str, Any]:
        self.ring = itertools.cycle([{"x": x, "y": y} for x, y in prepared()])
        return {
            "batch_schema": [
                {"name": name, "dtype": "int64", "shape": [BATCH_SHAPE[1]], "role": role}
                for name, role in (("x", "input"), ("y", "target"))
            ]
        }

    def sample_batch(self, split: str, rng: Any) -> dict[str, Any]:
        if self.config.get("slow_seconds"):
            time.sleep(self.config["slow_seconds"])
        return next(self.ring)


def open_place(context: Any, task: dict[str, Any]) -> str:
    return str(task["folder"])


def produce(place: str, task: dict[str, Any]) -> None:
    """Until it is terminated, or until as many files are there as the task asks for."""
    Prepared(
        place,
        BATCH_SHAPE[0],
        BATCH_SHAPE[1],
        batches_per_file=FILE_BATCHES,
        max_backlog_files=task["backlog_files"],
        durable=task.get("durable", False),
        slow_seconds=task.get("slow_seconds"),
    ).run(("train",), max_files=task.get("num_files"))


def consume(place: str, task: dict[str, Any]) -> Iterator[Batch]:
    consumer = _consumer(place, task)
    return (consumer.get_batch("train") for _ in itertools.count())


def waiting(place: str, task: dict[str, Any]) -> Callable[[], None]:
    """A call that waits for the first file, as long as the task says, and does not get it."""
    consumer = _consumer(place, task)

    def wait() -> None:
        try:
            consumer.get_batch("train")
        except NotReadyError:
            return
        raise AssertionError("there was a batch")

    return wait


def _consumer(place: str, task: dict[str, Any]) -> DatasetConsumer:
    while not Path(place, "queue", "meta.json").exists():  # the provider is being started at this moment
        time.sleep(0.01)
    return DatasetConsumer(
        place, framework=task.get("framework", "numpy"), timeout_seconds=task.get("timeout_seconds", 60)
    )
