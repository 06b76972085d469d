"""The rows of a recipe without a tokenize step, read and prepared, with the types of their sources."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from batchwright.baking.recipe import DatasetRecipe
from batchwright.baking.unit_rows import UnitReport, dropped_in_words, kept_rows, read_rows, total_report
from batchwright.baking.work import RowWork, choose_quantities, plan_rows, tasks_of
from batchwright.baking.workers import run_units
from batchwright.base.errors import SourceError
from batchwright.sources.arrow import FORMATS_WITH_TYPES, columns_of_rows, schema_of_files
from batchwright.sources.memory import TableRows

__all__ = ["PreparedRows", "memory_row", "read_recipe"]


@dataclass(frozen=True, slots=True)
class PreparedRows:
    """The rows of one ingredient."""

    name: str
    rows: Any
    """A list of dicts, or a pyarrow Table."""
    place_of: Callable[[int], dict[str, Any]]
    """The place of a row in its source, by its number."""
    report: UnitReport

    def __len__(self) -> int:
        return len(self.rows)


def read_recipe(recipe: DatasetRecipe, *, workers: int, on_error: str, show: bool) -> list[PreparedRows]:
    """The rows of every ingredient after its steps, in the order of files and rows, for any number of workers."""
    work = plan_rows(recipe, on_error)
    files = [part for part in work if not part.ingredient.is_memory]
    choose_quantities([part for part in work if part.ingredient.is_memory], 0, "a buffer", show=False)
    choose_quantities(files, workers, "a buffer", show)
    doing = "baking into a buffer"
    answers = iter(run_units(read_rows, files, tasks_of(files), workers, doing=doing, show=show))
    found = []
    for part in work:
        if part.ingredient.is_memory:
            found.append(_from_memory(part))
        else:
            found.append(_with_types(part, _join(part, [next(answers) for _ in part.units])))
    if not any(map(len, found)):
        dropped = [f"{part.name}: {dropped_in_words(part.report.dropped) or 'nothing was read'}" for part in found]
        remedy = "look at where=, quantity= and the steps"
        raise SourceError("no rows: every one was dropped", dropped="\n".join(dropped), remedy=remedy)
    return _with_all_columns(found)


def memory_row(number: int) -> dict[str, Any]:
    return {"file": "<memory>", "row": number}


def _from_memory(part: RowWork) -> PreparedRows:
    """Rows that are in this process already. A worker would only send them back."""
    job, source, (chosen,) = part.job, part.ingredient.source, part.selected
    if not job.steps and job.text is None:
        if isinstance(source, TableRows):
            return _from_table(part, source)
        if job.where is None and chosen is None and all(isinstance(row, dict | str) for row in source):
            # No function changes them, so they need not be copied.
            rows = [{"text": row} if isinstance(row, str) else row for row in source]
            return PreparedRows(part.ingredient.name, rows, memory_row, UnitReport(rows_read=len(rows)))
    return _join(part, [read_rows(job, part.units[0], chosen)])


def _from_table(part: RowWork, source: TableRows) -> PreparedRows:
    """A table, or those of its rows that `where` and a quantity keep."""
    name, (unit,), (chosen,) = part.ingredient.name, part.units, part.selected
    report = UnitReport()
    if part.job.where is not None:
        numbers = np.array([number for (_, _, number), _ in kept_rows(part.job, unit, report, chosen)], np.int64)
        report.finish(len(numbers))
    else:
        report.rows_read = len(source)
        if chosen is None:
            return PreparedRows(name, source.table(), memory_row, report)
        numbers = chosen
        if len(chosen) < len(source):
            report.drop("beyond quantity", len(source) - len(chosen))
    return PreparedRows(name, source.table(numbers), lambda row: memory_row(int(numbers[row])), report)


def _join(part: RowWork, answers: Sequence[tuple[UnitReport, list[dict[str, Any]], Any]]) -> PreparedRows:
    """The rows of all units of an ingredient."""
    reports = [report for report, _, _ in answers]
    rows = [row for _, unit_rows, _ in answers for row in unit_rows]
    first = np.cumsum([0, *(len(unit_rows) for _, unit_rows, _ in answers)])
    first_rows = part.first_rows([report.span_rows for report in reports])

    def place_of(number: int) -> dict[str, Any]:
        which = int(np.searchsorted(first, number, side="right")) - 1
        span, row = answers[which][2][number - first[which]].tolist()
        return part.job.place((part.units[which], span, row))

    return PreparedRows(part.ingredient.name, rows, place_of, total_report(part.units, reports, first_rows))


def _with_types(part: RowWork, prepared: PreparedRows) -> PreparedRows:
    """Rows with the column types of their files, if the files have the same ones and no step changed the rows."""
    kinds = {span.format for unit in part.units for span in unit.spans}
    is_changed = part.job.steps or part.job.text is not None
    if is_changed or not len(prepared) or len(kinds) != 1 or not kinds <= FORMATS_WITH_TYPES:
        return prepared
    schema = schema_of_files((file.path for file in part.files), *kinds)
    if schema is not None:
        table = columns_of_rows(prepared.rows, schema)
        if table is not None:
            return replace(prepared, rows=table)
    return prepared


def _with_all_columns(parts: Sequence[PreparedRows]) -> list[PreparedRows]:
    """The parts with the same columns each. Missing values are null."""
    named = [_column_names(part.rows) for part in parts]
    every = list(dict.fromkeys(name for names in named for name in names))
    padded = []
    for part, names in zip(parts, named, strict=True):
        rows = part.rows
        if len(names) < len(every):
            rows = _padded(rows, every)
        padded.append(replace(part, rows=rows))
    return padded


def _column_names(rows: Any) -> list[str]:
    if isinstance(rows, list):
        return list(dict.fromkeys(name for row in rows for name in row))
    return list(rows.column_names)


def _padded(rows: Any, names: Sequence[str]) -> Any:
    if isinstance(rows, list):
        return [dict.fromkeys(names) | row for row in rows]
    import pyarrow as pa

    nulls = dict.fromkeys(names, pa.nulls(rows.num_rows))
    return pa.table(nulls | {name: rows[name] for name in rows.column_names})
