"""Python values as a typed column: the Arrow type that holds them without loss, and a column of a given type.

A value that the type cannot hold is refused. Whole columns are checked by the set of their values' types, and made by
one call of NumPy or Arrow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from batchwright.base.words import first_line
from batchwright.buffer import kinds
from batchwright.buffer.arrow import to_arrow
from batchwright.buffer.plain_values import DTYPES, Misfit, describe, is_name
from batchwright.buffer.schema import Field, Numbers, Values

# Inference of types


_NONE = type(None)


def infer(values: Sequence[Any]) -> pa.DataType:
    """The type that holds all of these (plain) values. Null if all of them are None."""
    known = [value for value in values if value is not None]
    groups = {_group(kind) for kind in set(map(type, known))}
    if not groups:
        return pa.null()
    if len(groups) > 1:
        first = _group(type(known[0]))
        other = next(value for value in known if _group(type(value)) != first)
        what, remedy = "values of two types in one column", "one type in all rows, or two columns"
        raise Misfit(what, has=describe(known[0]), got=describe(other), remedy=remedy)
    group = groups.pop()
    if isinstance(group, type):
        return _type_of_others(known)
    return group(known)


def _group(kind: type) -> type | Callable[[list[Any]], pa.DataType]:
    """What finds the type of these values, the same for types that fit in one column; else the class itself."""
    if issubclass(kind, np.timedelta64):  # NumPy counts it among whole numbers
        return kind
    return next((type_of for bases, type_of in _GROUPS if issubclass(kind, bases)), kind)


def _inside(step: str, make: Callable[[], pa.DataType | pa.Array]) -> Any:
    """What is made of the values inside of others. An error names the way to them."""
    try:
        return make()
    except Misfit as misfit:
        raise misfit.inside(step) from None


def _type_of_numbers(numbers: list[Any]) -> pa.DataType:
    dtype = np.result_type(*map(_dtype_of, set(map(type, numbers))))
    if dtype not in DTYPES:
        raise Misfit(f"numbers of {dtype} have no Arrow type", got=f"np.{dtype}", remedy="float(value)")
    return pa.from_numpy_dtype(dtype)


def _dtype_of(kind: type) -> np.dtype[Any]:
    if issubclass(kind, np.generic):
        return np.dtype(kind)
    return np.dtype(np.int64 if issubclass(kind, int) else np.float64)


def _type_of_arrays(arrays: list[Any]) -> pa.DataType:
    first = arrays[0]
    for array in arrays:
        if array.dtype != first.dtype or array.shape != first.shape:
            what, remedy = "arrays of two shapes or dtypes in one column", "pad to one shape, or lists: array.tolist()"
            raise Misfit(what, has=describe(first), got=describe(array), remedy=remedy)
    return pa.fixed_shape_tensor(pa.from_numpy_dtype(first.dtype), first.shape)


def _type_of_lists(lists: list[Any]) -> pa.DataType:
    items = list(chain.from_iterable(lists))
    return pa.list_(_inside("[]", lambda: infer(items)))


def _type_of_dicts(rows: list[dict[Any, Any]]) -> pa.DataType:
    names = dict.fromkeys(chain.from_iterable(rows))
    if not names:
        raise Misfit("an empty dict has no type", got="{}", remedy="None, or leave the column out")
    members = []
    for name in names:
        if not is_name(name):
            what, got = f"a dict with the key {name!r}: keys are names, not empty", f"key of type {type(name).__name__}"
            raise Misfit(what, got=got, remedy="keys of type str, or a list of pairs")
        values = [row.get(name) for row in rows]
        members.append((name, _inside(f".{name}", partial(infer, values))))
    return pa.struct(members)


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
        got = describe(values[0])
        remedy = "numbers, text, bytes, arrays, lists, dicts or None; an object's fields as a dict: vars(value)"
        raise Misfit(f"a value that Arrow cannot hold: {got}", got=got, remedy=remedy)
    return found


_GROUPS: tuple[tuple[tuple[type, ...], Callable[[list[Any]], pa.DataType]], ...] = (
    ((bool, np.bool_), lambda values: pa.bool_()),
    ((int, float, np.integer, np.floating), _type_of_numbers),
    ((str,), lambda values: pa.string()),
    ((bytes, bytearray, memoryview), lambda values: pa.binary()),
    ((np.ndarray,), _type_of_arrays),
    ((list,), _type_of_lists),
    ((dict,), _type_of_dicts),
)


# Columns of a given type


_PYTHONS_OWN = {np.dtype(np.int64): int, np.dtype(np.float64): float, np.dtype(bool): bool}
_WIDEST = {"b": bool, "i": np.int64, "u": np.uint64, "f": np.float64}


def fit(values: Sequence[Any], field: Field) -> Values:
    """(Plain) values as a column."""
    _check_nulls(values, str(field), field.nullable)
    if field.numbers is not None:
        return _numbers(values, *field.numbers)
    return _array(values, field.type)


def _check_nulls(values: Sequence[Any], has: str, nullable: bool) -> None:
    if not nullable and any(value is None for value in values):
        raise Misfit("no value where there must be one", has=has, got="null", remedy="a value")


def _check_types(values: Sequence[Any], accepted: tuple[type, ...], has: str, remedy: str) -> None:
    if all(issubclass(kind, accepted) for kind in set(map(type, values)) - {_NONE}):
        return
    wrong = next(value for value in values if value is not None and not isinstance(value, accepted))
    raise Misfit("a value of another type", has=has, got=describe(wrong), remedy=remedy)


def _filled(values: Sequence[Any], nothing: Any) -> list[Any]:
    """The values, with something in place of None."""
    return [nothing if value is None else value for value in values]


# Numbers


def _numbers(values: Sequence[Any], dtype: np.dtype[Any], shape: tuple[int, ...]) -> Numbers:
    valid, classes = None, set(map(type, values))
    if _NONE in classes:
        valid = np.fromiter((value is not None for value in values), bool, len(values))
        nothing = np.zeros(shape, dtype) if shape else dtype.type(0).item()
        values = _filled(values, nothing)
        classes = set(map(type, values))
    if shape:
        return Numbers(_tensors(values, dtype, shape), valid)
    return Numbers(_scalars(values, classes, dtype), valid)


def _scalars(values: Sequence[Any], classes: set[type], dtype: np.dtype[Any]) -> np.ndarray:
    """Numbers of one dtype that holds each of them exactly; Python's floats are rounded to it."""
    others = classes - {dtype.type, _PYTHONS_OWN.get(dtype)}
    for kind in others:
        if not _may_become(kind, dtype):
            wrong = next(value for value in values if type(value) is kind)
            raise Misfit("a value of another type", has=str(dtype), got=describe(wrong), remedy=_remedy(kind, dtype))
    try:
        if not others:
            return np.array(values, dtype)
        made = np.array(values, _WIDEST[dtype.kind])
    except OverflowError:
        raise _too_large(max(values, key=abs), dtype) from None
    with np.errstate(over="ignore"):
        made = made.astype(dtype)
    for value, number in zip(values, made.tolist(), strict=True):
        if not _is_exact(value, number):
            raise _too_large(value, dtype)
    return made


