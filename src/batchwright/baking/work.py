"""The work of a bake: every ingredient cut into units, what each unit keeps, and each unit done once."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np

from batchwright.baking.engine import run_tasks
from batchwright.baking.inputs import Inputs, formats_of
from batchwright.baking.instructions import Ingredient, Step
from batchwright.baking.known import find_known
from batchwright.baking.recipe import DatasetRecipe, spec_of_step
from batchwright.baking.reuse import find_kept
from batchwright.baking.rows import Reading, UnitReport, find_passing
from batchwright.baking.unit import (
    Documents,
    Job,
    bake_unit,
    detect_layout,
    find_characters,
    read_unit_report,
    unit_documents,
    unit_key,
)
from batchwright.base.errors import SpecError
from batchwright.base.fingerprint import fingerprint, fingerprint_rows, fingerprint_value, function_fingerprint
from batchwright.base.progress import progress
from batchwright.base.seeds import key_of, mix64
from batchwright.prepare.chat.step import Chat
from batchwright.prepare.rows import RowStep
from batchwright.prepare.text_column import TextColumn
from batchwright.prepare.tokenize import Tokenize
from batchwright.sources import units
from batchwright.sources.formats import Format
from batchwright.sources.listing import InputFile
from batchwright.sources.memory import TableRows
from batchwright.sources.units import Span, Unit

log: logging.Logger = logging.getLogger("batchwright")

__all__ = [
    "Cut",
    "Work",
    "bake_units",
    "choose_quantities",
    "detect_layouts",
    "first_rows",
    "for_units",
    "plan_dry",
    "plan_rows",
    "plan_work",
    "scan",
]


@dataclass(slots=True, eq=False)
class Cut:
    """One ingredient, cut into units, and what each keeps of its rows."""

    ingredient: Ingredient
    job: Reading
    units: list[Unit]
    first_file: int
    """Number of the ingredient's first file among the files of all ingredients."""
    files: list[InputFile]
    selected: list[Any]
    """For each unit the rows that a quantity chose, as numbers among those that pass `where`; None means all."""

    def file_of(self, span: Span) -> InputFile:
        return self.files[span.file - self.first_file]


@dataclass(slots=True, eq=False)
class Work(Cut):
    """One ingredient's work for a store: what is to be done with each unit, and what became of it."""

    job: Job
    reports: list[UnitReport] = field(default_factory=list)
    documents: list[Callable[[int], Documents]] = field(default_factory=list)
    """For each unit a function that gives its documents of one split."""

    def identity(self, unit: Unit) -> Any:
        """What tells cheaply that the content of a unit has changed."""
        if isinstance(unit.rows, TableRows):
            return unit.rows.fingerprint
        if not unit.spans:
            assert unit.rows is not None
            return fingerprint_rows(unit.rows, parameter="source")
        files = [self.file_of(span) for span in unit.spans]
        return [[file.path, file.num_bytes, file.modified_ns] for file in files]


def plan_work(recipe: DatasetRecipe, inputs: Inputs, on_error: str, shuffle: bool) -> list[Work]:
    """Cut every ingredient into units. Depends on names and sizes only, never on workers."""
    work = []
    for cut, spec in zip(_cut(recipe, inputs.files), inputs.spec["ingredients"], strict=True):
        steps = recipe.steps_of(cut.ingredient)
        decides = [
            # What is chosen of a unit, and what rows it holds, is part of the unit's own name.
            {name: value for name, value in spec.items() if name not in ("quantity", "memory", "after")},
            [spec_of_step(step) for step in steps],
            recipe.holdout_fraction,
            recipe.seed,
            shuffle,
            on_error,
            [inputs.spec["formats"][name] for name in cut.formats],
            inputs.spec["bake"],
        ]
        is_chat = isinstance(recipe.tokenize, Chat)
        formats = {name: kind.with_unique_keys() for name, kind in cut.formats.items()} if is_chat else cut.formats
        job = Job(
            ingredient=cut.ingredient.name,
            text=None if is_chat else TextColumn(cut.ingredient.text),
            where=cut.ingredient.where,
            steps=_row_steps(steps),
            tokenize=recipe.tokenize,
            holdout=recipe.holdout_fraction,
            seed=recipe.seed,
            shuffle=shuffle,
            on_error=on_error,
            formats=formats,
            columns=_columns_of(cut.ingredient, steps),
            fingerprint=fingerprint(decides),
        )
        work.append(Work(cut.ingredient, job, cut.units, cut.first_file, cut.files, [None] * len(cut.units)))
    return work


