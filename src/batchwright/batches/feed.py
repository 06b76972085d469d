"""Windows over arriving documents: the rows of a stored stream, before its end is known."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["Place", "Taken", "WindowFeed"]

D = TypeVar("D")


@dataclass(frozen=True, slots=True)
class Place(Generic[D]):
    """The place of a token in a sequence of documents: its document, and the number of tokens before it there."""

    document: D
    skip: int


@dataclass(frozen=True, slots=True)
class Taken(Generic[D]):
    """Some rows: tokens [rows, row_tokens + 1], the place of each row, and that of the next one."""

    tokens: NDArray[Any]
    places: list[Place[D]]
    """One place per row, and one more: the beginning of the next row. Empty without tokens."""
    borders: list[NDArray[np.int64]]
    """For each row, the offsets of document starts inside its window, except 0."""

    def __len__(self) -> int:
        return len(self.tokens)


class WindowFeed(Generic[D]):
    """Rows of row_tokens + 1 tokens, each beginning with the last token of the one before.

    >>> feed = WindowFeed(iter([("a", np.array([1, 2, 3])), ("b", np.array([4, 5, 6, 7]))]), row_tokens=2)
    >>> taken = feed.take(2)
    >>> taken.tokens.tolist(), taken.places[2], taken.borders[1].tolist()
    ([[1, 2, 3], [3, 4, 5]], Place(document='b', skip=1), [1])
    >>> len(feed.take(2))       # 5, 6, 7 are left: one row
    1
    """

    def __init__(self, documents: Iterator[tuple[D, NDArray[Any]]], row_tokens: int, skip: int = 0) -> None:
        """`skip` is the number of tokens at the beginning that rows do not use. They still count in places."""
        self.row_tokens = row_tokens
        self._documents = documents
        self._pieces: list[NDArray[Any]] = []
        self._have = 0
        """Tokens in the pieces. The next row begins with the first one."""
        self._names: list[D] = []
        self._begins: list[int] = []
        """The start of each document with tokens here, counted from the first token; negative if it began before."""
        while skip >= self._have and self._pull():
            pass
        self._drop(min(skip, self._have))

    def take(self, rows: int) -> Taken[D]:
        """The next rows. At the end of the documents there may be fewer."""
        width = self.row_tokens
        while self._have < rows * width + 1 and self._pull():
            pass
        rows = min(rows, max(self._have - 1, 0) // width)
        if not self._have:
            return Taken(np.empty((0, width + 1), np.int64), [], [])
        if len(self._pieces) > 1:
            self._pieces = [np.concatenate(self._pieces)]
        (tokens,) = self._pieces
        windows = np.empty((rows, width + 1), tokens.dtype)
        windows[:, :width] = tokens[: rows * width].reshape(rows, width)
        windows[:, width] = tokens[width : rows * width + 1 : width]
        starts = range(0, rows * width + 1, width)
        taken = Taken(windows, [self._place(at) for at in starts], [self._borders(at) for at in starts[:-1]])
        self._drop(rows * width)
        return taken

    def _pull(self) -> bool:
        """Add the next document. Returns False if there is none."""
        for name, tokens in self._documents:
            if len(tokens):
                self._names.append(name)
                self._begins.append(self._have)
                self._pieces.append(tokens)
                self._have += len(tokens)
            return True
        return False

    def _place(self, at: int) -> Place[D]:
        number = bisect_right(self._begins, at) - 1
        return Place(self._names[number], at - self._begins[number])

    def _borders(self, at: int) -> NDArray[np.int64]:
        first, last = bisect_right(self._begins, at), bisect_left(self._begins, at + self.row_tokens + 1)
        return np.array(self._begins[first:last], np.int64) - at

    def _drop(self, count: int) -> None:
        """Forget the tokens before the next row."""
        if not count:
            return
        rest = np.concatenate(self._pieces)[count:].copy()  # not a view: it would hold the memory of the others
        self._pieces, self._have = [rest], len(rest)
        gone = max(bisect_right(self._begins, count) - 1, 0)
        if not self._have:
            self._pieces, gone = [], len(self._begins)
        self._names = self._names[gone:]
        self._begins = [begin - count for begin in self._begins[gone:]]
