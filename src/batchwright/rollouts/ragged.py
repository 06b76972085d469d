"""Values of rows of any length as one flat array and the lengths, checked all at once and not row by row.

Lists of Python numbers are packed by `struct`. It refuses fractions for whole numbers, and NumPy takes half as long
again. Arrays and tensors are joined; Arrow lists are flat already.
"""

from __future__ import annotations

import array
import struct
import sys
from collections.abc import Callable, Sequence
from operator import methodcaller
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchwright.base.words import first_line
from batchwright.rl.columns import cut_rows, offsets

_CODES = {"ids": ("i", np.int32), "numbers": ("d", np.float64), "floats": ("f", np.float32), "flags": ("b", np.int8)}
_KINDS = {"ids": "iu", "numbers": "fiub", "floats": "fiub", "flags": "iub"}
_WANTED = {"ids": "whole numbers", "numbers": "numbers", "floats": "numbers of 32 bits", "flags": "0s and 1s"}
_UNFIT = (struct.error, TypeError, OverflowError, ValueError)
"""Raised by `struct` for a value that does not fit its code."""


class BadValue(Exception):
    """A row whose value cannot be used, before its file and the name of its column are known."""

    key: str | None
    remedy: str
    what: str
    row: int

    def __init__(self, row: int, what: str, remedy: str = "", *, key: str | None = None) -> None:
        super().__init__(what)
        self.row, self.what, self.remedy, self.key = row, what, remedy, key


class Ragged(NamedTuple):
    """Row i has the next lengths[i] of `flat`."""

    flat: NDArray[Any]
    lengths: NDArray[np.int64]

    @property
    def starts(self) -> NDArray[np.int64]:
        return offsets(self.lengths)

    def take(self, rows: NDArray[np.int64]) -> Ragged:
        lengths = self.lengths[rows]
        return Ragged(cut_rows(self.flat, self.starts[:-1][rows], lengths), lengths)

    def row_of(self, place: int) -> int:
        """The row of a place in `flat`."""
        return int(np.searchsorted(self.starts, place, side="right")) - 1


def ragged_of(pieces: Sequence[NDArray[Any]]) -> Ragged:
    return Ragged(concatenated(pieces), np.fromiter(map(len, pieces), np.int64, len(pieces)))


def concatenated(arrays: Sequence[NDArray[Any]], wide: type[np.generic] = np.int64) -> NDArray[Any]:
    """Arrays end to end; as `wide` if their types differ: NumPy makes floats of int64 and uint64, and of nothing."""
    filled = [each for each in arrays if len(each)]
    if not filled:
        return np.empty(0, np.int32)
    if len({each.dtype for each in filled}) == 1:
        return np.concatenate(filled)
    return np.concatenate(filled, dtype=wide, casting="unsafe")


def is_arrow(column: Any) -> bool:
    return hasattr(column, "null_count")


def is_tensor(value: Any) -> bool:
    """Whether a value is a tensor of torch, which is not imported for it."""
    return type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "detach")


def kind_of_value(value: Any) -> str:
    """The kind of a row's value: "text", "list" (of numbers, or empty), "turns" (objects), "number" or "other"."""
    match value:
        case str():
            return "text"
        case bool() | int() | float() | np.number() | np.bool_():
            return "number"
        case list() | tuple():
            inner = kind_of_value(value[0]) if value else "number"
            return {"number": "list", "object": "turns"}.get(inner, "other")
        case range() | array.array():
            return "list"
    if hasattr(value, "keys"):
        return "object"
    if getattr(getattr(value, "dtype", None), "hasobject", False):  # pandas stores lists in this form
        return kind_of_value(value.tolist())
    ndim = getattr(value, "ndim", -1)  # the shape of an array or tensor of any library
    return {0: "number", 1: "list"}.get(ndim, "other")


def joined(column: Any, kind: str) -> Ragged:
    """A column of lists as one flat array. `kind` is one of _CODES. BadValue names the first bad row."""
    if is_arrow(column):
        return _joined_arrow(column, kind)
    kinds = set(map(type, column))
    if kinds <= {list, tuple}:
        lengths = np.fromiter(map(len, column), np.int64, len(column))
        return Ragged(_packed(column, kind), lengths)
    if len(kinds) == 1:
        found = _joined_at_once(column)
        if found is not None and found.flat.ndim == 1 and found.flat.dtype.kind in _KINDS[kind]:
            return found
    arrays = [_array_of(value, kind, number) for number, value in enumerate(column)]
    wide = np.int64 if kind in ("ids", "flags") else np.float64
    return Ragged(concatenated(arrays, wide), np.fromiter(map(len, arrays), np.int64, len(arrays)))


def _packed(column: Sequence[Any], kind: str) -> NDArray[Any]:
    """Lists of Python numbers."""
    code, dtype = _CODES[kind]
    pack = struct.pack
    try:
        return np.frombuffer(b"".join([pack(f"{len(row)}{code}", *row) for row in column]), dtype)
    except _UNFIT:
        for number, row in enumerate(column):
            place = _first_unfit(row, code)
            if place is not None:
                got = "null" if row[place] is None else repr(row[place])[:60]
                raise BadValue(number, f"number {place} of it is {got}, and {_WANTED[kind]} are needed") from None
        raise


