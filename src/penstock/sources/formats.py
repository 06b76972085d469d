"""Formats as plug-ins: what turns a line, or a stream of bytes, into rows (dicts).

A format by line is a function of one line; its files are cut into byte ranges and read in parallel, and a bad line is
located for it. Any other format is a function of an open binary stream that yields rows.

>>> @register_format("shout", extensions=(".shout",), by_line=True)
... def parse_shout(line: bytes) -> dict:
...     return {"text": line.decode().upper()}
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from penstock.errors import SourceError
from penstock.plugins import Registry
from penstock.sources.compression import uncompressed_name

__all__ = ["Format", "Row", "format_for", "register_format"]

Row = dict[str, Any]
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Format:
    """How files of one format become rows."""

    name: str
    extensions: tuple[str, ...]
    by_line: bool
    read: Callable[..., Any]
    version: str = "1"
    """Change it when the same bytes give other rows: stores made before are then out of date."""


_formats: Registry[Format] = Registry("format")


def register_format(
    name: str, *, extensions: tuple[str, ...] = (), by_line: bool = False, version: str = "1"
) -> Callable[[F], F]:
    """Make a function a format. A ValueError it raises for a line means: this row is malformed, and why."""

    def register(function: F) -> F:
        _formats.add(name, Format(name, extensions, by_line, function, version))
        return function

    return register


def format_for(path: str, named: str | None = None) -> Format:
    """The format of a file: the one that was named, or the one its extension means.

    >>> format_for("a/b.jsonl.gz").name
    'jsonl'
    """
    if named is not None:
        return _formats.get(named)
    suffix = Path(uncompressed_name(path)).suffix.lower()
    for known in _formats.values():
        if suffix in known.extensions:
            return known
    extensions = ", ".join(sorted(e for f in _formats.values() for e in f.extensions))
    raise SourceError(
        f"cannot tell the format of a file from its extension {suffix!r}",
        file=path,
        known=extensions,
        remedy="format='text' (a file is a document), 'lines' (a line is a document) or 'jsonl'",
    )


@register_format("jsonl", extensions=(".jsonl", ".ndjson"), by_line=True)
def _parse_jsonl(line: bytes) -> Row:
    try:
        row = _decode(line)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None
    if not isinstance(row, dict):
        raise ValueError(f"expected an object, got {type(row).__name__}")
    return row


_decode = msgspec.json.Decoder().decode


@register_format("lines", extensions=(), by_line=True)
def _parse_line(line: bytes) -> Row:
    return {"text": line.decode("utf-8")}


@register_format("text", extensions=(".txt", ".md", ".rst"))
def _read_text(stream: IO[bytes]) -> Iterable[Row]:
    yield {"text": stream.read().decode("utf-8")}
