"""Whatever has rows of its own as columns: Arrow tables and streams, data frames, datasets, dicts of arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any

import numpy as np
import pyarrow as pa

from batchwright.base.errors import SampleError, SampleTypeError
from batchwright.buffer.convert import to_arrow
from batchwright.buffer.foreign import DTYPES, Misfit, array_of_tensor, describe, is_array, kind_of
from batchwright.buffer.schema import Field, Numbers, Row
from batchwright.buffer.values import arrays_to_columns

__all__ = ["columns_in", "table_of"]


def columns_in(source: Any) -> tuple[str, dict[str, Any]]:
    """(kind, arrays by name) of something with columns, for `extend`."""
    try:
        if is_array(source):
            return "tensor", {"tensor": _rows_of_tensor(source)}
        if isinstance(source, Mapping) and kind_of(type(source)) is None:
            return "dict", _checked_lengths({name: _column(name, column) for name, column in source.items()})
        found = _columns_of(source)
    except Misfit as misfit:
        raise SampleError(
            misfit.what, column=misfit.path.lstrip(".") or None, got=misfit.got, remedy=misfit.remedy
        ) from None
    if found is None:
        raise SampleTypeError(
            f"{describe(source)} has no columns",
            got=describe(source),
            remedy='extend({"obs": array, "label": array}), a table or a data frame; append(...) takes samples',
        )
    return "dict", found


def table_of(source: Any) -> pa.Table | list[Row] | None:
    """The rows of a table, a data frame or a dataset; None of anything else."""
    if kind_of(type(source)) == "dataset" and _format_of(source) == "custom":
        return list(source)  # a transform makes each row
    try:
        if not isinstance(source, pa.Table) and (found := _columns_of(source)) is not None:
            return _table(found)
    except Misfit as misfit:
        raise SampleError(
            misfit.what, column=misfit.path.lstrip(".") or None, got=misfit.got, remedy=misfit.remedy
        ) from None
    if isinstance(source, pa.Table):
        _check_names(source.column_names)
        return source
    return None


def _table(columns: dict[str, Any]) -> pa.Table:
    if all(isinstance(column, pa.Array | pa.ChunkedArray) for column in columns.values()):
        return pa.table(columns)
    made, schema = arrays_to_columns(columns, None)
    return pa.table({field.name: to_arrow(field, made[field.name]) for field in schema})


def _columns_of(source: Any) -> dict[str, Any] | None:
    kind = kind_of(type(source))
    if kind == "dataset":
        return _columns_of_dataset(source)
    if kind == "pandas":
        return _columns_of_pandas(source)
    if kind in ("series", "splits", "stream", "lazy"):
        return None
    if isinstance(source, pa.RecordBatch):
        source = pa.Table.from_batches([source])
    if isinstance(source, pa.RecordBatchReader):
        source = source.read_all()
    if isinstance(source, pa.Array | pa.ChunkedArray):
        return None
    if not isinstance(source, pa.Table):
        if not hasattr(source, "__arrow_c_stream__"):
            return None
        source = _read_stream(source)
        if source is None:
            return None
    _check_names(source.column_names)
    return dict(zip(source.column_names, source.columns, strict=True))


def _read_stream(source: Any) -> pa.Table | None:
    try:
        return pa.RecordBatchReader.from_stream(source).read_all()
    except (pa.ArrowException, TypeError, ValueError) as error:  # e.g. a stream of values that are not rows
        raise SampleTypeError(
            f"{describe(source)} cannot be read as a table: {(str(error).splitlines() or [''])[0]}",
            got=describe(source),
            remedy="a table or a data frame, or a dict of arrays",
        ) from None


def _check_names(names: Any) -> None:
    names = list(names)
    for name in names:
        if not isinstance(name, str):
            raise SampleError(
                f"a column named {name!r}: names are text",
                column=repr(name),
                got=type(name).__name__,
                remedy="frame.columns = [str(name) for name in frame.columns], where that is meant",
            )
        if names.count(name) > 1:
            raise SampleError(f"two columns are named {name!r}", column=name, remedy="rename one of them")


# Dicts of arrays


def _column(name: Any, column: Any) -> Any:
    if is_array(column) and len(column.shape):
        try:
            return array_of_tensor(column)
        except Misfit as misfit:
            raise misfit.inside(str(name)) from None
    is_list = isinstance(column, list | tuple | range | pa.Array | pa.ChunkedArray)
    if is_list or kind_of(type(column)) == "series":
        if isinstance(column, pa.Array | pa.ChunkedArray | list):
            return column
        return pa.array(column) if kind_of(type(column)) == "series" else list(column)
    raise SampleTypeError(
        f"extend takes columns, and {name!r} is {describe(column)}",
        column=str(name),
        got=describe(column),
        remedy="append(...) for one row; a list or an array of values for many",
    )


def _checked_lengths(columns: dict[str, Any]) -> dict[str, Any]:
    lengths = {name: len(column) for name, column in columns.items() if isinstance(column, Sized)}
    if not columns:
        raise SampleError("a dict without columns", remedy='extend({"obs": array, "label": array})')
    first = next(iter(lengths))
    for name, length in lengths.items():
        if length != lengths[first]:
            raise SampleError(
                f"columns of different lengths: {first!r} has {lengths[first]} rows, {name!r} has {length}",
                column=str(name),
                has=f"{first}: {lengths[first]} rows",
                got=f"{name}: {length} rows",
                remedy="one value for each row in every column",
            )
    return columns


def _rows_of_tensor(tensor: Any) -> np.ndarray:
    if not len(tensor.shape):
        raise SampleTypeError(
            "a tensor without dimensions has no rows", got=describe(tensor), remedy="a tensor [rows, ...]"
        )
    array = array_of_tensor(tensor)
    if array.dtype not in DTYPES:
        raise Misfit(
            f"a tensor of {array.dtype}: only numbers and bool are kept",
            got=describe(tensor),
            remedy='numbers, or extend({"name": array}) for texts and objects',
        )
    return array


# Data frames and datasets


def _columns_of_pandas(frame: Any) -> dict[str, Any]:
    """A pandas frame's columns. An index with a name is a column too; NaN in a column of floats stays NaN."""
    names = [name for name in frame.index.names if name is not None]
    if names:
        frame = frame.reset_index(names)
    _check_names(frame.columns)
    found: dict[str, Any] = {}
    for name in frame.columns:
        series = frame[name]
        if isinstance(series.dtype, np.dtype) and series.dtype in DTYPES:
            found[name] = series.to_numpy()
            continue
        try:
            found[name] = pa.Array.from_pandas(series)
            is_exact = series.dtype != object or pa.types.is_string(found[name].type)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            is_exact = False
        if not is_exact:  # Python values: one by one, so that none is turned into another, and a row at fault is told
            found[name] = [None if _is_missing(value) else value for value in series]
    return found


