"""Arrow arrays as NumPy columns, without a copy where the bytes are the same: what Arrow and Parquet shards share.

Numbers, booleans, lists of fixed size, tensors, and lists whose rows all have the same length. Everything else is
refused by column, and by row where only some rows are at fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchwright.base.errors import SourceError
from batchwright.columns.flat import DAMAGED
from batchwright.columns.schema import Column, check_shape, without

__all__ = ["DAMAGE", "column_of", "to_numpy"]

DAMAGE = (pa.ArrowException, OSError, ValueError, OverflowError, KeyError, IndexError)
"""What Arrow raises on bytes that are not what they should be."""


def column_of(field: Any, first_row: Callable[[], Any], *, file: str) -> Column:
    """What a column holds, by its type. `first_row`: its array of the first row, asked for where lengths may differ."""
    dtype = _dtype_of(_leaf(field.type))
    if dtype is None:
        raise SourceError(
            f"column {field.name!r} holds {_leaf(field.type)}",
            file=file,
            column=field.name,
            remedy=f"write it as numbers or booleans, or {without(field.name)}",
        )
    first = None
    if _may_vary(field.type):
        first = first_row()
        if first.null_count:
            raise _null(file, field.name, 0)
        if not len(first):
            return Column(dtype, (0,))  # no row tells how long
    return Column(dtype, check_shape(_shape(field.type, first), file=file, column=field.name))


def to_numpy(array: Any, column: Column, *, file: str, name: str, first_row: int) -> NDArray[Any]:
    """An array as (rows, *shape). `first_row`: of the array in its shard, for errors."""
    flat, rows = array, len(array)
    for depth, length in enumerate(_lengths(array.type, column.shape)):
        values_of_row = math.prod(column.shape[:depth])
        if flat.null_count:
            raise _null(file, name, first_row + _first_null(flat) // values_of_row)
        if pa.types.is_fixed_size_list(flat.type):
            if flat.type.list_size != length:
                raise _ragged(file, name, first_row, flat.type.list_size, column.shape, depth)
            flat = flat.values.slice(flat.offset * length, len(flat) * length)
        else:
            offsets = _numbers(flat.offsets)
            wrong = np.flatnonzero(np.diff(offsets) != length)
            if len(wrong):
                at = int(wrong[0])
                got = int(offsets[at + 1] - offsets[at])
                raise _ragged(file, name, first_row + at // values_of_row, got, column.shape, depth)
            if offsets[0] < 0 or (len(flat) and offsets[-1] > len(flat.values)):
                raise _damaged(file, name, "offsets that lead out of the column")
            flat = flat.values.slice(int(offsets[0]), len(flat) * length)
    kind = array.type
    if isinstance(kind, pa.FixedShapeTensorType):
        if array.null_count:
            raise _null(file, name, first_row + _first_null(array))
        storage = array.storage
        size = storage.type.list_size
        flat = storage.values.slice(storage.offset * size, rows * size)
    if flat.null_count:
        raise _null(file, name, first_row + _first_null(flat) // max(1, math.prod(column.shape)))
    if len(flat) != rows * math.prod(column.shape):
        raise _damaged(file, name, f"{len(flat):,} values for {rows:,} rows of shape {column.shape}")
    values = _numbers(flat)
    if isinstance(kind, pa.FixedShapeTensorType) and kind.permutation is not None:
        stored = values.reshape(rows, *kind.shape)
        return stored.transpose(0, *(axis + 1 for axis in kind.permutation))
    return values.reshape(rows, *column.shape)


def _is_list(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _leaf(kind: Any) -> Any:
    """What is in the lists."""
    if isinstance(kind, pa.FixedShapeTensorType):
        return kind.value_type
    return _leaf(kind.value_type) if _is_list(kind) else kind


def _may_vary(kind: Any) -> bool:
    return _is_list(kind) and (not pa.types.is_fixed_size_list(kind) or _may_vary(kind.value_type))


def _shape(kind: Any, first: Any) -> tuple[int, ...]:
    """The shape of a row: by its type, and by `first`, an array that begins with it, where the type does not tell."""
    if isinstance(kind, pa.FixedShapeTensorType):
        return tuple(kind.shape[axis] for axis in (kind.permutation or range(len(kind.shape))))
    if not _is_list(kind):
        return ()
    inner = None if first is None else first.flatten()
    if pa.types.is_fixed_size_list(kind):
        return (kind.list_size, *_shape(kind.value_type, inner))
    length = first.value_lengths()[0].as_py() if len(first) else 0
    return (int(length or 0), *_shape(kind.value_type, inner))


def _lengths(kind: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of each level of lists."""
    return () if isinstance(kind, pa.FixedShapeTensorType) else shape


def _dtype_of(kind: Any) -> np.dtype[Any] | None:
    """Of numbers and booleans; None for everything else, dates and decimals among it."""
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        return np.dtype({"halffloat": "float16", "float": "float32", "double": "float64"}.get(str(kind), str(kind)))
    return None


def _numbers(flat: Any) -> NDArray[Any]:
    """An array of numbers or booleans without nulls. Not by `to_numpy`, which imports pandas where there is one."""
    dtype, data = _dtype_of(flat.type), flat.buffers()[1]
    assert dtype is not None
    if not len(flat) or data is None:
        return np.empty(0, dtype)
    if dtype.kind != "b":
        return np.frombuffer(data, dtype, len(flat), flat.offset * dtype.itemsize)
    first_byte, last_byte = flat.offset // 8, (flat.offset + len(flat) + 7) // 8
    bits = np.unpackbits(np.frombuffer(data, np.uint8, last_byte - first_byte, first_byte), bitorder="little")
    return bits[flat.offset % 8 :][: len(flat)].view(np.bool_)


def _first_null(array: Any) -> int:
    return int(array.is_null().to_pylist().index(True))


def _null(file: str, column: str, row: int) -> SourceError:
    return SourceError(
        f"row {row:,} has no value in column {column!r}",
        file=file,
        row=row,
        column=column,
        remedy=f"write a number in place of null, or {without(column)}",
    )


def _ragged(file: str, column: str, row: int, got: int, shape: tuple[int, ...], depth: int) -> SourceError:
    other = (*shape[:depth], got, *shape[depth + 1 :])
    return SourceError(
        f"row {row:,} of column {column!r} has shape {other}, the rows before have {shape}",
        file=file,
        row=row,
        column=column,
        remedy=f"pad it to one length, or {without(column)}",
    )


def _damaged(file: str, column: str, reason: str) -> SourceError:
    return SourceError(f"column {column!r} is damaged", file=file, column=column, reason=reason, remedy=DAMAGED)
