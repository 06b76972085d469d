"""Python values as a column of a given type, exactly: what the type cannot hold as it is, is refused.

Whole columns are checked by the set of their values' types, and made by one call of NumPy or Arrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from batchwright.buffer.convert import list_array, to_arrow
from batchwright.buffer.foreign import Misfit, describe
from batchwright.buffer.infer import is_list
from batchwright.buffer.schema import Field, Numbers, Values

__all__ = ["fit", "is_bytes", "is_text", "scalars", "tensors"]

_NONE = type(None)


def fit(values: Sequence[Any], field: Field) -> Values:
    """(Plain) values as a column."""
    if not field.nullable and any(value is None for value in values):
        raise Misfit("no value in a column that must have one", has=str(field), got="null", remedy="a value")
    numbers = field.numbers
    if numbers is None:
        return _fit_array(values, field.type)
    dtype, shape = numbers
    return tensors(values, dtype, shape) if shape else scalars(values, dtype)


def _misfit_of(values: Sequence[Any], accepted: tuple[type, ...], has: str, remedy: str) -> Misfit:
    wrong = next(value for value in values if value is not None and not isinstance(value, accepted))
    return Misfit("a value of another type", has=has, got=describe(wrong), remedy=remedy)


# Numbers


def scalars(values: Sequence[Any], dtype: np.dtype[Any]) -> Numbers:
    """Numbers of one dtype that holds each of them exactly; Python's floats are rounded to it."""
    kinds = set(map(type, values))
    valid = None
    if _NONE in kinds:
        kinds.discard(_NONE)
        valid = np.fromiter((value is not None for value in values), bool, len(values))
        values = [0 if value is None else value for value in values]
    for kind in kinds:
        if not _may_become(kind, dtype):
            wrong = next(value for value in values if type(value) is kind)
            raise Misfit("a value of another type", has=str(dtype), got=describe(wrong), remedy=_remedy(kind, dtype))
    if dtype.kind == "b":
        return Numbers(np.array(values, bool), valid)
    return Numbers(_exact(values, kinds, dtype), valid)


def _may_become(kind: type, dtype: np.dtype[Any]) -> bool:
    if issubclass(kind, bool | np.bool_):
        return dtype.kind == "b"
    if issubclass(kind, np.generic):  # before float: np.float64 is one
        return dtype.kind != "b" and np.dtype(kind) != object and np.can_cast(np.dtype(kind), dtype, "safe")
    if issubclass(kind, int):
        return dtype.kind in "iuf"
    return issubclass(kind, float) and dtype.kind == "f"


def _remedy(kind: type, dtype: np.dtype[Any]) -> str:
    if issubclass(kind, bool | np.bool_ | int | float | np.number):
        return f"np.{dtype}(value), where that is meant" if dtype.kind != "b" else "bool(value), where that is meant"
    return f"a number of type {dtype}, or a column of its own"


def _exact(values: Sequence[Any], kinds: set[type], dtype: np.dtype[Any]) -> np.ndarray:
    wide = np.dtype({"i": np.int64, "u": np.uint64, "f": np.float64}[dtype.kind])
    try:
        if dtype.kind == "u" and any(value < 0 for value in values):
            raise OverflowError
        made = np.array(values, wide)
    except OverflowError:
        limits = (0, 2**64) if dtype.kind == "u" else (-(2**63), 2**63)
        raise _too_large(next((v for v in values if not limits[0] <= v < limits[1]), values[0]), dtype) from None
    if dtype.kind == "f" and kinds != {float} and (np.abs(made) >= 2**53).any():
        for value, number in zip(values, made.tolist(), strict=True):  # whole numbers that a double has no place for
            if isinstance(value, int | np.integer) and int(number) != int(value):
                raise _too_large(value, dtype)
    if wide == dtype:
        return made
    with np.errstate(over="ignore"):
        narrow = made.astype(dtype)
    is_same = narrow == made
    if dtype.kind == "f":
        is_same |= np.isnan(made)
        if float in kinds:  # Python's floats have no type to keep: they are rounded, but do not become infinite
            is_same |= np.isfinite(narrow) & np.fromiter((type(value) is float for value in values), bool, len(values))
    if not is_same.all():
        raise _too_large(values[int(np.argmin(is_same))], dtype)
    return narrow


