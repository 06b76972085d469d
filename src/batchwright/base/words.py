"""Values as the words of a message: lists that end in "and 92 more", counts with a noun, sizes with a unit."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "bytes_in_words",
    "counted",
    "error_in_words",
    "first_line",
    "half_character_in",
    "listed",
    "shortened",
    "suggest",
    "truncated",
]


def listed(items: Iterable[object], most: int = 8) -> str:
    """The first items, and the number of the others.

    >>> listed([1, 3]), listed(range(100))
    ('1, 3', '0, 1, 2, 3, 4, 5, 6, 7 and 92 more')
    """
    words = [str(item) for item in items]
    if len(words) <= most:
        return ", ".join(words)
    return f"{', '.join(words[:most])} and {len(words) - most:,} more"


def suggest(wrong: str, known: Iterable[str]) -> str | None:
    """The known name nearest to a wrong one, if any is near; one that differs in capitals only is.

    >>> suggest("contnet", ["content", "url"])
    'content'
    >>> suggest("TRL", ["batchwright", "trl"])
    'trl'
    """
    names = list(known)
    near = difflib.get_close_matches(wrong.casefold(), [name.casefold() for name in names], n=1)
    alike = [name for name in names if near and name.casefold() == near[0]]
    return max(alike, key=lambda name: difflib.SequenceMatcher(None, name, wrong).ratio(), default=None)


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """
    >>> counted(1, "row"), counted(1200, "row")
    ('1 row', '1,200 rows')
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def bytes_in_words(number: int) -> str:
    """
    >>> bytes_in_words(1_234_567)
    '1.2 MB'
    """
    if number < 1000:
        return f"{number} bytes"
    size, units = number / 1000, ["kB", "MB", "GB", "TB", "PB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.1f} {units[0]}"


def truncated(text: str, most: int = 80) -> str:
    """A text of at most `most` characters: the end of a longer one becomes three dots."""
    if len(text) <= most:
        return text
    return text[: most - 3] + "..."


def shortened(value: object, most: int = 80) -> str:
    """The repr of a value, truncated."""
    return truncated(repr(value), most)


def first_line(error: object) -> str:
    """The first line of a message, or of an error; the class of an error without a message."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0]


def half_character_in(text: str) -> str | None:
    """The fault of a text that UTF-8 cannot hold; None for any other text.

    >>> half_character_in("a\\ud800"), half_character_in("ab")
    ('half a surrogate pair at character 1', None)
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"half a surrogate pair at character {error.start:,}"
    return None


def error_in_words(error: BaseException) -> str:
    """
    >>> error_in_words(KeyError("text"))
    "KeyError: 'text'"
    """
    return f"{type(error).__name__}: {error}".removesuffix(": ")