def _is_missing(value: Any) -> bool:
    return value is None or type(value).__name__ in ("NAType", "NaTType") or (type(value) is float and value != value)


def _format_of(dataset: Any) -> str | None:
    kind = dataset.format["type"]
    return None if kind is None else str(kind)


def _columns_of_dataset(dataset: Any) -> dict[str, Any]:
    """A dataset's rows in its own order, the columns that its format shows, and as arrays if its format says so."""
    shown = dataset.column_names if dataset.format["output_all_columns"] else dataset.format["columns"]
    kind = _format_of(dataset)
    if kind == "custom":
        rows = list(dataset)
        names = list(dict.fromkeys(name for row in rows for name in row))
        return {name: [row.get(name) for row in rows] for name in names}
    table = dataset.with_format("arrow", columns=shown)[:]
    found = {name: _unwrapped(table.column(name)) for name in shown}
    if kind in ("numpy", "torch", "jax", "tensorflow", "mlx"):
        for name, column in dataset[:].items():
            if is_array(column) and len(column.shape):  # lists of different lengths stay what they are
                array = array_of_tensor(column)
                if array.dtype in DTYPES:
                    found[name] = array
    return found


def _unwrapped(column: pa.ChunkedArray) -> Any:
    """The library's own types of arrays of one shape as arrays; other extension types as what they are stored as."""
    kind = column.type
    if isinstance(kind, pa.FixedShapeTensorType) or not isinstance(kind, pa.BaseExtensionType):
        return column
    shape = getattr(kind, "shape", None)
    if shape is not None and None not in shape:
        flat = pa.chunked_array([chunk.storage for chunk in column.chunks], kind.storage_type)
        for _ in shape:
            flat = pa.chunked_array([chunk.flatten() for chunk in flat.chunks], flat.type.value_type)  # of known rows
        if not flat.null_count and not column.null_count:
            return flat.to_numpy().reshape(len(column), *shape)
        if not flat.null_count:
            valid = column.is_valid().to_numpy()
            values = np.zeros((len(column), *shape), flat.to_numpy().dtype)
            values[valid] = flat.to_numpy().reshape(-1, *shape)
            field = Field("", pa.fixed_shape_tensor(flat.type, shape))
            return to_arrow(field, Numbers(values, valid))
    if kind.extension_name.startswith("arrow."):
        return column
    return pa.chunked_array([chunk.storage for chunk in column.chunks], kind.storage_type)
