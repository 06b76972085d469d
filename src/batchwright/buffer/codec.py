"""Columns, schemas and changes of a buffer as bytes, and back.

Numbers travel as their raw bytes, a few texts as such, all other columns as Arrow's own messages.
What comes back are read-only views of the bytes; nothing in them is believed before it was checked.
"""

from __future__ import annotations

import math
import struct
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchwright.base.errors import SampleError, StoreError
from batchwright.buffer.schema import Columns, Field, Numbers, Schema, Values

__all__ = [
    "Append",
    "Change",
    "Drop",
    "Operation",
    "Rollback",
    "Settings",
    "decode",
    "decode_columns",
    "decode_ids",
    "decode_schema",
    "encode",
    "encode_columns",
    "encode_ids",
    "encode_schema",
]

_MAX_BYTES = (1 << 32) - 1
"""Of one column in one call: what MessagePack can count."""
_FEW_ROWS = 16
"""Up to here texts are written as a list, not as an Arrow message."""

_encoder = msgspec.msgpack.Encoder()


# Changes


class Append(msgspec.Struct, array_like=True, tag=1, frozen=True):
    """Rows that were added, and what was kept of those before them."""

    number: int
    time_us: int
    columns: bytes
    num_rows: int
    retain: float
    by: str
    origin: str | None
    kind: str
    schema: bytes | None
    """None: as it was."""


class Change(msgspec.Struct, array_like=True, tag=2, frozen=True):
    """New values of some columns for some rows."""

    number: int
    time_us: int
    ids: bytes
    columns: bytes
    schema: bytes | None


class Drop(msgspec.Struct, array_like=True, tag=3, frozen=True):
    """Rows that went."""

    number: int
    time_us: int
    ids: bytes


class Rollback(msgspec.Struct, array_like=True, tag=4, frozen=True):
    """Back to a version."""

    number: int
    time_us: int
    version: int


class Settings(msgspec.Struct, array_like=True, tag=5, frozen=True):
    """How the buffer chooses from here on."""

    number: int
    time_us: int
    max_size: int | None
    drop_strategy: str
    seed: int


Operation = Append | Change | Drop | Rollback | Settings

_operations: msgspec.msgpack.Decoder[Operation] = msgspec.msgpack.Decoder(Operation)


def encode(operation: Operation) -> bytes:
    """
    >>> decode(encode(Rollback(7, 0, version=3)))
    Rollback(number=7, time_us=0, version=3)
    """
    try:
        return _encoder.encode(operation)
    except msgspec.EncodeError as error:
        raise _too_large() from error


def decode(data: bytes | memoryview) -> Operation:
    try:
        return _operations.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _unreadable("a change", str(error)) from error


def encode_ids(ids: NDArray[np.int64]) -> bytes:
    """
    >>> decode_ids(encode_ids(np.array([3, 5])))
    array([3, 5])
    """
    return ids.astype("<i8", copy=False).tobytes()


def decode_ids(data: bytes | memoryview) -> NDArray[np.int64]:
    if len(data) % 8:
        raise _unreadable("ids", f"{len(data)} bytes")
    return np.frombuffer(data, "<i8")


# Schemas


class _SchemaBytes(msgspec.Struct, array_like=True, tag=1, frozen=True):
    arrow: bytes
    required: list[bool]


_schemas = msgspec.msgpack.Decoder(_SchemaBytes)


def encode_schema(schema: Schema) -> bytes:
    arrow = schema.arrow.serialize().to_pybytes()
    return _encoder.encode(_SchemaBytes(arrow, [field.required for field in schema]))


def decode_schema(data: bytes | memoryview) -> Schema:
    try:
        found = _schemas.decode(data)
        arrow = pa.ipc.read_schema(pa.py_buffer(found.arrow))
        names = arrow.names
    except (msgspec.MsgspecError, UnicodeDecodeError, pa.ArrowException, OSError) as error:
        raise _unreadable("a schema", str(error)) from error
    if len(names) != len(found.required) or len(set(names)) != len(names):
        raise _unreadable("a schema", f"{len(names)} columns, {len(found.required)} of them told whether required")
    return Schema(
        tuple(
            Field(field.name, field.type, required=required, nullable=field.nullable)
            for field, required in zip(arrow, found.required, strict=True)
        )
    )


# Columns


class _Layout(NamedTuple):
    """What there is to know of a column before its values: found out once for each schema."""

    dtype: np.dtype[Any] | None
    """None: an Arrow column."""
    shape: tuple[int, ...]
    row_bytes: int
    type: pa.DataType
    text: tuple[str, bool] | None
    """Of text and bytes, which go as a list where there are few."""
    message: pa.Schema


_ColumnBytes = tuple[dict[str, memoryview | list[Any]], dict[str, memoryview]]
"""Values of each column; of those where some have no value, which ones have."""

_columns = msgspec.msgpack.Decoder(_ColumnBytes)


def _layouts(schema: Schema) -> dict[str, _Layout]:
    # Kept with the schema as `cached_property` would: to ask Arrow for the types of each row costs more than the row.
    kept: dict[str, _Layout] | None = vars(schema).get("_layouts")
    if kept is None:
        kept = vars(schema)["_layouts"] = {field.name: _layout(field) for field in schema}
    return kept


def _layout(field: Field) -> _Layout:
    dtype, shape = field.numbers or (None, ())
    row_bytes = 0 if dtype is None else dtype.itemsize * math.prod(shape)
    return _Layout(
        dtype, shape, row_bytes, field.type, _TEXTS.get(str(field.type)), pa.schema([pa.field("", field.type)])
    )


_TEXTS = {"string": ("i", True), "large_string": ("q", True), "binary": ("i", False), "large_binary": ("q", False)}
"""By type: what its offsets are to `struct`, and whether it is text."""


