"""Record batches as rows of Python values, a few megabytes at a time. A row without Python values becomes a fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from batchwright.base.words import first_line
from batchwright.columns.arrow import tensors_to_numpy
from batchwright.sources.formats import Malformed, Row

__all__ = ["count_only", "faults_in_names", "has_map", "needed_names", "rows_of"]

_PIECE_ROWS = 1024
_PIECE_BYTES = 4 << 20
"""Arrow data that becomes Python objects at once: they take several times as much."""
_NO_VALUE = (ValueError, OverflowError, pa.ArrowException)
"""Raised by rows without a Python value; UnicodeDecodeError and ArrowInvalid are ValueErrors."""


def count_only(columns: Sequence[str] | None) -> bool:
    """Whether no column is needed: only the number of rows."""
    return columns is not None and not columns


def needed_names(names: Sequence[str], columns: Sequence[str] | None) -> set[str] | None:
    """The needed columns of a table. None (all columns) if one is missing, so that its error can name
    the existing ones.

    >>> sorted(needed_names(["id", "text", "meta"], ["meta", "meta.title", "text"]))
    ['meta', 'text']
    >>> needed_names(["id", "text"], ["txet"]) is None
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


def faults_in_names(names: Sequence[str], num_rows: int) -> Malformed | None:
    """Two columns of one name cannot be one row."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    if not twice:
        return None
    return Malformed("two columns have one name", ", ".join(map(repr, twice)), rest=True, rows=num_rows)


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
        values: list[Any] = column.to_pylist(maps_as_pydicts="lossy") if has_map(column.type) else column.to_pylist()
        return values
    is_there = column.is_valid().to_pylist()
    # Copies: each row is its reader's own, and may be changed.
    return [array.copy() if valid else None for array, valid in zip(tensors_to_numpy(column), is_there, strict=True)]


def has_map(kind: pa.DataType) -> bool:
    return bool(pa.types.is_map(kind)) or any(has_map(kind.field(n).type) for n in range(kind.num_fields))


def _fault_of(row: pa.RecordBatch, error: Exception) -> Malformed:
    """The column of a row that has no Python value, and why."""
    for name, column in zip(row.schema.names, row.columns, strict=True):
        try:
            column.validate(full=True)
            column.to_pylist()
        except _NO_VALUE as found:
            if isinstance(found, UnicodeDecodeError) or "UTF8" in str(found):
                return Malformed("not UTF-8", f"column {name!r}{_bad_byte(column)}")
            return Malformed("malformed row", f"column {name!r}: {first_line(found)}")
    return Malformed("malformed row", first_line(error))


def _bad_byte(column: pa.Array) -> str:
    try:
        data = column.cast(pa.large_binary())[0].as_py()
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        return f", byte 0x{data[error.start]:02x} at {error.start:,}"
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
