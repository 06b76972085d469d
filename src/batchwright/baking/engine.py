"""Run tasks here or in worker processes, and give back their results in whatever order they finish."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from typing import Any

from batchwright.base.errors import WorkerError
from batchwright.base.processes import Worker

__all__ = ["run_tasks"]

Task = tuple[Any, ...]


def run_tasks(
    function: Callable[..., Any], tasks: Sequence[Task], workers: int, *, about: Callable[[Task], str] | None = None
) -> Iterator[tuple[int, Any]]:
    """(task number, function(*task)) for every task. The first failure stops the rest, and is raised here.

    `about` says what a task is about, for the error of a worker that dies in it.
    """
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
                try:
                    answer = worker.receive()
                except WorkerError as error:
                    if about is not None and "file" not in error.where:
                        error.where["working_on"] = about(tasks[number])
                    raise
                give(worker)  # before the result is looked at: the worker need not wait for that
                yield number, answer
