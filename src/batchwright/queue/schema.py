"""What a queue's batches consist of, and that each batch is exactly that.

A provider's `build_meta()["batch_schema"]` names the fields. Shape [256] means arrays [batch_size, 256]. Nothing is
cast: a batch has the dtypes and shapes of its schema, or it is refused by the name of the field.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.base.errors import SampleError, SpecError

__all__ = ["DTYPES", "Field", "checked", "fields_of", "is_pair"]

DTYPES: dict[str, np.dtype] = {
    name: np.dtype(name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64"),
    )
}
"""What all frameworks have and a file can hold as it lies in memory."""
_MOST_DIMENSIONS = 16
_MOST_BYTES_PER_ROW = 1 << 40
_EXAMPLE = '{"name": "x", "dtype": "int64", "shape": [256], "role": "input"}'


@dataclass(frozen=True, slots=True)
class Field:
    """One array of a batch: [batch_size, *shape]."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    role: str | None = None
    """What the trainer takes it for ("input", "target"). Passed on, never looked at."""

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


def is_pair(fields: Sequence[Field]) -> bool:
    """Whether batches are handed out as (X, Y): the fields are x and y, and no others.

    >>> is_pair(fields_of({"batch_schema": [{"name": "x", "dtype": "int64", "shape": []}]}))
    False
    """
    return len(fields) == 2 and {field.name for field in fields} == {"x", "y"}


# The schema


def fields_of(meta: Mapping[str, Any]) -> tuple[Field, ...]:
    """The fields of `meta["batch_schema"]`. Whatever is wrong in it is said at once, in one SpecError.

    >>> fields_of({"batch_schema": [{"name": "x", "dtype": "uint8", "shape": [28, 28], "role": "input"}]})
    (Field(name='x', dtype=dtype('uint8'), shape=(28, 28), role='input'),)
    """
    if not isinstance(meta, Mapping):
        raise _wrong_schema([f"build_meta() must return a dict, not {_kind(meta)}"])
    schema = meta.get("batch_schema")
    if "batch_schema" not in meta:
        raise _wrong_schema(["'batch_schema' is missing"])
    if not isinstance(schema, Sequence) or isinstance(schema, str | bytes):
        raise _wrong_schema([f"'batch_schema' must be a list with one dict per field, not {_kind(schema)}"])
    if not schema:
        raise _wrong_schema(["'batch_schema' is empty: a batch needs at least one field"])
    problems: list[str] = []
    fields = [_field(entry, number, problems) for number, entry in enumerate(schema)]
    names = [entry.get("name") for entry in schema if isinstance(entry, Mapping)]
    twice = sorted({name for name in names if isinstance(name, str) and names.count(name) > 1})
    problems += [f"field {name!r} is there {names.count(name)} times" for name in twice]
    if problems:
        raise _wrong_schema(problems)
    return tuple(field for field in fields if field is not None)


def _wrong_schema(problems: list[str]) -> SpecError:
    headline, listed = _listed(problems, "the batch schema is wrong")
    return SpecError(headline, parameter="batch_schema", problems=listed, remedy=f"fields such as {_EXAMPLE}")


def _listed(problems: list[str], together: str) -> tuple[str, str | None]:
    """(headline, all problems): one problem is its own headline."""
    if len(problems) == 1:
        return problems[0], None
    return f"{together}: {len(problems)} problems", "\n".join(problems)


