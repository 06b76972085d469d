"""Columns as Arrow arrays and back, as Python values and as a `datasets.Dataset`, and whether they are equal.

Numbers that Arrow and NumPy lay out alike are not copied.
"""

from __future__ import annotations

from itertools import islice, pairwise
from math import prod
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from batchwright.base.errors import MissingExtraError
from batchwright.buffer import kinds
from batchwright.buffer.plain_values import Misfit
from batchwright.buffer.schema import Columns, Field, Numbers, Schema, Values
from batchwright.columns.arrow import tensors_to_numpy


def to_arrow(field: Field, values: Values) -> pa.Array:
    """A column as Arrow: over the same memory, unless it has nulls or booleans."""
    if not isinstance(values, Numbers):
        return values
    numbers, valid = values
    is_null = bitmap = None
    if valid is not None and not valid.all():
        is_null, bitmap = ~valid, pa.array(valid).buffers()[1]
    if not kinds.is_tensor(field.type):
        return pa.array(np.ascontiguousarray(numbers), field.type, mask=is_null)
    flat = pa.array(np.ascontiguousarray(numbers).reshape(-1), field.type.value_type)
    # From buffers: of arrays with a 0 in their shape, the values do not say how many rows there are.
    storage = pa.Array.from_buffers(field.type.storage_type, len(numbers), [bitmap], children=[flat])
    return pa.ExtensionArray.from_storage(field.type, storage)


def as_table(schema: Schema, columns: Columns) -> pa.Table:
    """The columns of a schema as a table."""
    arrays = [to_arrow(field, columns[field.name]) for field in schema]
    return pa.Table.from_arrays(arrays, schema=schema.arrow)


def from_arrow(field: Field, array: pa.Array | pa.ChunkedArray) -> Values:
    """An Arrow array as a column of this field. Raises `Misfit` if the field's type cannot hold its values."""
    array = joined(array)
    if array.type != field.type:
        array = _cast(_decoded(array), field.type)
    if field.numbers is None:
        return _owned(array)
    if kinds.is_tensor(array.type):
        return _of_tensors(array)
    valid = _valid(array)
    if valid is not None:
        array = array.fill_null(False if pa.types.is_boolean(array.type) else 0)
    return Numbers(array.to_numpy(zero_copy_only=False), valid)


def joined(array: pa.Array | pa.ChunkedArray) -> pa.Array:
    """One array of a chunked one; the chunk itself if there is only one."""
    if not isinstance(array, pa.ChunkedArray):
        return array
    if array.num_chunks == 1:
        return array.chunk(0)
    if not array.num_chunks:
        return pa.nulls(0, array.type)
    return pa.concat_arrays(array.chunks)


def _decoded(array: pa.Array) -> pa.Array:
    """The array without dictionaries, runs and views."""
    kind = kinds.plain_type(array.type)
    if kind == array.type or kinds.is_tensor(kind):
        return array
    is_view = pa.types.is_list_view(array.type) or pa.types.is_large_list_view(array.type)
    if not is_view:  # Arrow's cast breaks views of lists that are null
        try:
            return array.cast(kind)
        except pa.ArrowNotImplementedError:  # runs, views in dictionaries
            pass
        except pa.ArrowException:  # tensors inside, with their axes in another order: `_cast` says so
            return array
    return pa.array(array.to_pylist(), kind)


def _cast(array: pa.Array, kind: pa.DataType) -> pa.Array:
    if kinds.holds(kind, array.type):
        try:
            return array.cast(kind)
        except pa.ArrowException:  # an integer that a float would round, a list of another length, a null
            pass
    has, got = str(Field("", kind)), str(Field("", array.type))
    raise Misfit("a column of another type", has=has, got=got, remedy=f"a column of type {has}, e.g. array.cast(...)")


def _owned(array: pa.Array) -> pa.Array:
    """The array, in memory that no other code can change.

    Arrow shares the memory of NumPy arrays and does not report it. Text never shares such memory, and data read from
    a file cannot be changed.
    """
    if kinds.is_text(array.type) or kinds.is_bytes(array.type):
        return array
    if not any(buffer is not None and buffer.is_mutable for buffer in array.buffers()):
        return array
    return pa.concat_arrays([array, array.slice(0, 0)])  # two arrays: of one alone, Arrow makes no copy


# Tensors


def as_tensors(array: pa.Array) -> Numbers | None:
    """Tensors, or numbers in lists of a fixed length (inside each other), as one array; None of anything else.

    Lists in which a number is missing stay lists.
    """
    if kinds.is_tensor(array.type):
        return _of_tensors(array)
    kind, shape = array.type, []
    while pa.types.is_fixed_size_list(kind):
        shape.append(kind.list_size)
        kind = kind.value_type
    if kinds.numbers_of(kind) is None or kinds.is_tensor(kind) or not prod(shape) or not shape:
        return None
    flat, valid, num_valid = array, _valid(array), len(array) - array.null_count
    for _ in shape:
        flat = flat.flatten()  # which leaves out lists that are null
    if flat.null_count or len(flat) != num_valid * prod(shape):
        return None
    known = flat.to_numpy(zero_copy_only=False).reshape(num_valid, *shape)
    if valid is None:
        return Numbers(known)
    values = np.zeros((len(array), *shape), known.dtype)
    values[valid] = known
    return Numbers(values, valid)


def _of_tensors(array: pa.Array) -> Numbers:
    if array.storage.flatten().null_count:  # which leaves out tensors that are null
        raise Misfit("a tensor with a null inside", remedy="NaN where a number is missing, or a list column")
    return Numbers(tensors_to_numpy(array), _valid(array))


