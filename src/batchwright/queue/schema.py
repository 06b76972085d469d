"""The schema of a queue's batches, and the check that each batch fits it.

A provider's `build_meta()["batch_schema"]` names the fields. Shape [256] means arrays [batch_size, 256]. Values are
never cast. A batch has the dtypes and shapes of its schema, or it is refused with the name of the field.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.base.errors import SampleError, SourceError, SpecError
from batchwright.base.words import shortened

_DTYPES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64"
DTYPES: dict[str, np.dtype] = {name: np.dtype(name) for name in _DTYPES.split()}
"""The types that all frameworks have, and that a file can hold as in memory."""
_MOST_DIMENSIONS = 16
_MOST_BYTES_PER_ROW = 1 << 40
_EXAMPLE = '{"name": "x", "dtype": "int64", "shape": [256], "role": "input"}'


@dataclass(frozen=True, slots=True)
class BatchField:
    """One array of a batch: [batch_size, *shape]."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    role: str | None = None
    """Its use in the trainer ("input", "target"). Passed on unread."""

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


def is_pair(fields: Sequence[BatchField]) -> bool:
    """Whether batches are handed out as (X, Y): the fields are x and y, and no others.

    >>> is_pair(fields_of({"batch_schema": [{"name": "x", "dtype": "int64", "shape": []}]}))
    False
    """
    return len(fields) == 2 and {field.name for field in fields} == {"x", "y"}


# The schema


def fields_of(meta: Mapping[str, Any]) -> tuple[BatchField, ...]:
    """The fields of `meta["batch_schema"]`. All that is wrong with it is reported in one SpecError.

    >>> fields_of({"batch_schema": [{"name": "x", "dtype": "uint8", "shape": [28, 28], "role": "input"}]})
    (BatchField(name='x', dtype=dtype('uint8'), shape=(28, 28), role='input'),)
    """
    problems = list(_schema_problems(meta))
    if problems:
        raise _wrong_schema(problems)
    fields = [
        BatchField(entry["name"], DTYPES[entry["dtype"]], tuple(map(int, entry["shape"])), entry.get("role"))
        for entry in meta["batch_schema"]
    ]
    problems = [
        f"field {field.name!r}: shape {list(field.shape)} is {field.row_bytes:,} bytes per row"
        for field in fields
        if field.row_bytes > _MOST_BYTES_PER_ROW
    ]
    if problems:
        raise _wrong_schema(problems)
    return tuple(fields)


def _schema_problems(meta: Mapping[str, Any]) -> Iterator[str]:
    schema = meta.get("batch_schema", ())
    if "batch_schema" not in meta:
        yield "'batch_schema' is missing"
    elif not isinstance(schema, list | tuple):
        yield f"'batch_schema' must be a list with one dict per field, not {_kind(schema)}"
    elif not schema:
        yield "'batch_schema' is empty: a batch needs at least one field"
    else:
        for number, entry in enumerate(schema):
            yield from _entry_problems(entry, number)
        names = Counter(str(entry["name"]) for entry in schema if isinstance(entry, Mapping) and "name" in entry)
        yield from (f"field {name!r} is there {count} times" for name, count in names.items() if count > 1)


def _wrong_schema(problems: list[str]) -> SpecError:
    headline, listed = _together(problems, "the batch schema is wrong")
    return SpecError(headline, parameter="batch_schema", problems=listed, remedy=f"fields such as {_EXAMPLE}")


def _together(problems: list[str], headline: str) -> tuple[str, str | None]:
    """(headline, all problems): one problem is its own headline."""
    if len(problems) == 1:
        return problems[0], None
    return f"{headline}: {len(problems)} problems", "\n".join(problems)


def _entry_problems(entry: Any, number: int) -> Iterator[str]:
    if not isinstance(entry, Mapping):
        yield f"field number {number} must be a dict, not {_kind(entry)}"
        return
    called = f"field number {number}"
    if isinstance(entry.get("name"), str) and entry["name"]:
        called = f"field {entry['name']!r}"
    missing = [repr(key) for key in _RULES if key not in entry and key != "role"]
    if missing:
        yield f"{called} has no {' and no '.join(missing)}"
    for key, (is_right, must_be) in _RULES.items():
        if key in entry and not is_right(entry[key]):
            yield f"{called}: {key} must be {must_be}, got {shortened(entry[key])}"


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and 0 < len(name) <= 200 and name.isprintable() and not any(map(str.isspace, name))


def _is_shape(shape: Any) -> bool:
    if not isinstance(shape, list | tuple) or len(shape) > _MOST_DIMENSIONS:
        return False
    return all(isinstance(size, int | np.integer) and not isinstance(size, bool) and size >= 1 for size in shape)


_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "name": (_is_name, "a word that can be printed"),
    "dtype": (lambda dtype: isinstance(dtype, str) and dtype in DTYPES, f"one of {', '.join(DTYPES)}"),
    "shape": (_is_shape, f"a list of at most {_MOST_DIMENSIONS} sizes of at least 1, without the batch size"),
    "role": (lambda role: isinstance(role, str | None), "text"),
}


