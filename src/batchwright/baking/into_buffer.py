"""Baking into a buffer: the rows of a recipe are read and prepared, with the types of their sources, and then appended.

Everything is read first, and then each ingredient is one append. A recipe that ends in tokens is baked into a temporary
store first, so that the buffer has the same documents in the same order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from batchwright.baking.inputs import Inputs
from batchwright.baking.recipe import DatasetRecipe
from batchwright.baking.unit_rows import (
    UnitReport,
    dropped_in_words,
    examples_in_words,
    kept_rows,
    read_rows,
    total_report,
)
from batchwright.baking.work import RowWork, choose_quantities, plan_rows, run_units, tasks_of
from batchwright.base.errors import BatchwrightError, SampleError, SampleTypeError, SourceError, SpecError
from batchwright.base.fingerprint import fingerprint
from batchwright.base.progress import say
from batchwright.base.words import counted
from batchwright.buffer.buffer import DatasetBuffer
from batchwright.sources.arrow import FORMATS_WITH_TYPES, columns_of_rows, schema_of_files
from batchwright.sources.memory import TableRows
from batchwright.store.layout import is_store
from batchwright.store.reader import Store

_EMPTY = "before the first bake"
"""The version without rows and columns with which a bake into a folder begins."""
_AGAIN = " again "
"""Part of the name of a version that was restored: names are unique."""


def check_buffer(into: Any) -> None:
    if into is not None and not isinstance(into, DatasetBuffer):
        remedy = "into=bw.DatasetBuffer(path='rows'), or to='corpus.store' for a store"
        raise SpecError(f"into= is a buffer, not a {type(into).__name__}", parameter="into", remedy=remedy)


def bake_rows(
    recipe: DatasetRecipe, into: DatasetBuffer | None, *, workers: int, on_error: str, show: bool
) -> DatasetBuffer:
    """Append the rows of a recipe to `into`, or to a new buffer."""
    parts = read_recipe(recipe, workers=workers, on_error=on_error, show=show)
    buffer = _put(into, parts)
    say(_summary("a buffer", parts), show=show)
    return buffer


def put_tokens(into: DatasetBuffer | None, store: Store) -> DatasetBuffer:
    """Append the documents of a store to `into`, or to a new buffer, a source at a time."""
    return _put(into, [_tokens_of(store, name) for name in store.names])


def _tokens_of(store: Store, name: str) -> PreparedRows:
    paths = store.files["path"].to_pylist()
    pieces: list[Any] = []
    for split in [info.split for info in store.manifest.streams if info.source == name]:
        stream = store.stream(name, split)
        for number in range(len(stream.shard_documents)):
            shard = stream.shard(number)
            columns = {
                # A copy: the store is temporary.
                "tokens": pa.ListArray.from_arrays(pa.array(shard.offsets), pa.array(shard.tokens.copy())),
                "source": pa.repeat(name, len(shard.row)),
                "file": pa.array([paths[file] for file in shard.file.tolist()], pa.string()),
                "row": pa.array(shard.row.copy()),
                "split": pa.repeat(split, len(shard.row)),
            }
            pieces.append(pa.table(columns))
    rows: Any = []
    if pieces:
        rows = pa.concat_tables(pieces)
    return PreparedRows(name, rows, memory_row, UnitReport())


def bake_folder(recipe: DatasetRecipe, to: Path, *, workers: int, on_error: str, show: bool) -> DatasetBuffer:
    """The buffer in a folder, with a recipe's rows, opened to read.

    The rows are a version named after the recipe and its files. An older version of this name is restored. Otherwise
    everything is read, the rows are replaced, and the rows before them stay a version.
    """
    _refuse_other_folders(to)
    inputs = Inputs.of(recipe, shuffle=False)
    name = f"{recipe.fingerprint} {fingerprint([inputs.key, on_error])[:8]}"
    if to.exists() and any(to.iterdir()):
        with DatasetBuffer(path=to, read_only=True) as there:
            _refuse_other_buffers(to, there)
            if _is_at(there, name):
                say(f"{to}: up to date ({len(there):,} rows)", show=show)
                return DatasetBuffer(path=to, read_only=True)
    with DatasetBuffer(path=to) as buffer:
        if not buffer.versions():
            buffer.commit(_EMPTY)
        _refuse_other_buffers(to, buffer)
        if buffer.versions()[-1].number != buffer.number:
            buffer.commit()  # rows that no version holds: they would be lost
        if any(version.name == name for version in buffer.versions()):
            if not _is_at(buffer, name):
                _restore(buffer, name, name)
            summary = f"{to}: {len(buffer):,} rows, as they were baked before"
        else:
            parts = read_recipe(recipe, workers=workers, on_error=on_error, show=show)
            _replace_rows(buffer, parts, name)
            summary = _summary(str(to), parts)
    say(summary, show=show)
    return DatasetBuffer(path=to, read_only=True)


def _replace_rows(buffer: DatasetBuffer, parts: Sequence[PreparedRows], name: str) -> None:
    before = buffer.versions()[-1]
    try:
        buffer.rollback(_EMPTY)
        _append_all(buffer, parts)
        buffer.commit(name)
    except BaseException:
        with contextlib.suppress(BatchwrightError, OSError):  # after a full disk, say, the next bake repairs it
            _restore(buffer, before, before.name)
        raise


def _restore(buffer: DatasetBuffer, version: Any, name: str) -> None:
    buffer.rollback(version)
    buffer.commit(f"{name.split(_AGAIN)[0]}{_AGAIN}{buffer.number}")


def _is_at(buffer: DatasetBuffer, name: str) -> bool:
    """Whether a buffer's rows are those of a version of this name, unchanged."""
    versions = buffer.versions()
    if not versions or versions[-1].number != buffer.number:
        return False
    return bool(versions[-1].name.split(_AGAIN)[0] == name)


