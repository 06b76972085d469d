"""Columns as Arrow arrays and back, over the same memory where they are NumPy's.

`pa.array` and `Array.to_numpy` would do, but import pandas wherever it is installed: 0.3 s of every process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

__all__ = ["as_arrow", "as_numpy", "records_of", "records_to_arrow"]

_NUMPY_NAMES = {"halffloat": "float16", "float": "float32", "double": "float64"}
"""Types that Arrow and NumPy name differently."""


def as_arrow(values: Any) -> pa.Array:
    """Numbers (a NumPy array, or ints), texts, or lists of ints as an Arrow array. Arrow arrays stay as they are.

    >>> [as_arrow(v).to_pylist() for v in (np.array([3, 5], np.uint16), [1, 2], ["a", "bc"], [[1], [2, 3]])]
    [[3, 5], [1, 2], ['a', 'bc'], [[1], [2, 3]]]
    """
    if isinstance(values, pa.Array):
        return values
    if isinstance(values, np.ndarray):
        array = np.ascontiguousarray(values)
        return pa.Array.from_buffers(pa.from_numpy_dtype(array.dtype), len(array), [None, pa.py_buffer(array)])
    if not len(values):
        return pa.nulls(0)
    if isinstance(values[0], str):
        pieces = [text.encode() for text in values]
        return pa.StringArray.from_buffers(len(pieces), pa.py_buffer(_offsets(pieces)), pa.py_buffer(b"".join(pieces)))
    if isinstance(values[0], list | tuple):
        flat = np.array([number for numbers in values for number in numbers], np.int64)
        return pa.ListArray.from_arrays(as_arrow(_offsets(values)), as_arrow(flat))
    return as_arrow(np.array(values))


def _offsets(pieces: Sequence[Any]) -> NDArray[np.int32]:
    return np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])]).astype(np.int32)


def as_numpy(array: pa.Array) -> NDArray[Any]:
    """A read-only NumPy array over an Arrow array of numbers, none of which is missing.

    >>> as_numpy(as_arrow(np.array([3, 5, 7], np.uint16))[1:])
    array([5, 7], dtype=uint16)
    """
    if array.null_count:
        raise ValueError(f"{array.null_count} numbers are missing")
    dtype = np.dtype(_NUMPY_NAMES.get(str(array.type), str(array.type)))
    if not len(array):
        return np.empty(0, dtype)
    return np.frombuffer(array.buffers()[1], dtype, len(array), array.offset * dtype.itemsize)


def records_to_arrow(starts: NDArray[np.integer], records: Any) -> pa.Array:
    """Records as lists of structs: list i has records [starts[i], starts[i + 1]) of a structured array, or of columns.

    >>> records = np.array([(3, 0.5), (4, 1.0), (9, 0.0)], [("stop", "i4"), ("weight", "f4")])
    >>> records_to_arrow(np.array([0, 2, 3], np.int32), records).to_pylist()[0]
    [{'stop': 3, 'weight': 0.5}, {'stop': 4, 'weight': 1.0}]
    """
    names = list(records if isinstance(records, dict) else records.dtype.names)
    structs = pa.StructArray.from_arrays([as_arrow(records[name]) for name in names], names=names)
    lists = pa.LargeListArray if starts.dtype == np.int64 else pa.ListArray
    return lists.from_arrays(as_arrow(starts), structs)


def records_of(column: pa.Array) -> tuple[NDArray[Any], dict[str, NDArray[Any]]]:
    """(where each list begins, and where the last one ends; the fields of all records) of such a column, unmoved."""
    structs = column.values
    return as_numpy(column.offsets), {
        structs.type.field(i).name: as_numpy(structs.field(i)) for i in range(structs.type.num_fields)
    }
