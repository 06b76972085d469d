"""Checks of one column: its plain values, its type and its fit, with errors that name the row and the column."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import pyarrow as pa

from batchwright.base.errors import BatchwrightError, SampleError
from batchwright.base.words import suggest
from batchwright.buffer.arrow_types import merge
from batchwright.buffer.fit import fit
from batchwright.buffer.infer import infer
from batchwright.buffer.plain_values import SIMPLE, Misfit, plain
from batchwright.buffer.schema import Field, Row, Schema, Values

__all__ = [
    "check_names",
    "fit_column",
    "infer_column",
    "learn",
    "plain_column",
    "refuse_column",
    "refuse_missing",
    "sample_error",
    "with_type",
]

T = TypeVar("T")


def check_names(names: Iterable[Any], rows: Sequence[Row] = ()) -> None:
    """Refuse invalid names of columns. `rows` are those that the names are from."""
    seen = set()
    for name in names:
        if name in seen:
            raise SampleError(f"two columns are named {name!r}", column=name, remedy="rename one of them")
        seen.add(name)
        if not isinstance(name, str) or not name or any("\ud800" <= letter <= "\udfff" for letter in name):
            raise SampleError(
                f"a column named {name!r}: names are Unicode text, not empty",
                row=next((number for number, row in enumerate(rows) if name in row), None),
                column=repr(name),
                got=type(name).__name__,
                remedy="a name of type str",
            )


def plain_column(name: str, values: list[Any]) -> list[Any]:
    if SIMPLE.issuperset(map(type, values)):
        return values
    return _checked(name, values, lambda some: [plain(value) for value in some])


def infer_column(name: str, values: list[Any]) -> pa.DataType:
    return _checked(name, values, infer)


def fit_column(values: Sequence[Any], field: Field) -> Values:
    return _checked(field.name, values, fit, field)


def _checked(name: str, values: Sequence[Any], check: Callable[..., T], *given: Any) -> T:
    """Apply `check` to a column. If it refuses the column, the error names the first row that it fails at."""
    try:
        return check(values, *given)
    except Misfit as error:
        misfit = error
    passes, fails = 0, len(values)
    while fails - passes > 1:
        middle = (passes + fails) // 2
        try:
            check(values[:middle], *given)
            passes = middle
        except Misfit as error:
            fails, misfit = middle, error
    raise sample_error(misfit, fails - 1, name)


def learn(field: Field, values: list[Any]) -> Field:
    """The field, with types in place of unknown ones."""
    if field.is_null:
        return with_type(field, infer_column(field.name, values))
    try:
        return with_type(field, infer(values))
    except Misfit:
        return field  # they do not fit: the row that does not is found then


def with_type(field: Field, kind: pa.DataType) -> Field:
    merged = merge(field.type, kind)
    return field if merged == field.type else dataclasses.replace(field, type=merged)


def refuse_column(name: str, schema: Schema, row: int | None = None) -> None:
    remedy = f"buffer.set(ids, {name}=...) adds it, or schema=pa.schema(...) beforehand"
    near = suggest(name, schema.names)
    if near is not None:
        remedy = f"{near!r}, if that was meant; else {remedy}"
    raise SampleError(
        f"a column that this buffer does not have: {name!r}",
        row=row,
        column=name,
        has=", ".join(schema.names),
        remedy=remedy,
    )


def refuse_missing(row: int | None, field: Field) -> None:
    raise SampleError(
        f"the column {field.name!r} is missing",
        row=row,
        column=field.name,
        has=str(field),
        got="nothing",
        remedy=f"{{{field.name!r}: ...}}" + (", or None" if field.nullable else ""),
    )


def sample_error(misfit: Misfit, row: int | None, column: str | None) -> BatchwrightError:
    where = (column or "") + misfit.path
    return misfit.kind(misfit.what, row=row, column=where or None, has=misfit.has, got=misfit.got, remedy=misfit.remedy)
