"""The tokens of a unit's documents: in memory at first, in unnamed files as they grow.

A compressed file is one unit, whatever its size, because it cannot be cut. Memory must not grow with it.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.base.files import reserve

__all__ = ["TokenSpool"]

_MOST_BYTES = 256 << 20


class TokenSpool:
    """Documents, by number. Its files have no name, so that nothing is left behind by a killed process.

    >>> spool = TokenSpool(Path("."), np.dtype("uint16"))
    >>> spool.extend([np.array([1, 2], "uint16"), np.array([3], "uint16")])
    >>> spool.in_order([1, 0]).tolist(), spool.lengths().tolist()
    ([3, 1, 2], [2, 1])
    """

    dtype: np.dtype[Any]
    folder: Path

    def __init__(self, folder: Path, dtype: np.dtype[Any]) -> None:
        """`folder` is for the files."""
        self.folder, self.dtype = folder, dtype
        self.documents: list[NDArray[Any]] = []
        self._first_in_memory = self._bytes_in_memory = 0

    def extend(self, documents: Sequence[NDArray[Any]]) -> None:
        self.documents += documents
        self._bytes_in_memory += sum(document.nbytes for document in documents)
        if self._bytes_in_memory > _MOST_BYTES:
            some = self.documents[self._first_in_memory :]
            mapped = self._joined(some)
            ends = np.cumsum([len(document) for document in some])
            self.documents[self._first_in_memory :] = np.split(mapped, ends[:-1])
            self._first_in_memory, self._bytes_in_memory = len(self.documents), 0

    def __len__(self) -> int:
        return len(self.documents)

    def lengths(self) -> NDArray[np.int64]:
        return np.fromiter(map(len, self.documents), np.int64, len(self.documents))

    def in_order(self, order: Sequence[int]) -> NDArray[Any]:
        """The tokens of all documents, end to end, in an order."""
        return self._joined([self.documents[number] for number in order])

    def _joined(self, documents: list[NDArray[Any]]) -> NDArray[Any]:
        """Documents end to end: in memory if they are few, else in an unnamed file that lives as long as the array."""
        num_tokens = sum(map(len, documents))
        num_bytes = num_tokens * self.dtype.itemsize
        if num_bytes <= _MOST_BYTES:
            return np.concatenate([np.empty(0, self.dtype), *documents])
        with tempfile.TemporaryFile(dir=self.folder) as file:
            reserve(file.fileno(), num_bytes)
            memory = mmap.mmap(file.fileno(), num_bytes)
        joined = np.frombuffer(memory, self.dtype, num_tokens)
        np.concatenate(documents, out=joined)
        return joined
