"""Export of a store's documents to formats of other tools, about a million tokens at a time."""

from __future__ import annotations

import logging
import math
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from batchwright.base.checks import local_path, one_of
from batchwright.base.errors import SpecError
from batchwright.base.files import out_of_space_at, part_name, publish
from batchwright.base.progress import Progress, progress, say
from batchwright.base.words import counted
from batchwright.prepare.chat.spans import ROLES
from batchwright.store.layout import is_store
from batchwright.store.reader import Store, open_store
from batchwright.store.stream import TokenStream
from batchwright.typing import StoreLike

__all__ = ["export"]

log: logging.Logger = logging.getLogger("batchwright")

FORMATS = ("megatron", "npy", "parquet", "jsonl")

_TOKENS_AT_ONCE = 1 << 20
_DOCUMENTS_AT_ONCE = 1 << 16


def export(
    store: StoreLike,
    path: str | os.PathLike[str],
    *,
    to: str,
    source: str | None = None,
    split: str | None = None,
    force: bool = False,
    show_progress: bool = True,
) -> list[Path]:
    """Write a store's documents into the folder `path`, and return the files that were written.

    export("corpus.store", "out", to="megatron")   out/<source>-<split>.bin and .idx
    export("corpus.store", "out", to="npy")        .npy with all tokens, .offsets.npy with the borders of documents
    export("corpus.store", "out", to="parquet")    a row for each document: source, split, file, row, tokens, text
    export("corpus.store", "out", to="jsonl")      the same, a line for each

    Rows of conversations also have `spans`: the speaker, turn and part of each token. The other formats have no place
    for spans, and a warning says so.

    Files get their names after all of them were written. An existing file is an error, unless `force`. `source` and
    `split` choose a part of the store. `show_progress=False` is quiet. Memory holds about a million tokens, or the
    longest document for formats with rows.
    """
    one_of(FORMATS, to=to)
    opened = store if isinstance(store, Store) else open_store(store)
    streams = _streams(opened, source, split)
    folder = Path(os.path.abspath(local_path(path=path)))
    kind = _KINDS[to]
    if not kind.has_spans and any(stream.has_spans for stream in streams):
        log.warning(
            "%s holds conversations, and %s files have only their tokens: whose turn a token is, and what is to be "
            "learned, is left out; jsonl and parquet have it",
            *(opened.path, to),
        )
    planned = [[folder / f"{s.name}-{s.split}{suffix}" for suffix in kind.suffixes] for s in streams]
    written = [file for files in planned for file in files]
    _refuse_existing(written, folder, force)
    total = sum(s.num_tokens * s.dtype.itemsize for s in streams)
    bar = progress(f"exporting {opened.path}", total, show=show_progress)
    with out_of_space_at(folder, then="export again: nothing was left behind"), bar as done:
        folder.mkdir(parents=True, exist_ok=True)
        _write(opened, streams, planned, kind, done)
    num_tokens = sum(s.num_tokens for s in streams)
    say(f"{folder}: {num_tokens:,} tokens in {counted(len(written), 'file')} for {to}", show=show_progress)
    return written


def _streams(store: Store, source: str | None, split: str | None) -> list[TokenStream]:
    """The streams to export: those with documents."""
    if source is not None and source not in store.names:
        store.stream(source, split or store.splits[0])  # raises, with the names
    if split is not None and split not in store.splits:
        one_of(store.splits, split=split)
    chosen = [
        store.stream(info.source, info.split)
        for info in store.manifest.streams
        if source in (None, info.source) and split in (None, info.split) and info.num_documents
    ]
    if not chosen:
        what = f"there are no documents to export in {store.path}"
        raise SpecError(what, source=source, split=split, remedy="others")
    return chosen


def _refuse_existing(files: list[Path], folder: Path, force: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise SpecError(f"{folder} is a file", parameter="path", remedy="a folder")
    if is_store(folder):
        raise SpecError(f"{folder} is a store, and is left as it is", parameter="path", remedy="a folder of its own")
    there = next((file for file in files if file.exists()), None)
    if there is not None and not force:
        remedy = "another folder, or force=True (--force)"
        raise SpecError(f"{there} exists, and is left as it is", file=there, remedy=remedy)


@dataclass(frozen=True, slots=True)
class _Kind:
    """One format: the files of a stream, and the function that writes them."""

    suffixes: tuple[str, ...]
    """The file that makes the others readable comes last."""
    write: Callable[[Store, TokenStream, Sequence[BinaryIO], Progress], None]
    has_spans: bool = False
    """Whether it stores the spans of conversations."""


def _write(store: Store, streams: list[TokenStream], planned: list[list[Path]], kind: _Kind, done: Progress) -> None:
    """Write all files under temporary names, then rename them all."""
    parts = {file: part_name(file) for files in planned for file in files}
    try:
        for stream, files in zip(streams, planned, strict=True):
            with ExitStack() as stack:
                opened = [stack.enter_context(open(parts[file], "wb")) for file in files]
                kind.write(store, stream, opened, done)
                for raw in opened:
                    raw.flush()
                    os.fsync(raw.fileno())
        for file, part in parts.items():
            publish(part, file)
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)


def _tokens(stream: TokenStream, done: Progress) -> Iterator[NDArray[Any]]:
    """All tokens of a stream, in order, in mapped pieces."""
    for number in range(len(stream.shard_tokens)):
        tokens, base = stream.shard(number).tokens, int(stream.token_starts[number])
        for first in range(0, len(tokens), _TOKENS_AT_ONCE):
            some = tokens[first : first + _TOKENS_AT_ONCE]
            yield some
            done.advance(some.nbytes)
            stream.unmap(base + first, base + first + len(some))  # or the whole store would stay in memory


