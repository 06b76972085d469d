"""Tables from memory as a source: kept as Arrow, never as a list of Python rows, and named by their content.

Anything that offers Arrow's C stream (a pyarrow, polars or pandas table, a DuckDB result), and `datasets.Dataset`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import xxhash

from batchwright.base.errors import SourceError, SpecError
from batchwright.base.fingerprint import fingerprint
from batchwright.sources.arrow import count_only, needed_names, rows_of
from batchwright.sources.formats import Malformed, Row

__all__ = ["TableRows", "table_rows"]

_PIECE_ROWS = 1024
"""Rows that are hashed at once. Part of a table's fingerprint, and where it can be cut."""


def table_rows(source: Any) -> TableRows | None:
    """The rows of a table; None where the source is something else."""
    kind = type(source)
    if kind in (list, tuple, dict, str):
        return None
    if kind.__name__ == "LazyFrame":
        raise SpecError("a LazyFrame is not a source: it has no rows yet", parameter="source", remedy="frame.collect()")
    if kind.__module__.partition(".")[0] == "datasets":
        return _rows_of_dataset(source)
    is_arrow = hasattr(source, "__arrow_c_stream__") or hasattr(source, "__arrow_c_array__")
    is_frame = hasattr(source, "columns") and hasattr(source, "to_dict")
    has_columns = is_frame or hasattr(source, "schema") or hasattr(source, "column_names") or hasattr(source, "columns")
    if not is_frame and not (is_arrow and has_columns):  # not a table, but perhaps a series: an iterable like others
        return None
    return TableRows(_checked(_as_table(source)))


def _rows_of_dataset(source: Any) -> TableRows | None:
    if isinstance(source, dict):
        splits = list(source)
        raise SpecError(
            f"this is {len(splits)} splits, not one table",
            parameter="source",
            splits=", ".join(map(repr, splits)),
            remedy=f"dataset[{splits[0]!r}], or one ingredient for each" if splits else None,
        )
    if not hasattr(source, "_indices"):  # an IterableDataset: rows like those of any iterable
        return None
    indices = source._indices
    return TableRows(
        _checked(source.data.table), None if indices is None else indices.column(0).to_numpy().astype(np.int64)
    )


def _as_table(source: Any) -> Any:
    import pyarrow as pa

    try:
        if isinstance(source, pa.RecordBatchReader):
            return source.read_all()
        return pa.table(source)
    except (pa.ArrowException, TypeError, ValueError) as error:
        mixed = _mixed_column(source)
        if mixed is not None:
            raise mixed from None
        raise SpecError(
            f"a {type(source).__name__} cannot be read as a table: {(str(error).splitlines() or [''])[0]}",
            parameter="source",
            remedy="a pyarrow Table, a polars or pandas DataFrame, or rows as dicts",
        ) from None


def _mixed_column(frame: Any) -> SourceError | None:
    """The column of a data frame whose values have several types, and the first row that differs."""
    for name in getattr(frame, "columns", ()):
        first: type | None = None
        try:
            values = list(frame[name])
        except (TypeError, KeyError, ValueError):  # no data frame after all
            return None
        for number, value in enumerate(values):
            kind = type(value)
            if value is None or kind.__name__ in ("NAType", "NaTType") or (kind is float and value != value):
                continue  # the ways in which a frame says null
            if first is not None and kind is not first:
                return SourceError(
                    f"mixed types in a column: {name!r} holds {first.__name__} and {kind.__name__}",
                    file="<memory>",
                    row=number,
                    column=name,
                    remedy=f"frame[{name!r}] = frame[{name!r}].astype(str), or leave such rows out",
                )
            first = kind
    return None


def _checked(table: Any) -> Any:
    names = table.column_names
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise SpecError(
            f"two columns have one name: {', '.join(map(repr, sorted(twice)))}",
            parameter="source",
            remedy="rename one of them",
        )
    if not table.num_rows:
        raise SpecError("this source is a table without rows", parameter="source", remedy="a table with rows")
    return table


