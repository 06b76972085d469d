"""Output of the verbs: JSON, aligned tables, numbers, and text that is safe on a terminal."""

from __future__ import annotations

import argparse
import json
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchwright.base.words import counted

if TYPE_CHECKING:
    from batchwright.batches.types import TraceRecord
    from batchwright.store import Store


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout, and nothing else there")


def print_facts(facts: dict[str, Any], lines: Iterable[str], *, as_json: bool) -> None:
    """The answer of a verb: its facts as JSON, or the lines that say them."""
    if as_json:
        print_json(facts)
    else:
        print("\n".join(lines))


def print_json(value: dict[str, Any]) -> None:
    json.dump(value, sys.stdout, ensure_ascii=False, indent=1, default=_plain)
    sys.stdout.write("\n")


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):
        return value.tolist()  # NumPy's numbers and arrays
    raise TypeError(f"{type(value).__name__} in a JSON answer")


def store_facts(store: Store) -> dict[str, Any]:
    """What the JSON of every verb says of a store."""
    return {
        "store": str(store.path),
        "version": store.version,
        "fingerprint": store.fingerprint,
        "num_documents": store.num_rows,
        "num_tokens": store.num_tokens,
        "tokenizer": store.manifest.tokenizer,
    }


def print_damage(where: Path, num_files: int, remedies: Sequence[str]) -> None:
    """Say on stderr that a folder is damaged, and what to do."""
    print(f"batchwright: {where} is damaged: {counted(num_files, 'file')}", file=sys.stderr)
    if remedies:
        print("  try        " + f"\n{'':13}".join(remedies), file=sys.stderr)


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


def table(rows: Sequence[Mapping[str, Any]], *, left: Sequence[str] = (), optional: Sequence[str] = ()) -> str:
    """Plain, aligned columns; those named in `left` to the left, numbers to the right. Without `optional` empty ones.

    >>> print(table([{"name": "web", "rows": 12}, {"name": "code", "rows": 3}], left=["name"]))
    name  rows
    web     12
    code     3
    """
    columns = []
    for name in rows[0]:
        words = [str(row[name]) for row in rows]
        if name in optional and not any(words):
            continue
        width = max(map(len, [name, *words]))
        justify = str.ljust if name in left else str.rjust
        columns.append([justify(word, width) for word in [name, *words]])
    return "\n".join("  ".join(row).rstrip() for row in zip(*columns, strict=True))


def limited(lines: Sequence[str], most: int, margin: str = "  ") -> Iterator[str]:
    """The first lines behind a margin, and the number of the others.

    >>> list(limited(["a", "b", "c"], 1))
    ['  a', '  and 2 more: --all lists them']
    """
    for line in lines[:most]:
        yield margin + line
    if len(lines) > most:
        yield f"{margin}and {len(lines) - most:,} more: --all lists them"


def number(value: int | None, missing: str = "") -> str:
    """
    >>> number(1234), number(None, "no end")
    ('1,234', 'no end')
    """
    if value is None:
        return missing
    return f"{value:,}"


def percent(share: float, digits: int = 2) -> str:
    """
    >>> percent(0.75), percent(1 / 3, 3)
    ('75.00 %', '33.333 %')
    """
    return f"{100 * share:.{digits}f} %"


def piece_in_words(record: TraceRecord) -> str:
    """A part of a document: its file, row, lines and tokens."""
    start, stop = record.document_span
    return f"{record.file}, row {record.row:,}{lines_in_words(record.lines)}, tokens {start:,}-{stop:,}"


def lines_in_words(lines: tuple[int, int] | None) -> str:
    """Lines of a document, to follow other words.

    >>> lines_in_words((3, 9)), lines_in_words((3, 3)), lines_in_words(None)
    (', lines 3-9', ', line 3', '')
    """
    if lines is None:
        return ""
    first, last = lines
    if first == last:
        return f", line {first:,}"
    return f", lines {first:,}-{last:,}"
