"""JSON files: one array of objects, objects one after the other, or one object; each object is a row.

Files are read in pieces, so that a large array needs no more memory than its largest object.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from io import BufferedReader

from batchwright.sources.formats import (
    BOM,
    MAX_ROW_BYTES,
    Malformed,
    Row,
    bad_byte,
    encoding_fault,
    parse_json,
    register_format,
    too_long,
)

_PIECE_BYTES = 1 << 20
_SPACE = re.compile(r"[ \t\n\r]*")
_UNSURE = 16
"""The characters at the end of the text read so far. A fault in them may only be a word that is cut off."""


@register_format("json", extensions=(".json",), version="1")
def _read_json(
    stream: BufferedReader, *, max_row_bytes: int = MAX_ROW_BYTES, unique_keys: bool = False
) -> Iterator[Row | Malformed]:
    fault = encoding_fault(stream.peek(8))
    if fault is not None:
        yield fault
        return
    text = _Text(stream, max_row_bytes)
    try:
        for place, value in _objects(text):
            yield _row_of(place, value, max_row_bytes, unique_keys)
    except UnicodeDecodeError as error:
        yield Malformed("not UTF-8", bad_byte(error, text.bytes_read - len(error.object)), rest=True)
    except _TooLong:
        yield too_long(max_row_bytes, where=f"{text.place()}: ", rest=True)


def _objects(text: _Text) -> Iterator[tuple[str, str]]:
    """Yield (place, JSON) of each value of an array, or of values one after the other."""
    is_array = text.take("[")
    while not text.is_at_end():
        if is_array and text.take("]"):
            if not text.is_at_end():
                raise ValueError(f"{text.place()}: there is more after the array")
            return
        yield text.place(), text.take_value()
        if is_array and text.take(",") == text.is_next("]"):
            raise ValueError(f"{text.place()}: expected another object after ',', or ']' without it")
    if is_array:
        raise ValueError(f"{text.place()}: the array has no end")


def _row_of(place: str, text: str, max_row_bytes: int, unique_keys: bool) -> Row | Malformed:
    try:
        value = text.encode("utf-8")
        if len(value) > max_row_bytes:
            return too_long(max_row_bytes, where=f"{place}: ")
        row = parse_json(value, unique_keys=unique_keys)
    except ValueError as error:
        return Malformed("malformed row", f"{place}: {error}")
    if isinstance(row, Malformed):
        return replace(row, reason=f"{place}: {row.reason}")
    return row


class _TooLong(Exception):
    """A value beyond the limit."""


class _Text:
    """The text of a stream. Only the current piece is kept."""

    def __init__(self, stream: BufferedReader, max_row_bytes: int) -> None:
        self._stream, self._max_row_bytes = stream, max_row_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._scan = json.JSONDecoder().raw_decode
        self._kept, self._at, self.bytes_read, self._is_whole = "", 0, 0, False
        self._line, self._counted = 1, 0
        """The line that the character at `_counted` is in."""
        if stream.peek(3).startswith(BOM):
            self.bytes_read = len(stream.read(3))

    def take(self, character: str) -> bool:
        """Whether this comes next, after space; and pass over it."""
        is_next = self.is_next(character)
        self._at += is_next
        return is_next

    def is_next(self, character: str) -> bool:
        return not self.is_at_end() and self._kept[self._at] == character

    def is_at_end(self) -> bool:
        """Whether only space is left."""
        while True:
            self._at = _SPACE.match(self._kept, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._kept):
                return False
            if not self._read_more():
                return True

    def take_value(self) -> str:
        """The text of the JSON value that comes next."""
        while True:
            try:
                _, end = self._scan(self._kept, self._at)
            except json.JSONDecodeError as error:
                self._read_on_after(error)
                continue
            except RecursionError:
                raise ValueError(f"{self.place()}: nested too deeply") from None
            may_be_number = end == len(self._kept) and self._kept[-1] not in '}]"'
            if may_be_number and self._read_more():
                continue  # the value may continue in the next piece
            value, self._at = self._kept[self._at : end], end
            return value

    def _read_on_after(self, error: json.JSONDecodeError) -> None:
        """Read more if the value may only be cut off. Otherwise raise its fault, with the place."""
        may_go_on = error.msg.startswith("Unterminated string") or error.pos >= len(self._kept) - _UNSURE
        if may_go_on and self._read_more():
            return
        what = error.msg
        if may_go_on and self._is_whole:
            what = "the file ends inside it"
        self._at = error.pos
        raise ValueError(f"{self.place()}: {what}") from None

    def place(self) -> str:
        """The current line, counted from the last request. Counting from the start would take ever longer."""
        self._line += self._kept.count("\n", self._counted, self._at)
        self._counted = self._at
        return f"line {self._line:,}"

    def _read_more(self) -> bool:
        """Keep the unread text, and read as much again."""
        num_kept = len(self._kept) - self._at
        if num_kept > self._max_row_bytes:
            raise _TooLong
        data = self._stream.read(min(max(_PIECE_BYTES, num_kept), self._max_row_bytes + 1 - num_kept))
        self.bytes_read += len(data)
        self.place()
        self._counted = 0
        self._kept, self._at = self._kept[self._at :] + self._decoder.decode(data, final=not data), 0
        self._is_whole = not data
        return bool(data)
