"""The work of a bake: ingredients cut into units, the rows to keep of each, and the worker processes that bake them."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np

from batchwright.baking.inputs import Inputs, formats_of
from batchwright.baking.recipe import DatasetRecipe, Ingredient, Step, spec_of_step
from batchwright.baking.reuse import ReusedUnit, find_cache, find_reusable
from batchwright.baking.unit import (
    UNIT_FORMAT,
    DocumentJob,
    UnitFile,
    bake_unit,
    detect_layout,
    find_characters,
)
from batchwright.baking.unit_rows import RowJob, UnitReport, find_passing
from batchwright.base.errors import SpecError, WorkerError
from batchwright.base.fingerprint import fingerprint, fingerprint_rows, fingerprint_value, function_fingerprint
from batchwright.base.processes import Worker
from batchwright.base.progress import progress
from batchwright.base.seeds import key_of, mix64
from batchwright.prepare.chat.step import Chat
from batchwright.prepare.documents import TextColumn
from batchwright.prepare.rows import RowStep
from batchwright.prepare.tokenize import Tokenize
from batchwright.sources import units
from batchwright.sources.formats import Format
from batchwright.sources.listing import InputFile
from batchwright.sources.memory import TableRows
from batchwright.sources.units import Span, Unit

__all__ = ["Work", "plan_work"]

log: logging.Logger = logging.getLogger("batchwright")


@dataclass(slots=True, eq=False)
class RowWork:
    """One ingredient, cut into units, with the rows to keep of each."""

    ingredient: Ingredient
    job: RowJob
    units: list[Unit]
    first_file: int
    """Number of the ingredient's first file among the files of all ingredients."""
    files: list[InputFile]
    selected: list[Any] = field(init=False)
    """For each unit the numbers that a quantity chose of the rows that pass `where`; None means all."""

    def __post_init__(self) -> None:
        self.selected = [None] * len(self.units)

    def file_of(self, span: Span) -> InputFile:
        return self.files[span.file - self.first_file]

    def first_rows(self, span_rows: Sequence[Sequence[int]]) -> list[list[int]]:
        """The number in its file of the first row of each span of each unit, from the rows of all spans."""
        rows_so_far: Counter[int] = Counter()
        first = []
        for unit, counts in zip(self.units, span_rows, strict=True):
            if unit.rows is not None:
                first.append([unit.first_row])
                continue
            first.append([rows_so_far[span.file] for span in unit.spans])
            for span, count in zip(unit.spans, counts, strict=True):
                rows_so_far[span.file] += count
        return first


@dataclass(slots=True, eq=False)
class Work(RowWork):
    """One ingredient's work for a store."""

    job: DocumentJob
    baked: list[UnitFile | ReusedUnit] = field(default_factory=list)

    @property
    def reports(self) -> list[UnitReport]:
        return [unit.report for unit in self.baked]

    def unit_keys(self) -> list[str]:
        """The name of each unit's output: a fingerprint of its inputs, independent of the other units."""
        keys = []
        for unit, chosen in zip(self.units, self.selected, strict=True):
            choice = None if chosen is None else fingerprint_value(chosen)
            spans, identity = [[s.start, s.stop] for s in unit.spans], [self._identity(unit), choice]
            keys.append(fingerprint([UNIT_FORMAT, self.job.fingerprint, spans, unit.first_row, identity]))
        return keys

    def _identity(self, unit: Unit) -> Any:
        """The identity of a unit's content, found without reading its files."""
        if isinstance(unit.rows, TableRows):
            return unit.rows.fingerprint
        if unit.rows is not None:
            return fingerprint_rows(unit.rows, parameter="source")
        files = [self.file_of(span) for span in unit.spans]
        return [[file.path, file.num_bytes, file.modified_ns] for file in files]


# Plans of work


def plan_work(recipe: DatasetRecipe, inputs: Inputs, on_error: str, shuffle: bool) -> list[Work]:
    """Cut every ingredient into units. Depends on names and sizes only, never on workers."""
    work = []
    for (ingredient, formats, cut), spec in zip(_cut(recipe, inputs.files), inputs.spec["ingredients"], strict=True):
        steps = recipe.steps_of(ingredient)
        decides = [
            # The rows of a unit, and the choice among them, are in the unit's own key.
            {name: value for name, value in spec.items() if name not in ("quantity", "memory", "after")},
            [spec_of_step(step) for step in steps],
            recipe.holdout_fraction,
            recipe.seed,
            shuffle,
            on_error,
            [inputs.spec["formats"][name] for name in formats],
            inputs.spec["bake"],
        ]
        text: TextColumn | None = None
        if isinstance(recipe.tokenize, Chat):
            formats = {name: kind.with_unique_keys() for name, kind in formats.items()}
        else:
            text = TextColumn(ingredient.text)
        job = DocumentJob(
            **_of_rows(recipe, ingredient, on_error),
            text=text,
            formats=formats,
            columns=_columns_of(ingredient, steps),
            tokenize=recipe.tokenize,
            holdout=recipe.holdout_fraction,
            shuffle=shuffle,
            fingerprint=fingerprint(decides),
        )
        work.append(Work(ingredient, job, *cut))
    return work


