"""Shards: files of positions, in six formats, read as columns a chunk of rows at a time.

    with open_shard("games/shard_0001.npz") as shard:
        for columns in shard.chunks(slice(0, None, 4), rows_per_chunk=8192):    # every fourth row
            pool.add(columns)                                                   # before asking for the next chunk

A fault is a SourceError that names the file, and the row and the column where there is one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import xxhash
from numpy.typing import NDArray

from batchwright.base.checks import local_path
from batchwright.base.errors import SourceError
from batchwright.columns.schema import Column, Schema, Wanted, row_bytes

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

EXTENSIONS: dict[str, str] = {
    ".npz": "npz",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
    ".parquet": "parquet",
    ".safetensors": "safetensors",
    ".jsonl": "jsonl",
    ".jsonl.gz": "jsonl",
    ".jsonl.zst": "jsonl",
    ".ndjson": "jsonl",
    ".ndjson.gz": "jsonl",
    ".ndjson.zst": "jsonl",
    ".pkl": "pickle",
    ".pkl.gz": "pickle",
    ".pickle": "pickle",
    ".pickle.gz": "pickle",
}
"""How the names of shards end, and the format that each ending means."""


class Shard(Protocol):
    """An open shard. Close it: it holds a file, and some formats a child process."""

    path: str
    rows: int
    schema: Schema
    """Of the columns asked for."""
    decode_bytes: int
    """Memory that reading takes at most beyond what it hands out, a child's included: by what the file says of itself,
    so that it is the same on every machine."""

    def chunks(self, wanted: Wanted, rows_per_chunk: int) -> Iterator[dict[str, NDArray[Any]]]:
        """The columns of the wanted rows: a slice with a step of 1 or more, or sorted row numbers.

        At most `rows_per_chunk` rows at a time, in order. The arrays are only to be read, and only until the next chunk
        is asked for: their memory is used again. Formats that can seek read only what is wanted.
        """
        ...

    def close(self) -> None: ...

    def __enter__(self) -> Shard: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Facts:
    """What a shard says of itself before it is decoded."""

    format: str
    rows: int | None
    """None: only decoding it tells."""
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
) -> Shard:
    """A shard, ready to be read. `columns`: those to read; the others are neither read nor checked.

    `budget`: bytes that decoding may take in a child process, where the format needs one; None: no limit.
    """
    file, kind = _checked(path, allow_pickle)
    return _opener(kind)(file, columns, budget)


def peek(path: str | Path, *, allow_pickle: bool = False, columns: Sequence[str] | None = None) -> Facts:
    """What the headers of a shard say. Nothing is decoded: of JSONL and pickle only the memory is known, about."""
    file, kind = _checked(path, allow_pickle)
    if kind in ("jsonl", "pickle"):
        from batchwright.columns.decoded import expected_bytes

        return Facts(kind, None, None, expected_bytes(file, kind))
    with _opener(kind)(file, columns, None) as shard:
        return Facts(kind, shard.rows, shard.schema, shard.decode_bytes)


def content_mark(path: str | Path) -> str:
    """A cheap name for a file's content: its size, and a hash of its ends and of 16 blocks spread over it."""
    file = os.fspath(path)
    try:
        descriptor = os.open(file, os.O_RDONLY)
    except OSError as error:
        raise _unreadable(file, error) from None
    try:
        size, ends, block = os.fstat(descriptor).st_size, 64 << 10, 4 << 10
        mark = xxhash.xxh3_128(str(size).encode())
        for offset in (0, max(0, size - ends)):
            mark.update(os.pread(descriptor, ends, offset))
        for number in range(16):
            mark.update(os.pread(descriptor, block, size * (number + 1) // 17))
    except OSError as error:
        raise _unreadable(file, error) from None
    finally:
        os.close(descriptor)
    return f"{size}-{mark.hexdigest()}"


def _checked(path: str | Path, allow_pickle: bool) -> tuple[str, str]:
    """The path and the format of what is surely a file."""
    file = str(local_path(path=path))
    kind = format_of(file)
    if os.path.isdir(file):
        raise SourceError(f"{_name(file)} is a directory, not a shard", file=file, remedy=f"files named {_endings()}")
    if kind is None:
        raise SourceError(
            f"{_name(file)} is in no format that shards have", file=file, remedy=f"files named {_endings()}"
        )
    if kind == "pickle" and not allow_pickle:
        folder = os.path.dirname(file) or "."
        raise SourceError(
            f"{_name(file)} is a pickle, which can run code when read. If you made it: allow_pickle=True, or once: "
            "batchwright shards convert DIR OUT --allow-pickle",
            file=file,
            remedy=f"allow_pickle=True, or once: batchwright shards convert {folder} {folder}-npz --allow-pickle",
        )
    try:
        size = os.stat(file).st_size
    except OSError as error:
        raise _unreadable(file, error) from None
    if not os.path.isfile(file):
        raise SourceError(f"{_name(file)} is no regular file", file=file, remedy="copy it into a file")
    if not size:
        raise SourceError(f"{_name(file)} is empty", file=file, remedy="write it again, or ranges without its number")
    return file, kind


def _opener(kind: str) -> Callable[[str, Sequence[str] | None, int | None], Shard]:
    # Each format is imported when a shard of it is met: pyarrow alone takes longer than everything else.
    if kind == "npz":
        from batchwright.columns.npz import NpzShard

        return lambda file, columns, budget: NpzShard(file, columns)
    if kind == "safetensors":
        from batchwright.columns.safetensors import SafetensorsShard

        return lambda file, columns, budget: SafetensorsShard(file, columns)
    if kind == "arrow":
        from batchwright.columns.arrow import ArrowShard

        return lambda file, columns, budget: ArrowShard(file, columns)
    if kind == "parquet":
        from batchwright.columns.parquet import ParquetShard

        return lambda file, columns, budget: ParquetShard(file, columns)
    from batchwright.columns.decoded import DecodedShard

    return lambda file, columns, budget: DecodedShard(file, kind, columns, budget)


def _name(file: str) -> str:
    return os.path.basename(file.rstrip("/"))


def _endings() -> str:
    return ", ".join(f"*{ending}" for ending in EXTENSIONS)


def _unreadable(file: str, error: OSError) -> SourceError:
    gone = isinstance(error, FileNotFoundError)
    return SourceError(
        f"{_name(file)} {'is not there' if gone else f'cannot be read: {error.strerror}'}",
        file=file,
        remedy="put it back, or start again without it" if gone else "make it readable",
    )