def _too_large(value: Any, dtype: np.dtype[Any]) -> Misfit:
    return Misfit(
        f"{dtype} cannot hold {value!r} exactly",
        has=str(dtype),
        got=describe(value),
        remedy=f"np.{dtype}(value), where rounding is meant" if dtype.kind == "f" else "a smaller number, or text",
    )


def tensors(values: Sequence[Any], dtype: np.dtype[Any], shape: tuple[int, ...]) -> Numbers:
    """Arrays of exactly one dtype and shape, as one."""
    valid = None
    if any(value is None for value in values):
        valid = np.fromiter((value is not None for value in values), bool, len(values))
        nothing = np.zeros(shape, dtype)
        values = [nothing if value is None else value for value in values]
    for value in values:
        if type(value) is not np.ndarray or value.dtype != dtype or value.shape != shape:
            has = f"{dtype}{list(shape)}"
            raise Misfit(
                "an array of another shape or type", has=has, got=describe(value), remedy=_to_tensor(value, has)
            )
    if len(values) == 1:
        return Numbers(np.ascontiguousarray(values[0])[None], valid)
    if not values:
        return Numbers(np.empty((0, *shape), dtype), valid)
    return Numbers(np.concatenate(values).reshape(len(values), *shape), valid)  # several times faster than np.stack


def _to_tensor(value: Any, has: str) -> str:
    dtype = has.partition("[")[0]
    if type(value) is not np.ndarray:
        return f"np.asarray(value, np.{dtype}), of shape {has.removeprefix(dtype)}"
    return f"array.astype(np.{dtype})" if str(value.dtype) != dtype else f"an array of shape {has.removeprefix(dtype)}"


# All other types


def is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))


def _fit_array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """(Plain) values as an Arrow array of exactly this type."""
    if is_text(kind) or is_bytes(kind):
        return _texts(values, kind)
    numbers = Field("", kind).numbers
    if numbers is not None:
        dtype, shape = numbers
        made = tensors(values, dtype, shape) if shape else scalars(values, dtype)
        if shape and len(values) == 1:  # the user's own memory, which Arrow would share
            made = Numbers(made.values.copy(), made.valid)
        return to_arrow(Field("", kind), made)
    if pa.types.is_struct(kind):
        return _structs(values, kind)
    if is_list(kind):
        return _lists(values, kind)
    return _others(values, kind)


