"""A block's columns as an Arrow file that is mapped, not read.

One record batch of one row, in which every column is a list: each can have a length of its own, and all are mapped.
Arrow's writer puts buffers at multiples of 8 bytes. Lists of spaces before columns of numbers bring these to 64.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchwright.buffer.schema import Columns, Field, Numbers, Schema, num_rows_of

__all__ = ["block_from_arrow", "block_to_arrow"]

_ALIGNMENT = 64
_COLUMN, _EXTRA, _PAD = "column:", "extra:", "pad:"


def block_to_arrow(columns: Columns, schema: Schema, extra: dict[str, NDArray[np.int64]]) -> pa.RecordBatch:
    """Columns of a schema, and arrays of integers beside them."""
    lists: dict[str, pa.Array] = {}
    offset = 0

    def add_numbers(name: str, values: NDArray[Any], valid: NDArray[np.bool_] | None, kind: pa.DataType) -> None:
        nonlocal offset
        bitmap = None if valid is None or valid.all() else np.packbits(valid, bitorder="little")
        before = offset + 2 * _LIST_BYTES + _round_up(0 if bitmap is None else len(bitmap), 8)
        num_spaces = _round_up(before, _ALIGNMENT) - before
        lists[f"{_PAD}{len(lists)}"] = _one_list(_plain(np.full(num_spaces, ord(" "), np.uint8)))
        lists[name] = _one_list(_numbers_to_arrow(values, bitmap, kind))
        offset = before + num_spaces + _round_up(values.nbytes, 8)

    for name, array in extra.items():
        add_numbers(_EXTRA + name, np.ascontiguousarray(array, np.int64), None, pa.int64())
    column: Any
    for name, column in columns.items():
        field = schema.by_name[name]
        if field.numbers is not None:
            numbers, valid = column
            add_numbers(_COLUMN + name, np.ascontiguousarray(numbers, field.numbers[0]), valid, _stored_type(field))
    for name, column in columns.items():
        if schema.by_name[name].numbers is None:
            lists[_COLUMN + name] = _one_list(column)
    if not lists:
        lists[_PAD] = _one_list(_plain(np.zeros(0, np.uint8)))
    batch = pa.RecordBatch.from_arrays(list(lists.values()), names=list(lists))
    return batch.replace_schema_metadata({"pad": " " * _bytes_before_body(batch)})


_LIST_BYTES = 16
"""Where a list of one row begins and ends."""


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _one_list(values: pa.Array) -> pa.Array:
    offsets = pa.py_buffer(np.array([0, len(values)], np.int64))
    return pa.Array.from_buffers(pa.large_list(values.type), 1, [None, offsets], children=[values])


def _plain(values: NDArray[Any], bitmap: NDArray[np.uint8] | None = None) -> pa.Array:
    buffers = [None if bitmap is None else pa.py_buffer(bitmap), pa.py_buffer(values)]
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), buffers)


def _stored_type(field: Field) -> pa.DataType:
    """Of a column of numbers. Booleans are bytes, as NumPy has them: Arrow's own are bits, which cannot be mapped."""
    dtype, shape = field.numbers or (np.dtype(bool), ())
    flat = pa.uint8() if dtype.kind == "b" else pa.from_numpy_dtype(dtype)
    return pa.list_(flat, math.prod(shape)) if shape else flat


def _numbers_to_arrow(values: NDArray[Any], bitmap: NDArray[np.uint8] | None, kind: pa.DataType) -> pa.Array:
    flat = (values.view(np.uint8) if values.dtype.kind == "b" else values).reshape(-1)
    if not pa.types.is_fixed_size_list(kind):
        return _plain(flat, bitmap)
    buffer = None if bitmap is None else pa.py_buffer(bitmap)
    return pa.Array.from_buffers(kind, len(values), [buffer], children=[_plain(flat)])


def _bytes_before_body(batch: pa.RecordBatch) -> int:
    """How many more bytes of metadata bring the batch's buffers to a multiple of 64 in the file.

    All that comes before them depends on the types alone, so a batch of empty lists tells.
    """
    empty = [_one_list(column.values.slice(0, 0)) for column in batch.columns]
    twin = pa.RecordBatch.from_arrays(empty, names=batch.schema.names).replace_schema_metadata({"pad": ""})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, twin.schema) as file:
        file.write_batch(twin)
    written = sink.getvalue()
    body = pa.ipc.open_file(written).get_batch(0)
    first: int = body.column(0).buffers()[1].address
    return -(first - int(written.address)) % _ALIGNMENT


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
    """(columns, extra) of a file, over its own memory. A ValueError, or Arrow's own, where it is not such a file."""
    batch = _only_batch(file)
    found: Columns = {}
    extra: dict[str, NDArray[np.int64]] = {}
    for name, lists in zip(batch.schema.names, batch.columns, strict=True):
        if not pa.types.is_large_list(lists.type) or lists.null_count:
            raise ValueError(f"{name!r} is no list")
        values = lists.flatten()
        if name.startswith(_EXTRA):
            extra[name.removeprefix(_EXTRA)] = _mapped(values, pa.int64(), np.dtype(np.int64), ())[0]
        elif name.startswith(_COLUMN) and (wanted is None or name.removeprefix(_COLUMN) in wanted):
            field = schema.by_name.get(name.removeprefix(_COLUMN))
            if field is None:
                raise ValueError(f"{name!r} is not in the schema")
            if field.numbers is not None:
                found[field.name] = Numbers(*_mapped(values, _stored_type(field), *field.numbers))
            elif values.type != field.type:
                raise ValueError(f"column {field.name!r} is {values.type}, not {field.type}")
            else:
                found[field.name] = values
    if len({num_rows_of({name: column}) for name, column in found.items()}) > 1:
        raise ValueError("columns of different lengths")
    return {name: found[name] for name in schema.names if name in found}, extra


def _mapped(
    array: pa.Array, kind: pa.DataType, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> tuple[NDArray[Any], NDArray[np.bool_] | None]:
    if array.type != kind:
        raise ValueError(f"{array.type}, not {kind}")
    num_rows = len(array)
    valid = None
    if array.null_count:
        bits = np.unpackbits(np.frombuffer(array.buffers()[0], np.uint8), bitorder="little")
        valid = bits[array.offset : array.offset + num_rows].astype(bool)
        valid.flags.writeable = False
    flat, start = (array.values, array.offset * math.prod(shape)) if shape else (array, 0)
    start += flat.offset
    num_bytes = num_rows * dtype.itemsize * math.prod(shape)
    buffer = flat.buffers()[1]
    if not num_bytes:
        values = np.empty((num_rows, *shape), dtype)
    else:
        if (shape and flat.null_count) or buffer is None or buffer.size < start * dtype.itemsize + num_bytes:
            raise ValueError(f"not {num_rows} rows of {dtype}{list(shape)}")
        values = np.ndarray((num_rows, *shape), dtype, buffer, start * dtype.itemsize)
    if dtype.kind == "b" and values.size and values.view(np.uint8).max() > 1:
        raise ValueError("a byte that is neither true nor false")
    values.flags.writeable = False
    return values, valid
