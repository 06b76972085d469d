"""Documents from rows of raw files, for baking and streaming: `text=` finds the text of each row.

>>> TextColumn("content").of({"content": "one"})
'one'
>>> TextColumn("message.content").of({"message": {"role": "user", "content": "two"}})
'two'
>>> TextColumn("turns.text").of({"turns": [{"text": "a"}, {"text": "b"}]})      # through a list: all of its items
'a\\nb'
>>> TextColumn("{title} ({score:.1f})").of({"title": "three", "score": 0.75})
'three (0.8)'
"""

from __future__ import annotations

import datetime
import decimal
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from batchwright.base.errors import BatchwrightError, SpecError
from batchwright.base.words import counted, half_character_in, listed, suggest
from batchwright.sources.formats import Format, Malformed
from batchwright.sources.units import EndOfSpan, Unit, failure_of, read_unit

__all__ = ["TextColumn", "read_documents"]

Row = dict[str, Any]
_PRINTED = (int, float, decimal.Decimal, datetime.date, datetime.time, datetime.timedelta)
"""Types, besides text, that a template formats as Python does."""


class BadText(Exception):
    """The error for a row without text in its place. Reports count by `kind`; `reason` has the details."""

    def __init__(self, kind: str, reason: str = "") -> None:
        super().__init__(f"{kind}: {reason}" if reason else kind)
        self.kind: str = kind
        self.reason: str = reason


