"""Names and small files of a queue's folders: what a number is called, and how a number is written down."""

from __future__ import annotations

import os
from pathlib import Path

from batchwright.base.files import is_part

__all__ = [
    "DIGITS",
    "EXTENSION",
    "KEPT",
    "file_name",
    "kept_by",
    "made_by",
    "number_of",
    "numbers_in",
    "read_number",
    "read_rows_text",
    "write_number",
    "write_text",
]

EXTENSION = ".batches"
KEPT = "kept"
DIGITS = 8


def file_name(number: int) -> str:
    """
    >>> file_name(117)
    '00000117.batches'
    """
    return f"{number:0{DIGITS}d}{EXTENSION}"


def number_of(name: str) -> int | None:
    """The number of a ready file, None of anything else.

    >>> number_of("00000117.batches"), number_of("next"), number_of(".00000118.provider-1-ab.part")
    (117, None, None)
    """
    digits = name.removesuffix(EXTENSION)
    return int(digits) if name.endswith(EXTENSION) and digits.isascii() and digits.isdigit() else None


def made_by(name: str) -> tuple[int, str] | None:
    """(number, provider) of a file that is being made.

    >>> made_by(".00000118.provider-1-ab.part"), made_by(".next.part")
    ((118, 'provider-1-ab'), None)
    """
    made = name[1:-5].split(".")
    return (int(made[0]), made[1]) if is_part(name) and len(made) == 2 and made[0].isdigit() else None


def kept_by(name: str) -> str | None:
    """The provider that makes the kept batches under this name.

    >>> kept_by(".kept.provider-1-ab.part"), kept_by(".00000118.provider-1-ab.part"), kept_by("kept.batches")
    ('provider-1-ab', None, None)
    """
    made = name[1:-5].split(".")
    return made[1] if is_part(name) and len(made) == 2 and made[0] == KEPT else None


def read_number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except FileNotFoundError:
        return None
    return int(text) if text.isascii() and text.isdigit() else None


def write_number(path: Path, number: int) -> None:
    """In place: a rename over a file makes some file systems write it out at once. Whoever finds it empty, knows."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.pwrite(descriptor, f"{number:<20d}\n".encode(), 0)
    finally:
        os.close(descriptor)


def read_rows_text(path: Path) -> tuple[int, int]:
    try:
        recorded, handed = path.read_text().split()
        return int(recorded), int(handed)
    except (FileNotFoundError, ValueError):
        return 0, 0


def write_text(path: Path, text: str) -> None:
    """Whole or not at all, by one at a time. No fsync: a kill loses nothing, and after a power cut files tell."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text)
    os.rename(part, path)


def numbers_in(folder: Path) -> tuple[int, ...]:
    return tuple(sorted(int(name) for name in os.listdir(folder) if name.isascii() and name.isdigit()))