class TableRows:
    """The rows of an Arrow table, or those that `indices` choose of it, in that order.

    Travels to other processes as Arrow, and only its own rows do. Its fingerprint depends on what the rows are, not
    on how the table was put together.
    """

    def __init__(self, table: Any, indices: Any = None) -> None:
        self._table, self._indices = table, indices

    def __len__(self) -> int:
        return len(self._indices) if self._indices is not None else int(self._table.num_rows)

    @property
    def fingerprint(self) -> str:
        schema = [[field.name, str(_sent_type(field.type))] for field in self._table.schema]
        return fingerprint([schema, len(self), [digest for digest, _ in self._pieces]])

    def parts(self, part_bytes: int) -> Iterator[tuple[int, int, TableRows]]:
        """(first row, bytes, rows) of consecutive parts, each of about so many bytes."""
        num_bytes = 0
        borders = [0]
        sizes: list[int] = []
        for number, (_, piece_bytes) in enumerate(self._pieces):
            if num_bytes and num_bytes + piece_bytes > part_bytes:
                borders.append(number)
                sizes.append(num_bytes)
                num_bytes = 0
            num_bytes += piece_bytes
        borders.append(len(self._pieces))
        sizes.append(num_bytes)
        for (begin, end), size in zip(pairwise(borders), sizes, strict=True):
            first, last = begin * _PIECE_ROWS, min(end * _PIECE_ROWS, len(self))
            part = self._part(first, last)
            part.__dict__["_pieces"] = self._pieces[begin:end]
            yield first, size, part

    def read(self, columns: Sequence[str] | None) -> Iterator[Row | Malformed]:
        """Rows as dicts, made a piece at a time."""
        if count_only(columns):
            yield from ({} for _ in range(len(self)))
            return
        needed = needed_names(self._table.column_names, columns)
        table = (
            self._table if needed is None else self._table.select([n for n in self._table.column_names if n in needed])
        )
        for piece in TableRows(table, self._indices)._tables():
            for batch in piece.to_batches():
                yield from rows_of(batch)

    def table(self, numbers: Any = None) -> Any:
        """The rows as an Arrow table; with `numbers`, those of them, in that order."""
        chosen = self._indices if numbers is None else numbers if self._indices is None else self._indices[numbers]
        if chosen is None:
            return self._table
        if not len(chosen):
            return self._table.slice(0, 0)
        return _take(self._table, self._batches, np.asarray(chosen, np.int64))

    def _part(self, first: int, last: int) -> TableRows:
        if self._indices is not None:
            return TableRows(self._table, self._indices[first:last])
        return TableRows(_slice(self._table, self._batches, first, last))

    def _tables(self) -> Iterator[Any]:
        """The rows as small tables of Arrow data."""
        for first in range(0, len(self), _PIECE_ROWS):
            last = min(first + _PIECE_ROWS, len(self))
            if self._indices is None:
                yield _slice(self._table, self._batches, first, last)
            else:
                yield _take(self._table, self._batches, self._indices[first:last])

    @cached_property
    def _batches(self) -> tuple[list[Any], Any]:
        """The table's batches, and the number of the first row of each."""
        batches = self._table.to_batches()
        return batches, np.cumsum([0, *(batch.num_rows for batch in batches)])

    @cached_property
    def _pieces(self) -> list[tuple[str, int]]:
        """(hash, bytes) of every piece, as they would be sent."""
        import pyarrow as pa

        found: list[tuple[str, int]] = []
        for table in self._tables():
            sink = _HashingSink()
            with pa.ipc.new_stream(sink, _plain_schema(table.schema)) as writer:
                writer.write(_plain_batch(table))
            found.append((sink.digest.hexdigest(), sink.num_bytes))
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        import pyarrow as pa

        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, _plain_schema(self._table.schema, _sent_type)) as writer:
            for table in self._tables():
                writer.write(_plain_batch(table, _sent_type))
        return _from_ipc, (sink.getvalue().to_pybytes(),)


def _from_ipc(data: bytes) -> TableRows:
    import pyarrow as pa

    return TableRows(pa.ipc.open_stream(data).read_all())


