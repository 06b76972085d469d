"""User files that hold the tokens of a store: found, checked for changes, and mapped in ranges."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.base.errors import StoreError
from batchwright.store.layout import REPAIR_ADOPTED


@dataclass(frozen=True, slots=True)
class AdoptedFile:
    """A file as it was when it was adopted."""

    root: Path
    """The store's folder."""
    path: str
    """Absolute."""
    beside: str
    """Relative to the store's folder, for a file inside the folder that holds the store; otherwise empty."""
    num_bytes: int
    modified_ns: int

    def find(self) -> Path:
        """The file's place now. A file beside the store comes first, so that a copy of both uses its own."""
        places = [Path(self.path)]
        if self.beside:
            places.insert(0, Path(os.path.normpath(self.root / self.beside)))
        errors = []
        for place in dict.fromkeys(places):
            try:
                self._check(place, os.stat(place))
            except (OSError, StoreError) as error:
                errors.append(self._error(place, error))
            else:
                return place
        # A changed file says more than a missing one.
        raise next((error for error in errors if "changed" in error.where), errors[-1])

    def map(self, start: int, num_bytes: int) -> tuple[mmap.mmap, int]:
        """Bytes [start, start + num_bytes) of the file, as a map and the offset inside it."""
        place = self.find()
        try:
            with open(place, "rb") as file:
                self._check(place, os.fstat(file.fileno()))  # it may have been replaced since it was found
                base = start - start % mmap.ALLOCATIONGRANULARITY
                mapped = mmap.mmap(file.fileno(), start + num_bytes - base, access=mmap.ACCESS_READ, offset=base)
        except OSError as error:
            raise self._error(place, error) from None
        return mapped, start - base

    def _check(self, place: Path, status: os.stat_result) -> None:
        if status.st_size != self.num_bytes:
            raise self._changed(place, f"it had {self.num_bytes:,} bytes and has {status.st_size:,}")
        if status.st_mtime_ns != self.modified_ns:
            before, now = _time(self.modified_ns), _time(status.st_mtime_ns)
            raise self._changed(place, f"it was written at {before} and is from {now} now")

    def _error(self, place: Path, error: OSError | StoreError) -> StoreError:
        if isinstance(error, StoreError):
            return error
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            what, remedy = "a file that this store adopted is missing", f"put it back as it was, or {REPAIR_ADOPTED}"
            return StoreError(what, file=place, store=self.root, remedy=remedy)
        return self._changed(place, f"it cannot be read: {os.strerror(error.errno or 0)}")

    def _changed(self, place: Path, change: str) -> StoreError:
        what = "a file that this store adopted has changed since"
        return StoreError(what, file=place, changed=change, store=self.root, remedy=REPAIR_ADOPTED)


@dataclass(frozen=True, slots=True)
class AdoptedRange:
    """One shard: a range of an adopted file."""

    file: AdoptedFile
    start: int

    def map(self, num_tokens: int, dtype: str) -> tuple[mmap.mmap, NDArray[Any]]:
        """The map, and the tokens in it: read-only, without a copy."""
        size = num_tokens * np.dtype(dtype).itemsize
        if self.start < 0 or self.start + size > self.file.num_bytes:
            raise StoreError(
                "a shard of this store extends past the end of its file",
                file=self.file.path,
                expected=f"bytes {self.start:,} to {self.start + size:,} of {self.file.num_bytes:,}",
                remedy=REPAIR_ADOPTED,
            )
        mapped, offset = self.file.map(self.start, size)
        return mapped, np.frombuffer(mapped, dtype, num_tokens, offset)


def path_beside(path: str, root: Path) -> str:
    """A file's path relative to a store's folder; empty for a file outside the folder that holds the store.

    >>> path_beside("/data/owt/train.bin", Path("/data/owt/train.store"))
    '../train.bin'
    >>> path_beside("/data/owt/train.bin", Path("/home/me/train.store"))
    ''
    """
    relative = os.path.relpath(path, root)
    inside_parent = relative.startswith(f"..{os.sep}") and not relative.startswith(f"..{os.sep}..")
    return relative * inside_parent


def _time(nanoseconds: int) -> str:
    stamp = np.datetime64(nanoseconds, "ns")
    return f"{np.datetime_as_string(stamp, unit='us')}Z".replace("T", " ")
