"""One gather of records that lie anywhere in memory, however many arrays or mapped files they are spread over.

NumPy gathers records of one array. All memory lies in one address space, so a view that begins at the lowest record
and steps by one item is such an array: its elements are records, by address. Nothing outside them is ever touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Memory", "gather", "table_over"]


class Memory:
    """What NumPy's array interface needs to see memory at an address. Whoever reads it holds what lies there."""

    __slots__ = ("__array_interface__",)

    def __init__(self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], step: int | None = None) -> None:
        """`step`: bytes from one element to the next, in every dimension; an element's size by default."""
        self.__array_interface__ = {
            "data": (address, True),
            "shape": shape,
            "strides": (dtype.itemsize if step is None else step,) * len(shape),
            "typestr": dtype.str,
            "version": 3,
        }


def table_over(
    addresses: NDArray[np.int64], num_rows: Sequence[int], dtype: np.dtype[Any], shape: tuple[int, ...] = ()
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """(records, first): records[first[i] + row * items] is a row of array i, as raw bytes where it has a shape.

    `items` are those of a row. Arrays begin at `addresses`, aligned for `dtype`, and have so many rows each; one at
    address 0 is not there, and its `first` is negative.

    >>> one, other = np.arange(3.0), np.arange(8.0, 12.0)
    >>> table, first = table_over(np.array([one.ctypes.data, other.ctypes.data]), [3, 4], one.dtype)
    >>> table[first + [2, 1]].tolist()
    [2.0, 9.0]
    """
    items = prod(shape)
    there = addresses != 0
    record = dtype if not shape else np.dtype((np.void, items * dtype.itemsize))
    if not there.any() or not items:
        return np.empty(0, record), np.where(there, 0, -1)
    lowest = int(addresses[there].min())
    first = np.where(there, (addresses - lowest) // dtype.itemsize, -1)
    highest = max(int(at) + max(int(rows) - 1, 0) * items for at, rows in zip(first, num_rows, strict=True) if at >= 0)
    return np.asarray(Memory(lowest, (highest + 1,), record, dtype.itemsize)), first


def gather(addresses: NDArray[np.int64], dtype: np.dtype[Any], shape: tuple[int, ...] = ()) -> NDArray[Any]:
    """The arrays of this type and shape that lie at some addresses: [len(addresses), *shape], in memory of its own.

    The caller vouches for the addresses: each record lies whole inside one live buffer that is aligned for `dtype`.

    >>> one, other = np.arange(6.0).reshape(3, 2), np.arange(8.0, 12.0).reshape(2, 2)
    >>> rows = np.array([other.ctypes.data + 16, one.ctypes.data])
    >>> gather(rows, one.dtype, (2,)).tolist()
    [[10.0, 11.0], [0.0, 1.0]]
    """
    items = prod(shape)
    if not len(addresses) or not items:
        return np.empty((len(addresses), *shape), dtype)
    lowest = int(addresses.min())
    steps = addresses - lowest
    if dtype.itemsize > 1:
        steps //= dtype.itemsize
    record = dtype if not shape else np.dtype((np.void, items * dtype.itemsize))
    table = np.asarray(Memory(lowest, (int(steps.max()) + 1,), record, dtype.itemsize))
    gathered: NDArray[Any] = table[steps]
    return gathered if not shape else gathered.view(dtype).reshape(len(addresses), *shape)
