"""Arrow IPC, file and stream format: mapped, handed out without a copy, and let go of as reading moves on.

Arrow has no checksums. To touch a map behind the end of its file ends the process, so the file's length is looked at
before each chunk. Who cuts it in the moment between that and the copying of the chunk still does: write new files
beside the old ones, and rename them.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchwright.base.errors import SourceError
from batchwright.base.machine import unmap_pages
from batchwright.columns.flat import DAMAGED
from batchwright.columns.schema import Column, Schema, Wanted, chosen, parts_of, pieces, row_bytes, sorted_schema
from batchwright.columns.tables import DAMAGE, column_of, to_numpy

__all__ = ["ArrowShard"]

_HELD_BYTES = 8 << 20
"""Mapped pages that reading may leave in memory, and what bits of booleans may take as bytes at once."""
_MAGIC = b"ARROW1"
_MESSAGE, _END = b"\xff" * 4, b"\xff" * 4 + bytes(4)
"""How messages of a stream begin (before Arrow 0.15: otherwise), and the last one, which says that nothing follows."""


class ArrowShard:
    """One file of record batches. Compressed batches are decoded one at a time."""

    def __init__(self, path: str, columns: Sequence[str] | None) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._buffer: Any = pa.py_buffer(self._map)
            self._open_columns(columns)
        except DAMAGE as error:
            self.close()
            if isinstance(error, SourceError):
                raise
            raise self._damaged(error) from None

    def _open_columns(self, columns: Sequence[str] | None) -> None:
        begins = self._map[:8]
        if begins.startswith(b"FEA1"):
            raise SourceError("Feather version 1", file=self.path, remedy="write it again as version 2")
        self._is_file = begins.startswith(_MAGIC)
        fields = list((self._file([]) if self._is_file else self._stream([])).schema)
        names = chosen([field.name for field in fields], columns, self.path)
        self._numbers = [number for number, field in enumerate(fields) if field.name in names]
        smallest = min(self._numbers, key=lambda number: _bytes_of(fields[number].type))
        self._starts = [0]
        self._is_mapped = True
        """Whether batches are parts of the map, and not decoded copies."""
        begin, end = self._buffer.address, self._buffer.address + self._buffer.size
        source = pa.BufferReader(self._buffer.slice(8 if self._is_file else 0))
        # Of compressed batches one column is decoded: the smallest.
        for batch in pa.ipc.open_stream(source, options=_only([smallest])):
            batch.validate()  # a batch that says a billion rows must have their bytes
            self._starts.append(self._starts[-1] + batch.num_rows)
            held = [buffer for buffer in batch.column(0).buffers() if buffer is not None and buffer.size]
            self._is_mapped &= all(begin <= buffer.address < end for buffer in held)
        self.rows: int = self._starts[-1]
        if self._is_file and self._file([]).num_record_batches != len(self._starts) - 1:
            raise self._damaged(f"{len(self._starts) - 1:,} record batches, its end says another number")
        if not self._is_file and begins.startswith(_MESSAGE) and self._map[source.tell() - 8 : source.tell()] != _END:
            raise SourceError(
                f"a stream without an end: {self.rows:,} rows are there, and perhaps were more",
                file=self.path,
                remedy="write it again, and close the writer",
            )
        self.schema: Schema = sorted_schema(
            {fields[number].name: self._column(number, fields[number]) for number in self._numbers}
        )
        biggest = int(max(np.diff(self._starts), default=0))
        # Of compressed batches: the one that is decoded, its bytes in the file, and the one before, of which the caller
        # still has the last chunk.
        self.decode_bytes: int = 2 * _HELD_BYTES + (0 if self._is_mapped else 3 * biggest * row_bytes(self.schema))

    def _file(self, numbers: list[int]) -> Any:
        return pa.ipc.open_file(pa.BufferReader(self._buffer), options=_only(numbers))

    def _stream(self, numbers: list[int]) -> Any:
        """The batches one after another: a file is a stream between its magic and its footer."""
        begin = 8 if self._is_file else 0
        return pa.ipc.open_stream(pa.BufferReader(self._buffer.slice(begin)), options=_only(numbers))

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
        batches, batch, number, taken_bytes = _Batches(self), None, -1, 0
        for piece in pieces(wanted, self.rows, rows_per_chunk):
            for block, rows in parts_of(piece, self._starts, most_span):
                self._check_length()
                if block != number:
                    batch = None  # one that was decoded goes before the next
                    batch, number = self._batch(batches, block), block
                yield {name: self._taken(batch, name, rows, self._starts[block]) for name in self.schema}
                span = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
                taken_bytes += span * row_bytes(self.schema)
                if taken_bytes > _HELD_BYTES:
                    unmap_pages(self._map, 0, len(self._map))
                    taken_bytes = 0

    def _check_length(self) -> None:
        """Raise where the file was cut since it was mapped."""
        ends = self._map.size()
        if ends < len(self._map):
            raise SourceError(
                f"the file was cut while it was read: it had {len(self._map):,} bytes, and has {ends:,}",
                file=self.path,
                remedy=f"{DAMAGED}: beside the old one, and then rename it",
            )

    def _batch(self, batches: _Batches, block: int) -> Any:
        try:
            batch = batches.get(block)
            for name in self.schema:
                batch.column(name).validate()
        except DAMAGE as error:
            raise self._damaged(error, record_batch=block) from None
        if batch.num_rows != self._starts[block + 1] - self._starts[block]:
            raise self._damaged("it is not the batch that it was", record_batch=block)
        return batch

    def _taken(self, batch: Any, name: str, rows: Wanted, batch_start: int) -> NDArray[Any]:
        first, last = (rows.start, rows.stop - 1) if isinstance(rows, slice) else (int(rows[0]), int(rows[-1]))
        array = batch.column(name).slice(first, last + 1 - first)
        values = to_numpy(array, self.schema[name], file=self.path, name=name, first_row=batch_start + first)
        return values[:: rows.step] if isinstance(rows, slice) else values[rows - first]

    def _damaged(self, error: object, **where: object) -> SourceError:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return SourceError("not an Arrow file, or damaged", file=self.path, **where, reason=reason, remedy=DAMAGED)

    def close(self) -> None:
        self._buffer = None  # the map goes with the last array that looks at it
        pa.default_memory_pool().release_unused()

    def __enter__(self) -> ArrowShard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _Batches:
    """The record batches of a shard, asked for in order."""

    def __init__(self, shard: ArrowShard) -> None:
        # A file goes to any batch at once, and decodes of compressed ones only the columns it is told; but of those it
        # is told it makes copies. A stream makes none, and reads over mapped batches at no cost.
        self.reader = (
            shard._file(shard._numbers)
            if shard._is_file and not shard._is_mapped
            else iter(shard._stream(shard._numbers))
        )
        self.can_seek = shard._is_file and not shard._is_mapped
        self.next = 0

    def get(self, number: int) -> Any:
        if self.can_seek:
            return self.reader.get_batch(number)
        for batch in self.reader:
            self.next += 1
            if self.next > number:
                return batch
        raise ValueError("the stream ends before it")


def _only(numbers: list[int]) -> Any:
    """Columns to read; none: all."""
    return pa.ipc.IpcReadOptions(included_fields=numbers, use_threads=False)


def _bytes_of(kind: Any) -> int:
    """A row's, about: to find the smallest column."""
    if isinstance(kind, pa.BaseExtensionType):
        return _bytes_of(kind.storage_type)
    if pa.types.is_fixed_size_list(kind):
        return int(kind.list_size) * _bytes_of(kind.value_type)
    return 1 << 20 if pa.types.is_nested(kind) else 8
