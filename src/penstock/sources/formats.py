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
from penstock.fingerprint import fingerprint, function_fingerprint
from penstock.plugins import Registry
from penstock.sources.compression import COMPRESSED, uncompressed_name

__all__ = ["Format", "Row", "format_for", "known_extensions", "register_format"]

Row = dict[str, Any]
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Format:
    """How files of one format become rows."""

    name: str
    extensions: tuple[str, ...]
    by_line: bool
    read: Callable[..., Any]
    version: str | None = None
    """Names what `read` does, where its code cannot: another version makes stores baked before out of date."""

    @property
    def fingerprint(self) -> str:
        """Changes when the same bytes may give other rows."""
        reads = function_fingerprint(self.read, name=f"format {self.name!r}", version=self.version)
        return fingerprint([self.name, self.by_line, reads])


_formats: Registry[Format] = Registry("format")


def register_format(
    name: str, *, extensions: str | tuple[str, ...] = (), by_line: bool = False, version: str | None = None
) -> Callable[[F], F]:
    """Make a function a format. A ValueError that it raises means: this row is malformed, and why.

    A changed function makes stores that were baked with it out of date; `version` names the function instead, should
    it use things that cannot be compared. It travels to workers by value, so a script can define its own.
    """

    listed = [extensions] if isinstance(extensions, str) else extensions
    lowered = tuple(extension.lower() for extension in listed)

    def register(function: F) -> F:
        _formats.add(name, Format(name, lowered, by_line, function, version))
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
    for known in reversed(list(_formats.values())):  # a format that was registered later wins
        if suffix in known.extensions:
            return known
    extensions = ", ".join(sorted(e for f in _formats.values() for e in f.extensions))
    raise SourceError(
        f"cannot tell the format of a file from its extension {suffix!r}"
        if suffix
        else "cannot tell the format of a file without an extension",
        file=path,
        parameter="format",
        known=extensions,
        remedy="add_ingredient(..., format='text') (a file is a document), 'lines' (a line is one) or 'jsonl'",
    )


def known_extensions() -> list[str]:
    """Every extension that says a format, and those that say a compression.

    >>> ".jsonl" in known_extensions(), ".gz" in known_extensions()
    (True, True)
    """
    return sorted({*COMPRESSED, *(e for f in _formats.values() for e in f.extensions)})


_BOM = b"\xef\xbb\xbf"
"""Some editors write it at the beginning of a file. It is no text."""
_decode = msgspec.json.Decoder().decode


@register_format("jsonl", extensions=(".jsonl", ".ndjson"), by_line=True, version="1")
def _parse_jsonl(line: bytes) -> Row:
    line = line.removeprefix(_BOM)
    try:
        row = _decode(line)
    except UnicodeDecodeError:
        line.decode("utf-8")  # raises the same, with the place in the line and not in the string
        raise
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(row, dict):
        raise ValueError(f"expected an object, got {_JSON_NAMES.get(type(row), type(row).__name__)}")
    return row


_JSON_NAMES = {list: "an array", str: "a string", type(None): "null", bool: "a boolean", int: "a number"}


@register_format("lines", extensions=(), by_line=True, version="1")
def _parse_line(line: bytes) -> Row:
    return {"text": line.removeprefix(_BOM).decode("utf-8")}


@register_format("text", extensions=(".txt", ".md", ".rst"), version="1")
def _read_text(stream: IO[bytes]) -> Iterable[Row]:
    yield {"text": stream.read().removeprefix(_BOM).decode("utf-8")}
