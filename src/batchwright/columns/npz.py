"""npz shards. A column is one array, with rows on its first axis. Nothing is unpickled.

A column that is read in full is checked against the archive's checksum: a quarter of the time at full speed.
"""

from __future__ import annotations

import contextlib
import functools
import math
import struct
import zipfile
import zlib
from collections.abc import Sequence
from typing import IO, Any

from batchwright.base.errors import SourceError
from batchwright.columns.flat import Fill, FlatColumn, FlatShard, closed_on_error, read_at
from batchwright.columns.npy import read_npy_header
from batchwright.columns.schema import DAMAGED, check_dtype, chosen, column_error, row_shape

__all__ = ["open_npz"]

_UNPACKED_BYTES = 256 << 10
"""The bytes unpacked at once. zipfile copies its result a few times."""
_LOCAL_HEADER = struct.Struct("<26xHH")
_BAD_ZIP = (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, NotImplementedError, ValueError)
"""The errors of zipfile on bytes that are not an archive, or on an archive that it cannot read."""


def open_npz(path: str, columns: Sequence[str] | None) -> FlatShard:
    """Arrays that are stored (`np.savez`) or deflated (`np.savez_compressed`)."""
    with closed_on_error() as opened:
        try:
            archive = opened.enter_context(zipfile.ZipFile(path))
        except _BAD_ZIP as error:
            raise _damaged(path, error) from None
        infos = archive.infolist()
        names = [info.filename.removesuffix(".npy") for info in infos]
        by_name = dict(zip(names, infos, strict=True))
        members = {
            name: _open_member(_Member(path, name, by_name[name], archive, opened))
            for name in chosen(names, columns, path)
        }
        return FlatShard(path, members, opened)


class _Member:
    """One file of an archive."""

    def __init__(
        self, path: str, name: str, info: zipfile.ZipInfo, archive: zipfile.ZipFile, opened: contextlib.ExitStack
    ) -> None:
        self.path, self.name, self.info, self.archive, self.opened = path, name, info, archive, opened
        self.header_bytes = 0

    def read_at(self, buffer: memoryview, offset: int) -> None:
        assert self.archive.fp is not None
        read_at(self.archive.fp.fileno(), buffer, offset, file=self.path)


def _open_member(member: _Member) -> FlatColumn:
    path, name, info = member.path, member.name, member.info
    if not info.filename.endswith(".npy"):
        raise column_error(f"member {info.filename!r} is no array", file=path, column=name)
    try:
        with member.archive.open(info) as stream:
            dtype, shape, is_fortran = read_npy_header(stream)
            member.header_bytes = stream.tell()
    except _BAD_ZIP as error:
        raise _damaged(path, error, name) from None
    check_dtype(dtype, file=path, column=name)
    row = row_shape(shape, file=path, column=name)
    if info.file_size != member.header_bytes + math.prod(shape) * dtype.itemsize:
        raise _damaged(path, f"its header says shape {shape} of {dtype}, it has {info.file_size:,} bytes", name)
    open_fill = _stored if info.compress_type == zipfile.ZIP_STORED else _deflated
    return FlatColumn(dtype, shape[0], row, functools.partial(open_fill, member), is_fortran and len(row) > 0)


def _stored(member: _Member) -> Fill:
    """The bytes of an array that is stored uncompressed."""
    header = bytearray(_LOCAL_HEADER.size)
    member.read_at(memoryview(header), member.info.header_offset)
    begin = member.info.header_offset + _LOCAL_HEADER.size + sum(_LOCAL_HEADER.unpack(header))
    array_header = bytearray(member.header_bytes)
    member.read_at(memoryview(array_header), begin)
    checked_bytes, checksum = member.header_bytes, zlib.crc32(array_header)

    def fill(buffer: memoryview, offset: int) -> None:
        nonlocal checked_bytes, checksum
        at = member.header_bytes + offset
        member.read_at(buffer, begin + at)
        if at == checked_bytes:
            checksum = zlib.crc32(buffer, checksum)
            checked_bytes += len(buffer)
            if checked_bytes == member.info.file_size and checksum != member.info.CRC:
                raise _damaged(member.path, "its checksum is wrong", member.name)

    return fill


def _deflated(member: _Member) -> Fill:
    """The bytes of an array that is deflated. Those before an offset are unpacked and passed over."""
    stream: IO[bytes] = member.opened.enter_context(member.archive.open(member.info))
    position = 0

    def fill(buffer: memoryview, offset: int) -> None:
        nonlocal position
        begin = member.header_bytes + offset
        try:
            while position < begin + len(buffer):
                stop = begin if position < begin else begin + len(buffer)
                part = stream.read(min(stop - position, _UNPACKED_BYTES))
                if not part:
                    raise EOFError("it ends in the middle")
                if position >= begin:
                    buffer[position - begin : position - begin + len(part)] = part
                position += len(part)
        except _BAD_ZIP as error:
            raise _damaged(member.path, error, member.name) from None

    return fill


def _damaged(file: str, error: Any, column: str | None = None) -> SourceError:
    what = "not an npz file, or damaged" if column is None else f"column {column!r} is damaged"
    return SourceError(what, file=file, column=column, reason=error, remedy=DAMAGED)
