"""Arrow IPC and Parquet files as shards.

Arrow files are mapped, handed out without a copy, and released as reading advances. Arrow has no checksums. To touch a
map behind the end of its file ends the process, so the length of the file is checked before each chunk. A writer that
cuts it between the check and the copy still does: write new files beside the old ones, and rename them.

Of a Parquet file only the row groups with wanted rows are read, a few thousand rows at a time.
"""

from __future__ import annotations

import abc
import contextlib
import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchwright.base.checks import at_least
from batchwright.base.errors import BatchwrightError, SourceError
from batchwright.base.machine import unmap_pages
from batchwright.columns.arrow import ARROW_DAMAGE, column_of, columns_of_batch, open_parquet
from batchwright.columns.shard import (
    DAMAGED,
    Column,
    Rows,
    ShardReader,
    Wanted,
    blocks_of,
    chosen,
    count_below,
    damaged,
    numbers_of,
    pieces,
    row_bytes,
)

_HELD_BYTES = 8 << 20
"""Bytes of mapped pages that reading may leave in memory, and of booleans that are unpacked at once."""
_MAGIC = b"ARROW1"
_MESSAGE, _END = b"\xff" * 4, b"\xff" * 4 + bytes(4)
"""The first bytes of messages of a stream (since Arrow 0.15), and the last message, which marks the end."""


class _ArrowReader(ShardReader):
    """A file that pyarrow reads. Its errors become errors that name the file."""

    _format: ClassVar[str]

    def __init__(self, path: str, columns: Sequence[str] | None) -> None:
        self.path = path
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close)
            with self._refused_if_damaged():
                self._open(columns)
            on_error.pop_all()

    @abc.abstractmethod
    def _open(self, columns: Sequence[str] | None) -> None: ...

    @contextlib.contextmanager
    def _refused_if_damaged(self, **where: object) -> Iterator[None]:
        try:
            yield
        except BatchwrightError:
            raise
        except (*ARROW_DAMAGE, StopIteration) as error:  # StopIteration: fewer batches than were counted
            raise self._damaged(error, **where) from None

    def _damaged(self, error: object, **where: object) -> SourceError:
        return damaged(self._format, self.path, error, None, **where)


class ArrowShard(_ArrowReader):
    """One file of record batches. Compressed batches are decoded one at a time."""

    _format = "an Arrow"

    def _open(self, columns: Sequence[str] | None) -> None:
        with open(self.path, "rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._buffer: Any = pa.py_buffer(self._map)
        self._is_file = self._map[:6] == _MAGIC
        self._begin = 8 * self._is_file  # a file is a stream between its magic and its footer
        fields = list(self._stream([]).schema)
        names = chosen([field.name for field in fields], columns, self.path)
        number_of = {field.name: number for number, field in enumerate(fields)}
        self._numbers = sorted(number_of[name] for name in names)
        self._count_rows(min(self._numbers, key=lambda number: _bytes_of(fields[number].type)))
        self.schema = {name: self._column(number_of[name], fields[number_of[name]]) for name in names}
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
        most_span = None
        if unpacked:
            most_span = max(1, _HELD_BYTES // unpacked)
        with self._refused_if_damaged():
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
            reader = pa.ipc.open_file(pa.BufferReader(self._buffer), options=_only(self._numbers))
            return lambda number: reader.get_batch(number)
        stream = enumerate(self._stream(self._numbers))
        return lambda number: next(batch for at, batch in stream if at == number)

    def _checked_batch(self, read_batch: Callable[[int], Any], block: int) -> Any:
        with self._refused_if_damaged(record_batch=block):
            batch = read_batch(block)
            for name in self.schema:
                batch.column(name).validate()
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
    if pa.types.is_nested(kind):
        return 1 << 20
    return 8


_BATCH_BYTES = 16 << 20
"""Decoded at once, at most; the caller still has the batch before."""
_BYTES_PER_VALUE = 24
"""While a value is decoded: small integers are four bytes in Parquet, and values of lists have two levels each."""
_PAGE_BYTES = 8 << 20
"""The most bytes for one column: a page, a dictionary and the bytes read ahead. Writers make pages of 1 MiB."""


class ParquetShard(_ArrowReader):
    """One Parquet file. Checksums of pages are checked if the writer made some."""

    _format = "a Parquet"
    _file: Any = None

    def _open(self, columns: Sequence[str] | None) -> None:
        self._file = open_parquet(self.path)
        metadata, schema = self._file.metadata, self._file.schema_arrow
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        counts = [group.num_rows for group in groups]
        if min(counts, default=0) < 0 or sum(counts) != metadata.num_rows:
            raise self._damaged(f"row groups of {counts[:5]} rows in a file of {metadata.num_rows:,}")
        self.rows = metadata.num_rows
        self._starts = [0, *np.cumsum(counts, dtype=object).tolist()]
        names = chosen(schema.names, columns, self.path)
        self.schema = {name: self._column(schema.field(name)) for name in names}
        values = sum(math.prod(column.shape) for column in self.schema.values())
        self._most_rows = max(1, _BATCH_BYTES // (_BYTES_PER_VALUE * max(values, 1)))
        # Only sizes of row groups are asked for: pyarrow ends the process if a damaged file is asked about its columns.
        biggest = max((group.total_byte_size for group in groups), default=0)
        self.decode_bytes = 2 * _BATCH_BYTES + min(_PAGE_BYTES * metadata.num_columns, 2 * max(biggest, 0))

    def _column(self, field: Any) -> Column:
        def first_row() -> Any:
            if not self.rows:
                return pa.array([], field.type)
            group, _ = next(blocks_of(range(1), self._starts))
            return next(self._batches(group, [field.name], 1)).column(field.name)

        return column_of(field, first_row, file=self.path)

    def _batches(self, group: int, names: list[str], batch_rows: int) -> Iterator[Any]:
        return iter(self._file.iter_batches(batch_rows, row_groups=[group], columns=names, use_threads=False))

    def chunks(self, wanted: Wanted, rows_per_chunk: int) -> Iterator[dict[str, NDArray[Any]]]:
        numbers = numbers_of(wanted, self.rows)
        at_least(1, rows_per_chunk=rows_per_chunk)
        for group, rows in blocks_of(numbers, self._starts):
            yield from self._chunks_of_group(group, rows, rows_per_chunk)

    def _chunks_of_group(self, group: int, rows: Rows, rows_per_chunk: int) -> Iterator[dict[str, NDArray[Any]]]:
        step = rows.step if isinstance(rows, range) else 1
        batches = self._batches(group, list(self.schema), min(self._most_rows, rows_per_chunk * step))
        at, first = 0, self._starts[group]
        while at < len(rows):
            batch = self._next(batches, group, first)
            stop = count_below(rows, first + batch.num_rows)
            for begin in range(at, stop, rows_per_chunk):
                chunk = rows[begin : min(begin + rows_per_chunk, stop)]
                yield columns_of_batch(batch, self.schema, chunk, file=self.path, first_row=first)
            at, first = stop, first + batch.num_rows

    def _next(self, batches: Iterator[Any], group: int, first: int) -> Any:
        with self._refused_if_damaged(row_group=group):
            batch = next(batches, None)
        if batch is None:
            begin, end = self._starts[group : group + 2]
            raise self._damaged(f"it says {end - begin:,} rows, there are {first - begin:,}", row_group=group)
        return batch

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        pa.default_memory_pool().release_unused()  # pages of a shard that is done are of no use to the next step
