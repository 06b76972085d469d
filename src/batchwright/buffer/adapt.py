"""Arrow arrays of one type as another that holds the same values, without Python for each row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchwright.buffer.convert import (
    counts_of,
    from_arrow,
    items_of,
    list_array,
    plain_type,
    tensors_of,
    to_arrow,
    with_tensors,
)
from batchwright.buffer.fit import is_bytes, is_text
from batchwright.buffer.foreign import Misfit
from batchwright.buffer.infer import is_list
from batchwright.buffer.schema import Field, Numbers, Values

__all__ = ["adapt", "owned"]


def adapt(array: pa.Array, field: Field) -> Values:
    """The array as a column of this field, or a `Misfit`."""
    if array.type != field.type:
        array = _as_type(array, field.type)
    return from_arrow(field, array)


def _as_type(array: pa.Array, kind: pa.DataType) -> pa.Array:
    mine, is_a = array.type, pa.types
    if mine == kind:
        return array
    if is_a.is_null(mine):
        return pa.nulls(len(array), kind)
    if is_a.is_dictionary(mine):
        values = _as_type(array.dictionary, plain_type(mine.value_type))  # Arrow does not decode views
        return _as_type(pa.DictionaryArray.from_arrays(array.indices, values).dictionary_decode(), kind)
    if is_a.is_run_end_encoded(mine):
        return _as_type(pc.run_end_decode(array), kind)
    if is_a.is_list_view(mine) or is_a.is_large_list_view(mine):
        return _as_type(_without_view(array), kind)
    if (is_text(mine) and is_text(kind)) or (is_bytes(mine) and is_bytes(kind)):
        return array.cast(kind)
    if isinstance(kind, pa.FixedShapeTensorType):
        return _as_tensors(array, kind)
    if is_a.is_struct(mine) and is_a.is_struct(kind):
        return _as_structs(array, kind)
    if is_list(mine) and is_list(kind):
        return _as_lists(array, kind)
    if _dtype(mine) is not None and _dtype(kind) is not None:
        return _as_numbers(array, kind)
    raise _refused(mine, kind)


def _refused(mine: pa.DataType, kind: pa.DataType) -> Misfit:
    has, got = str(Field("", kind)), str(Field("", mine))
    return Misfit("a column of another type", has=has, got=got, remedy=f"a column of type {has}, e.g. array.cast(...)")


def _dtype(kind: pa.DataType) -> np.dtype[Any] | None:
    numbers = Field("", kind).numbers
    return numbers[0] if numbers is not None and not numbers[1] else None


def _as_numbers(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Numbers in a type that holds every value of the one that they have."""
    mine, dtype = _dtype(array.type), _dtype(kind)
    assert mine is not None
    assert dtype is not None
    if (mine.kind == "b") != (dtype.kind == "b") or not np.can_cast(mine, dtype, "safe"):
        raise _refused(array.type, kind)
    values, valid = from_arrow(Field("", array.type), array)
    made = values.astype(dtype)
    if mine.kind in "iu" and dtype.kind == "f" and dtype.itemsize <= mine.itemsize:
        # NumPy calls int64 to float64 safe, where numbers above 2^53 are rounded.
        is_large = np.abs(made) >= 2 ** (np.finfo(dtype).nmant + 1)
        if any(int(number) != whole for number, whole in zip(made[is_large], values[is_large].tolist(), strict=True)):
            raise _refused(array.type, kind)
    return to_arrow(Field("", kind), Numbers(made, valid))


def _as_tensors(array: pa.Array, kind: pa.DataType) -> pa.Array:
    mine = array.type
    if isinstance(mine, pa.FixedShapeTensorType) and plain_type(mine) == kind:
        valid = array.is_valid().to_numpy(zero_copy_only=False) if array.null_count else None
        return to_arrow(Field("", kind), Numbers(np.ascontiguousarray(tensors_of(array)), valid))
    if pa.types.is_fixed_size_list(mine) and (found := with_tensors(array)).type == kind:
        return found
    raise _refused(mine, kind)


def _as_structs(array: pa.Array, kind: pa.DataType) -> pa.Array:
    mine = {field.name: array.field(number) for number, field in enumerate(array.type)}
    if mine.keys() - {field.name for field in kind}:
        raise _refused(array.type, kind)
    children = []
    for field in kind:
        child = mine.get(field.name)
        child = pa.nulls(len(array), field.type) if child is None else _as_type(child, field.type)
        if not field.nullable and child.null_count:
            raise _refused(array.type, kind)
        children.append(child)
    return pa.StructArray.from_arrays(children, fields=list(kind), mask=_mask(array))


def _as_lists(array: pa.Array, kind: pa.DataType) -> pa.Array:
    items = _as_type(items_of(array), kind.value_type)
    if not kind.value_field.nullable and items.null_count:
        raise _refused(array.type, kind)
    if not pa.types.is_fixed_size_list(kind):
        return list_array(items, counts_of(array), kind, _mask(array))
    if not pa.types.is_fixed_size_list(array.type) or array.type.list_size != kind.list_size:
        raise _refused(array.type, kind)
    return pa.FixedSizeListArray.from_arrays(items, type=kind, mask=_mask(array))


def _without_view(array: pa.Array) -> pa.Array:
    """Lists one after the other. Arrow's own cast makes arrays that are not valid where a list is null."""
    counts = pc.fill_null(pc.list_value_length(array), 0).to_numpy().astype(np.int64)
    item = array.type.value_field
    kind = pa.large_list(item) if pa.types.is_large_list_view(array.type) else pa.list_(item)
    return list_array(array.flatten(), counts, kind, _mask(array))


def _mask(array: pa.Array) -> pa.Array | None:
    return array.is_null() if array.null_count else None


def owned(array: pa.Array) -> pa.Array:
    """The array, with memory that nobody else can change.

    Arrow shares the memory of NumPy arrays and does not say so; texts never are of such memory, and what was read
    from a file cannot be changed.
    """
    if is_text(array.type) or is_bytes(array.type):
        return array
    if not any(buffer is not None and buffer.is_mutable for buffer in array.buffers()):
        return array
    sink = pa.BufferOutputStream()
    batch = pa.RecordBatch.from_arrays([array], ["column"])
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return pa.ipc.open_stream(sink.getvalue()).read_next_batch().column(0)
