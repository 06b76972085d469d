"""Whatever holds rollouts, as columns by name: a list of values, or an Arrow column. Rows stay where they are.

Rows that are Python objects are looked at once for each column; tables, Parquet and Arrow files are never made into
rows at all. Every row knows the file that it came from.
"""

from __future__ import annotations

import dataclasses
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from batchwright.base.errors import SampleTypeError, SourceError, SpecError
from batchwright.prepare.documents import read_documents
from batchwright.sources.faults import error_of
from batchwright.sources.formats import Format, Malformed, format_for, known_extensions
from batchwright.sources.listing import InputFile, list_files, looks_like_paths
from batchwright.sources.memory import table_rows
from batchwright.sources.units import EndOfSpan, cut_files

__all__ = ["Table", "table_of"]

_WHOLE_FILES = 1 << 62
"""Bytes of a unit: a file is never cut here, so that rows count from its start."""


class _Part(NamedTuple):
    """Rows of one file."""

    first: int
    """The number of its first row among all."""
    path: str
    numbers: Sequence[int]
    """Of its rows in the file, from 0: lines without anything on them count."""
    by_line: bool


class Table:
    """Rollouts by column. `names` are those that any row has."""

    def __init__(
        self, num_rows: int, names: Iterable[str], column: Callable[[str], Any], parts: Sequence[_Part] = ()
    ) -> None:
        self.num_rows, self.names = num_rows, list(names)
        self._column, self._parts = column, parts

    def __len__(self) -> int:
        return self.num_rows

    def column(self, name: str) -> Any:
        """A list with None where a row does not have it; an Arrow column; or None, where no row has it."""
        return self._column(name) if name in self.names else None

    def where(self, row: int) -> dict[str, Any]:
        """What an error says of where a row is."""
        if not self._parts:
            return {"row": row}
        part = self._parts[bisect_right([part.first for part in self._parts], row) - 1]
        number = part.numbers[row - part.first]
        return {"file": part.path, "row": number, "line": number + 1 if part.by_line else None}


def table_of(data: Any) -> Table:
    """The columns of whatever was given as rollouts."""
    if isinstance(data, str | os.PathLike) or (
        isinstance(data, list | tuple) and looks_like_paths(data, known_extensions())
    ):
        return _of_files(data)
    if isinstance(data, Mapping):
        raise SampleTypeError(
            f"rollouts are rows, and this is one {type(data).__name__}",
            parameter="rollout_data",
            remedy="[rollout] for a single one, pyarrow.table(columns) for columns",
        )
    try:
        table = table_rows(data)
    except SpecError as error:
        raise _about_rollouts(error) from None
    if table is not None:
        return _of_arrow(table.table())
    if not isinstance(data, Iterable) and not hasattr(data, "__getitem__"):
        raise SampleTypeError(
            f"a {type(data).__name__} holds no rollouts",
            parameter="rollout_data",
            remedy="a list of dicts or dataclasses, the path of a JSONL, Parquet or Arrow file, a table, a "
            "DatasetBuffer or a RolloutLog",
        )
    return _of_rows(data if type(data) is list else list(data))


def _about_rollouts(error: SpecError) -> SpecError:
    if error.where.get("parameter") == "source":
        error.where["parameter"] = "rollout_data"
    return error


# Rows


def _of_rows(rows: list[Any], parts: Sequence[_Part] = ()) -> Table:
    if not rows:
        raise SpecError("there are no rollouts here", parameter="rollout_data", remedy="at least one row")
    kinds = set(map(type, rows))
    if len(kinds) == 1 and _is_record(rows[0]):
        names = [field.name for field in dataclasses.fields(rows[0])]
        return Table(len(rows), names, lambda name: list(map(attrgetter(name), rows)), parts)
    if kinds != {dict}:
        rows = [_mapping(row, number) for number, row in enumerate(rows)]

    def column(name: str) -> list[Any]:
        try:
            return [row[name] for row in rows]
        except KeyError:
            return [row.get(name) for row in rows]

    first = list(rows[0])
    return Table(len(rows), [*first, *sorted(map(str, set().union(*rows).difference(first)))], column, parts)


def _is_record(row: Any) -> bool:
    return dataclasses.is_dataclass(row) and not isinstance(row, type)


def _mapping(row: Any, number: int) -> Mapping[str, Any]:
    if isinstance(row, Mapping):
        return row
    if _is_record(row):
        return {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
    raise SampleTypeError(
        f"a {type(row).__name__} is not a rollout",
        row=number,
        parameter="rollout_data",
        remedy="a dict or a dataclass with prompt, response and reward",
    )


# Arrow


def _of_arrow(table: Any, parts: Sequence[_Part] = ()) -> Table:
    if not table.num_rows:
        raise SpecError("there are no rollouts here", parameter="rollout_data", remedy="at least one row")
    return Table(table.num_rows, table.column_names, table.column, parts)


# Files


def _of_files(source: Any) -> Table:
    files = list_files(source)
    formats = {kind.name: kind for kind in (format_for(file.path) for file in files)}
    if formats.keys() <= {"arrow", "parquet"}:
        found = _of_arrow_files(files)
        if found is not None:
            return found
    rows: list[Any] = []
    numbers: dict[str, list[int]] = {file.path: [] for file in files}
    for unit in cut_files([(n, file.path, file.num_bytes) for n, file in enumerate(files)], None, _WHOLE_FILES):
        for span, number, fault, row in read_documents(unit, formats, None):
            if isinstance(fault, Malformed):
                raise _without_skipping(error_of(fault, unit, span, number, formats))
            if not isinstance(fault, EndOfSpan):
                rows.append(row)
                numbers[unit.spans[span].path].append(number)
    return _of_rows(rows, _parts_of(files, numbers, formats))


def _parts_of(files: Sequence[InputFile], numbers: Mapping[str, Sequence[int]], formats: Any) -> list[_Part]:
    parts: list[_Part] = []
    first = 0
    for file in files:
        kind: Format = format_for(file.path)
        if len(numbers[file.path]):
            parts.append(_Part(first, file.path, numbers[file.path], kind.by_line))
            first += len(numbers[file.path])
    return parts


def _of_arrow_files(files: Sequence[InputFile]) -> Table | None:
    """The files as one table, mapped and not copied; None where one is damaged: reading its rows says how."""
    import pyarrow as pa

    try:
        tables = [_arrow_table(file.path) for file in files]
        table = pa.concat_tables(tables, promote_options="permissive") if len(tables) > 1 else tables[0]
        table.validate(full=True)  # what is mapped from a file was never looked at
    except (pa.ArrowException, OSError, ValueError):
        return None
    if not table.num_rows or len(set(table.column_names)) < len(table.column_names):
        return None
    numbers = {file.path: range(part.num_rows) for file, part in zip(files, tables, strict=True)}
    return _of_arrow(table, _parts_of(files, numbers, None))


def _arrow_table(path: str) -> Any:
    import pyarrow as pa

    if format_for(path).name == "parquet":
        import pyarrow.parquet as pq

        return pq.ParquetFile(path, page_checksum_verification=True).read()
    with pa.memory_map(path) as file:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        return (pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)).read_all()


def _without_skipping(error: SourceError) -> SourceError:
    """Rollouts cannot be skipped: a group would miss one."""
    error.remedy = "mend the row or write the file again: a rollout that is left out is missing from its group"
    return error
