"""Samples <-> shards: plain Arrow files, memory-mapped, under a manifest whose existence means complete."""

from penstock.store.layout import Manifest, Shard
from penstock.store.reader import Store, open_store
from penstock.store.stream import StoredDocument, TokenStream
from penstock.store.verify import Damage, verify_store
from penstock.store.versions import collect_garbage

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
