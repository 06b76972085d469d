"""Which text of a row is meant: a column, a path into nested data, or a template over several columns.

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
from collections.abc import Iterator
from typing import Any

from batchwright.base.errors import SpecError
from batchwright.base.words import suggest

__all__ = ["BadText", "TextColumn"]

Row = dict[str, Any]
_NAMES_SHOWN = 12
_PRINTED = (int, float, decimal.Decimal, datetime.date, datetime.time, datetime.timedelta)
"""What a template shows as Python does, besides text."""


class BadText(Exception):
    """A row has no text where it should be: `kind` is what a report counts it under, `reason` says more."""

    def __init__(self, kind: str, reason: str = "") -> None:
        self.kind, self.reason = kind, reason
        super().__init__(f"{kind}: {reason}" if reason else kind)


class TextColumn:
    """What `text=` says, checked when it is made; `of(row)` is a row's text.

    - `"content"` is a column, `"message.content"` a path into nested data; a column that is literally named so wins.
      `"turns.0.text"` takes an item of a list by its number, `"turns.text"` takes all of them.
    - `"{title}\\n\\n{body}"` is a template. `{score:.2f}` formats a number as Python does; `{{` is a brace.
    - A list of strings is joined with newlines; bytes are read as UTF-8.
    - Null is empty text in a template, and a fault otherwise. A column that is not there is always a fault.
    """

    __slots__ = ("_fields", "_name", "spec")

    def __init__(self, spec: str) -> None:
        if not isinstance(spec, str):
            raise SpecError(f"text={spec!r} is not the name of a column", parameter="text", remedy="text='content'")
        if not spec:
            raise SpecError("text='' is not the name of a column", parameter="text", remedy="text='content'")
        self.spec: str = spec
        is_template = "{" in spec or "}" in spec
        self._name = None if is_template else spec
        self._fields = _fields_of(spec) if is_template else [("", _keys_of(spec), "")]

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that are needed, those of dotted paths with every part before a dot: 'a.b' and 'a'.

        A row need not have all of them: for 'a.b' either one column of that name is there, or one named 'a'.
        """
        names = {".".join(keys[:n]) for _, keys, _ in self._fields for n in range(1, len(keys) + 1)}
        return tuple(sorted(names))

    @property
    def is_template(self) -> bool:
        return self._name is None

    def of(self, row: Row) -> str:
        """The text of a row; BadText says why there is none."""
        if self._name is not None:
            value = row.get(self._name)
            if type(value) is str:  # nearly always
                return value
            keys = self._fields[0][1]
            return _plain_text(_find(row, keys, self._name, ""), self._name)
        parts = []
        for literal, keys, how in self._fields:
            parts.append(literal)
            if keys:
                path = ".".join(keys)
                parts.append(_shown(_find(row, keys, path, "", in_template=True), path, how))
        return "".join(parts)

    def __repr__(self) -> str:
        return f"TextColumn({self.spec!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TextColumn) and other.spec == self.spec

    def __hash__(self) -> int:
        return hash(self.spec)

    def __reduce__(self) -> tuple[Any, ...]:
        return TextColumn, (self.spec,)


_Field = tuple[str, list[str], str]
"""(literal text before it, keys of its path, format); no keys where a template ends with literal text."""


def _fields_of(spec: str) -> list[_Field]:
    try:
        parsed = list(string.Formatter().parse(spec))
    except ValueError as error:
        raise _bad_template(spec, str(error).lower()) from None
    fields: list[_Field] = []
    for literal, path, how, conversion in parsed:
        if path is None:
            fields.append((literal, [], ""))
            continue
        keys = path.split(".")
        if conversion:
            raise _bad_template(spec, f"'!{conversion}' is not known here")
        if not all(keys) or "[" in path or "]" in path or path.strip() != path:
            raise _bad_template(spec, f"{{{path}}} is not a column or a path")
        if "{" in (how or ""):
            raise _bad_template(spec, f"the format of {{{path}}} cannot depend on another column")
        fields.append((literal, keys, how or ""))
    if not any(keys for _, keys, _ in fields):
        raise _bad_template(spec, "it names no column")
    return fields


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


