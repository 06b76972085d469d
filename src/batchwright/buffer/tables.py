"""Tables as columns: Arrow tables and streams, data frames, datasets, dicts of arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from batchwright.base.errors import SampleError, SampleTypeError
from batchwright.base.words import first_line
from batchwright.buffer.column import check_names, sample_error
from batchwright.buffer.plain_values import DTYPES, Misfit, array_of_tensor, describe, is_array, kind_of, rows_of_tensor
from batchwright.buffer.schema import Row

__all__ = ["Normalized", "columns_of_table", "columns_to_extend"]


class Normalized(NamedTuple):
    """The rows made from samples. A buffer holds rows of one kind."""

    kind: str
    """The kind of the samples: "dict", "tensor" or "image"."""
    rows: list[Row]
    columns: dict[str, Any] | None = None
    """The columns of a table, in place of rows."""


def columns_to_extend(source: Any) -> Normalized:
    """The rows of something with columns."""
    try:
        if is_array(source):
            return Normalized("tensor", [], {"tensor": rows_of_tensor(source, "a tensor [rows, ...]")})
    except Misfit as misfit:
        raise sample_error(misfit, None, None) from None
    if isinstance(source, Mapping) and kind_of(type(source)) is None:
        return Normalized("dict", [], _columns_of_dict(source))
    found = columns_of_table(source)
    if found is None:
        raise SampleTypeError(
            f"{describe(source)} has no columns",
            got=describe(source),
            remedy='extend({"obs": array, "label": array}), a table or a data frame; append(...) takes samples',
        )
    return Normalized("dict", [], found)


def columns_of_table(source: Any) -> dict[str, Any] | None:
    """The columns of a table, a data frame or a dataset; None of anything else."""
    match kind_of(type(source)):
        case "dataset":
            return _columns_of_dataset(source)
        case "pandas":
            return _columns_of_pandas(source)
        case "series" | "splits" | "stream" | "lazy":
            return None
    if isinstance(source, pa.Array | pa.ChunkedArray) or not hasattr(source, "__arrow_c_stream__"):
        return None
    try:
        table = _table(source)
    except (pa.ArrowException, TypeError, ValueError) as error:  # e.g. a stream of values that are not rows
        raise SampleTypeError(
            f"{describe(source)} cannot be read as a table: {first_line(error)}",
            got=describe(source),
            remedy="a table or a data frame, or a dict of arrays",
        ) from None
    check_names(table.column_names)
    return dict(zip(table.column_names, table.columns, strict=True))


def _table(source: Any) -> pa.Table:
    if isinstance(source, pa.Table):  # its stream would hide that the memory may change
        return source
    if isinstance(source, pa.RecordBatch):
        return pa.Table.from_batches([source])
    return pa.RecordBatchReader.from_stream(source).read_all()


# Dicts of arrays


def _columns_of_dict(source: Mapping[Any, Any]) -> dict[str, Any]:
    if not source:
        raise SampleError("a dict without columns", remedy='extend({"obs": array, "label": array})')
    columns = {name: _column(name, column) for name, column in source.items()}
    first, length = next((name, len(column)) for name, column in columns.items())
    for name, column in columns.items():
        if len(column) != length:
            raise SampleError(
                f"columns of different lengths: {first!r} has {length} rows, {name!r} has {len(column)}",
                column=str(name),
                has=f"{first}: {length} rows",
                got=f"{name}: {len(column)} rows",
                remedy="one value for each row in every column",
            )
    return columns


def _column(name: Any, column: Any) -> Any:
    if is_array(column) and len(column.shape):
        try:
            return array_of_tensor(column)
        except Misfit as misfit:
            raise sample_error(misfit, None, str(name)) from None
    if kind_of(type(column)) == "series":
        return pa.array(column)
    if isinstance(column, pa.Array | pa.ChunkedArray | list):
        return column
    if isinstance(column, tuple | range):
        return list(column)
    raise SampleTypeError(
        f"extend takes columns, and {name!r} is {describe(column)}",
        column=str(name),
        got=describe(column),
        remedy="append(...) for one row; a list or an array of values for many",
    )


# Data frames and datasets


def _columns_of_pandas(frame: Any) -> dict[str, Any]:
    """A pandas frame's columns. An index with a name is a column too; NaN in a column of floats stays NaN."""
    names = [name for name in frame.index.names if name is not None]
    if names:
        frame = frame.reset_index(names)
    check_names(frame.columns)
    return {name: _column_of_pandas(frame[name]) for name in frame.columns}


def _column_of_pandas(series: Any) -> Any:
    if isinstance(series.dtype, np.dtype) and series.dtype in DTYPES:
        return series.to_numpy()
    if series.dtype != object:
        try:
            return pa.Array.from_pandas(series)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            pass  # e.g. complex numbers: the errors for Python values name the row at fault
    return [None if _is_missing(value) else value for value in series]


def _is_missing(value: Any) -> bool:
    return value is None or type(value).__name__ in ("NAType", "NaTType") or (type(value) is float and value != value)


def _columns_of_dataset(dataset: Any) -> dict[str, Any]:
    """A dataset's rows in its own order, the columns that its format shows, and as arrays if its format says so."""
    shown = dataset.column_names if dataset.format["output_all_columns"] else dataset.format["columns"]
    kind = dataset.format["type"]
    if kind == "custom":  # a transform makes each row
        rows = list(dataset)
        names = list(dict.fromkeys(name for row in rows for name in row))
        return {name: [row.get(name) for row in rows] for name in names}
    table = dataset.with_format("arrow", columns=shown)[:]
    found = {name: _plain_storage(table.column(name)) for name in shown}
    if kind in ("numpy", "torch", "jax", "tensorflow", "mlx"):
        for name, column in dataset[:].items():
            if is_array(column) and len(column.shape):  # lists of different lengths stay unchanged
                array = array_of_tensor(column)
                if array.dtype in DTYPES:
                    found[name] = array
    return found


def _plain_storage(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column of the library's own types as its storage type. Arrays of one shape become lists of fixed lengths."""
    kind = column.type
    if not isinstance(kind, pa.BaseExtensionType) or kind.extension_name.startswith("arrow."):
        return column
    storage = pa.chunked_array([chunk.storage for chunk in column.chunks], kind.storage_type)
    shape = getattr(kind, "shape", None)
    if shape is None or None in shape:
        return storage
    fixed = pa.from_numpy_dtype(kind.value_type)
    for length in reversed(shape):
        fixed = pa.list_(fixed, length)
    return storage.cast(fixed)
