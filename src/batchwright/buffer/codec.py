"""Codecs of a buffer's files: columns, schemas and changes as bytes of the journal, and blocks as Arrow files.

In the journal, numbers travel as raw bytes, a few texts as text, all other columns as Arrow's own messages.
Decoding checks the bytes first, and gives read-only views of them.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchwright.base.errors import SampleError, StoreError
from batchwright.buffer.arrow import to_arrow
from batchwright.buffer.schema import Columns, Field, Numbers, Schema, Values, num_rows_of

_MAX_BYTES = (1 << 32) - 1
"""The largest column of one call: MessagePack counts bytes in 32 bits."""
_FEW_ROWS = 16
"""Columns of at most this many texts are written as a list, not as an Arrow message."""

_encoder = msgspec.msgpack.Encoder()

T = TypeVar("T")


# Changes


class _Change(msgspec.Struct, array_like=True, frozen=True):
    """A change to a buffer. Its columns and its schema are filled in when it is written to the journal."""

    number: int
    time_us: int


class Append(_Change, tag=1, frozen=True):
    """Rows that were added, and the retention of the rows before them."""

    columns: bytes
    num_rows: int
    retain: float
    by: str
    origin: str | None
    kind: str
    schema: bytes | None
    """None: as it was."""


class SetValues(_Change, tag=2, frozen=True):
    """New values of some columns for some rows."""

    ids: bytes
    columns: bytes
    schema: bytes | None

    @property
    def num_rows(self) -> int:
        return len(self.ids) // 8


class DropRows(_Change, tag=3, frozen=True):
    """Rows that went."""

    ids: bytes


class Rollback(_Change, tag=4, frozen=True):
    """Back to a version."""

    version: int


class SettingsChange(_Change, tag=5, frozen=True):
    """Other settings from here on."""

    max_size: int | None
    drop_strategy: str
    seed: int


Operation = Append | SetValues | DropRows | Rollback | SettingsChange

_operations: msgspec.msgpack.Decoder[Operation] = msgspec.msgpack.Decoder(Operation)


def encode(value: object) -> bytes:
    """A change, or the values of columns, as MessagePack.

    >>> decode(encode(Rollback(7, 0, version=3)))
    Rollback(number=7, time_us=0, version=3)
    """
    try:
        return _encoder.encode(value)
    except msgspec.EncodeError as error:
        what = f"one call cannot bring {_MAX_BYTES:,} bytes or more to a buffer with a journal"
        raise SampleError(what, remedy="append the rows in several calls") from error


def decode(data: bytes | memoryview) -> Operation:
    return _decoded(_operations, data, "a change")


def _decoded(decoder: msgspec.msgpack.Decoder[T], data: bytes | memoryview, what: str) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _unreadable(what, str(error)) from error


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
    found = _decoded(_schemas, data, "a schema")
    try:
        arrow = pa.ipc.read_schema(pa.py_buffer(found.arrow))
        names = arrow.names
    except (UnicodeDecodeError, pa.ArrowException, OSError) as error:
        raise _unreadable("a schema", str(error)) from error
    if len(names) != len(found.required) or len(set(names)) != len(names):
        raise _unreadable("a schema", f"{len(names)} columns, and {len(found.required)} flags")
    fields = zip(arrow, found.required, strict=True)
    return Schema(tuple(Field(field.name, field.type, required, field.nullable) for field, required in fields))


# Columns


_ColumnBytes = tuple[dict[str, memoryview | list[Any]], dict[str, memoryview]]
"""The values of each column, with the mask of rows that have a value, if some have none."""

_columns = msgspec.msgpack.Decoder(_ColumnBytes)


def encode_columns(schema: Schema, columns: Columns) -> bytes:
    """Some or all of a schema's columns."""
    values: dict[str, Any] = {}
    valid: dict[str, Any] = {}
    for name, column in columns.items():
        field = schema.by_name[name]
        if isinstance(column, Numbers):
            array = column.values
            if (array.dtype, array.shape[1:]) != field.numbers:
                raise ValueError(f"column {name!r}: {array.dtype}{list(array.shape[1:])} is not {field}")
            values[name] = array.data if array.nbytes > 256 and array.flags.c_contiguous else array.tobytes()
            if column.valid is not None:
                valid[name] = column.valid.tobytes()
        elif field.is_text and len(column) <= _FEW_ROWS:
            values[name] = column.to_pylist()
        else:
            values[name] = memoryview(_message(column, field))
    return encode((values, valid))