def _refuse_other_buffers(to: Path, buffer: DatasetBuffer) -> None:
    if buffer.number and not any(version.name == _EMPTY for version in buffer.versions()):
        remedy = f"a folder of its own; or bake(recipe, into=bw.DatasetBuffer(path={str(to)!r})), to add to it"
        raise SpecError(f"{to} is a buffer that was not baked, and is left as it is", parameter="to", remedy=remedy)


def _refuse_other_folders(to: Path) -> None:
    if to.exists() and not to.is_dir():
        raise SpecError(f"{to} is a file", parameter="to", remedy="a new folder, such as to='rows'")
    if is_store(to):
        remedy = "recipe.prepare_step(bw.tokenize('bytes')), or a folder of its own for the rows"
        raise SpecError(
            f"{to} is a store of tokens, and this recipe has no tokenize step", parameter="to", remedy=remedy
        )


def _put(into: DatasetBuffer | None, parts: Sequence[PreparedRows]) -> DatasetBuffer:
    """Append each ingredient's rows. A row that does not fit leaves `into` unchanged."""
    if into is None:
        into = DatasetBuffer()
    elif sum(len(part) > 0 for part in parts) > 1:
        _append_all(into.select([]), parts)  # a rehearsal: raises before any of it is in `into`
    _append_all(into, parts)
    return into


def _append_all(buffer: DatasetBuffer, parts: Sequence[PreparedRows]) -> None:
    for part in filter(len, parts):
        _append(buffer, part)


def _append(buffer: DatasetBuffer, part: PreparedRows) -> None:
    add = buffer.append if isinstance(part.rows, list) else buffer.extend
    try:
        add(part.rows, origin=part.name)
    except (SampleError, SampleTypeError) as error:
        number = error.where.pop("row", None)
        error.where["ingredient"] = part.name
        if isinstance(number, int) and 0 <= number < len(part):
            error.where |= part.place_of(number)
        raise


def _summary(where: str, parts: Sequence[PreparedRows]) -> str:
    """The result of a bake, in a few lines."""
    lines = [f"{where}: {counted(sum(map(len, parts)), 'row')}"]
    for part in parts:
        if part.report.dropped:
            kept = f"{len(part):,} of {part.report.rows_read:,} rows kept"
            lines.append(f"  {part.name}: {kept}; dropped: {dropped_in_words(part.report.dropped)}")
    examples = [example for part in parts for example in part.report.examples]
    return "\n".join([*lines, *examples_in_words(examples)])


# The rows of a recipe, with the types of their sources


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
    nulls = dict.fromkeys(names, pa.nulls(rows.num_rows))
    return pa.table(nulls | {name: rows[name] for name in rows.column_names})
