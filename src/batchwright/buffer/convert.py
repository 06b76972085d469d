"""Columns to Arrow and back, and to Python values. Numbers are not copied where Arrow and NumPy lay them out alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchwright.buffer.foreign import Misfit
from batchwright.buffer.infer import has_null, is_list, types_inside
from batchwright.buffer.schema import Field, Numbers, Values

__all__ = [
    "counts_of",
    "from_arrow",
    "items_of",
    "joined",
    "list_array",
    "plain_type",
    "pylist",
    "rebuild",
    "tensors_of",
    "to_arrow",
    "with_tensors",
]


def to_arrow(field: Field, values: Values) -> pa.Array:
    """A column as Arrow: the same memory, where no value is null and it is not bool."""
    if not isinstance(values, Numbers):
        return values
    numbers, valid = values
    is_null = None if valid is None or valid.all() else ~valid
    if not isinstance(field.type, pa.FixedShapeTensorType):
        return pa.array(np.ascontiguousarray(numbers), field.type, mask=is_null)
    flat = pa.array(np.ascontiguousarray(numbers).reshape(-1), field.type.value_type)
    bitmap = None if is_null is None else pa.array(valid).buffers()[1]
    # From buffers: of arrays with a 0 in their shape, the values do not say how many rows there are.
    storage = pa.Array.from_buffers(field.type.storage_type, len(numbers), [bitmap], children=[flat])
    return pa.ExtensionArray.from_storage(field.type, storage)


def from_arrow(field: Field, array: pa.Array | pa.ChunkedArray) -> Values:
    """An Arrow column as this field keeps it. Of its type, or of one in whose place nothing was known (null)."""
    array = joined(array)
    if array.type != field.type and has_null(array.type):
        array = rebuild(array, field.type)
    if field.numbers is None:
        return array
    valid = None if not array.null_count else array.is_valid().to_numpy(zero_copy_only=False)
    if isinstance(array.type, pa.FixedShapeTensorType):
        return Numbers(tensors_of(array), valid)
    if valid is not None:
        array = array.fill_null(False if pa.types.is_boolean(array.type) else 0)
    return Numbers(array.to_numpy(zero_copy_only=False), valid)


def joined(array: pa.Array | pa.ChunkedArray) -> pa.Array:
    """One array of a chunked one; the chunk itself where there is just one."""
    if not isinstance(array, pa.ChunkedArray):
        return array
    if array.num_chunks == 1:
        return array.chunk(0)
    if not array.num_chunks:
        return pa.nulls(0, array.type)
    return pa.concat_arrays(array.chunks)


def tensors_of(array: pa.Array) -> NDArray[Any]:
    """The values [rows, *shape] of an array of tensors; those of null rows are of no meaning."""
    kind, storage = array.type, array.storage
    size = kind.storage_type.list_size
    inner = storage.values.slice(storage.offset * size, len(storage) * size)
    if inner.null_count:
        if array.null_count == 0 or _nulls_in_known(storage, inner, size):
            raise Misfit("a tensor with a null inside", remedy="NaN where a number is missing, or a list column")
        inner = inner.fill_null(False if pa.types.is_boolean(inner.type) else 0)
    values: NDArray[Any] = inner.to_numpy(zero_copy_only=False).reshape(len(array), *kind.shape)
    if kind.permutation is not None:
        values = values.transpose(0, *(axis + 1 for axis in kind.permutation))
    return values


def _nulls_in_known(storage: pa.Array, inner: pa.Array, size: int) -> bool:
    is_null = inner.is_null().to_numpy(zero_copy_only=False).reshape(len(storage), size)
    return bool(is_null[storage.is_valid().to_numpy(zero_copy_only=False)].any())


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type of the values alone, without how they are laid out in memory.

    Dictionaries, runs and views are ways to store the same values, and so is the order of a tensor's axes.
    """
    is_a = pa.types
    if isinstance(kind, pa.FixedShapeTensorType):
        shape = kind.shape if kind.permutation is None else [kind.shape[axis] for axis in kind.permutation]
        return pa.fixed_shape_tensor(kind.value_type, shape)
    if is_a.is_dictionary(kind) or is_a.is_run_end_encoded(kind):
        return plain_type(kind.value_type)
    if is_a.is_string_view(kind):
        return pa.large_string()
    if is_a.is_binary_view(kind):
        return pa.large_binary()
    if is_a.is_struct(kind):
        return pa.struct([field.with_type(plain_type(field.type)) for field in kind])
    if is_list(kind) or is_a.is_list_view(kind) or is_a.is_large_list_view(kind):
        item = kind.value_field.with_type(plain_type(kind.value_type))
        if is_a.is_fixed_size_list(kind):
            return pa.list_(item, kind.list_size)
        return pa.large_list(item) if is_a.is_large_list(kind) or is_a.is_large_list_view(kind) else pa.list_(item)
    return kind


