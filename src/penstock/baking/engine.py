"""Run tasks here or in worker processes, and give back their results in whatever order they finish."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from typing import Any

from penstock.processes import Worker

__all__ = ["run_tasks"]

Task = tuple[Any, ...]


def run_tasks(function: Callable[..., Any], tasks: Sequence[Task], workers: int) -> Iterator[tuple[int, Any]]:
    """(task number, function(*task)) for every task. The first failure stops the rest, and is raised here."""
    if workers <= 1 or len(tasks) <= 1:
        for number, task in enumerate(tasks):
            yield number, function(*task)
        return
    with contextlib.ExitStack() as stack:
        waiting = iter(enumerate(tasks))
        doing: dict[Any, tuple[int, Worker]] = {}

        def give(worker: Worker) -> None:
            for number, task in waiting:
                doing[worker.connection] = (number, worker)
                worker.send(*task)
                return

        for _ in range(min(workers, len(tasks))):
            give(stack.enter_context(Worker(function, doing="of this bake")))
        while doing:
            for connection in wait(list(doing)):
                number, worker = doing.pop(connection)
                answer = worker.receive()
                yield number, answer
                give(worker)
