"""Open a raw file as its uncompressed bytes: gzip and zstd by extension, streamed."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from penstock.errors import SourceError

__all__ = ["COMPRESSED", "compression_of", "open_raw", "uncompressed_name"]

COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
_BUFFER_BYTES = 64 << 10
"""Read at once. What a damaged archive still gives ends within this much of the damage."""


def compression_of(name: str) -> str | None:
    """
    >>> compression_of("a.jsonl.zst"), compression_of("a.jsonl")
    ('zstd', None)
    """
    return COMPRESSED.get(Path(name).suffix.lower())


def uncompressed_name(name: str) -> str:
    """
    >>> uncompressed_name("a.jsonl.gz")
    'a.jsonl'
    """
    return str(Path(name).with_suffix("")) if compression_of(name) else name


def open_raw(path: Path) -> io.BufferedReader:
    """The uncompressed bytes of a file, as a stream. A cut-off archive is an error when its end is reached."""
    kind = compression_of(path.name)
    if kind is None:
        return open(path, "rb")
    import pyarrow as pa

    stream = pa.CompressedInputStream(pa.OSFile(str(path)), kind)
    return io.BufferedReader(_Decompressed(path, stream, kind), _BUFFER_BYTES)


class _Decompressed(io.RawIOBase):
    """Arrow's decompressing stream as a Python one, with errors that name the file."""

    def __init__(self, path: Path, stream: Any, kind: str) -> None:
        self._path, self._stream, self._kind = path, stream, kind

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        try:
            data: bytes = self._stream.read(len(view))
        except OSError as error:
            raise SourceError(
                f"this {self._kind} file is truncated or damaged",
                file=self._path,
                reason=str(error).splitlines()[0],
                remedy="fetch or compress the file again, or on_error='skip' to leave out what cannot be read",
            ) from None
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()
