"""One gather copies windows from anywhere in memory, widened, in the order asked for."""

from __future__ import annotations

import numpy as np
import pytest

from batchwright.batches.gather import gather_windows, windows_at


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
def test_windows_come_in_the_order_of_their_addresses_and_as_int64(dtype):
    tokens = (np.arange(200) * 3 % 251).astype(dtype)
    starts = np.array([150, 0, 150, 77, 190])
    out = np.full((5, 10), -1, np.int64)
    gather_windows(tokens.ctypes.data + starts * tokens.itemsize, tokens.dtype, out)
    assert out.tolist() == [tokens[s : s + 10].tolist() for s in starts]


def test_windows_of_several_arrays_are_one_gather():
    arrays = [np.arange(1000 * n, 1000 * n + 50, dtype=np.uint16) for n in range(5)]
    rows = np.empty((10, 4), np.int64)
    addresses = np.array([array.ctypes.data + 2 * start for array in arrays for start in (46, 3)])
    gather_windows(addresses, np.dtype(np.uint16), rows)
    assert rows[:, 0].tolist() == [1000 * n + start for n in range(5) for start in (46, 3)]
    assert (np.diff(rows, axis=1) == 1).all()


def test_the_largest_ids_of_each_type_stay_positive():
    for dtype in (np.uint8, np.uint16, np.uint32):
        tokens = np.array([np.iinfo(dtype).max, 0], dtype)
        out = np.empty((1, 2), np.int64)
        gather_windows(np.array([tokens.ctypes.data]), tokens.dtype, out)
        assert out.tolist() == [[np.iinfo(dtype).max, 0]]


def test_windows_cannot_be_written_through():
    tokens = np.arange(10, dtype=np.uint16)
    windows, _ = windows_at(np.array([tokens.ctypes.data]), 3, tokens.dtype)
    with pytest.raises(ValueError, match="read-only"):
        windows[0, 0] = 1