def _field(entry: Any, number: int, problems: list[str]) -> Field | None:
    """One field, or None after its problems were added to the others."""
    if not isinstance(entry, Mapping):
        problems.append(f"field number {number} must be a dict, not {_kind(entry)}")
        return None
    found = len(problems)
    name, role = entry.get("name"), entry.get("role")
    called = f"field {name!r}" if isinstance(name, str) and name else f"field number {number}"
    missing = [key for key in ("name", "dtype", "shape") if key not in entry]
    if missing:
        problems.append(f"{called} has no {' and no '.join(map(repr, missing))}")
    if "name" in entry and not _is_name(name):
        problems.append(f"{called}: name must be a word that can be printed, got {_shown(name)}")
    dtype = entry.get("dtype")
    if "dtype" in entry and not (isinstance(dtype, str) and dtype in DTYPES):
        problems.append(f"{called}: dtype must be one of {', '.join(DTYPES)}; got {_shown(dtype)}")
    shape = entry.get("shape")
    if "shape" in entry:
        problems += [f"{called}: {problem}" for problem in _shape_problems(shape)]
    if role is not None and not isinstance(role, str):
        problems.append(f"{called}: role must be text, got {_shown(role)}")
    if len(problems) > found:
        return None
    field = Field(str(name), DTYPES[str(dtype)], tuple(int(size) for size in shape or ()), role)
    if field.row_bytes > _MOST_BYTES_PER_ROW:
        problems.append(f"{called}: shape {list(field.shape)} is {field.row_bytes:,} bytes per row")
    return field


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and 0 < len(name) <= 200 and name.isprintable() and not any(map(str.isspace, name))


def _shape_problems(shape: Any) -> list[str]:
    if not isinstance(shape, Sequence) or isinstance(shape, str | bytes):
        return [f"shape must be a list of sizes ([] for one number per row), got {_shown(shape)}"]
    problems = []
    if len(shape) > _MOST_DIMENSIONS:
        problems.append(f"shape has {len(shape)} dimensions, and at most {_MOST_DIMENSIONS} are possible")
    for size in shape:
        if not isinstance(size, int | np.integer) or isinstance(size, bool) or size < 1:
            problems.append(f"shape {_shown(shape)} must be of sizes of at least 1, without the batch size")
            break
    return problems


def _kind(value: Any) -> str:
    return "None" if value is None else type(value).__name__


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# A batch


def checked(batch: Any, fields: tuple[Field, ...], batch_size: int, *, where: str) -> list[NDArray[Any]]:
    """The batch's arrays in the order of the fields: native, C-contiguous, over the given memory where it can be.

    A dict (or an Arrow RecordBatch or Table) of NumPy arrays, torch tensors, or Arrow arrays: numbers for shape [],
    lists of one length or fixed shape tensors for others. `where` says which batch this is, for the SampleError.
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
    """A torch tensor's own memory, or a copy of what lies on a device. None of what NumPy has no type for."""
    torch = sys.modules.get("torch")  # asked only if the program has loaded it itself
    if torch is None or not isinstance(value, torch.Tensor):
        return None
    try:
        array: NDArray[Any] = value.numpy(force=True)
    except (TypeError, RuntimeError, NotImplementedError):  # bfloat16, sparse, quantised, meta
        return None
    return array


def _looked_at(batch: Any, fields: tuple[Field, ...], batch_size: int, where: str) -> list[NDArray[Any]]:
    """As `checked`, of a batch that is not plainly right: each field is brought into form, or said to be wrong."""
    given = _columns(batch, where)
    names = [field.name for field in fields]
    problems: dict[str, str] = {}
    arrays = []
    for field in fields:
        if field.name not in given:
            problems[field.name] = f"field {field.name!r} is missing"
            continue
        try:
            arrays.append(_fitting(given[field.name], field, batch_size))
        except _Unfit as problem:
            problems[field.name] = f"field {field.name!r} {problem}"
    for name in given:
        if name not in names:
            problems[str(name)] = f"field {name!r} is not in the schema, which has {', '.join(names)}"
    if problems:
        headline, listed = _listed(list(problems.values()), "the batch does not fit its schema")
        raise SampleError(
            headline,
            field=", ".join(problems),
            batch=where,
            problems=listed,
            remedy="return from sample_batch what batch_schema says, or change batch_schema in build_meta",
        )
    return arrays


