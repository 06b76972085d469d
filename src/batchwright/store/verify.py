"""Check every byte of a store against the hashes in its manifest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from batchwright.base.errors import StoreError
from batchwright.base.fingerprint import fingerprint_file
from batchwright.store.layout import REBAKE, stream_fingerprint
from batchwright.store.reader import Store
from batchwright.store.stream import MappedShard

__all__ = ["CheckedShards", "Damage", "verify_store"]


@dataclass(frozen=True, slots=True)
class Damage:
    """One file of a store that is not what the manifest says."""

    file: Path
    what: str
    remedy: str = REBAKE

    def error(self) -> StoreError:
        return StoreError(self.what, file=self.file, remedy=self.remedy)


def verify_store(store: Store) -> Iterator[Damage]:
    """Every damaged file of a store: missing, truncated, altered, or with an id outside the vocabulary.

    Of adopted tokens, the user's own files are read too.
    """
    for damage in _damages(store):
        yield replace(damage, remedy=store.manifest.repair)


def _damages(store: Store) -> Iterator[Damage]:
    yield from _tokenizer(store)
    for table in ("files", "units", "texts", "shards"):
        try:
            getattr(store, table)
        except StoreError as error:
            yield Damage(Path(str(error.where["file"])), error.headline)
            if table == "shards":
                return  # the table says which shards there are
    yield from _totals(store)
    damaged = list(_adopted(store))
    yield from damaged
    if damaged:
        return  # whatever the shards over them are, it was said
    for i in range(len(store.shards["num_bytes"])):
        yield from _shard(store, i)


def _tokenizer(store: Store) -> Iterator[Damage]:
    path = store.folder / "tokenizer.json"
    try:
        if fingerprint_file(path) != store.manifest.tokenizer_hash:
            yield Damage(path, "the tokenizer of this store was altered: its hash differs")
    except FileNotFoundError:
        yield Damage(path, "the tokenizer of this store is missing")


def _adopted(store: Store) -> Iterator[Damage]:
    for number, file in enumerate(store.adopted):
        try:
            path = file.find()
            is_as_adopted = fingerprint_file(path) == store.files["content_hash"][number].as_py()
        except StoreError as error:
            changed = f": {error.where['changed']}" if "changed" in error.where else ""
            yield Damage(Path(str(error.where["file"])), error.headline + changed)
            continue
        if not is_as_adopted:
            yield Damage(path, "a file that this store adopted was altered: its hash differs")


def _totals(store: Store) -> Iterator[Damage]:
    """What the manifest says of a stream must follow from the stream's shards."""
    shards, manifest = store.shards, store.manifest
    for number, info in enumerate(manifest.streams):
        mine = np.flatnonzero(shards["stream"] == number)
        said = (info.num_documents, info.num_tokens, info.num_shards, info.fingerprint)
        content = shards["content_hash"].take(mine).to_pylist()
        counts = zip(shards["num_documents"][mine].tolist(), shards["num_tokens"][mine].tolist(), content, strict=True)
        found = (
            int(shards["num_documents"][mine].sum()),
            int(shards["num_tokens"][mine].sum()),
            len(mine),
            stream_fingerprint(manifest.dtype_of(info), [list(shard) for shard in counts]),
        )
        if said != found:
            yield Damage(store.folder / "manifest.json", f"the manifest was altered: stream {info.source!r} differs")


def _shard(store: Store, i: int) -> Iterator[Damage]:
    shards, manifest = store.shards, store.manifest
    path = store.shard_path(i)
    try:
        store.check_shard(i)
        if fingerprint_file(path) != shards["file_hash"][i].as_py():
            yield Damage(path, "a shard of this store was altered: its hash differs")
            return
        mapped = store.map_shard(i)
    except StoreError as error:
        yield Damage(path, error.headline)
        return
    vocab_size = int(manifest.tokenizer["vocab_size"])
    if mapped.tokens.dtype.kind == "i" and len(mapped.tokens) and int(mapped.tokens.min()) < 0:
        yield Damage(path, f"token id {int(mapped.tokens.min())} is negative")
    if len(mapped.tokens) and int(mapped.tokens.max()) >= vocab_size:
        yield Damage(path, f"token id {int(mapped.tokens.max())} is outside the vocabulary of {vocab_size}")
    if mapped.offsets[0] != 0 or mapped.offsets[-1] != len(mapped.tokens) or (np.diff(mapped.offsets) < 0).any():
        yield Damage(path, "the borders between documents are not in order")


class CheckedShards:
    """Shards of a store whose every byte was seen to be what the manifest says. Each is read once, when asked for."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._checked: dict[int, MappedShard | None] = {}

    def shard(self, row: int) -> MappedShard | None:
        """The shard in a row of the table of shards, mapped; None for one that is damaged or gone."""
        if row not in self._checked:
            self._checked[row] = self._check(row)
        return self._checked[row]

    def _check(self, row: int) -> MappedShard | None:
        try:
            mapped = self.store.map_shard(row)
            is_as_written = fingerprint_file(self.store.shard_path(row)) == self.store.shards["file_hash"][row].as_py()
        except (StoreError, OSError):
            return None
        return mapped if is_as_written else None
