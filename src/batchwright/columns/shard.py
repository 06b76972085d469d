"""Shards, files of rows in six formats, read as columns in chunks of rows.

    with open_shard("games/shard_0001.npz") as shard:
        for columns in shard.chunks(slice(0, None, 4), rows_per_chunk=8192):    # every fourth row
            pool.add(columns)                                                   # before asking for the next chunk

A fault is a SourceError that names the file, and the row and the column if known.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import xxhash
from numpy.typing import NDArray

from batchwright.base.checks import local_path
from batchwright.base.errors import SourceError
from batchwright.columns.schema import Column, Schema, Wanted, row_bytes

__all__ = [
    "EXTENSIONS",
    "Column",
    "Schema",
    "ShardHeader",
    "ShardReader",
    "content_mark",
    "format_of",
    "open_shard",
    "peek",
    "row_bytes",
]

_ENDINGS = {
    "npz": (".npz",),
    "arrow": (".arrow", ".feather", ".ipc"),
    "parquet": (".parquet",),
    "safetensors": (".safetensors",),
    "jsonl": (".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson", ".ndjson.gz", ".ndjson.zst"),
    "pickle": (".pkl", ".pkl.gz", ".pickle", ".pickle.gz"),
}
EXTENSIONS: dict[str, str] = {ending: kind for kind, endings in _ENDINGS.items() for ending in endings}
"""The file name endings of shards, and the format of each."""


class ShardReader(abc.ABC):
    """An open shard. Close it: it holds a file, and some formats a child process."""

    path: str
    rows: int
    schema: Schema
    """The schema of the requested columns."""
    decode_bytes: int
    """The most memory for reading beyond the arrays handed out, a child's included. Computed from the file alone, so
    it is the same on every machine."""

    @abc.abstractmethod
    def chunks(self, wanted: Wanted, rows_per_chunk: int) -> Iterator[dict[str, NDArray[Any]]]:
        """The columns of the wanted rows: a slice with a step of 1 or more, or sorted row numbers.

        At most `rows_per_chunk` rows at a time, in order. The arrays are only to be read, and only until the next
        chunk is requested: their memory is used again. Formats that can seek read only wanted rows.
        """

    @abc.abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """The facts of a shard that are known before it is decoded."""

    format: str
    rows: int | None
    """None if only decoding can tell."""
    schema: Schema | None
    decode_bytes: int


def format_of(name: str | Path) -> str | None:
    """The format that a file's name means, if it is one of a shard.

    >>> format_of("shard_0007.pkl.gz"), format_of("notes.txt")
    ('pickle', None)
    """
    lowered = os.path.basename(name).lower()
    return next((kind for ending, kind in EXTENSIONS.items() if lowered.endswith(ending)), None)


def open_shard(
    path: str | Path,
    *,
    allow_pickle: bool = False,
    columns: Sequence[str] | None = None,
    budget: int | None = None,
) -> ShardReader:
    """A shard, ready to be read. Columns that are not in `columns` are neither read nor checked.

    `budget` is the memory in bytes that decoding may take in a child process, if the format needs one.
    """
    file, kind = _checked(path, allow_pickle)
    return _open(file, kind, columns, budget)


def peek(path: str | Path, *, allow_pickle: bool = False, columns: Sequence[str] | None = None) -> ShardHeader:
    """Read the header of a shard. No row is decoded. For JSONL and pickle only the memory is known, about."""
    file, kind = _checked(path, allow_pickle)
    if kind in ("jsonl", "pickle"):
        from batchwright.columns.row_shard import expected_bytes

        return ShardHeader(kind, None, None, expected_bytes(file, kind))
    with _open(file, kind, columns, None) as shard:
        return ShardHeader(kind, shard.rows, shard.schema, shard.decode_bytes)


def content_mark(path: str | Path) -> str:
    """A cheap name for a file's content: its size, and a hash of its ends and of 16 blocks spread over it."""
    file = os.fspath(path)
    try:
        with open(file, "rb", buffering=0) as raw:
            size, ends, block = os.fstat(raw.fileno()).st_size, 64 << 10, 4 << 10
            mark = xxhash.xxh3_128(str(size).encode())
            for offset in (0, max(0, size - ends)):
                mark.update(os.pread(raw.fileno(), ends, offset))
            for number in range(16):
                mark.update(os.pread(raw.fileno(), block, size * (number + 1) // 17))
    except OSError as error:
        raise _unreadable(file, error) from None
    return f"{size}-{mark.hexdigest()}"


def _checked(path: str | Path, allow_pickle: bool) -> tuple[str, str]:
    """The path and the format of an existing file with content."""
    file = str(local_path(path=path))
    kind, name = format_of(file), os.path.basename(file.rstrip("/"))
    endings = "files named " + ", ".join(f"*{ending}" for ending in EXTENSIONS)
    if os.path.isdir(file):
        raise SourceError(f"{name} is a directory, not a shard", file=file, remedy=endings)
    if kind is None:
        raise SourceError(f"{name} is in no format that shards have", file=file, remedy=endings)
    if kind == "pickle" and not allow_pickle:
        folder = os.path.dirname(file) or "."
        raise SourceError(
            f"{name} is a pickle, which can run code when read. If you made it: allow_pickle=True, or once: "
            "batchwright shards convert DIR OUT --allow-pickle",
            file=file,
            remedy=f"allow_pickle=True, or once: batchwright shards convert {folder} {folder}-npz --allow-pickle",
        )
    try:
        size = os.stat(file).st_size
    except OSError as error:
        raise _unreadable(file, error) from None
    if not os.path.isfile(file):
        raise SourceError(f"{name} is no regular file", file=file, remedy="copy it into a file")
    if not size:
        raise SourceError(f"{name} is empty", file=file, remedy="write it again, or ranges without its number")
    return file, kind


def _open(file: str, kind: str, columns: Sequence[str] | None, budget: int | None) -> ShardReader:
    # Each format is imported when a shard of it is met: pyarrow alone takes longer than everything else.
    match kind:
        case "npz":
            from batchwright.columns.npz import open_npz

            return open_npz(file, columns)
        case "safetensors":
            from batchwright.columns.safetensors import open_safetensors

            return open_safetensors(file, columns)
        case "arrow":
            from batchwright.columns.arrow import ArrowShard

            return ArrowShard(file, columns)
        case "parquet":
            from batchwright.columns.parquet import ParquetShard

            return ParquetShard(file, columns)
        case _:
            from batchwright.columns.row_shard import RowShard

            return RowShard(file, kind, columns, budget)


def _unreadable(file: str, error: OSError) -> SourceError:
    name = os.path.basename(file)
    if isinstance(error, FileNotFoundError):
        return SourceError(f"{name} is not there", file=file, remedy="put it back, or start again without it")
    return SourceError(f"{name} cannot be read: {error.strerror}", file=file, remedy="make it readable")
