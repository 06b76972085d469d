"""Queues in memory: torch's, whose tensors cross as shared memory, and Python's, which pickles into a pipe."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from benchmarks.peers.queues import Batch, prepared

PACKAGE = "torch"


def open_place(context: Any, task: dict[str, Any]) -> Any:
    if task["how"] == "torch":
        import torch.multiprocessing

        context = torch.multiprocessing.get_context("spawn")
    return context.Queue(task["most_batches"])


def produce(place: Any, task: dict[str, Any]) -> None:
    batches = itertools.cycle(prepared())
    if task["how"] == "torch":
        import torch

        torch.set_num_threads(1)
        for x, y in batches:
            # A tensor of its own each time: one that was sent once lies in shared memory, and the next put would send
            # the same memory, under the eyes of whoever still reads it.
            place.put((torch.from_numpy(x), torch.from_numpy(y)))
    for batch in batches:
        place.put(batch)


def consume(place: Any, task: dict[str, Any]) -> Iterator[Batch]:
    if task["how"] == "torch":
        import torch.multiprocessing  # noqa: F401  which teaches pickle to receive tensors
    while True:
        yield place.get()
