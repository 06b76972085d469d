"""Values of many rows, each as long as it likes -> one flat array and the lengths. Checked as a whole, not row by row.

Lists of Python numbers are packed by `struct`: it takes no fraction for a whole number, and NumPy takes half as long
again. Arrays and tensors are joined; Arrow lists are flat already.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Sequence
from operator import attrgetter, methodcaller
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchwright.rl.columns import cut_rows, offsets

__all__ = [
    "BadValue",
    "Ragged",
    "concatenated",
    "is_arrow",
    "is_tensor",
    "joined",
    "kind_of_value",
    "ragged_of",
    "scalars",
    "spread",
]

_CODES = {"ids": ("i", np.int32), "numbers": ("d", np.float64), "floats": ("f", np.float32), "flags": ("b", np.int8)}
_KINDS = {"ids": "iu", "numbers": "fiub", "floats": "fiub", "flags": "iub"}
_WANTED = {"ids": "whole numbers", "numbers": "numbers", "floats": "numbers of 32 bits", "flags": "0s and 1s"}


class BadValue(Exception):
    """A row whose value cannot be used, before anyone knows the file that it is in, or what the column is called."""

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
        """The row that a place of `flat` is in."""
        return int(np.searchsorted(self.starts, place, side="right")) - 1


def ragged_of(pieces: Sequence[NDArray[Any]]) -> Ragged:
    return Ragged(concatenated(pieces), np.fromiter(map(len, pieces), np.int64, len(pieces)))


def concatenated(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Ids of several arrays; one type for all, because NumPy makes floats of int64 and uint64, and of nothing."""
    filled = [array for array in arrays if len(array)]
    if not filled:
        return np.empty(0, np.int32)
    kinds = {array.dtype for array in filled}
    return np.concatenate(filled) if len(kinds) == 1 else np.concatenate(filled, dtype=np.int64, casting="unsafe")


def is_arrow(column: Any) -> bool:
    return hasattr(column, "null_count")


def is_tensor(value: Any) -> bool:
    """Whether a value is a tensor of torch, which is not imported for it."""
    return type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "detach")


def kind_of_value(value: Any) -> str:
    """What a value of a row is: "text", "list" (of numbers, or empty), "turns" (objects), "number" or "other"."""
    if isinstance(value, str):
        return "text"
    if isinstance(value, list | tuple):
        if not value:
            return "list"
        first = kind_of_value(value[0])
        return {"number": "list", "object": "turns"}.get(first, "other")
    if isinstance(value, bool | int | float | np.number | np.bool_):
        return "number"
    if hasattr(value, "keys"):
        return "object"
    ndim = getattr(value, "ndim", None)  # of an array or tensor of any library
    if ndim is None:
        return "list" if isinstance(value, range) or hasattr(value, "typecode") else "other"
    if getattr(getattr(value, "dtype", None), "hasobject", False):  # pandas keeps lists of anything so
        return kind_of_value(value.tolist())
    return "number" if ndim == 0 else "list" if ndim == 1 else "other"


def joined(column: Any, kind: str) -> Ragged:
    """A column of lists as one flat array. `kind` is one of _CODES. BadValue names the first bad row."""
    if is_arrow(column):
        return _joined_arrow(column, kind)
    kinds = set(map(type, column))
    if len(kinds) == 1 and is_tensor(column[0]):
        found = _of_tensors(column)
        if found is not None:
            return Ragged(_checked(found.flat, kind, column), found.lengths)
    lengths = _lengths(column)
    if kinds <= {list, tuple}:
        code, dtype = _CODES[kind]
        pack = struct.pack
        try:
            flat = np.frombuffer(b"".join([pack(f"{len(row)}{code}", *row) for row in column]), dtype)
        except (struct.error, TypeError, OverflowError, ValueError):
            raise _first_bad(column, kind, lambda row: pack(f"{len(row)}{code}", *row)) from None
        return Ragged(flat, lengths)
    return Ragged(_joined_arrays(column, kind), lengths)


def _lengths(column: Sequence[Any]) -> NDArray[np.int64]:
    try:
        return np.fromiter(map(len, column), np.int64, len(column))
    except TypeError:
        number = next(n for n, value in enumerate(column) if not hasattr(value, "__len__") or not _has_length(value))
        raise BadValue(number, f"it is a {type(column[number]).__name__}, not a list") from None


def _has_length(value: Any) -> bool:
    try:
        return len(value) >= 0
    except TypeError:  # an array of no dimensions
        return False


def _of_tensors(column: Sequence[Any]) -> Ragged | None:
    """Tensors of torch, joined by torch itself; None where they do not go together: one by one says why."""
    try:
        whole = sys.modules["torch"].cat(column)
    except (RuntimeError, TypeError):  # of several devices, types or shapes
        return None
    if whole.ndim != 1:
        return None
    return Ragged(_numpy_of(whole), np.fromiter(map(methodcaller("numel"), column), np.int64, len(column)))


def _numpy_of(tensor: Any) -> NDArray[Any]:
    tensor = tensor.detach().cpu()
    if tensor.is_floating_point() and tensor.element_size() < 4:
        tensor = tensor.float()  # NumPy has no bfloat16
    array: NDArray[Any] = tensor.numpy()
    return array


