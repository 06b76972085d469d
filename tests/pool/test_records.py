"""Rows as records: what goes in comes out, whatever the columns' types, shapes and strides."""

from __future__ import annotations

import numpy as np
import pytest

from batchwright.base.memory import BlockPool
from batchwright.columns.shard import Column
from batchwright.pool.refilled import RecordLayout


@pytest.mark.parametrize("dtype", ["?", "u1", "i2", "f2", "u4", "f4", "i8", "f8"])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 5)])
def test_columns_come_back_bit_for_bit(dtype, shape):
    rng = np.random.default_rng(0)
    columns = {
        "a": rng.integers(0, 2, 9, dtype=np.uint8),
        "b": rng.integers(0, 100, (9, *shape)).astype(dtype),
        "c": rng.random((9, 3), dtype=np.float32),
    }
    layout = RecordLayout({name: Column(array.dtype, array.shape[1:]) for name, array in columns.items()})
    records = layout.pack(columns)
    order = np.array([8, 0, 3, 3])
    back = layout.unpack(records[order], BlockPool())
    for name, array in columns.items():
        assert back[name].dtype == array.dtype
        assert back[name].tobytes() == array[order].tobytes()


def test_columns_with_strides_are_packed_as_they_read():
    wide = np.arange(60, dtype=np.int32).reshape(10, 6)
    layout = RecordLayout({"x": Column(np.dtype(np.int32), (3,))})
    records = layout.pack({"x": wide[::2, ::2]})
    assert (layout.unpack(records, BlockPool())["x"] == wide[::2, ::2]).all()


def test_columns_that_are_held_are_not_overwritten():
    layout, memory = RecordLayout({"x": Column(np.dtype(np.int64), ())}), BlockPool()
    held = []
    for number in range(20):
        records = layout.pack({"x": np.full(100, number)})
        held.append(layout.unpack(records, memory)["x"])
    assert [int(column[0]) for column in held] == list(range(20))
    assert all((column == column[0]).all() for column in held)
