"""Open a raw file as its uncompressed bytes: gzip, zstd, lz4, bz2 and xz, by extension or by first bytes, streamed.

Archives of several members (`cat a.gz b.gz`, pigz, pbzip2, zstd -T) are read to their end. Other bytes after them are
an error. A file that unpacks to more than 1 GiB, and to more than 200 times the bytes read of it, is refused. gzip
cannot exceed 1,032:1 and a bomb comes near that; text hardly exceeds 50:1.
"""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from batchwright.base.errors import SourceError
from batchwright.base.words import first_line

COMPRESSED = {".gz": "gzip", ".zst": "zstd", ".lz4": "lz4", ".bz2": "bz2", ".xz": "xz"}
_SHORT = {".tgz": ".gz", ".tzst": ".zst", ".tlz4": ".lz4", ".tbz": ".bz2", ".tbz2": ".bz2", ".txz": ".xz"}
"""Extensions that say tar and a compression at once."""
_BUFFER_BYTES = 64 << 10
"""Read at once. What a damaged archive still gives ends within this much of the damage."""
_XZ_MEMORY_BYTES = 256 << 20
"""The most memory for decompressing an xz file; `xz -9` asks for 65 MiB. (zstd has a limit of its own: 128 MiB.)"""
_HEAD_BYTES = 16
_FREE_BYTES = 1 << 30
"""The bytes that an archive may unpack to before its ratio is checked."""
_MAX_EXPANSION = 200


class DecompressionBomb(SourceError):
    """An archive that grows out of all proportion."""


def compression_of(name: str) -> str | None:
    """
    >>> compression_of("a.jsonl.zst"), compression_of("a.tgz"), compression_of("a.jsonl")
    ('zstd', 'gzip', None)
    """
    suffix = Path(name).suffix.lower()
    return COMPRESSED.get(_SHORT.get(suffix, suffix))


def uncompressed_name(name: str) -> str:
    """
    >>> uncompressed_name("a.jsonl.gz"), uncompressed_name("a.tgz")
    ('a.jsonl', 'a.tar')
    """
    if Path(name).suffix.lower() in _SHORT:
        return str(Path(name).with_suffix(".tar"))
    if compression_of(name) is None:
        return name
    return str(Path(name).with_suffix(""))


def compression_of_bytes(head: bytes) -> str | None:
    """The compression that the first 16 bytes of a file show. No text begins with any of these.

    >>> compression_of_bytes(bytes.fromhex("1f8b0800")), compression_of_bytes(b"BZh is a kind of archive")
    ('gzip', None)
    """
    return next((kind for kind, magic in _MAGIC.items() if magic.match(head)), None)


_MAGIC = {
    "gzip": re.compile(rb"\x1f\x8b\x08"),
    "zstd": re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),  # pzstd begins with a frame to be skipped
    "lz4": re.compile(rb"\x04\x22\x4d\x18"),
    # "BZh9" alone could be a word: the six bytes after it begin a block, or the end of a stream without one.
    "bz2": re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"),
    "xz": re.compile(rb"\xfd7zXZ\x00"),
}


def is_compressed(path: str) -> bool:
    """Whether a file is compressed, by its name or its first bytes. False if it cannot be opened: reading it raises."""
    if compression_of(path):
        return True
    try:
        with open(path, "rb") as file:
            return compression_of_bytes(file.read(_HEAD_BYTES)) is not None
    except OSError:
        return False


def open_raw(path: Path) -> io.BufferedReader:
    """The uncompressed bytes of a file, as a stream. A cut-off archive is an error when its end is reached."""
    with open(path, "rb") as file:
        kind = compression_of(path.name) or compression_of_bytes(file.read(_HEAD_BYTES))
    if kind is None:
        return open(path, "rb")
    return io.BufferedReader(_Decompressed(path, kind), _BUFFER_BYTES)


class _Decompressed(io.RawIOBase):
    """A decompressing stream as a plain one, with errors that name the file, and a limit on its output."""

    def __init__(self, path: Path, kind: str) -> None:
        self._path, self._kind = path, kind
        self._file: Any
        self._stream: Any
        self._errors: tuple[type[Exception], ...] = (OSError, EOFError)
        self._given_bytes = 0
        if kind == "bz2":
            import bz2  # some Pythons are built without it, or without lzma

            self._file = open(path, "rb", buffering=0)  # noqa: SIM115
            self._stream = _Members(self._file, bz2.BZ2Decompressor, padding=b"")
        elif kind == "xz":
            import lzma

            begin = functools.partial(lzma.LZMADecompressor, lzma.FORMAT_XZ, memlimit=_XZ_MEMORY_BYTES)
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115
            self._stream = _Members(self._file, begin, padding=b"\0")
            self._errors = (OSError, EOFError, lzma.LZMAError)
        else:
            import pyarrow as pa

            self._file = pa.OSFile(str(path))
            self._stream = pa.CompressedInputStream(self._file, kind)
            self._errors = (OSError, pa.ArrowException)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        try:
            data: bytes = self._stream.read(len(view))
        except self._errors as error:
            if isinstance(error, OSError) and error.errno is not None:  # of the disk, not of the archive
                raise
            remedy = "fetch or compress it again, or give it the extension of what it is; or on_error='skip'"
            what = f"this {self._kind} file is truncated or damaged"
            raise SourceError(what, file=self._path, reason=first_line(error), remedy=remedy) from None
        view[: len(data)] = data
        self._given_bytes += len(data)
        if self._given_bytes > _FREE_BYTES:
            self._refuse_bomb()
        return len(data)

    def _refuse_bomb(self) -> None:
        read_bytes = self._file.tell()
        if self._given_bytes > _MAX_EXPANSION * read_bytes:
            raise DecompressionBomb(
                f"{read_bytes:,} bytes of this {self._kind} file gave {self._given_bytes:,}, over {_MAX_EXPANSION} "
                f"times as many: beyond {_FREE_BYTES:,} bytes that is not read on",
                file=self._path,
                remedy="decompress the file yourself, if it is meant so",
            )

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
            self._file.close()
        super().close()


class _Members:
    """bz2 or xz streams end to end, with zeros between them if the format allows padding.

    Python's own file objects ignore what follows the first stream if it is not another one, and Arrow fails at an empty
    one between others.
    """

    def __init__(self, file: IO[bytes], begin: Callable[[], Any], *, padding: bytes) -> None:
        self._file, self._begin, self._padding = file, begin, padding
        self._member: Any = None
        self._unused = b""

    def read(self, num_bytes: int) -> bytes:
        given = b""
        while not given:
            if self._member is None and not self._begin_member():
                return b""
            data = b""
            if self._member.needs_input:
                data = self._next_bytes()
                if not data:
                    raise EOFError("Truncated compressed stream")
            given = self._member.decompress(data, num_bytes)
            if self._member.eof:
                self._unused, self._member = self._member.unused_data, None
        return given

    def _begin_member(self) -> bool:
        """Begin to decompress the next stream; False at the end of the file."""
        while data := self._next_bytes():
            self._unused = data.lstrip(self._padding)
            if self._unused:
                self._member = self._begin()
                return True
        return False

    def _next_bytes(self) -> bytes:
        data, self._unused = self._unused or self._file.read(_BUFFER_BYTES), b""
        return data

    def close(self) -> None:
        self._member = None
