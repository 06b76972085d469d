"""One pass over a file of tokens: its hash, a check of every id, and ranges that are cut between documents."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray

from batchwright.base.errors import SourceError
from batchwright.sources.tokens import TokenFile

__all__ = ["Range", "TokenScan"]

_READ_BYTES = 8 << 20


@dataclass(slots=True)
class Range:
    """Documents that lie end to end in a file."""

    start: int
    """The first token, counted from the first id of the file, as all numbers here."""
    ends: NDArray[np.int64]
    """The end of each document."""
    first_row: int
    """The number of the first document in its file."""
    is_whole: bool
    """False for a piece of a document that is too long for one range. The next range continues it, under its number."""
    content: Any
    """The hash (xxh3, 128 bits) of the tokens, which more can be added to."""


class TokenScan:
    """One pass over a file, in memory that does not depend on its size.

    >>> scan = TokenScan(file, vocab_size=257, eos=256)           # doctest: +SKIP
    >>> for documents in scan.ranges(max_tokens=2**31 - 1): ...   # doctest: +SKIP
    >>> scan.content_hash, scan.modified_ns                       # doctest: +SKIP
    """

    modified_ns: int
    content_hash: str
    eos_first: bool
    eos: int | None
    vocab_size: int
    file: TokenFile

    def __init__(
        self,
        file: TokenFile,
        *,
        vocab_size: int,
        eos: int | None,
        eos_first: bool = False,
        advance: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:
        self.file, self.vocab_size, self.eos, self.eos_first = file, vocab_size, eos, eos_first
        self.content_hash, self.modified_ns = "", 0
        """Facts of the whole file, known when all ranges were taken."""
        self.begins_with_eos: bool = False
        self._advance = advance
        self._digest, self._hashed_bytes = xxhash.xxh3_128(), 0
        self._buffer = bytearray(_READ_BYTES)

    def ranges(self, *, max_tokens: int) -> Iterator[Range]:
        """The file's documents, in ranges of at most `max_tokens`. Only what follows a cut is read twice."""
        with open(self.file.path, "rb", buffering=0) as raw:
            before = _identity(os.fstat(raw.fileno()))
            if before[0] != self.file.num_bytes:
                raise self._changed()
            self._read(raw, 0, self.file.offset)
            start = row = 0
            while start < self.file.num_tokens:
                found = self._range(raw, start, min(start + max_tokens, self.file.num_tokens), row)
                yield found
                start, row = int(found.ends[-1]), row + len(found.ends) - (not found.is_whole)
            if _identity(os.fstat(raw.fileno())) != before or _identity(os.stat(self.file.path)) != before:
                raise self._changed()
        self.content_hash, self.modified_ns = self._digest.hexdigest(), before[1]

    def _range(self, raw: BinaryIO, start: int, stop: int, row: int) -> Range:
        is_last, content, at_border = stop == self.file.num_tokens, xxhash.xxh3_128(), None
        found: list[NDArray[np.int64]] = []
        tokens_at_once = _READ_BYTES // self.file.dtype.itemsize
        for begin in range(start, stop, tokens_at_once):
            tokens = self._tokens(raw, begin, min(begin + tokens_at_once, stop))
            ends = self._ends(tokens, begin, start)
            done = 0
            if len(ends) and not is_last:  # a cut may be made here: the hash up to here is kept
                done = int(ends[-1]) - begin
                content.update(tokens[:done].view(np.uint8).data)
                at_border = content.copy()
            content.update(tokens[done:].view(np.uint8).data)
            found.append(ends)
        every = np.concatenate(found)
        if is_last and not (len(every) and every[-1] == stop):
            every = np.append(every, stop)  # the last document has no end of its own
        if is_last:
            return Range(start, every, row, True, content)
        if at_border is not None:
            return Range(start, every, row, True, at_border)
        return Range(start, np.array([stop], np.int64), row, False, content)

    def _ends(self, tokens: NDArray[Any], begin: int, start: int) -> NDArray[np.int64]:
        """Ends of documents that these tokens (from `begin`) show, in a range from `start`."""
        if self.file.ends is not None:
            limits = [begin - (not begin), begin + len(tokens)]  # a document that ends at 0 is empty, and counts
            first, last = np.searchsorted(self.file.ends, limits, side="right")
            return self.file.ends[first:last]
        if self.eos is None:
            return np.empty(0, np.int64)
        hits = np.flatnonzero(tokens == self.eos).astype(np.int64) + begin
        if not self.eos_first:
            return hits + 1
        return hits[hits > start]

    def _tokens(self, raw: BinaryIO, begin: int, end: int) -> NDArray[Any]:
        dtype = self.file.dtype
        data = self._read(raw, self.file.offset + begin * dtype.itemsize, (end - begin) * dtype.itemsize)
        tokens = np.frombuffer(data, dtype)
        smallest = 0 if dtype.kind == "u" else int(tokens.min())
        if smallest < 0 or int(tokens.max()) >= self.vocab_size:
            wrong = int(np.flatnonzero((tokens < 0) | (tokens >= self.vocab_size))[0])
            raise SourceError(
                f"token {begin + wrong:,} of this file has id {int(tokens[wrong]):,}, "
                f"outside the vocabulary of {self.vocab_size:,}",
                file=self.file.path,
                token=begin + wrong,
                read_as=dtype.name,
                remedy="the tokenizer that the file was made with; or dtype=, if its ids are of another type",
            )
        if begin == 0 and self.eos is not None:
            self.begins_with_eos = int(tokens[0]) == self.eos
        return tokens

    def _read(self, raw: BinaryIO, position: int, num_bytes: int) -> memoryview:
        view = memoryview(self._buffer)[:num_bytes]
        raw.seek(position)
        done = 0
        while done < num_bytes:
            count = raw.readinto(view[done:])  # type: ignore[attr-defined]
            if not count:
                raise self._changed()
            done += count
        if position + num_bytes > self._hashed_bytes:
            self._digest.update(view[self._hashed_bytes - position :])
            self._advance(position + num_bytes - self._hashed_bytes)
            self._hashed_bytes = position + num_bytes
        return view

    def _changed(self) -> SourceError:
        return SourceError(
            "this file changed while it was read", file=self.file.path, remedy="run it again when nobody writes to it"
        )


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ino
