"""A block's columns as an Arrow file that is mapped, not read.

The file is one record batch of one row. Every column is a list in it, so each can have its own length, and all are
mapped.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchwright.buffer.arrow import to_arrow
from batchwright.buffer.schema import Columns, Field, Numbers, Schema, Values, num_rows_of

__all__ = ["block_from_arrow", "block_to_arrow"]

_COLUMN, _EXTRA, _EMPTY = "column:", "extra:", "pad:"


def block_to_arrow(columns: Columns, schema: Schema, extra: dict[str, NDArray[np.int64]]) -> pa.RecordBatch:
    """Columns of a schema, and arrays of integers beside them."""
    lists = {_EXTRA + name: _one_list(pa.array(array, pa.int64())) for name, array in extra.items()}
    for name, values in columns.items():
        lists[_COLUMN + name] = _one_list(_to_stored(schema.by_name[name], values))
    if not lists:
        lists[_EMPTY] = _one_list(pa.array([], pa.uint8()))
    return pa.RecordBatch.from_arrays(list(lists.values()), names=list(lists))


def _one_list(values: pa.Array) -> pa.Array:
    offsets = pa.py_buffer(np.array([0, len(values)], np.int64))
    return pa.Array.from_buffers(pa.large_list(values.type), 1, [None, offsets], children=[values])


def _to_stored(field: Field, values: Values) -> pa.Array:
    if not isinstance(values, Numbers):
        return values
    numbers = np.ascontiguousarray(values.values)
    if numbers.dtype.kind == "b":
        numbers = numbers.view(np.uint8)
    array = to_arrow(Field("", _stored_type(field)), Numbers(numbers, values.valid))
    return array.storage if numbers.ndim > 1 else array


def _stored_type(field: Field) -> pa.DataType:
    """The stored type of a column of numbers. Booleans are bytes, as in NumPy. Arrow's own are bits, not mappable."""
    dtype, shape = field.numbers or (np.dtype(bool), ())
    flat = pa.uint8() if dtype.kind == "b" else pa.from_numpy_dtype(dtype)
    return pa.fixed_shape_tensor(flat, shape) if shape else flat


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
            extra[short] = _mapped(values, pa.int64(), np.dtype(np.int64), ())[0]
        elif name.startswith(_COLUMN) and (wanted is None or short in wanted):
            if short not in schema.by_name:
                raise ValueError(f"{name!r} is not in the schema")
            found[short] = _from_stored(schema.by_name[short], values)
    if len({num_rows_of({name: column}) for name, column in found.items()}) > 1:
        raise ValueError("columns of different lengths")
    return {name: found[name] for name in schema.names if name in found}, extra


def _from_stored(field: Field, values: pa.Array) -> Values:
    if field.numbers is not None:
        return Numbers(*_mapped(values, _stored_type(field), *field.numbers))
    if values.type != field.type:
        raise ValueError(f"column {field.name!r} is {values.type}, not {field.type}")
    return values


def _mapped(
    array: pa.Array, kind: pa.DataType, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> tuple[NDArray[Any], NDArray[np.bool_] | None]:
    """(values, valid) of a column of numbers, over the memory of the file."""
    stored = kind.storage_type if shape else kind
    if array.type != stored:
        raise ValueError(f"{array.type}, not {stored}")
    valid = None
    if array.null_count:
        valid = array.is_valid().to_numpy(zero_copy_only=False)
        valid.flags.writeable = False
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
        if dtype.kind == "b" and values.view(np.uint8).max() > 1:
            raise ValueError("a byte that is neither true nor false")
    values.flags.writeable = False
    return values, valid