def decode_columns(schema: Schema, data: bytes | memoryview, num_rows: int) -> Columns:
    """Read-only views of `data`."""
    values, valid = _decoded(_columns, data, "columns")
    columns: Columns = {}
    for name, found in values.items():
        field = schema.by_name.get(name)
        if field is None:
            raise _unreadable(f"column {name!r}", "the schema has no such column")
        try:
            columns[name] = _column(field, found, valid.get(name), num_rows)
        except (ValueError, TypeError, EOFError, StopIteration, pa.ArrowException, OSError) as error:
            raise _unreadable(f"column {name!r}", str(error)) from error
    return columns


def _column(field: Field, found: memoryview | list[Any], valid: memoryview | None, num_rows: int) -> Values:
    if field.numbers is not None:
        dtype, shape = field.numbers
        if isinstance(found, list):
            raise ValueError(f"a list, where {field} should be")
        values = _raw_numbers(found, dtype, (num_rows, *shape))
        return Numbers(values, None if valid is None else _raw_numbers(valid, np.dtype(bool), (num_rows,)))
    if isinstance(found, list):
        array = _texts(found, field)
    else:
        array = _from_message(found, field)
    if len(array) != num_rows:
        raise ValueError(f"{len(array)} rows, not {num_rows}")
    return array


def _raw_numbers(data: memoryview, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    if len(data) != dtype.itemsize * math.prod(shape):
        raise ValueError(f"{len(data)} bytes, where {dtype}{list(shape)} should be")
    return _read_only(np.ndarray(shape, dtype, data))


def _read_only(values: NDArray[Any]) -> NDArray[Any]:
    values.flags.writeable = False
    if values.dtype.kind == "b" and values.size and values.view(np.uint8).max() > 1:
        raise ValueError("a byte that is neither true nor false")
    return values


def _texts(texts: list[Any], field: Field) -> pa.Array:
    array = pa.array(texts, field.type)
    if not field.is_text or array.to_pylist() != texts:
        raise ValueError(f"other values than {field}")
    return array


def _message(column: pa.Array, field: Field) -> pa.Buffer:
    """One column as an Arrow message, or as a stream of messages if it needs a dictionary of its values."""
    batch = pa.RecordBatch.from_arrays([column], schema=field.message)
    if not _has_dictionary(column.type):
        return batch.serialize()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, field.message) as stream:
        stream.write_batch(batch)
    return sink.getvalue()


def _from_message(data: memoryview, field: Field) -> pa.Array:
    kind = field.type
    buffer = pa.py_buffer(data)
    if buffer.address % 8:  # Arrow's messages want it, and among other bytes they may begin anywhere
        buffer = pa.py_buffer(bytes(data))
    if _has_dictionary(kind):
        batch = pa.ipc.open_stream(buffer).read_next_batch()
    else:
        batch = pa.ipc.read_record_batch(buffer, field.message)
    if batch.num_columns != 1 or batch.column(0).type != kind:
        raise ValueError(f"not one column of {kind}")
    batch.validate(full=True)
    return batch.column(0)


