"""The file format for batches: a header, then the columns, with checksums over every byte.

    8 bytes   "BATCHWRT"
    4 bytes   version of the format, little-endian as are the next two
    4 bytes   length of the header, in bytes
    8 bytes   xxh3_64 of the 16 bytes before and of the header
    header    JSON: stamp, split, number, batch_size, num_batches, byte_order, fields, and the xxh3_64 of each field;
              spaces at its end, up to a multiple of 64
    fields    all rows of the first, then all rows of the second, ...; zeros after each, up to a multiple of 64

Any run of rows is a view, across batches too. The header comes last, so a file that was not finished has none.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from batchwright.base.errors import QueueError
from batchwright.base.files import reserve
from batchwright.base.machine import name_of_descriptor
from batchwright.base.memory import ALIGNMENT, BlockPool
from batchwright.queue.messages import file_in_words
from batchwright.queue.schema import BatchField, fields_of

_MAGIC = b"BATCHWRT"
_VERSION = 1
_START = struct.Struct("<8sII")
_CHECKSUM = struct.Struct("<Q")
_BEFORE_HEADER = _START.size + _CHECKSUM.size
_FIRST_READ_BYTES = 4096
"""Most headers are shorter: one read is enough."""
_MOST_HEADER_BYTES = 1 << 24
_LARGE_FILE_BYTES, _LARGE_UNIT = 1 << 22, 1 << 16
"""Fields aligned to the kernel's large pages are written a fifth faster."""
_CHUNK_BYTES = 1 << 20
"""The bytes read and hashed at a time. Hashing then finds them in the processor's cache."""


class DamagedFile(QueueError):
    """A file that is not as its writer wrote it. `reason` says how that is known."""

    @property
    def reason(self) -> str:
        return str(self.where["reason"])


class FileShape(NamedTuple):
    """The cut of the rows of a file into batches. A state counts in these batches."""

    batch_size: int
    num_batches: int


@dataclass(frozen=True, slots=True)
class FileFacts:
    """The content of a file, as its header describes it."""

    stamp: str
    split: str
    number: int
    batch_size: int
    num_batches: int
    fields: tuple[BatchField, ...]

    @property
    def shape(self) -> FileShape:
        return FileShape(self.batch_size, self.num_batches)

    @property
    def num_rows(self) -> int:
        return self.batch_size * self.num_batches

    @property
    def num_bytes(self) -> int:
        """The size of all fields together, in the file and in memory."""
        return sum(self._sizes())

    @property
    def offsets(self) -> tuple[int, ...]:
        """The offset of each field in bytes, from the start of the first field."""
        return (0, *accumulate(self._sizes()))[:-1]

    def under_another_name(self, split: str, number: int | None) -> str | None:
        """The reason why this cannot be the file of that name. None if it can. Kept batches have the number 0."""
        if (self.split, self.number) == (split, number or 0):
            return None
        return f"it is {self.split} file {self.number}, under the name of {file_in_words(split, number)}"

    def _sizes(self) -> list[int]:
        return [_round_up(self.num_rows * field.row_bytes) for field in self.fields]


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


# The header


class _FieldHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    dtype: str
    shape: list[int]
    role: str | None
    xxh3_64: str
    """16 hexadecimal digits: a header's length is known before its checksums are."""


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    stamp: str
    split: str
    number: int
    batch_size: int
    num_batches: int
    byte_order: str
    fields: list[_FieldHeader]


_decoder = msgspec.json.Decoder(_Header)