def plan_rows(recipe: DatasetRecipe, on_error: str) -> list[Cut]:
    """Cut every ingredient of a recipe whose rows are taken as they are after its steps.

    Rows from memory stay in one piece: they are in this process already, and no worker gets any of them.
    """
    cuts = []
    for cut in _cut(recipe, [ingredient.files() for ingredient in recipe.ingredients], cut_memory=False):
        steps = _row_steps(recipe.steps_of(cut.ingredient))
        text = None if cut.ingredient.text == "text" else TextColumn(cut.ingredient.text)
        # A table that no function looks at is taken by its row numbers: none of its values become Python's.
        is_columns = isinstance(cut.ingredient.source, TableRows) and not steps and text is None
        job = Reading(
            ingredient=cut.ingredient.name,
            text=text,  # rows need not have one, so that a column is looked for only where one was named
            where=cut.ingredient.where,
            steps=steps,
            seed=recipe.seed,
            on_error=on_error,
            formats=cut.formats,
            columns=() if is_columns and cut.ingredient.where is None else None,
        )
        cuts.append(Cut(cut.ingredient, job, cut.units, cut.first_file, cut.files, [None] * len(cut.units)))
    return cuts


def plan_dry(recipe: DatasetRecipe, on_error: str) -> list[Cut]:
    """Cut every ingredient of any recipe, in the order of files and rows, to look at its rows and write nothing."""
    if not recipe.is_tokenized:
        return plan_rows(recipe, on_error)
    work = plan_work(recipe, Inputs.of(recipe, shuffle=False), on_error, shuffle=False)
    detect_layouts(work)
    return [*work]


class _Units(NamedTuple):
    ingredient: Ingredient
    units: list[Unit]
    first_file: int
    files: list[InputFile]
    formats: dict[str, Format]


def _cut(recipe: DatasetRecipe, files_of: list[list[InputFile]], *, cut_memory: bool = True) -> Iterator[_Units]:
    first_file = 0
    for ingredient, files in zip(recipe.ingredients, files_of, strict=True):
        formats = formats_of(ingredient, files)
        if ingredient.is_memory and not cut_memory:
            source = ingredient.source
            cut = [Unit((), 0, source if isinstance(source, TableRows) else tuple(source))]
        elif ingredient.is_memory:
            cut = units.cut_rows(ingredient.source)
        else:
            numbered = [(first_file + number, file.path, file.num_bytes) for number, file in enumerate(files)]
            cut = units.cut_files(numbered, ingredient.format)
        yield _Units(ingredient, cut, first_file, files, formats)
        first_file += max(len(files), 1)


def _row_steps(steps: list[Step]) -> list[RowStep]:
    return [step for step in steps if isinstance(step, RowStep)]


def _columns_of(ingredient: Ingredient, steps: list[Step]) -> tuple[str, ...] | None:
    """The columns that anything looks at; None where a user's function gets whole rows."""
    (*before, tokenize) = steps
    if ingredient.where is not None or before or not isinstance(tokenize, Tokenize):
        return None
    needed = {*TextColumn(ingredient.text).columns, *({tokenize.text} - {"text"})}
    return tuple(sorted(needed))


class _ForUnit:
    """A function of one unit, with the jobs that all units share: they travel to a worker once.

    Functions of modules travel by name, and a worker imports their module anew. Where the program has set a value in
    such a module, the function would do something else there: that is refused, because the store would differ too.
    """

    def __init__(self, function: Callable[..., Any], jobs: Sequence[Reading]) -> None:
        self.function, self.jobs = function, jobs
        self.do_here = _what_functions_do(jobs)
        self.is_checked = True

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "is_checked": False}

    def __call__(self, which: int, unit: Unit, *rest: Any) -> Any:
        if not self.is_checked:
            for name, does in _what_functions_do(self.jobs).items():
                if does != self.do_here[name]:
                    raise SpecError(
                        f"{name} does something else in a worker: a value in its module was set after the import",
                        function=name,
                        remedy="pass the value to the function (functools.partial, or a closure), or workers=0",
                    )
            self.is_checked = True
        return self.function(self.jobs[which], unit, *rest)


