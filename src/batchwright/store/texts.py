"""A table of the hashes of documents' texts, sorted, to find the document of a text.

The hash is xxh3 of the text's UTF-8 bytes, 128 bits. The table has a row for each document, sorted by the first half
of its hash: `high`, `low`, and `document`, its number through the shards in the order of the table of shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from batchwright.store.writer import write_table

__all__ = ["TextHashes", "TextsWriter", "find_texts", "hash_texts", "texts_by_document"]

TextHashes = NDArray[np.uint64]
"""Hashes of texts, of shape (texts, 2): both halves of each."""

_SORTED_AT_ONCE = 1 << 22
_MAX_BUCKETS = 256


def hash_texts(texts: Sequence[str]) -> TextHashes:
    """
    >>> hash_texts(["a", "b", "a"]).shape
    (3, 2)
    """
    try:
        digests = b"".join(map(xxhash.xxh3_128_digest, map(str.encode, texts)))
    except UnicodeEncodeError:  # half a surrogate pair, which some tokenizers accept
        digests = b"".join(xxhash.xxh3_128_digest(text.encode("utf-8", "surrogatepass")) for text in texts)
    return np.frombuffer(digests, ">u8").astype(np.uint64).reshape(-1, 2)


class TextsWriter:
    """Writes the sorted table from hashes in the order of documents. Holds a few million at a time in memory.

    Hashes are kept in unnamed files by their first bits. Each file is then sorted alone.
    """

    def __init__(self, folder: Path, num_documents: int) -> None:
        self.folder: Path = folder
        self.num_documents: int = num_documents
        self.added: int = 0
        self._bits = min(max(num_documents - 1, 0) // _SORTED_AT_ONCE, _MAX_BUCKETS - 1).bit_length()
        number = np.uint32 if num_documents <= 1 << 32 else np.uint64
        self._record = np.dtype([("high", np.uint64), ("low", np.uint64), ("document", number)])
        self._files = ExitStack()
        self._buckets = [self._new_file() for _ in range(1 << self._bits)]

    def __enter__(self) -> TextsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def _new_file(self) -> IO[bytes]:
        return self._files.enter_context(TemporaryFile(dir=self.folder))

    def add(self, hashes: TextHashes) -> None:
        """The next documents' hashes."""
        records = np.empty(len(hashes), self._record)
        records["high"], records["low"] = hashes[:, 0], hashes[:, 1]
        records["document"] = np.arange(self.added, self.added + len(hashes))
        self.added += len(hashes)
        if not self._bits:
            self._buckets[0].write(records.data)
            return
        bucket = records["high"] >> np.uint64(64 - self._bits)
        records = records[np.argsort(bucket, kind="stable")]
        borders = np.concatenate([[0], np.cumsum(np.bincount(bucket.astype(np.int64), minlength=1 << self._bits))])
        for number in np.unique(bucket).tolist():
            self._buckets[number].write(records[borders[number] : borders[number + 1]].data)

    def finish(self, path: Path) -> str:
        """Write the table. Returns its hash."""
        assert self.added == self.num_documents > 0
        columns = {name: self._new_file() for name in self._record.names or ()}
        for bucket in self._buckets:
            bucket.seek(0)
            records = np.frombuffer(bucket.read(), self._record)
            order = np.argsort(records["high"], kind="stable")
            for name, file in columns.items():
                file.write(records[name][order].data)
        return write_table(path, {name: _mapped(file, self._record[name]) for name, file in columns.items()})


def _mapped(file: IO[bytes], dtype: np.dtype[Any]) -> NDArray[Any]:
    file.flush()
    return np.memmap(file, dtype, "r")


def find_texts(table: Mapping[str, Any], hashes: TextHashes) -> NDArray[np.int64]:
    """For each hash the number of a document with that text, or -1.

    Of two texts that share the first half of their hashes, one is not found. Neither is mistaken for the other, because
    the second half is compared too.
    """
    if not len(table["high"]):
        return np.full(len(hashes), -1, np.int64)
    order = np.argsort(hashes[:, 0])  # sorted, so that the search touches a large table's memory once
    at = np.empty(len(hashes), np.int64)
    at[order] = np.minimum(np.searchsorted(table["high"], hashes[order, 0]), len(table["high"]) - 1)
    is_same = (table["high"][at] == hashes[:, 0]) & (table["low"][at] == hashes[:, 1])
    return np.where(is_same, table["document"][at].astype(np.int64), -1)


def texts_by_document(table: Mapping[str, Any], folder: Path) -> TextHashes:
    """The hashes in the order of the documents, in an unnamed mapped file."""
    count = len(table["high"])
    with TemporaryFile(dir=folder) as file:
        file.truncate(max(count, 1) * 16)
        hashes: TextHashes = np.memmap(file, np.uint64, "r+")[: count * 2].reshape(-1, 2)
        for start in range(0, count, _SORTED_AT_ONCE):
            part = slice(start, start + _SORTED_AT_ONCE)
            hashes[table["document"][part]] = np.stack([table["high"][part], table["low"][part]], axis=1)
        return hashes
