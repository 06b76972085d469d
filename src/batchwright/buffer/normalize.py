"""Samples as rows. The user's normalizers or the class of a sample decide the conversion.

dict, dataclass, named tuple, object        one row
tensor, array                               one row, {"tensor": ...}
image                                       one row, {"image": PNG}
list, tuple                                 a sample each
datasets.Dataset, Arrow table, data frame   columns, without Python for each row
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import types
from collections.abc import Callable, Iterator, KeysView, Mapping, Sequence, ValuesView
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from batchwright.base.errors import BatchwrightError, SampleError, SampleTypeError
from batchwright.base.words import error_in_words, first_line
from batchwright.buffer.plain_values import (
    DTYPES,
    Misfit,
    array_of_tensor,
    describe,
    is_array,
    kind_of,
    members_of,
    png,
    rows_of_tensor,
)
from batchwright.buffer.schema import Row
from batchwright.buffer.values import check_names, is_column

log: logging.Logger = logging.getLogger("batchwright")
Normalizer = Callable[[Any], Any]
F = TypeVar("F", bound=Normalizer)

_NORMALIZERS: dict[type, Normalizer] = {}
"""Normalizers in the order of their registration."""
_logged: set[str] = set()


def register_normalizer(kind: type) -> Callable[[F], F]:
    """Says how samples of the class `kind` become rows: a dict, or a list of dicts.

    The normalizer of an object's own class is used, else the newest one of a class that it is an instance of.

    >>> class Pair:
    ...     def __init__(self, a, b): self.a, self.b = a, b
    >>> @register_normalizer(Pair)
    ... def rows_of_pair(pair): return [{"text": pair.a}, {"text": pair.b}]
    >>> normalize(Pair("x", "y")).rows
    [{'text': 'x'}, {'text': 'y'}]
    """
    if not isinstance(kind, type):
        raise SampleTypeError(
            f"a normalizer is registered for a class, not for {describe(kind)}", remedy="@register_normalizer(MySample)"
        )

    def register(normalizer: F) -> F:
        if not callable(normalizer):
            raise SampleTypeError(
                f"a normalizer is a function of one sample, not {describe(normalizer)}",
                remedy="@register_normalizer(MySample) above a function",
            )
        _NORMALIZERS.pop(kind, None)  # a second one of a class is the newest of all
        _NORMALIZERS[kind] = normalizer
        return normalizer

    return register


def takes_dicts() -> bool:
    """Whether plain dicts go through a registered normalizer."""
    return bool(_NORMALIZERS) and any(issubclass(dict, kind) for kind in _NORMALIZERS)


def normalize(samples: Any) -> Normalized:
    """One sample, or many in a list or a table, as rows of one kind."""
    kind = type(samples)
    if kind not in (list, tuple, dict) and _normalizer_of(samples) is None:
        columns = columns_of_table(samples)
        if columns is not None:
            return Normalized("dict", [], columns)
    if kind not in (list, tuple) or kind in _NORMALIZERS:
        return Normalized(*_rows(samples, None))
    if set(map(type, samples)) <= {dict} and not _NORMALIZERS:
        return Normalized("dict", list(samples))
    return _many(samples)


def _many(samples: Sequence[Any]) -> Normalized:
    """The rows of samples of any classes, but of one kind."""
    found = [_rows(sample, number) for number, sample in enumerate(samples)]
    first = next((kind for kind, _ in found), "dict")
    for number, (kind, _) in enumerate(found):
        if kind != first:
            remedy = "one buffer for each kind, or dicts that hold the tensor or the image"
            raise SampleError(
                f"samples of two kinds: {first} and {kind}", row=number, has=first, got=kind, remedy=remedy
            )
    return Normalized(first, [row for _, rows in found for row in rows])


def _rows(sample: Any, number: int | None) -> tuple[str, list[Row]]:
    """(kind, rows) of one sample; `number` is its place in a list."""
    normalizer = _normalizer_of(sample)
    if normalizer is not None:
        return "dict", _by_normalizer(normalizer, sample, number or 0)
    if type(sample) is dict:
        return "dict", [sample]
    try:
        if is_array(sample):
            return "tensor", [{"tensor": _tensor(sample, is_alone=number is None)}]
        if kind_of(type(sample)) == "image":
            return "image", [{"image": png(sample)}]
        return "dict", [_row(sample)]
    except Misfit as misfit:
        raise misfit.error(number) from None


def _normalizer_of(sample: Any) -> Normalizer | None:
    kind = type(sample)
    if not _NORMALIZERS or kind in _NORMALIZERS:
        return _NORMALIZERS.get(kind)
    if kind in (list, tuple):  # many samples, unless a normalizer is registered for lists
        return None
    return next((_NORMALIZERS[base] for base in reversed(_NORMALIZERS) if isinstance(sample, base)), None)


def _by_normalizer(normalizer: Normalizer, sample: Any, number: int) -> list[Row]:
    name = getattr(normalizer, "__qualname__", repr(normalizer))
    try:
        rows = normalizer(sample)
    except BatchwrightError:
        raise
    except Exception as error:
        what, remedy = f"a normalizer failed: {error_in_words(error)}", "the error above is from the normalizer itself"
        raise SampleError(what, row=number, normalizer=name, sample=describe(sample), remedy=remedy) from error
    if not isinstance(rows, list):
        rows = [rows]
    for row in rows:
        if not isinstance(row, dict):
            what, remedy = f"a normalizer gave {describe(row)}, not a dict", "return a dict, or a list of dicts"
            raise SampleTypeError(what, row=number, normalizer=name, got=describe(row), remedy=remedy)
    return rows


def _tensor(tensor: Any, *, is_alone: bool) -> np.ndarray:
    array = rows_of_tensor(tensor, '{"value": tensor}, or tensor.reshape(1)')
    if not array.size:
        raise Misfit("a tensor without elements", got=describe(tensor), remedy="leave it out")
    if array.ndim > 1 and is_alone and "tensor" not in _logged:
        _logged.add("tensor")
        log.warning(
            "append took a tensor of shape %s as ONE row of that shape; for %d rows of shape %s, use extend(tensor)",
            list(array.shape),
            len(array),
            list(array.shape[1:]),
        )
    return array


# Dicts and objects


def _row(sample: Any) -> Row:
    remedy = _remedy_of(sample)
    if remedy is not None:
        raise Misfit(f"{describe(sample)} is not a sample", got=describe(sample), remedy=remedy, kind=SampleTypeError)
    members = members_of(sample)
    if members is not None:
        return dict(members)
    if isinstance(sample, Mapping):
        return dict(sample)
    row: Any = object.__getstate__(sample)
    if isinstance(row, tuple):  # of a class with slots
        in_dict, in_slots = row
        row = {**in_slots, **(in_dict or {})}
    if not row:
        what = f"an object without attributes is not a sample: {describe(sample)}"
        remedy = f"a dict, or @register_normalizer({type(sample).__name__})"
        raise Misfit(what, got=describe(sample), remedy=remedy, kind=SampleTypeError)
    return {**row}


def _remedy_of(sample: Any) -> str | None:
    """The remedy for an object that is not a sample, though it may have attributes."""
    kind = type(sample)
    foreign = _FOREIGN.get(kind_of(kind) or "")
    if foreign is not None:
        return foreign
    if hasattr(kind, "_fields") or dataclasses.is_dataclass(kind):
        return None
    for classes, remedy in _NOT_SAMPLES:
        if isinstance(sample, classes):
            return remedy
    is_own = isinstance(sample, Mapping | types.SimpleNamespace) or kind.__name__ == "Namespace"
    if kind.__module__.partition(".")[0] in sys.stdlib_module_names and not is_own:
        return '{"value": ...}: a dict, whose names become columns'
    return None


_NOT_SAMPLES: tuple[tuple[Any, str], ...] = (
    (types.NoneType, 'a dict: {"text": None}'),
    (bool | int | float | complex | str | bytes | bytearray | np.generic, '{"value": ...}: a dict names the column'),
    (type, "an object of this class"),
    (Iterator, "list(samples)"),
    (set | frozenset | range | KeysView | ValuesView, "a list, which has an order: sorted(samples)"),
    (list | tuple, 'a dict: {"values": [...]}, or the samples in one flat list'),
    (pa.Array | pa.ChunkedArray | pa.Scalar, 'extend({"name": array}), which names the column'),
    (types.FunctionType | types.MethodType | types.BuiltinFunctionType, "what it returns"),
)
"""Classes of objects that are not samples, with the remedy for each."""

_FOREIGN = {
    "splits": 'one of its splits: append(splits["train"])',
    "stream": "its samples as a list, e.g. list(stream): a buffer holds rows that are there",
    "series": 'extend({"name": series}), which names the column',
    "lazy": "frame.collect()",
    "dataset": "append(dataset) by itself, not inside a list",
    "pandas": "append(frame) by itself, not inside a list",
    "polars": "append(frame) by itself, not inside a list",
}


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
        raise misfit.error() from None
    if isinstance(source, Mapping) and kind_of(type(source)) is None:
        return Normalized("dict", [], _columns_of_dict(source))
    found = columns_of_table(source)
    if found is None:
        remedy = 'extend({"obs": array, "label": array}), a table or a data frame; append(...) takes samples'
        raise SampleTypeError(f"{describe(source)} has no columns", got=describe(source), remedy=remedy)
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
        if isinstance(source, pa.Table):  # its stream would hide that the memory may change
            table = source
        elif isinstance(source, pa.RecordBatch):
            table = pa.Table.from_batches([source])
        else:
            table = pa.RecordBatchReader.from_stream(source).read_all()
    except (pa.ArrowException, TypeError, ValueError) as error:  # e.g. a stream of values that are not rows
        what = f"{describe(source)} cannot be read as a table: {first_line(error)}"
        remedy = "a table or a data frame, or a dict of arrays"
        raise SampleTypeError(what, got=describe(source), remedy=remedy) from None
    check_names(table.column_names)
    return dict(zip(table.column_names, table.columns, strict=True))


# Dicts of arrays


def _columns_of_dict(source: Mapping[Any, Any]) -> dict[str, Any]:
    if not source:
        raise SampleError("a dict without columns", remedy='extend({"obs": array, "label": array})')
    lengths: dict[Any, int] = {}
    for name, column in source.items():
        if not is_column(column):
            what = f"extend takes columns, and {name!r} is {describe(column)}"
            remedy = "append(...) for one row; a list or an array of values for many"
            raise SampleTypeError(what, column=str(name), got=describe(column), remedy=remedy)
        lengths[name] = len(column)
    first, length = next(iter(lengths.items()))
    for name, other in lengths.items():
        if other != length:
            what = f"columns of different lengths: {first!r} has {length} rows, {name!r} has {other}"
            has, got = f"{first}: {length} rows", f"{name}: {other} rows"
            remedy = "one value for each row in every column"
            raise SampleError(what, column=str(name), has=has, got=got, remedy=remedy)
    return dict(source)


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
        arrays = {name: array_of_tensor(column) for name, column in dataset[:].items() if is_array(column)}
        found |= {name: array for name, array in arrays.items() if array.ndim and array.dtype in DTYPES}
    return found  # lists of different lengths stay unchanged


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