def _what_functions_do(jobs: Sequence[Reading]) -> dict[str, str]:
    """Fingerprints of the user's functions that travel by name, by what they are called in the recipe."""
    functions: dict[str, Any] = {f"where= of {job.ingredient!r}": job.where for job in jobs if job.where is not None}
    functions |= {f"step {step.name!r}": step.function for job in jobs for step in job.steps}
    functions |= {f"select= of step {s.name!r}": s.select for job in jobs for s in job.steps if callable(s.select)}
    functions |= {
        f"the tokenizer {job.tokenize.tokenizer.name!r}": job.tokenize.tokenizer for job in jobs if isinstance(job, Job)
    }
    does = {}
    for name, function in functions.items():
        function = getattr(function, "function", function)  # of a tokenizer that is a function
        if isinstance(function, FunctionType) and function.__module__ != "__main__":
            with contextlib.suppress(SpecError):  # has a version of its own, because this cannot be known
                does[name] = function_fingerprint(function, name=name)
    return does


def for_units(
    function: Callable[..., Any], work: Sequence[Cut], tasks: Sequence[tuple[Any, ...]], workers: int
) -> Iterator[tuple[int, Any]]:
    """(task number, result) of tasks (ingredient number, unit, ...), as they finish."""
    return run_tasks(_ForUnit(function, [part.job for part in work]), tasks, workers, about=_about)


def _about(task: tuple[Any, ...]) -> str:
    spans = task[1].spans
    more = f" and {len(spans) - 1} more" if len(spans) > 1 else ""
    return f"{spans[0].path}{more}" if spans else "rows from memory"


def scan(recipe: DatasetRecipe, work: list[Work], workers: int, to: Path, show: bool) -> None:
    """Find out what must be known of everything before anything is baked: quantities, a vocabulary of characters."""
    choose_quantities(work, workers, to, show)
    detect_layouts(work)
    if isinstance(recipe.tokenize, Tokenize) and recipe.tokenize.needs_fit:
        fitted = recipe.tokenize.fitted(_characters(work, workers, to, show))
        for part in work:
            decides = fingerprint([part.job.fingerprint, fitted.fingerprint])
            part.job = replace(part.job, tokenize=fitted, fingerprint=decides)


def detect_layouts(work: list[Work]) -> None:
    """How the conversations of each ingredient are written, where nothing was said: its first row tells."""
    for part in work:
        tokenize = part.job.tokenize
        if not isinstance(tokenize, Chat) or tokenize.layout is not None:
            continue
        layout = detect_layout(part.job, part.units)
        log.info("%s: %s", part.ingredient.name, layout)
        decides = fingerprint([part.job.fingerprint, layout.spec()])
        part.job = replace(part.job, tokenize=replace(tokenize, layout=layout), fingerprint=decides)


def choose_quantities(work: Sequence[Cut], workers: int, to: Path | str, show: bool) -> None:
    """Find the rows of every ingredient that has a quantity."""
    limited = [which for which, part in enumerate(work) if part.ingredient.quantity is not None]
    tasks = [(which, unit) for which in limited for unit in work[which].units]
    if not tasks:
        return
    found: list[Any] = [None] * len(tasks)
    with progress(f"choosing rows for {to}", _bytes_of(tasks), show=show) as done:
        for number, passing in for_units(find_passing, work, tasks, workers):
            found[number] = passing
            done.advance(tasks[number][1].num_bytes)
    for which in limited:
        mine, found = found[: len(work[which].units)], found[len(work[which].units) :]
        work[which].selected = _choose(work[which], [rows for rows, _ in mine], [counts for _, counts in mine])


