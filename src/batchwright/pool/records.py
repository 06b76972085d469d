"""Rows as records. The columns of a row are next to each other, so that drawing a row is one read from memory.

A batch is gathered as records, and taken apart into columns while it is in the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.base.memory import BlockPool
from batchwright.columns.shard import Column, Schema

__all__ = ["RecordLayout", "Records"]

Records = NDArray[np.void]


class RecordLayout:
    """The place of each column in a record.

    >>> from batchwright.columns.shard import Column
    >>> layout = RecordLayout({"board": Column(np.dtype("u1"), (2, 2)), "value": Column(np.dtype("f4"), ())})
    >>> layout.row_bytes
    8
    >>> records = layout.pack({"board": np.arange(8, dtype="u1").reshape(2, 2, 2), "value": np.array([1, -1], "f4")})
    >>> columns = layout.unpack(records[::-1].copy(), BlockPool())
    >>> columns["value"].tolist(), columns["board"][0].tolist()
    ([-1.0, 1.0], [[4, 5], [6, 7]])
    """

    def __init__(self, schema: Schema) -> None:
        self.schema: dict[str, Column] = dict(schema)
        sizes = [column.num_bytes for column in schema.values()]
        self.row_bytes: int = sum(sizes)
        self.dtype: np.dtype[Any] = np.dtype(f"V{self.row_bytes}")
        self._packed = self.empty(0)
        # Columns as opaque bytes: NumPy then copies each row's part at once, for any type and alignment.
        self._fields = np.dtype(
            {
                "names": list(schema),
                "formats": [f"V{size}" for size in sizes],
                "offsets": [sum(sizes[:place]) for place in range(len(sizes))],
                "itemsize": self.row_bytes,
            }
        )

    def empty(self, rows: int) -> Records:
        return np.empty(rows, self.dtype)

    def pack(self, columns: Mapping[str, NDArray[Any]]) -> Records:
        """Columns as records, until the next ones are packed: their memory is used again."""
        rows = len(columns[next(iter(self.schema))])
        if len(self._packed) < rows:
            self._packed = self.empty(rows)
        records = self._packed[:rows]
        fields = records.view(self._fields)
        for name in self.schema:
            array = np.ascontiguousarray(columns[name])
            fields[name] = array.reshape(-1).view(np.uint8).view(self._fields[name])
        return records

    def unpack(self, records: Records, memory: BlockPool) -> dict[str, NDArray[Any]]:
        """The columns of some records, copied."""
        fields, rows = records.view(self._fields), len(records)
        columns = {}
        for name, column in self.schema.items():
            num_bytes = column.num_bytes * rows
            block = memory.take(1, -(-num_bytes // 8))[0].view(np.uint8)[:num_bytes]
            block.view(self._fields[name])[:] = fields[name]
            columns[name] = block.view(column.dtype).reshape(rows, *column.shape)
        return columns
