"""An append-only journal: a record is on disk in full, or not at all.

    file     magic, format version, the owner's id, the number of its first record, checksum
    record   payload length, number, checksum of the payload, checksum of these three; payload; a byte that is not zero

A writer that dies leaves at most one torn record: fewer bytes than a header, a payload that goes beyond the end of the
file, or (after a power cut) zeros up to the end. Any other record that does not match its checksum is damage.

One process writes; or several, each of which holds a shared lock while it reads what the others wrote and writes.
"""

from __future__ import annotations

import logging
import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import xxhash

from batchwright.base.errors import BusyError, StoreError
from batchwright.base.files import let_go_in_children, out_of_space_at, write_whole

__all__ = ["HEAD_BYTES", "RECORD_BYTES", "Journal", "Record", "read_head", "read_record", "read_records"]

log: logging.Logger = logging.getLogger("batchwright")

_MAGIC = b"bwJOURNL"
_FORMAT = 1
_FILE_HEAD = struct.Struct("<8sI16sQQ")
_RECORD_HEAD = struct.Struct("<QQQQ")
_CHECKED = struct.Struct("<QQQ")
"""What the header's own checksum is of."""
_END = b"\xa5"
"""A record never ends in a zero, so zeros at the end of the file are no record's."""
_SECTOR_BYTES = 512
"""What a disk writes at once: zeros that a power cut left begin where a sector or a record does."""
_READ_BYTES = 1 << 20
_LOOKS = 5
"""A record may be cut off and another written in its place while it is read: how often to look before it is damage."""
_MAX_PARTS = 512
"""Pieces of memory for one `writev`."""
_RESTORE = "restore the folder from a copy"

HEAD_BYTES = _FILE_HEAD.size
"""Of a journal without records."""
RECORD_BYTES = _RECORD_HEAD.size + len(_END)
"""Of a record, beside its payload."""

_checksum = xxhash.xxh3_64_intdigest


class Record(NamedTuple):
    number: int
    payload: bytes
    end_offset: int
    """Where the next record begins."""


class JournalHead(NamedTuple):
    owner_id: bytes
    first_number: int


# Writing


