"""Arrow IPC and Parquet files as rows, and Arrow's record batches as rows of Python values.

A part of a file belongs to the byte range where its share of the file begins. In an IPC file of F bytes, batch i of n
belongs to the range with byte i*F//n (the files of HF datasets are IPC too). A batch of the stream format belongs to
the range of its first byte. In a Parquet file, a row group with b of B bytes of data before it belongs to the range
with byte b*F//B.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from batchwright.base.words import first_line
from batchwright.columns.arrow import open_ipc, open_parquet, read_schema, tensors_to_numpy
from batchwright.sources.formats import Malformed, Row, bad_byte

__all__ = ["FORMATS_WITH_TYPES", "columns_of_rows", "schema_of_files"]

_DAMAGE = (pa.ArrowException, OSError)


# Arrow IPC


def read_arrow(
    path: Path, *, columns: Sequence[str] | None = None, start: int = 0, stop: int | None = None
) -> Iterator[Row | Malformed]:
    num_rows = 0
    with pa.memory_map(str(path)) as file:
        for batch in _batches(file, start, stop):
            if isinstance(batch, Malformed):
                yield batch
                return
            num_rows += batch.num_rows
            yield from _rows_of_batch(batch, columns)
    if start == 0 and stop is None and not num_rows:
        yield Malformed("empty file", "a table without rows", rows=0)


def _batches(file: Any, start: int, stop: int | None) -> Iterator[pa.RecordBatch | Malformed]:
    is_file = file.read(6) == b"ARROW1"
    file.seek(0)
    try:
        reader = open_ipc(file)
    except _DAMAGE as error:
        kind = "truncated or damaged Arrow file" if is_file else "not an Arrow IPC file"
        yield Malformed(kind, first_line(error), rest=True)
        return
    if is_file:
        yield from _batches_of_file(reader, file.size(), start, stop)
    else:
        yield from _batches_of_stream(reader, file, start, stop)


def _batches_of_file(reader: Any, size: int, start: int, stop: int | None) -> Iterator[pa.RecordBatch | Malformed]:
    for number in range(reader.num_record_batches):
        at = number * size // reader.num_record_batches
        if start <= at and (stop is None or at < stop):
            try:
                batch = reader.get_batch(number)
            except _DAMAGE as error:
                yield Malformed("damaged record batch", f"record batch {number:,}: {first_line(error)}", rest=True)
                return
            yield batch


def _batches_of_stream(reader: Any, file: Any, start: int, stop: int | None) -> Iterator[pa.RecordBatch | Malformed]:
    number = 0
    while stop is None or file.tell() < stop:
        at = file.tell()
        try:
            batch = reader.read_next_batch()
        except StopIteration:
            return
        except _DAMAGE as error:
            if at >= start:  # one range tells it: those after it fail at the same batch, and have no rows
                reason = f"record batch {number:,}, at byte {at:,} of {file.size():,}: {first_line(error)}"
                yield Malformed("truncated or damaged Arrow stream", reason, rest=True)
            return
        number += 1
        if at >= start:
            yield batch


def _rows_of_batch(batch: pa.RecordBatch, columns: Sequence[str] | None) -> Iterator[Row | Malformed]:
    if count_only(columns):
        yield from ({} for _ in range(batch.num_rows))
        return
    try:
        batch = only_needed(batch, columns)
        fault = _fault_in_names(batch)
    except UnicodeDecodeError:
        fault = Malformed("truncated or damaged Arrow file", "the name of a column is not UTF-8", rest=True)
    if fault is not None:
        yield fault
    else:
        yield from rows_of(batch, check=True)


# Parquet

_BATCH_ROWS = 4096
_BATCH_BYTES = 8 << 20
"""Bytes decoded at once, by the size of rows in the file."""


def read_parquet(
    path: Path, *, columns: Sequence[str] | None = None, start: int = 0, stop: int | None = None
) -> Iterator[Row | Malformed]:
    fault = _fault_of_ends(path)
    if fault is not None:
        yield fault
        return
    try:
        opened = open_parquet(path)
    except _DAMAGE as error:
        yield Malformed("damaged Parquet file", first_line(error), rest=True)
        return
    with opened as file:
        if not file.metadata.num_rows:
            if not start:
                yield Malformed("empty file", "a table without rows", rows=0)
            return
        leaves = _needed_leaves(file, columns)
        for group in _row_groups(file.metadata, path.stat().st_size, start, stop):
            yield from _read_row_group(file, group, leaves, columns)


def _fault_of_ends(path: Path) -> Malformed | None:
    """The fault that the first and last bytes show. Parquet begins and ends with its own four letters."""
    with open(path, "rb") as file:
        begins = file.read(4)
        file.seek(max(0, os.fstat(file.fileno()).st_size - 4))
        ends = file.read(4)
    match begins, ends:
        case b"PAR1", b"PAR1":
            return None
        case b"PARE", b"PARE":
            return Malformed("encrypted Parquet file", "its footer is encrypted, and there is no key", rest=True)
        case b"PAR1", _:
            return Malformed("truncated Parquet file", "it has no footer", rest=True)
    return Malformed("not a Parquet file", f"it begins with {begins!r}", rest=True)


def _row_groups(metadata: Any, file_bytes: int, start: int, stop: int | None) -> Iterator[int]:
    """The row groups of a byte range.

    By the sizes of row groups in the footer: pyarrow ends the process if it is asked where a column is, and that is
    damaged.
    """
    sizes = [max(0, metadata.row_group(number).total_byte_size) for number in range(metadata.num_row_groups)]
    before, total = 0, max(1, sum(sizes))
    for number, size in enumerate(sizes):
        at = before * file_bytes // total
        if at >= start and (stop is None or at < stop):
            yield number
        before += size


def _read_row_group(
    file: Any, group: int, leaves: list[str] | None, columns: Sequence[str] | None
) -> Iterator[Row | Malformed]:
    about = file.metadata.row_group(group)
    if count_only(columns):
        yield from ({} for _ in range(about.num_rows))
        return
    row_bytes = max(1, about.total_byte_size // max(about.num_rows, 1))
    at_once = max(1, min(_BATCH_ROWS, _BATCH_BYTES // row_bytes))
    missing = about.num_rows
    try:
        for batch in file.iter_batches(at_once, row_groups=[group], columns=leaves, use_threads=False):
            fault = _fault_in_names(batch)
            if fault is not None:
                yield replace(fault, rows=about.num_rows)
                return
            yield from rows_of(batch)
            missing -= batch.num_rows
    except _DAMAGE as error:
        reason = first_line(error)
        yield Malformed(_kind_of_fault(error, reason), f"row group {group:,}: {reason}", rows=missing)
    else:
        if missing > 0:
            yield Malformed("corrupt row group", f"row group {group:,} ends early", rows=missing)


def _kind_of_fault(error: Exception, reason: str) -> str:
    if "crypt" in reason:
        return "encrypted row group"
    if isinstance(error, pa.ArrowNotImplementedError) or "not supported" in reason or "codec" in reason.lower():
        return "unsupported row group"
    return "corrupt row group"


def _needed_leaves(file: Any, columns: Sequence[str] | None) -> list[str] | None:
    """The leaves of nested columns that must be read, as the file calls them; None means all."""
    names = _needed_names(file.schema_arrow.names, columns)
    if names is None or columns is None:
        return None
    longest = [column for column in columns if not any(other.startswith(f"{column}.") for other in columns)]
    leaves = [file.schema.column(number).path for number in range(len(file.schema))]
    needed: list[str] = []
    for field in file.schema_arrow:
        if field.name in names:
            mine = [leaf for leaf in leaves if f"{leaf}.".startswith(f"{field.name}.")]
            paths = [path for path in longest if f"{path}.".startswith(f"{field.name}.")]
            # Keys and values of maps can only be read together.
            needed += _leaves_on_paths(mine, paths, is_whole=_has_map(field.type))
    return needed


def _leaves_on_paths(leaves: list[str], paths: list[str], *, is_whole: bool) -> list[str]:
    """The leaves that some paths lead to. All of them if a path leads nowhere: the error that follows names them.

    A path names neither the levels of lists that a file has nor, in a leaf, the numbers of items.

    >>> _leaves_on_paths(["turns.list.element.who", "turns.list.element.text"], ["turns.0.who"], is_whole=False)
    ['turns.list.element.who']
    """
    found: set[str] = set()
    for path in paths:
        keys = [key for key in path.split(".") if not key.isdecimal()]
        on_path = {leaf for leaf in leaves if _is_subsequence(keys, leaf.split("."))}
        if is_whole or not on_path:
            return leaves
        found |= on_path
    return [leaf for leaf in leaves if leaf in found]


def _is_subsequence(keys: list[str], parts: list[str]) -> bool:
    rest = iter(parts)
    return all(key in rest for key in keys)


# Record batches as rows, a few megabytes at a time. A row without Python values becomes a fault.

_PIECE_ROWS = 1024
_PIECE_BYTES = 4 << 20
"""Arrow data that becomes Python objects at once: they take several times as much."""
_NO_VALUE = (ValueError, OverflowError, pa.ArrowException)
"""Raised by rows without a Python value; UnicodeDecodeError and ArrowInvalid are ValueErrors."""


def count_only(columns: Sequence[str] | None) -> bool:
    """Whether no column is needed: only the number of rows."""
    return columns is not None and not columns


def _needed_names(names: Sequence[str], columns: Sequence[str] | None) -> set[str] | None:
    """The needed columns of a table. None (all columns) if one is missing, so that its error can name
    the existing ones.

    >>> sorted(_needed_names(["id", "text", "meta"], ["meta", "meta.title", "text"]))
    ['meta', 'text']
    >>> _needed_names(["id", "text"], ["txet"]) is None
    True
    """
    if columns is None:
        return None
    for column in columns:
        keys = column.split(".")
        is_there = any(".".join(keys[:n]) in names for n in range(1, len(keys) + 1))
        if not is_there and not any(longer.startswith(f"{column}.") for longer in columns):
            return None
    return set(names) & set(columns)


def only_needed(table: Any, columns: Sequence[str] | None) -> Any:
    """A table or batch with the needed columns alone."""
    names = _needed_names(table.schema.names, columns)
    if names is None:
        return table
    return table.select([number for number, name in enumerate(table.schema.names) if name in names])


def _fault_in_names(batch: pa.RecordBatch) -> Malformed | None:
    """Two columns of one name cannot be one row."""
    twice = [name for name, count in Counter(batch.schema.names).items() if count > 1]
    if not twice:
        return None
    return Malformed("two columns have one name", ", ".join(map(repr, twice)), rest=True, rows=batch.num_rows)


def rows_of(batch: pa.RecordBatch, *, check: bool = False) -> Iterator[Row | Malformed]:
    """The rows of a record batch as dicts. `check` first validates every offset and character of mapped data."""
    batch = _without_nanoseconds(batch)
    # `nbytes` follows the offsets inside a batch, which may lead anywhere before they were looked at.
    num_bytes = batch.get_total_buffer_size() if check else batch.nbytes
    at_once = max(1, min(_PIECE_ROWS, _PIECE_BYTES * batch.num_rows // max(num_bytes, 1)))
    for first in range(0, batch.num_rows, at_once):
        yield from _values(batch.slice(first, at_once), check)


def _values(piece: pa.RecordBatch, check: bool) -> list[Row | Malformed]:
    try:
        if check:
            piece.validate(full=True)
        columns = [_python_values(column) for column in piece.columns]
    except _NO_VALUE as error:
        if piece.num_rows == 1:
            return [_fault_of(piece, error)]
        return [row for number in range(piece.num_rows) for row in _values(piece.slice(number, 1), check)]
    if not columns:
        return [{} for _ in range(piece.num_rows)]
    names = piece.schema.names
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def _python_values(column: pa.Array) -> list[Any]:
    """Values of a column. Tensors are arrays of their shape, where Arrow would give a flat list; a map is a dict."""
    if not isinstance(column.type, pa.FixedShapeTensorType):
        # Arrow is four times as fast if it is not asked for dicts.
        values: list[Any] = column.to_pylist(maps_as_pydicts="lossy") if _has_map(column.type) else column.to_pylist()
        return values
    is_there = column.is_valid().to_pylist()
    # Copies: each row is its reader's own, and may be changed.
    return [array.copy() if valid else None for array, valid in zip(tensors_to_numpy(column), is_there, strict=True)]


def _has_map(kind: pa.DataType) -> bool:
    return bool(pa.types.is_map(kind)) or any(_has_map(kind.field(n).type) for n in range(kind.num_fields))


def _fault_of(row: pa.RecordBatch, error: Exception) -> Malformed:
    """The column of a row that has no Python value, and why."""
    for name, column in zip(row.schema.names, row.columns, strict=True):
        try:
            column.validate(full=True)
            column.to_pylist()
        except _NO_VALUE as found:
            if isinstance(found, UnicodeDecodeError) or "UTF8" in str(found):
                return Malformed("not UTF-8", f"column {name!r}{_place_of_bad_byte(column)}")
            return Malformed("malformed row", f"column {name!r}: {first_line(found)}")
    return Malformed("malformed row", first_line(error))


def _place_of_bad_byte(column: pa.Array) -> str:
    try:
        data = column.cast(pa.large_binary())[0].as_py()
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        return f", {bad_byte(error)}"
    except (pa.ArrowException, AttributeError):  # text inside a list or a struct
        pass
    return ""


def _without_nanoseconds(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Convert nanoseconds to microseconds. Otherwise the type of a time would depend on an installed pandas."""
    for number, field in enumerate(batch.schema):
        kind = field.type
        if pa.types.is_timestamp(kind) and kind.unit == "ns":
            kind = pa.timestamp("us", kind.tz)
        elif pa.types.is_duration(kind) and kind.unit == "ns":
            kind = pa.duration("us")
        if kind != field.type:
            batch = batch.set_column(number, pa.field(field.name, kind), batch.column(number).cast(kind, safe=False))
    return batch


