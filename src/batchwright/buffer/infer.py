"""Type inference. It finds the Arrow type that holds some Python values without loss."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from batchwright.buffer.plain_values import DTYPES, Misfit, describe

__all__ = ["infer"]

_NONE = type(None)
_GROUPS: dict[str, tuple[type, ...]] = {
    "bool": (bool, np.bool_),
    "number": (int, float, np.integer, np.floating),
    "text": (str,),
    "bytes": (bytes, bytearray, memoryview),
    "array": (np.ndarray,),
    "list": (list,),
    "dict": (dict,),
}


def infer(values: Sequence[Any]) -> pa.DataType:
    """The type that holds all of these (plain) values. Null if all of them are None."""
    known = [value for value in values if value is not None]
    kinds = set(map(type, known))
    groups = {_group(kind) for kind in kinds}
    if len(groups) > 1:
        first = _group(type(known[0]))
        other = next(value for value in known if _group(type(value)) != first)
        raise Misfit(
            "values of two types in one column",
            has=describe(known[0]),
            got=describe(other),
            remedy="one type in all rows, or two columns",
        )
    match groups.pop() if groups else None:
        case None:
            return pa.null()
        case "bool":
            return pa.bool_()
        case "number":
            return _type_of_numbers(kinds)
        case "text":
            return pa.string()
        case "bytes":
            return pa.binary()
        case "array":
            return _type_of_arrays(known)
        case "list":
            return pa.list_(_inside("[]", list(chain.from_iterable(known))))
        case "dict":
            return _type_of_dicts(known)
    return _type_of_others(known)


def _group(kind: type) -> str | type:
    """Types that fit in one column have one group."""
    if issubclass(kind, np.timedelta64):  # NumPy counts it among whole numbers
        return kind
    return next((group for group, bases in _GROUPS.items() if issubclass(kind, bases)), kind)


def _type_of_numbers(kinds: set[type]) -> pa.DataType:
    dtype = np.result_type(*map(_dtype_of, kinds))
    if dtype not in DTYPES:
        raise Misfit(f"numbers of {dtype} have no Arrow type", got=f"np.{dtype}", remedy="float(value)")
    return pa.from_numpy_dtype(dtype)


def _dtype_of(kind: type) -> np.dtype[Any]:
    if issubclass(kind, np.generic):
        return np.dtype(kind)
    return np.dtype(np.int64 if issubclass(kind, int) else np.float64)


def _inside(step: str, values: list[Any]) -> pa.DataType:
    try:
        return infer(values)
    except Misfit as misfit:
        raise misfit.inside(step) from None


def _type_of_arrays(arrays: list[Any]) -> pa.DataType:
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


def _type_of_dicts(rows: list[dict[Any, Any]]) -> pa.DataType:
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


def _type_of_others(values: list[Any]) -> pa.DataType:
    """Dates, decimals, UUIDs and other types that Arrow knows."""
    try:
        if isinstance(values[0], np.datetime64 | np.timedelta64):
            return pa.array(np.array(values)).type
        found = pa.array(values).type
        if pa.types.is_decimal128(found):  # as many digits before the point as later rows may have
            return pa.decimal128(38, found.scale)
        if pa.types.is_decimal256(found):
            return pa.decimal256(76, found.scale)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        found = pa.null()
    # Sets and other containers become lists, which would not come back as sets.
    if pa.types.is_nested(found) or pa.types.is_null(found):
        raise Misfit(
            f"a value that Arrow cannot hold: {describe(values[0])}",
            got=describe(values[0]),
            remedy="numbers, text, bytes, arrays, lists, dicts or None; an object's fields as a dict: vars(value)",
        )
    return found