def _is_exact(value: Any, number: float) -> bool:
    """Whether a value became this number. Python's floats have no type to keep: they may be rounded."""
    if isinstance(value, np.generic):
        value = value.item()
    elif type(value) is float and np.isfinite(number):
        return True
    return bool(value == number or value != value)


def _may_become(kind: type, dtype: np.dtype[Any]) -> bool:
    if issubclass(kind, bool | np.bool_):
        return dtype.kind == "b"
    if issubclass(kind, np.generic):  # before float: np.float64 is one
        return dtype.kind != "b" and np.can_cast(np.dtype(kind), dtype, "safe")
    if issubclass(kind, int):
        return dtype.kind in "iuf"
    return issubclass(kind, float) and dtype.kind == "f"


def _remedy(kind: type, dtype: np.dtype[Any]) -> str:
    if not issubclass(kind, bool | np.bool_ | int | float | np.number):
        return f"a number of type {dtype}, or a column of its own"
    return f"np.{dtype}(value), where that is meant"


def _too_large(value: Any, dtype: np.dtype[Any]) -> Misfit:
    remedy = "a smaller number, or text"
    if dtype.kind == "f":
        remedy = f"np.{dtype}(value), where rounding is meant"
    return Misfit(f"{dtype} cannot hold {value!r} exactly", has=str(dtype), got=describe(value), remedy=remedy)


