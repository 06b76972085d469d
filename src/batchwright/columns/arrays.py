"""NumPy arrays as Arrow arrays and back, over the same memory.

`pa.array` and `Array.to_numpy` would do, but import pandas wherever it is installed: 0.3 s of every process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

__all__ = [
    "arrow_to_numpy",
    "lists_of",
    "lists_to_arrow",
    "numpy_dtype",
    "numpy_to_arrow",
    "records_of",
    "records_to_arrow",
    "tensors_to_numpy",
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
