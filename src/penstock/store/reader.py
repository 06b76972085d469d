"""Open a store: documents by number, token streams by name, all memory-mapped and read only when touched."""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import SpecError, StoreError
from penstock.files import inside, shared
from penstock.fingerprint import fingerprint_file
from penstock.spec import suggest
from penstock.store.layout import Manifest, StreamInfo, current_version, version_folder

__all__ = ["MappedShard", "Store", "StoredDocument", "TokenStream", "open_store"]

_CHECKED_AT_OPEN = 4096
"""Shards whose existence and size are checked when a store opens; the rest of a larger store is when touched."""
_MAPPED_AT_ONCE = 16_384
"""Shards mapped at once: the kernel allows about 65,000 maps per process."""


def open_store(path: str | os.PathLike[str], *, version: str | None = None, verify: bool = False) -> Store:
    """Open a store at its current version (or at an older one that is still there).

    Opening checks that every shard exists and has its size and its footer (of the first 4,096 shards; those of a larger
    store are checked when touched). `verify=True` also reads everything and checks the hashes. The version stays
    readable while the store is open, whatever is baked beside it.
    """
    store = Store(path, version=version, verify=verify)
    store.check()
    return store


@dataclass(frozen=True, slots=True)
class StoredDocument:
    """One document of a store."""

    source: str
    split: str
    file: str
    row: int
    tokens: NDArray[Any]
    """Read-only, straight from the mapped file."""


