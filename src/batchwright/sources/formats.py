"""Formats as plug-ins. A format is a function that turns a line, a stream of bytes, or a file into rows (dicts).

A format by line is a function of one line; its files are cut into byte ranges and read in parallel, and a bad line is
located for it. A format by file is a function of a path, for libraries that seek. Any other format is a function of an
open binary stream, already decompressed. The last two yield rows, or `Malformed` for a row that cannot be read.

>>> @register_format("shout", extensions=(".shout",), by_line=True)
... def parse_shout(line: bytes) -> dict:
...     return {"text": line.decode().upper()}
"""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from batchwright.base.checks import at_least
from batchwright.base.errors import SourceError, SpecError
from batchwright.base.fingerprint import fingerprint, function_fingerprint
from batchwright.base.plugins import Registry
from batchwright.base.words import suggest
from batchwright.sources.compression import COMPRESSED, uncompressed_name

__all__ = ["Format", "Malformed", "format_for", "known_extensions"]

Row = dict[str, Any]
MAX_ROW_BYTES = 128 << 20
"""Limit of one row, unless options={"max_row_bytes": ...} sets another: a row must fit in memory several times."""
BOM = b"\xef\xbb\xbf"
"""Some editors write it at the start of a file. It is not text."""
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Malformed:
    """Rows that could not be read, and why."""

    kind: str
    """Its name in the counts of a report."""
    reason: str = ""
    rest: bool = False
    """The rest of the file is lost with it."""
    rows: int = 1
    """The number of rows that this replaces. The rows after it keep their numbers."""
    remedy: str = ""
    """The remedy, if it is more than mending the row or the file."""
    turn: int | None = None
    """The message of a conversation that is to blame."""


@dataclass(frozen=True, slots=True)
class Format:
    """The reader of one format: it turns files into rows."""

    name: str
    extensions: tuple[str, ...]
    by_line: bool
    read: Callable[..., Any]
    version: str | None = None
    """Names what `read` does, where its code cannot: another version makes stores baked before out of date."""
    by_file: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keywords for `read`, chosen by the user."""
    package: str | None = None
    """The installed package, and its version, that offers this format as an entry point."""

    @property
    def fingerprint(self) -> str:
        """Changes when the same bytes may give other rows."""
        reads = function_fingerprint(self.read, name=f"format {self.name!r}", version=self.version)
        more: dict[str, Any] = {}
        if self.options:
            more["options"] = dict(self.options)
        if self.package is not None:
            more["package"] = self.package
        return fingerprint([self.name, self.by_line, reads, more])

    @property
    def can_be_cut(self) -> bool:
        """Whether a worker can read a byte range of a file, and others the rest."""
        return self.by_line or (self.by_file and "start" in _parameters(self.read))

    def asks_for(self, name: str) -> bool:
        return name in _parameters(self.read)

    def with_options(self, options: Mapping[str, Any] | None) -> Format:
        """This format, read with the user's options; they must be keyword-only parameters of `read`."""
        if not options:
            return self
        known = {name for name, p in _parameters(self.read).items() if p.kind is p.KEYWORD_ONLY} - _GIVEN
        if self.by_line:
            known.add(_LIMIT)
        for name in options:
            if name not in known:
                what, near = f"format {self.name!r} has no option {name!r}", suggest(name, known)
                remedy = "leave it out" if near is None else repr(near)
                there = ", ".join(sorted(known)) or "none"
                raise SpecError(what, parameter="options", known=there, remedy=remedy)
        if _LIMIT in options:
            at_least(1, **{_LIMIT: options[_LIMIT]})
        return replace(self, options=dict(options))

    def with_unique_keys(self) -> Format:
        """This format, with repeated keys as faults if it can detect them, unless the user chose otherwise."""
        if not self.asks_for("unique_keys"):
            return self
        return self.with_options({"unique_keys": True, **self.options})

    @property
    def max_row_bytes(self) -> int:
        """The limit of a line, in a format by line. Other formats get the option, if they ask for it."""
        return int(self.options.get(_LIMIT, MAX_ROW_BYTES))

    @property
    def read_options(self) -> dict[str, Any]:
        """The options that `read` itself is given."""
        left_out = _LIMIT if self.by_line else None
        return {name: value for name, value in self.options.items() if name != left_out}


_LIMIT = "max_row_bytes"
_GIVEN = {"columns", "start", "stop"}
"""Parameters of a format's function that batchwright itself fills."""


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


_formats: Registry[Format] = Registry("format", group="batchwright.formats")


