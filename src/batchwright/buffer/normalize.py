"""Samples of any kind as rows: by the user's normalizers, or by what the sample is.

dict, dataclass, named tuple, object        one row
tensor, array                               one row, {"tensor": ...}
image                                       one row, {"image": PNG}
list, tuple                                 a sample each
datasets.Dataset, Arrow table, data frame   a row each, not made one by one
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from batchwright.base.errors import BatchwrightError, SampleError, SampleTypeError
from batchwright.buffer.foreign import DTYPES, Misfit, array_of_tensor, describe, is_array, kind_of, png
from batchwright.buffer.incoming import table_of
from batchwright.buffer.schema import Row

__all__ = ["Normalized", "normalize", "register_normalizer", "takes_dicts"]

log: logging.Logger = logging.getLogger("batchwright")
Normalizer = Callable[[Any], Any]
F = TypeVar("F", bound=Normalizer)

_NORMALIZERS: dict[type, Normalizer] = {}
"""In the order in which they were registered."""
_told: set[str] = set()


class Normalized(NamedTuple):
    """Rows, and what they were made from: "dict", "tensor" or "image". A buffer holds rows of one kind."""

    kind: str
    rows: list[Row] | pa.Table


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
    """Whether somebody registered a normalizer that plain dicts go through."""
    return bool(_NORMALIZERS) and any(issubclass(dict, kind) for kind in _NORMALIZERS)


def normalize(samples: Any) -> Normalized:
    """One sample, or many in a list or a table, as rows of one kind."""
    many = _table(samples)
    if many is not None:
        return Normalized("dict", many)
    if type(samples) not in (list, tuple) or type(samples) in _NORMALIZERS:
        kind, rows = _rows(samples, None)
        return Normalized(kind, rows)
    if set(map(type, samples)) <= {dict} and not _NORMALIZERS:
        return Normalized("dict", list(samples))
    found: list[Row] = []
    first_kind = "dict"
    for number, sample in enumerate(samples):
        kind, rows = _rows(sample, number)
        if not number:
            first_kind = kind
        elif kind != first_kind:
            raise SampleError(
                f"samples of two kinds: {first_kind} and {kind}",
                row=number,
                has=first_kind,
                got=kind,
                remedy="one buffer for each kind, or dicts that hold the tensor or the image",
            )
        found += rows
    return Normalized(first_kind, found)


def _table(samples: Any) -> pa.Table | list[Row] | None:
    """The rows of what has many by itself."""
    if type(samples) in (list, tuple, dict) or (_NORMALIZERS and _normalizer_of(samples) is not None):
        return None
    return table_of(samples)


def _rows(sample: Any, number: int | None) -> tuple[str, list[Row]]:
    """(kind, rows) of one sample."""
    normalizer = _normalizer_of(sample) if _NORMALIZERS else None
    if normalizer is not None:
        return "dict", _by_normalizer(normalizer, sample, number)
    if type(sample) is dict:
        return "dict", [sample]
    try:
        if is_array(sample):
            return "tensor", [{"tensor": _tensor(sample, number)}]
        if kind_of(type(sample)) == "image":
            return "image", [{"image": png(sample)}]
    except Misfit as misfit:
        raise SampleError(misfit.what, row=number, got=misfit.got, remedy=misfit.remedy) from None
    return "dict", [_row(sample, number)]


def _normalizer_of(sample: Any) -> Normalizer | None:
    kind = type(sample)
    if kind in _NORMALIZERS:
        return _NORMALIZERS[kind]
    if kind in (list, tuple):  # many samples, unless somebody says otherwise of just these
        return None
    return next((_NORMALIZERS[base] for base in reversed(_NORMALIZERS) if isinstance(sample, base)), None)


def _by_normalizer(normalizer: Normalizer, sample: Any, number: int | None) -> list[Row]:
    name = getattr(normalizer, "__qualname__", repr(normalizer))
    try:
        rows = normalizer(sample)
    except BatchwrightError:
        raise
    except Exception as error:
        raise SampleError(
            f"a normalizer failed: {type(error).__name__}: {error}",
            row=number or 0,
            normalizer=name,
            sample=describe(sample),
            remedy="the error above is from the normalizer itself",
        ) from error
    listed = rows if isinstance(rows, list) else [rows]
    for row in listed:
        if not isinstance(row, dict):
            raise SampleTypeError(
                f"a normalizer gave {describe(row)}, not a dict",
                row=number or 0,
                normalizer=name,
                got=describe(row),
                remedy="return a dict (one row), or a list of dicts (many)",
            )
    return listed


# Tensors


def _tensor(tensor: Any, number: int | None) -> np.ndarray:
    array = array_of_tensor(tensor)
    if not array.ndim:
        raise SampleTypeError(
            "a tensor without dimensions is a number, not a sample",
            row=number,
            got=describe(tensor),
            remedy='{"value": tensor}, or tensor.reshape(1)',
        )
    if array.dtype not in DTYPES:
        raise Misfit(
            f"a tensor of {array.dtype}: only numbers and bool are kept",
            got=describe(tensor),
            remedy='numbers, or {"text": list(array)} for texts and objects',
        )
    if not array.size:
        raise Misfit("a tensor without elements", got=describe(tensor), remedy="leave it out")
    if array.ndim > 1 and number is None and "tensor" not in _told:
        _told.add("tensor")
        log.warning(
            "append took a tensor of shape %s as ONE row of that shape; for %d rows of shape %s, use extend(tensor)",
            list(array.shape),
            len(array),
            list(array.shape[1:]),
        )
    return array


# Dicts and objects


def _row(sample: Any, number: int | None) -> Row:
    kind = type(sample)
    if isinstance(sample, dict) and kind_of(kind) is None:
        return dict(sample)
    refused = _why_no_sample(sample)
    if refused is not None:
        what, remedy = refused
        raise SampleTypeError(f"{what} is no sample", row=number, got=describe(sample), remedy=remedy)
    if isinstance(sample, Mapping):
        return dict(sample)
    if dataclasses.is_dataclass(sample):
        return {field.name: getattr(sample, field.name) for field in dataclasses.fields(sample)}
    if isinstance(sample, tuple):
        return dict(zip(kind._fields, sample, strict=True))
    row = {**{name: getattr(sample, name) for name in _slots(kind) if hasattr(sample, name)}, **_vars(sample)}
    if not row:
        raise SampleTypeError(
            f"an object without attributes is no sample: {describe(sample)}",
            row=number,
            got=describe(sample),
            remedy=f"a dict, or @register_normalizer({kind.__name__})",
        )
    return row


def _why_no_sample(sample: Any) -> tuple[str, str] | None:
    """(what it is, what to give instead) of things that have attributes, but are no samples."""
    if sample is None:
        return "None", 'a dict: {"text": None}'
    kind = type(sample)
    if isinstance(sample, bool | int | float | complex | str | bytes | bytearray | np.generic):
        return f"{describe(sample)} (a bare value)", '{"value": ...}: a dict names the column'
    if isinstance(sample, type):
        return f"the class {sample.__name__}", f"an object of it: {sample.__name__}(...)"
    if isinstance(sample, Iterator):
        return f"a {kind.__name__}", "list(samples)"
    if isinstance(sample, set | frozenset | range | type({}.keys()) | type({}.values())):
        return f"a {kind.__name__}", "a list, which has an order: sorted(samples)"
    if kind is list or (isinstance(sample, tuple | list) and not hasattr(kind, "_fields")):
        return f"a {kind.__name__} inside a list", 'a dict: {"values": [...]}, or the samples in one flat list'
    if isinstance(sample, pa.Array | pa.ChunkedArray | pa.Scalar):
        return f"an Arrow {kind.__name__}", 'extend({"name": array}), which names the column'
    meant = _FOREIGN.get(kind_of(kind) or "")
    if meant is not None:
        return f"{describe(sample)} here", meant
    if dataclasses.is_dataclass(sample) or isinstance(sample, Mapping | types.SimpleNamespace):
        return None
    if isinstance(sample, types.FunctionType | types.MethodType | types.BuiltinFunctionType):
        return f"a {kind.__name__}", "what it returns"
    library = kind.__module__.partition(".")[0]
    if library in sys.stdlib_module_names and not isinstance(sample, tuple) and kind.__name__ != "Namespace":
        return describe(sample), '{"value": ...}: a dict, whose names become columns'
    return None


_FOREIGN = {
    "splits": 'one of its splits: append(splits["train"])',
    "stream": "its samples as a list, e.g. list(stream): a buffer holds rows that are there",
    "series": 'extend({"name": series}), which names the column',
    "lazy": "frame.collect()",
    "dataset": "append(dataset) by itself, not inside a list",
    "pandas": "append(frame) by itself, not inside a list",
    "polars": "append(frame) by itself, not inside a list",
}


def _vars(sample: Any) -> Row:
    found = getattr(sample, "__dict__", None)
    return dict(found) if isinstance(found, dict) else {}


def _slots(kind: type) -> list[str]:
    listed: list[str] = []
    for base in reversed(kind.__mro__):
        slots = base.__dict__.get("__slots__", ())
        listed += [slots] if isinstance(slots, str) else list(slots)
    return [name for name in listed if name not in ("__dict__", "__weakref__")]
