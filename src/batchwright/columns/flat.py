"""npz and safetensors shards: each column is an array in a file, row after row, read by `pread`. Nothing is unpickled.

Files are not mapped. Memory is limited to the buffers, and a file that is cut short is an error; as a map it would end
the process with SIGBUS. An npz column that is read in full is checked against the archive's checksum: a quarter of the
time at full speed. All sizes in a header are checked first.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

import msgspec
import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from batchwright.base.errors import SourceError
from batchwright.columns.shard import (
    DAMAGED,
    Column,
    Rows,
    ShardReader,
    Wanted,
    check_dtype,
    chosen,
    column_error,
    damaged,
    pieces,
    row_numbers,
    row_shape,
    rows_of,
)

__all__ = ["read_npy_header"]

_SCRATCH_BYTES = 1 << 20
"""Read at once where only some rows are wanted: a span that stays in the processor's cache while they are picked."""
_GAP_BYTES = 16 << 10
"""A gap between wanted rows that is read over: to begin a read costs about as much."""

Fill = Callable[[memoryview, int], None]
"""Fill a buffer with the bytes of a column from an offset on, which never goes back."""


def read_at(descriptor: int, buffer: memoryview, offset: int, *, file: str) -> None:
    """Fill a buffer from a file. A file that ends before is an error."""
    done = 0
    while done < len(buffer):
        try:
            got = os.preadv(descriptor, [buffer[done:]], offset + done)
        except OSError as error:
            raise SourceError(f"the file cannot be read: {error.strerror}", file=file, remedy=DAMAGED) from None
        if not got:
            ends = os.fstat(descriptor).st_size
            raise SourceError(f"the file ends at byte {ends:,}, in the middle of a column", file=file, remedy=DAMAGED)
        done += got


def read_bytes(descriptor: int, num_bytes: int, offset: int, *, file: str) -> bytearray:
    data = bytearray(num_bytes)
    read_at(descriptor, memoryview(data), offset, file=file)
    return data


@dataclass(frozen=True, slots=True)
class FlatColumn:
    """An array in a file, whose first axis is rows."""

    dtype: np.dtype[Any]
    """The stored dtype."""
    rows: int
    shape: tuple[int, ...]
    """The shape of one row."""
    open: Callable[[], Fill]
    """Begin to read its bytes."""
    is_fortran: bool = False

    @property
    def num_bytes(self) -> int:
        return self.rows * math.prod(self.shape) * self.dtype.itemsize


class FlatShard(ShardReader):
    """Arrays in one open file."""

    def __init__(self, path: str, columns: dict[str, FlatColumn], opened: contextlib.ExitStack) -> None:
        self.path, self._columns, self._opened = path, columns, opened
        self.rows: int = rows_of({name: column.rows for name, column in columns.items()}, file=path)
        self.schema = {name: Column(column.dtype.newbyteorder("="), column.shape) for name, column in columns.items()}
        in_memory = sum(2 * column.num_bytes for column in columns.values() if column.is_fortran)
        self.decode_bytes: int = in_memory + 2 * _SCRATCH_BYTES * len(columns)

    def chunks(self, wanted: Wanted, rows_per_chunk: int) -> Iterator[dict[str, NDArray[Any]]]:
        readers = {name: _RowReader(self._columns[name], rows_per_chunk) for name in self.schema}
        for rows in pieces(wanted, self.rows, rows_per_chunk):
            yield {name: reader.take(rows) for name, reader in readers.items()}
        for reader in readers.values():
            reader.finish()

    def close(self) -> None:
        self._opened.close()


