"""Cut a source into units of work, read a unit, and name the row of a fault.

Units have about 64 MB, and are fixed before any worker starts. A unit is either several whole files, or a byte range of
one file that can be cut (by line: its rows are the lines that *start* in the range), or some rows from memory. Cuts
depend on names and sizes, and for large files on compression. They are the same for any number of workers.
"""

from __future__ import annotations

import copy
import functools
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import Any

from batchwright.base.errors import BatchwrightError, SourceError, WorkerError
from batchwright.sources.compression import DecompressionBomb, is_compressed, open_raw
from batchwright.sources.formats import Format, Malformed, Row, bad_byte, encoding_fault, format_for, too_long
from batchwright.sources.memory import TableRows

__all__ = ["EndOfSpan", "Span", "Unit", "cut_files", "cut_rows", "error_of", "failure_of", "place", "read_unit"]

UNIT_BYTES = 64 << 20
_UNIT_ROWS = 100_000
_SKIP_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes [start, stop) of one file; stop None is its end."""

    file: int
    path: str
    format: str
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True, slots=True)
class Unit:
    """The work of one worker at a time."""

    spans: tuple[Span, ...]
    num_bytes: int
    rows: tuple[Any, ...] | TableRows | None = None
    """Rows given from memory, instead of spans."""
    first_row: int = 0


@dataclass(frozen=True, slots=True)
class EndOfSpan:
    """Comes after the last row of a span."""


Item = tuple[int, int, Row | Malformed | EndOfSpan]


def cut_files(
    files: Sequence[tuple[int, str, int]], named_format: str | None, unit_bytes: int | None = None
) -> list[Unit]:
    """Units over files given as (number, path, bytes), in order."""
    unit_bytes = unit_bytes or UNIT_BYTES  # looked up now: tests make it small
    units: list[Unit] = []
    small: list[Span] = []  # files that share the next unit
    small_bytes = 0
    for number, path, num_bytes in files:
        kind = format_for(path, named_format)
        # The first bytes are read only of files that would be cut: there may be a million small ones.
        is_cut = kind.can_be_cut and num_bytes > unit_bytes and (kind.by_file or not is_compressed(path))
        if small and (is_cut or small_bytes + num_bytes > unit_bytes):
            units.append(Unit(tuple(small), small_bytes))
            small, small_bytes = [], 0
        if is_cut:
            units += _ranges_of(Span(number, path, kind.name), num_bytes, unit_bytes)
        else:
            small.append(Span(number, path, kind.name))
            small_bytes += num_bytes
    if small:
        units.append(Unit(tuple(small), small_bytes))
    return units


def _ranges_of(span: Span, num_bytes: int, unit_bytes: int) -> Iterator[Unit]:
    for start in range(0, num_bytes, unit_bytes):
        stop = start + unit_bytes
        if stop < num_bytes:
            yield Unit((replace(span, start=start, stop=stop),), unit_bytes)
        else:  # to the end, should the file have grown since it was listed
            yield Unit((replace(span, start=start),), num_bytes - start)


def cut_rows(rows: Sequence[Any] | TableRows, rows_per_unit: int = _UNIT_ROWS) -> list[Unit]:
    """Units over rows from memory. The rows of a table are cut by size."""
    if isinstance(rows, TableRows):
        return [Unit((), num_bytes, part, first) for first, num_bytes, part in rows.parts(UNIT_BYTES)]
    units = []
    for start in range(0, len(rows), rows_per_unit):
        part = tuple(rows[start : start + rows_per_unit])
        units.append(Unit((), sum(map(_size_of, part)), part, start))
    return units


def _size_of(row: Any) -> int:
    match row:
        case str():
            return len(row)
        case dict():
            return sum(len(value) if isinstance(value, str) else 8 for value in row.values())
    return 8


def read_unit(unit: Unit, formats: Mapping[str, Format], columns: Sequence[str] | None = None) -> Iterator[Item]:
    """(span, row in span, row or why it is malformed), in order. Blank lines count as rows, and are not given.

    Row numbers count from the start of the span; the last thing of each span is (span, number of rows, EndOfSpan).
    Each row is the reader's own: it may change it. `columns` are the ones that are needed (None: all): a row may have
    others too.
    """
    if unit.rows is not None:
        if isinstance(unit.rows, TableRows):
            rows = unit.rows.read(columns)
        else:
            rows = map(_row_from_memory, unit.rows)
        for number, row in enumerate(rows):
            yield 0, number, row
        yield 0, len(unit.rows), EndOfSpan()
        return
    for which, span in enumerate(unit.spans):
        kind = formats[span.format]
        if kind.by_file:
            yield from _number(which, _rows_of_file(span, kind, columns))
            continue
        try:
            # Only uncompressed files are cut, and the first bytes of a range do not show a compression.
            is_range = span.start > 0 or span.stop is not None
            stream = open(span.path, "rb") if is_range else open_raw(Path(span.path))  # noqa: SIM115
        except (SourceError, OSError) as error:
            yield which, 0, _lost(error)
            yield which, 0, EndOfSpan()
            continue
        with stream:
            if kind.by_line:
                yield from _read_lines(which, span, kind, stream)
            else:
                yield from _number(which, _rows_of_stream(stream, kind, columns))


def _row_from_memory(row: Any) -> Row | Malformed:
    if isinstance(row, dict):
        return copy.deepcopy(row)
    if isinstance(row, str):
        return {"text": row}
    return Malformed("malformed row", f"a row is a dict or a str, got {type(row).__name__}")


def _rows_of_stream(stream: BufferedReader, kind: Format, columns: Sequence[str] | None) -> Iterator[Row | Malformed]:
    if not stream.peek(1):
        yield Malformed("empty file", rows=0)
    else:
        yield from kind.read(stream, **_keywords(kind, columns))


def _rows_of_file(span: Span, kind: Format, columns: Sequence[str] | None) -> Iterator[Row | Malformed]:
    if not os.stat(span.path).st_size:
        yield Malformed("empty file", rows=0)
        return
    keywords = _keywords(kind, columns)
    if kind.can_be_cut:
        keywords |= {"start": span.start, "stop": span.stop}
    yield from kind.read(Path(span.path), **keywords)


def _keywords(kind: Format, columns: Sequence[str] | None) -> dict[str, Any]:
    """Keywords for a format's function: the requested ones, and the user's options."""
    options = dict(kind.read_options)
    if kind.asks_for("columns"):
        options["columns"] = columns
    return options


def _number(which: int, rows: Iterator[Row | Malformed]) -> Iterator[Item]:
    """Rows with their numbers. What a format raises ends the file: the rows before it are good."""
    number = 0
    try:
        for row in rows:
            yield which, number, row
            number += row.rows if isinstance(row, Malformed) else 1
    except UnicodeDecodeError as error:
        yield which, number, Malformed("not UTF-8", bad_byte(error), rest=True)
    except (SourceError, OSError) as error:
        yield which, number, _lost(error)
    except BatchwrightError:  # not of the file: an option that cannot be, a package that is not installed
        raise
    except ValueError as error:
        yield which, number, Malformed("malformed row", _reason(error), rest=True)
    yield which, number, EndOfSpan()


def _read_lines(which: int, span: Span, kind: Format, stream: BufferedReader) -> Iterator[Item]:
    number, is_empty = 0, span.start == 0
    parse = functools.partial(kind.read, **kind.read_options)
    try:
        # By the beginning of the file, whichever range of it this is: the first one has the fault, no other has rows.
        fault = encoding_fault(stream.peek(8))
        if fault is not None:
            if not span.start:
                yield which, 0, fault
            yield which, 0, EndOfSpan()
            return
        for line in _lines(span, stream, kind.max_row_bytes):
            is_empty = False
            if line is None:
                yield which, number, too_long(kind.max_row_bytes, "line")
            elif not line.isspace():
                yield which, number, _parsed(parse, line)
            number += 1
    except (SourceError, OSError) as error:  # the rows before it are good
        is_empty = False
        yield which, number, _lost(error)
    if is_empty:
        yield which, 0, Malformed("empty file")
    yield which, number, EndOfSpan()


def _lines(span: Span, stream: BufferedReader, limit: int) -> Iterator[bytes | None]:
    """The lines that start in a range; None for one beyond the limit."""
    at = _first_line_start(stream, span)
    while (span.stop is None or at < span.stop) and (line := stream.readline(limit + 1)):
        at += len(line)
        if len(line) > limit and not line.endswith(b"\n"):
            at += _skip_line(stream)
            yield None
        else:
            yield line


def _parsed(parse: Callable[[bytes], Row | Malformed], line: bytes) -> Row | Malformed:
    try:
        return parse(line.rstrip(b"\r\n"))
    except UnicodeDecodeError as error:
        return Malformed("not UTF-8", bad_byte(error))
    except ValueError as error:
        return Malformed("malformed row", _reason(error))


def _first_line_start(stream: BufferedReader, span: Span) -> int:
    """The offset of the first line that starts in a range. The line before it belongs to the range before."""
    if not span.start:
        return 0
    stream.seek(span.start - 1)
    return span.start - 1 + _skip_line(stream, span.stop and span.stop - span.start + 1)


def _skip_line(stream: BufferedReader, limit: int | None = None) -> int:
    """Pass over the rest of a line (at least `limit` bytes, if it is that long), a piece at a time."""
    skipped = 0
    while limit is None or skipped < limit:
        piece = stream.readline(_SKIP_BYTES)
        skipped += len(piece)
        if not piece or piece.endswith(b"\n"):
            break
    return skipped


def _lost(error: SourceError | OSError) -> Malformed:
    """The fault of a file that cannot be read any further."""
    if isinstance(error, DecompressionBomb):
        return Malformed("decompression bomb", _reason(error), rest=True, remedy=error.remedy or "")
    kind = "damaged archive" if isinstance(error, SourceError) else "unreadable file"
    return Malformed(kind, _reason(error), rest=True)


def _reason(error: Exception) -> str:
    if isinstance(error, SourceError):
        detail = error.where.get("reason")
        return f"{error.headline} ({detail})" if detail else error.headline
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)
    return str(error) or type(error).__name__


# Errors for rows that cannot be used

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
