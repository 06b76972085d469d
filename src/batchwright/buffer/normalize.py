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
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from batchwright.base.errors import BatchwrightError, SampleError, SampleTypeError
from batchwright.base.words import error_in_words
from batchwright.buffer.column import sample_error
from batchwright.buffer.plain_values import Misfit, describe, is_array, kind_of, members_of, png, rows_of_tensor
from batchwright.buffer.schema import Row
from batchwright.buffer.tables import Normalized, columns_of_table

__all__ = ["normalize", "register_normalizer", "takes_dicts"]

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
            raise SampleError(
                f"samples of two kinds: {first} and {kind}",
                row=number,
                has=first,
                got=kind,
                remedy="one buffer for each kind, or dicts that hold the tensor or the image",
            )
    return Normalized(first, [row for _, rows in found for row in rows])


def _rows(sample: Any, number: int | None) -> tuple[str, list[Row]]:
    """(kind, rows) of one sample; `number` is its place in a list."""
    normalizer = _normalizer_of(sample)
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
        raise sample_error(misfit, number, None) from None
    return "dict", [_row(sample, number)]


def _normalizer_of(sample: Any) -> Normalizer | None:
    kind = type(sample)
    if not _NORMALIZERS or kind in _NORMALIZERS:
        return _NORMALIZERS.get(kind)
    if kind in (list, tuple):  # many samples, unless a normalizer is registered for lists
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
            f"a normalizer failed: {error_in_words(error)}",
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


def _tensor(tensor: Any, number: int | None) -> np.ndarray:
    array = rows_of_tensor(tensor, '{"value": tensor}, or tensor.reshape(1)')
    if not array.size:
        raise Misfit("a tensor without elements", got=describe(tensor), remedy="leave it out")
    if array.ndim > 1 and number is None and "tensor" not in _logged:
        _logged.add("tensor")
        log.warning(
            "append took a tensor of shape %s as ONE row of that shape; for %d rows of shape %s, use extend(tensor)",
            list(array.shape),
            len(array),
            list(array.shape[1:]),
        )
    return array


# Dicts and objects


def _row(sample: Any, number: int | None) -> Row:
    remedy = _remedy_of(sample)
    if remedy is not None:
        what = "None" if sample is None else describe(sample)
        raise SampleTypeError(f"{what} is not a sample", row=number, got=describe(sample), remedy=remedy)
    members = members_of(sample)
    if members is not None or isinstance(sample, Mapping):
        return dict(sample if members is None else members)
    kind = type(sample)
    slots = {name: getattr(sample, name) for name in _slots(kind) if hasattr(sample, name)}
    row = {**slots, **getattr(sample, "__dict__", {})}
    if not row:
        raise SampleTypeError(
            f"an object without attributes is not a sample: {describe(sample)}",
            row=number,
            got=describe(sample),
            remedy=f"a dict, or @register_normalizer({kind.__name__})",
        )
    return row


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


def _slots(kind: type) -> list[str]:
    listed: list[str] = []
    for base in reversed(kind.__mro__):
        slots = base.__dict__.get("__slots__", ())
        listed += [slots] if isinstance(slots, str) else list(slots)
    return [name for name in listed if name not in ("__dict__", "__weakref__")]