class Journal:
    """A writer's end of a journal.

    A record that `write` returned from survives the death of this process; after `sync`, also a power cut.
    A write that fails leaves the file as it was.
    """

    is_shared = False
    """Whether others write too. Then a record that is whole stays, even where an interrupt hit the call that wrote it:
    a reader may have seen it. `catch_up` gives it, like those of others."""

    def __init__(self, path: Path, descriptor: int, owner_id: bytes, num_bytes: int, last_number: int) -> None:
        self.path = path
        self.owner_id = owner_id
        self.num_bytes: int = num_bytes
        self.last_number: int = last_number
        self._descriptor = descriptor
        self._seed = _seed_of(owner_id)
        self._process = os.getpid()
        self._refusal: str | None = None
        let_go_in_children(self)

    @classmethod
    def create(cls, path: Path, first_number: int, owner_id: bytes) -> Journal:
        """An empty journal, on disk when this returns; in the place of what was there."""
        assert len(owner_id) == 16
        head = struct.pack("<8sI16sQ", _MAGIC, _FORMAT, owner_id, first_number)
        with out_of_space_at(path.parent, then="try again"):
            write_whole(path, head + struct.pack("<Q", _checksum(head)))
        return cls(path, _open_to_append(path), owner_id, _FILE_HEAD.size, first_number - 1)

    @classmethod
    def open_to_append(cls, path: Path, after: Record | None = None, *, remedy: str = _RESTORE) -> Journal:
        """Continue after the last whole record. A torn record at the end is removed.

        `after` is a whole record that was read before: only the rest is checked. `remedy` is the advice for damage.
        """
        journal = cls._open_after(path, after)
        try:
            for record in read_records(path, journal.num_bytes, after=journal.last_number, remedy=remedy):
                journal.last_number, journal.num_bytes = record.number, record.end_offset
            journal._remove_rest()
        except BaseException:
            journal.close()
            raise
        return journal

    @classmethod
    def open_shared(cls, path: Path, after: Record | None = None) -> Journal:
        """One of several writers' ends, after a record that was read already. Nothing is changed before `catch_up`."""
        journal = cls._open_after(path, after)
        journal.is_shared = True
        return journal

    @classmethod
    def _open_after(cls, path: Path, after: Record | None) -> Journal:
        head = read_head(path)
        number, end = head.first_number - 1, _FILE_HEAD.size
        if after is not None:
            number, end = after.number, after.end_offset
        return cls(path, _open_to_append(path), head.owner_id, end, number)

    def catch_up(self) -> list[Record]:
        """What others wrote since. Only under the lock of those who write: what a killed one left of a record is
        removed, and a record that others are in the middle of writing would be, too."""
        self._refuse_if_unusable()
        if os.fstat(self._descriptor).st_size == self.num_bytes:
            return []
        found = list(read_records(self.path, self.num_bytes, after=self.last_number))
        if found:
            self.last_number, self.num_bytes = found[-1].number, found[-1].end_offset
        self._remove_rest()
        return found

    def _remove_rest(self) -> None:
        """Cut the file back to the end of its last whole record."""
        surplus = os.fstat(self._descriptor).st_size - self.num_bytes
        if surplus:
            words = "%s: removed %d bytes of a record that was cut off, after record %d"
            log.warning(words, self.path, surplus, self.last_number)
            os.ftruncate(self._descriptor, self.num_bytes)

    def write(self, number: int, payload: bytes | Sequence[bytes | memoryview]) -> None:
        """Add a record. Parts of a payload are written one after the other, without copying them together."""
        self._refuse_if_unusable()
        if number != self.last_number + 1:
            raise ValueError(f"record {number} cannot follow record {self.last_number}")
        parts: Sequence[bytes | memoryview]
        if isinstance(payload, bytes):
            length, digest, parts = len(payload), _checksum(payload, self._seed), (payload,)
        else:
            length, digest, parts = _measured(payload, self._seed)
        checked = _CHECKED.pack(length, number, digest)
        head = checked + _checksum(checked, self._seed).to_bytes(8, "little")
        before = self.num_bytes, self.last_number
        num_bytes = length + RECORD_BYTES
        try:
            written = os.writev(self._descriptor, (head, *parts, _END))
            if written != num_bytes:  # a nearly full disk, or more than the system writes at once
                self._write_rest((head, *parts, _END), written)
            self.num_bytes += num_bytes
            self.last_number = number
        except BaseException as error:  # an interrupt too: a call that did not return left nothing
            self._undo(before, num_bytes, error)
            with out_of_space_at(self.path.parent, then="make the same call again: nothing of it was kept"):
                raise

    def _write_rest(self, parts: Sequence[bytes | memoryview], written: int) -> None:
        for part in parts:
            left = memoryview(part).cast("B")
            skipped = min(written, len(left))
            left, written = left[skipped:], written - skipped
            while left:
                left = left[os.write(self._descriptor, left) :]

    def _undo(self, before: tuple[int, int], num_bytes: int, error: BaseException) -> None:
        self.num_bytes, self.last_number = before
        try:
            if self.is_shared and os.fstat(self._descriptor).st_size == self.num_bytes + num_bytes:
                return
            os.ftruncate(self._descriptor, self.num_bytes)
        except OSError as second:
            self._refusal = f"a record could not be written ({error}), nor what there was of it removed ({second})"

    def sync(self) -> None:
        """Everything up to here reaches the disk."""
        self._refuse_if_unusable()
        try:
            _sync(self._descriptor)
        except OSError as error:
            # The system may have dropped what it could not write: asking again would say that all is well.
            self._refusal = f"the disk did not take what was written: {error}"
            with out_of_space_at(self.path.parent, then="open the folder again"):
                raise

    def close(self, _close: Callable[[int], None] = os.close) -> None:  # bound here: at exit, modules may be gone
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            self._refusal = self._refusal or "it was closed"
            _close(descriptor)

    def let_go(self) -> None:
        """In a child process: the file belongs to the parent."""
        self.close()

    def _refuse_if_unusable(self) -> None:
        if self._process != os.getpid():
            raise BusyError(
                "this journal can be written by the process that opened it, not by a child of it",
                file=self.path,
                process=f"pid {self._process}",
                remedy="write in that process; here, open the folder with read_only=True",
            )
        if self._refusal is not None:
            raise StoreError(
                "this journal takes no more records",
                file=self.path,
                reason=self._refusal,
                remedy="close it and open the folder again: every record up to this one is kept",
            )

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:
            self.close()