def _texts(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    accepted: tuple[type, ...] = (bytes, bytearray, memoryview) if is_bytes(kind) else (str,)
    remedy = "bytes, e.g. text.encode()" if is_bytes(kind) else "str(value), where that is meant"
    if not all(issubclass(found, accepted) for found in set(map(type, values)) - {_NONE}):
        raise _misfit_of(values, accepted, str(kind), remedy)
    try:
        made = pa.array(values, kind)
    except UnicodeEncodeError as error:
        raise Misfit(
            f"text that is not Unicode: a lone surrogate at character {error.start}",
            has=str(kind),
            got="str",
            remedy='text.encode("utf-8", "replace").decode(), or bytes',
        ) from None
    except (pa.ArrowException, TypeError, ValueError) as error:  # e.g. a memoryview with gaps
        raise Misfit(_first_line(error), has=str(kind), got=describe(values[0]), remedy=remedy) from None
    if isinstance(made, pa.ChunkedArray):
        raise Misfit("more than 2 GiB in one column at once", has=str(kind), remedy="fewer rows at a time")
    return made


def _mask(values: Sequence[Any]) -> pa.Array | None:
    is_null = [value is None for value in values]
    return pa.array(is_null) if any(is_null) else None


def _structs(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    names = [field.name for field in kind]
    if not all(issubclass(found, dict) for found in set(map(type, values)) - {_NONE}):
        raise _misfit_of(values, (dict,), str(kind), f"a dict with {', '.join(names)}")
    known = [value for value in values if value is not None]
    for name in set().union(*known) - set(names):
        if not isinstance(name, str) or not name:
            raise Misfit(f"a dict with the key {name!r}", has=str(kind), got=f"key {name!r}", remedy="keys of type str")
        raise Misfit(
            f"a dict with a member that the column does not have: {name!r}",
            has=str(kind),
            got=f"dict with {', '.join(map(repr, next(row for row in known if name in row)))}",
            remedy="leave it out, or give it a column of its own",
        )
    children = []
    for field in kind:
        members = [None if value is None else value.get(field.name) for value in values]
        _check_nulls(field, known, f".{field.name}")
        children.append(_inside(f".{field.name}", members, field.type))
    return pa.StructArray.from_arrays(children, fields=list(kind), mask=_mask(values))


def _check_nulls(field: pa.Field, parents: Sequence[Any], step: str) -> None:
    if not field.nullable and any(parent.get(field.name) is None for parent in parents):
        raise Misfit("no value where there must be one", path=step, has=str(field.type), got="null", remedy="a value")


def _lists(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    if not all(issubclass(found, list | np.ndarray) for found in set(map(type, values)) - {_NONE}):
        raise _misfit_of(values, (list, np.ndarray), str(kind), "a list")
    counts = np.fromiter((0 if value is None else len(value) for value in values), np.int64, len(values))
    known = [value for value in values if value is not None]
    mask = _mask(values)
    if pa.types.is_fixed_size_list(kind):
        for value in known:
            if len(value) != kind.list_size:
                raise Misfit(
                    "a list of another length",
                    has=str(kind),
                    got=f"list of {len(value)}",
                    remedy=f"{kind.list_size} items, or pa.list_(...) without a size in schema=",
                )
        if mask is not None:
            known = [[None] * kind.list_size if value is None else value for value in values]
        return pa.FixedSizeListArray.from_arrays(_items(known, kind), type=kind, mask=mask)
    return list_array(_items(known, kind), counts, kind, mask)


def _items(lists: list[Any], kind: pa.DataType) -> pa.Array:
    dtype = Field("", kind.value_type).numbers
    if dtype is not None and not dtype[1] and lists:
        dtypes = {value.dtype if type(value) is np.ndarray and value.ndim == 1 else None for value in lists}
        if dtypes == {dtype[0]}:
            return pa.array(np.concatenate(lists), kind.value_type)
    items = list(chain.from_iterable(lists))
    if not kind.value_field.nullable and any(item is None for item in items):
        raise Misfit("no value where there must be one", path="[]", has=str(kind), got="null", remedy="a value")
    return _inside("[]", items, kind.value_type)


def _inside(step: str, values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    try:
        return _fit_array(values, kind)
    except Misfit as misfit:
        raise misfit.inside(step) from None


def _others(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Dates, decimals, dictionaries: whatever Arrow makes of them, if it gives back the same values."""
    first = next((value for value in values if value is not None), None)
    refused = Misfit("a value of another type", has=str(kind), got=describe(first), remedy=f"a value of type {kind}")
    try:
        if isinstance(first, np.datetime64 | np.timedelta64):
            return _dates(values, kind, refused)
        if pa.types.is_map(kind):  # pairs, which are lists by now
            values = [None if value is None else [tuple(pair) for pair in value] for value in values]
        made = pa.array(values, kind)
        back = made.to_pylist()
        is_same = len(back) == len(values) and all(map(_is_same, back, values))
    except (pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError):
        raise refused from None
    if not is_same or isinstance(made, pa.ChunkedArray):
        raise refused
    return made


def _is_same(back: Any, value: Any) -> bool:
    if back is None or value is None:
        return back is value
    return isinstance(value, type(back)) and bool(back == value)


def _dates(values: Sequence[Any], kind: pa.DataType, refused: Misfit) -> pa.Array:
    if not all(value is None or isinstance(value, np.datetime64 | np.timedelta64) for value in values):
        raise refused
    nothing = type(next(value for value in values if value is not None))("NaT")
    made = pa.array(np.array([nothing if value is None else value for value in values]))
    if made.type != kind:
        raise refused
    return made


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
