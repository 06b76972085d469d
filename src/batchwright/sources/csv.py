"""CSV and TSV. The first row names the columns, every value is text, and a bad row is located and skipped.

Quotes as in RFC 4180, read by Python's csv module in its strict mode: a quoted value may hold delimiters, line ends and
doubled quotes. A row that cannot be read ends where a line ends and its quotes are balanced; if they never are, the
rest of the file is lost with it, and the line where the quote opens is named.
"""

from __future__ import annotations

import csv
import functools
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from io import BufferedReader

from batchwright.base.errors import SpecError
from batchwright.base.words import counted
from batchwright.sources.formats import (
    BOM,
    MAX_ROW_BYTES,
    Malformed,
    Row,
    bad_byte,
    encoding_fault,
    register_format,
    too_long,
)

_SKIP_BYTES = 1 << 20
_DELIMITERS = ",;\t|"


@register_format("csv", extensions=(".csv",), version="1")
def _read_csv(
    stream: BufferedReader,
    *,
    columns: Sequence[str] | None = None,
    delimiter: str = ",",
    quotechar: str | None = '"',
    header: Sequence[str] | None = None,
    max_row_bytes: int = MAX_ROW_BYTES,
) -> Iterator[Row | Malformed]:
    _check_options(delimiter, quotechar, header)
    fault = encoding_fault(stream.peek(8))
    if fault is not None:
        yield fault
        return
    records = _records(_Lines(stream, delimiter, quotechar, max_row_bytes))
    names = _names_in_header(records, columns, delimiter) if header is None else list(header)
    if isinstance(names, Malformed):
        yield names
        return
    for line, record in records:
        if isinstance(record, Malformed):
            yield record
        elif len(record) == len(names):
            yield dict(zip(names, record, strict=True))
        else:
            yield _ragged(record, len(names), line, delimiter)


register_format("tsv", extensions=(".tsv", ".tab"), version="1")(functools.partial(_read_csv, delimiter="\t"))


def _check_options(delimiter: str, quotechar: str | None, header: Sequence[str] | None) -> None:
    _check_character("delimiter", delimiter, 'options={"delimiter": ";"}')
    if quotechar is not None:
        _check_character("quotechar", quotechar, 'options={"quotechar": "\'"}, or None')
    if delimiter == quotechar:
        what = f"delimiter and quotechar are both {delimiter!r}"
        raise SpecError(what, parameter="options", remedy="two different characters")
    if header is None:
        return
    if isinstance(header, str) or not header or not all(isinstance(name, str) and name for name in header):
        remedy = 'options={"header": ["id", "text"]}, for files without a header row'
        raise SpecError(f"header={header!r} is not a list of names", parameter="options", remedy=remedy)
    if len(set(header)) < len(header):
        twice = max(header, key=list(header).count)
        raise SpecError(f"header names {twice!r} twice", parameter="options", remedy="a name for each column")


def _check_character(name: str, value: str, remedy: str) -> None:
    if not (isinstance(value, str) and re.fullmatch(r"[^\r\n\0]", value)):
        raise SpecError(f"{name}={value!r} is not one character", parameter="options", remedy=remedy)


def _names_in_header(
    records: Iterator[tuple[int, list[str] | Malformed]], columns: Sequence[str] | None, delimiter: str
) -> list[str] | Malformed:
    line, names = next(records, (1, []))
    if isinstance(names, Malformed):
        return replace(names, rest=True, rows=0)
    if not names:
        return Malformed("empty file", "no header row", rows=0)
    return _header_fault(names, line) or _delimiter_fault(names, columns, delimiter) or names


def _header_fault(names: list[str], line: int) -> Malformed | None:
    """A header that does not name every column once."""
    remedy = "name each column once in the header row"
    if "" in names:
        what = f"column {names.index('') + 1:,} of {len(names):,} has no name"
        remedy += " (pandas: to_csv(index=False))"
    elif len(set(names)) < len(names):
        what = f"two columns are named {max(names, key=names.count)!r}"
    else:
        return None
    return Malformed("bad header", f"line {line:,}: {what}", rest=True, rows=0, remedy=remedy)


def _delimiter_fault(names: list[str], columns: Sequence[str] | None, delimiter: str) -> Malformed | None:
    """A header of one column that another delimiter would cut, unless that column is the wanted one."""
    is_wanted = columns is not None and (not columns or names[0] in columns)
    other = _other_delimiter(names[0], delimiter)
    if len(names) > 1 or is_wanted or other is None:
        return None
    reason = f"the header is one column, {names[0]!r}, if {delimiter!r} is the delimiter"
    return Malformed("wrong delimiter", reason, rest=True, rows=0, remedy=_try_delimiter(other))


def _other_delimiter(text: str, delimiter: str) -> str | None:
    """
    >>> _other_delimiter("id;text", ","), _other_delimiter("text", ",")
    (';', None)
    """
    others = [other for other in _DELIMITERS if other != delimiter and other in text]
    return max(others, key=text.count, default=None)


