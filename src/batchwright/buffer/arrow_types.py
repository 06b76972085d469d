"""Classes of Arrow types: lists, text and numbers, the values that a type holds, and partly known types."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

__all__ = [
    "has_null",
    "holds",
    "is_bytes",
    "is_list",
    "is_tensor",
    "is_text",
    "merge",
    "numbers_of",
    "plain_type",
    "types_inside",
]

is_a = pa.types

_DTYPES = {
    **{name: np.dtype(name) for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")},
    "bool": np.dtype(bool),
    "halffloat": np.dtype("f2"),
    "float": np.dtype("f4"),
    "double": np.dtype("f8"),
}
"""NumPy dtypes by Arrow's names of types."""


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
    dtype = _DTYPES.get(str(kind))
    return None if dtype is None else (dtype, shape)


def types_inside(kind: pa.DataType) -> list[pa.DataType]:
    """A type and the types inside it. What tensors and other extensions are stored as does not count."""
    if isinstance(kind, pa.BaseExtensionType) or not is_a.is_nested(kind):
        return [kind]
    inner = [kind.field(number).type for number in range(kind.num_fields)]
    return [kind, *chain.from_iterable(map(types_inside, inner))]


def has_null(kind: pa.DataType) -> bool:
    """Whether some part of the type is not known yet: `null`, `list<null>`, `struct<a: null>`."""
    return any(map(is_a.is_null, types_inside(kind)))


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
    if is_a.is_string_view(kind):
        return pa.large_string()
    if is_a.is_binary_view(kind):
        return pa.large_binary()
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
    if is_text(other) or is_bytes(other):
        return (is_text(other), is_bytes(other)) == (is_text(kind), is_bytes(kind))
    mine, theirs = numbers_of(kind), numbers_of(other)
    if mine is None or theirs is None or mine[1] or theirs[1]:
        return False
    return (mine[0].kind == "b") == (theirs[0].kind == "b") and np.can_cast(theirs[0], mine[0], "safe")
