"""One column at a time: its plain values, its type and its fit, with errors that name the row and the column."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from batchwright.base.errors import SampleError
from batchwright.base.words import suggest
from batchwright.buffer.fit import fit
from batchwright.buffer.foreign import SIMPLE, Misfit, plain
from batchwright.buffer.infer import infer, merge
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
    "whole",
]


def check_names(names: Any, rows: Sequence[Row] = ()) -> None:
    seen = set()
    for name in names:
        row = next((number for number, row in enumerate(rows) if name in row), None)
        if not isinstance(name, str) or not name:
            raise SampleError(
                f"a column named {name!r}: names are text, not empty",
                row=row,
                column=repr(name),
                got=type(name).__name__,
                remedy="a name of type str",
            )
        if name in seen:
            raise SampleError(f"two columns are named {name!r}", column=name, remedy="rename one of them")
        seen.add(name)
        try:
            name.encode()
        except UnicodeEncodeError:
            raise SampleError(
                "a column whose name is not Unicode text", row=row, column=ascii(name), remedy="another name"
            ) from None


def plain_column(name: str, values: list[Any]) -> list[Any]:
    if SIMPLE.issuperset(map(type, values)):
        return values
    try:
        return [plain(value) for value in values]
    except Misfit:
        for row, value in enumerate(values):
            try:
                plain(value)
            except Misfit as misfit:
                raise sample_error(misfit, row, name) from None
        raise


def infer_column(name: str, values: list[Any]) -> pa.DataType:
    try:
        return infer(values)
    except Misfit:
        # What a prefix of the rows cannot have, no longer one can: the first row at fault is found by halves.
        fine, fails = 0, len(values)
        while fails - fine > 1:
            middle = (fine + fails) // 2
            try:
                infer(values[:middle])
                fine = middle
            except Misfit:
                fails = middle
        try:
            return infer(values[:fails])
        except Misfit as misfit:
            raise sample_error(misfit, fails - 1, name) from None


def learn(field: Field, values: list[Any]) -> Field:
    """The field, with a type in the places where none was known."""
    if pa.types.is_null(field.type):
        return whole(field, infer_column(field.name, values))
    try:
        return whole(field, infer(values))
    except Misfit:
        return field  # they do not fit: the row that does not is found then


def whole(field: Field, kind: pa.DataType) -> Field:
    merged = merge(field.type, kind)
    return field if merged == field.type else dataclasses.replace(field, type=merged)


def fit_column(values: Sequence[Any], field: Field) -> Values:
    try:
        return fit(values, field)
    except Misfit as whole:
        for row, value in enumerate(values):
            try:
                fit([value], field)
            except Misfit as misfit:
                raise sample_error(misfit, row, field.name) from None
        raise sample_error(whole, None, field.name) from None


def refuse_column(name: str, schema: Schema, row: int | None = None) -> None:
    near = suggest(name, schema.names)
    meant = f"{near!r}, if that was meant; else " if near else ""
    raise SampleError(
        f"a column that this buffer does not have: {name!r}",
        row=row,
        column=name,
        has=", ".join(schema.names),
        remedy=f"{meant}buffer.set(ids, {name}=...) adds it, or schema=pa.schema(...) beforehand",
    )


def refuse_missing(row: int | None, field: Field) -> None:
    raise SampleError(
        f"a row without the column {field.name!r}" if row is not None else f"no column {field.name!r}",
        row=row,
        column=field.name,
        has=str(field),
        got="nothing",
        remedy=f"{{{field.name!r}: ...}}" + (", or None" if field.nullable else ""),
    )


def sample_error(misfit: Misfit, row: int | None, column: str) -> SampleError:
    return SampleError(
        misfit.what, row=row, column=column + misfit.path, has=misfit.has, got=misfit.got, remedy=misfit.remedy
    )