class _RowReader:
    """The rows of one column, read in order. The next call overwrites its result."""

    def __init__(self, column: FlatColumn, most_rows: int) -> None:
        self._column = column
        self._fill = _by_rows(column) if column.is_fortran else column.open()
        self._row_bytes: int = column.dtype.itemsize * math.prod(column.shape)
        self._out: NDArray[np.uint8] = np.empty((min(column.rows, most_rows), self._row_bytes), np.uint8)
        self._next_row = 0

    def take(self, rows: Rows) -> NDArray[Any]:
        out = self._out[: len(rows)]
        if isinstance(rows, range) and rows.step == 1:
            self._read(out, rows.start)
        else:
            self._pick(row_numbers(rows), out)
        return self._typed(out)

    def finish(self) -> None:
        """Read the rest if it is small. The last byte of a column may come with the checksum of all."""
        left = self._column.rows - self._next_row
        if 0 < left * self._row_bytes <= _GAP_BYTES:
            self._read(np.empty((left, self._row_bytes), np.uint8), self._next_row)

    @functools.cached_property
    def _scratch(self) -> NDArray[np.uint8]:
        return np.empty((2 + (_SCRATCH_BYTES + _GAP_BYTES) // self._row_bytes, self._row_bytes), np.uint8)

    def _pick(self, rows: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
        is_far = np.diff(rows) * self._row_bytes > _GAP_BYTES
        is_next_span = np.diff(rows * self._row_bytes // _SCRATCH_BYTES) > 0
        cuts = np.flatnonzero(is_far | is_next_span) + 1
        for start, stop in zip([0, *cuts.tolist()], [*cuts.tolist(), len(rows)], strict=True):
            first, last = int(rows[start]), int(rows[stop - 1])
            if 0 <= (first - self._next_row) * self._row_bytes <= _GAP_BYTES:
                first = self._next_row  # without holes: a column that is read in full can be checked
            span = self._scratch[: last + 1 - first]
            self._read(span, first)
            np.take(span, rows[start:stop] - first, axis=0, out=out[start:stop], mode="clip")

    def _read(self, into: NDArray[np.uint8], first_row: int) -> None:
        self._fill(into.reshape(-1).data, first_row * self._row_bytes)
        self._next_row = first_row + len(into)

    def _typed(self, out: NDArray[np.uint8]) -> NDArray[Any]:
        dtype = self._column.dtype
        if dtype.kind == "b":
            np.not_equal(out, 0, out=out.view(np.bool_))  # a byte of 2 is not a boolean: sums would be wrong
        typed = out.reshape(-1).view(dtype).reshape(len(out), *self._column.shape)
        return typed.astype(dtype.newbyteorder("="), copy=False)


def _by_rows(column: FlatColumn) -> Fill:
    """The bytes of an array in Fortran order, row after row. A row is all over the file, so it is read in full."""

    @functools.cache
    def transposed() -> memoryview:
        data = np.empty(column.num_bytes, np.uint8)
        column.open()(data.data, 0)
        stored = data.view(column.dtype).reshape((column.rows, *column.shape), order="F")
        return np.ascontiguousarray(stored).reshape(-1).view(np.uint8).data

    def fill(buffer: memoryview, offset: int) -> None:
        buffer[:] = transposed()[offset : offset + len(buffer)]

    return fill


# The header of an array in NumPy's format

_MOST_BYTES = 10_000
"""NumPy's own limit."""
_READERS = {
    (1, 0): npy.read_array_header_1_0,
    (2, 0): npy.read_array_header_2_0,
    (3, 0): npy.read_array_header_2_0,  # differs only in the names of fields, which are refused later
}


def read_npy_header(stream: IO[bytes]) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    """(dtype, shape, whether in Fortran order); the stream is then at the first byte of data. ValueError otherwise."""
    version = npy.read_magic(stream)
    if version not in _READERS:
        raise ValueError(f"NumPy's format {version[0]}.{version[1]} is not known")
    length_field = stream.read(2 if version == (1, 0) else 4)
    length = int.from_bytes(length_field, "little")
    if length > _MOST_BYTES:
        raise ValueError(f"a header of {length:,} bytes")
    try:
        shape, is_fortran, dtype = _READERS[version](io.BytesIO(length_field + stream.read(length)))
    except (SyntaxError, TypeError) as error:
        raise ValueError(str(error)) from None
    if any(length < 0 for length in shape):
        raise ValueError(f"a shape of {shape}")
    return dtype, tuple(map(int, shape)), bool(is_fortran)


# npz

_UNPACKED_BYTES = 256 << 10
"""The bytes unpacked at once. zipfile copies its result a few times."""
_LOCAL_HEADER = struct.Struct("<26xHH")
_BAD_ZIP = (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, NotImplementedError, ValueError)
"""The errors of zipfile on bytes that are not an archive, or on an archive that it cannot read."""


def open_npz(path: str, columns: Sequence[str] | None) -> FlatShard:
    """Arrays that are stored (`np.savez`) or deflated (`np.savez_compressed`)."""
    with contextlib.ExitStack() as opened:
        try:
            archive = opened.enter_context(zipfile.ZipFile(path))
        except _BAD_ZIP as error:
            raise damaged("an npz", path, error) from None
        infos = archive.infolist()
        names = [info.filename.removesuffix(".npy") for info in infos]
        by_name = dict(zip(names, infos, strict=True))
        wanted = chosen(names, columns, path)
        members = {name: _Member(path, name, by_name[name], archive).column() for name in wanted}
        return FlatShard(path, members, opened.pop_all())


class _Member:
    """One array of an archive."""

    def __init__(self, path: str, name: str, info: zipfile.ZipInfo, archive: zipfile.ZipFile) -> None:
        self.path, self.name, self.info, self.archive = path, name, info, archive
        self.header_bytes = 0

    def column(self) -> FlatColumn:
        info = self.info
        if not info.filename.endswith(".npy"):
            raise column_error(f"member {info.filename!r} is no array", file=self.path, column=self.name)
        try:
            with self.archive.open(info) as stream:
                dtype, shape, is_fortran = read_npy_header(stream)
                self.header_bytes = stream.tell()
        except _BAD_ZIP as error:
            raise self._damaged(error) from None
        check_dtype(dtype, file=self.path, column=self.name)
        row = row_shape(shape, file=self.path, column=self.name)
        if info.file_size != self.header_bytes + math.prod(shape) * dtype.itemsize:
            raise self._damaged(f"its header says shape {shape} of {dtype}, it has {info.file_size:,} bytes")
        open_fill = self._stored if info.compress_type == zipfile.ZIP_STORED else self._deflated
        return FlatColumn(dtype, shape[0], row, open_fill, is_fortran and len(row) > 0)

    def _stored(self) -> Fill:
        """The bytes of an array that is stored uncompressed."""
        assert self.archive.fp is not None
        descriptor, info = self.archive.fp.fileno(), self.info
        header = read_bytes(descriptor, _LOCAL_HEADER.size, info.header_offset, file=self.path)
        begin = info.header_offset + _LOCAL_HEADER.size + sum(_LOCAL_HEADER.unpack(header))
        checksum = zlib.crc32(read_bytes(descriptor, self.header_bytes, begin, file=self.path))
        checked_bytes = self.header_bytes

        def fill(buffer: memoryview, offset: int) -> None:
            nonlocal checked_bytes, checksum
            at = self.header_bytes + offset
            read_at(descriptor, buffer, begin + at, file=self.path)
            if at == checked_bytes:
                checksum = zlib.crc32(buffer, checksum)
                checked_bytes += len(buffer)
                if checked_bytes == info.file_size and checksum != info.CRC:
                    raise self._damaged("its checksum is wrong")

        return fill

    def _deflated(self) -> Fill:
        """The bytes of an array that is deflated. Those before an offset are unpacked and passed over."""
        stream = self.archive.open(self.info)
        position = 0

        def fill(buffer: memoryview, offset: int) -> None:
            nonlocal position
            begin = self.header_bytes + offset
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
                raise self._damaged(error) from None

        return fill

    def _damaged(self, reason: object) -> SourceError:
        return damaged("an npz", self.path, reason, self.name)


# safetensors: a JSON header has the place of each column, and the columns follow

_MOST_HEADER_BYTES = 100 << 20
"""The format's own limit."""
_DTYPES = {
    **{f"F{8 * size}": np.dtype(f"<f{size}") for size in (2, 4, 8)},
    **{f"I{8 * size}": np.dtype(f"<i{size}") for size in (1, 2, 4, 8)},
    **{f"U{8 * size}": np.dtype(f"<u{size}") for size in (1, 2, 4, 8)},
    "BOOL": np.dtype(np.bool_),
}


class _Tensor(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def open_safetensors(path: str, columns: Sequence[str] | None) -> FlatShard:
    """One tensor a column, its first axis rows."""
    with contextlib.ExitStack() as opened:
        file = opened.enter_context(open(path, "rb", buffering=0))
        descriptor = file.fileno()
        data_offset, tensors = _read_header(descriptor, path)

        def column_of(name: str) -> FlatColumn:
            tensor = tensors[name]
            dtype = _dtype_of(tensor, name, path)
            begin = data_offset + tensor.data_offsets[0]
            shape = row_shape(tuple(tensor.shape), file=path, column=name)

            def fill(buffer: memoryview, offset: int) -> None:
                read_at(descriptor, buffer, begin + offset, file=path)

            return FlatColumn(dtype, tensor.shape[0], shape, lambda: fill)

        found = {name: column_of(name) for name in chosen(tensors, columns, path)}
        return FlatShard(path, found, opened.pop_all())


def _read_header(descriptor: int, path: str) -> tuple[int, dict[str, _Tensor]]:
    """(The offset of the data, tensors.) Tensors must follow one another to the end of the file."""
    size = os.fstat(descriptor).st_size
    length = int.from_bytes(read_bytes(descriptor, min(8, size), 0, file=path), "little")
    data_bytes = size - 8 - length
    if size < 8 or length > _MOST_HEADER_BYTES or data_bytes < 0:
        raise damaged("a safetensors", path, f"a header of {length:,} bytes in a file of {size:,}")
    try:
        entries = msgspec.json.decode(read_bytes(descriptor, length, 8, file=path), type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        tensors = {name: msgspec.json.decode(entry, type=_Tensor) for name, entry in entries.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise damaged("a safetensors", path, error) from None
    at = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        begin, end = tensor.data_offsets
        if begin != at or end < begin or min(tensor.shape, default=0) < 0:
            what = f"bytes {begin:,} to {end:,} of shape {tensor.shape}, after byte {at:,}"
            raise damaged("a safetensors", path, what, name)
        at = end
    if at != data_bytes:
        raise damaged("a safetensors", path, f"{data_bytes:,} bytes of data, the header says {at:,}")
    return 8 + length, tensors


def _dtype_of(tensor: _Tensor, name: str, path: str) -> np.dtype[np.generic]:
    dtype, (begin, end) = _DTYPES.get(tensor.dtype), tensor.data_offsets
    if dtype is None:
        what = f"column {name!r} is {tensor.dtype}, which NumPy does not have"
        raise column_error(what, file=path, column=name, remedy="save it as F32 or F16")
    if math.prod(tensor.shape) * dtype.itemsize != end - begin:
        raise damaged("a safetensors", path, f"shape {tensor.shape} of {tensor.dtype} in {end - begin:,} bytes", name)
    return dtype