def _of_rows(recipe: DatasetRecipe, ingredient: Ingredient, on_error: str) -> dict[str, Any]:
    """The fields of a job that come straight from the recipe."""
    steps = [step for step in recipe.steps_of(ingredient) if isinstance(step, RowStep)]
    names = {"ingredient": ingredient.name, "where": ingredient.where, "steps": steps}
    return {**names, "seed": recipe.seed, "on_error": on_error}


def plan_rows(recipe: DatasetRecipe, on_error: str) -> list[RowWork]:
    """Cut every ingredient of a recipe without a tokenize step.

    Rows from memory stay in one piece: they are in this process already, and are not sent to workers.
    """
    work = []
    files_of = [ingredient.files() for ingredient in recipe.ingredients]
    for ingredient, formats, cut in _cut(recipe, files_of, cut_memory=False):
        of_rows = _of_rows(recipe, ingredient, on_error)
        text = None if ingredient.text == "text" else TextColumn(ingredient.text)  # rows need no text
        # A table that no function looks at is taken by its row numbers: none of its values become Python's.
        functions = [*of_rows["steps"], text, ingredient.where]
        by_number = isinstance(ingredient.source, TableRows) and all(each is None for each in functions)
        job = RowJob(**of_rows, text=text, formats=formats, columns=() if by_number else None)
        work.append(RowWork(ingredient, job, *cut))
    return work


def plan_dry(recipe: DatasetRecipe, on_error: str) -> Sequence[RowWork]:
    """Cut every ingredient of any recipe, in the order of files and rows, to look at its rows and write nothing."""
    if not recipe.is_tokenized:
        return plan_rows(recipe, on_error)
    work = plan_work(recipe, Inputs.of(recipe, shuffle=False), on_error, shuffle=False)
    _detect_layouts(work)
    return work


_Cut = tuple[list[Unit], int, list[InputFile]]
"""The units of an ingredient, the number of its first file, and its files."""


def _cut(
    recipe: DatasetRecipe, files_of: list[list[InputFile]], *, cut_memory: bool = True
) -> Iterator[tuple[Ingredient, dict[str, Format], _Cut]]:
    first_file = 0
    for ingredient, files in zip(recipe.ingredients, files_of, strict=True):
        if not ingredient.is_memory:
            numbered = [(number, file.path, file.num_bytes) for number, file in enumerate(files, first_file)]
            cut = units.cut_files(numbered, ingredient.format)
        elif cut_memory:
            cut = units.cut_rows(ingredient.source)
        else:
            source = ingredient.source
            cut = [Unit((), 0, source if isinstance(source, TableRows) else tuple(source))]
        yield ingredient, formats_of(ingredient, files), (cut, first_file, files)
        first_file += max(len(files), 1)


def _columns_of(ingredient: Ingredient, steps: list[Step]) -> tuple[str, ...] | None:
    """The columns that are needed; None if a user's function gets whole rows."""
    (*before, tokenize) = steps
    if ingredient.where is not None or before or not isinstance(tokenize, Tokenize):
        return None
    needed = {*TextColumn(ingredient.text).columns, *({tokenize.text} - {"text"})}
    return tuple(sorted(needed))


# Passes over everything, before anything is baked


def scan(recipe: DatasetRecipe, work: list[Work], workers: int, to: Path, show: bool) -> None:
    """Find the rows of quantities, the layouts of conversations, and a vocabulary of characters."""
    choose_quantities(work, workers, to, show)
    _detect_layouts(work)
    if isinstance(recipe.tokenize, Tokenize) and recipe.tokenize.needs_fit:
        doing = f"finding the characters of {to}"
        found = run_units(find_characters, work, tasks_of(work), workers, doing=doing, show=show)
        fitted = recipe.tokenize.fitted(set(map(ord, set().union(*found))))
        for part in work:
            decides = fingerprint([part.job.fingerprint, fitted.fingerprint])
            part.job = replace(part.job, tokenize=fitted, fingerprint=decides)


