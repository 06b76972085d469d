"""npz: one array a column, the first axis positions. Nothing in it is ever unpickled.

What is read whole is checked against the archive's checksums, which costs a quarter of the time at full speed.
"""

from __future__ import annotations

import io
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from batchwright.base.errors import SourceError
from batchwright.columns.flat import DAMAGED, SCRATCH_BYTES, RowReader, read_at
from batchwright.columns.schema import (
    Column,
    Schema,
    Wanted,
    check_dtype,
    check_shape,
    chosen,
    pieces,
    rows_of,
    sorted_schema,
    without,
)

__all__ = ["NpzShard"]

_HEADER_BYTES = 10_000
"""Of one array, at most: NumPy's own limit."""
_UNPACKED_BYTES = 256 << 10
"""Unpacked at once: zipfile copies what it returns a few times."""
_DEFLATE_RATIO = 1_100
"""No deflated data is more than 1,032 times its size."""
_BAD_ZIP = (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, NotImplementedError, ValueError)
"""What zipfile raises on bytes that are no archive, or one that it cannot read."""


@dataclass(frozen=True, slots=True)
class _Member:
    """One array in the archive: where it lies, and what its header says."""

    info: zipfile.ZipInfo
    header_bytes: int
    header_checksum: int
    data_offset: int
    """Of the array's first byte in the file; only of what is stored as it is."""
    dtype: np.dtype[Any]
    rows: int
    shape: tuple[int, ...]
    is_fortran: bool

    @property
    def is_stored(self) -> bool:
        return self.info.compress_type == zipfile.ZIP_STORED

    @property
    def num_bytes(self) -> int:
        return self.rows * math.prod(self.shape) * self.dtype.itemsize


class NpzShard:
    """An npz file whose arrays are stored (`np.savez`) or deflated (`np.savez_compressed`)."""

    def __init__(self, path: str, columns: Sequence[str] | None) -> None:
        self.path = path
        try:
            self._archive = zipfile.ZipFile(path)
        except _BAD_ZIP as error:
            raise _damaged(path, error) from None
        self._file = self._archive.fp
        self._streams: list[IO[bytes]] = []
        try:
            self._members = self._open_members(columns)
        except BaseException:
            self.close()
            raise
        self.rows: int = rows_of({name: member.rows for name, member in self._members.items()}, file=path)
        self.schema: Schema = sorted_schema(
            {name: Column(member.dtype.newbyteorder("="), member.shape) for name, member in self._members.items()}
        )
        whole = sum(member.num_bytes for member in self._members.values() if member.is_fortran)
        self.decode_bytes: int = whole + 2 * SCRATCH_BYTES * len(self._members)

    def _open_members(self, columns: Sequence[str] | None) -> dict[str, _Member]:
        infos = self._archive.infolist()
        for info in infos:
            name = info.filename
            if name.startswith(("/", "\\")) or ".." in name.replace("\\", "/").split("/") or ":" in name[:2]:
                raise SourceError(
                    f"a member of the archive is called {name!r}, which leads out of it",
                    file=self.path,
                    remedy="do not use this file unless you know who made it",
                )
        by_name = {info.filename.removesuffix(".npy"): info for info in infos}
        names = chosen([info.filename.removesuffix(".npy") for info in infos], columns, self.path)
        return {name: self._open_member(name, by_name[name]) for name in names}

    def _open_member(self, name: str, info: zipfile.ZipInfo) -> _Member:
        if not info.filename.endswith(".npy"):
            raise SourceError(
                f"member {info.filename!r} is no array", file=self.path, column=name, remedy=without(name)
            )
        try:
            with self._archive.open(info) as stream:
                begins = _read_header(stream)
            (dtype, shape, is_fortran) = _parse_header(begins)
        except _BAD_ZIP as error:
            raise _damaged(self.path, error, name) from None
        check_dtype(dtype, file=self.path, column=name)
        if not shape:
            raise SourceError(
                f"column {name!r} is a single value, not one for each row",
                file=self.path,
                column=name,
                remedy=f"save an array of one value a row, or {without(name)}",
            )
        rows, row_shape = shape[0], shape[1:]
        check_shape(row_shape, file=self.path, column=name)
        if info.file_size != len(begins) + math.prod(shape) * dtype.itemsize:
            raise _lies(self.path, name, f"its header says shape {shape} of {dtype}, it has {info.file_size:,} bytes")
        return _Member(
            info=info,
            header_bytes=len(begins),
            header_checksum=zlib.crc32(begins),
            data_offset=self._data_offset(name, info) + len(begins),
            dtype=dtype,
            rows=rows,
            shape=row_shape,
            is_fortran=is_fortran and len(row_shape) > 0,
        )

    def _data_offset(self, name: str, info: zipfile.ZipInfo) -> int:
        """Where a member's data begin: behind a header of its own, whose length only it says."""
        size = os.fstat(self._descriptor).st_size
        header = bytearray(30)
        read_at(self._descriptor, memoryview(header), info.header_offset, file=self.path)
        name_bytes, extra_bytes = struct.unpack("<HH", header[26:30])
        begin = info.header_offset + 30 + int(name_bytes) + int(extra_bytes)
        if begin + info.compress_size > size:
            raise _lies(self.path, name, f"it should end at byte {begin + info.compress_size:,} of {size:,}")
        most = info.compress_size if info.compress_type == zipfile.ZIP_STORED else _DEFLATE_RATIO * info.compress_size
        if info.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) and info.file_size > most:
            raise _lies(self.path, name, f"{info.compress_size:,} bytes cannot become {info.file_size:,}")
        return begin

    @property
    def _descriptor(self) -> int:
        assert self._file is not None
        return self._file.fileno()

    def chunks(self, wanted: Wanted, rows_per_chunk: int) -> Iterator[dict[str, NDArray[Any]]]:
        readers = {name: self._reader(name, rows_per_chunk) for name in self.schema}
        for piece in pieces(wanted, self.rows, rows_per_chunk):
            yield {name: reader.take(piece) for name, reader in readers.items()}
        for reader in readers.values():
            reader.finish()

    def _reader(self, name: str, rows_per_chunk: int) -> RowReader | _Whole:
        member = self._members[name]
        fill = _Stored(self, name, member).fill if member.is_stored else _Packed(self, name, member).fill
        if member.is_fortran:
            return _Whole(fill, member)
        return RowReader(fill, member.dtype, member.shape, self.rows, rows_per_chunk)

    def close(self) -> None:
        for stream in self._streams:
            stream.close()
        self._archive.close()

    def __enter__(self) -> NpzShard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _Stored:
    """The bytes of an array that lies in the file as it is."""

    def __init__(self, shard: NpzShard, name: str, member: _Member) -> None:
        self.shard, self.name, self.member = shard, name, member
        self.checked_bytes, self.checksum = 0, member.header_checksum

    def fill(self, buffer: memoryview, offset: int) -> None:
        member = self.member
        read_at(self.shard._descriptor, buffer, member.data_offset + offset, file=self.shard.path)
        if offset == self.checked_bytes:
            self.checksum = zlib.crc32(buffer, self.checksum)
            self.checked_bytes += len(buffer)
            if self.checked_bytes == member.num_bytes and self.checksum != member.info.CRC:
                raise _damaged(self.shard.path, "its checksum is wrong", self.name)


