"""Samples <-> shards: plain Arrow files, memory-mapped, under a manifest whose existence means complete."""

from batchwright.store.layout import Manifest, Shard
from batchwright.store.reader import Store, open_store
from batchwright.store.stream import StoredDocument, TokenStream
from batchwright.store.versions import Damage, collect_garbage, verify_store

__all__ = [
    "Damage",
    "Manifest",
    "Shard",
    "Store",
    "StoredDocument",
    "TokenStream",
    "collect_garbage",
    "open_store",
    "verify_store",
]