def _encoded(facts: FileFacts, checksums: Sequence[int]) -> bytes:
    fields = [
        _FieldHeader(field.name, field.dtype.name, list(field.shape), field.role, f"{checksum:016x}")
        for field, checksum in zip(facts.fields, checksums, strict=True)
    ]
    header = _Header(facts.stamp, facts.split, facts.number, facts.batch_size, facts.num_batches, sys.byteorder, fields)
    text = msgspec.json.encode(header)
    unit = _LARGE_UNIT if facts.num_bytes >= _LARGE_FILE_BYTES else ALIGNMENT
    text = text.ljust(-(-(_BEFORE_HEADER + len(text)) // unit) * unit - _BEFORE_HEADER)
    start = _START.pack(_MAGIC, _VERSION, len(text))
    return start + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(start + text)) + text


def _decoded(text: bytes) -> tuple[FileFacts, list[int]]:
    """Return (facts, checksums) of a header. Raises ValueError if it is wrong, as msgspec and the schema do."""
    header = _decoder.decode(text)
    fields = fields_of({"batch_schema": [msgspec.structs.asdict(field) for field in header.fields]})
    checksums = [int(field.xxh3_64, 16) for field in header.fields]
    if header.byte_order != sys.byteorder:
        raise ValueError(f"it is of a machine with byte order {header.byte_order!r}")
    if header.batch_size < 1 or header.num_batches < 1 or header.number < 0:
        raise ValueError(f"number {header.number} with {header.num_batches} batches of {header.batch_size} rows")
    facts = FileFacts(header.stamp, header.split, header.number, header.batch_size, header.num_batches, fields)
    return facts, checksums


# Writing


class BatchFileWriter:
    """Writes batches straight from their memory, each field at its own place in the file.

    with BatchFileWriter(part, facts) as writer:
        for arrays in batches:
            writer.append(arrays)
        writer.finish()
    os.replace(part, path)

    A file that was closed without `finish` is damaged for every reader, and the caller's to remove. A full disk
    raises the system's OSError, if possible before a batch is made.
    """

    def __init__(self, path: str | os.PathLike[str], facts: FileFacts, *, is_there: bool = False) -> None:
        """`is_there`: the file exists. If it is gone, it is not made again: FileNotFoundError."""
        self.facts = facts
        self.num_appended: int = 0
        self._hashes = [xxhash.xxh3_64() for _ in facts.fields]
        self._first_byte = len(_encoded(facts, [0] * len(facts.fields)))
        self._places = [self._first_byte + offset for offset in facts.offsets]
        flags = os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC
        if not is_there:
            flags |= os.O_CREAT
        self._descriptor: int | None = os.open(path, flags, 0o666)
        try:
            _reserve(self._descriptor, self._first_byte + facts.num_bytes)
        except BaseException:
            self.close()
            raise

    def append(self, arrays: Sequence[NDArray[Any]]) -> None:
        """One batch: arrays in the order of the fields, as `checked` gives them."""
        facts = self.facts
        assert self._descriptor is not None, "the file is closed"
        assert self.num_appended < facts.num_batches, f"more than {facts.num_batches} batches"
        for number, (field, array) in enumerate(zip(facts.fields, arrays, strict=True)):
            assert (array.dtype, array.shape) == (field.dtype, (facts.batch_size, *field.shape)), field.name
            _write_all(self._descriptor, array.data, self._places[number])
            self._hashes[number].update(array.data)
            self._places[number] += array.nbytes
        self.num_appended += 1

    def finish(self, durable: bool = False) -> None:
        """Make the file whole: its header. `durable`: and on disk, so that a power cut cannot tear it."""
        facts, descriptor = self.facts, self._descriptor
        assert descriptor is not None, "the file is closed"
        assert self.num_appended == facts.num_batches, f"{self.num_appended} of {facts.num_batches} batches"
        for hashed, field in zip(self._hashes, facts.fields, strict=True):
            hashed.update(bytes(-facts.num_rows * field.row_bytes % ALIGNMENT))
        os.ftruncate(descriptor, self._first_byte + facts.num_bytes)  # the zeros after the last field
        _write_all(descriptor, _encoded(facts, [hashed.intdigest() for hashed in self._hashes]), 0)
        if durable:
            os.fsync(descriptor)

    def close(self) -> None:
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)

    def __enter__(self) -> BatchFileWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _reserve(descriptor: int, num_bytes: int) -> None:
    """Take the file's place on disk. Fields that grow side by side are then written faster too, by about a quarter."""
    if hasattr(os, "posix_fallocate"):  # by writing zeros it would cost as much as the batches
        try:
            reserve(descriptor, num_bytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # a file system that cannot
                raise


def _write_all(descriptor: int, data: memoryview | bytes, offset: int) -> None:
    written, num_bytes = os.pwrite(descriptor, data, offset), memoryview(data).nbytes
    while written < num_bytes:  # more than 2 GiB at once, or a signal, or a disk that is about to be full
        written += os.pwrite(descriptor, memoryview(data).cast("B")[written:], offset + written)


# Reading


def pooled(pool: BlockPool) -> Callable[[int], NDArray[np.uint8]]:
    """Memory for `read_batches`. It is used again when no array refers to it any more."""

    def memory(num_bytes: int) -> NDArray[np.uint8]:
        return pool.take(1, -(-num_bytes // 8)).view(np.uint8).reshape(-1)[:num_bytes]

    return memory


def read_facts(path: str | os.PathLike[str] | int) -> FileFacts:
    """Read the facts of a file from its header. The size of the file is checked; its fields are not read."""
    with _opened(path) as (descriptor, name):
        return _read_header(descriptor, name)[0]


def read_batches(
    path: str | os.PathLike[str] | int, memory: Callable[[int], NDArray[np.uint8]]
) -> tuple[FileFacts, dict[str, NDArray[Any]]]:
    """A file's facts and its fields, [rows, *shape] each, over `memory(num_bytes)`. Every byte of it was checked.

    A path, or a descriptor (which stays open). Raises DamagedFile unless a writer finished the file, and the system's
    OSError if the file is missing or may not be read.
    """
    with _opened(path) as (descriptor, name):
        facts, checksums, first_byte = _read_header(descriptor, name)
        num_bytes = facts.num_bytes
        data = memory(num_bytes)[:num_bytes]
        found: dict[str, NDArray[Any]] = {}
        ends = (*facts.offsets[1:], num_bytes)
        for field, start, end, checksum in zip(facts.fields, facts.offsets, ends, checksums, strict=True):
            if _read_and_hash(descriptor, data[start:end], first_byte + start, name) != checksum:
                raise _damaged(name, f"the bytes of field {field.name!r} do not match their checksum")
            rows = data[start : start + facts.num_rows * field.row_bytes]
            found[field.name] = rows.view(field.dtype).reshape(facts.num_rows, *field.shape)
        return facts, found


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str] | int) -> Iterator[tuple[int, str]]:
    """(descriptor, name for errors)."""
    if isinstance(path, int):
        descriptor, name = path, name_of_descriptor(path)
    else:  # it may be a pipe, and opening a pipe waits for its writer, unless told not to
        descriptor, name = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), os.fspath(path)
    try:
        yield descriptor, name
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise _damaged(name, f"the disk cannot read it: {error.strerror}") from error
    finally:
        if not isinstance(path, int):
            os.close(descriptor)