def rebuild(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """An array whose type is not known in some places (null there), as the whole type."""
    if array.type == kind:
        return array
    if pa.types.is_null(array.type):
        return pa.nulls(len(array), kind)
    mask = array.is_null() if array.null_count else None
    if pa.types.is_struct(kind):
        mine = {field.name: array.field(number) for number, field in enumerate(array.type)}
        children = [
            rebuild(mine[field.name], field.type) if field.name in mine else pa.nulls(len(array), field.type)
            for field in kind
        ]
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=mask)
    if pa.types.is_fixed_size_list(kind):
        inner = array.values.slice(array.offset * kind.list_size, len(array) * kind.list_size)
        return pa.FixedSizeListArray.from_arrays(rebuild(inner, kind.value_type), type=kind, mask=mask)
    return list_array(rebuild(items_of(array), kind.value_type), counts_of(array), kind, mask)


def with_tensors(array: pa.Array) -> pa.Array:
    """Lists of fixed lengths (inside each other) of numbers as tensors: the same memory, and an array in NumPy.

    Where a number is missing inside a list, it stays a list.
    """
    kind, inner, shape = array.type, array, []
    while pa.types.is_fixed_size_list(kind) and kind.list_size:
        shape.append(kind.list_size)
        inner, kind = items_of(inner), kind.value_type
        if inner.null_count and _nulls_in_known(array, inner, len(inner) // max(len(array), 1)):
            return array
    if not shape or Field("", kind).numbers is None or isinstance(kind, pa.BaseExtensionType):
        return array
    tensor = pa.fixed_shape_tensor(kind, shape)
    if inner.null_count:  # inside rows that are null themselves
        inner = inner.fill_null(False if pa.types.is_boolean(kind) else 0)
    mask = array.is_null() if array.null_count else None
    storage = pa.FixedSizeListArray.from_arrays(inner, type=tensor.storage_type, mask=mask)
    return pa.ExtensionArray.from_storage(tensor, storage)


def items_of(array: pa.Array) -> pa.Array:
    """What the lists of an array hold, one after the other, as `counts_of` counts them."""
    if pa.types.is_fixed_size_list(array.type):
        size = array.type.list_size
        return array.values.slice(array.offset * size, len(array) * size)
    offsets = array.offsets
    first, last = (offsets[0].as_py(), offsets[-1].as_py()) if len(array) else (0, 0)
    return array.values.slice(first, last - first)


def counts_of(array: pa.Array) -> NDArray[np.int64]:
    if pa.types.is_fixed_size_list(array.type):
        return np.full(len(array), array.type.list_size, np.int64)
    counts: NDArray[np.int64] = np.diff(array.offsets.to_numpy()).astype(np.int64)
    return counts


def list_array(items: pa.Array, counts: NDArray[np.int64], kind: pa.DataType, mask: pa.Array | None) -> pa.Array:
    """An array of lists: so many of the items for each."""
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    if pa.types.is_large_list(kind):
        return pa.LargeListArray.from_arrays(pa.array(offsets), items, type=kind, mask=mask)
    if offsets[-1] > np.iinfo(np.int32).max:
        raise Misfit("more than 2^31 list items at once", remedy="fewer rows at a time, or pa.large_list in schema=")
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), items, type=kind, mask=mask)


# Python values


def pylist(values: Values) -> list[Any]:
    """Python values of a column: numbers, text, bytes, lists, dicts, None; NumPy arrays with memory of their own."""
    if not isinstance(values, Numbers):
        return _python(values)
    numbers, valid = values
    found: list[Any] = numbers.tolist() if numbers.ndim == 1 else list(numbers.copy())
    if valid is not None:
        found = [value if known else None for value, known in zip(found, valid.tolist(), strict=True)]
    return found


def _python(array: pa.Array) -> list[Any]:
    kind = array.type
    if not any(isinstance(inner, pa.FixedShapeTensorType) for inner in types_inside(kind)):
        return array.to_pylist()  # type: ignore[no-any-return]
    found: list[Any]
    if isinstance(kind, pa.FixedShapeTensorType):
        found = list(tensors_of(array).copy())
    elif pa.types.is_struct(kind):
        names = [field.name for field in kind]
        members = [_python(array.field(number)) for number in range(len(names))]
        found = [dict(zip(names, row, strict=True)) for row in zip(*members, strict=True)]
    elif is_list(kind):
        items, found, first = _python(items_of(array)), [], 0
        for count in counts_of(array).tolist():
            found.append(items[first : first + count])
            first += count
    else:  # a map of tensors, or a union: Arrow's own way, with flat lists
        return array.to_pylist()  # type: ignore[no-any-return]
    if array.null_count:
        known = array.is_valid().to_pylist()
        found = [value if is_known else None for value, is_known in zip(found, known, strict=True)]
    return found