def _tensors(values: Sequence[Any], dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
    """Arrays of exactly one dtype and shape, as one."""
    for value in values:
        if type(value) is not np.ndarray or value.dtype != dtype or value.shape != shape:
            has, remedy = f"{dtype}{list(shape)}", f"np.asarray(value, np.{dtype}), of shape {list(shape)}"
            raise Misfit("an array of another shape or type", has=has, got=describe(value), remedy=remedy)
    if not values:
        return np.empty((0, *shape), dtype)
    return np.concatenate(values).reshape(len(values), *shape)  # several times faster than np.stack


# All other types


def _array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """(Plain) values as an Arrow array of exactly this type."""
    if kinds.is_text(kind) or kinds.is_bytes(kind):
        return _texts(values, kind)
    numbers = kinds.numbers_of(kind)
    if numbers is not None:
        return to_arrow(Field("", kind), _numbers(values, *numbers))
    if pa.types.is_struct(kind):
        return _structs(values, kind)
    if kinds.is_list(kind):
        return _lists(values, kind)
    return _others(values, kind)


def _member(step: str, values: Sequence[Any], field: pa.Field, parents: Sequence[Any]) -> pa.Array:
    """The values inside of structs or lists; `parents` are those that must be there, where the field says so."""

    def make() -> pa.Array:
        _check_nulls(parents, str(field.type), field.nullable)
        return _array(values, field.type)

    return _inside(step, make)


def _texts(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    if kinds.is_text(kind):
        accepted: tuple[type, ...] = (str,)
        remedy = "str(value), where that is meant"
    else:
        accepted, remedy = (bytes, bytearray, memoryview), "bytes, e.g. text.encode()"
    _check_types(values, accepted, str(kind), remedy)
    try:
        made = pa.array(values, kind)
    except (pa.ArrowException, TypeError, ValueError) as error:  # a lone surrogate, a memoryview with gaps
        got, remedy = describe(values[-1]), 'text.encode("utf-8", "replace").decode(), or bytes(value)'
        raise Misfit(first_line(error), has=str(kind), got=got, remedy=remedy) from None
    if isinstance(made, pa.ChunkedArray):
        raise Misfit("more than 2 GiB in one column at once", has=str(kind), remedy="fewer rows at a time")
    return made


def _null_mask(values: Sequence[Any]) -> pa.Array:
    return pa.array([value is None for value in values], pa.bool_())


def _structs(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    _check_types(values, (dict,), str(kind), f"a dict with {', '.join(kind.names)}")
    known = [value for value in values if value is not None]
    for name in set().union(*known) - set(kind.names):
        keys = ", ".join(map(repr, next(row for row in known if name in row)))
        what, remedy = f"a member that the column does not have: {name!r}", "leave it out, or make it a column"
        raise Misfit(what, has=str(kind), got=f"dict with {keys}", remedy=remedy)
    children = []
    for field in kind:
        members = [value.get(field.name) for value in _filled(values, {})]
        children.append(_member(f".{field.name}", members, field, [value.get(field.name) for value in known]))
    return pa.StructArray.from_arrays(children, fields=list(kind), mask=_null_mask(values))


def _lists(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    _check_types(values, (list, np.ndarray), str(kind), "a list")
    if pa.types.is_fixed_size_list(kind):
        return _fixed_lists(values, kind)
    ends = np.cumsum([0, *map(len, _filled(values, ()))])
    items = _items([value for value in values if value is not None], kind)
    if pa.types.is_large_list(kind):
        return pa.LargeListArray.from_arrays(pa.array(ends), items, type=kind, mask=_null_mask(values))
    if ends[-1] > np.iinfo(np.int32).max:
        raise Misfit("more than 2^31 list items at once", remedy="fewer rows at a time, or pa.large_list in schema=")
    return pa.ListArray.from_arrays(pa.array(ends.astype(np.int32)), items, type=kind, mask=_null_mask(values))


def _fixed_lists(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    known = [value for value in values if value is not None]
    for value in known:
        if len(value) != kind.list_size:
            remedy = f"{kind.list_size} items, or pa.list_(...) without a size in schema="
            raise Misfit("a list of another length", has=str(kind), got=f"list of {len(value)}", remedy=remedy)
    filled = _filled(values, [None] * kind.list_size)
    items = _member("[]", list(chain.from_iterable(filled)), kind.value_field, list(chain.from_iterable(known)))
    return pa.FixedSizeListArray.from_arrays(items, type=kind, mask=_null_mask(values))


def _items(lists: list[Any], kind: pa.DataType) -> pa.Array:
    """The items of some lists, one after the other. Arrays of the right type are joined without further checks."""
    numbers = kinds.numbers_of(kind.value_type)
    if lists and all(type(value) is np.ndarray and (value.dtype, value.shape[1:]) == numbers for value in lists):
        return to_arrow(Field("", kind.value_type), Numbers(np.concatenate(lists)))
    items = list(chain.from_iterable(lists))
    return _member("[]", items, kind.value_field, items)


def _others(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Dates, decimals, maps: what Arrow makes of them, if it gives back the same values."""
    first = next((value for value in values if value is not None), None)
    refused = Misfit("a value of another type", has=str(kind), got=describe(first), remedy=f"a value of type {kind}")
    try:
        if isinstance(first, np.datetime64 | np.timedelta64):
            made = pa.array(np.array(_filled(values, type(first)("NaT"))))
            is_same = made.type == kind
        else:
            if pa.types.is_map(kind):  # pairs, already turned into lists
                values = [value and [tuple(pair) for pair in value] for value in values]
            made = pa.array(values, kind)
            pairs = zip(made.to_pylist(), values, strict=True)
            is_same = all(isinstance(value, type(back)) and back == value for back, value in pairs)
    except (pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError):
        raise refused from None
    if not is_same or isinstance(made, pa.ChunkedArray):
        raise refused
    return made
