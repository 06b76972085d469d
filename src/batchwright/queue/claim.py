"""A file that a consumer has for itself, and beside it, in 16 bytes, how far it is with it."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Claim", "mapped_rows", "read_rows", "rows_beside", "write_rows"]

_ROWS = struct.Struct("<qq")


@dataclass(slots=True)
class Claim:
    """A file that a consumer has for itself, until it is done with it or dead."""

    number: int
    path: Path
    recorded: int
    """Rows that somebody before took and recorded: they are not handed out again."""
    handed: int
    """Rows that somebody before was handed, recorded or not."""
    is_alone: bool
    """Whether nobody else reads this split."""
    _rows: mmap.mmap

    def record(self, recorded: int, handed: int) -> None:
        """Write down how far this reader is. It survives a kill -9 of the reader."""
        # A reader before this one may have been handed more: that comes again too, and is counted.
        handed = max(handed, self.handed)
        if self._rows.closed:
            write_rows(self.path, recorded, handed)
        else:
            _ROWS.pack_into(self._rows, 0, recorded, handed)

    def rest(self) -> None:
        """Hold nothing open for it: it stays claimed, and can be recorded, given back or done."""
        self._rows.close()

    def is_held(self) -> bool:
        """Whether it was not given to another, while this process seemed dead."""
        return self.path.exists()

    def done(self) -> bool:
        """Delete the file: that is what makes room for another. False where it was given to another meanwhile."""
        is_there = True
        try:
            self.path.unlink()
        except FileNotFoundError:
            is_there = False
        self.drop()  # not where the file could not be deleted: it is still claimed
        with contextlib.suppress(OSError):
            rows_beside(self.path).unlink()
        return is_there

    def drop(self) -> None:
        """Let go of it without saying so: the file stays where it is."""
        self._rows.close()


def mapped_rows(path: Path, recorded: int, handed: int) -> mmap.mmap:
    """A new file beside a claimed one, as memory: writing into it is no call, and survives this process."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.pwrite(descriptor, _ROWS.pack(recorded, handed), 0)
        return mmap.mmap(descriptor, _ROWS.size)
    finally:
        os.close(descriptor)


def write_rows(path: Path, recorded: int, handed: int) -> None:
    mapped_rows(rows_beside(path), recorded, handed).close()


def read_rows(path: Path) -> tuple[int, int]:
    """(rows recorded, rows handed over) of a claimed file, from beside it."""
    try:
        content = rows_beside(path).read_bytes()
    except FileNotFoundError:
        return 0, 0
    recorded, handed = _ROWS.unpack(content) if len(content) == _ROWS.size else (0, 0)
    return recorded, handed


def rows_beside(path: Path) -> Path:
    return path.with_suffix(".rows")