class _Packed:
    """The bytes of an array that is deflated: what lies before them is read over."""

    def __init__(self, shard: NpzShard, name: str, member: _Member) -> None:
        self.shard, self.name = shard, name
        self.position = -member.header_bytes
        self.stream: IO[bytes] | None = None
        self.info = member.info

    def fill(self, buffer: memoryview, offset: int) -> None:
        try:
            if self.stream is None:
                self.stream = self.shard._archive.open(self.info)
                self.shard._streams.append(self.stream)  # the file stays open until each of them is closed
            while self.position < offset:
                self._advance(len(self.stream.read(min(offset - self.position, _UNPACKED_BYTES))))
            done = 0
            while done < len(buffer):
                part = self.stream.read(min(len(buffer) - done, _UNPACKED_BYTES))
                buffer[done : done + len(part)] = part
                done += len(part)
                self._advance(len(part))
        except _BAD_ZIP as error:
            raise _damaged(self.shard.path, error, self.name) from None

    def _advance(self, num_bytes: int) -> None:
        if not num_bytes:
            raise EOFError("it ends in the middle")
        self.position += num_bytes


class _Whole:
    """Rows of an array in Fortran order, where a row lies all over the file: it is read whole."""

    def __init__(self, fill: Any, member: _Member) -> None:
        self.fill, self.member = fill, member
        self.array: NDArray[Any] | None = None

    def take(self, piece: Wanted) -> NDArray[Any]:
        if self.array is None:
            member = self.member
            data = np.empty(member.num_bytes, np.uint8)
            self.fill(data.data, 0)
            if member.dtype.kind == "b":
                np.not_equal(data, 0, out=data.view(np.bool_))
            typed = data.view(member.dtype)
            if not member.dtype.isnative:
                typed = typed.astype(member.dtype.newbyteorder("="))
            self.array = typed.reshape((member.rows, *member.shape), order="F")
        return self.array[piece]

    def finish(self) -> None:
        pass


def _read_header(stream: IO[bytes]) -> bytes:
    """The bytes before the data: magic, version, length, and a dict as text. No more of them than NumPy allows."""
    begins = stream.read(npy.MAGIC_LEN)
    if len(begins) < npy.MAGIC_LEN or not begins.startswith(npy.MAGIC_PREFIX):
        raise ValueError("not an array in NumPy's format")
    size = 2 if begins[6] == 1 else 4
    begins += stream.read(size)
    length = int.from_bytes(begins[npy.MAGIC_LEN :], "little")
    if len(begins) < npy.MAGIC_LEN + size or length > _HEADER_BYTES:
        raise ValueError(f"a header of {length:,} bytes")
    begins += stream.read(length)
    if len(begins) < npy.MAGIC_LEN + size + length:
        raise ValueError("it ends in its header")
    return begins


def _parse_header(begins: bytes) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    stream = io.BytesIO(begins)
    version = npy.read_magic(stream)
    if version == (1, 0):
        shape, is_fortran, dtype = npy.read_array_header_1_0(stream)
    elif version in ((2, 0), (3, 0)):  # 3.0 differs in the names of fields only, which no column of ours has
        shape, is_fortran, dtype = npy.read_array_header_2_0(stream)
    else:
        raise ValueError(f"NumPy's format {version[0]}.{version[1]} is not known")
    if any(length < 0 for length in shape):
        raise ValueError(f"a shape of {shape}")
    return dtype, tuple(int(length) for length in shape), bool(is_fortran)


def _damaged(file: str, error: Exception | str, column: str | None = None) -> SourceError:
    what = "not an npz file, or damaged" if column is None else f"column {column!r} is damaged"
    return SourceError(what, file=file, column=column, reason=error, remedy=DAMAGED)


def _lies(file: str, column: str, reason: str) -> SourceError:
    return SourceError(
        f"column {column!r} is not as long as it says", file=file, column=column, reason=reason, remedy=DAMAGED
    )