def _choose(part: Cut, passing: list[Any], span_rows: list[list[int]]) -> list[Any]:
    """The rows with the smallest hash of (seed, ingredient, file, row), as numbers among each unit's passing rows."""
    noise = []
    for unit, rows, first in zip(part.units, passing, first_rows(part, span_rows), strict=True):
        numbers = (rows[:, 1] + np.array(first, np.int64)[rows[:, 0]]).astype(np.uint64)
        hashes = np.empty(len(rows), np.uint64)
        for span in range(max(len(unit.spans), 1)):
            name = part.file_of(unit.spans[span]).name if unit.spans else "<memory>"
            mine = rows[:, 0] == span
            key = key_of("quantity", part.job.seed, part.job.ingredient, name)
            hashes[mine] = mix64(numbers[mine], np.uint64(key))
        noise.append(hashes)
    everything = np.concatenate(noise)
    quantity = part.ingredient.quantity
    wanted = int(len(everything) * quantity + 1e-9) if isinstance(quantity, float) else int(quantity or 0)
    kept = np.zeros(len(everything), bool)
    kept[np.argsort(everything, kind="stable")[:wanted]] = True
    return [np.flatnonzero(mine) for mine in np.split(kept, np.cumsum([len(n) for n in noise])[:-1])]


def _characters(work: list[Work], workers: int, to: Path, show: bool) -> set[int]:
    tasks = [
        (which, unit, chosen)
        for which, part in enumerate(work)
        for unit, chosen in zip(part.units, part.selected, strict=True)
    ]
    points: set[int] = set()
    with progress(f"finding the characters of {to}", _bytes_of(tasks), show=show) as done:
        for number, characters in for_units(find_characters, work, tasks, workers):
            points.update(characters)
            done.advance(tasks[number][1].num_bytes)
    return points


def _bytes_of(tasks: Sequence[tuple[Any, ...]]) -> int:
    return sum(task[1].num_bytes for task in tasks)


def first_rows(part: Cut, span_rows: list[list[int]]) -> list[list[int]]:
    """For each span of each unit, the number of its first row inside its file."""
    rows_so_far: Counter[int] = Counter()
    first = []
    for unit, counts in zip(part.units, span_rows, strict=True):
        if unit.rows is not None:
            first.append([unit.first_row])
            continue
        first.append([rows_so_far[span.file] for span in unit.spans])
        for span, count in zip(unit.spans, counts, strict=True):
            rows_so_far[span.file] += count
    return first


def bake_units(work: list[Work], to: Path, workers: int, show: bool) -> int:
    """Bake every unit that neither an unfinished bake has left in work/ nor an older version has.

    Returns how many documents were tokenised.
    """
    folder = to / "work"
    folder.mkdir(exist_ok=True)
    every = [
        (part, n, key, folder / f"{which:03d}-{n:06d}-{key[:16]}.arrow")
        for which, part in enumerate(work)
        for n, key in enumerate(_unit_keys(part))
    ]
    for part, _, _, path in every:
        part.documents.append(partial(unit_documents, path))
        part.reports.append(read_unit_report(path) or UnitReport())
    kept = find_kept(to, {key for part, n, key, _ in every if part.reports[n].key != key})
    with progress(f"baking {to}", sum(part.units[n].num_bytes for part, n, _, _ in every), show=show) as done:
        todo = []
        for part, n, key, path in every:
            if part.reports[n].key != key and key in kept:
                part.reports[n], part.documents[n] = kept[key].report, kept[key].documents
            if part.reports[n].key == key:
                done.advance(part.units[n].num_bytes, "done before")
            else:
                todo.append((part, n, key, path))
        tasks = [(work.index(part), part.units[n], key, part.selected[n], path) for part, n, key, path in todo]
        documents = encoded = 0
        known = find_known(work[0].job.tokenize, to)
        for number, (report, new) in for_units(partial(bake_unit, known=known), work, tasks, workers):
            part, n, *_ = todo[number]
            part.reports[n] = report
            documents += report.documents
            encoded += new
            done.advance(part.units[n].num_bytes, f"{documents:,} documents")
    return encoded


def _unit_keys(part: Work) -> list[str]:
    return [
        unit_key(
            part.job,
            unit,
            [part.identity(unit), None if chosen is None else fingerprint_value(chosen)],
        )
        for unit, chosen in zip(part.units, part.selected, strict=True)
    ]
