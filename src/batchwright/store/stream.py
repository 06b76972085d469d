"""Documents end to end, over memory-mapped shards that are read only when touched."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from batchwright.base.errors import StoreError
from batchwright.base.machine import expect_random_reads, unmap_pages
from batchwright.base.words import first_line
from batchwright.store.layout import StreamInfo, content_digest, stream_fingerprint

if TYPE_CHECKING:
    from batchwright.store.reader import Store

__all__ = ["MappedShard", "StoredDocument", "TokenStream"]

Spans = tuple[NDArray[Any], dict[str, NDArray[Any]]]
"""(the start of each document's spans, and the end of the last; the fields of all spans)."""

_CHECKED_AT_OPEN = 4096
"""Shards checked for existence and size when a store opens. The rest are checked when touched."""
_MAPPED_AT_ONCE = 16_384
"""Shards mapped at once: the kernel allows about 65,000 maps per process."""
_ARROW_MAGIC = b"ARROW1"


@dataclass(frozen=True, slots=True)
class StoredDocument:
    """One document of a store."""

    source: str
    split: str
    file: str
    row: int
    tokens: NDArray[Any]
    """Read-only, straight from the mapped file."""


class MappedShard:
    """One shard, mapped: `tokens` end to end, `offsets` between documents, and the file and row of each document.

    In a store of adopted tokens the shard has only the borders, and the tokens are mapped from the user's file.
    """

    __slots__ = ("_in_map", "_map", "address", "data_path", "data_start", "file", "offsets", "row", "spans", "tokens")

    def __init__(self, store: Store, row: int) -> None:
        """The shard in a row of a store's table of shards. Raises if it is not as the table says."""
        import pyarrow as pa

        from batchwright.columns.arrow import arrow_to_numpy, records_of

        manifest, shards, repair = store.manifest, store.shards, store.manifest.repair
        path, adopted = store.shard_path(row), store.adopted_range(row)
        num_tokens, dtype = int(shards["num_tokens"][row]), manifest.dtype_of(manifest.streams[shards["stream"][row]])
        expected = (int(shards["num_documents"][row]), num_tokens, dtype)
        check_shard_file(path, int(shards["num_bytes"][row]), repair)
        with open(path, "rb") as raw:
            self._map = mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            batch = pa.ipc.open_file(pa.py_buffer(self._map)).get_batch(0)
            batch.validate()  # sizes only: no number in a damaged file may point outside the map
            lists = batch.column("tokens")
            self.tokens: NDArray[Any] = arrow_to_numpy(lists.values) if adopted is None else np.empty(0, dtype)
            self.offsets: NDArray[np.int32] = arrow_to_numpy(lists.offsets)
            self.file: NDArray[np.int32] = arrow_to_numpy(batch.column("file"))
            self.row: NDArray[np.int64] = arrow_to_numpy(batch.column("row"))
            self.spans: Spans | None = None
            """The spans of conversations: the start of each document's spans, and the fields of all spans."""
            if "spans" in batch.schema.names:
                self.spans = records_of(batch.column("spans"))
        except (pa.ArrowException, OSError, KeyError, IndexError, AttributeError, TypeError, ValueError) as error:
            raise StoreError("this shard is not readable", file=path, reason=first_line(error), remedy=repair) from None
        found = (len(self.file), len(lists.values), self.tokens.dtype.name)
        if found != expected:
            what, said = "this shard is not what the manifest says", "{:,} documents, {:,} tokens of {}"
            raise StoreError(what, file=path, expected=said.format(*expected), found=said.format(*found), remedy=repair)
        if adopted is not None:
            self._map, self.tokens = adopted.map(num_tokens, dtype)
        self.address: int = self.tokens.ctypes.data
        self._in_map = self.address - np.frombuffer(self._map, np.uint8).ctypes.data
        """The byte in the map where the tokens start."""
        self.data_path: Path = path
        """The file that holds the tokens."""
        self.data_start: int = self._in_map
        """The byte in the file where they start."""
        if adopted is not None:
            self.data_path, self.data_start = adopted.file.find(), adopted.start

    def unmap(self, first: int, last: int) -> None:
        """Release the memory of tokens [first, last). They are read again when touched."""
        size = self.tokens.itemsize
        unmap_pages(self._map, self._in_map + first * size, self._in_map + last * size)

    def expect_random_reads(self) -> None:
        """Tell the kernel not to read ahead: touching a row then reads that row alone."""
        expect_random_reads(self._map)


def check_shard_file(path: Path, num_bytes: int, repair: str) -> None:
    """Check that a shard exists and has its size and its footer, without mapping it."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise StoreError("a shard of this store is missing", file=path, remedy=repair) from None
    if size != num_bytes:
        what = "a shard of this store was truncated or altered"
        expected, found = f"{num_bytes:,} bytes", f"{size:,} bytes"
        raise StoreError(what, file=path, expected=expected, found=found, remedy=repair)
    with open(path, "rb") as file:
        file.seek(max(size - len(_ARROW_MAGIC), 0))
        if file.read() != _ARROW_MAGIC:
            raise StoreError("a shard of this store has no Arrow footer", file=path, remedy=repair)


class TokenStream:
    """The documents of one source and split, end to end. Token i of the stream is in one of its shards.

    Shards are mapped when first touched. Safe to use from several threads.
    """

    def __init__(self, store: Store, info: StreamInfo) -> None:
        self.store: Store = store
        self.info: StreamInfo = info
        self.name: str = info.source
        self.split: str = info.split
        self.num_tokens: int = info.num_tokens
        self.num_documents: int = info.num_documents
        self.fingerprint: str = info.fingerprint
        self.dtype: np.dtype[Any] = np.dtype(store.manifest.dtype_of(info))
        shards = store.shards
        which = np.flatnonzero(shards["stream"] == store.manifest.streams.index(info))
        self._rows = which
        """The rows of its shards in the store's table of shards."""
        self.shard_documents: Any = shards["num_documents"][which]
        self.shard_tokens: Any = shards["num_tokens"][which]
        self.token_starts: NDArray[np.int64] = np.concatenate([[0], np.cumsum(self.shard_tokens, dtype=np.int64)])
        self.document_starts: NDArray[np.int64] = np.concatenate([[0], np.cumsum(self.shard_documents, dtype=np.int64)])
        self.address: NDArray[np.int64] = np.zeros(len(which), np.int64)
        """The memory address of each mapped shard's tokens; 0 for a shard that is not mapped."""
        self._mapped: dict[int, MappedShard] = {}
        self._lock = threading.Lock()
        for shard in range(min(len(which), _CHECKED_AT_OPEN)):
            store.check_shard(int(which[shard]))
        if len(which) <= 16:  # few enough to map at once, which checks more
            for shard in range(len(which)):
                self.shard(shard)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self.store).stream, (self.store, self.name, self.split)

    def shard(self, shard: int) -> MappedShard:
        """One shard, mapped."""
        mapped = self._mapped.get(shard)
        if mapped is None:
            with self._lock:
                mapped = self._mapped.get(shard)
                if mapped is None:
                    mapped = MappedShard(self.store, int(self._rows[shard]))
                    if len(self._mapped) >= _MAPPED_AT_ONCE:
                        oldest = next(iter(self._mapped))
                        self.address[oldest] = 0
                        del self._mapped[oldest]
                    self._mapped[shard] = mapped
                    self.address[shard] = mapped.address
        return mapped

    def begins_with(self, fingerprint: str, num_tokens: int) -> bool:
        """Whether this stream begins with all the tokens of another, and has grown from it.

        Reads the tokens of one shard: the one in which the other ended.
        """
        if not 0 < num_tokens <= self.num_tokens:
            return False
        shards: list[list[Any]] = []
        for shard in range(len(self.shard_tokens)):
            left = num_tokens - int(self.token_starts[shard])
            if left <= 0:
                break
            if left >= int(self.shard_tokens[shard]):
                content = self.store.shards["content_hash"][int(self._rows[shard])].as_py()
                shards.append([int(self.shard_documents[shard]), int(self.shard_tokens[shard]), content])
                continue
            mapped = self.shard(shard)
            documents = int(np.searchsorted(mapped.offsets, left))
            if int(mapped.offsets[documents]) != left:
                return False  # the other ended inside a document of this one
            digest = content_digest(mapped.tokens[:left], mapped.offsets[: documents + 1])
            shards.append([documents, left, digest])
        return stream_fingerprint(str(self.store.manifest.dtype_of(self.info)), shards) == fingerprint

    def locate(self, starts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(shard, offset inside it) of tokens of the stream, without reading them."""
        if len(self.address) == 1:
            return np.zeros(len(starts), np.int64), starts
        shard = np.searchsorted(self.token_starts, starts, side="right") - 1
        return shard, starts - self.token_starts[shard]

    def addresses(
        self, starts: NDArray[np.int64], length: int
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_], list[MappedShard]]:
        """The addresses of `length` tokens from each start, and which of these ranges do not cross into another shard.

        The third value keeps the maps alive: hold it while the addresses are used.
        """
        shard, local = self.locate(starts)
        whole = local + length <= self.shard_tokens[shard]
        touched = [0]
        if len(self.address) > 1:
            touched = np.unique(shard).tolist()
        held = [self.shard(number) for number in touched]
        return self.address[shard] + local * self.dtype.itemsize, whole, held

    def read(self, start: int, stop: int, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Tokens [start, stop) of the stream, copied; they may cross shards."""
        if out is None:
            out = np.empty(stop - start, self.dtype)
        done = 0
        for shard, first, last in self._parts(start, start + len(out)):
            out[done : done + last - first] = self.shard(shard).tokens[first:last]
            done += last - first
        return out

    def spans(self, start: int, stop: int) -> list[tuple[Path, int, int]]:
        """(file, first byte, last byte) of tokens [start, stop) of the stream."""
        size = self.dtype.itemsize
        found = []
        for shard, first, last in self._parts(start, stop):
            mapped = self.shard(shard)
            found.append((mapped.data_path, mapped.data_start + first * size, mapped.data_start + last * size))
        return found

    def expect_random_reads(self, start: int, stop: int) -> None:
        """Turn off read-ahead for tokens [start, stop): touching a row then reads that row alone."""
        for shard, _, _ in self._parts(start, stop):
            self.shard(shard).expect_random_reads()

    def unmap(self, start: int, stop: int) -> None:
        """Release the memory of tokens [start, stop) of the stream."""
        for shard, first, last in self._parts(start, stop):
            mapped = self._mapped.get(shard)
            if mapped is not None:
                mapped.unmap(first, last)

    def _parts(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(shard, first token in it, last token in it) of tokens [start, stop) of the stream."""
        while start < stop:
            shard = int(np.searchsorted(self.token_starts, start, side="right")) - 1
            base, end = int(self.token_starts[shard]), min(stop, int(self.token_starts[shard + 1]))
            yield shard, start - base, end - base
            start = end

    def document(self, number: int) -> StoredDocument:
        """One document of this stream."""
        shard, local = self._shard_of(number)
        mapped = self.shard(shard)
        return StoredDocument(
            source=self.name,
            split=self.split,
            file=self.store.file_name(int(mapped.file[local])),
            row=int(mapped.row[local]),
            tokens=mapped.tokens[mapped.offsets[local] : mapped.offsets[local + 1]],
        )

    def document_span(self, number: int) -> tuple[int, int]:
        """The tokens [start, stop) of one document."""
        shard, local = self._shard_of(number)
        base, offsets = int(self.token_starts[shard]), self.shard(shard).offsets
        return base + int(offsets[local]), base + int(offsets[local + 1])

    def spans_of(self, number: int) -> dict[str, NDArray[Any]]:
        """The spans of one document, by field, in a stream that has spans."""
        shard, local = self._shard_of(number)
        spans = self.shard(shard).spans
        assert spans is not None
        starts, fields = spans
        return {name: values[starts[local] : starts[local + 1]] for name, values in fields.items()}

    def _shard_of(self, document: int) -> tuple[int, int]:
        """(shard, number inside it) of a document."""
        shard = int(np.searchsorted(self.document_starts, document, side="right")) - 1
        return shard, document - int(self.document_starts[shard])

    def document_borders(self) -> NDArray[np.int64]:
        """The start of each document in the stream, and the end of the last one. Raises if they are not in order."""
        parts = []
        for shard, base in enumerate(self.token_starts[:-1].tolist()):
            offsets = self.shard(shard).offsets
            if offsets[0] != 0 or offsets[-1] != self.shard_tokens[shard] or (np.diff(offsets) < 0).any():
                path, remedy = self.shard(shard).data_path, self.store.manifest.repair
                raise StoreError("the borders between documents are not in order", file=path, remedy=remedy)
            parts.append(offsets[:-1].astype(np.int64) + base)
        return np.concatenate([*parts, self.token_starts[-1:]])

    @cached_property
    def has_spans(self) -> bool:
        """Whether the documents are conversations, with spans that describe their tokens."""
        return bool(len(self.address)) and self.shard(0).spans is not None

    def token_spans(self) -> Spans:
        """The spans of all documents, from all shards."""
        found = [spans for shard in range(len(self.address)) if (spans := self.shard(shard).spans) is not None]
        if len(found) == 1:
            return found[0]
        counts = np.cumsum([0, *(int(starts[-1]) for starts, _ in found)])
        bases = counts[:-1].tolist()
        starts = [starts[:-1].astype(np.int64) + base for (starts, _), base in zip(found, bases, strict=True)]
        fields = {name: np.concatenate([part[name] for _, part in found]) for name in found[0][1]}
        return np.concatenate([*starts, counts[-1:]]), fields

    def documents_in(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """(document, start, stop) of every document that has tokens in [start, stop) of the stream, in order."""
        found: list[tuple[int, int, int]] = []
        for shard, first, last in self._parts(start, stop):
            offsets, base = self.shard(shard).offsets, int(self.token_starts[shard])
            begin = int(np.searchsorted(offsets, first, side="right")) - 1
            end = int(np.searchsorted(offsets, last, side="left"))
            found += [
                (int(self.document_starts[shard]) + d, base + int(offsets[d]), base + int(offsets[d + 1]))
                for d in range(begin, end)
                if offsets[d] < offsets[d + 1]
            ]
        return found

    def borders(self, start: int, stop: int) -> NDArray[np.int64]:
        """The starts of documents in [start, stop) of the stream."""
        return np.array([begin for _, begin, _ in self.documents_in(start, stop) if begin >= start], np.int64)

    def find(self, file: int, row: int | None) -> list[int]:
        """Documents that came from a raw file (and row)."""
        found: list[int] = []
        for shard in range(len(self.address)):
            mapped = self.shard(shard)
            hit = mapped.file == file
            if row is not None:
                hit &= mapped.row == row
            found += (np.flatnonzero(hit) + int(self.document_starts[shard])).tolist()
        return found