# Rows of such files as typed columns again. A Python number does not keep its type, such as int8.

FORMATS_WITH_TYPES = frozenset({"arrow", "parquet"})


def schema_of_files(paths: Iterable[str], kind: str) -> Any:
    """The Arrow schema that all of these files have; None if they differ, or one cannot be read."""
    try:
        first, *others = (read_schema(path, kind).remove_metadata() for path in paths)
    except (pa.ArrowException, OSError, ValueError):
        return None
    if all(schema.equals(first) for schema in others):
        return first
    return None


def columns_of_rows(rows: Sequence[Row], schema: Any) -> Any:
    """Rows that were read from files of this schema, as a table; None if they do not fit it."""
    try:
        arrays = [_column([row[field.name] for row in rows], field.type) for field in schema]
    except (pa.ArrowException, KeyError, TypeError, ValueError, OverflowError):
        return None
    fields = [field.with_type(array.type) for field, array in zip(schema, arrays, strict=True)]
    return pa.table(arrays, schema=pa.schema(fields))


def _column(values: list[Any], kind: Any) -> Any:
    if not isinstance(kind, pa.FixedShapeTensorType):
        return pa.array(values, kind)
    # Rows have the axes in the order that is meant, which a file may only say beside another one.
    axes = kind.permutation or range(len(kind.shape))
    tensor = pa.fixed_shape_tensor(kind.value_type, [kind.shape[axis] for axis in axes])
    flat = [None if value is None else np.ravel(value) for value in values]
    return pa.ExtensionArray.from_storage(tensor, pa.array(flat, tensor.storage_type))