def _open_to_append(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)


_sync = getattr(os, "fdatasync", os.fsync)


def _seed_of(owner_id: bytes) -> int:
    """Records of another owner do not fit their checksums here."""
    return int.from_bytes(owner_id[:8], "little")


def _measured(parts: Sequence[bytes | memoryview], seed: int) -> tuple[int, int, Sequence[bytes | memoryview]]:
    """(bytes, checksum, the parts: few enough for one call of the system)."""
    if len(parts) > _MAX_PARTS:
        parts = (b"".join(parts),)
    hasher = xxhash.xxh3_64(seed=seed)
    num_bytes = 0
    for part in parts:
        hasher.update(part)
        num_bytes += memoryview(part).nbytes
    return num_bytes, hasher.intdigest(), parts


# Reading


def read_head(path: Path) -> JournalHead:
    """Whose journal this is, and where its numbers begin."""
    with open(path, "rb") as file:
        data = file.read(_FILE_HEAD.size)
    return _parse_head(path, data)


def _parse_head(path: Path, data: bytes) -> JournalHead:
    if len(data) < _FILE_HEAD.size:
        raise _damage(path, 0, None, "the file is shorter than its header")
    magic, version, owner_id, first_number, digest = _FILE_HEAD.unpack(data)
    if magic != _MAGIC:
        raise _damage(path, 0, None, "this is no journal")
    if digest != _checksum(data[:-8]):
        raise _damage(path, 0, None, "the header does not fit its checksum")
    if version != _FORMAT:
        raise StoreError(
            f"this journal has format {version}, and this batchwright reads format {_FORMAT}",
            file=path,
            remedy="use the version of batchwright that wrote it",
        )
    return JournalHead(owner_id, first_number)


def read_records(
    path: Path,
    from_offset: int | None = None,
    *,
    after: int | None = None,
    whole_file: bool = True,
    remedy: str = _RESTORE,
) -> Iterator[Record]:
    """The whole records of a journal, from its first or from another's `end_offset` on, whose number is `after`.

    Ends at a record that is cut off, which a writer in another process may be about to finish: a later call goes on
    from the last `end_offset`. Damage is a StoreError; with `whole_file=False` it is an end as well.
    """
    with open(path, "rb", buffering=0) as file:
        reader = _Reader(file.fileno())
        head = _parse_head(path, os.pread(file.fileno(), _FILE_HEAD.size, 0))
        seed = _seed_of(head.owner_id)
        expected: int | None = None
        if from_offset is None:
            offset, expected = _FILE_HEAD.size, head.first_number
        else:
            offset = from_offset
            if after is not None:
                expected = after + 1
        if offset > os.fstat(file.fileno()).st_size:
            raise StoreError(
                "this journal is shorter than what was read of it before",
                file=path,
                byte=offset,
                remedy="open the folder again",
            )
        while True:
            if expected is not None:
                for record in reader.whole_records(offset, expected, seed):
                    yield record
                    offset, expected = record.end_offset, record.number + 1
            found = reader.settled_record_at(offset, expected, seed)
            if found is None:
                return
            if isinstance(found, _Damage):
                if not whole_file:
                    return
                raise _damage(path, found.offset, expected, found.reason, remedy)
            yield found
            offset, expected = found.end_offset, found.number + 1


def read_record(path: Path, descriptor: int, owner_id: bytes, offset: int) -> Record:
    """The one record that begins at an offset, of a file that is open. A StoreError where there is no whole one."""
    found = _Reader(descriptor, 1 << 16).record_at(offset, None, _seed_of(owner_id))
    if isinstance(found, Record):
        return found
    if found is None:
        raise _damage(path, offset, None, "the record there is cut off")
    raise _damage(path, found.offset, None, found.reason)


class _Damage(NamedTuple):
    offset: int
    reason: str


