"""Arrow and NumPy: arrays over the same memory, columns whose rows have one shape, and the opening of Arrow's files.

`pa.array` and `Array.to_numpy` would convert arrays too, but import pandas wherever it is installed: 0.3 s of every
process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchwright.base.errors import SourceError
from batchwright.columns.shard import DAMAGED, Column, Rows, Schema, check_shape, column_error, other_shape, take_rows

__all__ = [
    "arrow_to_numpy",
    "column_of",
    "lists_of",
    "lists_to_arrow",
    "numpy_dtype",
    "numpy_to_arrow",
    "open_ipc",
    "open_parquet",
    "read_schema",
    "read_table",
    "records_of",
    "records_to_arrow",
    "tensors_to_numpy",
    "to_numpy",
]

_NUMPY_NAMES = {"halffloat": "float16", "float": "float32", "double": "float64"}
"""Types that Arrow and NumPy name differently."""


def numpy_dtype(kind: pa.DataType) -> np.dtype[Any] | None:
    """The dtype of numbers and booleans; None for every other type, dates and decimals included."""
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        return np.dtype(_NUMPY_NAMES.get(str(kind), str(kind)))
    return None


def arrow_to_numpy(array: pa.Array) -> NDArray[Any]:
    """A read-only NumPy array over an Arrow array of numbers without nulls. The bits of booleans become bytes.

    >>> arrow_to_numpy(numpy_to_arrow(np.array([3, 5, 7], np.uint16))[1:])
    array([5, 7], dtype=uint16)
    """
    if array.null_count:
        raise ValueError(f"{array.null_count} numbers are missing")
    return _numbers(array)


def tensors_to_numpy(array: pa.FixedShapeTensorArray) -> NDArray[Any]:
    """An array of tensors as (rows, *shape). Values that are null are any numbers: check for them before."""
    storage, kind = array.storage, array.type
    size = storage.type.list_size
    stored = _numbers(storage.values.slice(storage.offset * size, len(array) * size))
    axes = kind.permutation or range(len(kind.shape))
    return stored.reshape(len(array), *kind.shape).transpose(0, *(axis + 1 for axis in axes))


def _numbers(array: pa.Array) -> NDArray[Any]:
    dtype, data = numpy_dtype(array.type), array.buffers()[1]
    if dtype is None:
        raise ValueError(f"{array.type} is not a type of numbers")
    if not len(array) or data is None:
        return np.empty(0, dtype)
    if dtype.kind != "b":
        return np.frombuffer(data, dtype, len(array), array.offset * dtype.itemsize)
    first_byte, last_byte = array.offset // 8, (array.offset + len(array) + 7) // 8
    bits = np.unpackbits(np.frombuffer(data, np.uint8, last_byte - first_byte, first_byte), bitorder="little")
    return bits[array.offset % 8 :][: len(array)].view(np.bool_)


def numpy_to_arrow(values: Any) -> pa.Array:
    """A NumPy array, ints, texts, or lists of ints as an Arrow array. Axes after the first become lists of fixed size.

    >>> [numpy_to_arrow(v).to_pylist() for v in (np.array([[3, 5]], np.uint16), [1, 2], ["a", "bc"], [[1], [2, 3]])]
    [[[3, 5]], [1, 2], ['a', 'bc'], [[1], [2, 3]]]
    """
    if isinstance(values, pa.Array):
        return values
    if isinstance(values, np.ndarray):
        return _array_to_arrow(values)
    if not len(values):
        return pa.nulls(0)
    if isinstance(values[0], str):
        pieces = [text.encode() for text in values]
        return pa.StringArray.from_buffers(len(pieces), pa.py_buffer(_offsets(pieces)), pa.py_buffer(b"".join(pieces)))
    if isinstance(values[0], list | tuple):
        flat = np.array([number for numbers in values for number in numbers], np.int64)
        return lists_to_arrow(_offsets(values), flat)
    return _array_to_arrow(np.array(values))


def _array_to_arrow(values: NDArray[Any]) -> pa.Array:
    flat = np.ascontiguousarray(values).reshape(-1)
    kind, data = pa.from_numpy_dtype(flat.dtype), flat
    if flat.dtype.kind == "b":
        data = np.packbits(flat, bitorder="little")
    array = pa.Array.from_buffers(kind, len(flat), [None, pa.py_buffer(data)])
    for length in reversed(values.shape[1:]):
        array = pa.FixedSizeListArray.from_arrays(array, length)
    return array


def _offsets(pieces: Sequence[Any]) -> NDArray[np.int32]:
    return np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])]).astype(np.int32)


def lists_to_arrow(offsets: NDArray[np.integer], values: Any) -> pa.Array:
    """Lists of any length: list i has values [offsets[i], offsets[i + 1]). Large lists if the offsets are int64."""
    lists = pa.LargeListArray if offsets.dtype == np.int64 else pa.ListArray
    return lists.from_arrays(numpy_to_arrow(offsets), numpy_to_arrow(values))


def lists_of(array: pa.Array) -> tuple[pa.Array, NDArray[np.integer]] | None:
    """(values, offset of each list and the end of the last) of lists of any kind; None for every other type.

    >>> values, offsets = lists_of(pa.array([[1], [2, 3], []])[1:])
    >>> values.to_pylist(), offsets.tolist()
    ([1, 2, 3], [1, 3, 3])
    """
    if isinstance(array.type, pa.BaseExtensionType):
        return lists_of(array.storage)
    if pa.types.is_fixed_size_list(array.type):
        return array.values, (array.offset + np.arange(len(array) + 1)) * array.type.list_size
    if pa.types.is_list_view(array.type):
        array = array.cast(pa.list_(array.type.value_type))
    elif pa.types.is_large_list_view(array.type):
        array = array.cast(pa.large_list(array.type.value_type))
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        return array.values, arrow_to_numpy(array.offsets)
    return None


def records_to_arrow(starts: NDArray[np.integer], records: Any) -> pa.Array:
    """Records as lists of structs: list i has records [starts[i], starts[i + 1]) of a structured array, or of columns.

    >>> records = np.array([(3, 0.5), (4, 1.0), (9, 0.0)], [("stop", "i4"), ("weight", "f4")])
    >>> records_to_arrow(np.array([0, 2, 3], np.int32), records).to_pylist()[0]
    [{'stop': 3, 'weight': 0.5}, {'stop': 4, 'weight': 1.0}]
    """
    names = list(records if isinstance(records, dict) else records.dtype.names)
    return lists_to_arrow(
        starts, pa.StructArray.from_arrays([numpy_to_arrow(records[name]) for name in names], names=names)
    )


def records_of(column: pa.Array) -> tuple[NDArray[Any], dict[str, NDArray[Any]]]:
    """(offsets of the lists, fields of all records) of a column from `records_to_arrow`, without a copy."""
    structs = column.values
    return arrow_to_numpy(column.offsets), {
        structs.type.field(i).name: arrow_to_numpy(structs.field(i)) for i in range(structs.type.num_fields)
    }


# Columns whose rows have one shape. Every other column is refused with its name, and its row if only some are at fault.

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
        _refuse_nulls(array, 1, file, name, first_row)
        _refuse_nulls(array.storage.flatten(), array.storage.type.list_size, file, name, first_row)
        return tensors_to_numpy(array)
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


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _value_type(kind: pa.DataType) -> pa.DataType:
    """The type inside of the lists."""
    if isinstance(kind, pa.FixedShapeTensorType):
        return kind.value_type
    if _is_list(kind):
        return _value_type(kind.value_type)
    return kind


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


# Files


def open_ipc(source: Any) -> Any:
    """A reader of Arrow's file format or of its stream format, told by the first bytes of a seekable source."""
    is_file = source.read(6) == b"ARROW1"
    source.seek(0)
    if is_file:
        return pa.ipc.open_file(source)
    return pa.ipc.open_stream(source)


def open_parquet(path: Any) -> Any:
    """A Parquet file that is read a megabyte of a column at a time. Checksums of pages are checked if there are any."""
    import pyarrow.parquet as pq  # takes long to import

    return pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False, page_checksum_verification=True)


def read_schema(path: str, kind: str) -> Any:
    """The Arrow schema of a file; `kind` is "arrow" or "parquet"."""
    if kind == "parquet":
        with open_parquet(path) as file:
            return file.schema_arrow
    with pa.memory_map(path) as source:
        return open_ipc(source).schema


def read_table(path: str, kind: str) -> Any:
    """All of a file as one table. Arrow is mapped, and not checked: call `validate(full=True)` before using it."""
    if kind == "parquet":
        with open_parquet(path) as file:
            return file.read()
    with pa.memory_map(path) as source:
        return open_ipc(source).read_all()
