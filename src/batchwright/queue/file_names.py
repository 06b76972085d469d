"""The names of a queue's files, and the small files that hold a number."""

from __future__ import annotations

import os
from pathlib import Path

from batchwright.base.files import is_part

__all__ = [
    *("EXTENSION", "KEPT", "digits_of", "file_in_words", "file_name", "number_and_member", "number_of", "numbers_in"),
    *("read_number", "read_rows_text", "write_number", "write_text"),
]

EXTENSION = ".batches"
KEPT = "kept"


def digits_of(number: int) -> str:
    return f"{number:08d}"


def file_name(number: int) -> str:
    """
    >>> file_name(117)
    '00000117.batches'
    """
    return digits_of(number) + EXTENSION


def file_in_words(split: str, number: int | None) -> str:
    """A file, as a message names it. Kept batches have no number."""
    if number is None:
        return f"kept {split} batches"
    return f"{split} file {number}"


def number_of(name: str) -> int | None:
    """The number of a ready file, None of anything else.

    >>> number_of("00000117.batches"), number_of("next"), number_of(".00000118.provider-1-ab.part")
    (117, None, None)
    """
    digits = name.removesuffix(EXTENSION)
    if digits != name and digits.isascii() and digits.isdigit():
        return int(digits)
    return None


def number_and_member(name: str) -> tuple[int | None, str] | None:
    """The number and the member's id of a file that is being made (by a provider) or read (by a consumer).

    The number of kept batches is None.

    >>> number_and_member(".00000118.provider-1-ab.part"), number_and_member("00000116.consumer-1-cd.batches")
    ((118, 'provider-1-ab'), (116, 'consumer-1-cd'))
    >>> number_and_member(".kept.provider-1-ab.part"), number_and_member(".next.part")
    ((None, 'provider-1-ab'), None)
    """
    words = name.removeprefix(".").split(".")
    if len(words) != 3 or not (is_part(name) or name.endswith(EXTENSION)):
        return None
    digits, member, _ = words
    if digits == KEPT:
        return None, member
    if digits.isascii() and digits.isdigit():
        return int(digits), member
    return None


def read_number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except FileNotFoundError:
        return None
    if text.isascii() and text.isdigit():
        return int(text)
    return None


def write_number(path: Path, number: int) -> None:
    """Written in place: a rename over a file makes some file systems write it out at once. A reader copes with none."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.pwrite(descriptor, f"{number:<20d}\n".encode(), 0)
    finally:
        os.close(descriptor)


def read_rows_text(path: Path) -> tuple[int, int]:
    """(rows recorded, rows handed out) of a file that was given back."""
    try:
        recorded, handed = path.read_text().split()
        return int(recorded), int(handed)
    except (FileNotFoundError, ValueError):
        return 0, 0


def write_text(path: Path, text: str) -> None:
    """Write a file under the lock of its split: it appears in full, or not at all. Not synced to disk."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text)
    os.rename(part, path)


def numbers_in(folder: Path) -> tuple[int, ...]:
    return tuple(sorted(int(name) for name in os.listdir(folder) if name.isascii() and name.isdigit()))