def _joined_arrays(column: Sequence[Any], kind: str) -> NDArray[Any]:
    arrays = list(column)
    if set(map(type, arrays)) != {np.ndarray}:
        arrays = [_array_of(value, number) for number, value in enumerate(column)]
    dtypes = set(map(attrgetter("dtype"), arrays))
    if any(dtype.hasobject for dtype in dtypes) and all(array.ndim for array in arrays):  # pandas has numbers so
        return joined([array.tolist() for array in arrays], kind).flat
    for dtype in dtypes:
        if dtype.kind not in _KINDS[kind]:
            wrong = [n for n, array in enumerate(arrays) if array.dtype == dtype and array.size]
            if wrong:
                raise BadValue(wrong[0], f"it holds {dtype}, not {_WANTED[kind]}")
            arrays = [array if array.size else np.empty(0, np.int64) for array in arrays]
    if set(map(attrgetter("ndim"), arrays)) != {1}:
        number = next(n for n, array in enumerate(arrays) if array.ndim != 1)
        raise BadValue(number, f"it has {arrays[number].ndim} dimensions, not one", "array.reshape(-1)")
    if len(dtypes) > 1:  # NumPy would make floats of int64 and uint64
        arrays = [array.astype(np.int64 if kind in ("ids", "flags") else np.float64) for array in arrays]
    return np.concatenate(arrays)


def _array_of(value: Any, number: int) -> NDArray[Any]:
    if isinstance(value, list | tuple) and not value:
        return np.empty(0, np.int64)
    try:
        array = _numpy_of(value) if is_tensor(value) else np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:
        raise BadValue(number, (str(error).splitlines() or [""])[0], "a list of numbers, or an array") from None
    if not array.ndim:
        raise BadValue(number, f"it is a {type(value).__name__}, not a list", "a list of numbers, or an array")
    return array


def _checked(flat: NDArray[Any], kind: str, column: Sequence[Any]) -> NDArray[Any]:
    if flat.dtype.kind not in _KINDS[kind]:
        number = next((n for n, value in enumerate(column) if len(value)), None)
        if number is not None:
            raise BadValue(number, f"it holds {flat.dtype}, not {_WANTED[kind]}")
    return flat


def _first_bad(column: Sequence[Any], kind: str, attempt: Callable[[Any], Any]) -> BadValue:
    """Which row it was: found only after all of them together failed."""
    for number, row in enumerate(column):
        try:
            attempt(row)
        except (struct.error, TypeError, OverflowError, ValueError):
            for place, value in enumerate(row):
                try:
                    attempt([value])
                except (struct.error, TypeError, OverflowError, ValueError):
                    got = "null" if value is None else repr(value)
                    return BadValue(number, f"number {place} of it is {got[:60]}, and {_WANTED[kind]} are needed")
    raise AssertionError("every row is good by itself")


def _joined_arrow(column: Any, kind: str) -> Ragged:
    """Arrow lists: their memory is the flat array."""
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
    import pyarrow as pa

    is_a = pa.types
    if isinstance(chunk.type, pa.BaseExtensionType):
        if len(getattr(chunk.type, "shape", ())) > 1:
            raise BadValue(0, f"it has {len(chunk.type.shape)} dimensions, not one")
        chunk = chunk.storage
    if is_a.is_list_view(chunk.type):
        chunk = chunk.cast(pa.list_(chunk.type.value_type))
    elif is_a.is_large_list_view(chunk.type):
        chunk = chunk.cast(pa.large_list(chunk.type.value_type))
    if is_a.is_fixed_size_list(chunk.type):
        size = chunk.type.list_size
        values = chunk.values.slice(chunk.offset * size, len(chunk) * size)
        lengths = np.full(len(chunk), size, np.int64)
    elif is_a.is_list(chunk.type) or is_a.is_large_list(chunk.type):
        ends = chunk.offsets.to_numpy().astype(np.int64)
        values = chunk.values.slice(ends[0], ends[-1] - ends[0])
        lengths = np.diff(ends)
    else:
        raise BadValue(0, f"it is {chunk.type}, not a list")
    ragged = Ragged(np.empty(0, np.int32), lengths)
    if is_a.is_null(values.type) or values.null_count:
        is_null = values.is_null().to_numpy(zero_copy_only=False)
        if is_null.any():
            place = int(np.argmax(is_null))
            raise BadValue(ragged.row_of(place), f"number {place - ragged.starts[ragged.row_of(place)]} of it is null")
        return ragged
    flat = values.to_numpy(zero_copy_only=False)
    if flat.dtype.kind not in _KINDS[kind] and len(flat):
        raise BadValue(int(np.argmax(lengths > 0)), f"it holds {values.type}, not {_WANTED[kind]}")
    return Ragged(flat, lengths)


def scalars(column: Any, kind: str) -> NDArray[Any]:
    """One number of each row: "whole" ones, or any "numbers"."""
    code, dtype = ("q", np.int64) if kind == "whole" else ("d", np.float64)
    wanted = "a whole number" if kind == "whole" else "a number"
    values = column.to_pylist() if is_arrow(column) else column
    try:
        return np.frombuffer(struct.pack(f"{len(values)}{code}", *values), dtype)
    except (struct.error, TypeError, OverflowError, ValueError):
        for number, value in enumerate(values):
            try:
                struct.pack(code, value)
            except (struct.error, TypeError, OverflowError, ValueError):
                raise BadValue(number, f"it is {repr(value)[:60]}, not {wanted}") from None
        raise


def spread(numbers: NDArray[Any], places: NDArray[np.bool_], like: Any) -> NDArray[Any]:
    """Numbers at the places that are true, one after the other, and 0 at all others."""
    found = np.zeros(len(places), like)
    found[places] = numbers
    return found