@dataclass(frozen=True)
class TextColumn:
    """The value of `text=`, checked when it is made. `of(row)` is a row's text.

    - `"content"` is a column, `"message.content"` a path into nested data. A column with that literal name wins.
      `"turns.0.text"` takes an item of a list by its number, `"turns.text"` takes all of them.
    - `"{title}\\n\\n{body}"` is a template. `{score:.2f}` formats a number as Python does; `{{` is a brace.
    - A list of strings is joined with newlines; bytes are read as UTF-8.
    - Null is empty text in a template, and a fault otherwise. A missing column is always a fault.
    """

    spec: str

    def __post_init__(self) -> None:
        if not isinstance(self.spec, str) or not self.spec:
            raise SpecError(
                f"text={self.spec!r} is not the name of a column", parameter="text", remedy="text='content'"
            )
        _ = self._fields

    @cached_property
    def _fields(self) -> list[_Field]:
        return _fields_of(self.spec) if self.is_template else [("", _keys_of(self.spec), "")]

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that are needed. A dotted path gives every part before a dot too: 'a.b' and 'a'.

        A row need not have all of them. For 'a.b' it has either a column of that name, or one named 'a'.
        """
        names = {".".join(keys[:n]) for _, keys, _ in self._fields for n in range(1, len(keys) + 1)}
        return tuple(sorted(names))

    @cached_property
    def is_template(self) -> bool:
        return "{" in self.spec or "}" in self.spec

    def of(self, row: Row) -> str:
        """The text of a row. A BadText has the reason if there is none."""
        value = row.get(self.spec)
        if type(value) is str:  # nearly always
            return value
        if self.is_template:
            return "".join(literal + _shown(row, keys, how) for literal, keys, how in self._fields)
        value = _find(row, self._fields[0][1], self.spec)
        if value is None:
            raise BadText(f"column {self.spec!r} is null")
        return _text(value, self.spec)


_Field = tuple[str, list[str], str]
"""A field: (literal text before it, keys of its path, format). Literal text at the end has no keys."""


def _fields_of(spec: str) -> list[_Field]:
    try:
        parsed = list(string.Formatter().parse(spec))
    except ValueError as error:
        raise _bad_template(spec, str(error).lower()) from None
    fields = [_field_of(spec, *parts) for parts in parsed]
    if not any(keys for _, keys, _ in fields):
        raise _bad_template(spec, "it names no column")
    return fields


def _field_of(spec: str, literal: str, path: str | None, how: str | None, conversion: str | None) -> _Field:
    if path is None:
        return literal, [], ""
    if conversion:
        raise _bad_template(spec, f"'!{conversion}' is not known here")
    if not all(path.split(".")) or "[" in path or "]" in path or path.strip() != path:
        raise _bad_template(spec, f"{{{path}}} is not a column or a path")
    if how and "{" in how:
        raise _bad_template(spec, f"the format of {{{path}}} cannot depend on another column")
    return literal, path.split("."), how or ""


def _bad_template(spec: str, why: str) -> SpecError:
    return SpecError(
        f"text={spec!r} is not a template: {why}",
        parameter="text",
        remedy=r"text='{title}\n\n{message.content}': columns in braces; {{ and }} are braces themselves",
    )


def _keys_of(path: str) -> list[str]:
    """
    >>> _keys_of("message.content"), _keys_of("v1."), _keys_of("text")
    (['message', 'content'], ['v1.'], ['text'])
    """
    keys = path.split(".")
    return keys if all(keys) else [path]


def _find(value: Any, path: list[str], column: str, done: tuple[str, ...] = ()) -> Any:
    """The value at the end of a path: None if a value on the way is null, a list if the path leads through one.

    `column` is the whole path; `done` holds the keys that led to `value`.
    """
    if not path or value is None:
        return value
    if isinstance(value, dict):
        for count in range(len(path), 0, -1):  # the longest name first: a column may have dots in its name
            name = ".".join(path[:count])
            if name in value:
                return _find(value[name], path[count:], column, (*done, name))
    elif isinstance(value, list | tuple):
        if not path[0].isdecimal():
            return [_find(item, path, column, (*done, str(number))) for number, item in enumerate(value)]
        if int(path[0]) < len(value):
            return _find(value[int(path[0])], path[1:], column, (*done, path[0]))
    raise BadText(f"no column {column!r}", _what_is_there(value, path, done))


def _what_is_there(value: Any, path: list[str], done: tuple[str, ...]) -> str:
    """A description of the value at `done`, for a path that leads to nothing after it."""
    at = repr(".".join(done)) if done else "this row"
    if isinstance(value, list | tuple):
        return f"{at} has {counted(len(value), 'item')}"
    if not isinstance(value, dict):
        return f"{at} is {type(value).__name__}, which has no columns in it"
    names, hint = [str(name) for name in value], ""
    for key, rest in ((".".join(path), []), (path[0], path[1:])):
        if near := suggest(key, names):
            hint = f"; perhaps text={'.'.join((*done, near, *rest))!r}"
            break
    return f"{at} has {_names(value)}{hint}"


def _names(value: Iterable[Any]) -> str:
    return listed(map(repr, value), most=12) or "no columns"


def _shown(row: Row, keys: list[str], how: str) -> str:
    """A field of a template, formatted."""
    path = ".".join(keys)
    value = _find(row, keys, path)
    if not keys or value is None:
        return ""
    if how:
        try:
            return format(value, how)
        except (ValueError, TypeError) as error:
            raise BadText(f"column {path!r} cannot be shown as {how!r}", str(error)) from None
    if isinstance(value, _PRINTED):
        return str(value)
    if isinstance(value, list):
        value = [item for item in _flat(value) if item is not None]
    return _text(value, path)


def _text(value: Any, path: str) -> str:
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadText("not UTF-8", f"column {path!r}, byte 0x{value[error.start]:02x} at {error.start:,}") from None
    if not isinstance(value, list | tuple):
        raise BadText(f"column {path!r} is not text", f"it is {_what(value)}")
    texts = []
    for number, item in enumerate(_flat(value)):
        if not isinstance(item, str | bytes):
            raise BadText(f"column {path!r} is not text", f"item {number:,} of its list is {_what(item)}")
        texts.append(_text(item, path))
    return "\n".join(texts)


def _what(value: Any) -> str:
    if value is None:
        return "null"
    return f"{type(value).__name__} with {_names(value)}" if isinstance(value, dict) else type(value).__name__


def _flat(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        if isinstance(item, list | tuple):
            yield from _flat(item)
        else:
            yield item


Document = tuple[int, int, str | Malformed | EndOfSpan, Row]


def read_documents(
    unit: Unit, formats: Mapping[str, Format], text: TextColumn | None, columns: Sequence[str] | None = None
) -> Iterator[Document]:
    """Yield (span, row in span, text or the reason for none, row), in order. The row has its text as `row["text"]` too.

    Without `text`, rows are unchanged and their text is "". Each span ends with (span, number of rows, EndOfSpan, {}).
    `columns` names the columns that are needed; None means all, for functions that get the row.
    `batchwright.sources.units` turns malformed rows into errors.
    """
    for span, row_number, row in _read(unit, formats, columns):
        if isinstance(row, EndOfSpan | Malformed):
            yield span, row_number, row, {}
        elif not isinstance(row, dict):
            fault = Malformed("malformed row", f"the format gave a {type(row).__name__}, not a row")
            yield span, row_number, fault, {}
        elif text is None:
            yield span, row_number, "", row
        else:
            found: str | Malformed
            try:
                found = row["text"] = text.of(row)
            except BadText as bad:
                found = Malformed(bad.kind, bad.reason)
            else:
                # Text from a file was decoded, so it can be encoded; text from memory may not.
                if unit.rows is not None and not found.isascii() and (half := half_character_in(found)):
                    found = Malformed("not UTF-8", half)
            yield span, row_number, found, row


def _read(unit: Unit, formats: Mapping[str, Format], columns: Sequence[str] | None) -> Iterator[tuple[int, int, Any]]:
    """Yield the rows of `read_unit`. An error in a user's format names its place: after the last good row."""
    last_span, last_row = 0, -1
    try:
        for span, row_number, row in read_unit(unit, formats, columns):
            last_span, last_row = span, row_number
            if isinstance(row, EndOfSpan):
                last_span, last_row = span + 1, -1
            yield span, row_number, row
    except BatchwrightError:
        raise
    except Exception as error:
        kind = unit.spans[min(last_span, len(unit.spans) - 1)].format if unit.spans else "memory"
        raise failure_of(f"format {kind!r}", error, unit, last_span, last_row + 1, formats) from error