def _columns(batch: Any, where: str) -> Mapping[Any, Any]:
    if isinstance(batch, Mapping):
        return batch
    pa = sys.modules.get("pyarrow")
    if pa is not None and isinstance(batch, pa.RecordBatch | pa.Table):
        names = batch.schema.names
        twice = sorted({name for name in names if names.count(name) > 1})
        if not twice:
            return dict(zip(names, batch.columns, strict=True))
        headline = f"column {twice[0]!r} of the batch is there {names.count(twice[0])} times"
    else:
        headline = f"sample_batch must return a dict of arrays, not {_kind(batch)}"
    raise SampleError(headline, batch=where, remedy='return {"x": ..., "y": ...}: one array per field of batch_schema')


class _Unfit(Exception):
    """Why a value is not the array of its field."""


def _fitting(value: Any, field: Field, batch_size: int) -> NDArray[Any]:
    array, dtype = _array(value)
    if array is None or array.dtype.newbyteorder("=") != field.dtype:
        raise _Unfit(f"is {dtype}, and its schema says {field.dtype}; nothing is cast")
    shape = (batch_size, *field.shape)
    if array.shape != shape:
        raise _Unfit(f"has shape {list(array.shape)}, and its schema says {list(shape)}: batch_size, then its shape")
    return np.ascontiguousarray(array, field.dtype)  # only the order of bytes can change


def _array(value: Any) -> tuple[NDArray[Any] | None, str]:
    """(the value as an array, or None where NumPy has no such type; the name of its type)."""
    torch, pa = sys.modules.get("torch"), sys.modules.get("pyarrow")
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise _Unfit("has masked values: a batch has a number everywhere")
    if isinstance(value, np.ndarray):
        return np.asarray(value), str(value.dtype)
    if torch is not None and isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_meta:
            raise _Unfit(f"is a tensor without plain memory ({value.layout}, {value.device})")
        return _tensor_to_numpy(value), str(value.dtype)
    if pa is not None and isinstance(value, pa.Array | pa.ChunkedArray):
        return _arrow_to_numpy(value), str(value.type)
    if hasattr(value, "__array__") and hasattr(value, "dtype"):  # a JAX array, a pandas column
        array = np.asarray(value)
        return array, str(array.dtype)
    raise _Unfit(f"is no array but {_kind(value)}")


def _arrow_to_numpy(array: Any) -> NDArray[Any]:
    """[rows, ...] of Arrow's numbers, nested lists of one length, or tensors of a fixed shape."""
    pa = sys.modules["pyarrow"]
    if isinstance(array, pa.ChunkedArray):
        parts = [_arrow_to_numpy(chunk) for chunk in array.chunks]
        if len({part.shape[1:] for part in parts}) > 1:
            raise _Unfit("has lists of different lengths")
        return np.concatenate(parts) if parts else _arrow_to_numpy(pa.array([], array.type))
    if array.null_count:
        raise _Unfit(f"has {array.null_count} nulls: a batch has a number everywhere")
    kind = array.type
    if isinstance(kind, pa.FixedShapeTensorType):
        sizes = _arrow_to_numpy(array.storage).reshape(len(array), *kind.shape)
        return sizes.transpose(0, *(1 + axis for axis in kind.permutation or range(len(kind.shape))))
    if isinstance(kind, pa.BaseExtensionType):
        return _arrow_to_numpy(array.storage)
    if pa.types.is_fixed_size_list(kind):
        return _rows(_arrow_to_numpy(array.flatten()), len(array), kind.list_size)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        lengths = np.unique(np.diff(array.offsets.to_numpy()))
        if len(lengths) > 1:
            raise _Unfit(f"has lists of {lengths[0]} to {lengths[-1]} values, and a batch has no ragged fields")
        return _rows(_arrow_to_numpy(array.flatten()), len(array), int(lengths[0]) if len(lengths) else 0)
    numbers: NDArray[Any] = array.to_numpy(zero_copy_only=False)
    return numbers


def _rows(values: NDArray[Any], num_rows: int, length: int) -> NDArray[Any]:
    return values.reshape(num_rows, length, *values.shape[1:])
