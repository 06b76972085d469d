"""JSONL and pickle shards: decoded in full in a child process, so that the trainer's interpreter is free.

Rows come through shared memory: through a pipe they took two to ten times as long. The child is a new interpreter that
ends with its parent, and holds the columns until the shard is closed.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from typing import Any

from numpy.typing import NDArray

from batchwright.base.errors import SourceError, WorkerError
from batchwright.base.machine import shared_memory
from batchwright.base.processes import Worker
from batchwright.columns.row_decoding import GZIP_MAGIC, ZSTD_MAGIC, answer, layout, views
from batchwright.columns.schema import Wanted, pieces, row_bytes
from batchwright.columns.shard import ShardReader

__all__ = ["RowShard", "expected_bytes"]

_CHILD_BYTES = 64 << 20
"""An interpreter with NumPy, and what it reads and sends."""
_GROWTH = {"jsonl": 5, "pickle": 7}
"""Bytes that decoding takes for one of text or pickle, about: "0," becomes eight bytes, a
number in a pickled list an object and a place in a list."""
_GZIP_RATIO = 1032
"""How many times its size a gzip file unpacks to, at most."""
_ZSTD_RATIO = 12
"""How many times its size a zstd file is taken to have: it need not say."""


class RowShard(ShardReader):
    """A shard of Python values."""

    def __init__(self, path: str, kind: str, columns: Sequence[str] | None, budget: int | None) -> None:
        self.path = path
        self._memory_file = shared_memory(0)  # as long as a chunk is, once that is known
        self._room_rows = 0
        self._room: dict[str, NDArray[Any]] = {}
        self._worker = Worker(answer, doing=f"decoding {path}", share=(self._memory_file,))
        try:
            names = columns if columns is None or isinstance(columns, str) else list(columns)
            self.rows, self.schema = self._ask("open", path, kind, names, budget)
        except BaseException:
            self.close()
            raise
        self.decode_bytes = max(expected_bytes(path, kind), _CHILD_BYTES + self.rows * row_bytes(self.schema))

    def _ask(self, *question: Any) -> Any:
        try:
            self._worker.send(*question)
            return self._worker.receive()
        except WorkerError as error:
            raise SourceError(
                f"{os.path.basename(self.path)} could not be decoded",
                file=self.path,
                reason=error.headline,
                remedy="if memory ran out: smaller shards; otherwise write it again",
            ) from error

    def chunks(self, wanted: Wanted, rows_per_chunk: int) -> Iterator[dict[str, NDArray[Any]]]:
        for piece in pieces(wanted, self.rows, rows_per_chunk):
            self._make_room(min(rows_per_chunk, self.rows))
            rows = self._ask("put", piece)
            yield {name: column[:rows] for name, column in self._room.items()}

    def _make_room(self, rows: int) -> None:
        if rows > self._room_rows:
            _, num_bytes = layout(self.schema, rows)
            os.ftruncate(self._memory_file, num_bytes)
            self._room = views(mmap.mmap(self._memory_file, num_bytes), self.schema, rows)
            self._ask("share", self._memory_file, rows)
            self._room_rows = rows

    def close(self) -> None:
        self._worker.close()
        self._room = {}
        if self._memory_file >= 0:
            os.close(self._memory_file)
            self._memory_file = -1


def expected_bytes(path: str, kind: str) -> int:
    """Memory that decoding a shard takes, about: by its size, and the size that a gzip file says it has unpacked."""
    with open(path, "rb") as file:
        size, begins = os.fstat(file.fileno()).st_size, file.read(4)
        unpacked = size
        if begins == ZSTD_MAGIC:
            unpacked = size * _ZSTD_RATIO
        elif begins.startswith(GZIP_MAGIC) and size >= 18:
            file.seek(-4, os.SEEK_END)
            said = int.from_bytes(file.read(4), "little")  # of 32 bits: what is larger says the rest only
            unpacked = said + -(-max(0, size - 64 - said) // 2**32) * 2**32
            unpacked = min(unpacked, size * _GZIP_RATIO)  # of a file that was cut, the last bytes say anything
    return _CHILD_BYTES + _GROWTH[kind] * unpacked