def _has_dictionary(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    return pa.types.is_dictionary(kind) or any(_has_dictionary(kind.field(n).type) for n in range(kind.num_fields))


def _unreadable(what: str, reason: str) -> StoreError:
    remedy = "restore the folder from a copy, or read it with the version of batchwright that wrote it"
    return StoreError(f"this buffer's files have {what} that cannot be read", reason=reason, remedy=remedy)


# Blocks: one record batch of one row. Every column is a list in it, so each can have its own length, and all are mapped


_COLUMN, _EXTRA, _EMPTY = "column:", "extra:", "pad:"


def block_to_arrow(columns: Columns, extra: dict[str, NDArray[np.int64]]) -> pa.RecordBatch:
    """Columns of a block, and arrays of integers beside them."""
    lists = {_EXTRA + name: _one_list(pa.array(array, pa.int64())) for name, array in extra.items()}
    for name, values in columns.items():
        lists[_COLUMN + name] = _one_list(_to_stored(values))
    if not lists:
        lists[_EMPTY] = _one_list(pa.array([], pa.uint8()))
    return pa.RecordBatch.from_arrays(list(lists.values()), names=list(lists))


def _one_list(values: pa.Array) -> pa.Array:
    offsets = pa.py_buffer(np.array([0, len(values)], np.int64))
    return pa.Array.from_buffers(pa.large_list(values.type), 1, [None, offsets], children=[values])


def _to_stored(values: Values) -> pa.Array:
    """Booleans are bytes, as in NumPy: Arrow's own are bits, which cannot be mapped."""
    if not isinstance(values, Numbers):
        return values
    numbers = np.ascontiguousarray(values.values)
    if numbers.dtype.kind == "b":
        numbers = numbers.view(np.uint8)
    kind = pa.from_numpy_dtype(numbers.dtype)
    if numbers.ndim == 1:
        return to_arrow(Field("", kind), Numbers(numbers, values.valid))
    kind = pa.fixed_shape_tensor(kind, numbers.shape[1:])
    return to_arrow(Field("", kind), Numbers(numbers, values.valid)).storage


def _only_batch(file: Any) -> pa.RecordBatch:
    reader = pa.ipc.open_file(file)
    if reader.num_record_batches != 1:
        raise ValueError(f"{reader.num_record_batches} record batches, not one")
    batch = reader.get_batch(0)
    if batch.num_rows != 1:
        raise ValueError(f"{batch.num_rows} rows of lists, not one")
    batch.validate(full=True)  # before anything follows an offset in it: it may lead out of the file
    return batch


def block_from_arrow(
    file: pa.NativeFile, schema: Schema, wanted: Collection[str] | None
) -> tuple[Columns, dict[str, NDArray[np.int64]]]:
    """Return (columns, extra) of a file, over its own memory. Other files raise ValueError, or Arrow's own error."""
    batch = _only_batch(file)
    found: Columns = {}
    extra: dict[str, NDArray[np.int64]] = {}
    for name, lists in zip(batch.schema.names, batch.columns, strict=True):
        if not pa.types.is_large_list(lists.type) or lists.null_count:
            raise ValueError(f"{name!r} is not a list")
        values, short = lists.flatten(), name.partition(":")[2]
        if name.startswith(_EXTRA):
            extra[short] = _mapped(values, np.dtype(np.int64), ()).values
        elif name.startswith(_COLUMN) and (wanted is None or short in wanted):
            if short not in schema.by_name:
                raise ValueError(f"{name!r} is not in the schema")
            found[short] = _from_stored(schema.by_name[short], values)
    if len({num_rows_of({name: column}) for name, column in found.items()}) > 1:
        raise ValueError("columns of different lengths")
    return {name: found[name] for name in schema.names if name in found}, extra


def _from_stored(field: Field, values: pa.Array) -> Values:
    if field.numbers is not None:
        return _mapped(values, *field.numbers)
    if values.type != field.type:
        raise ValueError(f"column {field.name!r} is {values.type}, not {field.type}")
    return values


def _mapped(array: pa.Array, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Numbers:
    """A column of numbers, over the memory of the file."""
    stored = pa.uint8() if dtype.kind == "b" else pa.from_numpy_dtype(dtype)
    if shape:
        stored = pa.list_(stored, math.prod(shape))
    if array.type != stored:
        raise ValueError(f"{array.type}, not {stored}")
    valid = None
    if array.null_count:
        valid = _read_only(array.is_valid().to_numpy(zero_copy_only=False))
    flat, start, size = array, array.offset, math.prod(shape)
    if shape:
        flat, start = array.values, array.offset * size + array.values.offset
        if flat.null_count:
            raise ValueError(f"{dtype}{list(shape)} with a null inside")
    buffer, values = flat.buffers()[1], np.empty((len(array), *shape), dtype)
    if values.nbytes:
        if buffer is None or buffer.size < start * dtype.itemsize + values.nbytes:
            raise ValueError(f"not {len(array)} rows of {dtype}{list(shape)}")
        values = np.ndarray(values.shape, dtype, buffer, start * dtype.itemsize)
    return Numbers(_read_only(values), valid)
