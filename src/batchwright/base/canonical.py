"""Canonical bytes of values: equal values have equal bytes in every process, and different values different bytes.

The type of every value counts, the order of a dict, and every bit of a float: 1 is not True, `b"hi"` is not "aGk=", and
nan is not None. Values are written by columns, so that rows do not cost a Python call for each value.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import fractions
import sys
import uuid
from array import array
from collections.abc import Callable
from itertools import chain
from pathlib import PurePath
from typing import Any

import numpy as np

__all__ = ["encode"]


def encode(value: Any, *, as_json: bool = False) -> bytes:
    """A value as bytes that are equal in every process, and only for an equal value.

    None, numbers, text, bytes, lists, tuples, dicts, sets, dates, Decimal, UUID, Fraction, paths, enums, dataclasses,
    NumPy, Arrow and torch values, images, and what contains these. A TypeError names the class of any other value.

    `as_json=True` takes JSON alone, and forgets what JSON forgets: the order of keys, and that a list was a tuple. So
    settings are equal to what a file says of them.

    >>> encode({"a": 1, "b": 2}) == encode({"b": 2, "a": 1})
    False
    >>> encode({"a": 1, "b": (2,)}, as_json=True) == encode({"b": [2], "a": 1}, as_json=True)
    True
    """
    writer = _Writer(as_json)
    writer.write([value])
    return b"".join(writer.pieces)


def attributes(value: Any) -> dict[str, Any]:
    """What an object holds in its `__dict__` and its slots."""
    slots = [
        name
        for kind in type(value).__mro__
        for name, member in vars(kind).items()
        if type(member).__name__ == "member_descriptor" and hasattr(value, name)
    ]
    return {**{name: getattr(value, name) for name in slots}, **getattr(value, "__dict__", {})}


class _Writer:
    """Writes lists of values. Each begins with its length and the types in it, so that no two lists look alike."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.pieces: list[bytes] = []

    def write(self, values: list[Any]) -> None:
        forms = {kind: self._form(kind) for kind in set(map(type, values))}
        names = sorted({name for name, _ in forms.values()})
        self.pieces.append(f"{len(values)} {names!r}\n".encode("utf-8", "surrogatepass"))
        if len(names) > 1:
            numbers = {kind: names.index(name) for kind, (name, _) in forms.items()}
            which = np.fromiter((numbers[type(value)] for value in values), "<i4", len(values))
            self.pieces.append(which.tobytes())
        writes = dict(forms.values())
        for number, name in enumerate(names):
            mine = values if len(names) == 1 else [values[n] for n in np.flatnonzero(which == number).tolist()]
            writes[name](self, mine)

    def _form(self, kind: type) -> tuple[str, Callable[[_Writer, list[Any]], None]]:
        """What a type is called in the bytes, and what writes its values."""
        if self.as_json:
            base = next((base for base in _JSON if issubclass(kind, base)), None)
            if base is None:
                raise TypeError(_name_of(kind))
            return _JSON[base], _BUILTIN[base]
        if kind in _BUILTIN:
            return kind.__name__, _BUILTIN[kind]
        parts = _parts_of(kind)
        return f"{parts.__name__} {_name_of(kind)}", lambda writer, values: writer.write([*map(parts, values)])

    def nothing(self, values: list[Any]) -> None:
        pass

    def bools(self, values: list[Any]) -> None:
        self.pieces.append(bytes(values))

    def ints(self, values: list[Any]) -> None:
        try:
            self.pieces += [b"small", _little_endian(array("q", values))]
        except OverflowError:
            self.pieces.append(f"big {[*map(hex, values)]!r}\n".encode())

    def floats(self, values: list[Any]) -> None:
        self.pieces.append(_little_endian(array("d", values)))

    def complexes(self, values: list[Any]) -> None:
        self.pieces.append(np.array(values, "<c16").tobytes())

    def texts(self, values: list[Any]) -> None:
        self.lengths(values)
        self.pieces.append("".join(values).encode("utf-8", "surrogatepass"))

    def binaries(self, values: list[Any]) -> None:
        self.lengths(values)
        self.pieces += values

    def lengths(self, values: list[Any]) -> None:
        self.pieces.append(np.fromiter(map(len, values), "<i8", len(values)).tobytes())

    def lists(self, values: list[Any]) -> None:
        self.lengths(values)
        self.write(list(chain.from_iterable(values)))

    def sets(self, values: list[Any]) -> None:
        self.lists([_ordered(value) for value in values])

    def dicts(self, values: list[Any]) -> None:
        if self.as_json:
            values = [dict(sorted(value.items())) for value in values]
        keys = list(values[0])
        every_key = list(chain.from_iterable(values))
        contents = list(chain.from_iterable(map(dict.values, values)))
        if set(map(type, every_key)) == {str} and every_key == keys * len(values):  # rows of the same columns
            self.pieces.append(b"columns")
            self.write(keys)
            for number in range(len(keys)):
                self.write(contents[number :: len(keys)])
            return
        self.pieces.append(b"items")
        self.lengths(values)
        self.write(every_key)
        self.write(contents)