def _first_unfit(values: Sequence[Any], code: str) -> int | None:
    """The place of the first value that does not fit a code of `struct`."""
    for place, value in enumerate(values):
        try:
            struct.pack(code, value)
        except _UNFIT:
            return place
    return None


def _joined_at_once(column: Sequence[Any]) -> Ragged | None:
    """Arrays or tensors of torch end to end; None if they cannot be joined. Joining one by one finds the reason."""
    size: Callable[[Any], int] = len
    try:
        if is_tensor(column[0]):
            flat, size = numpy_of(sys.modules["torch"].cat(column)), methodcaller("numel")
        elif type(column[0]) is np.ndarray:
            flat = np.concatenate(column)
        else:
            return None
        return Ragged(flat, np.fromiter(map(size, column), np.int64, len(column)))
    except (RuntimeError, TypeError, ValueError):  # of several devices, types or shapes
        return None


def numpy_of(tensor: Any) -> NDArray[Any]:
    """The numbers of a tensor of torch."""
    tensor = tensor.detach().cpu()
    if tensor.is_floating_point() and tensor.element_size() < 4:
        tensor = tensor.float()  # NumPy has no bfloat16
    values: NDArray[Any] = tensor.numpy()
    return values


def _array_of(value: Any, kind: str, number: int) -> NDArray[Any]:
    """The list of one row as an array."""
    if isinstance(value, list | tuple):
        try:
            return _packed([value], kind)
        except BadValue as bad:
            bad.row = number
            raise
    try:
        values = numpy_of(value) if is_tensor(value) else np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:
        raise BadValue(number, first_line(error), "a list of numbers, or an array") from None
    if not values.ndim:
        raise BadValue(number, f"it is a {type(value).__name__}, not a list", "a list of numbers, or an array")
    if values.ndim > 1:
        raise BadValue(number, f"it has {values.ndim} dimensions, not one", "array.reshape(-1)")
    if values.dtype.hasobject:  # pandas stores numbers in this form
        return _array_of(values.tolist(), kind, number)
    if values.dtype.kind not in _KINDS[kind] and values.size:
        raise BadValue(number, f"it holds {values.dtype}, not {_WANTED[kind]}")
    return values


def _joined_arrow(column: Any, kind: str) -> Ragged:
    """Join Arrow lists. Their memory is the flat array."""
    first = 0
    found: list[Ragged] = []
    for chunk in getattr(column, "chunks", [column]):
        try:
            found.append(_of_chunk(chunk, kind))
        except BadValue as bad:
            bad.row += first
            raise
        first += len(chunk)
    if len(found) == 1:
        return found[0]
    return Ragged(np.concatenate([one.flat for one in found]), np.concatenate([one.lengths for one in found]))


def _of_chunk(chunk: Any, kind: str) -> Ragged:
    from batchwright.columns.arrow import arrow_to_numpy, lists_of, numpy_dtype

    if len(getattr(chunk.type, "shape", ())) > 1:
        raise BadValue(0, f"it has {len(chunk.type.shape)} dimensions, not one")
    lists = lists_of(chunk)
    if lists is None:
        raise BadValue(0, f"it is {chunk.type}, not a list")
    values, borders = lists
    values, lengths = values.slice(borders[0], borders[-1] - borders[0]), np.diff(borders).astype(np.int64)
    ragged = Ragged(np.empty(0, np.int32), lengths)
    if values.null_count:
        place = values.is_null().to_pylist().index(True)
        row = ragged.row_of(place)
        raise BadValue(row, f"number {place - ragged.starts[row]} of it is null")
    if not len(values):
        return ragged
    dtype = numpy_dtype(values.type)
    if dtype is None or dtype.kind not in _KINDS[kind]:
        raise BadValue(int(np.argmax(lengths > 0)), f"it holds {values.type}, not {_WANTED[kind]}")
    return Ragged(arrow_to_numpy(values), lengths)


def scalars(column: Any, kind: str) -> NDArray[Any]:
    """One number of each row: "whole" ones, or any "numbers"."""
    code, dtype, wanted = {"whole": ("q", np.int64, "a whole number")}.get(kind, ("d", np.float64, "a number"))
    values = column.to_pylist() if is_arrow(column) else column
    try:
        return np.frombuffer(struct.pack(f"{len(values)}{code}", *values), dtype)
    except _UNFIT:
        number = _first_unfit(values, code)
        if number is None:
            raise
        raise BadValue(number, f"it is {repr(values[number])[:60]}, not {wanted}") from None


def spread(numbers: NDArray[Any], places: NDArray[np.bool_], like: Any) -> NDArray[Any]:
    """Numbers at the places that are true, one after the other, and 0 at all others."""
    found = np.zeros(len(places), like)
    found[places] = numbers
    return found
