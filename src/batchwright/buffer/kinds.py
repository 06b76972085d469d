"""Types of columns: what an Arrow type holds, how it is laid out, and which values of another type it takes."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from batchwright.columns.arrow import numpy_dtype

is_a = pa.types

_WITHOUT_VIEWS = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}


def is_text(kind: pa.DataType) -> bool:
    return bool(is_a.is_string(kind) or is_a.is_large_string(kind) or is_a.is_string_view(kind))


def is_bytes(kind: pa.DataType) -> bool:
    return bool(is_a.is_binary(kind) or is_a.is_large_binary(kind) or is_a.is_binary_view(kind))


def is_list(kind: pa.DataType) -> bool:
    return bool(is_a.is_list(kind) or is_a.is_large_list(kind) or is_a.is_fixed_size_list(kind))


def is_tensor(kind: pa.DataType) -> bool:
    return isinstance(kind, pa.FixedShapeTensorType)


def numbers_of(kind: pa.DataType) -> tuple[np.dtype[Any], tuple[int, ...]] | None:
    """The dtype and shape of numbers (or tensors of numbers); None of other types."""
    shape: tuple[int, ...] = ()
    if is_tensor(kind):
        kind, shape = kind.value_type, tuple(kind.shape)
    dtype = numpy_dtype(kind)
    if dtype is None:
        return None
    return dtype, shape


def types_inside(kind: pa.DataType) -> list[pa.DataType]:
    """A type and the types inside it. What tensors and other extensions are stored as does not count."""
    if isinstance(kind, pa.BaseExtensionType) or not is_a.is_nested(kind):
        return [kind]
    inner = [kind.field(number).type for number in range(kind.num_fields)]
    return [kind, *chain.from_iterable(map(types_inside, inner))]


def merge(old: pa.DataType, new: pa.DataType) -> pa.DataType:
    """The old type, with parts of the new type in place of unknown parts."""
    if is_a.is_null(old):
        return new
    if is_a.is_struct(old) and is_a.is_struct(new):
        members = {field.name: field.type for field in new}
        return pa.struct([field.with_type(merge(field.type, members.get(field.name, field.type))) for field in old])
    if is_list(old) and is_list(new):
        return _list_of(old, merge(old.value_type, new.value_type))
    return old


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type of the values, however they are laid out in memory.

    Dictionaries, runs and views are ways to store the same values, and so is the order of a tensor's axes.
    """
    if is_tensor(kind):
        axes = kind.permutation or range(len(kind.shape))
        return pa.fixed_shape_tensor(kind.value_type, [kind.shape[axis] for axis in axes])
    if is_a.is_dictionary(kind) or is_a.is_run_end_encoded(kind):
        return plain_type(kind.value_type)
    if kind in _WITHOUT_VIEWS:
        return _WITHOUT_VIEWS[kind]
    if is_a.is_struct(kind):
        return pa.struct([field.with_type(plain_type(field.type)) for field in kind])
    if is_list(kind) or is_a.is_list_view(kind) or is_a.is_large_list_view(kind):
        return _list_of(kind, plain_type(kind.value_type))
    return kind


def _list_of(kind: pa.DataType, items: pa.DataType) -> pa.DataType:
    """A list type with other items."""
    item = kind.value_field.with_type(items)
    if is_a.is_fixed_size_list(kind):
        return pa.list_(item, kind.list_size)
    if is_a.is_large_list(kind) or is_a.is_large_list_view(kind):
        return pa.large_list(item)
    return pa.list_(item)


def holds(kind: pa.DataType, other: pa.DataType) -> bool:
    """Whether values of the `other` type are values of this one. (Integers may still be too large for a float.)

    >>> holds(pa.int64(), pa.int32()), holds(pa.int64(), pa.float64()), holds(pa.string(), pa.large_string())
    (True, False, True)
    """
    other = plain_type(other)
    if other == kind or is_a.is_null(other):
        return True
    if is_a.is_struct(other) and is_a.is_struct(kind):
        members = {field.name: field.type for field in kind}
        return all(field.name in members and holds(members[field.name], field.type) for field in other)
    if is_list(other) and is_list(kind):
        return holds(kind.value_type, other.value_type)
    for is_alike in (is_text, is_bytes):
        if is_alike(other):
            return is_alike(kind)
    return _holds_numbers(numpy_dtype(kind), numpy_dtype(other))


def _holds_numbers(dtype: np.dtype[Any] | None, other: np.dtype[Any] | None) -> bool:
    if dtype is None or other is None:
        return False
    return (dtype.kind == "b") == (other.kind == "b") and np.can_cast(other, dtype, "safe")
