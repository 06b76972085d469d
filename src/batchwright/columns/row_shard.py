"""JSONL and pickle shards. They are decoded in full in a child process, so that the trainer's interpreter is free.

Columns come through shared memory. Rows through a pipe took two to ten times as long. The child is a new interpreter
that ends with its work, or with its parent.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.base.errors import SourceError, WorkerError
from batchwright.base.machine import shared_memory
from batchwright.base.processes import Worker
from batchwright.columns.row_decoding import GZIP_MAGIC, ZSTD_MAGIC, column_offsets, decode_into
from batchwright.columns.schema import Schema, Wanted, pieces, row_bytes, take_rows
from batchwright.columns.shard import ShardReader

__all__ = ["RowShard", "expected_bytes"]

_CHILD_BYTES = 64 << 20
"""Bytes for an interpreter with NumPy, and for its reading and sending."""
_GROWTH = {"jsonl": 5, "pickle": 7}
"""Bytes that decoding takes for one of text or pickle, about: "0," becomes eight bytes, a
number in a pickled list an object and a place in a list."""
_GZIP_RATIO = 1032
"""The largest ratio of unpacked to packed size of a gzip file."""
_ZSTD_RATIO = 12
"""The assumed ratio of unpacked to packed size of a zstd file, which need not state its size."""


class RowShard(ShardReader):
    """A shard of Python values."""

    schema: Schema
    rows: int

    def __init__(self, path: str, kind: str, columns: Sequence[str] | None, budget: int | None) -> None:
        self.path = path
        names = columns if columns is None or isinstance(columns, str) else list(columns)
        memory = shared_memory(0)  # as long as the columns are, once that is known
        try:
            with Worker(decode_into, doing=f"decoding {path}", share=(memory,)) as worker:
                worker.send(memory, path, kind, names, budget)
                self.rows, self.schema = worker.receive()
            self._columns = _columns_in(memory, self.schema, self.rows)
        except WorkerError as error:
            raise SourceError(
                f"{os.path.basename(path)} could not be decoded",
                file=path,
                reason=error.headline,
                remedy="if memory ran out: smaller shards; otherwise write it again",
            ) from error
        finally:
            os.close(memory)
        self.decode_bytes: int = max(expected_bytes(path, kind), _CHILD_BYTES + self.rows * row_bytes(self.schema))

    def chunks(self, wanted: Wanted, rows_per_chunk: int) -> Iterator[dict[str, NDArray[Any]]]:
        for rows in pieces(wanted, self.rows, rows_per_chunk):
            yield {name: take_rows(values, rows, 0) for name, values in self._columns.items()}

    def close(self) -> None:
        self._columns = {}


def _columns_in(memory: int, schema: Schema, rows: int) -> dict[str, NDArray[Any]]:
    offsets, num_bytes = column_offsets(schema, rows)
    if not num_bytes:
        return {name: np.empty((rows, *column.shape), column.dtype) for name, column in schema.items()}
    mapped = mmap.mmap(memory, num_bytes, access=mmap.ACCESS_READ)  # goes with the last array over it
    found = {}
    for name, column in schema.items():
        flat = np.frombuffer(mapped, column.dtype, rows * math.prod(column.shape), offsets[name])
        found[name] = flat.reshape(rows, *column.shape)
    return found


def expected_bytes(path: str, kind: str) -> int:
    """The approximate memory for decoding a shard, from its size, and the unpacked size stored in a gzip file."""
    with open(path, "rb") as file:
        size, begins = os.fstat(file.fileno()).st_size, file.read(4)
        unpacked = size
        if begins == ZSTD_MAGIC:
            unpacked = size * _ZSTD_RATIO
        elif begins.startswith(GZIP_MAGIC) and size >= 18:
            file.seek(-4, os.SEEK_END)
            said = int.from_bytes(file.read(4), "little")  # of 32 bits: a larger size is given modulo 2**32
            unpacked = said + -(-max(0, size - 64 - said) // 2**32) * 2**32
            unpacked = min(unpacked, size * _GZIP_RATIO)  # of a file that was cut, the last bytes say anything
    return _CHILD_BYTES + _GROWTH[kind] * unpacked