def _borders(stream: TokenStream) -> Iterator[NDArray[np.int64]]:
    """The end of each document, in tokens of the stream, some at a time."""
    for number in range(len(stream.shard_tokens)):
        offsets, base = stream.shard(number).offsets, int(stream.token_starts[number])
        for first in range(1, len(offsets), _DOCUMENTS_AT_ONCE):
            yield offsets[first : first + _DOCUMENTS_AT_ONCE].astype(np.int64) + base


# Megatron

_MEGATRON_CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}
_MEGATRON_HAS_NO = {"uint32": "int32", "uint64": "int64"}
"""Types without a Megatron code, and the types that replace them."""


def _write_megatron(store: Store, stream: TokenStream, files: Sequence[BinaryIO], done: Progress) -> None:
    """One sequence for each document. The layout is in docs/adopting.md."""
    data, index = files
    dtype = np.dtype(_MEGATRON_HAS_NO.get(stream.dtype.name, stream.dtype.name))
    if store.vocab_size - 1 > np.iinfo(dtype).max:
        dtype = np.dtype("int64")
    for some in _tokens(stream, done):
        data.write(np.ascontiguousarray(some.astype(dtype, copy=False)).data)
    count = stream.num_documents
    index.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, _MEGATRON_CODES[dtype.name], count, count + 1))
    before = 0
    for ends in _borders(stream):
        index.write(np.diff(ends, prepend=before).astype("<i4").data)
        before = int(ends[-1])
    start = 0
    for ends in _borders(stream):
        index.write((np.concatenate([[start], ends[:-1]]) * dtype.itemsize).astype("<i8").data)
        start = int(ends[-1])
    for first in range(0, count + 1, _TOKENS_AT_ONCE):
        index.write(np.arange(first, min(first + _TOKENS_AT_ONCE, count + 1), dtype="<i8").data)


# NumPy


def _write_npy(store: Store, stream: TokenStream, files: Sequence[BinaryIO], done: Progress) -> None:
    tokens, offsets = files
    _npy_header(tokens, stream.dtype, stream.num_tokens)
    for some in _tokens(stream, done):
        tokens.write(np.ascontiguousarray(some).data)
    _npy_header(offsets, np.dtype("<i8"), stream.num_documents + 1)
    offsets.write(np.zeros(1, "<i8").data)
    for ends in _borders(stream):
        offsets.write(ends.data)


def _npy_header(file: BinaryIO, dtype: np.dtype[Any], length: int) -> None:
    described = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (length,)}
    np.lib.format.write_array_header_1_0(file, described)


# Rows


def _rows(store: Store, stream: TokenStream, done: Progress) -> Iterator[list[dict[str, Any]]]:
    """Documents as rows, some at a time. The text is without the id that ends the document."""
    eos = store.manifest.tokenizer["eos"]
    if stream.has_spans:
        eos = None  # the end of a turn is part of the text that the template wrote
    rows: list[dict[str, Any]] = []
    waiting = 0
    for number in range(stream.num_documents):
        document = stream.document(number)
        tokens = document.tokens
        has_eos = len(tokens) > 0 and tokens[-1] == eos
        row = {name: getattr(document, name) for name in ("source", "split", "file", "row", "tokens")}
        row["text"] = store.decode(tokens[:-1] if has_eos else tokens)
        if stream.has_spans:
            row["spans"] = _spans(stream, number)
        rows.append(row)
        waiting += len(tokens)
        is_last = number == stream.num_documents - 1
        if waiting >= _TOKENS_AT_ONCE or len(rows) >= _DOCUMENTS_AT_ONCE or is_last:
            yield rows
            done.advance(waiting * stream.dtype.itemsize)
            rows, waiting = [], 0


_PARTS = ("template", "text", "end")


def _spans(stream: TokenStream, document: int) -> list[dict[str, Any]]:
    """The spans of a conversation: consecutive, each up to token `stop`."""
    fields = stream.spans_of(document)
    names = ("stop", "role", "turn", "part", "side", "weight")
    spans = [dict(zip(names, values, strict=True)) for values in zip(*(fields[n].tolist() for n in names), strict=True)]
    for span in spans:
        span["role"], span["part"] = ROLES[span["role"]], _PARTS[span["part"]]
        if math.isnan(span["weight"]):  # the message asked for nothing
            span["weight"] = None
    return spans


def _write_parquet(store: Store, stream: TokenStream, files: Sequence[BinaryIO], done: Progress) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    tokens = pa.large_list(pa.from_numpy_dtype(stream.dtype))
    text = [("source", pa.string()), ("split", pa.string()), ("file", pa.string())]
    schema = pa.schema([*text, ("row", pa.int64()), ("tokens", tokens), ("text", pa.large_string())])
    if stream.has_spans:
        numbers = {"stop": pa.int32(), "turn": pa.int16(), "side": pa.int8(), "weight": pa.float32()}
        span = pa.struct({"role": pa.string(), "part": pa.string(), **numbers})
        schema = schema.append(pa.field("spans", pa.list_(span)))
    with pq.ParquetWriter(files[0], schema, compression="zstd") as writer:
        for rows in _rows(store, stream, done):
            writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=schema))


def _write_jsonl(store: Store, stream: TokenStream, files: Sequence[BinaryIO], done: Progress) -> None:
    for rows in _rows(store, stream, done):
        for row in rows:
            files[0].write(msgspec.json.encode(row | {"tokens": row["tokens"].tolist()}) + b"\n")


_KINDS = {
    "megatron": _Kind((".bin", ".idx"), _write_megatron),
    "npy": _Kind((".npy", ".offsets.npy"), _write_npy),
    "parquet": _Kind((".parquet",), _write_parquet, has_spans=True),
    "jsonl": _Kind((".jsonl",), _write_jsonl, has_spans=True),
}