def _find(value: Any, keys: list[str], path: str, at: str, *, in_template: bool = False) -> Any:
    """What a path leads to: None where something on the way is null, a list where it leads through one."""
    if not keys or value is None:
        return value
    if isinstance(value, dict):
        for count in range(len(keys), 0, -1):  # the longest name first: a column may have dots in its name
            name = ".".join(keys[:count])
            if name in value:
                return _find(value[name], keys[count:], path, _dotted(at, name), in_template=in_template)
        raise _no_column(value, keys, path, at, in_template)
    if isinstance(value, list | tuple):
        if not keys[0].isdecimal():
            return [
                _find(item, keys, path, _dotted(at, str(n)), in_template=in_template) for n, item in enumerate(value)
            ]
        number = int(keys[0])
        if number >= len(value):
            raise BadText(f"no column {path!r}", f"{at!r} has {len(value):,} item{'s' * (len(value) != 1)}")
        return _find(value[number], keys[1:], path, _dotted(at, keys[0]), in_template=in_template)
    raise BadText(f"no column {path!r}", f"{at!r} is {type(value).__name__}, which has no columns in it")


def _dotted(at: str, name: str) -> str:
    return f"{at}.{name}" if at else name


def _no_column(value: Row, keys: list[str], path: str, at: str, in_template: bool) -> BadText:
    near, rest = suggest(".".join(keys), map(str, value)), []
    if near is None and len(keys) > 1:
        near, rest = suggest(keys[0], map(str, value)), keys[1:]
    hint = ""
    if near is not None:
        full = ".".join([*([at] if at else []), near, *rest])
        hint = f"; perhaps {{{full}}}" if in_template else f"; perhaps text={full!r}"
    return BadText(f"no column {path!r}", f"{repr(at) if at else 'this row'} has {_names(value)}{hint}")


def _names(value: Row) -> str:
    more = f" and {len(value) - _NAMES_SHOWN:,} more" if len(value) > _NAMES_SHOWN else ""
    return (", ".join(map(repr, list(value)[:_NAMES_SHOWN])) or "no columns") + more


def _plain_text(value: Any, path: str) -> str:
    if value is None:
        raise BadText(f"column {path!r} is null")
    return _text(value, path)


def _shown(value: Any, path: str, how: str) -> str:
    """A value as a template shows it."""
    if value is None:
        return ""
    if how:
        try:
            return format(value, how)
        except (ValueError, TypeError) as error:
            raise BadText(f"column {path!r} cannot be shown as {how!r}", str(error)) from None
    if isinstance(value, _PRINTED):
        return str(value)
    return _text([item for item in _flat(value) if item is not None] if isinstance(value, list) else value, path)


def _text(value: Any, path: str) -> str:
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadText("not UTF-8", f"column {path!r}, byte 0x{value[error.start]:02x} at {error.start:,}") from None
    if isinstance(value, list | tuple):
        return "\n".join(_text_of_item(number, item, path) for number, item in enumerate(_flat(value)))
    what = f"{type(value).__name__} with {_names(value)}" if isinstance(value, dict) else type(value).__name__
    raise BadText(f"column {path!r} is not text", f"it is {what}")


def _flat(items: Any) -> Iterator[Any]:
    for item in items:
        if isinstance(item, list | tuple):
            yield from _flat(item)
        else:
            yield item


def _text_of_item(number: int, item: Any, path: str) -> str:
    if isinstance(item, str | bytes):
        return _text(item, path)
    what = "null" if item is None else type(item).__name__
    more = f" with {_names(item)}" if isinstance(item, dict) else ""
    raise BadText(f"column {path!r} is not text", f"item {number:,} of its list is {what}{more}")
