"""An open store: its manifest and tables, documents by number, token streams by name."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from numpy.typing import ArrayLike, NDArray

from batchwright.base.checks import local_path
from batchwright.base.errors import SpecError, StoreError
from batchwright.base.files import inside, shared
from batchwright.base.fingerprint import fingerprint_file
from batchwright.base.words import counted, suggest
from batchwright.store.adopted import AdoptedFile, AdoptedRange
from batchwright.store.layout import Manifest, current_version, is_adopted, version_folder
from batchwright.store.stream import MappedShard, StoredDocument, TokenStream, check_shard_file

__all__ = ["Store"]


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
        self.path: Path = Path(os.path.abspath(local_path(path=path)))  # absolute: the process may change its folder
        self.version, in_use, self.manifest = _open_version(self.path, version)
        self.folder: Path = version_folder(self.path, self.version)
        weakref.finalize(self, os.close, in_use)
        self._streams: dict[tuple[str, str], TokenStream] = {}
        self._undamaged: dict[int, MappedShard | None] = {}
        if verify:
            from batchwright.store.versions import verify_store

            for damage in verify_store(self):
                raise damage.error()

    def check(self) -> None:
        """Raise for a shard that is missing or has another size, or no footer."""
        for info in self.manifest.streams:
            self.stream(info.source, info.split)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Store, version=self.version), (self.path,)  # without maps: another process makes its own

    @property
    def names(self) -> list[str]:
        """The sources, in recipe order."""
        return list(dict.fromkeys(stream.source for stream in self.manifest.streams))

    @property
    def splits(self) -> list[str]:
        return list(dict.fromkeys(stream.split for stream in self.manifest.streams))

    @property
    def fingerprint(self) -> str:
        """The identity of the content, wherever the store is."""
        return self.manifest.fingerprint

    @property
    def num_tokens(self) -> int:
        return sum(stream.num_tokens for stream in self.manifest.streams)

    @property
    def num_bytes(self) -> int:
        """Bytes of the shards, and of the files that they adopted."""
        adopted = sum(file.num_bytes for file in self.adopted)
        return int(self.shards["num_bytes"].sum()) + adopted

    @property
    def num_rows(self) -> int:
        """The number of documents."""
        return sum(stream.num_documents for stream in self.manifest.streams)

    @property
    def vocab_size(self) -> int:
        """Every token id is below this."""
        return int(self.manifest.tokenizer["vocab_size"])

    @property
    def report(self) -> dict[str, Any]:
        """The rows that the bake read, kept and dropped, with reasons."""
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
            info = next((info for info in self.manifest.streams if (info.source, info.split) == key), None)
            if info is None:
                raise self._no_stream(source, split)
            self._streams[key] = TokenStream(self, info)
        return self._streams[key]

    def _no_stream(self, source: str, split: str) -> SpecError:
        there = ", ".join(f"{info.source} ({info.split})" for info in self.manifest.streams)
        if split == "val" and split not in self.splits:
            remedy = "recipe.holdout(0.005), and bake again"
            return SpecError(f"{self.path} has no split {split!r}", there=there, remedy=remedy)
        remedy = repr(suggest(source, self.names) or self.names[0])
        return SpecError(f"{self.path} has no source {source!r}", there=there, remedy=remedy)

    @cached_property
    def shards(self) -> dict[str, Any]:
        """The table of shards, as columns."""
        return self._table("shards.arrow", self.manifest.shards_hash)

    def shard_path(self, row: int) -> Path:
        """The file of the shard in a row of the table of shards."""
        return inside(self.folder, self.shards["file"][row].as_py())

    @cached_property
    def adopted(self) -> list[AdoptedFile]:
        """The user's own files that hold the tokens, by their number in `files`; none for a store that was baked."""
        if not self.manifest.adopted:
            return []
        columns = [self.files[name].tolist() for name in ("path", "beside", "num_bytes", "modified_ns")]
        return [AdoptedFile(self.path, *facts) for facts in zip(*columns, strict=True)]

    def adopted_range(self, row: int) -> AdoptedRange | None:
        """The place of the tokens of the shard in `row` of the table, if they are in a file of the user."""
        if not self.manifest.adopted:
            return None
        return AdoptedRange(self.adopted[int(self.shards["data_file"][row])], int(self.shards["data_offset"][row]))

    def check_shard(self, row: int) -> None:
        """Check the shard in `row` of the table without mapping it: existence, size, footer; its adopted file too."""
        check_shard_file(self.shard_path(row), int(self.shards["num_bytes"][row]), self.manifest.repair)
        adopted = self.adopted_range(row)
        if adopted is not None:
            adopted.file.find()

    def is_as_written(self, row: int) -> bool:
        """Whether the shard in `row` of the table has the bytes of its hash. Reads them all."""
        return bool(fingerprint_file(self.shard_path(row)) == self.shards["file_hash"][row].as_py())

    def undamaged_shard(self, row: int) -> MappedShard | None:
        """The shard in a row of the table, mapped; None if it is damaged or missing. Reads and compares each once."""
        if row not in self._undamaged:
            self._undamaged[row] = None
            with contextlib.suppress(StoreError, OSError):
                mapped = MappedShard(self, row)
                if self.is_as_written(row):
                    self._undamaged[row] = mapped
        return self._undamaged[row]

    @cached_property
    def files(self) -> dict[str, Any]:
        """The table of raw files, as columns."""
        return self._table("files.arrow", self.manifest.files_hash)

    @property
    def units(self) -> dict[str, Any]:
        """The table of units that this version was joined from, as columns: for the next bake."""
        return self._table("units.arrow", self.manifest.units_hash)

    @property
    def texts(self) -> dict[str, Any] | None:
        """The table of the documents' texts, as mapped columns; None if the store has none."""
        if not self.manifest.texts_hash:
            return None
        return self._table("texts.arrow", self.manifest.texts_hash)

    def _table(self, name: str, expected_hash: str) -> dict[str, Any]:
        import pyarrow as pa

        from batchwright.columns.arrow import arrow_to_numpy

        path = self.folder / name
        try:
            if fingerprint_file(path) != expected_hash:
                raise StoreError("a table of this store was altered", file=path, remedy=self.manifest.repair)
            with pa.memory_map(str(path)) as file:
                batch = pa.ipc.open_file(file).get_batch(0)
        except FileNotFoundError:
            raise StoreError("a table of this store is missing", file=path, remedy=self.manifest.repair) from None
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        numbers = {name: arrow_to_numpy(column) for name, column in columns.items() if pa.types.is_integer(column.type)}
        return columns | numbers

    def file_name(self, number: int) -> str:
        """The raw file of a document's `file` number."""
        paths = self.files["path"]
        if not 0 <= number < len(paths):
            what = f"a document of this store came from file {number}, of {len(paths)}"
            raise StoreError(what, file=self.folder, remedy=self.manifest.repair)
        return str(paths[number])

    @cached_property
    def tokenizer(self) -> Any:
        """The store's copy of the tokenizer. It can decode, and for most tokenizers encode."""
        from batchwright.prepare.tokenizers import load_tokenizer

        return load_tokenizer(self.folder / "tokenizer.json")

    def decode(self, tokens: ArrayLike) -> str | None:
        """The text of some tokens; None if the tokenizer cannot decode."""
        text: str | None = self.tokenizer.decode(tokens)
        return text

    def __repr__(self) -> str:
        documents = f"{self.num_rows:,} documents, {self.num_tokens:,} tokens, {self.manifest.token_dtype}"
        tokenizer = f"tokenizer {self.manifest.tokenizer['name']} ({self.vocab_size:,} ids)"
        lines = [f"Store {self.path.name} ({self.fingerprint[:7]}): {documents}, {tokenizer}"]
        for info in self.manifest.streams:
            documents = f"{info.num_documents:,} documents, {info.num_tokens:,} tokens"
            lines.append(f"├─ {info.source} ({info.split})  {documents}, {counted(info.num_shards, 'shard')}")
        lines[-1] = lines[-1].replace("├─", "└─", 1)
        return "\n".join(lines)


def _open_version(path: Path, version: str | None) -> tuple[str, int, Manifest]:
    """(version, descriptor that protects it from garbage collection, its manifest)."""
    for _ in range(3):  # the version may be replaced and removed after the pointer was read
        wanted = version or current_version(path)
        if wanted is None:
            raise _not_complete(path)
        manifest = version_folder(path, wanted) / "manifest.json"
        try:
            in_use = shared(manifest)  # before it is read: garbage collection then leaves the version alone
        except (FileNotFoundError, NotADirectoryError):
            continue
        try:
            return wanted, in_use, Manifest.load(manifest.parent)
        except BaseException:
            os.close(in_use)
            raise
    Manifest.load(manifest.parent)  # raises with the reason
    raise StoreError(f"{path} is being replaced again and again", folder=path, remedy="open it again")


def _not_complete(path: Path) -> StoreError:
    what, remedy = "its first bake has not finished", "run the same bake again: it continues where it stopped"
    if is_adopted(path):
        what, remedy = "adopting has not finished", "the same `batchwright adopt`"
    return StoreError(f"{path} is not complete: {what}", folder=path, remedy=remedy)
