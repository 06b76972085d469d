"""A user's own file that holds tokens of a store: found where it lies, refused when it changed, mapped in ranges."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from batchwright.base.errors import StoreError
from batchwright.store.layout import REPAIR_ADOPTED

if TYPE_CHECKING:
    from batchwright.store.reader import Store

__all__ = ["AdoptedFile", "AdoptedRange", "adopted_files", "path_beside"]


@dataclass(frozen=True, slots=True)
class AdoptedFile:
    """Where a file lay when it was adopted, and what tells cheaply that it changed since."""

    root: Path
    """The store's folder."""
    path: str
    """Absolute, as it was then."""
    beside: str
    """Relative to the store's folder, for a file beside the store or below that; otherwise empty."""
    num_bytes: int
    modified_ns: int

    def find(self) -> Path:
        """Where the file is now. One that lies beside the store wins, so that a copy of both uses its own."""
        places = [Path(os.path.normpath(self.root / self.beside))] if self.beside else []
        places.append(Path(self.path))
        found = [(place, self._difference(place)) for place in dict.fromkeys(places)]
        for place, difference in found:
            if difference is None:
                return place
        # A changed file says more than a missing one.
        place, difference = next((f for f in found if f[1] != _MISSING), found[-1])
        raise self._error(place, difference or "")

    def _difference(self, place: Path) -> str | None:
        try:
            return self._compare(os.stat(place))
        except (FileNotFoundError, NotADirectoryError):
            return _MISSING
        except OSError as error:
            return f"it cannot be read: {os.strerror(error.errno or 0)}"

    def _compare(self, status: os.stat_result) -> str | None:
        if status.st_size != self.num_bytes:
            return f"it had {self.num_bytes:,} bytes and has {status.st_size:,}"
        if status.st_mtime_ns != self.modified_ns:
            return f"it was written at {_time(self.modified_ns)} and is from {_time(status.st_mtime_ns)} now"
        return None

    def _error(self, place: Path, difference: str) -> StoreError:
        if difference == _MISSING:
            what = "a file that this store adopted is missing"
            return StoreError(what, file=place, store=self.root, remedy=f"put it back as it was, or {REPAIR_ADOPTED}")
        what = "a file that this store adopted has changed since"
        return StoreError(what, file=place, changed=difference, store=self.root, remedy=REPAIR_ADOPTED)

    def map(self, start: int, num_bytes: int) -> tuple[mmap.mmap, int]:
        """Bytes [start, start + num_bytes) of the file, as a map and the offset inside it."""
        place = self.find()
        try:
            with open(place, "rb") as file:
                difference = self._compare(os.fstat(file.fileno()))  # it may have been replaced since it was found
                if difference is not None:
                    raise self._error(place, difference)
                base = start - start % mmap.ALLOCATIONGRANULARITY
                mapped = mmap.mmap(file.fileno(), start + num_bytes - base, access=mmap.ACCESS_READ, offset=base)
        except (FileNotFoundError, NotADirectoryError):
            raise self._error(place, _MISSING) from None
        except OSError as error:
            raise self._error(place, f"it cannot be read: {os.strerror(error.errno or 0)}") from None
        return mapped, start - base


@dataclass(frozen=True, slots=True)
class AdoptedRange:
    """The part of an adopted file that is one shard."""

    file: AdoptedFile
    start: int

    def map(self, num_tokens: int, dtype: str) -> tuple[mmap.mmap, NDArray[Any]]:
        """Its map, and its tokens in there: read-only, without a copy."""
        size = num_tokens * np.dtype(dtype).itemsize
        if self.start < 0 or self.start + size > self.file.num_bytes:
            raise StoreError(
                "a shard of this store leaves the file that it is in",
                file=self.file.path,
                expected=f"bytes {self.start:,} to {self.start + size:,} of {self.file.num_bytes:,}",
                remedy=REPAIR_ADOPTED,
            )
        mapped, offset = self.file.map(self.start, size)
        return mapped, np.frombuffer(mapped, dtype, num_tokens, offset)


def adopted_files(store: Store) -> list[AdoptedFile]:
    """The files that a store adopted, by their number."""
    files = store.files
    return [
        AdoptedFile(store.path, path, beside, num_bytes, modified_ns)
        for path, beside, num_bytes, modified_ns in zip(
            files["path"].to_pylist(),
            files["beside"].to_pylist(),
            files["num_bytes"].tolist(),
            files["modified_ns"].tolist(),
            strict=True,
        )
    ]


def path_beside(path: str, root: Path) -> str:
    """A file's path relative to a store's folder, if it lies in the folder that holds the store, or below that.

    >>> path_beside("/data/owt/train.bin", Path("/data/owt/train.store"))
    '../train.bin'
    >>> path_beside("/data/owt/train.bin", Path("/home/me/train.store"))
    ''
    """
    relative = os.path.relpath(path, root)
    inside_parent = relative.startswith(os.pardir + os.sep) and not relative.startswith(f"..{os.sep}..")
    return relative if inside_parent else ""


_MISSING = "missing"


def _time(nanoseconds: int) -> str:
    stamp = np.datetime64(nanoseconds, "ns")
    return f"{np.datetime_as_string(stamp, unit='us')}Z".replace("T", " ")