def register_format(
    name: str,
    *,
    extensions: str | tuple[str, ...] = (),
    by_line: bool = False,
    by_file: bool = False,
    version: str | None = None,
) -> Callable[[F], F]:
    """Make a function the format `name` of files with these `extensions`: of an open stream, of a line (`by_line`), or
    of a path (`by_file`).

    A ValueError from it marks the row as malformed, and gives the reason. Its keyword-only parameters request arguments
    by name: `columns`, the names of the columns that are needed (None: all; for a path 'a.b' both that
    name and 'a', and a file need not have both), so that others need not be read; and, for a format by file that can
    read a part, `start` and `stop`, a range of bytes (stop None is the end): ranges that tile a file must give each of
    its rows once, in order. Other keyword-only parameters are options that users choose.

    A changed function makes stores that were baked with it out of date; `version` names the function instead, should
    it use things that cannot be compared. It travels to workers by value, so a script can define its own.
    """

    if isinstance(extensions, str):
        extensions = (extensions,)
    lowered = tuple(extension.lower() for extension in extensions)

    def register(function: F) -> F:
        _formats.add(name, Format(name, lowered, by_line, function, version, by_file, package=_formats.loading))
        return function

    return register


def format_for(path: str, named: str | None = None) -> Format:
    """The format of a file: the named one, or the one of its extension.

    >>> format_for("a/b.jsonl.gz").name
    'jsonl'
    """
    if named is not None:
        return _formats.get(named)
    suffix = Path(uncompressed_name(path)).suffix.lower()
    for known in reversed(_formats.known()):  # a format that was registered later wins
        if suffix in known.extensions:
            return known
    names = sorted(kind.name for kind in _formats.offered() if suffix in kind.extensions)
    if not names:
        raise _unknown_extension(path, suffix)
    if len(names) > 1:
        what = f"several installed packages offer a format for the extension {suffix!r}"
        remedy = f"add_ingredient(..., format={names[0]!r})"
        raise SourceError(what, file=path, parameter="format", known=", ".join(names), remedy=remedy)
    return _formats.get(names[0])


def _unknown_extension(path: str, suffix: str) -> SourceError:
    what = f"from its extension {suffix!r}" if suffix else "without an extension"
    extensions = {extension for kind in (*_formats.known(), *_formats.offered()) for extension in kind.extensions}
    return SourceError(
        f"cannot tell the format of a file {what}",
        file=path,
        parameter="format",
        known=", ".join(sorted(extensions)),
        failed=_formats.failures(),
        remedy="add_ingredient(..., format='text') (a file is a document), 'lines' (a line is one) or 'jsonl'",
    )


def known_extensions() -> list[str]:
    """All extensions of formats and of compressions. Installed packages are not asked.

    >>> ".jsonl" in known_extensions(), ".gz" in known_extensions()
    (True, True)
    """
    return sorted({*COMPRESSED, *(e for f in _formats.known() for e in f.extensions)})


def known_formats() -> list[Format]:
    """All formats by name, including those of installed packages. Warns of a package that cannot be loaded."""
    every = {kind.name: kind for kind in (*_formats.offered(), *_formats.known())}
    for line in (_formats.failures() or "").splitlines():
        warnings.warn(f"a format of an installed package cannot be loaded: {line}", RuntimeWarning, stacklevel=2)
    return [every[name] for name in sorted(every)]


def too_long(max_row_bytes: int, what: str = "row", where: str = "", *, rest: bool = False) -> Malformed:
    """The fault of a row beyond the limit."""
    more = f'options={{"max_row_bytes": {max_row_bytes * 2}}} or more, if it is meant so'
    return Malformed(f"{what} too long", f"{where}over {max_row_bytes:,} bytes", rest=rest, remedy=more)


def bad_byte(error: UnicodeDecodeError, offset: int = 0) -> str:
    """The value and place of a byte that is not UTF-8, in text from a byte `offset` on."""
    return f"byte 0x{error.object[error.start]:02x} at {offset + error.start:,}"


def encoding_fault(head: bytes) -> Malformed | None:
    """The fault of a text file whose first bytes show UTF-16 or UTF-32: it would have nothing but bad rows.

    >>> encoding_fault("text".encode("utf-16-le")).reason
    'this file is UTF-16, little-endian'
    >>> encoding_fault(b"text") is None
    True
    """
    nul = "".join("0x"[byte != 0] for byte in head[:8])
    for name, order, suffix, mark, nul_bytes in _OTHER_ENCODINGS:
        if head.startswith(mark):
            codec = name  # iconv finds the byte order by the mark
        elif len(nul) >= 4 and (nul_bytes * 2).startswith(nul):
            codec = name + suffix
        else:
            continue
        remedy = f"iconv -f {codec} -t UTF-8 FILE > NEW_FILE"
        return Malformed("not UTF-8", f"this file is {name}, {order}-endian", rest=True, remedy=remedy)
    return None


