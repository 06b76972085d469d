"""The columns of a buffer: their names, types and shapes, and whether a row must have them.

Columns of numbers of one shape are NumPy arrays with a row for each; all other columns are Arrow arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchwright.columns.arrow import numpy_dtype

__all__ = [
    "Columns",
    "Field",
    "Numbers",
    "Row",
    "Schema",
    "Values",
    "holds",
    "is_bytes",
    "is_list",
    "is_tensor",
    "is_text",
    "merge",
    "num_rows_of",
    "numbers_of",
    "part_of",
    "plain_type",
    "types_inside",
]

is_a = pa.types

_WITHOUT_VIEWS = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}


def is_text(kind: pa.DataType) -> bool:
    return bool(is_a.is_string(kind) or is_a.is_large_string(kind) or is_a.is_string_view(kind))


def is_bytes(kind: pa.DataType) -> bool:
    return bool(is_a.is_binary(kind) or is_a.is_large_binary(kind) or is_a.is_binary_view(kind))


def is_list(kind: pa.DataType) -> bool:
    return bool(is_a.is_list(kind) or is_a.is_large_list(kind) or is_a.is_fixed_size_list(kind))


def is_tensor(kind: pa.DataType) -> bool:
    return isinstance(kind, pa.FixedShapeTensorType)


def numbers_of(kind: pa.DataType) -> tuple[np.dtype[Any], tuple[int, ...]] | None:
    """The dtype and shape of numbers (or tensors of numbers); None of other types."""
    shape: tuple[int, ...] = ()
    if is_tensor(kind):
        kind, shape = kind.value_type, tuple(kind.shape)
    dtype = numpy_dtype(kind)
    if dtype is None:
        return None
    return dtype, shape


def types_inside(kind: pa.DataType) -> list[pa.DataType]:
    """A type and the types inside it. What tensors and other extensions are stored as does not count."""
    if isinstance(kind, pa.BaseExtensionType) or not is_a.is_nested(kind):
        return [kind]
    inner = [kind.field(number).type for number in range(kind.num_fields)]
    return [kind, *chain.from_iterable(map(types_inside, inner))]


def merge(old: pa.DataType, new: pa.DataType) -> pa.DataType:
    """The old type, with parts of the new type in place of unknown parts."""
    if is_a.is_null(old):
        return new
    if is_a.is_struct(old) and is_a.is_struct(new):
        members = {field.name: field.type for field in new}
        return pa.struct([field.with_type(merge(field.type, members.get(field.name, field.type))) for field in old])
    if is_list(old) and is_list(new):
        return _list_of(old, merge(old.value_type, new.value_type))
    return old


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type of the values, however they are laid out in memory.

    Dictionaries, runs and views are ways to store the same values, and so is the order of a tensor's axes.
    """
    if is_tensor(kind):
        axes = kind.permutation or range(len(kind.shape))
        return pa.fixed_shape_tensor(kind.value_type, [kind.shape[axis] for axis in axes])
    if is_a.is_dictionary(kind) or is_a.is_run_end_encoded(kind):
        return plain_type(kind.value_type)
    if kind in _WITHOUT_VIEWS:
        return _WITHOUT_VIEWS[kind]
    if is_a.is_struct(kind):
        return pa.struct([field.with_type(plain_type(field.type)) for field in kind])
    if is_list(kind) or is_a.is_list_view(kind) or is_a.is_large_list_view(kind):
        return _list_of(kind, plain_type(kind.value_type))
    return kind


def _list_of(kind: pa.DataType, items: pa.DataType) -> pa.DataType:
    """A list type with other items."""
    item = kind.value_field.with_type(items)
    if is_a.is_fixed_size_list(kind):
        return pa.list_(item, kind.list_size)
    if is_a.is_large_list(kind) or is_a.is_large_list_view(kind):
        return pa.large_list(item)
    return pa.list_(item)


def holds(kind: pa.DataType, other: pa.DataType) -> bool:
    """Whether values of the `other` type are values of this one. (Integers may still be too large for a float.)

    >>> holds(pa.int64(), pa.int32()), holds(pa.int64(), pa.float64()), holds(pa.string(), pa.large_string())
    (True, False, True)
    """
    other = plain_type(other)
    if other == kind or is_a.is_null(other):
        return True
    if is_a.is_struct(other) and is_a.is_struct(kind):
        members = {field.name: field.type for field in kind}
        return all(field.name in members and holds(members[field.name], field.type) for field in other)
    if is_list(other) and is_list(kind):
        return holds(kind.value_type, other.value_type)
    for is_alike in (is_text, is_bytes):
        if is_alike(other):
            return is_alike(kind)
    return _holds_numbers(numpy_dtype(kind), numpy_dtype(other))