class Store:
    """A complete version of a store. See `open_store`."""

    def __init__(self, path: str | os.PathLike[str], *, version: str | None = None, verify: bool = False) -> None:
        self.path = Path(os.path.abspath(os.path.expanduser(path)))  # it stays open when the process changes folder
        self.version, in_use, self.manifest = _take(self.path, version)
        self.folder = version_folder(self.path, self.version)
        weakref.finalize(self, os.close, in_use)
        self._streams: dict[tuple[str, str], TokenStream] = {}
        self._shards: dict[str, Any] | None = None
        self._files: dict[str, Any] | None = None
        self._decoder: Any = None
        if verify:
            from penstock.store.verify import verify_store

            for damage in verify_store(self):
                raise damage.error()

    def check(self) -> None:
        """See that the shards exist and have their size and footer; says which one does not."""
        for info in self.manifest.streams:
            self.stream(info.source, info.split)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.path, self.version)  # without maps: another process maps for itself

    @property
    def names(self) -> list[str]:
        """The sources, in recipe order."""
        return list(dict.fromkeys(stream.source for stream in self.manifest.streams))

    @property
    def splits(self) -> list[str]:
        return list(dict.fromkeys(stream.split for stream in self.manifest.streams))

    @property
    def fingerprint(self) -> str:
        """Names the content, wherever the store lies."""
        return self.manifest.fingerprint

    @property
    def num_tokens(self) -> int:
        return sum(stream.num_tokens for stream in self.manifest.streams)

    @property
    def num_rows(self) -> int:
        """Documents."""
        return sum(stream.num_documents for stream in self.manifest.streams)

    @property
    def vocab_size(self) -> int:
        """Every token id is below this."""
        return int(self.manifest.tokenizer["vocab_size"])

    @property
    def report(self) -> dict[str, Any]:
        """What the bake read, kept and dropped, and why."""
        return self.manifest.report

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> StoredDocument:
        """Document `index`, counting through sources and splits in manifest order."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"document {index} of a store with {len(self):,} documents")
        index %= len(self)
        for info in self.manifest.streams:
            if index < info.num_documents:
                return self.stream(info.source, info.split).document(index)
            index -= info.num_documents
        raise AssertionError

    def rows(self) -> Iterator[StoredDocument]:
        return (self[i] for i in range(len(self)))

    def tokens(self, index: int) -> NDArray[Any]:
        """The tokens of one document: read-only, without a copy."""
        return self[index].tokens

    def stream(self, source: str, split: str = "train") -> TokenStream:
        """The documents of one source and split, end to end."""
        key = (source, split)
        if key not in self._streams:
            infos = [s for s in self.manifest.streams if (s.source, s.split) == key]
            if not infos:
                known = ", ".join(f"{s.source} ({s.split})" for s in self.manifest.streams)
                holdout = split not in self.splits and split == "val"
                raise SpecError(
                    f"{self.path} has no {'split' if holdout else 'source'} {split if holdout else source!r}",
                    there=known,
                    remedy="recipe.holdout(0.005) and bake again"
                    if holdout
                    else f"{suggest(source, self.names) or self.names[0]!r}",
                )
            self._streams[key] = TokenStream(self, infos[0])
        return self._streams[key]

    @property
    def shards(self) -> dict[str, Any]:
        """The table of shards, as columns."""
        if self._shards is None:
            self._shards = self._table("shards.arrow", self.manifest.shards_hash)
        return self._shards

    @property
    def files(self) -> dict[str, Any]:
        """The table of raw files, as columns."""
        if self._files is None:
            self._files = self._table("files.arrow", self.manifest.files_hash)
        return self._files

    @property
    def units(self) -> dict[str, Any]:
        """The table of units that this version was joined from, as columns: for the next bake."""
        return self._table("units.arrow", self.manifest.units_hash)

    def _table(self, name: str, expected_hash: str) -> dict[str, Any]:
        import pyarrow as pa

        path = self.folder / name
        try:
            if fingerprint_file(path) != expected_hash:
                raise StoreError("a table of this store was altered", file=path, remedy=_REBAKE)
            with pa.memory_map(str(path)) as file:
                batch = pa.ipc.open_file(file).get_batch(0)
        except FileNotFoundError:
            raise StoreError("a table of this store is missing", file=path, remedy=_REBAKE) from None
        return {
            column: batch.column(column).to_numpy(zero_copy_only=False)
            if pa.types.is_integer(batch.column(column).type)
            else batch.column(column)
            for column in batch.schema.names
        }

    def file_name(self, number: int) -> str:
        """The raw file that a document's `file` number means."""
        paths = self.files["path"]
        if not 0 <= number < len(paths):
            raise StoreError(
                f"a document of this store came from file {number}, of {len(paths)}", file=self.folder, remedy=_REBAKE
            )
        return str(paths[number])

    def decode(self, tokens: Any) -> str | None:
        """Text of some tokens; None where the tokenizer cannot decode."""
        if self._decoder is None:
            from penstock.prepare.tokenizers import load_tokenizer

            self._decoder = load_tokenizer(self.folder / "tokenizer.json")
        text: str | None = self._decoder.decode(tokens)
        return text

    def __repr__(self) -> str:
        tokenizer = self.manifest.tokenizer
        lines = [
            f"Store {self.path.name} ({self.fingerprint[:7]}): {self.num_rows:,} documents, "
            f"{self.num_tokens:,} tokens, {self.manifest.token_dtype}, "
            f"tokenizer {tokenizer['name']} ({tokenizer['vocab_size']:,} ids)"
        ]
        for i, s in enumerate(self.manifest.streams):
            branch = "└─" if i == len(self.manifest.streams) - 1 else "├─"
            lines.append(
                f"{branch} {s.source} ({s.split})  {s.num_documents:,} documents, {s.num_tokens:,} tokens, "
                f"{s.num_shards} shard{'s' if s.num_shards != 1 else ''}"
            )
        return "\n".join(lines)


def _take(path: Path, version: str | None) -> tuple[str, int, Manifest]:
    """(version, descriptor that keeps it from being removed, its manifest)."""
    for attempt in range(3):
        wanted = version or current_version(path)
        if wanted is None:
            raise StoreError(
                f"{path} is not complete: its first bake has not finished",
                folder=path,
                remedy="run the same bake again: it continues what is there",
            )
        folder = version_folder(path, wanted)
        try:
            in_use = shared(folder / "manifest.json")  # before it is read: `penstock gc` then leaves the version alone
        except (FileNotFoundError, NotADirectoryError):
            if version is None and attempt < 2:
                continue  # replaced and removed since the pointer was read
            Manifest.load(folder)  # says what is missing
            raise
        try:
            return wanted, in_use, Manifest.load(folder)
        except BaseException:
            os.close(in_use)
            raise
    raise AssertionError


def _reopen(path: Path, version: str) -> Store:
    return Store(path, version=version)


def _stream_of(store: Store, name: str, split: str) -> TokenStream:
    return store.stream(name, split)