_OTHER_ENCODINGS = (  # UTF-32 first: its mark begins with UTF-16's
    ("UTF-32", "little", "LE", b"\xff\xfe\0\0", "x000"),
    ("UTF-32", "big", "BE", b"\0\0\xfe\xff", "000x"),
    ("UTF-16", "little", "LE", b"\xff\xfe", "x0x0"),
    ("UTF-16", "big", "BE", b"\xfe\xff", "0x0x"),
)
"""Name, byte order, its name in iconv, mark, and the NUL bytes in text without a mark, in Latin letters."""

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


@register_format("jsonl", extensions=(".jsonl", ".ndjson"), by_line=True, version="2")
def parse_json(line: bytes, *, unique_keys: bool = False) -> Row | Malformed:
    """Parse one JSON object. The last value of a repeated key counts; with `unique_keys` a repeated key is a fault."""
    line = line.removeprefix(BOM)
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
    return (unique_keys and _key_given_twice(line, row)) or row


def _key_given_twice(line: bytes, row: Row) -> Malformed | None:
    """Find an object of a line with a repeated key, such as {"role": "user", "role": "assistant"}.

    A dropped key had a colon. Decoding a line again, in Python, takes longer than reading it. Only lines that have more
    colons than their row, or may hide one in an escape, are decoded again.
    """
    if line.count(b":") == _encode(row).count(b":") and b"\\u003" not in line:
        return None
    to_look_at: list[tuple[tuple[Any, ...], Any]] = [((), json.loads(line, object_pairs_hook=_pairs))]
    for path, value in to_look_at:  # which grows
        match value:
            case _Twice():
                reason = f"{'.'.join(map(str, path)) or 'the row'} has {value.key!r} twice"
                turn = path[1] if len(path) > 1 and isinstance(path[1], int) else None
                return Malformed("duplicate keys", reason, turn=turn)
            case dict():
                to_look_at += [((*path, name), item) for name, item in value.items()]
            case list():
                to_look_at += [((*path, number), item) for number, item in enumerate(value)]
    return None


class _Twice(Row):
    """An object in which `key` was given twice."""

    key = ""


def _pairs(pairs: list[tuple[str, Any]]) -> Row:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    twice, names = _Twice(found), [name for name, _ in pairs]
    twice.key = max(names, key=names.count)
    return twice


_JSON_NAMES = {list: "an array", str: "a string", type(None): "null", bool: "a boolean", int: "a number"}


@register_format("lines", extensions=(), by_line=True, version="2")
def _parse_line(line: bytes) -> Row:
    return {"text": line.removeprefix(BOM).decode("utf-8")}


@register_format("text", extensions=(".txt", ".md", ".rst"), version="2")
def _read_text(stream: BufferedReader, *, max_row_bytes: int = MAX_ROW_BYTES) -> Iterable[Row | Malformed]:
    fault = encoding_fault(stream.peek(8))
    if fault is not None:
        yield fault
        return
    pieces, left = [], max_row_bytes + 1
    while left > 0 and (piece := stream.read(min(left, _PIECE_BYTES))):  # at once, it would take all that at once
        pieces.append(piece)
        left -= len(piece)
    if left <= 0:
        yield too_long(max_row_bytes, "document", rest=True)
    else:
        yield {"text": b"".join(pieces).removeprefix(BOM).decode("utf-8")}


_PIECE_BYTES = 1 << 20


# Formats of files. The first such file imports pyarrow, which takes long.


@register_format("arrow", extensions=(".arrow", ".feather", ".ipc"), by_file=True, version="1")
def _read_arrow(
    path: Path, *, columns: Sequence[str] | None = None, start: int = 0, stop: int | None = None
) -> Iterator[Row | Malformed]:
    from batchwright.sources.arrow import read_arrow

    return read_arrow(path, columns=columns, start=start, stop=stop)


@register_format("parquet", extensions=(".parquet", ".pq"), by_file=True, version="1")
def _read_parquet(
    path: Path, *, columns: Sequence[str] | None = None, start: int = 0, stop: int | None = None
) -> Iterator[Row | Malformed]:
    from batchwright.sources.arrow import read_parquet

    return read_parquet(path, columns=columns, start=start, stop=stop)
