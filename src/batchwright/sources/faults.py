"""Errors for rows that cannot be used, with the file and the line or row of each."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from batchwright.base.errors import SourceError, WorkerError
from batchwright.sources.formats import Format, Malformed
from batchwright.sources.units import EndOfSpan, Span, Unit, read_unit

__all__ = ["error_of", "failure_of", "place"]

_SKIP_ROWS = "on_error='skip' to leave out such rows and count them"
_SKIP_FILE = "on_error='skip' to pass over it and count it"


def place(unit: Unit, span: int, row_number: int, formats: Mapping[str, Format]) -> dict[str, Any]:
    """File and line (from 1) of a row, or file and row (from 0)."""
    if not unit.spans:
        return {"file": "<memory>", "row": unit.first_row + row_number}
    where = unit.spans[min(span, len(unit.spans) - 1)]
    kind = formats[where.format]
    if kind.by_line:
        return {"file": where.path, "line": _lines_before(where.path, where.start) + row_number + 1}
    if where.format == "text":
        return {"file": where.path}
    return {"file": where.path, "row": _rows_before(where, formats) + row_number}


def error_of(fault: Malformed, unit: Unit, span: int, row_number: int, formats: Mapping[str, Format]) -> SourceError:
    """The error for rows that cannot be read or have no text."""
    where = place(unit, span, row_number, formats)
    if fault.rows > 1 and "row" in where:
        first = where.pop("row")
        where["rows"] = f"{first:,} to {first + fault.rows - 1:,}"
    if fault.turn is not None:
        where["turn"] = fault.turn
    headline = f"{fault.kind}: {fault.reason}" if fault.reason else fault.kind
    return SourceError(headline, **where, remedy=_remedy(fault))


def _remedy(fault: Malformed) -> str:
    of_file = fault.rest or fault.kind == "empty file"
    skip = _SKIP_FILE if of_file else _SKIP_ROWS
    if fault.remedy:
        return f"{fault.remedy}; or {skip}"
    if of_file:
        return f"mend or leave out the file, or {skip}"
    if fault.kind.startswith("no column"):
        return f"text= with the column that holds the text, or {skip}"
    if fault.rows > 1:
        return f"write the file again, or {skip}"
    return f"mend the row, or {skip}"


def failure_of(
    what: str, error: Exception, unit: Unit, span: int, row_number: int, formats: Mapping[str, Format]
) -> WorkerError:
    """The error for a function of the user's that failed at a row."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return WorkerError(
        f"{what} failed: {type(error).__name__}: {error}",
        **place(unit, span, row_number, formats),
        at=f"{frame.filename}:{frame.lineno}",
        remedy="mend the function, or leave such rows out with where=",
    )


def _lines_before(path: str, start: int) -> int:
    """The number of lines that begin before a byte of a file, and so the number, from 0, of the line there."""
    lines, last = 0, b"\n"
    if start:
        with open(path, "rb") as file:
            while start > 0 and (piece := file.read(min(start, 1 << 20))):
                lines += piece.count(b"\n")
                start -= len(piece)
                last = piece[-1:]
    return lines + (last != b"\n")  # a line that the byte lies inside began before it


def _rows_before(span: Span, formats: Mapping[str, Format]) -> int:
    """Rows of a file before a range of it, found by reading them: only when one must be named."""
    if not span.start:
        return 0
    before = Unit((replace(span, start=0, stop=span.start),), 0)
    return next(number for _, number, row in read_unit(before, formats, columns=()) if isinstance(row, EndOfSpan))
