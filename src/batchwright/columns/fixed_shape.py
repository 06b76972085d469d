"""Arrow columns whose rows all have one shape, as NumPy arrays: numbers, booleans, lists of one length, tensors.

Every other column is refused with its name, and with its row if only some rows are at fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchwright.base.errors import SourceError
from batchwright.columns.arrays import arrow_to_numpy, lists_of, numpy_dtype, tensors_to_numpy
from batchwright.columns.schema import DAMAGED, Column, Rows, Schema, check_shape, column_error, other_shape, take_rows

__all__ = ["ARROW_DAMAGE", "column_of", "columns_of_batch", "to_numpy"]

ARROW_DAMAGE = (pa.ArrowException, OSError, ValueError, OverflowError, KeyError, IndexError)
"""The errors of Arrow on damaged bytes."""


def column_of(field: pa.Field, first_row: Callable[[], Any], *, file: str) -> Column:
    """Dtype and shape of a column. `first_row` gives its first row as an array; asked only if lengths may differ."""
    dtype = numpy_dtype(_value_type(field.type))
    if dtype is None:
        what = f"column {field.name!r} holds {_value_type(field.type)}"
        raise column_error(what, file=file, column=field.name, remedy="write it as numbers or booleans")
    first = None
    if _may_vary(field.type):
        first = first_row()
        if first.null_count:
            raise _null(file, field.name, 0)
        if not len(first):
            return Column(dtype, (0,))  # no row says how long
    return Column(dtype, check_shape(_shape(field.type, first), file=file, column=field.name))


def columns_of_batch(
    batch: pa.RecordBatch, schema: Schema, rows: Rows, *, file: str, first_row: int
) -> dict[str, NDArray[Any]]:
    """Some rows of a record batch that begins with row `first_row` of its file, as NumPy columns."""
    first, last = int(rows[0]), int(rows[-1])
    found = {}
    for name, column in schema.items():
        array = batch.column(name).slice(first - first_row, last + 1 - first)
        found[name] = take_rows(to_numpy(array, column, file=file, name=name, first_row=first), rows, first)
    return found


def to_numpy(array: pa.Array, column: Column, *, file: str, name: str, first_row: int) -> NDArray[Any]:
    """An array as (rows, *shape), without a copy. `first_row` is its number in the file, for errors."""
    if not len(array):
        return np.empty((0, *column.shape), column.dtype)
    if isinstance(array.type, pa.FixedShapeTensorType):
        return _tensors_to_numpy(array, file, name, first_row)
    flat = array
    for depth, length in enumerate(column.shape):
        lists_per_row = math.prod(column.shape[:depth])
        _refuse_nulls(flat, lists_per_row, file, name, first_row)
        if pa.types.is_fixed_size_list(flat.type):
            flat = flat.flatten()
            continue
        flat, offsets = lists_of(flat)  # type: ignore[misc]  # there are as many levels as axes
        lengths = np.diff(offsets)
        if (lengths != length).any():
            at = int(np.argmax(lengths != length))
            shape = (*column.shape[:depth], int(lengths[at]), *column.shape[depth + 1 :])
            raise other_shape(file, name, first_row + at // lists_per_row, shape, column.shape)
        if offsets[0] < 0 or offsets[-1] > len(flat):
            raise SourceError(f"column {name!r} is damaged: offsets", file=file, column=name, remedy=DAMAGED)
        flat = flat.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
    _refuse_nulls(flat, math.prod(column.shape), file, name, first_row)
    return arrow_to_numpy(flat).reshape(len(array), *column.shape)


def _tensors_to_numpy(array: Any, file: str, name: str, first_row: int) -> NDArray[Any]:
    _refuse_nulls(array, 1, file, name, first_row)
    _refuse_nulls(array.storage.flatten(), array.storage.type.list_size, file, name, first_row)
    return tensors_to_numpy(array)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _value_type(kind: pa.DataType) -> pa.DataType:
    """The type inside of the lists."""
    if isinstance(kind, pa.FixedShapeTensorType):
        return kind.value_type
    return _value_type(kind.value_type) if _is_list(kind) else kind


def _may_vary(kind: pa.DataType) -> bool:
    return _is_list(kind) and (not pa.types.is_fixed_size_list(kind) or _may_vary(kind.value_type))


def _shape(kind: pa.DataType, first: Any) -> tuple[int, ...]:
    """The shape of a row, by its type; by `first`, which begins with the first row, if lengths may vary."""
    if isinstance(kind, pa.FixedShapeTensorType):
        return tuple(kind.shape[axis] for axis in (kind.permutation or range(len(kind.shape))))
    if not _is_list(kind):
        return ()
    inner = None if first is None else first.flatten()
    if pa.types.is_fixed_size_list(kind):
        return (kind.list_size, *_shape(kind.value_type, inner))
    length = first.value_lengths()[0].as_py() if len(first) else 0
    return (int(length or 0), *_shape(kind.value_type, inner))


def _refuse_nulls(array: pa.Array, values_per_row: int, file: str, name: str, first_row: int) -> None:
    if array.null_count:
        raise _null(file, name, first_row + array.is_null().to_pylist().index(True) // max(1, values_per_row))


def _null(file: str, column: str, row: int) -> SourceError:
    what = f"row {row:,} has no value in column {column!r}"
    return column_error(what, file=file, column=column, row=row, remedy="write a number in place of null")
