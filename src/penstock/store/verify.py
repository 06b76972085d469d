"""Check every byte of a store against the hashes in its manifest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.errors import StoreError
from penstock.files import inside
from penstock.fingerprint import fingerprint_file
from penstock.store.reader import MappedShard, Store

__all__ = ["Damage", "verify_store"]


@dataclass(frozen=True, slots=True)
class Damage:
    """One file of a store that is not what the manifest says."""

    file: Path
    what: str

    def error(self) -> StoreError:
        return StoreError(self.what, file=self.file, remedy="bake again, or copy the store again from where it came")


def verify_store(store: Store) -> Iterator[Damage]:
    """Every damaged file of a store: missing, truncated, altered, or with an id outside the vocabulary."""
    try:
        shards = store.shards
        _ = store.files
    except StoreError as error:
        yield Damage(Path(str(error.where["file"])), error.headline)
        return
    vocab_size = int(store.manifest.tokenizer["vocab_size"])
    for i in range(len(shards["num_bytes"])):
        path = inside(store.folder, shards["file"][i].as_py())
        try:
            MappedShard._check(path, int(shards["num_bytes"][i]))
            if fingerprint_file(path) != shards["file_hash"][i].as_py():
                yield Damage(path, "a shard of this store was altered: its hash differs")
                continue
            mapped = MappedShard(
                path,
                int(shards["num_documents"][i]),
                int(shards["num_tokens"][i]),
                int(shards["num_bytes"][i]),
                store.manifest.token_dtype,
            )
        except StoreError as error:
            yield Damage(path, error.headline)
            continue
        if len(mapped.tokens) and int(mapped.tokens.max()) >= vocab_size:
            yield Damage(path, f"token id {int(mapped.tokens.max())} is outside the vocabulary of {vocab_size}")
        if mapped.offsets[0] != 0 or mapped.offsets[-1] != len(mapped.tokens) or (np.diff(mapped.offsets) < 0).any():
            yield Damage(path, "the borders between documents are not in order")
