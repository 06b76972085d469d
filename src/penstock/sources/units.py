"""Cut a source into units of work, and read one: about 64 MB each, fixed before any worker starts.

A unit is either several whole files, or a byte range of one file by line (its rows are the lines that *start* in the
range), or some rows from memory. Cuts depend on names and sizes only, so they are the same for any number of workers.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import Any

from penstock.errors import SourceError
from penstock.sources.compression import compression_of, open_raw
from penstock.sources.formats import Format, Row, format_for

__all__ = ["UNIT_BYTES", "EndOfSpan", "Malformed", "Span", "Unit", "cut_files", "cut_rows", "read_unit"]

UNIT_BYTES = 64 << 20
_UNIT_ROWS = 100_000
_LINE_LIMIT = 1 << 30
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
    """What one worker reads at a time."""

    spans: tuple[Span, ...]
    num_bytes: int
    rows: tuple[Any, ...] | None = None
    """Rows given from memory, instead of spans."""
    first_row: int = 0


@dataclass(frozen=True, slots=True)
class Malformed:
    """A row that could not be read, and why. `rest` means that the rest of the file is lost with it."""

    kind: str
    """What the report counts it under."""
    reason: str = ""
    rest: bool = False


@dataclass(frozen=True, slots=True)
class EndOfSpan:
    """Comes after the last row of a span, with the number of rows in it."""


Item = tuple[int, int, Row | Malformed | EndOfSpan]


def cut_files(
    files: Sequence[tuple[int, str, int]], named_format: str | None, unit_bytes: int | None = None
) -> list[Unit]:
    """Units over files given as (number, path, bytes), in order."""
    unit_bytes = UNIT_BYTES if unit_bytes is None else unit_bytes
    units: list[Unit] = []
    waiting: list[Span] = []
    waiting_bytes = 0

    def flush() -> None:
        nonlocal waiting_bytes
        if waiting:
            units.append(Unit(tuple(waiting), waiting_bytes))
            waiting.clear()
            waiting_bytes = 0

    for number, path, num_bytes in files:
        kind = format_for(path, named_format)
        if kind.by_line and not compression_of(path) and num_bytes > unit_bytes:
            flush()
            for start in range(0, num_bytes, unit_bytes):
                # The last range goes on to the end, should the file have grown since it was listed.
                stop = start + unit_bytes if start + unit_bytes < num_bytes else None
                units.append(Unit((Span(number, path, kind.name, start, stop),), (stop or num_bytes) - start))
            continue
        if waiting_bytes + num_bytes > unit_bytes:
            flush()
        waiting.append(Span(number, path, kind.name))
        waiting_bytes += num_bytes
    flush()
    return units


def cut_rows(rows: Sequence[Any], rows_per_unit: int | None = None) -> list[Unit]:
    """Units over rows from memory."""
    rows_per_unit = _UNIT_ROWS if rows_per_unit is None else rows_per_unit
    return [
        Unit(
            (),
            sum(_size_of(row) for row in rows[start : start + rows_per_unit]),
            tuple(rows[start : start + rows_per_unit]),
            start,
        )
        for start in range(0, len(rows), rows_per_unit)
    ]


def _size_of(row: Any) -> int:
    return (
        len(row)
        if isinstance(row, str)
        else sum(len(v) if isinstance(v, str) else 8 for v in row.values())
        if isinstance(row, dict)
        else 8
    )


def read_unit(unit: Unit, formats: Mapping[str, Format]) -> Iterator[Item]:
    """(span, row in span, row or why it is malformed), in order. Blank lines count as rows, and are not given.

    Row numbers count from the start of the span; the last thing of each span is (span, number of rows, EndOfSpan).
    Each row is the reader's own: it may change it.
    """
    if unit.rows is not None:
        for number, row in enumerate(unit.rows):
            yield 0, number, _row_from_memory(row)
        yield 0, len(unit.rows), EndOfSpan()
        return
    for which, span in enumerate(unit.spans):
        kind = formats[span.format]
        try:
            stream = open_raw(Path(span.path))
        except OSError as error:
            yield which, 0, Malformed("unreadable file", _reason(error), rest=True)
            yield which, 0, EndOfSpan()
            continue
        with stream:
            yield from _read_lines(which, span, kind, stream) if kind.by_line else _read_stream(which, kind, stream)


def _row_from_memory(row: Any) -> Row | Malformed:
    if isinstance(row, dict):
        return copy.deepcopy(row)
    if isinstance(row, str):
        return {"text": row}
    return Malformed("malformed row", f"a row is a dict or a str, got {type(row).__name__}")


def _read_stream(which: int, kind: Format, stream: BufferedReader) -> Iterator[Item]:
    number = 0
    try:
        if not stream.peek(1):
            yield which, 0, Malformed("empty file")
        else:
            for row in kind.read(BufferedReader(_Lent(stream))):
                yield which, number, row
                number += 1
    except UnicodeDecodeError as error:
        yield which, number, Malformed("not UTF-8", _not_utf8(error), rest=True)
    except SourceError as error:
        yield which, number, Malformed("damaged archive", _reason(error), rest=True)
    except ValueError as error:
        yield which, number, Malformed("malformed row", _reason(error), rest=True)
    except OSError as error:
        yield which, number, Malformed("unreadable file", _reason(error), rest=True)
    yield which, number, EndOfSpan()


class _Lent(RawIOBase):
    """A stream that a format may wrap and close as it likes: the file itself is closed by whoever opened it."""

    def __init__(self, stream: BufferedReader) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._stream.readinto(buffer)

    def readall(self) -> bytes:
        return self._stream.read()


def _read_lines(which: int, span: Span, kind: Format, stream: BufferedReader) -> Iterator[Item]:
    number = 0
    empty = span.start == 0
    try:
        at = _first_line_start(stream, span)
        while span.stop is None or at < span.stop:
            line = stream.readline(_LINE_LIMIT)
            if not line:
                break
            empty = False
            at += len(line)
            if len(line) == _LINE_LIMIT and not line.endswith(b"\n"):
                at += _skip_line(stream)
                yield which, number, Malformed("line too long", f"over {_LINE_LIMIT:,} bytes")
            elif not line.isspace():
                try:
                    row = kind.read(line.rstrip(b"\r\n"))
                except UnicodeDecodeError as error:
                    row = Malformed("not UTF-8", _not_utf8(error))
                except ValueError as error:
                    row = Malformed("malformed row", _reason(error))
                yield which, number, row
            number += 1
    except SourceError as error:  # a damaged archive: what came before it is good
        empty = False
        yield which, number, Malformed("damaged archive", _reason(error), rest=True)
    except OSError as error:
        empty = False
        yield which, number, Malformed("unreadable file", _reason(error), rest=True)
    if empty:
        yield which, 0, Malformed("empty file")
    yield which, number, EndOfSpan()


def _first_line_start(stream: BufferedReader, span: Span) -> int:
    """Where the first line that starts in a range starts. The line before it is the range before's."""
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


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"byte 0x{error.object[error.start]:02x} at {error.start:,}"


def _reason(error: Exception) -> str:
    if isinstance(error, SourceError):
        detail = error.where.get("reason")
        return f"{error.headline} ({detail})" if detail else error.headline
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)
    return str(error) or type(error).__name__
