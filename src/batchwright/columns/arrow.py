"""Arrow IPC, file and stream format. Files are mapped, handed out without a copy, and released as reading advances.

Arrow has no checksums. To touch a map behind the end of its file ends the process, so the length of the file is checked
before each chunk. A writer that cuts it between the check and the copy still does: write new files beside the old ones,
and rename them.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchwright.base.errors import SourceError
from batchwright.base.machine import unmap_pages
from batchwright.base.words import first_line
from batchwright.columns.fixed_shape import ARROW_DAMAGE, column_of, columns_of_batch
from batchwright.columns.schema import DAMAGED, Column, Wanted, blocks_of, chosen, pieces, row_bytes, sorted_schema
from batchwright.columns.shard import ShardReader

__all__ = ["ArrowShard"]

_HELD_BYTES = 8 << 20
"""Bytes of mapped pages that reading may leave in memory, and of booleans that are unpacked at once."""
_MAGIC = b"ARROW1"
_MESSAGE, _END = b"\xff" * 4, b"\xff" * 4 + bytes(4)
"""The first bytes of messages of a stream (since Arrow 0.15), and the last message, which marks the end."""


class ArrowShard(ShardReader):
    """One file of record batches. Compressed batches are decoded one at a time."""

    rows: int
    decode_bytes: int

    def __init__(self, path: str, columns: Sequence[str] | None) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._buffer: Any = pa.py_buffer(self._map)
            self._open_columns(columns)
        except SourceError:
            self.close()
            raise
        except ARROW_DAMAGE as error:
            self.close()
            raise self._damaged(error) from None

    def _open_columns(self, columns: Sequence[str] | None) -> None:
        self._is_file = self._map[:6] == _MAGIC
        self._begin = 8 * self._is_file  # a file is a stream between its magic and its footer
        fields = list(self._stream([]).schema)
        names = chosen([field.name for field in fields], columns, self.path)
        self._numbers = [number for number, field in enumerate(fields) if field.name in names]
        self._count_rows(min(self._numbers, key=lambda number: _bytes_of(fields[number].type)))
        self.schema = sorted_schema(
            {fields[number].name: self._column(number, fields[number]) for number in self._numbers}
        )
        self.decode_bytes = 2 * _HELD_BYTES
        if not self._is_mapped:
            # The batch that is decoded, its bytes in the file, and the one before: the caller still has its last chunk.
            biggest = int(max(np.diff(self._starts), default=0))
            self.decode_bytes += 3 * biggest * row_bytes(self.schema)

    def _count_rows(self, smallest: int) -> None:
        """Count the rows before each batch, and check whether batches are parts of the map. Decodes one column."""
        self._starts = [0]
        self._is_mapped = True
        source = self._source()
        for batch in pa.ipc.open_stream(source, options=_only([smallest])):
            batch.validate()  # a batch that says a billion rows must have their bytes
            self._starts.append(self._starts[-1] + batch.num_rows)
            self._is_mapped &= all(map(self._is_in_map, batch.column(0).buffers()))
        self.rows = self._starts[-1]
        end = self._begin + source.tell()
        if self._map[self._begin : self._begin + 4] == _MESSAGE and self._map[end - 8 : end] != _END:
            what = f"Arrow data without an end: {self.rows:,} rows are there, and perhaps were more"
            raise SourceError(what, file=self.path, remedy="write it again, and close the writer")

    def _is_in_map(self, buffer: Any) -> bool:
        begin = self._buffer.address
        return buffer is None or not buffer.size or begin <= buffer.address < begin + self._buffer.size

    def _source(self) -> Any:
        return pa.BufferReader(self._buffer.slice(self._begin))

    def _stream(self, numbers: list[int]) -> Any:
        return pa.ipc.open_stream(self._source(), options=_only(numbers))

    def _file(self, numbers: list[int]) -> Any:
        return pa.ipc.open_file(pa.BufferReader(self._buffer), options=_only(numbers))

    def _column(self, number: int, field: Any) -> Column:
        def first_row() -> Any:
            for batch in self._stream([number]):
                batch.validate()
                if batch.num_rows:
                    return batch.column(0).slice(0, 1)
            return pa.array([], field.type)

        return column_of(field, first_row, file=self.path)

    def chunks(self, wanted: Wanted, rows_per_chunk: int) -> Iterator[dict[str, NDArray[Any]]]:
        # Booleans are bits, which become bytes from the first wanted row to the last of a chunk.
        unpacked = sum(column.num_bytes for column in self.schema.values() if column.dtype.kind == "b")
        most_span = max(1, _HELD_BYTES // unpacked) if unpacked else None
        read_batch = self._batches()
        batch, number, taken_bytes = None, -1, 0
        for piece in pieces(wanted, self.rows, rows_per_chunk):
            for block, rows in blocks_of(piece, self._starts, most_span):
                self._check_length()
                if block != number:
                    batch = None  # a decoded one goes before the next
                    batch, number = self._checked_batch(read_batch, block), block
                yield columns_of_batch(batch, self.schema, rows, file=self.path, first_row=self._starts[block])
                taken_bytes += int(rows[-1] + 1 - rows[0]) * row_bytes(self.schema)
                if taken_bytes > _HELD_BYTES:
                    unmap_pages(self._map, 0, len(self._map))
                    taken_bytes = 0

    def _batches(self) -> Callable[[int], Any]:
        """The record batches by number, read in order.

        A reader of files goes to any batch at once, but copies. A stream reads over mapped batches at no cost.
        """
        if self._is_file and not self._is_mapped:
            reader = self._file(self._numbers)
            return lambda number: reader.get_batch(number)
        stream = enumerate(self._stream(self._numbers))
        return lambda number: next(batch for at, batch in stream if at == number)

    def _checked_batch(self, read_batch: Callable[[int], Any], block: int) -> Any:
        try:
            batch = read_batch(block)
            for name in self.schema:
                batch.column(name).validate()
        except (*ARROW_DAMAGE, StopIteration) as error:
            raise self._damaged(error, record_batch=block) from None
        if batch.num_rows != self._starts[block + 1] - self._starts[block]:
            raise self._damaged("it has another number of rows than before", record_batch=block)
        return batch

    def _check_length(self) -> None:
        """Raise if the file was cut since it was mapped."""
        ends = self._map.size()
        if ends < len(self._map):
            raise SourceError(
                f"the file was cut while it was read: it had {len(self._map):,} bytes, and has {ends:,}",
                file=self.path,
                remedy=f"{DAMAGED}: beside the old one, and then rename it",
            )

    def _damaged(self, error: object, **where: object) -> SourceError:
        return SourceError(
            "not an Arrow file, or damaged", file=self.path, **where, reason=first_line(error), remedy=DAMAGED
        )

    def close(self) -> None:
        self._buffer = None  # the map goes with the last array that looks at it
        pa.default_memory_pool().release_unused()


def _only(numbers: list[int]) -> Any:
    """Columns to read; none: all."""
    return pa.ipc.IpcReadOptions(included_fields=numbers, use_threads=False)


def _bytes_of(kind: Any) -> int:
    """Bytes of a row, about: to find the smallest column."""
    if isinstance(kind, pa.BaseExtensionType):
        return _bytes_of(kind.storage_type)
    if pa.types.is_fixed_size_list(kind):
        return int(kind.list_size) * _bytes_of(kind.value_type)
    return 1 << 20 if pa.types.is_nested(kind) else 8
