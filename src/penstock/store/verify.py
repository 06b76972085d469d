"""Check every byte of a store against the hashes in its manifest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.errors import StoreError
from penstock.fingerprint import fingerprint_file
from penstock.store.layout import REBAKE, stream_fingerprint
from penstock.store.reader import Store
from penstock.store.stream import MappedShard

__all__ = ["Damage", "verify_store"]


@dataclass(frozen=True, slots=True)
class Damage:
    """One file of a store that is not what the manifest says."""

    file: Path
    what: str

    def error(self) -> StoreError:
        return StoreError(self.what, file=self.file, remedy=REBAKE)


def verify_store(store: Store) -> Iterator[Damage]:
    """Every damaged file of a store: missing, truncated, altered, or with an id outside the vocabulary."""
    yield from _tokenizer(store)
    for table in ("files", "units", "shards"):
        try:
            getattr(store, table)
        except StoreError as error:
            yield Damage(Path(str(error.where["file"])), error.headline)
            if table == "shards":
                return  # the table says which shards there are
    yield from _totals(store)
    for i in range(len(store.shards["num_bytes"])):
        yield from _shard(store, i)


def _tokenizer(store: Store) -> Iterator[Damage]:
    path = store.folder / "tokenizer.json"
    try:
        if fingerprint_file(path) != store.manifest.tokenizer_hash:
            yield Damage(path, "the tokenizer of this store was altered: its hash differs")
    except FileNotFoundError:
        yield Damage(path, "the tokenizer of this store is missing")


def _totals(store: Store) -> Iterator[Damage]:
    """The manifest itself has no hash beside it: what it says of a stream must follow from the stream's shards."""
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
            stream_fingerprint(manifest.token_dtype, [list(shard) for shard in counts]),
        )
        if said != found:
            yield Damage(store.folder / "manifest.json", f"the manifest was altered: stream {info.source!r} differs")


def _shard(store: Store, i: int) -> Iterator[Damage]:
    shards, manifest = store.shards, store.manifest
    path = store.shard_path(i)
    try:
        MappedShard.check(path, int(shards["num_bytes"][i]))
        if fingerprint_file(path) != shards["file_hash"][i].as_py():
            yield Damage(path, "a shard of this store was altered: its hash differs")
            return
        mapped = store.map_shard(i)
    except StoreError as error:
        yield Damage(path, error.headline)
        return
    vocab_size = int(manifest.tokenizer["vocab_size"])
    if len(mapped.tokens) and int(mapped.tokens.max()) >= vocab_size:
        yield Damage(path, f"token id {int(mapped.tokens.max())} is outside the vocabulary of {vocab_size}")
    if mapped.offsets[0] != 0 or mapped.offsets[-1] != len(mapped.tokens) or (np.diff(mapped.offsets) < 0).any():
        yield Damage(path, "the borders between documents are not in order")
