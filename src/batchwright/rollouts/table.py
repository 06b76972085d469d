"""Rollouts from memory or files as columns by name: lists of values, or Arrow columns.

Python rows are read once for each column. Tables, Parquet and Arrow files are never turned into rows. Errors name the
file of a row.
"""

from __future__ import annotations

import dataclasses
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from batchwright.base.errors import SampleTypeError, SpecError
from batchwright.prepare.documents import read_documents
from batchwright.sources.formats import Format, Malformed, format_for, known_extensions
from batchwright.sources.listing import InputFile, list_files, looks_like_paths
from batchwright.sources.memory import table_rows
from batchwright.sources.units import EndOfSpan, Unit, cut_files, error_of

_NEVER_CUT = 1 << 62
"""Bytes of a unit, so that rows count from the start of their file."""


class _Part(NamedTuple):
    """Rows of one file."""

    first: int
    """The number of its first row among all."""
    path: str
    numbers: Sequence[int]
    """The numbers of its rows in the file, from 0; blank lines count."""
    by_line: bool


class RolloutTable:
    """Rollouts by column. `names` has the columns that any row has."""

    names: list[str]
    num_rows: int

    def __init__(
        self, num_rows: int, names: Iterable[str], column: Callable[[str], Any], parts: Sequence[_Part] = ()
    ) -> None:
        if not num_rows:
            raise SpecError("there are no rollouts here", parameter="rollout_data", remedy="at least one row")
        self.num_rows, self.names = num_rows, list(names)
        self._column, self._parts = column, parts

    def __len__(self) -> int:
        return self.num_rows

    def column(self, name: str) -> Any:
        """A list with None for a row without it; an Arrow column; or None, if no row has it."""
        if name not in self.names:
            return None
        return self._column(name)

    def where(self, row: int) -> dict[str, Any]:
        """The place of a row, for an error."""
        if not self._parts:
            return {"row": row}
        part = self._parts[bisect_right(self._parts, row, key=lambda part: part.first) - 1]
        number = part.numbers[row - part.first]
        return {"file": part.path, "row": number, "line": number + 1 if part.by_line else None}


def table_of(data: Any) -> RolloutTable:
    """The columns of rollouts from rows, files, tables or buffers."""
    if isinstance(data, str | os.PathLike):
        return _of_files(data)
    if isinstance(data, list | tuple) and looks_like_paths(data, known_extensions()):
        return _of_files(data)
    if isinstance(data, Mapping):
        raise _no_rollouts(data)
    try:
        table = table_rows(data)
    except SpecError as error:
        error.where["parameter"] = "rollout_data"
        raise
    if table is not None:
        arrow = table.table()
        return RolloutTable(arrow.num_rows, arrow.column_names, arrow.column)
    if not isinstance(data, Iterable) and not hasattr(data, "__getitem__"):
        raise _no_rollouts(data)
    return _of_rows(list(data))


def _no_rollouts(data: Any) -> SampleTypeError:
    return SampleTypeError(
        f"rollouts are rows, and this is one {type(data).__name__}",
        parameter="rollout_data",
        remedy="a list of dicts or dataclasses, the path of a JSONL, Parquet or Arrow file, a table such as "
        "pyarrow.table(columns), a DatasetBuffer or a RolloutLog",
    )


# Rows


def _of_rows(rows: list[Any], parts: Sequence[_Part] = ()) -> RolloutTable:
    kinds = set(map(type, rows))
    if len(kinds) == 1 and _is_record(rows[0]):
        names = [field.name for field in dataclasses.fields(rows[0])]
        return RolloutTable(len(rows), names, lambda name: list(map(attrgetter(name), rows)), parts)
    if kinds != {dict}:
        rows = [_mapping(row, number) for number, row in enumerate(rows)]

    def column(name: str) -> list[Any]:
        try:
            return [row[name] for row in rows]
        except KeyError:
            return [row.get(name) for row in rows]

    first = list(rows[0]) if rows else []
    others = sorted(map(str, set().union(*rows).difference(first)))
    return RolloutTable(len(rows), [*first, *others], column, parts)


def _is_record(row: Any) -> bool:
    return dataclasses.is_dataclass(row) and not isinstance(row, type)


def _mapping(row: Any, number: int) -> Mapping[str, Any]:
    if isinstance(row, Mapping):
        return row
    if _is_record(row):
        return {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
    what = f"a {type(row).__name__} is not a rollout"
    remedy = "a dict or a dataclass with prompt, response and reward"
    raise SampleTypeError(what, row=number, parameter="rollout_data", remedy=remedy)


# Files


def _of_files(source: Any) -> RolloutTable:
    files = list_files(source)
    formats = {kind.name: kind for kind in (format_for(file.path) for file in files)}
    if formats.keys() <= {"arrow", "parquet"}:
        return _of_arrow_files(files) or _of_read_rows(files, formats)
    return _of_read_rows(files, formats)


def _of_read_rows(files: Sequence[InputFile], formats: Mapping[str, Format]) -> RolloutTable:
    rows: list[Any] = []
    numbers: list[list[int]] = [[] for _ in files]
    units = cut_files([(n, file.path, file.num_bytes) for n, file in enumerate(files)], None, _NEVER_CUT)
    remedy = "mend the row or write the file again: without a rollout its group is not complete"
    for unit, span, number, row in rows_of_units(units, formats, remedy):
        rows.append(row)
        numbers[unit.spans[span].file].append(number)
    return _of_rows(rows, _parts_of(files, numbers))


def rows_of_units(
    units: Iterable[Unit], formats: Mapping[str, Format], remedy: str
) -> Iterator[tuple[Unit, int, int, dict[str, Any]]]:
    """(unit, span, number in it, row). A malformed row is an error."""
    for unit in units:
        for span, number, fault, row in read_documents(unit, formats, None):
            if isinstance(fault, Malformed):
                error = error_of(fault, unit, span, number, formats)
                error.remedy = fault.remedy or remedy
                raise error
            if not isinstance(fault, EndOfSpan):
                yield unit, span, number, row


def _parts_of(files: Sequence[InputFile], numbers: Sequence[Sequence[int]]) -> list[_Part]:
    parts: list[_Part] = []
    first = 0
    for file, of_file in zip(files, numbers, strict=True):
        if of_file:
            parts.append(_Part(first, file.path, of_file, format_for(file.path).by_line))
            first += len(of_file)
    return parts


def _of_arrow_files(files: Sequence[InputFile]) -> RolloutTable | None:
    """The files as one table, mapped and not copied; None if one is damaged: reading its rows finds the damage."""
    import pyarrow as pa

    from batchwright.columns.arrow import read_table

    try:
        tables = [read_table(file.path, format_for(file.path).name) for file in files]
        table = pa.concat_tables(tables, promote_options="permissive")
        table.validate(full=True)  # mapped data is not checked before
    except (pa.ArrowException, OSError, ValueError):
        return None
    if not table.num_rows or len(set(table.column_names)) < len(table.column_names):
        return None
    parts = _parts_of(files, [range(part.num_rows) for part in tables])
    return RolloutTable(table.num_rows, table.column_names, table.column, parts)