def encode_columns(schema: Schema, columns: Columns) -> bytes:
    """Some or all of a schema's columns."""
    layouts = _layouts(schema)
    values: dict[str, Any] = {}
    valid: dict[str, Any] = {}
    column: Any
    for name, column in columns.items():
        layout = layouts[name]
        if layout.dtype is not None:
            array, is_valid = column
            if array.dtype != layout.dtype or array.shape[1:] != layout.shape:
                raise ValueError(f"column {name!r}: {array.dtype}{list(array.shape[1:])} is not {layout[:2]}")
            values[name] = array.data if array.nbytes > 256 and array.flags.c_contiguous else array.tobytes()
            if is_valid is not None:
                valid[name] = is_valid.tobytes()
        elif layout.text is not None and len(column) <= _FEW_ROWS:
            values[name] = column.to_pylist()
        else:
            values[name] = memoryview(_message(column, layout))
    try:
        return _encoder.encode((values, valid))
    except msgspec.EncodeError as error:
        raise _too_large() from error


def decode_columns(schema: Schema, data: bytes | memoryview, num_rows: int) -> Columns:
    """Read-only views of `data`."""
    layouts = _layouts(schema)
    try:
        values, valid = _columns.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _unreadable("columns", str(error)) from error
    columns: Columns = {}
    for name, found in values.items():
        layout = layouts.get(name)
        if layout is None:
            raise _unreadable(f"column {name!r}", "the schema has no such column")
        try:
            columns[name] = _decoded(layout, found, valid.get(name), num_rows)
        except (ValueError, TypeError, EOFError, StopIteration, pa.ArrowException, OSError) as error:
            raise _unreadable(f"column {name!r}", str(error)) from error
    return columns


def _decoded(layout: _Layout, found: memoryview | list[Any], valid: memoryview | None, num_rows: int) -> Values:
    if layout.dtype is not None:
        if isinstance(found, list) or len(found) != num_rows * layout.row_bytes:
            raise ValueError(f"not {num_rows} rows of {layout.row_bytes} bytes")
        values = np.ndarray((num_rows, *layout.shape), layout.dtype, found)
        values.flags.writeable = False
        if layout.dtype.kind == "b":
            _check_booleans(values)
        if valid is None:
            return Numbers(values)
        if len(valid) != num_rows:
            raise ValueError(f"{len(valid)} rows of {num_rows} told whether they have a value")
        is_valid = np.ndarray(num_rows, bool, valid)
        is_valid.flags.writeable = False
        _check_booleans(is_valid)
        return Numbers(values, is_valid)
    array = _texts_to_arrow(found, layout) if isinstance(found, list) else _from_message(found, layout)
    if len(array) != num_rows:
        raise ValueError(f"{len(array)} rows, not {num_rows}")
    return array


def _check_booleans(values: NDArray[np.bool_]) -> None:
    if values.size and values.view(np.uint8).max() > 1:
        raise ValueError("a byte that is neither true nor false")


def _texts_to_arrow(texts: list[Any], layout: _Layout) -> pa.Array:
    """As `pa.array`, which imports pandas wherever it is installed."""
    if layout.text is None:
        raise ValueError(f"a list, where {layout.type} should be")
    offset_code, is_text = layout.text
    expected = str if is_text else bytes
    if any(text is not None and not isinstance(text, expected) for text in texts):
        raise ValueError(f"a value that is no {layout.type}")
    pieces = [b"" if text is None else text.encode() if is_text else text for text in texts]
    offsets = struct.pack(f"<{len(pieces) + 1}{offset_code}", *accumulate(map(len, pieces), initial=0))
    bitmap = None
    if None in texts:
        bits = sum(1 << row for row, text in enumerate(texts) if text is not None)
        bitmap = pa.py_buffer(bits.to_bytes(-(-len(texts) // 8), "little"))
    return pa.Array.from_buffers(
        layout.type, len(pieces), [bitmap, pa.py_buffer(offsets), pa.py_buffer(b"".join(pieces))]
    )


def _message(column: pa.Array, layout: _Layout) -> pa.Buffer:
    """One column as an Arrow message; as a stream of them where it needs a dictionary of its values."""
    batch = pa.RecordBatch.from_arrays([column], schema=layout.message)
    if not _has_dictionary(column.type):
        return batch.serialize()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, layout.message) as stream:
        stream.write_batch(batch)
    return sink.getvalue()


def _from_message(data: memoryview, layout: _Layout) -> pa.Array:
    kind = layout.type
    buffer = pa.py_buffer(data)
    if buffer.address % 8:  # Arrow's messages want it, and where they lie among other bytes is chance
        buffer = pa.py_buffer(bytes(data))
    if _has_dictionary(kind):
        batch = pa.ipc.open_stream(buffer).read_next_batch()
    else:
        batch = pa.ipc.read_record_batch(buffer, layout.message)
    if batch.num_columns != 1 or batch.column(0).type != kind:
        raise ValueError(f"not one column of {kind}")
    batch.validate(full=True)
    return batch.column(0)


def _has_dictionary(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    return pa.types.is_dictionary(kind) or any(_has_dictionary(kind.field(n).type) for n in range(kind.num_fields))


def _too_large() -> SampleError:
    return SampleError(
        f"one call cannot bring {_MAX_BYTES:,} bytes or more to a buffer with a journal",
        remedy="append the rows in several calls",
    )


def _unreadable(what: str, reason: str) -> StoreError:
    return StoreError(
        f"this buffer's files have {what} that cannot be read",
        reason=reason,
        remedy="restore the folder from a copy, or read it with the version of batchwright that wrote it",
    )