def tasks_of(work: Sequence[RowWork]) -> list[tuple[int, Unit, Any]]:
    """(ingredient number, unit, selected rows) of all units."""
    return [
        (which, unit, chosen)
        for which, part in enumerate(work)
        for unit, chosen in zip(part.units, part.selected, strict=True)
    ]


def _detect_layouts(work: list[Work]) -> None:
    """Find the layout of each ingredient's conversations, where the recipe does not name one."""
    for part in work:
        tokenize = part.job.tokenize
        if not isinstance(tokenize, Chat) or tokenize.layout is not None:
            continue
        layout = detect_layout(part.job, part.units)
        log.info("%s: %s", part.ingredient.name, layout)
        decides = fingerprint([part.job.fingerprint, layout.spec()])
        part.job = replace(part.job, tokenize=replace(tokenize, layout=layout), fingerprint=decides)


def choose_quantities(work: Sequence[RowWork], workers: int, to: Path | str, show: bool) -> None:
    """Find the rows of every ingredient that has a quantity."""
    limited = [part for part in work if part.ingredient.quantity is not None and part.units]
    tasks = [(which, unit) for which, part in enumerate(limited) for unit in part.units]
    found = iter(run_units(find_passing, limited, tasks, workers, doing=f"choosing rows for {to}", show=show))
    for part in limited:
        passing, span_rows = zip(*(next(found) for _ in part.units), strict=True)
        part.selected = _choose(part, passing, span_rows)


def _choose(part: RowWork, passing: Sequence[Any], span_rows: Sequence[list[int]]) -> list[Any]:
    """The rows with the smallest hash of (seed, ingredient, file, row), as numbers among each unit's passing rows."""
    noise = []
    for unit, rows, first in zip(part.units, passing, part.first_rows(span_rows), strict=True):
        numbers = (rows[:, 1] + np.array(first, np.int64)[rows[:, 0]]).astype(np.uint64)
        hashes = np.empty(len(rows), np.uint64)
        names = [part.file_of(span).name for span in unit.spans] or ["<memory>"]
        for span, name in enumerate(names):
            mine = rows[:, 0] == span
            key = key_of("quantity", part.job.seed, part.job.ingredient, name)
            hashes[mine] = mix64(numbers[mine], np.uint64(key))
        noise.append(hashes)
    everything = np.concatenate(noise)
    wanted = part.ingredient.quantity or 0
    if isinstance(wanted, float):
        wanted = int(len(everything) * wanted + 1e-9)
    kept = np.zeros(len(everything), bool)
    kept[np.argsort(everything, kind="stable")[:wanted]] = True
    return [np.flatnonzero(mine) for mine in np.split(kept, np.cumsum([len(n) for n in noise])[:-1])]


# Baking


def bake_units(work: list[Work], to: Path, workers: int, show: bool) -> int:
    """Bake every unit that is neither in work/, from an unfinished bake, nor in an older version.

    Returns the number of documents that were tokenised.
    """
    folder = to / "work"
    folder.mkdir(exist_ok=True)
    keys = [key for part in work for key in part.unit_keys()]
    tasks = {
        key: (which, unit, key, chosen, folder / f"{key}.arrow")
        for key, (which, unit, chosen) in zip(keys, tasks_of(work), strict=True)
    }
    done: dict[str, UnitFile | ReusedUnit] = {
        key: found for key, (*_, path) in tasks.items() if (found := UnitFile.find(path, key)) is not None
    }
    done |= find_reusable(to, tasks.keys() - done.keys())
    todo = [task for key, task in tasks.items() if key not in done]
    with progress(f"baking {to}", sum(unit.num_bytes for _, unit, *_ in tasks.values()), show=show) as bar:
        for key in done:
            bar.advance(tasks[key][1].num_bytes, "done before")
        num_documents = num_encoded = 0
        function = partial(bake_unit, cache=find_cache(work[0].job.tokenize, to))
        for number, (report, encoded) in units_as_done(function, work, todo, workers):
            _, unit, key, _, path = todo[number]
            done[key] = UnitFile(path, report)
            num_documents += report.documents
            num_encoded += encoded
            bar.advance(unit.num_bytes, f"{num_documents:,} documents")
    left = iter(keys)
    for part in work:
        part.baked = [done[next(left)] for _ in part.units]
    return num_encoded


# Tasks, in this process or in worker processes

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
