"""The tokens of a unit's documents until all are there: in memory while they are few, else in a file without a name.

A compressed file cannot be cut, so it is one unit however large it is: what is held must not grow with it.
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

__all__ = ["HeldTokens"]

_MOST_BYTES = 256 << 20


class HeldTokens:
    """Documents, by number. The file has no name: nothing is left behind, whatever happens.

    >>> held = HeldTokens(Path("."), np.dtype("uint16"))
    >>> held.extend([np.array([1, 2], "uint16"), np.array([3], "uint16")])
    >>> held.in_order([1, 0]).tolist(), held.lengths().tolist()
    ([3, 1, 2], [2, 1])
    """

    def __init__(self, folder: Path, dtype: np.dtype[Any], most_bytes: int | None = None) -> None:
        """`folder` is where the file lies, should there be one."""
        self.folder, self.dtype = folder, dtype
        self.most_bytes: int = _MOST_BYTES if most_bytes is None else most_bytes
        self.documents: list[NDArray[Any]] = []
        self._first_in_memory = 0
        self._bytes_in_memory = 0

    def extend(self, documents: Sequence[NDArray[Any]]) -> None:
        self.documents += documents
        self._bytes_in_memory += sum(document.nbytes for document in documents)
        if self._bytes_in_memory > self.most_bytes:
            self._to_file()

    def __len__(self) -> int:
        return len(self.documents)

    def lengths(self) -> NDArray[np.int64]:
        return np.fromiter(map(len, self.documents), np.int64, len(self.documents))

    def in_order(self, order: Sequence[int]) -> NDArray[Any]:
        """The tokens of all documents, end to end, in an order. Not in memory where that is too little."""
        picked = [self.documents[number] for number in order]
        if not picked:
            return np.empty(0, self.dtype)
        total = sum(map(len, picked))
        if total * self.dtype.itemsize <= self.most_bytes:
            return np.concatenate(picked)
        joined = self._mapped(total)
        np.concatenate(picked, out=joined)
        return joined

    def _to_file(self) -> None:
        some = self.documents[self._first_in_memory :]
        mapped = self._mapped(sum(map(len, some)))
        np.concatenate(some, out=mapped)
        ends = np.cumsum([len(document) for document in some]).tolist()
        self.documents[self._first_in_memory :] = [
            mapped[end - len(document) : end] for end, document in zip(ends, some, strict=True)
        ]
        self._first_in_memory, self._bytes_in_memory = len(self.documents), 0

    def _mapped(self, num_tokens: int) -> NDArray[Any]:
        """Room for tokens in a new file that lives as long as the array."""
        num_bytes = max(num_tokens * self.dtype.itemsize, 1)
        with tempfile.TemporaryFile(dir=self.folder) as file:
            reserve(file.fileno(), num_bytes)
            memory = mmap.mmap(file.fileno(), num_bytes)
        return np.frombuffer(memory, self.dtype, num_tokens)