def _kind(value: Any) -> str:
    return type(value).__name__.replace("NoneType", "None")


# A batch


def checked(batch: Any, fields: tuple[BatchField, ...], batch_size: int, *, where: str) -> list[NDArray[Any]]:
    """The batch's arrays in the order of the fields: native, C-contiguous, over the given memory if possible.

    A dict of NumPy arrays, torch tensors, or Arrow arrays: numbers for shape [],
    lists of one length or fixed shape tensors for others. `where` names the batch for the SampleError.
    """
    if type(batch) is dict and len(batch) == len(fields):  # a good batch takes a few microseconds
        arrays = []
        for field in fields:
            array = batch.get(field.name)
            if type(array) is not np.ndarray:
                array = _tensor_to_numpy(array)
            if (
                array is None
                or array.dtype != field.dtype
                or array.shape != (batch_size, *field.shape)
                or not array.flags.c_contiguous
            ):
                break
            arrays.append(array)
        else:
            return arrays
    return _looked_at(batch, fields, batch_size, where)


def _tensor_to_numpy(value: Any) -> NDArray[Any] | None:
    """A torch tensor's own memory, or a copy from its device. None if NumPy has no such type."""
    torch = sys.modules.get("torch")  # asked only if the program has loaded it itself
    if torch is None or not isinstance(value, torch.Tensor):
        return None
    try:
        array: NDArray[Any] = value.numpy(force=True)
    except (TypeError, RuntimeError, NotImplementedError):  # bfloat16, sparse, quantised, meta
        return None
    return array


def _looked_at(batch: Any, fields: tuple[BatchField, ...], batch_size: int, where: str) -> list[NDArray[Any]]:
    """Check a batch that the fast check of `checked` does not pass. Each field is brought into form, or refused."""
    if not isinstance(batch, Mapping):
        remedy = 'return {"x": ..., "y": ...}: one array per field of batch_schema'
        raise SampleError(f"sample_batch must return a dict of arrays, not {_kind(batch)}", batch=where, remedy=remedy)
    names = [field.name for field in fields]
    problems: dict[str, str] = {}
    arrays = []
    for field in fields:
        try:
            arrays.append(_fitting(batch, field, batch_size))
        except _Unfit as problem:
            problems[field.name] = f"field {field.name!r} {problem}"
    for name in batch:
        if name not in names:
            problems[str(name)] = f"field {name!r} is not in the schema, which has {', '.join(names)}"
    if problems:
        headline, listed = _together(list(problems.values()), "the batch does not fit its schema")
        raise SampleError(
            headline,
            field=", ".join(problems),
            batch=where,
            problems=listed,
            remedy="return from sample_batch what batch_schema says, or change batch_schema in build_meta",
        )
    return arrays


class _Unfit(Exception):
    """Why a value is not the array of its field."""


def _fitting(given: Mapping[Any, Any], field: BatchField, batch_size: int) -> NDArray[Any]:
    if field.name not in given:
        raise _Unfit("is missing")
    value = given[field.name]
    array = _array(value, field.name)
    if array is None or array.dtype.newbyteorder("=") != field.dtype:
        dtype = getattr(value, "dtype", getattr(value, "type", ""))
        raise _Unfit(f"is {dtype}, and its schema says {field.dtype}; nothing is cast")
    shape = (batch_size, *field.shape)
    if array.shape != shape:
        raise _Unfit(f"has shape {list(array.shape)}, and its schema says {list(shape)}: batch_size, then its shape")
    return np.ascontiguousarray(array, field.dtype)  # only the order of bytes can change


def _array(value: Any, name: str) -> NDArray[Any] | None:
    """The value as an array. None if NumPy has no such type."""
    torch, pa = sys.modules.get("torch"), sys.modules.get("pyarrow")
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise _Unfit("has masked values: a batch has a number everywhere")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_meta:
            raise _Unfit(f"is a tensor without plain memory ({value.layout}, {value.device})")
        return _tensor_to_numpy(value)
    if pa is not None and isinstance(value, pa.Array | pa.ChunkedArray):
        return _arrow_to_numpy(value, name)
    if hasattr(value, "__array__") and hasattr(value, "dtype"):  # an array, of NumPy, JAX or pandas
        return np.asarray(value)
    raise _Unfit(f"is no array but {_kind(value)}")


def _arrow_to_numpy(array: Any, name: str) -> NDArray[Any]:
    """[rows, ...] of Arrow's numbers, nested lists of one length, or tensors of a fixed shape."""
    from batchwright.columns.arrow import column_of, to_numpy  # only here: it imports Arrow

    pa = sys.modules["pyarrow"]
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    try:
        column = column_of(pa.field(name, array.type), lambda: array[:1], file="a batch")
        return to_numpy(array, column, file="a batch", name=name, first_row=0)
    except SourceError as error:
        raise _Unfit(f"cannot be an array: {error.headline}") from None