_BUILTIN: dict[type, Callable[[_Writer, list[Any]], None]] = {
    **dict.fromkeys((type(None), type(Ellipsis), type(NotImplemented)), _Writer.nothing),
    bool: _Writer.bools,
    int: _Writer.ints,
    float: _Writer.floats,
    complex: _Writer.complexes,
    str: _Writer.texts,
    **dict.fromkeys((bytes, bytearray), _Writer.binaries),
    **dict.fromkeys((list, tuple), _Writer.lists),
    **dict.fromkeys((set, frozenset), _Writer.sets),
    dict: _Writer.dicts,
}
_JSON: dict[type, str] = {kind: kind.__name__ for kind in (bool, int, float, str, list, dict)}
_JSON |= {type(None): "null", tuple: "list"}


def _little_endian(numbers: array[Any]) -> bytes:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def _ordered(items: Any) -> list[Any]:
    """The items of a set, in an order that does not depend on hashes."""
    kinds = set(map(type, items))
    if kinds <= {str} or kinds <= {int}:
        return sorted(items)
    return sorted(items, key=encode)


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


# Other types, each by parts that are written in its place


def _parts_of(kind: type) -> Callable[[Any], Any]:
    for base, parts in _PARTS.items():
        if issubclass(kind, base):
            return parts
    if kind.__module__.partition(".")[0] == "torch" and hasattr(kind, "detach"):
        return _tensor
    if hasattr(kind, "getpalette"):
        return _image
    if hasattr(kind, "to_pylist"):
        return _arrow
    if hasattr(kind, "as_py"):
        return _arrow_scalar
    if hasattr(kind, "__arrow_c_stream__") and kind.__module__.startswith("polars"):
        return _arrow_stream
    if kind in (np.ndarray, np.memmap) or issubclass(kind, np.generic) or kind.__module__.startswith("jax"):
        return _array  # and no other that has __array__: of a masked array or a Series, it leaves out a part
    if dataclasses.is_dataclass(kind) or hasattr(kind, "__struct_fields__") or hasattr(kind, "__attrs_attrs__"):
        return attributes
    for base in _BUILTIN:
        if issubclass(kind, base):
            return _subclass
    raise TypeError(_name_of(kind))


def _enum(value: enum.Enum) -> Any:
    return value.name, value.value


def _datetime(value: datetime.datetime | datetime.time) -> Any:
    return value.isoformat(), value.fold, None if value.tzinfo is None else (value.tzname(), str(value.tzinfo))


def _duration(value: datetime.timedelta) -> Any:
    return value.days, value.seconds, value.microseconds, getattr(value, "nanoseconds", 0)


def _fraction(value: fractions.Fraction) -> Any:
    return value.numerator, value.denominator


def _range(value: range) -> Any:
    return value.start, value.stop, value.step


def _array(value: Any) -> Any:
    found = np.asarray(value)
    kind = found.dtype.str
    if found.dtype.names:
        kind = str(found.dtype)
    if not found.dtype.hasobject:
        return kind, found.shape, found.tobytes()
    if not found.ndim:  # no array at all, but whatever NumPy does not know
        raise TypeError(_name_of(type(value)))
    return kind, found.shape, found.ravel().tolist()


def _tensor(value: Any) -> Any:
    """As bytes, because NumPy does not have all of torch's types."""
    torch = sys.modules["torch"]
    if value.layout is not torch.strided or value.is_quantized or value.is_meta:
        raise TypeError(f"a {value.layout} tensor on {value.device} of {value.dtype}")
    as_bytes = value.detach().cpu().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)
    return str(value.dtype), tuple(value.shape), as_bytes.numpy().tobytes()


def _image(value: Any) -> Any:
    return value.mode, tuple(value.size), value.tobytes(), value.getpalette()


def _arrow(value: Any) -> Any:
    """Arrow's tables, batches and arrays, however they are cut into chunks."""
    if hasattr(value, "schema"):
        return str(value.schema.remove_metadata()), value.to_pylist()
    return str(value.type), value.to_pylist()


def _arrow_scalar(value: Any) -> Any:
    return str(value.type), value.as_py()


def _arrow_stream(value: Any) -> Any:
    import pyarrow as pa

    if hasattr(value, "columns"):
        return _arrow(pa.table(value))
    return _arrow(pa.chunked_array(value))


def _subclass(value: Any) -> Any:
    """An object of a class that inherits from str, dict, tuple and so on: what it is as one, and what else it holds."""
    base = next(base for base in _BUILTIN if isinstance(value, base))
    if base is str:
        return str.__str__(value), attributes(value)
    return base(value), attributes(value)


_PARTS: dict[type, Callable[[Any], Any]] = {
    enum.Enum: _enum,
    datetime.datetime: _datetime,
    datetime.time: _datetime,
    datetime.date: str,
    datetime.timedelta: _duration,
    datetime.tzinfo: str,
    decimal.Decimal: str,
    fractions.Fraction: _fraction,
    uuid.UUID: str,
    PurePath: str,
    range: _range,
    memoryview: _array,
}
