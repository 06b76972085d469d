"""One Arrow layout for equal values, so that they have equal bytes. Tables are hashed and sent in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

Batches = tuple[list[pa.RecordBatch], NDArray[np.int64]]
"""The record batches of a table, and the number of the first row of each, with that of the end."""


def slice_rows(schema: pa.Schema, batches: Batches, first: int, last: int) -> pa.Table:
    """Rows [first, last) of a table. Arrow's own slice walks over all chunks, and there can be 100,000."""
    pieces, first_rows = batches
    begin, end = np.searchsorted(first_rows, first, side="right") - 1, np.searchsorted(first_rows, last, side="left")
    table = pa.Table.from_batches(pieces[begin:end], schema=schema)
    return table.slice(first - int(first_rows[begin]), last - first)


def take_rows(schema: pa.Schema, batches: Batches, rows: NDArray[np.int64]) -> pa.Table:
    """Some rows of a table, by their numbers. Batch by batch: Arrow would join all chunks of a column first."""
    pieces, first_rows = batches
    takeable = pa.schema([field.with_type(_takeable(field.type)) for field in schema])
    which = np.searchsorted(first_rows, rows, side="right") - 1
    order = np.argsort(which, kind="stable")
    taken = []
    for number in np.unique(which):
        mine = rows[order][which[order] == number]
        piece = pieces[number]
        if takeable != schema:
            piece = _batch_as(pa.Table.from_batches([piece]), takeable)
        taken.append(piece.take(pa.array(mine - first_rows[number])))
    together = pa.Table.from_batches(taken, schema=takeable)
    if (np.diff(order) > 0).all():
        return together
    return together.combine_chunks().take(pa.array(np.argsort(order)))


def _takeable(kind: pa.DataType) -> pa.DataType:
    """The type, or the plain type of a view at any depth: polars has views, and Arrow cannot take rows of them."""
    return plain_type(kind) if "view" in str(kind) else kind


def hash_and_size(table: pa.Table) -> tuple[str, int]:
    """(hash, bytes) of a small table in its plain layout. Part of fingerprints."""
    sink, schema = _HashingSink(), _schema_as(table.schema, plain_type)
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write(_batch_as(table, schema))
    return sink.digest.hexdigest(), sink.num_bytes


def to_ipc(tables: Iterable[pa.Table], schema: pa.Schema) -> bytes:
    """Small tables as an Arrow stream, one batch each."""
    sink, sent = pa.BufferOutputStream(), _schema_as(schema, sent_type)
    with pa.ipc.new_stream(sink, sent) as writer:
        for table in tables:
            writer.write(_batch_as(table, sent))
    data: bytes = sink.getvalue().to_pybytes()
    return data


class _HashingSink:
    """A file to write to that keeps only a hash and a length."""

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


def _schema_as(schema: pa.Schema, type_of: Callable[[pa.DataType], pa.DataType]) -> pa.Schema:
    return pa.schema([pa.field(field.name, type_of(field.type)) for field in schema])


def _batch_as(table: pa.Table, schema: pa.Schema) -> pa.RecordBatch:
    """A small table as one record batch without dictionaries and views, which share memory with other rows."""
    columns = [_plain_column(column, field.type) for column, field in zip(table.columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _plain_column(column: pa.ChunkedArray, kind: pa.DataType) -> pa.Array:
    if column.type != kind:
        try:
            column = column.cast(kind)
        except pa.ArrowException:
            column = pa.chunked_array([pa.array(column.to_pylist(), kind)])
    joined = column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)
    # A copy of its own. A slice is written with the values around it, so equal values would not be equal bytes.
    return joined.take(pa.array(np.arange(len(joined))))


def sent_type(kind: pa.DataType) -> pa.DataType:
    """The plain type, except for tensors: they are arrays of a shape in another process, too."""
    return kind if isinstance(kind, pa.FixedShapeTensorType) else plain_type(kind)


def plain_type(kind: pa.DataType) -> pa.DataType:
    """A type without dictionaries, views and extensions, at every depth."""
    is_a = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return plain_type(kind.storage_type)
    if is_a.is_dictionary(kind) or is_a.is_run_end_encoded(kind):
        return plain_type(kind.value_type)
    if is_a.is_string_view(kind):
        return pa.large_string()
    if is_a.is_binary_view(kind):
        return pa.large_binary()
    if is_a.is_map(kind):
        return pa.map_(plain_type(kind.key_type), plain_type(kind.item_type))
    if is_a.is_struct(kind):
        return pa.struct([pa.field(field.name, plain_type(field.type)) for field in kind])
    return _plain_list(kind)


def _plain_list(kind: pa.DataType) -> pa.DataType:
    is_a = pa.types
    if is_a.is_fixed_size_list(kind):
        return pa.list_(plain_type(kind.value_type), kind.list_size)
    if is_a.is_large_list(kind) or is_a.is_large_list_view(kind):
        return pa.large_list(plain_type(kind.value_type))
    if is_a.is_list(kind) or is_a.is_list_view(kind):
        return pa.list_(plain_type(kind.value_type))
    return kind