class _HashingSink:
    """A file to write to that keeps a hash and a length of what it is given."""

    closed = False

    def __init__(self) -> None:
        self.digest = xxhash.xxh3_128()
        self.num_bytes = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.digest.update(view)
        self.num_bytes += len(view)
        return len(view)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def _slice(table: Any, batches: tuple[list[Any], Any], first: int, last: int) -> Any:
    """Rows [first, last) of a table. Arrow's own slice walks over all chunks, and there can be 100,000."""
    import pyarrow as pa

    pieces, first_rows = batches
    begin, end = np.searchsorted(first_rows, first, side="right") - 1, np.searchsorted(first_rows, last, side="left")
    found = [
        pieces[n].slice(max(first - int(first_rows[n]), 0), last - max(first, int(first_rows[n])))
        for n in range(begin, end)
    ]
    return pa.Table.from_batches(found, schema=table.schema)


def _take(table: Any, batches: tuple[list[Any], Any], indices: Any) -> Any:
    """Some rows of a table, by their numbers. Batch by batch: Arrow would join all chunks of a column first."""
    import pyarrow as pa

    pieces, first_rows = batches
    which = np.searchsorted(first_rows, indices, side="right") - 1
    order = np.argsort(which, kind="stable")
    taken = []
    for number in np.unique(which):
        mine = indices[order][which[order] == number]
        taken.append(pieces[number].take(pa.array(mine - first_rows[number])))
    together = pa.Table.from_batches(taken, schema=table.schema)
    if (np.diff(order) > 0).all():
        return together
    back = np.empty(len(order), np.int64)
    back[order] = np.arange(len(order))
    return together.combine_chunks().take(pa.array(back))


# One way to lay out the same values


def _plain_batch(table: Any, type_of: Any = None) -> Any:
    """A small table as one record batch without dictionaries and views, which share memory with other rows."""
    import pyarrow as pa

    schema = _plain_schema(table.schema, type_of)
    columns = [_plain_column(column, field.type) for column, field in zip(table.columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _plain_column(column: Any, kind: Any) -> Any:
    import pyarrow as pa

    if column.type != kind:
        try:
            column = column.cast(kind)
        except pa.ArrowException:
            column = pa.chunked_array([pa.array(column.to_pylist(), kind)])
    joined = column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)
    # A copy of its own: a slice is written with what lies around it, so that equal values would not be equal bytes.
    return joined.take(pa.array(np.arange(len(joined))))


def _plain_schema(schema: Any, type_of: Any = None) -> Any:
    import pyarrow as pa

    return pa.schema([pa.field(field.name, (type_of or _plain_type)(field.type)) for field in schema])


def _sent_type(kind: Any) -> Any:
    """The plain type, but of tensors as they are: in another process, too, they are arrays of a shape."""
    import pyarrow as pa

    return kind if isinstance(kind, pa.FixedShapeTensorType) else _plain_type(kind)


def _plain_type(kind: Any) -> Any:
    import pyarrow as pa

    is_a = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return _plain_type(kind.storage_type)
    if is_a.is_dictionary(kind) or is_a.is_run_end_encoded(kind):
        return _plain_type(kind.value_type)
    if is_a.is_string_view(kind):
        return pa.large_string()
    if is_a.is_binary_view(kind):
        return pa.large_binary()
    if is_a.is_map(kind):
        return pa.map_(_plain_type(kind.key_type), _plain_type(kind.item_type))
    if is_a.is_fixed_size_list(kind):
        return pa.list_(_plain_type(kind.value_type), kind.list_size)
    if is_a.is_large_list(kind) or is_a.is_large_list_view(kind):
        return pa.large_list(_plain_type(kind.value_type))
    if is_a.is_list(kind) or is_a.is_list_view(kind):
        return pa.list_(_plain_type(kind.value_type))
    if is_a.is_struct(kind):
        fields = [kind.field(number) for number in range(kind.num_fields)]
        return pa.struct([pa.field(field.name, _plain_type(field.type)) for field in fields])
    return kind
