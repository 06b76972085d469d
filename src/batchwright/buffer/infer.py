"""The Arrow type of Python values, such that all of them come back as they were."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from batchwright.buffer.foreign import DTYPES, Misfit, describe

__all__ = ["has_null", "infer", "is_list", "merge", "types_inside"]

_NONE = type(None)
_LEAVES = {bool: pa.bool_(), float: pa.float64(), str: pa.string(), bytes: pa.binary()}


def infer(values: Sequence[Any]) -> pa.DataType:
    """The type that holds all of these (plain) values; null where all of them are None."""
    kinds = set(map(type, values))
    kinds.discard(_NONE)
    if not kinds:
        return pa.null()
    if len(kinds) == 1:
        (kind,) = kinds
        if kind in _LEAVES:
            return _LEAVES[kind]
        if kind is int:
            return pa.int64()
    groups = {_group(kind): kind for kind in kinds}
    if len(groups) > 1:
        first = next(value for value in values if value is not None)
        other = next(value for value in values if value is not None and _group(type(value)) != _group(type(first)))
        raise Misfit(
            "values of two types in one column",
            has=describe(first),
            got=describe(other),
            remedy="one type in all rows, or two columns",
        )
    (group,) = groups
    known = [value for value in values if value is not None]
    if group == "number":
        dtype = np.result_type(*map(_dtype_of, kinds))
        if dtype not in DTYPES:
            raise Misfit(f"numbers of {dtype} have no Arrow type", got=f"np.{dtype}", remedy="float(value)")
        return pa.from_numpy_dtype(dtype)
    if group == "array":
        return _infer_tensor(known)
    if group == "list":
        return pa.list_(_inside("[]", list(chain.from_iterable(known))))
    if group == "dict":
        return _infer_struct(known)
    if isinstance(group, str):
        return {"bool": pa.bool_(), "str": pa.string(), "bytes": pa.binary()}[group]
    return _infer_other(known)


def _group(kind: type) -> str | type:
    """Types that fit in one column have one group."""
    if issubclass(kind, bool | np.bool_):
        return "bool"
    if issubclass(kind, np.timedelta64):  # NumPy counts it among whole numbers
        return kind
    if issubclass(kind, int | float | np.integer | np.floating):
        return "number"
    for group, bases in _GROUPS.items():
        if issubclass(kind, bases):
            return group
    return kind


_GROUPS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "bytes": (bytes, bytearray, memoryview),
    "array": (np.ndarray,),
    "list": (list,),
    "dict": (dict,),
}


def _dtype_of(kind: type) -> np.dtype[Any]:
    if issubclass(kind, np.generic):
        return np.dtype(kind)
    return np.dtype(np.int64 if issubclass(kind, int) else np.float64)


def _inside(step: str, values: list[Any]) -> pa.DataType:
    try:
        return infer(values)
    except Misfit as misfit:
        raise misfit.inside(step) from None


def _infer_tensor(arrays: list[Any]) -> pa.DataType:
    first = arrays[0]
    dtype, shape = first.dtype, first.shape
    for array in arrays:
        if array.dtype != dtype or array.shape != shape:
            raise Misfit(
                "arrays of two shapes or dtypes in one column",
                has=describe(first),
                got=describe(array),
                remedy="pad to one shape, or give lists: array.tolist()",
            )
    return pa.fixed_shape_tensor(pa.from_numpy_dtype(dtype), shape)


def _infer_struct(rows: list[dict[Any, Any]]) -> pa.DataType:
    names = dict.fromkeys(chain.from_iterable(rows))
    if not names:
        raise Misfit("an empty dict has no type", got="{}", remedy="None, or leave the column out")
    for name in names:
        if not isinstance(name, str) or not name or any("\ud800" <= letter <= "\udfff" for letter in name):
            raise Misfit(
                f"a dict with the key {name!r}: keys are names, not empty",
                got=f"key of type {type(name).__name__}",
                remedy="keys of type str, or a list of pairs",
            )
    return pa.struct([(name, _inside(f".{name}", [row.get(name) for row in rows])) for name in names])


def _infer_other(values: list[Any]) -> pa.DataType:
    """Dates, decimals, UUIDs and what else Arrow knows."""
    try:
        if isinstance(values[0], np.datetime64 | np.timedelta64):
            return pa.array(np.array(values)).type
        found = pa.array(values).type
        if pa.types.is_decimal(found):  # as many digits before the point as later rows may have
            found = pa.decimal128(38, found.scale) if found.precision <= 38 else pa.decimal256(76, found.scale)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        found = None
    # Sets and other containers become lists that do not come back as what they were.
    if found is None or pa.types.is_nested(found) or pa.types.is_null(found):
        raise Misfit(
            f"a value that Arrow cannot hold: {describe(values[0])}",
            got=describe(values[0]),
            remedy="numbers, text, bytes, arrays, lists, dicts or None; an object's fields as a dict: vars(value)",
        )
    return found


# Types that are not whole yet


def is_list(kind: pa.DataType) -> bool:
    """Whether values are lists, each with its own offset or of one size."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def types_inside(kind: pa.DataType) -> list[pa.DataType]:
    """A type and all that it is made of, but not what tensors and other extensions are stored as."""
    inner = []
    if not isinstance(kind, pa.BaseExtensionType) and pa.types.is_nested(kind):
        inner = [kind.field(number).type for number in range(kind.num_fields)]
    return [kind, *chain.from_iterable(map(types_inside, inner))]


def has_null(kind: pa.DataType) -> bool:
    """Whether a part of the type is still to be known: `null`, `list<null>`, `struct<a: null>`."""
    return any(map(pa.types.is_null, types_inside(kind)))


def merge(old: pa.DataType, new: pa.DataType) -> pa.DataType:
    """The old type, with the new one in the places where nothing was known."""
    if pa.types.is_null(old):
        return new
    if pa.types.is_struct(old) and pa.types.is_struct(new):
        members = {field.name: field.type for field in new}
        return pa.struct([field.with_type(merge(field.type, members.get(field.name, field.type))) for field in old])
    if is_list(old) and is_list(new):
        item = old.value_field.with_type(merge(old.value_type, new.value_type))
        if pa.types.is_fixed_size_list(old):
            return pa.list_(item, old.list_size)
        return pa.large_list(item) if pa.types.is_large_list(old) else pa.list_(item)
    return old
