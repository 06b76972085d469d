"""Write documents as Arrow shards: token lists, and for each document the file and row it came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from batchwright.base.files import writing_whole
from batchwright.base.fingerprint import fingerprint_file
from batchwright.columns.arrays import lists_to_arrow, numpy_to_arrow, records_to_arrow
from batchwright.store.layout import Shard, StreamInfo, content_digest, stream_fingerprint

__all__ = ["MAX_SHARD_TOKENS", "stream_info", "write_arrow", "write_borders", "write_shard", "write_table"]

MAX_SHARD_TOKENS = (1 << 31) - 1
"""Arrow list offsets are 32 bit."""


def write_arrow(path: Path, batch: pa.RecordBatch) -> None:
    """One record batch as an Arrow file, whole or not at all, on disk when this returns."""
    with writing_whole(path) as raw, pa.ipc.new_file(pa.PythonFile(raw, "w"), batch.schema) as file:
        file.write_batch(batch)


def write_table(path: Path, columns: dict[str, Any]) -> str:
    """Some columns as an Arrow file. Returns its hash."""
    write_arrow(path, pa.RecordBatch.from_arrays(list(map(numpy_to_arrow, columns.values())), names=list(columns)))
    return fingerprint_file(path)


def write_shard(
    folder: Path,
    name: str,
    *,
    source: str,
    split: str,
    tokens: NDArray[Any],
    offsets: NDArray[np.int32],
    file: NDArray[np.int32],
    row: NDArray[np.int64],
    spans: tuple[NDArray[np.int32], NDArray[Any]] | None = None,
) -> Shard:
    """One shard: document d has tokens[offsets[d]:offsets[d + 1]], and came from row `row[d]` of raw file `file[d]`.

    `spans` says what the tokens are, for documents that know it: (starts, records), of which document d has
    records[starts[d]:starts[d + 1]].
    """
    columns = {"tokens": lists_to_arrow(offsets, tokens), "file": numpy_to_arrow(file), "row": numpy_to_arrow(row)}
    if spans is not None:
        columns["spans"] = records_to_arrow(*spans)
    batch = pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))
    path = folder / name
    write_arrow(path, batch)
    return Shard(
        file=name,
        source=source,
        split=split,
        num_documents=len(offsets) - 1,
        num_tokens=len(tokens),
        num_bytes=path.stat().st_size,
        file_hash=fingerprint_file(path),
        content_hash=content_digest(tokens, offsets, *(spans or ())),
    )


def write_borders(
    folder: Path,
    name: str,
    *,
    source: str,
    split: str,
    offsets: NDArray[np.int32],
    file: NDArray[np.int32],
    row: NDArray[np.int64],
    content: xxhash.xxh3_128,
) -> Shard:
    """A shard whose tokens lie in a user's file: only where its documents begin and end, as lists of nulls.

    `content` has hashed the tokens already. The content hash is that of `write_shard` over the same documents.
    """
    lists = pa.ListArray.from_arrays(numpy_to_arrow(offsets), pa.nulls(int(offsets[-1])))
    batch = pa.RecordBatch.from_arrays(
        [lists, numpy_to_arrow(file), numpy_to_arrow(row)], names=["tokens", "file", "row"]
    )
    path = folder / name
    write_arrow(path, batch)
    content.update(np.ascontiguousarray(offsets).view(np.uint8).data)
    return Shard(
        file=name,
        source=source,
        split=split,
        num_documents=len(offsets) - 1,
        num_tokens=int(offsets[-1]),
        num_bytes=path.stat().st_size,
        file_hash=fingerprint_file(path),
        content_hash=content.hexdigest(),
    )


def stream_info(source: str, split: str, shards: list[Shard], dtype: str) -> StreamInfo:
    return StreamInfo(
        source=source,
        split=split,
        num_documents=sum(shard.num_documents for shard in shards),
        num_tokens=sum(shard.num_tokens for shard in shards),
        num_shards=len(shards),
        fingerprint=stream_fingerprint(dtype, [[s.num_documents, s.num_tokens, s.content_hash] for s in shards]),
    )
