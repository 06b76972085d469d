"""Numbered files of positions, as columns: npz, Arrow, Parquet, safetensors, JSONL and pickle."""

from batchwright.shards.shard import (
    EXTENSIONS,
    Column,
    Facts,
    Schema,
    Shard,
    content_mark,
    format_of,
    open_shard,
    peek,
    row_bytes,
)

__all__ = [
    "EXTENSIONS",
    "Column",
    "Facts",
    "Schema",
    "Shard",
    "content_mark",
    "format_of",
    "open_shard",
    "peek",
    "row_bytes",
]