def _valid(array: pa.Array) -> NDArray[np.bool_] | None:
    """The mask of rows that have a value. None if all have one."""
    if not array.null_count:
        return None
    valid: NDArray[np.bool_] = array.is_valid().to_numpy(zero_copy_only=False)
    return valid


# Python values


def pylist(values: Values) -> list[Any]:
    """Python values of a column: numbers, text, bytes, lists, dicts, None; NumPy arrays with memory of their own."""
    if not isinstance(values, Numbers):
        return _python(values)
    numbers, valid = values
    found: list[Any] = numbers.tolist() if numbers.ndim == 1 else list(numbers.copy())
    if valid is None:
        return found
    return _with_none(found, valid.tolist())


def _with_none(values: list[Any], valid: list[bool]) -> list[Any]:
    return [value if is_valid else None for value, is_valid in zip(values, valid, strict=True)]


def _python(array: pa.Array) -> list[Any]:
    kind = array.type
    if kinds.is_tensor(kind):
        return pylist(_of_tensors(array))
    has_tensors = any(map(kinds.is_tensor, kinds.types_inside(kind)))
    if not has_tensors or not len(array) or pa.types.is_map(kind) or pa.types.is_union(kind):
        return array.to_pylist()  # type: ignore[no-any-return]
    found: list[Any]
    if pa.types.is_struct(kind):
        members = [_python(array.field(number)) for number in range(kind.num_fields)]
        found = [dict(zip(kind.names, row, strict=True)) for row in zip(*members, strict=True)]
    else:
        first, *ends = _offsets(array)
        items = iter(_python(array.values.slice(first, ends[-1] - first)))
        found = [list(islice(items, stop - start)) for start, stop in pairwise([first, *ends])]
    return _with_none(found, array.is_valid().to_pylist())


def _offsets(array: pa.Array) -> list[int]:
    """The items with which lists begin, and the end of the last one."""
    if pa.types.is_fixed_size_list(array.type):
        return [(array.offset + row) * array.type.list_size for row in range(len(array) + 1)]
    return array.offsets.to_pylist()  # type: ignore[no-any-return]


# Comparison: null equals null, and NaN equals NaN


def equal_rows(values: Values, others: Values) -> NDArray[np.bool_]:
    """The mask of equal rows of two columns. The second one may be a single row, which all rows are compared with."""
    there, others_there = has_value(values), has_value(others)
    if isinstance(values, Numbers) and isinstance(others, Numbers):
        equal = _equal_numbers(values.values, others.values)
    elif isinstance(values, Numbers) or isinstance(others, Numbers):
        equal = np.zeros(len(there), bool)  # the type of one of them is not known: it has no values
    else:
        equal = _equal_arrays(values, others)
    return (equal & there & others_there) | ~(there | others_there)


def has_value(values: Values) -> NDArray[np.bool_]:
    if isinstance(values, Numbers):
        return values.has_value
    return values.is_valid().to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def _equal_numbers(values: NDArray[Any], others: NDArray[Any]) -> NDArray[np.bool_]:
    same: NDArray[np.bool_] = np.asarray(values == others)
    if values.dtype.kind == "f":
        same |= np.isnan(values) & np.isnan(others)
    return np.asarray(same.all(axis=tuple(range(1, same.ndim))))


def _equal_arrays(values: pa.Array, others: pa.Array) -> NDArray[np.bool_]:
    is_single = len(others) == 1 != len(values)
    if not pa.types.is_nested(values.type) and not isinstance(values.type, pa.BaseExtensionType):
        try:
            equal = pc.equal(values, others[0] if is_single else others)
            return equal.fill_null(False).to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]
        except pa.ArrowNotImplementedError:
            pass  # types that Arrow does not compare: as Python values
    listed = pylist(others)
    if is_single:
        listed *= len(values)
    return np.fromiter(map(_is_equal, pylist(values), listed), bool, len(values))


def _is_equal(value: Any, other: Any) -> bool:
    """Whether two Python values of one column are the same."""
    if type(value) is not type(other):
        return False
    if isinstance(value, np.ndarray):
        return np.array_equal(value, other, equal_nan=value.dtype.kind == "f")
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(_is_equal(value[name], other[name]) for name in value)
    if isinstance(value, list):
        return len(value) == len(other) and all(map(_is_equal, value, other))
    return bool(value == other or (value != value and other != other))


# Datasets


def to_dataset(table: pa.Table) -> Any:
    """Rows as a Dataset: `float32[84]` is `List(Value("float32"), length=84)` there."""
    try:
        from datasets import Dataset
    except ImportError as error:
        raise MissingExtraError(
            "to_hf_dataset needs the package datasets", remedy="pip install 'datasets>=3'"
        ) from error
    columns = {name: _as_lists(joined(table.column(name))) for name in table.column_names}
    return Dataset(pa.table(columns))


def _as_lists(array: pa.Array) -> pa.Array:
    """An array without tensors: each becomes lists of a fixed length, over the same memory."""
    kind, count = array.type, len(array)
    if isinstance(kind, pa.FixedShapeTensorType):
        size = kind.storage_type.list_size
        inner = array.storage.values.slice(array.storage.offset * size, count * size)
        for length in reversed(kind.shape[1:]):
            inner = pa.FixedSizeListArray.from_arrays(inner, length)
        return pa.FixedSizeListArray.from_arrays(inner, kind.shape[0], mask=array.storage.is_null())
    if pa.types.is_struct(kind):
        children = [_as_lists(array.field(number)) for number in range(kind.num_fields)]
        fields = [field.with_type(child.type) for field, child in zip(kind, children, strict=True)]
        return pa.StructArray.from_arrays(children, fields=fields, mask=array.is_null())
    return array
