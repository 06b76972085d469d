"""Verification of a store: every byte against the hashes in its manifest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from batchwright.base.errors import StoreError
from batchwright.base.fingerprint import fingerprint_file
from batchwright.store.layout import REBAKE, stream_fingerprint
from batchwright.store.reader import Store

__all__ = ["Damage", "verify_store"]


@dataclass(frozen=True, slots=True)
class Damage:
    """One file of a store that differs from the manifest."""

    file: Path
    what: str
    remedy: str = REBAKE

    def error(self) -> StoreError:
        return StoreError(self.what, file=self.file, remedy=self.remedy)


def verify_store(store: Store) -> Iterator[Damage]:
    """Every damaged file of a store: missing, truncated, altered, or with an id outside the vocabulary.

    The user's own files are read too, in a store of adopted tokens.
    """
    for damage in _damages(store):
        yield replace(damage, remedy=store.manifest.repair)


def _damages(store: Store) -> Iterator[Damage]:
    yield from _tokenizer(store)
    for table in ("files", "units", "texts", "shards"):
        try:
            getattr(store, table)
        except StoreError as error:
            yield _damage_of(error)
            if table == "shards":
                return  # without it the shards are not known
    yield from _totals(store)
    damaged = list(_adopted(store))
    yield from damaged
    if not damaged:
        for row in range(len(store.shards["num_bytes"])):
            yield from _shard(store, row)


def _damage_of(error: StoreError) -> Damage:
    what = error.headline
    if "changed" in error.where:
        what += f": {error.where['changed']}"
    return Damage(Path(str(error.where["file"])), what)


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
            if fingerprint_file(path) != store.files["content_hash"][number].as_py():
                yield Damage(path, "a file that this store adopted was altered: its hash differs")
        except StoreError as error:
            yield _damage_of(error)


def _totals(store: Store) -> Iterator[Damage]:
    """Compare the manifest's totals of each stream with the stream's shards."""
    shards, manifest = store.shards, store.manifest
    content = shards["content_hash"].to_pylist()
    facts = list(zip(shards["num_documents"].tolist(), shards["num_tokens"].tolist(), content, strict=True))
    for number, info in enumerate(manifest.streams):
        mine = [list(facts[row]) for row in np.flatnonzero(shards["stream"] == number)]
        said = (info.num_documents, info.num_tokens, info.num_shards, info.fingerprint)
        totals = (sum(documents for documents, _, _ in mine), sum(tokens for _, tokens, _ in mine), len(mine))
        if said != (*totals, stream_fingerprint(manifest.dtype_of(info), mine)):
            yield Damage(store.folder / "manifest.json", f"the manifest was altered: stream {info.source!r} differs")


def _shard(store: Store, row: int) -> Iterator[Damage]:
    path = store.shard_path(row)
    try:
        store.check_shard(row)
        if not store.is_as_written(row):
            yield Damage(path, "a shard of this store was altered: its hash differs")
            return
        mapped = store.map_shard(row)
    except StoreError as error:
        yield Damage(path, error.headline)
        return
    lowest, highest = 0, 0
    if len(mapped.tokens):
        lowest, highest = int(mapped.tokens.min()), int(mapped.tokens.max())
    if lowest < 0:
        yield Damage(path, f"token id {lowest} is negative")
    if highest >= store.vocab_size:
        yield Damage(path, f"token id {highest} is outside the vocabulary of {store.vocab_size}")
    if mapped.offsets[0] != 0 or mapped.offsets[-1] != len(mapped.tokens) or (np.diff(mapped.offsets) < 0).any():
        yield Damage(path, "the borders between documents are not in order")
