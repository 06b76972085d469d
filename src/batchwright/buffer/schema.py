"""The columns of a buffer: their names, types and shapes, and whether a row must have them.

Columns of numbers of one shape are NumPy arrays with a row for each; all other columns are Arrow arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchwright.buffer import kinds

Row = dict[str, Any]


class Numbers(NamedTuple):
    """A column of numbers (or booleans) of one shape: values [rows, *shape], and the mask of rows that have one."""

    values: NDArray[Any]
    valid: NDArray[np.bool_] | None = None
    """The mask of rows that have a value; None: all rows. Where False, the value has no meaning."""

    @property
    def has_value(self) -> NDArray[np.bool_]:
        if self.valid is None:
            return np.ones(len(self.values), bool)
        return self.valid

    def part(self, rows: slice | NDArray[Any]) -> Numbers:
        """Some rows: a slice, or rows by number or by mask."""
        if self.valid is None:
            return Numbers(self.values[rows])
        return Numbers(self.values[rows], self.valid[rows])


Values: TypeAlias = Numbers | pa.Array
Columns: TypeAlias = dict[str, Values]
"""Rows on their way in or out, by column: all of one length. The field decides whether a column is Numbers or Arrow."""


def num_rows_of(columns: Columns) -> int:
    column = next(iter(columns.values()), ())
    return len(column.values if isinstance(column, Numbers) else column)


def part_of(values: Values, rows: slice | NDArray[Any]) -> Values:
    """Some rows of a column: a slice, or rows by number or by mask."""
    if isinstance(values, Numbers):
        return values.part(rows)
    if isinstance(rows, slice):
        return values[rows]
    if rows.dtype == bool:
        return values.filter(rows)
    return values.take(pa.array(rows))


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
        return any(map(pa.types.is_null, kinds.types_inside(self.type)))

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a value: exact for numbers and arrays, a guess for a column that is kept as Arrow."""
        if self.numbers is None:
            return 64
        dtype, shape = self.numbers
        return dtype.itemsize * prod(shape)

    @cached_property
    def numbers(self) -> tuple[np.dtype[Any], tuple[int, ...]] | None:
        """(dtype, shape) of a column that is kept as NumPy; None for a column that is kept as Arrow."""
        return kinds.numbers_of(self.type)

    @cached_property
    def is_text(self) -> bool:
        """Whether values are text or bytes."""
        return kinds.is_text(self.type) or kinds.is_bytes(self.type)

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
