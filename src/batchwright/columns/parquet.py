"""Parquet shards. Only the row groups with wanted rows are read, a few thousand rows at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchwright.base.checks import at_least
from batchwright.base.errors import SourceError
from batchwright.base.words import first_line
from batchwright.columns.arrow_files import open_parquet
from batchwright.columns.fixed_shape import ARROW_DAMAGE, column_of, columns_of_batch
from batchwright.columns.schema import (
    DAMAGED,
    Column,
    Rows,
    Wanted,
    blocks_of,
    chosen,
    count_below,
    numbers_of,
    sorted_schema,
)
from batchwright.columns.shard import ShardReader

__all__ = ["ParquetShard"]

_BATCH_BYTES = 16 << 20
"""Decoded at once, at most; the caller still has the batch before."""
_BYTES_PER_VALUE = 24
"""While a value is decoded: small integers are four bytes in Parquet, and values of lists have two levels each."""
_PAGE_BYTES = 8 << 20
"""The most bytes for one column: a page, a dictionary and the bytes read ahead. Writers make pages of 1 MiB."""


class ParquetShard(ShardReader):
    """One Parquet file. Checksums of pages are checked if the writer made some."""

    decode_bytes: int
    rows: int

    def __init__(self, path: str, columns: Sequence[str] | None) -> None:
        self.path = path
        try:
            self._file = open_parquet(path)
        except ARROW_DAMAGE as error:
            raise self._damaged(error) from None
        try:
            self._open_columns(columns)
        except SourceError:
            self.close()
            raise
        except ARROW_DAMAGE as error:
            self.close()
            raise self._damaged(error) from None

    def _open_columns(self, columns: Sequence[str] | None) -> None:
        metadata, schema = self._file.metadata, self._file.schema_arrow
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        counts = [group.num_rows for group in groups]
        if min(counts, default=0) < 0 or sum(counts) != metadata.num_rows:
            raise self._damaged(f"row groups of {counts[:5]} rows in a file of {metadata.num_rows:,}")
        self.rows = metadata.num_rows
        self._starts = [0, *np.cumsum(counts, dtype=object).tolist()]
        names = chosen(schema.names, columns, self.path)
        self.schema = sorted_schema({name: self._column(schema.field(name)) for name in names})
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
        yield from self._file.iter_batches(batch_rows, row_groups=[group], columns=names, use_threads=False)

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
        try:
            return next(batches)
        except StopIteration:
            rows = self._starts[group + 1] - self._starts[group]
            reason = f"it says {rows:,} rows, there are {first - self._starts[group]:,}"
            raise self._damaged(reason, row_group=group) from None
        except ARROW_DAMAGE as error:
            raise self._damaged(error, row_group=group) from None

    def _damaged(self, error: object, **where: object) -> SourceError:
        return SourceError(
            "not a Parquet file, or damaged", file=self.path, **where, reason=first_line(error), remedy=DAMAGED
        )

    def close(self) -> None:
        self._file.close()
        pa.default_memory_pool().release_unused()  # pages of a shard that is done are of no use to the next step
