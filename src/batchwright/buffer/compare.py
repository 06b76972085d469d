"""Comparison of values. Null equals null, and NaN equals NaN."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from batchwright.buffer.arrow import pylist
from batchwright.buffer.schema import Numbers, Values

__all__ = ["equal_rows", "has_value"]


def equal_rows(values: Values, others: Values) -> NDArray[np.bool_]:
    """The mask of equal rows of two columns. The second one may be a single row, which all rows are compared with."""
    there, others_there = has_value(values), has_value(others)
    if isinstance(values, Numbers) and isinstance(others, Numbers):
        equal = _equal_numbers(values.values, others.values)
    elif isinstance(values, Numbers) or isinstance(others, Numbers):
        equal = np.zeros(len(there), bool)  # the type of one of them is not known: it has no values
    else:
        equal = _equal_arrays(values, others)
    return (equal & there & others_there) | ~(there | others_there)


def has_value(values: Values) -> NDArray[np.bool_]:
    if isinstance(values, Numbers):
        return values.has_value
    return values.is_valid().to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def _equal_numbers(values: NDArray[Any], others: NDArray[Any]) -> NDArray[np.bool_]:
    same: NDArray[np.bool_] = np.asarray(values == others)
    if values.dtype.kind == "f":
        same |= np.isnan(values) & np.isnan(others)
    return np.asarray(same.all(axis=tuple(range(1, same.ndim))))


def _equal_arrays(values: pa.Array, others: pa.Array) -> NDArray[np.bool_]:
    is_single = len(others) == 1 != len(values)
    if not pa.types.is_nested(values.type) and not isinstance(values.type, pa.BaseExtensionType):
        try:
            equal = pc.equal(values, others[0] if is_single else others)
            return equal.fill_null(False).to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]
        except pa.ArrowNotImplementedError:
            pass  # types that Arrow does not compare: as Python values
    listed = pylist(others)
    if is_single:
        listed *= len(values)
    return np.fromiter(map(_is_equal, pylist(values), listed), bool, len(values))


def _is_equal(value: Any, other: Any) -> bool:
    """Whether two Python values of one column are the same."""
    match other:
        case np.ndarray():
            return isinstance(value, np.ndarray) and np.array_equal(value, other, equal_nan=other.dtype.kind == "f")
        case dict():
            is_alike = isinstance(value, dict) and value.keys() == other.keys()
            return is_alike and all(_is_equal(value[name], member) for name, member in other.items())
        case list():
            return isinstance(value, list) and len(value) == len(other) and all(map(_is_equal, value, other))
    return type(value) is type(other) and bool(value == other or (value != value and other != other))