class _Reader:
    """A window over a file that others may be writing to: many small records are read from it at once."""

    def __init__(self, descriptor: int, window_bytes: int = _READ_BYTES) -> None:
        self._descriptor = descriptor
        self._window_bytes = window_bytes
        self._window = b""
        self._start = 0

    def whole_records(self, offset: int, number: int, seed: int) -> Iterator[Record]:
        """Records in the window that are as they should be. Ends at whatever is not: `record_at` says what it is."""
        window, at = self._window, offset - self._start
        if at < 0:
            return
        while at + _RECORD_HEAD.size < len(window):
            length, found, digest, head_digest = _RECORD_HEAD.unpack_from(window, at)
            begin = at + _RECORD_HEAD.size
            stop = begin + length
            if found != number or stop >= len(window) or window[stop] != _END[0]:
                return
            payload = window[begin:stop]
            if digest != _checksum(payload, seed) or head_digest != _checksum(window[at : begin - 8], seed):
                return
            at = stop + 1
            yield Record(number, payload, self._start + at)
            number += 1

    def settled_record_at(self, offset: int, expected: int | None, seed: int) -> Record | _Damage | None:
        """As `record_at`, but damage is looked at again: a writer may be in the middle of it."""
        for look in range(_LOOKS):
            found = self.record_at(offset, expected, seed)
            if not isinstance(found, _Damage):
                break
            self._window = b""
            time.sleep(0.002 * look)
        return found

    def record_at(self, offset: int, expected: int | None, seed: int) -> Record | _Damage | None:
        """The record there; None where it is cut off, or where nothing is there yet."""
        head = self._bytes(offset, _RECORD_HEAD.size)
        if len(head) < _RECORD_HEAD.size:
            return None
        length, number, digest, head_digest = _RECORD_HEAD.unpack(head)
        begin = offset + _RECORD_HEAD.size
        if head_digest != _checksum(head[:-8], seed):
            if self._is_zero_before(begin, offset):
                return None
            return _Damage(offset, "the record's header does not fit its checksum")
        if expected is not None and number != expected:
            return _Damage(offset, f"record {number} is where record {expected} should be")
        stop = begin + length + 1
        if stop > self._start + len(self._window) and stop > os.fstat(self._descriptor).st_size:
            return None  # found out before anything of that size is made
        payload, end = self._bytes(begin, length), self._bytes(begin + length, 1)
        if not end:  # it was cut off just now
            return None
        if end != _END or digest != _checksum(payload, seed):
            if self._is_zero_before(stop, offset):
                return None
            return _Damage(begin, "the record's payload does not fit its checksum")
        return Record(number, payload, stop)

    def _bytes(self, offset: int, count: int) -> bytes:
        """Up to `count` bytes: fewer where the file ends."""
        at = offset - self._start
        if at < 0 or at + count > len(self._window):
            if count > self._window_bytes:
                return _pread(self._descriptor, count, offset)
            self._window, self._start, at = _pread(self._descriptor, self._window_bytes, offset), offset, 0
        return self._window[at : at + count]

    def _is_zero_before(self, stop: int, offset: int) -> bool:
        """Whether zeros go from somewhere before `stop` to the end of the file, as a power cut leaves them: from
        `offset` itself, or from where a sector begins."""
        size = end = os.fstat(self._descriptor).st_size
        while end > offset:
            start = max(offset, end - _READ_BYTES)
            used = len(_pread(self._descriptor, end - start, start).rstrip(b"\0"))
            if used:
                first_zero = -(-(start + used) // _SECTOR_BYTES) * _SECTOR_BYTES
                return first_zero < min(stop, size)
            end = start
        return True


def _pread(descriptor: int, count: int, offset: int) -> bytes:
    data = os.pread(descriptor, count, offset)
    if len(data) == count or not data:
        return data
    pieces = [data]  # the system gives at most 2 GiB at once
    done = len(data)
    while done < count and (piece := os.pread(descriptor, count - done, offset + done)):
        pieces.append(piece)
        done += len(piece)
    return b"".join(pieces)


def _damage(path: Path, offset: int, number: int | None, reason: str, remedy: str = _RESTORE) -> StoreError:
    return StoreError("this journal is damaged", file=path, byte=offset, record=number, reason=reason, remedy=remedy)
