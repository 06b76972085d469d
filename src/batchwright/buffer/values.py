"""Rows and arrays as the columns of a buffer, and back, with the choice of types and the checks of values.

Types are kept: values are never rounded, cut, or turned into text. A value that does not fit is refused with the row,
the column and both types, and the buffer stays unchanged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from batchwright.base.errors import SampleError
from batchwright.base.words import suggest
from batchwright.buffer import kinds
from batchwright.buffer.arrow import as_tensors, from_arrow, has_value, joined, pylist
from batchwright.buffer.fit import fit, infer
from batchwright.buffer.plain_values import DTYPES, SIMPLE, Misfit, array_of_tensor, is_array, is_name, kind_of, plain
from batchwright.buffer.schema import Columns, Field, Numbers, Row, Schema, Values, num_rows_of, part_of

T = TypeVar("T")


def check_names(names: Iterable[Any], rows: Sequence[Row] = ()) -> None:
    """Refuse invalid names of columns. `rows` are those that the names are from."""
    seen = set()
    for name in names:
        if name in seen:
            raise SampleError(f"two columns are named {name!r}", column=name, remedy="rename one of them")
        seen.add(name)
        if not is_name(name):
            what, got = f"a column named {name!r}: names are Unicode text, not empty", type(name).__name__
            row = next((number for number, row in enumerate(rows) if name in row), None)
            raise SampleError(what, row=row, column=repr(name), got=got, remedy="a name of type str")


def _plain_column(name: str, values: list[Any]) -> list[Any]:
    if SIMPLE.issuperset(map(type, values)):
        return values
    return _checked(name, values, lambda some: [plain(value) for value in some])


def _fit_column(values: list[Any], field: Field) -> tuple[Values, Field]:
    """Python values as a column, and its field, with types in place of unknown ones."""
    values = _plain_column(field.name, values)
    if field.is_open:
        field = _learn(field, values)
    return _checked(field.name, values, lambda some: fit(some, field)), field


def _checked(name: str, values: list[Any], check: Callable[[list[Any]], T]) -> T:
    """Apply `check` to a column. If it refuses the column, the error names the first row that it fails at."""
    try:
        return check(values)
    except Misfit as error:
        misfit = error
    passes, fails = 0, len(values)
    while fails - passes > 1:
        middle = (passes + fails) // 2
        try:
            check(values[:middle])
            passes = middle
        except Misfit as error:
            fails, misfit = middle, error
    raise misfit.error(fails - 1, name)


def _learn(field: Field, values: list[Any]) -> Field:
    if field.is_null:
        return _with_type(field, _checked(field.name, values, infer))
    try:
        return _with_type(field, infer(values))
    except Misfit:
        return field  # they do not fit: the row that does not is found then


def _with_type(field: Field, kind: pa.DataType) -> Field:
    return dataclasses.replace(field, type=kinds.merge(field.type, kind))


def refuse_column(name: str, schema: Schema, row: int | None = None) -> None:
    remedy = f"buffer.set(ids, {name}=...) adds it, or schema=pa.schema(...) beforehand"
    near = suggest(name, schema.names)
    if near is not None:
        remedy = f"{near!r}, if that was meant; else {remedy}"
    what, has = f"a column that this buffer does not have: {name!r}", ", ".join(schema.names)
    raise SampleError(what, row=row, column=name, has=has, remedy=remedy)


def _refuse_missing(row: int | None, field: Field) -> None:
    what, remedy = f"the column {field.name!r} is missing", f"{{{field.name!r}: ...}}"
    if field.nullable:
        remedy += ", or None"
    raise SampleError(what, row=row, column=field.name, has=str(field), got="nothing", remedy=remedy)


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
        values = _plain_column(name, [row.get(name) for row in rows])
        is_required = not any(value is None for value in values)
        fields.append(_learn(Field(name, pa.null(), required=is_required), values))
    return Schema(tuple(fields))


def schema_of_arrow(schema: pa.Schema) -> Schema:
    """Return the schema for `schema=pa.schema(...)`. A field that is not nullable is required."""
    check_names(schema.names)
    fields = []
    for field in schema:
        try:
            _check_tensors(field.type)
        except Misfit as misfit:
            raise misfit.error(column=field.name) from None
        kind = kinds.plain_type(field.type)
        fields.append(Field(field.name, kind, required=not field.nullable, nullable=field.nullable))
    return Schema(tuple(fields))


def _check_tensors(kind: pa.DataType) -> None:
    for inner in filter(kinds.is_tensor, kinds.types_inside(kind)):
        if kinds.numbers_of(inner) is None:
            got, remedy = str(inner.value_type), "tensors of numbers or bool, or pa.list_(...)"
            raise Misfit(f"tensors of {got} cannot be kept", got=got, remedy=remedy)


# Rows


def rows_to_columns(rows: Sequence[Row], schema: Schema) -> tuple[Columns, Schema]:
    """Return the checked columns of the rows, and the schema, with types in place of null ones."""
    unknown = set().union(*rows) - schema.by_name.keys()
    if unknown:
        row, name = next((number, name) for number, row in enumerate(rows) for name in row if name in unknown)
        check_names([name], rows)
        refuse_column(name, schema, row)
    columns: Columns = {}
    learnt = []
    for field in schema:
        columns[field.name], found = _fit_column(_values_of(rows, field), field)
        if found is not field:
            learnt.append(found)
    return columns, schema.merged(learnt)


def _values_of(rows: Sequence[Row], field: Field) -> list[Any]:
    try:
        return [row[field.name] for row in rows]
    except KeyError:
        if field.required:
            _refuse_missing(next(number for number, row in enumerate(rows) if field.name not in row), field)
        return [row.get(field.name) for row in rows]


def rows_of(schema: Schema, columns: Columns) -> list[Row]:
    """Columns as rows of Python values."""
    names = schema.names
    lists = [pylist(columns[name]) for name in names]
    return [dict(zip(names, row, strict=True)) for row in zip(*lists, strict=True)]


# Arrays


def arrays_to_columns(arrays: Mapping[str, Any], schema: Schema | None) -> tuple[Columns, Schema]:
    """Arrays by name as columns: of this schema, if it has any. Arrays and Arrow data are checked and taken whole."""
    known = schema or Schema()
    if not known:
        check_names(arrays)
    columns: Columns = {}
    fields = []
    for name, values in arrays.items():
        field = known.by_name.get(name)
        if field is None and known:
            check_names([name])
            refuse_column(name, known)
        columns[name], field = _column(values, field or Field(name, pa.null()))
        if not known:
            field = dataclasses.replace(field, required=bool(has_value(columns[name]).all()))
        fields.append(field)
    num_rows = num_rows_of(columns)
    for field in known:
        if field.name not in columns:
            if field.required:
                _refuse_missing(None, field)
            columns[field.name], _ = _fit_column([None] * num_rows, field)
    merged = known.merged(fields)
    return {name: columns[name] for name in merged.names}, merged


def column_for_set(name: str, values: Any, count: int, field: Field | None) -> tuple[Values, Field]:
    """`count` values of one column, or one scalar for all of them. A new column (no field) is not required."""
    check_names([name])
    field = field or Field(name, pa.null(), required=False)
    if not is_column(values):
        one, field = _fit_column([values], field)
        return part_of(one, np.zeros(count, np.int64)), field
    if len(values) != count:
        has, got, remedy = f"{count} rows", f"{len(values)} values", "one value for each id, or one scalar for all"
        raise SampleError(f"{got} for {has}", column=name, has=has, got=got, remedy=remedy)
    return _column(values, field)


def is_column(values: Any) -> bool:
    """Whether this is a list, an array, a series or Arrow data: one value for each row, not one value."""
    if isinstance(values, list | tuple | range | pa.Array | pa.ChunkedArray) or kind_of(type(values)) == "series":
        return True
    return is_array(values) and len(values.shape) > 0


def _column(values: Any, field: Field) -> tuple[Values, Field]:
    """Return some values (a list, an array, a tensor, a series or Arrow data) as a column, with its new field."""
    try:
        if kind_of(type(values)) == "series":
            values = pa.array(values)
        if isinstance(values, pa.Array | pa.ChunkedArray):
            return _from_arrow(joined(values), field)
        if is_array(values):
            array = array_of_tensor(values)
            if array.ndim and array.dtype in DTYPES:
                return _from_numbers(Numbers(array), field)
            if array.ndim == 1 and array.dtype.kind in "Mm":
                return _from_arrow(pa.array(array), field)
            plain(array[:1])  # so that dtypes that have no Arrow type are refused by name
    except Misfit as misfit:
        raise misfit.error(column=field.name) from None
    return _fit_column(list(values), field)


def _from_numbers(numbers: Numbers, field: Field) -> tuple[Values, Field]:
    """Numbers [rows, *shape] as a column: of their own type, or of a field's."""
    dtype, shape = numbers.values.dtype, numbers.values.shape[1:]
    if field.is_null:
        if 0 in shape:
            plain(np.empty(shape, dtype))  # says why not
        kind = pa.from_numpy_dtype(dtype)
        if shape:
            kind = pa.fixed_shape_tensor(kind, shape)
        field = _with_type(field, kind)
    if field.numbers == (dtype, shape):
        _check_nulls(numbers, field)
        return numbers, field
    if not shape:
        return from_arrow(field, pa.array(numbers.values)), field
    if kinds.is_list(field.type):
        return _fit_column(pylist(numbers), field)
    got = f"{dtype}{list(shape)}"
    raise Misfit("an array of another shape or type", has=str(field), got=got, remedy=f"one of {field} for each row")


def _from_arrow(array: pa.Array, field: Field) -> tuple[Values, Field]:
    if field.is_open:
        _check_tensors(array.type)
    if field.is_null or kinds.is_tensor(field.type):
        numbers = as_tensors(array)
        if numbers is not None:
            return _from_numbers(numbers, field)
    if field.is_open:
        field = _with_type(field, kinds.plain_type(array.type))
    _check_nulls(array, field)
    return from_arrow(field, array), field


def _check_nulls(values: Values, field: Field) -> None:
    if field.nullable:
        return
    valid = has_value(values)
    if not valid.all():
        what, row = "no value in a column that must have one", int(valid.argmin())
        remedy = "a value, e.g. array.fill_null(...)"
        raise SampleError(what, row=row, column=field.name, has=str(field), got="null", remedy=remedy)
