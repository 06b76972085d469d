"""Rows and arrays as the columns of a buffer, and back: which types they get, what fits, and what is refused.

Types are kept: nothing is rounded, cut, or turned into text. What does not fit is refused with the row, the column and
both types, and nothing has changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from batchwright.base.errors import SampleError
from batchwright.buffer.adapt import adapt, owned
from batchwright.buffer.column import (
    check_names,
    fit_column,
    infer_column,
    learn,
    plain_column,
    refuse_column,
    refuse_missing,
    sample_error,
    whole,
)
from batchwright.buffer.convert import joined, plain_type, pylist, with_tensors
from batchwright.buffer.fit import fit, scalars, tensors
from batchwright.buffer.foreign import DTYPES, SIMPLE, Misfit, array_of_tensor, is_array, kind_of, plain
from batchwright.buffer.infer import has_null, types_inside
from batchwright.buffer.schema import Columns, Field, Numbers, Row, Schema, Values, num_rows_of

__all__ = [
    "arrays_to_columns",
    "column_for_set",
    "infer_schema",
    "rows_of",
    "rows_to_columns",
    "schema_of_arrow",
]


# Schemas


def infer_schema(rows: Sequence[Row]) -> Schema:
    """The columns of the first rows, in the order in which they are first named.

    >>> [str(field) for field in infer_schema([{"x": np.zeros(84, np.float32), "y": 1}])]
    ['float32[84]', 'int64']
    """
    names: dict[str, None] = {}
    for number, row in enumerate(rows):
        if not row:
            raise SampleError("a row without columns", row=number, remedy='at least one: {"text": ...}')
        names.update(dict.fromkeys(row))
    check_names(names, rows)
    fields = []
    for name in names:
        values = plain_column(name, [row.get(name) for row in rows])
        is_required = not any(value is None for value in values)
        fields.append(Field(name, infer_column(name, values), required=is_required))
    return Schema(tuple(fields))


def schema_of_arrow(schema: pa.Schema) -> Schema:
    """What `schema=pa.schema(...)` says: a field that is not nullable is required."""
    check_names(schema.names)
    for field in schema:
        for inner in types_inside(field.type):
            if isinstance(inner, pa.FixedShapeTensorType) and Field("", inner).numbers is None:
                raise SampleError(
                    f"tensors of {inner.value_type} cannot be kept",
                    column=field.name,
                    remedy="tensors of numbers or bool, or pa.list_(...)",
                )
    return Schema(
        tuple(
            Field(field.name, plain_type(field.type), required=not field.nullable, nullable=field.nullable)
            for field in schema
        )
    )


# Rows


class _Plan(NamedTuple):
    """What is asked again for each append, of one column."""

    field: Field
    numbers: tuple[np.dtype[Any], tuple[int, ...]] | None
    is_open: bool


_PLANS: dict[int, tuple[Schema, dict[str, _Plan]]] = {}
"""By the identity of schemas, which are held so that it stays theirs: types are slow to hash and to ask."""


def _plan_of(schema: Schema) -> dict[str, _Plan]:
    known = _PLANS.get(id(schema))
    if known is not None:
        return known[1]
    plan = {field.name: _Plan(field, field.numbers, has_null(field.type)) for field in schema}
    if len(_PLANS) >= 64:
        _PLANS.clear()
    _PLANS[id(schema)] = schema, plan
    return plan


def rows_to_columns(rows: Sequence[Row], schema: Schema) -> tuple[Columns, Schema]:
    """The rows by column, each checked, and the schema: with a type where there was none (null) before."""
    plan = _plan_of(schema)
    if len(rows) == 1:
        columns = _one_row(rows[0], plan)
        if columns is not None:
            return columns, schema
    unknown = set().union(*rows) - plan.keys()
    if unknown:
        _refuse_unknown(rows, unknown, schema)
    columns, learnt = {}, {}
    for name, (field, _, is_open) in plan.items():
        try:
            values = [row[name] for row in rows]
        except KeyError:
            if field.required:
                refuse_missing(next(number for number, row in enumerate(rows) if name not in row), field)
            values = [row.get(name) for row in rows]
        values = plain_column(name, values)
        if is_open:
            field = learnt[name] = learn(field, values)
        columns[name] = fit_column(values, field)
    return columns, _relearn(schema, learnt)


def _one_row(row: Row, plan: dict[str, _Plan]) -> Columns | None:
    """The columns of the most frequent append: one row of numbers and texts. None where it is not so simple."""
    if row.keys() != plan.keys():
        return None
    columns: Columns = {}
    for name, (field, numbers, is_open) in plan.items():
        value = row[name]
        kind = type(value)
        if is_open or value is None:
            return None
        try:
            if numbers is None:
                if kind not in SIMPLE:
                    return None
                columns[name] = fit([value], field)
            elif numbers[1]:
                columns[name] = tensors([value], *numbers)
            else:
                columns[name] = scalars([value], numbers[0])
        except Misfit:
            return None
    return columns


def rows_of(schema: Schema, columns: Columns) -> list[Row]:
    """Columns as rows of Python values."""
    names = schema.names
    lists = [pylist(columns[field.name]) for field in schema]
    return [dict(zip(names, row, strict=True)) for row in zip(*lists, strict=True)]


def _refuse_unknown(rows: Sequence[Row], unknown: set[Any], schema: Schema) -> None:
    row, name = next((number, name) for number, row in enumerate(rows) for name in row if name in unknown)
    check_names([name], rows)
    refuse_column(name, schema, row)


def _relearn(schema: Schema, learnt: dict[str, Field]) -> Schema:
    if all(schema.by_name[name] is field for name, field in learnt.items()):
        return schema
    return Schema(tuple(learnt.get(field.name, field) for field in schema))


# Arrays


def arrays_to_columns(arrays: Mapping[str, Any], schema: Schema | None) -> tuple[Columns, Schema]:
    """Arrays by name as columns. Arrays of numbers and Arrow data are checked and taken as they are, not row by row."""
    if schema is None:
        check_names(arrays)
        made = {name: _column(name, values, None) for name, values in arrays.items()}
        return {name: values for name, (values, _) in made.items()}, Schema(tuple(f for _, f in made.values()))
    for name in arrays:
        if name not in schema.by_name:
            check_names([name])
            refuse_column(name, schema)
    columns: Columns = {}
    learnt = {}
    for field in schema:
        if field.name in arrays:
            columns[field.name], learnt[field.name] = _column(field.name, arrays[field.name], field)
        elif field.required:
            refuse_missing(None, field)
    num_rows = num_rows_of(columns)
    missing = {field.name: fit_column([None] * num_rows, field) for field in schema if field.name not in columns}
    return {field.name: columns.get(field.name, missing.get(field.name)) for field in schema}, _relearn(schema, learnt)


def column_for_set(name: str, values: Any, count: int, field: Field | None) -> tuple[Values, Field]:
    """`count` values of one column, or one scalar for all of them. A new column (no field) is not required."""
    check_names([name])
    if _is_one(values):
        (one,) = plain_column(name, [values])
        if field is None or has_null(field.type):
            kind = infer_column(name, [one])
            field = Field(name, kind, required=False) if field is None else whole(field, kind)
        made = fit_column([one], field)
        if isinstance(made, Numbers):
            valid = None if made.valid is None else np.repeat(made.valid, count)
            return Numbers(np.repeat(made.values, count, axis=0), valid), field
        return made.take(pa.array(np.zeros(count, np.int64))), field
    got = len(values)
    if got != count:
        raise SampleError(
            f"{got} values for {count} rows",
            column=name,
            has=f"{count} rows",
            got=f"{got} values",
            remedy="one value for each id, or one scalar for all",
        )
    found, field_found = _column(name, values, field)
    return found, field_found if field is not None else dataclasses.replace(field_found, required=False)


def _is_one(values: Any) -> bool:
    if isinstance(values, list | tuple | range | pa.Array | pa.ChunkedArray) or kind_of(type(values)) == "series":
        return False
    return not (is_array(values) and len(values.shape))


def _column(name: str, values: Any, field: Field | None) -> tuple[Values, Field]:
    try:
        if kind_of(type(values)) == "series":
            values = pa.array(values)
        if isinstance(values, pa.Array | pa.ChunkedArray):
            array = joined(values)
            is_open = field is None or pa.types.is_null(field.type)
            return _arrow_column(name, with_tensors(array) if is_open else array, field)
        if is_array(values):
            array = array_of_tensor(values)
            if array.ndim and array.dtype in DTYPES:
                return _number_column(name, array, field)
            if array.ndim == 1 and array.dtype.kind in "Mm":
                return _arrow_column(name, pa.array(array), field)
            plain(array[:1])  # so that dtypes that have no Arrow type are refused by name
            values = list(array)
    except Misfit as misfit:
        raise sample_error(misfit, None, name) from None
    listed = plain_column(name, list(values))
    if field is None:
        known = all(value is not None for value in listed)
        field = Field(name, infer_column(name, listed), required=known)
    elif has_null(field.type):
        field = learn(field, listed)
    return fit_column(listed, field), field


def _number_column(name: str, array: np.ndarray, field: Field | None) -> tuple[Values, Field]:
    """An array [rows, *shape] of numbers."""
    shape = array.shape[1:]
    if field is None or pa.types.is_null(field.type):
        if 0 in shape:
            plain(np.empty(shape, array.dtype))  # says why not
        kind = pa.from_numpy_dtype(array.dtype)
        kind = pa.fixed_shape_tensor(kind, shape) if shape else kind
        field = Field(name, kind) if field is None else dataclasses.replace(field, type=kind)
        return Numbers(array), field
    if field.numbers == (array.dtype, shape):
        return Numbers(array), field
    got = f"{array.dtype}{list(shape)}" if shape else str(array.dtype)
    if shape:
        if pa.types.is_list(field.type) or pa.types.is_large_list(field.type):
            return fit_column(list(array), field), field
        raise Misfit(
            "an array of another shape or type", has=str(field), got=got, remedy=f"one of {field} for each row"
        )
    return adapt(pa.array(array), field), field


def _arrow_column(name: str, array: pa.Array, field: Field | None) -> tuple[Values, Field]:
    _check_tensors(array.type)
    if field is None:
        field = Field(name, plain_type(array.type), required=not array.null_count)
    elif has_null(field.type):
        field = whole(field, plain_type(array.type))
    if not field.nullable and array.null_count:
        row = int(np.argmax(array.is_null().to_numpy(zero_copy_only=False)))
        raise SampleError(
            "no value in a column that must have one",
            row=row,
            column=name,
            has=str(field),
            got="null",
            remedy="a value, e.g. array.fill_null(...)",
        )
    made = adapt(array, field)
    return made if isinstance(made, Numbers) else owned(made), field


def _check_tensors(kind: pa.DataType) -> None:
    for inner in types_inside(kind):
        if isinstance(inner, pa.FixedShapeTensorType) and Field("", inner).numbers is None:
            raise Misfit(f"tensors of {inner.value_type} cannot be kept", got=str(inner.value_type), remedy="a list")
