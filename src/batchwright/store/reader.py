"""Open a store: its manifest and tables, documents by number, token streams by name."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from numpy.typing import ArrayLike, NDArray

from batchwright.base.checks import local_path
from batchwright.base.errors import SpecError, StoreError
from batchwright.base.files import inside, shared
from batchwright.base.fingerprint import fingerprint_file
from batchwright.base.words import suggest
from batchwright.store.adopted import AdoptedFile, AdoptedRange, adopted_files
from batchwright.store.layout import Manifest, current_version, is_adopted, version_folder
from batchwright.store.stream import MappedShard, StoredDocument, TokenStream

__all__ = ["Store", "open_store"]


def open_store(path: str | os.PathLike[str], *, version: str | None = None, verify: bool = False) -> Store:
    """Open the store in the folder `path`, at its current version (or at an older one that is still there).

    Opening checks that every shard exists and has its size and its footer (of the first 4,096 shards; those of a larger
    store are checked when touched). `verify=True` also reads everything and checks the hashes. The version stays
    readable while the store is open, whatever is baked beside it.
    """
    store = Store(path, version=version, verify=verify)
    store.check()
    return store


class Store:
    """A complete version of a store. `path`, `version` and `verify` are those of `open_store`."""

    version: str
    manifest: Manifest

    def __init__(self, path: str | os.PathLike[str], *, version: str | None = None, verify: bool = False) -> None:
        self.path: Path = Path(os.path.abspath(local_path(path=path)))  # it stays open when the process changes folder
        self.version, in_use, self.manifest = _take(self.path, version)
        self.folder: Path = version_folder(self.path, self.version)
        weakref.finalize(self, os.close, in_use)
        self._streams: dict[tuple[str, str], TokenStream] = {}
        self._shards: dict[str, Any] | None = None
        self._files: dict[str, Any] | None = None
        self._adopted: list[AdoptedFile] | None = None
        self._tokenizer: Any = None
        if verify:
            from batchwright.store.verify import verify_store

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
    def num_bytes(self) -> int:
        """Of the shards, and of the files that they adopted."""
        adopted = sum(file.num_bytes for file in self.adopted)
        return int(self.shards["num_bytes"].sum()) + adopted

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
        """The tokens of document `index`: read-only, without a copy."""
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
                    remedy="recipe.holdout(0.005), and bake again"
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

    def shard_path(self, row: int) -> Path:
        """The file of the shard in a row of the table of shards."""
        return inside(self.folder, self.shards["file"][row].as_py())

    @property
    def adopted(self) -> list[AdoptedFile]:
        """The user's own files that hold the tokens, by their number in `files`; none for a store that was baked."""
        if self._adopted is None:
            self._adopted = adopted_files(self) if self.manifest.adopted else []
        return self._adopted

    def _adopted_range(self, row: int) -> AdoptedRange | None:
        if not self.manifest.adopted:
            return None
        return AdoptedRange(self.adopted[int(self.shards["data_file"][row])], int(self.shards["data_offset"][row]))

    def check_shard(self, row: int) -> None:
        """See that the shard in `row` of the table is there, without mapping it: exists, has its size and its footer;
        adopted: is unchanged."""
        MappedShard.check(self.shard_path(row), int(self.shards["num_bytes"][row]), self.manifest.repair)
        adopted = self._adopted_range(row)
        if adopted is not None:
            adopted.file.find()

    def map_shard(self, row: int) -> MappedShard:
        """The shard in a row of the table of shards, mapped; it must be what the table says."""
        shards = self.shards
        return MappedShard(
            self.shard_path(row),
            int(shards["num_documents"][row]),
            int(shards["num_tokens"][row]),
            int(shards["num_bytes"][row]),
            self.manifest.dtype_of(self.manifest.streams[int(shards["stream"][row])]),
            self._adopted_range(row),
        )

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

    @property
    def texts(self) -> dict[str, Any] | None:
        """The table of the texts that documents were made of, as mapped columns; None where the store has none."""
        return self._table("texts.arrow", self.manifest.texts_hash) if self.manifest.texts_hash else None

    def _table(self, name: str, expected_hash: str) -> dict[str, Any]:
        import pyarrow as pa

        from batchwright.columns.arrays import arrow_to_numpy

        path = self.folder / name
        try:
            if fingerprint_file(path) != expected_hash:
                raise StoreError("a table of this store was altered", file=path, remedy=self.manifest.repair)
            with pa.memory_map(str(path)) as file:
                batch = pa.ipc.open_file(file).get_batch(0)
        except FileNotFoundError:
            raise StoreError("a table of this store is missing", file=path, remedy=self.manifest.repair) from None
        return {
            column: arrow_to_numpy(batch.column(column))
            if pa.types.is_integer(batch.column(column).type)
            else batch.column(column)
            for column in batch.schema.names
        }

    def file_name(self, number: int) -> str:
        """The raw file that a document's `file` number means."""
        paths = self.files["path"]
        if not 0 <= number < len(paths):
            raise StoreError(
                f"a document of this store came from file {number}, of {len(paths)}",
                file=self.folder,
                remedy=self.manifest.repair,
            )
        return str(paths[number])

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that the store keeps: enough to decode, and for most to encode."""
        if self._tokenizer is None:
            from batchwright.prepare.tokenizers import load_tokenizer

            self._tokenizer = load_tokenizer(self.folder / "tokenizer.json")
        return self._tokenizer

    def decode(self, tokens: ArrayLike) -> str | None:
        """Text of some tokens; None where the tokenizer cannot decode."""
        text: str | None = self.tokenizer.decode(tokens)
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
        if wanted is None and is_adopted(path):
            raise StoreError(
                f"{path} is not complete: adopting has not finished", folder=path, remedy="the same `batchwright adopt`"
            )
        if wanted is None:
            raise StoreError(
                f"{path} is not complete: its first bake has not finished",
                folder=path,
                remedy="run the same bake again: it continues what is there",
            )
        folder = version_folder(path, wanted)
        try:
            in_use = shared(
                folder / "manifest.json"
            )  # before it is read: `batchwright gc` then leaves the version alone
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
