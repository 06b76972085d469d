"""Documents as columns: tokens end to end, and facts of each document. Tokens of a unit's documents, as they grow."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchwright.base.files import reserve
from batchwright.prepare.chat.spans import SPAN_DTYPE


class Documents(NamedTuple):
    """Some documents, in order."""

    tokens: NDArray[Any]
    lengths: NDArray[Any]
    file: NDArray[Any]
    """The number of each document's file; in a unit, of its span."""
    row: NDArray[Any]
    """The number of each document in the file, or in the span."""
    text: NDArray[Any]
    num_marks: NDArray[Any] = np.empty(0, np.int64)
    """The number of spans of each conversation; empty for plain text."""
    marks: NDArray[Any] = np.empty(0, SPAN_DTYPE)
    """The spans of conversations, of SPAN_DTYPE, end to end."""

    def marked(self, starts: NDArray[Any], fields: dict[str, NDArray[Any]]) -> Documents:
        """The documents with spans: document i has those of [starts[i], starts[i + 1]), given as columns."""
        marks = np.empty(int(starts[-1] - starts[0]), SPAN_DTYPE)
        for name in SPAN_DTYPE.names or ():
            marks[name] = fields[name][starts[0] : starts[-1]]
        return self._replace(num_marks=np.diff(starts).astype(np.int64), marks=marks)

    def only(self, mask: NDArray[np.bool_]) -> Documents:
        """The documents where `mask` is true. No copy if that is all of them."""
        if mask.all():
            return self
        num_marks, marks = self.num_marks, self.marks
        if len(num_marks):
            num_marks, marks = num_marks[mask], marks[np.repeat(mask, num_marks)]
        tokens = self.tokens[np.repeat(mask, self.lengths)]
        return Documents(tokens, self.lengths[mask], self.file[mask], self.row[mask], self.text[mask], num_marks, marks)

    def in_files(self, files: Sequence[int], first_rows: Sequence[int]) -> Documents:
        """A unit's documents with the numbers of files, and of rows in these, in place of spans."""
        file, first = np.array(files, np.int32), np.array(first_rows, np.int64)
        return self._replace(file=file[self.file], row=self.row + first[self.file])

    def parts(self, limit: int) -> Iterator[Documents]:
        """The documents in parts of at most `limit` tokens, without a copy. A longer document is a part of its own."""
        ends, mark_ends = borders_of(self.lengths), borders_of(self.num_marks)
        first = 0
        while first < len(self.lengths):
            last = max(int(np.searchsorted(ends, ends[first] + limit, side="right")) - 1, first + 1)
            some = slice(first, last)
            marks = self.marks
            if len(self.num_marks):
                marks = marks[mark_ends[first] : mark_ends[last]]
            tokens = self.tokens[ends[first] : ends[last]]
            lengths, file, row, text, num_marks = (column[some] for column in self[1:6])
            yield Documents(tokens, lengths, file, row, text, num_marks, marks)
            first = last


def join_documents(parts: Sequence[Documents]) -> Documents:
    """Documents end to end. A single part is not copied: it may be large, and mapped."""
    if len(parts) == 1:
        return parts[0]
    return Documents(*map(np.concatenate, zip(*parts, strict=True)))


def borders_of(lengths: Any) -> NDArray[np.int64]:
    """The start of each item, and the end of the last, for items of these lengths."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


# Tokens: in memory at first, in unnamed files as they grow. A compressed file is one unit of any size, because it
# cannot be cut, and memory must not grow with it.

_MOST_BYTES = 256 << 20


class TokenSpool:
    """Documents, by number. Its files have no name, so that nothing is left behind by a killed process.

    >>> spool = TokenSpool(Path("."), np.dtype("uint16"))
    >>> spool.extend([np.array([1, 2], "uint16"), np.array([3], "uint16")])
    >>> spool.in_order([1, 0]).tolist(), spool.lengths().tolist()
    ([3, 1, 2], [2, 1])
    """

    def __init__(self, folder: Path, dtype: np.dtype[Any]) -> None:
        """`folder` is for the files."""
        self.folder: Path = folder
        self.dtype: np.dtype[Any] = dtype
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