_REBAKE = "bake again, or copy the store again from where it came"


class MappedShard:
    """One shard, mapped: `tokens` end to end, `offsets` between documents, and where each came from."""

    __slots__ = ("_map", "address", "file", "offsets", "row", "tokens")

    def __init__(self, path: Path, num_documents: int, num_tokens: int, num_bytes: int, dtype: str) -> None:
        import pyarrow as pa

        self.check(path, num_bytes)
        with open(path, "rb") as raw:
            self._map = mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            reader = pa.ipc.open_file(pa.py_buffer(self._map))
            batch = reader.get_batch(0)
            batch.validate()  # sizes only: no number in a damaged file may lead outside of the map
            lists = batch.column("tokens")
            self.tokens: NDArray[Any] = lists.values.to_numpy(zero_copy_only=True)
            self.offsets: NDArray[np.int32] = lists.offsets.to_numpy(zero_copy_only=True)
            self.file: NDArray[np.int32] = batch.column("file").to_numpy(zero_copy_only=True)
            self.row: NDArray[np.int64] = batch.column("row").to_numpy(zero_copy_only=True)
        except (pa.ArrowException, OSError, KeyError, IndexError, AttributeError, TypeError, ValueError) as error:
            raise StoreError(
                "this shard is not readable", file=path, reason=(str(error).splitlines() or [""])[0], remedy=_REBAKE
            ) from None
        if len(self.tokens) != num_tokens or len(self.file) != num_documents or self.tokens.dtype != dtype:
            raise StoreError(
                "this shard is not what the manifest says",
                file=path,
                expected=f"{num_documents:,} documents, {num_tokens:,} tokens of {dtype}",
                found=f"{len(self.file):,} documents, {len(self.tokens):,} tokens of {self.tokens.dtype}",
                remedy=_REBAKE,
            )
        self.address = self.tokens.ctypes.data

    @staticmethod
    def check(path: Path, num_bytes: int) -> None:
        """See that a shard exists and has its size and its footer, without mapping it."""
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise StoreError("a shard of this store is missing", file=path, remedy=_REBAKE) from None
        if size != num_bytes:
            raise StoreError(
                "a shard of this store was truncated or altered",
                file=path,
                expected=f"{num_bytes:,} bytes",
                found=f"{size:,} bytes",
                remedy=_REBAKE,
            )
        with open(path, "rb") as file:
            file.seek(max(size - len(_ARROW_MAGIC), 0))
            if file.read() != _ARROW_MAGIC:
                raise StoreError("a shard of this store has no Arrow footer", file=path, remedy=_REBAKE)


_ARROW_MAGIC = b"ARROW1"


