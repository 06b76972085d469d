"""One gather of records from anywhere in memory, across any number of arrays or mapped files.

NumPy gathers records of one array. All memory lies in one address space, so a view that begins at the lowest record
and steps by one item is such an array: its elements are records, by address. Nothing outside them is ever touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Memory", "ScatteredRows", "gather", "rows_apart"]


def _record(dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.dtype[Any]:
    """One element for each row, so that NumPy moves rows and not their items."""
    if not shape:
        return dtype
    return np.dtype((np.void, prod(shape) * dtype.itemsize))


class Memory:
    """NumPy's array interface for memory at an address. The reader keeps that memory alive."""

    __slots__ = ("__array_interface__",)

    def __init__(self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], step: int | None = None) -> None:
        """`step`: bytes from one element to the next, in every dimension; an element's size by default."""
        strides = (step or dtype.itemsize,) * len(shape)
        self.__array_interface__: dict[str, tuple[int, bool] | tuple[int, ...] | str | int] = {
            "data": (address, True),
            "shape": shape,
            "strides": strides,
            "typestr": dtype.str,
            "version": 3,
        }


class ScatteredRows:
    """Rows that lie in several arrays of one type and shape, as one: row r of array i is number start[i] + r * step.

    Array i begins at addresses[i], aligned for `dtype`, and has num_rows[i] rows. Address 0 marks a missing array;
    its start is negative. If all begin at a multiple of a row's bytes from each other, as arrays of `rows_apart` do,
    NumPy can take rows as of one contiguous array, which is faster.

    >>> one, other = np.arange(3.0), np.arange(8.0, 12.0)
    >>> table = ScatteredRows(np.array([one.ctypes.data, other.ctypes.data]), [3, 4], one.dtype)
    >>> table.take(table.start + np.array([2, 1]) * table.step).tolist()
    [2.0, 9.0]
    """

    def __init__(
        self, addresses: NDArray[np.int64], num_rows: Sequence[int], dtype: np.dtype[Any], shape: tuple[int, ...] = ()
    ) -> None:
        self.dtype: np.dtype[Any] = dtype
        self.shape: tuple[int, ...] = shape
        items = prod(shape)
        there = addresses != 0
        record = _record(dtype, shape)
        if not there.any() or not items:
            self._rows = np.empty(0, record)
            self.start: NDArray[np.int64] = np.where(there, 0, -1)
            self.step: int = 1
            return
        lowest = int(addresses[there].min())
        apart = np.where(there, addresses - lowest, 0)
        self.is_contiguous: bool = not (apart % record.itemsize).any()
        self.step, unit = 1, record.itemsize
        if not self.is_contiguous:
            self.step, unit = items, dtype.itemsize
        self.start = np.where(there, apart // unit, -1)
        ends = [at + max(rows - 1, 0) * self.step for at, rows in zip(self.start.tolist(), num_rows, strict=True)]
        self._rows = np.asarray(Memory(lowest, (max(ends) + 1,), record, unit))

    def take(self, numbers: NDArray[np.int64]) -> NDArray[Any]:
        """Some rows, in memory of their own. The caller vouches for the numbers, and holds the arrays."""
        if not self._rows.size:
            return np.empty((len(numbers), *self.shape), self.dtype)
        # `take` would first copy an array that is not contiguous, with all memory between the arrays.
        taken: NDArray[Any] = self._rows.take(numbers, mode="clip") if self.is_contiguous else self._rows[numbers]
        return taken.view(self.dtype).reshape(len(numbers), *self.shape)


def rows_apart(num_rows: int, dtype: np.dtype[Any], shape: tuple[int, ...] = ()) -> NDArray[Any]:
    """An array [num_rows, *shape] of any content, whose address is a multiple of a row's bytes.

    >>> rows_apart(5, np.dtype(np.float32), (3,)).ctypes.data % 12
    0
    """
    row_bytes = dtype.itemsize * prod(shape)
    if not shape or not row_bytes:
        return np.empty((num_rows, *shape), dtype)
    raw = np.empty((num_rows + 1) * row_bytes, np.uint8)
    skip = -raw.ctypes.data % row_bytes
    return raw[skip : skip + num_rows * row_bytes].view(dtype).reshape(num_rows, *shape)


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
    table = np.asarray(Memory(lowest, (int(steps.max()) + 1,), _record(dtype, shape), dtype.itemsize))
    gathered: NDArray[Any] = table[steps]
    return gathered.view(dtype).reshape(len(addresses), *shape)
