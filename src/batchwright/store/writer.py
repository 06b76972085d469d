"""Writing a version: shards and tables as Arrow files, and the manifest over them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchwright.base.files import write_whole, writing_whole
from batchwright.base.fingerprint import fingerprint_bytes, fingerprint_file
from batchwright.columns.arrow import lists_to_arrow, numpy_to_arrow, records_to_arrow
from batchwright.store.layout import Manifest, Shard, StreamInfo, stream_fingerprint

__all__ = ["MAX_SHARD_TOKENS", "write_arrow"]

MAX_SHARD_TOKENS = (1 << 31) - 1
"""Arrow list offsets are 32 bit."""

_SHARD_COLUMNS = ("file", "num_documents", "num_tokens", "num_bytes", "file_hash", "content_hash")


def write_arrow(path: Path, batch: pa.RecordBatch) -> None:
    """Write one record batch as an Arrow file, atomically and synced."""
    with writing_whole(path) as raw, pa.ipc.new_file(pa.PythonFile(raw, "w"), batch.schema) as file:
        file.write_batch(batch)


def write_table(path: Path, columns: dict[str, Any]) -> str:
    """Write columns as an Arrow file. Returns its hash."""
    write_arrow(path, pa.RecordBatch.from_arrays(list(map(numpy_to_arrow, columns.values())), names=list(columns)))
    return fingerprint_file(path)


def write_shard(
    path: Path,
    source: str,
    split: str,
    *,
    tokens: NDArray[Any] | None,
    offsets: NDArray[np.int32],
    file: NDArray[np.int32],
    row: NDArray[np.int64],
    content_hash: str,
    spans: tuple[NDArray[np.int32], NDArray[Any]] | None = None,
) -> Shard:
    """Write one shard: document d has tokens[offsets[d]:offsets[d + 1]], from row `row[d]` of raw file `file[d]`.

    Without `tokens` (they stay in a user's file) the lists are of nulls. `spans` describes the tokens of conversations:
    (starts, records), of which document d has records[starts[d]:starts[d + 1]].
    """
    num_tokens = int(offsets[-1])
    values: Any = pa.nulls(num_tokens) if tokens is None else tokens
    columns = {
        "tokens": lists_to_arrow(offsets, values),
        "file": numpy_to_arrow(file),
        "row": numpy_to_arrow(row),
    }
    if spans is not None:
        columns["spans"] = records_to_arrow(*spans)
    write_arrow(path, pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns)))
    num_bytes, file_hash = path.stat().st_size, fingerprint_file(path)
    return Shard(path.name, source, split, len(row), num_tokens, num_bytes, file_hash, content_hash)


def stream_info(source: str, split: str, shards: Sequence[Shard], dtype: str, *, default: str) -> StreamInfo:
    """A stream over shards. Its type is stored if it differs from the `default` of the store."""
    return StreamInfo(
        source=source,
        split=split,
        num_documents=sum(shard.num_documents for shard in shards),
        num_tokens=sum(shard.num_tokens for shard in shards),
        num_shards=len(shards),
        fingerprint=stream_fingerprint(dtype, [[s.num_documents, s.num_tokens, s.content_hash] for s in shards]),
        dtype=dtype * (dtype != default),
    )


def write_version_tables(
    folder: Path,
    *,
    shards: Sequence[Sequence[Shard]],
    shard_columns: dict[str, Any] | None = None,
    files: list[dict[str, Any]],
    units: dict[str, Any],
    tokenizer: Any,
    info: dict[str, Any],
    **manifest: Any,
) -> Manifest:
    """Write the tables and the tokenizer of a version. Returns its manifest, which the caller saves last.

    `shards` has a list for each stream, `files` a row for each raw file. `shard_columns` are further columns of the
    shards' table. `info` describes the tokenizer in the manifest, and `manifest` holds its other fields.
    """
    every = [shard for of_stream in shards for shard in of_stream]
    table: dict[str, Any] = {"stream": np.repeat(np.arange(len(shards), dtype=np.int32), list(map(len, shards)))}
    table |= {name: [getattr(shard, name) for shard in every] for name in _SHARD_COLUMNS}
    tokenizer_json = tokenizer.to_json()
    write_whole(folder / "tokenizer.json", tokenizer_json)
    return Manifest(
        shards_hash=write_table(folder / "shards.arrow", table | (shard_columns or {})),
        files_hash=write_table(folder / "files.arrow", {name: [file[name] for file in files] for name in files[0]}),
        units_hash=write_table(folder / "units.arrow", units),
        tokenizer_hash=fingerprint_bytes(tokenizer_json),
        tokenizer=info,
        **manifest,
    )
