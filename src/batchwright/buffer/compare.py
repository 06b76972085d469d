"""Which rows of a column are equal to one: null is null, and NaN is NaN."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from batchwright.buffer.convert import pylist
from batchwright.buffer.schema import Numbers, Values

__all__ = ["equal_mask", "is_equal"]


def equal_mask(values: Values, one: Values) -> NDArray[np.bool_]:
    """Which rows are equal to the one row of `one`."""
    if isinstance(values, Numbers):
        assert isinstance(one, Numbers)
        return _equal_numbers(values, one)
    assert not isinstance(one, Numbers)
    if not len(values):
        return np.zeros(0, bool)
    if not one[0].is_valid:
        return values.is_null().to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]
    if not pa.types.is_nested(values.type) and not isinstance(values.type, pa.BaseExtensionType):
        try:
            return pc.equal(values, one[0]).fill_null(False).to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]
        except pa.ArrowNotImplementedError:
            pass  # types that Arrow does not compare: as Python values
    (wanted,) = pylist(one)
    return np.fromiter((is_equal(value, wanted) for value in pylist(values)), bool, len(values))


def _equal_numbers(values: Numbers, one: Numbers) -> NDArray[np.bool_]:
    is_null = None if values.valid is None else ~values.valid
    if one.valid is not None and not one.valid[0]:
        return np.zeros(len(values.values), bool) if is_null is None else is_null
    wanted = one.values[0]
    found: NDArray[np.bool_] = np.asarray(values.values == wanted)
    if values.values.dtype.kind == "f" and np.isnan(wanted).any():
        found |= np.isnan(values.values) & np.isnan(wanted)
    if found.ndim > 1:
        found = np.asarray(found.reshape(len(found), -1).all(axis=1))
    return found if is_null is None else found & ~is_null


def is_equal(value: Any, wanted: Any) -> bool:
    """Whether two Python values of one column are the same."""
    if isinstance(wanted, np.ndarray):
        return isinstance(value, np.ndarray) and np.array_equal(value, wanted, equal_nan=wanted.dtype.kind == "f")
    if isinstance(wanted, dict):
        return (
            isinstance(value, dict)
            and value.keys() == wanted.keys()
            and all(is_equal(value[name], member) for name, member in wanted.items())
        )
    if isinstance(wanted, list):
        return isinstance(value, list) and len(value) == len(wanted) and all(map(is_equal, value, wanted))
    if isinstance(wanted, float) and wanted != wanted:
        return isinstance(value, float) and value != value
    return type(value) is type(wanted) and bool(value == wanted)