def _try_delimiter(delimiter: str) -> str:
    """
    >>> print(_try_delimiter("\\t"))
    options={"delimiter": "\\t"}
    """
    return f'options={{"delimiter": {json.dumps(delimiter)}}}'


def _ragged(record: list[str], num_columns: int, line: int, delimiter: str) -> Malformed:
    reason = f"line {line:,} has {counted(len(record), 'field')}, and there are {num_columns:,} columns"
    other = _other_delimiter(record[0], delimiter)
    if len(record) > 1 or other is None:
        return Malformed("ragged row", reason)
    return Malformed("ragged row", reason, remedy=f"{_try_delimiter(other)}, if that is the delimiter")


class _TooLong(Exception):
    """A record beyond the limit."""


class _Lines:
    """Lines for the csv module. It also keeps the start and the text of a record, which the module does not report."""

    def __init__(self, stream: BufferedReader, delimiter: str, quotechar: str | None, max_row_bytes: int) -> None:
        self.stream, self.delimiter, self.quotechar, self.max_row_bytes = stream, delimiter, quotechar, max_row_bytes
        self.line = 0
        """Lines read so far."""
        self.raw: list[bytes] = []
        """The lines of the current record."""
        self.raw_bytes = 0

    def begin_record(self) -> None:
        self.raw.clear()
        self.raw_bytes = 0

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = self.stream.readline(self.max_row_bytes + 3 - self.raw_bytes)
        if not line:
            raise StopIteration
        self.line += 1
        if self.line == 1:
            line = line.removeprefix(BOM)
        self.raw.append(line)
        self.raw_bytes += len(line)
        if self.raw_bytes > self.max_row_bytes + len(line) - len(line.rstrip(b"\r\n")):
            raise _TooLong
        if b"\0" in line:
            raise csv.Error("a NUL byte")
        return line.decode("utf-8")

    def skip_record(self) -> bool:
        """Pass over the rest of a record that cannot be read. False if it has no end."""
        quotes = sum(map(self._num_quotes, self.raw))
        last = self.raw[-1]
        while not (last.endswith(b"\n") and quotes % 2 == 0):
            if last.endswith(b"\n"):
                self.line += 1
            last = self.stream.readline(_SKIP_BYTES)
            if not last:
                return quotes % 2 == 0
            quotes += self._num_quotes(last)
        return True

    def _num_quotes(self, line: bytes) -> int:
        if not self.quotechar:
            return 0
        return line.count(self.quotechar.encode())


def _records(lines: _Lines) -> Iterator[tuple[int, list[str] | Malformed]]:
    """(number of its first line, record) of every record that is not a blank line."""
    csv.field_size_limit(sys.maxsize)  # of the whole process; here it is max_row_bytes that limits
    reader = csv.reader(
        lines,
        delimiter=lines.delimiter,
        quotechar=lines.quotechar,
        quoting=csv.QUOTE_MINIMAL if lines.quotechar else csv.QUOTE_NONE,
        strict=True,
    )
    while True:
        lines.begin_record()
        first = lines.line + 1
        try:
            record = next(reader)
        except StopIteration:
            return
        except (csv.Error, _TooLong, UnicodeDecodeError) as error:
            fault = _fault(error, lines, first)
            if not lines.skip_record():
                yield first, _unclosed(lines, first)
                return
            yield first, fault
            continue
        if record:
            yield first, record


def _fault(error: Exception, lines: _Lines, first: int) -> Malformed:
    if isinstance(error, _TooLong):
        return too_long(lines.max_row_bytes, where=f"the row that begins in line {first:,} has ")
    kind, what = "malformed row", str(error)
    if isinstance(error, UnicodeDecodeError):
        kind, what = "not UTF-8", bad_byte(error)
    elif "new-line character" in what:  # its advice is for those who open files themselves
        what = "a carriage return that does not end a line"
    since = f" (the row begins in line {first:,})" * (first != lines.line)
    return Malformed(kind, f"line {lines.line:,}: {what}{since}")


def _unclosed(lines: _Lines, first: int) -> Malformed:
    raw = b"".join(lines.raw).decode("utf-8", errors="replace")
    line = first + _line_of_open_quote(raw, lines.delimiter, lines.quotechar or '"')
    reason = f"a quote opens in line {line:,}, and the rest of the file is inside it"
    return Malformed("unclosed quote", reason, rest=True)


def _line_of_open_quote(raw: str, delimiter: str, quotechar: str) -> int:
    """Lines before the one where a quote opens that does not close, or not before the end of a value.

    >>> _line_of_open_quote('1,"closed\\n",2,"open\\nand more', ",", '"')
    1
    """
    quote, comma = re.escape(quotechar), re.escape(delimiter)
    quoted = f"{quote}(?:[^{quote}]++|{quote}{quote})*+{quote}"
    plain = f"[^{quote}{comma}\r\n][^{comma}\r\n]*+"
    closed = re.match(f"(?:(?:{quoted}|{plain})?(?:{comma}|[\r\n]))*+", raw)
    assert closed is not None
    return raw.count("\n", 0, closed.end())
