"""Parquet: only the row groups that hold wanted rows, a few thousand rows of them at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from batchwright.base.checks import at_least
from batchwright.base.errors import SourceError
from batchwright.columns.flat import DAMAGED
from batchwright.columns.schema import Column, Schema, Wanted, chosen, numbers_of, sorted_schema
from batchwright.columns.tables import DAMAGE, column_of, to_numpy

__all__ = ["ParquetShard"]

_BATCH_BYTES = 16 << 20
"""Decoded at once, at most; the caller still has the batch before."""
_BYTES_PER_VALUE = 24
"""While a value is decoded: small integers are four bytes in Parquet, and values of lists have two levels each."""
_PAGE_BYTES = 8 << 20
"""Of one column, at most: a page, a dictionary and what is read ahead. Writers make pages of 1 MiB."""


class ParquetShard:
    """One Parquet file. Checksums of pages are checked, where the writer made some."""

    def __init__(self, path: str, columns: Sequence[str] | None) -> None:
        self.path = path
        try:
            self._file = pq.ParquetFile(
                path, buffer_size=1 << 20, pre_buffer=False, page_checksum_verification=True, memory_map=False
            )
        except DAMAGE as error:
            raise self._damaged(error) from None
        try:
            self._open_columns(columns)
        except BaseException as error:
            self.close()
            if isinstance(error, DAMAGE) and not isinstance(error, SourceError):
                raise self._damaged(error) from None
            raise

    def _open_columns(self, columns: Sequence[str] | None) -> None:
        metadata, schema = self._file.metadata, self._file.schema_arrow
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        counts = [group.num_rows for group in groups]
        if any(count < 0 for count in counts) or sum(counts) != metadata.num_rows:
            raise self._damaged(f"row groups of {counts[:5]} rows in a file of {metadata.num_rows:,}")
        self.rows: int = metadata.num_rows
        self._starts = [0, *np.cumsum(counts, dtype=object).tolist()]
        names = chosen(schema.names, columns, self.path)
        self.schema: Schema = sorted_schema({name: self._column(schema.field(name)) for name in names})
        values = sum(math.prod(column.shape) for column in self.schema.values())
        self._most_rows = max(1, _BATCH_BYTES // (_BYTES_PER_VALUE * max(values, 1)))
        # Of row groups only these two are asked: pyarrow ends the process when it finds damage in what they say of
        # their columns.
        biggest = max((group.total_byte_size for group in groups), default=0)
        self.decode_bytes: Any = 2 * _BATCH_BYTES + min(_PAGE_BYTES * metadata.num_columns, 2 * max(biggest, 0))

    def _column(self, field: Any) -> Column:
        def first_row() -> Any:
            group = next((number for number in range(len(self._starts) - 1) if self._rows_in(number)), None)
            if group is None:
                return pa.array([], field.type)
            return next(self._batches(group, [field.name], 1)).column(field.name)

        return column_of(field, first_row, file=self.path)

    def _rows_in(self, group: int) -> int:
        return int(self._starts[group + 1] - self._starts[group])

    def _batches(self, group: int, names: list[str], batch_rows: int) -> Iterator[Any]:
        yield from self._file.iter_batches(batch_rows, row_groups=[group], columns=names, use_threads=False)

    def chunks(self, wanted: Wanted, rows_per_chunk: int) -> Iterator[dict[str, NDArray[Any]]]:
        numbers = numbers_of(wanted, self.rows)
        step = numbers.step if isinstance(numbers, range) else 1
        batch_rows = min(self._most_rows, at_least(1, rows_per_chunk=rows_per_chunk) * step)
        at, names = 0, list(self.schema)
        while at < len(numbers):
            group = int(np.searchsorted(self._starts, numbers[at], side="right")) - 1
            first = self._starts[group]
            batches = self._batches(group, names, batch_rows)
            while at < len(numbers) and numbers[at] < self._starts[group + 1]:
                batch = self._next(batches, group, first)
                stop = _below(numbers, first + batch.num_rows)
                for begin in range(at, stop, rows_per_chunk):
                    rows = numbers[begin : min(begin + rows_per_chunk, stop)]
                    yield {name: self._taken(batch, name, rows, first) for name in names}
                at, first = stop, first + batch.num_rows

    def _next(self, batches: Iterator[Any], group: int, first: int) -> Any:
        try:
            return next(batches)
        except StopIteration:
            reason = f"it says {self._rows_in(group):,} rows, there are {first - self._starts[group]:,}"
            raise self._damaged(reason, row_group=group) from None
        except DAMAGE as error:
            raise self._damaged(error, row_group=group) from None

    def _taken(self, batch: Any, name: str, rows: Any, batch_start: int) -> NDArray[Any]:
        first, last = int(rows[0]) - batch_start, int(rows[-1]) - batch_start
        array = batch.column(name).slice(first, last + 1 - first)
        values = to_numpy(array, self.schema[name], file=self.path, name=name, first_row=batch_start + first)
        return values[:: rows.step] if isinstance(rows, range) else values[rows - batch_start - first]

    def _damaged(self, error: object, **where: object) -> SourceError:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return SourceError("not a Parquet file, or damaged", file=self.path, **where, reason=reason, remedy=DAMAGED)

    def close(self) -> None:
        self._file.close()
        pa.default_memory_pool().release_unused()  # pages of a shard that is done are of no use to the next step

    def __enter__(self) -> ParquetShard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _below(numbers: range | NDArray[np.int64], limit: int) -> int:
    """How many of the sorted numbers are smaller.

    >>> _below(range(1, 10, 3), 5), _below(range(1, 10, 3), 100)
    (2, 3)
    """
    if isinstance(numbers, range):
        return min(len(numbers), max(0, -(-(limit - numbers.start) // numbers.step)))
    return int(np.searchsorted(numbers, limit, side="left"))
