"""Bake a recipe into a buffer: everything is read first, then each ingredient is one append.

Tables that no function of the user's looks at go through as columns. A recipe that ends in tokens is baked into a store
that is thrown away afterwards, so that the buffer has the same documents in the same order.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from batchwright.baking.inputs import Inputs
from batchwright.baking.recipe import DatasetRecipe
from batchwright.baking.rows import UnitReport, kept_rows, read_rows
from batchwright.baking.work import Cut, choose_quantities, first_rows, for_units, plan_rows
from batchwright.base.errors import BatchwrightError, SampleError, SampleTypeError, SourceError, SpecError
from batchwright.base.fingerprint import fingerprint
from batchwright.base.progress import progress
from batchwright.sources.column_types import FORMATS_WITH_TYPES, columns_of_rows, schema_of_files
from batchwright.sources.faults import place
from batchwright.sources.memory import TableRows
from batchwright.store.layout import is_adopted, is_store

if TYPE_CHECKING:
    from batchwright.buffer.buffer import DatasetBuffer
    from batchwright.store.reader import Store

__all__ = ["Baked", "bake_folder", "check_buffer", "put", "read_recipe", "tokens_of"]

log: logging.Logger = logging.getLogger("batchwright")


@dataclass(frozen=True, slots=True)
class Baked:
    """The rows of one ingredient, on their way into a buffer."""

    name: str
    rows: Any
    """A list of dicts, or a pyarrow Table."""
    place_of: Callable[[int], dict[str, Any]]
    """Where a row came from, by its number."""
    report: UnitReport

    def __len__(self) -> int:
        return len(self.rows)


def read_recipe(recipe: DatasetRecipe, *, workers: int, on_error: str, show: bool) -> list[Baked]:
    """The rows of every ingredient after its steps, in the order of files and rows, for any number of workers."""
    cuts = plan_rows(recipe, on_error)
    files = [cut for cut in cuts if not cut.ingredient.is_memory]
    choose_quantities([cut for cut in cuts if cut.ingredient.is_memory], 0, "a buffer", show=False)
    choose_quantities(files, workers, "a buffer", show)
    tasks = [
        (which, unit, chosen)
        for which, cut in enumerate(files)
        for unit, chosen in zip(cut.units, cut.selected, strict=True)
    ]
    answers: list[Any] = [None] * len(tasks)
    with progress("baking into a buffer", sum(task[1].num_bytes for task in tasks), show=show and bool(tasks)) as done:
        for number, answer in for_units(read_rows, files, tasks, workers):
            answers[number] = answer
            done.advance(tasks[number][1].num_bytes)
    left = iter(answers)
    found = []
    for cut in cuts:
        if cut.ingredient.is_memory:
            found.append(_from_memory(cut))
        else:
            found.append(_with_types(cut, _together(cut, [next(left) for _ in cut.units])))
    _refuse_nothing(found)
    return _with_all_columns(found)


def _from_memory(cut: Cut) -> Baked:
    """Rows that are in this process already: workers would only send them back."""
    job, source = cut.job, cut.ingredient.source
    as_it_is = not job.steps and job.text is None
    if as_it_is and isinstance(source, TableRows):
        return _columns(cut, source)
    keeps_all = job.where is None and cut.ingredient.quantity is None
    if as_it_is and keeps_all and all(isinstance(row, dict | str) for row in source):
        # No function of the user's changes them, so that they need not be copied.
        rows = [{"text": row} if isinstance(row, str) else row for row in source]
        return Baked(cut.ingredient.name, rows, _row_of_memory, UnitReport(rows_read=len(rows)))
    answers = [read_rows(job, unit, chosen) for unit, chosen in zip(cut.units, cut.selected, strict=True)]
    return _together(cut, answers)


def _row_of_memory(number: int) -> dict[str, Any]:
    return {"file": "<memory>", "row": number}


def _columns(cut: Cut, source: TableRows) -> Baked:
    """A table as it is, or those of its rows that `where` and a quantity keep."""
    report, dropped = UnitReport(rows_read=len(source)), Counter[str]()
    (unit,), (chosen,) = cut.units, cut.selected
    if cut.job.where is None and chosen is None:
        return Baked(cut.ingredient.name, source.table(), _row_of_memory, report)
    if cut.job.where is None:
        numbers = chosen
        dropped["beyond quantity"] = len(source) - len(chosen)
    else:
        report.rows_read = 0
        kept = [row_number for _, row_number, _ in kept_rows(cut.job, unit, report, dropped, chosen)]
        numbers = np.array(kept, np.int64)
    report.dropped = {reason: count for reason, count in sorted(dropped.items()) if count}
    return Baked(cut.ingredient.name, source.table(numbers), lambda row: _row_of_memory(int(numbers[row])), report)


def _together(cut: Cut, answers: Sequence[tuple[UnitReport, list[dict[str, Any]], Any]]) -> Baked:
    """The rows of all units of an ingredient."""
    rows = [row for _, unit_rows, _ in answers for row in unit_rows]
    first = np.cumsum([0, *(len(unit_rows) for _, unit_rows, _ in answers)])
    starts = first_rows(cut, [report.span_rows for report, _, _ in answers])
    report, dropped = UnitReport(), Counter[str]()
    for (of_unit, _, _), unit_starts in zip(answers, starts, strict=True):
        dropped.update(of_unit.dropped)
        report.rows_read += of_unit.rows_read
        report.errors += of_unit.errors
        report.examples += [(file, unit_starts[0] + row, why) for file, row, why in of_unit.examples]
    report.dropped = dict(sorted(dropped.items()))

    def place_of(number: int) -> dict[str, Any]:
        which = int(np.searchsorted(first, number, side="right")) - 1
        span, row = answers[which][2][number - first[which]].tolist()
        return place(cut.units[which], span, row, cut.job.formats)

    return Baked(cut.ingredient.name, rows, place_of, report)


def _with_types(cut: Cut, part: Baked) -> Baked:
    """Rows with the types that their files gave them, where the files have types and no step changed the rows."""
    kinds = {span.format for unit in cut.units for span in unit.spans}
    if cut.job.steps or cut.job.text is not None or len(kinds) != 1 or not kinds <= FORMATS_WITH_TYPES:
        return part
    schema = schema_of_files((file.path for file in cut.files), *kinds)
    table = None if schema is None or not len(part) else columns_of_rows(part.rows, schema)
    return part if table is None else replace(part, rows=table)


def _with_all_columns(parts: Sequence[Baked]) -> list[Baked]:
    """The parts with the same columns each: those that another one has are null."""
    named = [_column_names(part.rows) for part in parts]
    every = list(dict.fromkeys(name for names in named for name in names))
    return [
        part if len(names) == len(every) else replace(part, rows=_padded(part.rows, every))
        for part, names in zip(parts, named, strict=True)
    ]


def _column_names(rows: Any) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row)) if isinstance(rows, list) else rows.column_names


def _padded(rows: Any, names: Sequence[str]) -> Any:
    import pyarrow as pa

    if isinstance(rows, list):
        return [{**dict.fromkeys(names), **row} for row in rows]
    return pa.table(
        {name: rows[name] if name in rows.column_names else pa.nulls(rows.num_rows) for name in names},
    )


def _refuse_nothing(parts: Sequence[Baked]) -> None:
    if not any(map(len, parts)):
        raise SourceError(
            "no rows: every one was dropped",
            dropped="\n".join(
                f"{part.name}: "
                + (", ".join(f"{count:,} {why}" for why, count in part.report.dropped.items()) or "nothing was read")
                for part in parts
            ),
            remedy="look at where=, quantity= and the steps",
        )


def check_buffer(into: Any) -> None:
    from batchwright.buffer.buffer import DatasetBuffer

    if into is not None and not isinstance(into, DatasetBuffer):
        raise SpecError(
            f"into= is a buffer, not a {type(into).__name__}",
            parameter="into",
            remedy="into=bw.DatasetBuffer(path='rows'), or to='corpus.store' for a store",
        )


def put(into: DatasetBuffer | None, parts: Sequence[Baked]) -> tuple[DatasetBuffer, str]:
    """(the buffer with each ingredient's rows appended, what was done). If one does not fit, `into` is as it was."""
    from batchwright.buffer.buffer import DatasetBuffer

    if into is not None and sum(map(bool, map(len, parts))) > 1:
        _append_all(into.select([]), parts)  # whether all of it fits, before any of it is there
    buffer = DatasetBuffer() if into is None else into
    _append_all(buffer, parts)
    return buffer, _summary("a buffer", parts)


def bake_folder(
    recipe: DatasetRecipe, to: Path, *, workers: int, on_error: str, show: bool
) -> tuple[DatasetBuffer, str]:
    """(the buffer in a folder that holds a recipe's rows, opened to read; what was done).

    What a folder holds is a version named after the recipe and its files. A version that is there already is gone back
    to; for another one everything is read, the rows are replaced, and those that were there stay a version.
    """
    from batchwright.buffer.buffer import DatasetBuffer

    _refuse_other_folders(to)
    inputs = Inputs.of(recipe, shuffle=False)
    name = f"{recipe.fingerprint} {fingerprint([inputs.key, on_error])[:8]}"
    if to.exists() and any(to.iterdir()):
        with DatasetBuffer(path=to, read_only=True) as there:
            _refuse_other_buffers(to, there)
            if _is_at(there, name):
                return DatasetBuffer(path=to, read_only=True), f"{to}: up to date ({len(there):,} rows)"
    with DatasetBuffer(path=to) as buffer:
        if not buffer.versions():
            buffer.commit(_EMPTY)
        _refuse_other_buffers(to, buffer)
        if buffer.versions()[-1].number != buffer.number:
            buffer.commit()  # rows that no version holds: they would be lost
        if any(version.name == name for version in buffer.versions()):
            if not _is_at(buffer, name):
                buffer.rollback(name)
                buffer.commit(f"{name}{_AGAIN}{buffer.number}")
            said = f"{to}: {len(buffer):,} rows, as they were baked before"
        else:
            parts = read_recipe(recipe, workers=workers, on_error=on_error, show=show)
            before = buffer.versions()[-1]
            try:
                buffer.rollback(_EMPTY)
                _append_all(buffer, parts)
                buffer.commit(name)
            except BaseException:
                with contextlib.suppress(BatchwrightError, OSError):  # a full disk, say: then the next bake mends it
                    buffer.rollback(before)
                    buffer.commit(f"{before.name.split(_AGAIN)[0]}{_AGAIN}{buffer.number}")
                raise
            said = _summary(str(to), parts)
    return DatasetBuffer(path=to, read_only=True), said


_EMPTY = "before the first bake"
"""The version of no rows and no columns that each bake into a folder begins with."""
_AGAIN = " again "
"""In the name of a version that was gone back to: no two have one name."""


def _is_at(buffer: DatasetBuffer, name: str) -> bool:
    """Whether a buffer's rows are those of a version of this name, and nothing was done to them since."""
    versions = buffer.versions()
    newest = versions[-1] if versions else None
    return newest is not None and newest.number == buffer.number and newest.name.split(_AGAIN)[0] == name


def _refuse_other_buffers(to: Path, buffer: DatasetBuffer) -> None:
    if not any(version.name == _EMPTY for version in buffer.versions()) and buffer.number:
        raise SpecError(
            f"{to} is a buffer that was not baked, and is left as it is",
            parameter="to",
            remedy=f"a folder of its own; or bake(recipe, into=bw.DatasetBuffer(path={str(to)!r})), to add to it",
        )


def _refuse_other_folders(to: Path) -> None:
    if to.exists() and not to.is_dir():
        raise SpecError(f"{to} is a file", parameter="to", remedy="a new folder, such as to='rows'")
    if is_store(to) or is_adopted(to):
        raise SpecError(
            f"{to} is a store of tokens, and this recipe has no tokenize step",
            parameter="to",
            remedy="recipe.prepare_step(bw.tokenize('bytes')), or a folder of its own for the rows",
        )


def _append_all(buffer: DatasetBuffer, parts: Sequence[Baked]) -> None:
    for part in parts:
        if len(part):
            _append(buffer, part)


def _append(buffer: DatasetBuffer, part: Baked) -> None:
    try:
        if isinstance(part.rows, list):
            buffer.append(part.rows, origin=part.name)
        else:
            buffer.extend(part.rows, origin=part.name)
    except (SampleError, SampleTypeError) as error:
        number = error.where.pop("row", None)
        error.where["ingredient"] = part.name
        if isinstance(number, int) and 0 <= number < len(part):
            error.where |= part.place_of(number)
        raise


def _summary(where: str, parts: Sequence[Baked]) -> str:
    """What a bake did, in a few lines."""
    num_rows = sum(map(len, parts))
    lines = [f"{where}: {num_rows:,} row{'s' * (num_rows != 1)}"]
    for part in parts:
        if part.report.dropped:
            dropped = ", ".join(f"{count:,} {reason}" for reason, count in part.report.dropped.items())
            lines.append(f"  {part.name}: {len(part):,} of {part.report.rows_read:,} rows kept; dropped: {dropped}")
    examples = [example for part in parts for example in part.report.examples]
    return "\n".join([*lines, *(f"  for example {file}, row {row}: {reason}" for file, row, reason in examples[:3])])


def tokens_of(store: Store) -> list[Baked]:
    """The documents of a store as columns, a source at a time, in the store's order."""
    import pyarrow as pa

    found = []
    paths = store.files["path"]
    for name in store.names:
        pieces = []
        for split in [info.split for info in store.manifest.streams if info.source == name]:
            stream = store.stream(name, split)
            for number in range(len(stream.shard_documents)):
                shard = stream.shard(number)
                count = len(shard.row)
                columns = {
                    # A copy: the store may be thrown away.
                    "tokens": pa.ListArray.from_arrays(pa.array(shard.offsets), pa.array(shard.tokens.copy())),
                    "source": pa.repeat(name, count),
                    "file": pa.array([paths[file].as_py() for file in shard.file.tolist()], pa.string()),
                    "row": pa.array(shard.row.copy()),
                    "split": pa.repeat(split, count),
                }
                pieces.append(pa.table(columns))
        if pieces:
            found.append(Baked(name, pa.concat_tables(pieces), _row_of_memory, UnitReport()))
    return found