class TokenStream:
    """The documents of one source and split, end to end: token i of the stream lies in some shard.

    Shards are mapped when first touched. Safe to use from several threads.
    """

    def __init__(self, store: Store, info: StreamInfo) -> None:
        self.store, self.info = store, info
        self.name, self.split = info.source, info.split
        self.num_tokens, self.num_documents = info.num_tokens, info.num_documents
        self.fingerprint = info.fingerprint
        self.dtype = np.dtype(store.manifest.token_dtype)
        shards = store.shards
        which = np.flatnonzero(shards["stream"] == store.manifest.streams.index(info))
        self._file = [shards["file"][int(i)].as_py() for i in which] if len(which) <= _CHECKED_AT_OPEN else None
        self._which = which
        self._num_bytes = shards["num_bytes"][which]
        self.shard_documents = shards["num_documents"][which]
        self.shard_tokens = shards["num_tokens"][which]
        self.token_starts = np.concatenate([[0], np.cumsum(self.shard_tokens)]).astype(np.int64)
        self.document_starts = np.concatenate([[0], np.cumsum(self.shard_documents)]).astype(np.int64)
        self.address = np.zeros(len(which), np.int64)
        """Where each mapped shard's tokens lie in memory; 0 for a shard that is not mapped."""
        self._mapped: dict[int, MappedShard] = {}
        self._lock = threading.Lock()
        for shard in range(min(len(which), _CHECKED_AT_OPEN)):
            MappedShard.check(self.shard_path(shard), int(self._num_bytes[shard]))
        if 0 < len(which) <= 16:  # footers too, where that costs nothing to speak of
            for shard in range(len(which)):
                self.shard(shard)

    def __reduce__(self) -> tuple[Any, ...]:
        return _stream_of, (self.store, self.name, self.split)

    def shard_path(self, shard: int) -> Path:
        name = (
            self._file[shard] if self._file is not None else self.store.shards["file"][int(self._which[shard])].as_py()
        )
        return inside(self.store.folder, name)

    def shard(self, shard: int) -> MappedShard:
        """One shard, mapped."""
        mapped = self._mapped.get(shard)
        if mapped is None:
            with self._lock:
                mapped = self._mapped.get(shard)
                if mapped is None:
                    mapped = MappedShard(
                        self.shard_path(shard),
                        int(self.shard_documents[shard]),
                        int(self.shard_tokens[shard]),
                        int(self._num_bytes[shard]),
                        self.dtype.name,
                    )
                    if len(self._mapped) >= _MAPPED_AT_ONCE:
                        oldest = next(iter(self._mapped))
                        self.address[oldest] = 0
                        del self._mapped[oldest]
                    self._mapped[shard] = mapped
                    self.address[shard] = mapped.address
        return mapped

    def locate(self, starts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(shard, offset inside it) of tokens of the stream. Touches no data."""
        if len(self.address) == 1:
            return np.zeros(len(starts), np.int64), starts
        shard = np.searchsorted(self.token_starts, starts, side="right") - 1
        return shard, starts - self.token_starts[shard]

    def addresses(
        self, starts: NDArray[np.int64], length: int
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_], list[MappedShard]]:
        """Where `length` tokens from each start lie in memory, and which of them do not cross into another shard.

        The third value keeps the maps alive: hold it while the addresses are used.
        """
        shard, local = self.locate(starts)
        whole = local + length <= self.shard_tokens[shard]
        touched = [0] if len(self.address) == 1 else np.unique(shard).tolist()
        held = [self.shard(number) for number in touched]
        return self.address[shard] + local * self.dtype.itemsize, whole, held

    def read(self, start: int, stop: int, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Tokens [start, stop) of the stream, copied; they may cross shards."""
        if out is None:
            out = np.empty(stop - start, self.dtype)
        done = 0
        while done < len(out):
            shard, local = (int(x[0]) for x in self.locate(np.array([start + done])))
            piece = self.shard(shard).tokens[local : local + len(out) - done]
            out[done : done + len(piece)] = piece
            done += len(piece)
        return out

    def document(self, number: int) -> StoredDocument:
        """One document of this stream."""
        shard = int(np.searchsorted(self.document_starts, number, side="right")) - 1
        local = number - int(self.document_starts[shard])
        mapped = self.shard(shard)
        return StoredDocument(
            source=self.name,
            split=self.split,
            file=self.store.file_name(int(mapped.file[local])),
            row=int(mapped.row[local]),
            tokens=mapped.tokens[mapped.offsets[local] : mapped.offsets[local + 1]],
        )

    def document_span(self, number: int) -> tuple[int, int]:
        """Tokens [start, stop) of the stream that a document fills."""
        shard = int(np.searchsorted(self.document_starts, number, side="right")) - 1
        local = number - int(self.document_starts[shard])
        base, offsets = int(self.token_starts[shard]), self.shard(shard).offsets
        return base + int(offsets[local]), base + int(offsets[local + 1])

    def documents_in(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """(document, start, stop) of every document that has tokens in [start, stop) of the stream, in order."""
        found: list[tuple[int, int, int]] = []
        while start < stop:
            shard, local = (int(x[0]) for x in self.locate(np.array([start])))
            offsets, base = self.shard(shard).offsets, int(self.token_starts[shard])
            first = int(np.searchsorted(offsets, local, side="right")) - 1
            last = int(np.searchsorted(offsets, min(stop - base, int(self.shard_tokens[shard])), side="left"))
            found += [
                (int(self.document_starts[shard]) + d, base + int(offsets[d]), base + int(offsets[d + 1]))
                for d in range(first, last)
                if offsets[d] < offsets[d + 1]
            ]
            start = int(self.token_starts[shard + 1])
        return found

    def borders(self, start: int, stop: int) -> NDArray[np.int64]:
        """Where documents begin in [start, stop) of the stream."""
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
