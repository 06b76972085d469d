"""Documents as columns: tokens end to end, and facts of each document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchwright.prepare.chat.spans import SPAN_DTYPE

__all__ = ["Documents", "borders_of", "join_documents", "marks_of"]


class Documents(NamedTuple):
    """Some documents, in order."""

    tokens: NDArray[Any]
    lengths: NDArray[Any]
    file: NDArray[Any]
    """The number of each document's file; in a unit, of its span."""
    row: NDArray[Any]
    """The number of each document in the file, or in the span."""
    text: NDArray[Any]
    num_marks: NDArray[Any]
    """The number of spans of each conversation; empty for plain text."""
    marks: NDArray[Any]
    """The spans of conversations, of SPAN_DTYPE, end to end."""

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


def marks_of(fields: dict[str, NDArray[Any]]) -> NDArray[Any]:
    """Spans as records, from their columns."""
    marks = np.empty(len(fields["stop"]), SPAN_DTYPE)
    for name in SPAN_DTYPE.names or ():
        marks[name] = fields[name]
    return marks