def _damaged(name: str, reason: str) -> DamagedFile:
    return DamagedFile(
        f"{Path(name).name} is damaged: {reason}",
        file=name,
        reason=reason,
        remedy="move it out of the queue: a provider makes it again",
    )


def _read_header(descriptor: int, name: str) -> tuple[FileFacts, list[int], int]:
    """Return (facts, checksums of the fields, the offset of the first field). All sizes fit the file's."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise _damaged(name, "it is not a file")
    start = os.pread(descriptor, _FIRST_READ_BYTES, 0)
    if len(start) < _BEFORE_HEADER:
        raise _damaged(name, f"it ends after {len(start)} bytes, inside its header")
    magic, version, length = _START.unpack_from(start)
    if magic != _MAGIC:
        unfinished = not any(start[:_BEFORE_HEADER])
        raise _damaged(name, "its writer did not finish it" if unfinished else "it does not begin as a file of batches")
    if version != _VERSION:
        raise _damaged(name, f"it has version {version} of the format, and this batchwright reads version {_VERSION}")
    first_byte = _BEFORE_HEADER + length
    if first_byte > min(status.st_size, _MOST_HEADER_BYTES) or first_byte % ALIGNMENT:
        raise _damaged(name, f"a header of {length:,} bytes in a file of {status.st_size:,}")
    if len(start) < first_byte:
        start += os.pread(descriptor, first_byte - len(start), len(start))
    text = start[_BEFORE_HEADER:first_byte]
    (checksum,) = _CHECKSUM.unpack_from(start, _START.size)
    if xxhash.xxh3_64_intdigest(start[: _START.size] + text) != checksum:
        raise _damaged(name, "its header does not match its checksum")
    try:
        facts, checksums = _decoded(text)
    except ValueError as error:
        raise _damaged(name, f"its header is wrong: {error}") from None
    if first_byte + facts.num_bytes != status.st_size:
        raise _damaged(name, f"it has {status.st_size:,} bytes, and its header says {first_byte + facts.num_bytes:,}")
    return facts, checksums, first_byte


def _read_and_hash(descriptor: int, into: NDArray[np.uint8], offset: int, name: str) -> int:
    """Fill memory from a file, and return the checksum of the bytes read."""
    hashed = xxhash.xxh3_64()
    view = into.data
    done = 0
    while done < len(view):
        chunk = view[done : done + _CHUNK_BYTES]
        num_read = os.preadv(descriptor, [chunk], offset + done)
        if not num_read:
            raise _damaged(name, f"it became shorter while it was read: nothing at byte {offset + done:,}")
        hashed.update(chunk[:num_read])
        done += num_read
    return hashed.intdigest()
