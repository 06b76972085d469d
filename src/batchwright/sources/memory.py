"""Tables from memory as a source. They are kept as Arrow, never as a list of Python rows, and named by their content.

Anything that offers Arrow's C stream (a pyarrow, polars or pandas table, a DuckDB result), and `datasets.Dataset`.
pyarrow is imported with the first table, which takes long.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from batchwright.base.errors import SourceError, SpecError
from batchwright.base.fingerprint import fingerprint
from batchwright.base.words import first_line
from batchwright.sources.formats import Malformed, Row

__all__ = ["TableRows", "table_rows"]

_PIECE_ROWS = 1024
"""Rows that are hashed at once. This number is part of a table's fingerprint, and tables are cut at its multiples."""


def table_rows(source: Any) -> TableRows | None:
    """The rows of a table; None for every other source."""
    kind = type(source)
    if kind in (list, tuple, dict, str):
        return None
    if kind.__name__ == "LazyFrame":
        raise SpecError("a LazyFrame is not a source: it has no rows yet", parameter="source", remedy="frame.collect()")
    if kind.__module__.partition(".")[0] == "datasets":
        return _rows_of_dataset(source)
    if _is_table(source):
        return TableRows(_checked(_as_table(source)))
    return None


def _is_table(source: Any) -> bool:
    """Whether this is a table. A series is not a table, but an iterable like others."""
    if hasattr(source, "columns") and hasattr(source, "to_dict"):  # a frame of pandas or polars
        return True
    is_arrow = hasattr(source, "__arrow_c_stream__") or hasattr(source, "__arrow_c_array__")
    return is_arrow and any(hasattr(source, name) for name in ("schema", "column_names", "columns"))


def _rows_of_dataset(source: Any) -> TableRows | None:
    if isinstance(source, dict):
        what, splits = f"this is {len(source)} splits, not one table", ", ".join(map(repr, source))
        remedy = f"dataset[{next(iter(source), 'train')!r}], or one ingredient for each"
        raise SpecError(what, parameter="source", splits=splits, remedy=remedy)
    if not hasattr(source, "_indices"):  # an IterableDataset: rows like those of any iterable
        return None
    table = _checked(source.data.table)
    if source._indices is None:
        return TableRows(table)
    return TableRows(table, source._indices.column(0).to_numpy().astype(np.int64))


def _as_table(source: Any) -> Any:
    import pyarrow as pa

    try:
        if isinstance(source, pa.RecordBatchReader):
            return source.read_all()
        return pa.table(source)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        what = first_line(error.args[0] if error.args else error)
        mixed = re.search(r"Conversion failed for column (.*) with type", str(error.args[1:]))
        if mixed is not None:
            names = {str(name): name for name in source.columns}
            name = names.get(mixed[1], mixed[1])  # it may be a number
            remedy = f"frame[{name!r}] = frame[{name!r}].astype(str), or leave such rows out"
            what = f"mixed types in column {name!r}: {what}"
            raise SourceError(what, file="<memory>", column=name, remedy=remedy) from None
        raise SpecError(
            f"a {type(source).__name__} cannot be read as a table: {what}",
            parameter="source",
            remedy="a pyarrow Table, a polars or pandas DataFrame, or rows as dicts",
        ) from None


def _checked(table: Any) -> Any:
    names = table.column_names
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        what = f"two columns have one name: {', '.join(map(repr, twice))}"
        raise SpecError(what, parameter="source", remedy="rename one of them")
    if not table.num_rows:
        raise SpecError("this source is a table without rows", parameter="source", remedy="a table with rows")
    return table


class TableRows:
    """The rows of an Arrow table, or those that `indices` choose of it, in that order.

    Only its own rows travel to other processes, as Arrow. Its fingerprint depends on the rows, not on the chunks of the
    table.
    """

    def __init__(self, table: Any, indices: Any = None) -> None:
        self._table, self._indices = table, indices

    def __len__(self) -> int:
        if self._indices is None:
            return int(self._table.num_rows)
        return len(self._indices)

    @property
    def fingerprint(self) -> str:
        from batchwright.sources.plain_arrow import sent_type

        schema = [[field.name, str(sent_type(field.type))] for field in self._table.schema]
        return fingerprint([schema, len(self), [digest for digest, _ in self._hashed_pieces]])

    def parts(self, part_bytes: int) -> Iterator[tuple[int, int, TableRows]]:
        """(first row, bytes, rows) of consecutive parts of about `part_bytes`, cut between pieces."""
        begin = num_bytes = 0
        for number, (_, piece_bytes) in enumerate(self._hashed_pieces):
            if num_bytes and num_bytes + piece_bytes > part_bytes:
                yield begin * _PIECE_ROWS, num_bytes, self._part(begin, number)
                begin, num_bytes = number, 0
            num_bytes += piece_bytes
        yield begin * _PIECE_ROWS, num_bytes, self._part(begin, len(self._hashed_pieces))

    def _part(self, begin: int, end: int) -> TableRows:
        """The rows of some pieces."""
        first, last = begin * _PIECE_ROWS, min(end * _PIECE_ROWS, len(self))
        if self._indices is None:
            part = TableRows(self._rows(first, last))
        else:
            part = TableRows(self._table, self._indices[first:last])
        part.__dict__["_hashed_pieces"] = self._hashed_pieces[begin:end]
        return part

    def read(self, columns: Sequence[str] | None) -> Iterator[Row | Malformed]:
        """Rows as dicts, made a piece at a time."""
        from batchwright.sources.arrow import count_only, only_needed, rows_of

        if count_only(columns):
            yield from ({} for _ in range(len(self)))
            return
        for piece in TableRows(only_needed(self._table, columns), self._indices)._pieces():
            for batch in piece.to_batches():
                yield from rows_of(batch)

    def table(self, numbers: Any = None) -> Any:
        """The rows as an Arrow table. With `numbers`, only the rows with these numbers, in their order."""
        if numbers is not None:
            return self._take(numbers)
        if self._indices is not None:
            return self._take(slice(None))
        return self._table

    def _take(self, numbers: Any) -> Any:
        from batchwright.sources.plain_arrow import take_rows

        if self._indices is not None:
            numbers = self._indices[numbers]
        if not len(numbers):
            return self._table.slice(0, 0)
        return take_rows(self._table.schema, self._batches, np.asarray(numbers, np.int64))

    def _rows(self, first: int, last: int) -> Any:
        from batchwright.sources.plain_arrow import slice_rows

        if self._indices is None:
            return slice_rows(self._table.schema, self._batches, first, last)
        return self._take(slice(first, last))

    def _pieces(self) -> Iterator[Any]:
        """The rows as small tables."""
        for first in range(0, len(self), _PIECE_ROWS):
            yield self._rows(first, min(first + _PIECE_ROWS, len(self)))

    @cached_property
    def _batches(self) -> tuple[list[Any], Any]:
        """The table's batches, and the number of the first row of each."""
        batches = self._table.to_batches()
        return batches, np.cumsum([0, *(batch.num_rows for batch in batches)])

    @cached_property
    def _hashed_pieces(self) -> list[tuple[str, int]]:
        """(hash, bytes) of every piece."""
        from batchwright.sources.plain_arrow import hash_and_size

        return [hash_and_size(piece) for piece in self._pieces()]

    def __reduce__(self) -> tuple[Any, ...]:
        from batchwright.sources.plain_arrow import to_ipc

        return _from_ipc, (to_ipc(self._pieces(), self._table.schema),)


def _from_ipc(data: bytes) -> TableRows:
    import pyarrow as pa

    return TableRows(pa.ipc.open_stream(data).read_all())