def _holds_numbers(dtype: np.dtype[Any] | None, other: np.dtype[Any] | None) -> bool:
    if dtype is None or other is None:
        return False
    return (dtype.kind == "b") == (other.kind == "b") and np.can_cast(other, dtype, "safe")


Row = dict[str, Any]


class Numbers(NamedTuple):
    """A column of numbers (or booleans) of one shape: values [rows, *shape], and the mask of rows that have one."""

    values: NDArray[Any]
    valid: NDArray[np.bool_] | None = None
    """The mask of rows that have a value; None: all rows. Where False, the value has no meaning."""

    @property
    def has_value(self) -> NDArray[np.bool_]:
        return np.ones(len(self.values), bool) if self.valid is None else self.valid


Values: TypeAlias = Numbers | pa.Array
Columns: TypeAlias = dict[str, Values]
"""Rows on their way in or out, by column: all of one length. The field decides whether a column is Numbers or Arrow."""


def num_rows_of(columns: Columns) -> int:
    column = next(iter(columns.values()), ())
    return len(column.values if isinstance(column, Numbers) else column)


def part_of(values: Values, rows: slice | NDArray[Any]) -> Values:
    """Some rows of a column: a slice, or rows by number or by mask."""
    if isinstance(values, Numbers):
        numbers, valid = values
        return Numbers(numbers[rows]) if valid is None else Numbers(numbers[rows], valid[rows])
    if isinstance(rows, slice):
        return values[rows]
    return values.filter(rows) if rows.dtype == bool else values.take(pa.array(rows))


@dataclass(frozen=True)
class Field:
    """One column."""

    name: str
    type: pa.DataType
    """`pa.fixed_shape_tensor(value_type, shape)` for arrays of one shape; `pa.null()` if no row had a value yet."""
    required: bool = True
    """Whether a row must name it. None is a value too, if `nullable`."""
    nullable: bool = True

    @cached_property
    def is_null(self) -> bool:
        """Whether no row had a value yet, so that the type is not known."""
        return bool(self.type == pa.null())

    @cached_property
    def is_open(self) -> bool:
        """Whether the type, or a part of it, is not known yet: `null`, `list<null>`, `struct<a: null>`."""
        return any(map(is_a.is_null, types_inside(self.type)))

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a number or array of this column; 0 of one that is kept as Arrow."""
        return 0 if self.numbers is None else self.numbers[0].itemsize * prod(self.numbers[1])

    @cached_property
    def numbers(self) -> tuple[np.dtype[Any], tuple[int, ...]] | None:
        """(dtype, shape) of a column that is kept as NumPy; None for a column that is kept as Arrow."""
        return numbers_of(self.type)

    @cached_property
    def is_text(self) -> bool:
        """Whether values are text or bytes."""
        return is_text(self.type) or is_bytes(self.type)

    @cached_property
    def message(self) -> pa.Schema:
        """The schema of this column alone, for Arrow's messages."""
        return pa.schema([pa.field("", self.type)])

    def __str__(self) -> str:
        """`float32[84]`, `int64`, `string`: as errors name it."""
        if self.numbers is None:
            return str(self.type)
        dtype, shape = self.numbers
        return f"{dtype}{list(shape) or ''}"


@dataclass(frozen=True)
class Schema:
    """The columns of a buffer, in order. A value: a change makes a new one."""

    fields: tuple[Field, ...] = ()

    @cached_property
    def by_name(self) -> dict[str, Field]:
        return {field.name: field for field in self.fields}

    @property
    def names(self) -> list[str]:
        return list(self.by_name)

    @cached_property
    def numeric(self) -> list[str]:
        """Columns with one number in each row."""
        return [f.name for f in self.fields if f.numbers is not None and not f.numbers[1] and f.numbers[0].kind != "b"]

    @cached_property
    def not_numeric(self) -> list[str]:
        return [name for name in self.by_name if name not in self.numeric]

    @cached_property
    def arrow(self) -> pa.Schema:
        return pa.schema([pa.field(field.name, field.type, nullable=field.nullable) for field in self.fields])

    def merged(self, fields: Iterable[Field]) -> Schema:
        """This schema with some fields replaced, and new fields at its end. Returns itself if no field changes."""
        merged = Schema(tuple({**self.by_name, **{field.name: field for field in fields}}.values()))
        return self if merged == self else merged

    def __str__(self) -> str:
        """`obs float32[84], label int64`."""
        return ", ".join(f"{field.name} {field}" for field in self.fields)

    def __iter__(self) -> Iterator[Field]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)
