"""Output of the verbs: JSON, aligned tables, numbers, and text that is safe on a terminal."""

from __future__ import annotations

import argparse
import json
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["add_json", "indented", "lines_in_words", "number", "print_json", "printable", "table"]


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout, and nothing else there")


def print_json(value: dict[str, Any]) -> None:
    json.dump(value, sys.stdout, ensure_ascii=False, indent=1, default=_plain)
    sys.stdout.write("\n")


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):
        return value.tolist()  # NumPy's numbers and arrays
    raise TypeError(f"{type(value).__name__} in a JSON answer")


def printable(text: str) -> str:
    r"""Text as it can safely be shown: control characters, which could move a terminal's cursor, come out as escapes.

    >>> printable("a\tb\x1b[2J")
    'a\tb\\x1b[2J'
    """
    return "".join(map(_shown, text))


def _shown(character: str) -> str:
    if character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cf", "Cs"):
        return character
    return ascii(character)[1:-1]


def indented(text: str, margin: str) -> str:
    return "\n".join(margin + line for line in printable(text).split("\n"))


def table(header: Sequence[str], rows: Iterable[Sequence[Any]], *, left: Sequence[str] = ()) -> str:
    """Plain, aligned columns; those named in `left` to the left, numbers to the right.

    >>> print(table(["name", "rows"], [["web", 12], ["code", 3]], left=["name"]))
    name  rows
    web     12
    code     3
    """
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    for row in cells:
        for i, name in enumerate(header):
            row[i] = row[i].ljust(widths[i]) if name in left else row[i].rjust(widths[i])
    return "\n".join("  ".join(row).rstrip() for row in cells)


def number(value: int | None, missing: str = "") -> str:
    """
    >>> number(1234), number(None, "no end")
    ('1,234', 'no end')
    """
    return missing if value is None else f"{value:,}"


def lines_in_words(lines: tuple[int, int] | None) -> str:
    """Lines of a document, to follow other words.

    >>> lines_in_words((3, 9)), lines_in_words((3, 3)), lines_in_words(None)
    (', lines 3-9', ', line 3', '')
    """
    if lines is None:
        return ""
    return f", line {lines[0]:,}" if lines[0] == lines[1] else f", lines {lines[0]:,}-{lines[1]:,}"
