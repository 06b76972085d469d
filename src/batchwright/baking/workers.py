"""Tasks in this process or in worker processes, with results in the order in which they finish."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from types import FunctionType
from typing import Any

from batchwright.baking.unit_rows import RowJob
from batchwright.base.errors import SpecError, WorkerError
from batchwright.base.fingerprint import function_fingerprint
from batchwright.base.processes import Worker
from batchwright.base.progress import progress

__all__ = ["run_tasks", "run_units", "units_as_done"]

Task = tuple[Any, ...]


def run_tasks(
    function: Callable[..., Any], tasks: Sequence[Task], workers: int, *, about: Callable[[Task], str] | None = None
) -> Iterator[tuple[int, Any]]:
    """(task number, function(*task)) for every task. The first failure stops the rest, and is raised here.

    `about` describes a task in the error of a worker that dies in it.
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
                give(worker)  # before the result is used: the worker need not wait for that
                yield number, answer


def units_as_done(
    function: Callable[..., Any], work: Sequence[Any], tasks: Sequence[Task], workers: int
) -> Iterator[tuple[int, Any]]:
    """(task number, function(job, unit, ...)) for tasks (ingredient number, unit, ...), as they finish."""
    return run_tasks(_OfUnit(function, [part.job for part in work]), tasks, workers, about=_files_of)


def run_units(
    function: Callable[..., Any], work: Sequence[Any], tasks: Sequence[Task], workers: int, *, doing: str, show: bool
) -> list[Any]:
    """function(job, unit, ...) for tasks (ingredient number, unit, ...), in their order, with a progress bar."""
    results: list[Any] = [None] * len(tasks)
    with progress(doing, sum(task[1].num_bytes for task in tasks), show=show and bool(tasks)) as done:
        for number, result in units_as_done(function, work, tasks, workers):
            results[number] = result
            done.advance(tasks[number][1].num_bytes)
    return results


def _files_of(task: Task) -> str:
    spans = task[1].spans
    if not spans:
        return "rows from memory"
    if len(spans) == 1:
        return str(spans[0].path)
    return f"{spans[0].path} and {len(spans) - 1} more"


class _OfUnit:
    """A function of one unit, with the jobs that all units share. A worker gets it once.

    Functions of modules travel by name, and a worker imports their module anew. If the program has set a value in such
    a module, the function would do something else there. That is refused, because the store would differ too.
    """

    def __init__(self, function: Callable[..., Any], jobs: Sequence[RowJob]) -> None:
        self.function, self.jobs = function, jobs
        self.fingerprints = _fingerprints_of_functions(jobs)

    def __call__(self, which: int, unit: Any, *rest: Any) -> Any:
        return self.function(self.jobs[which], unit, *rest)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for name, found in _fingerprints_of_functions(self.jobs).items():
            if found != self.fingerprints[name]:
                raise SpecError(
                    f"{name} does something else in a worker: a value in its module was set after the import",
                    function=name,
                    remedy="pass the value to the function (functools.partial, or a closure), or workers=0",
                )


def _fingerprints_of_functions(jobs: Sequence[RowJob]) -> dict[str, str]:
    """Fingerprints of the user's functions that travel by name, by their names in the recipe."""
    functions: dict[str, Any] = {}
    for job in jobs:
        functions[f"where= of {job.ingredient!r}"] = job.where
        for step in job.steps:
            functions[f"step {step.name!r}"] = step.function
            functions[f"select= of step {step.name!r}"] = step.select
        tokenizer = getattr(getattr(job, "tokenize", None), "tokenizer", None)
        # A tokenizer that is a function keeps it as `function`.
        functions[f"the tokenizer {getattr(tokenizer, 'name', '')!r}"] = getattr(tokenizer, "function", tokenizer)
    found = {}
    for name, function in functions.items():
        if isinstance(function, FunctionType) and function.__module__ != "__main__":
            with contextlib.suppress(SpecError):  # it has a version, because it cannot be fingerprinted
                found[name] = function_fingerprint(function, name=name)
    return found
