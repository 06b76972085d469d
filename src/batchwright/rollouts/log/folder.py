"""The files of a rollout log, open in many processes at once.

    ledger.journal            events: one record for each; written under the lock, read without
    ledger.lock               held by a process while it reads others' records, decides, and writes one record
    groups/<writer>.journal   groups that one process added; locked by it as long as it lives

A group is on disk, in its writer's file, before an event names it. A group without an event comes from a process that
died, and is never read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash

from batchwright.base.errors import StoreError
from batchwright.base.files import inside, is_in_use, let_go_in_children, out_of_space_at, shared
from batchwright.base.journal import (
    HEAD_BYTES,
    RECORD_BYTES,
    Journal,
    Record,
    read_head,
    read_record,
    read_records,
)
from batchwright.rollouts.log.ledger import Add

__all__ = ["LEDGER_NAME"]

LEDGER_NAME = "ledger.journal"
_LOCK = "ledger.lock"
_GROUPS = "groups"
_MAX_OPEN = 64
"""The number of group files that are kept open."""
_checksum = xxhash.xxh3_64_intdigest


class LogFolder:
    """One process's handles of these files, opened on first use. A reader leaves nothing behind."""

    number: int
    end_offset: int

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ledger_path: Path = path / LEDGER_NAME
        self.writer: str | None = None
        """The name of this process in the ledger; None before it has one."""
        self._ledger: Journal | None = None
        self._which: tuple[int, int] | None = None
        """The ledger's file: device and inode."""
        self._groups: Journal | None = None
        self._alive = -1
        self._lock = -1
        self._open_groups: dict[str, int] = {}
        self._reading = threading.Lock()
        self._writing_groups = threading.Lock()
        self.rewind()
        let_go_in_children(self)

    # Events

    def rewind(self) -> None:
        """Start again at the first record on the next read."""
        self.end_offset, self.number = HEAD_BYTES, 0
        """The end of the last applied event, and its number."""

    @cached_property
    def id(self) -> bytes:
        """The log's own id, in the head of all its files."""
        return read_head(self.ledger_path).owner_id

    def has_events(self) -> bool:
        try:
            has_more = self.ledger_path.stat().st_size > HEAD_BYTES
            return has_more and next(read_records(self.ledger_path), None) is not None
        except FileNotFoundError:
            return False
        except NotADirectoryError:
            what = "this is a file, and not the folder of a log"
            raise StoreError(what, file=self.path, remedy="another path") from None

    def new_events(self) -> Iterator[Record]:
        """Records written since the last applied one. Call `applied` after each. Takes no lock."""
        if self._size_bytes() == self.end_offset:
            return iter(())
        return read_records(self.ledger_path, self.end_offset, after=self.number)

    def _size_bytes(self) -> int:
        """Bytes of the ledger. A StoreError if it is gone or was replaced: this process's writes would be lost."""
        try:
            found = os.stat(self.ledger_path)
        except FileNotFoundError:
            raise damage("the journal of this log is gone", file=self.ledger_path) from None
        which = (found.st_dev, found.st_ino)
        if self._which is None:
            self._which = which
        if which != self._which:
            what = "another journal is in the place of the one that was opened"
            raise StoreError(what, file=self.ledger_path, remedy="open the log again: RolloutLog(path, ...)")
        return found.st_size

    def applied(self, record: Record) -> None:
        self.end_offset, self.number = record.end_offset, record.number

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Wait until no other process is in such a block. The lock ends with the process, even if it is killed."""
        if self._lock < 0:
            with _writable(self.path), out_of_space_at(self.path, then="try again"):
                self.path.mkdir(parents=True, exist_ok=True)
                self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            except OSError as error:
                what = "this file system has no locks, and without them processes would write over each other"
                remedy = "a folder on a local disk, or on a shared file system with flock"
                raise StoreError(what, folder=self.path, reason=error.strerror, remedy=remedy) from None
            yield
        finally:
            if self._lock >= 0:
                with contextlib.suppress(OSError):
                    fcntl.flock(self._lock, fcntl.LOCK_UN)

    def create(self) -> None:
        """Make an empty ledger, if there is none. Only inside `locked`."""
        if not self.ledger_path.exists():
            Journal.create(self.ledger_path, 1, secrets.token_bytes(16)).close()

    def catch_up(self) -> list[Record]:
        """New records of other processes. A killed process's unfinished record is removed. Only inside `locked`."""
        self._size_bytes()
        if self._ledger is None:
            self._ledger = Journal.open_shared(self.ledger_path)
        self._ledger.num_bytes, self._ledger.last_number = self.end_offset, self.number
        return self._ledger.catch_up()

    def write(self, payload: bytes) -> Record:
        """Add an event, after `catch_up`. It counts when this returns. Call `applied` afterwards."""
        assert self._ledger is not None
        self._ledger.write(self._ledger.last_number + 1, payload)
        return Record(self._ledger.last_number, payload, self._ledger.num_bytes)

    def sync(self) -> None:
        """Sync all events so far, so that they survive a power cut. After `close` this was done already."""
        ledger = self._ledger
        if ledger is not None:
            ledger.sync()

    # Writers

    def begin_writing(self) -> str:
        """Make a name and a file of groups for this process. The lock on the file shows that the process is alive."""
        with self._writing_groups:
            if self.writer is None:
                name = f"{_host()}-{os.getpid()}-{secrets.token_hex(4)}"
                path = self._groups_path(name)
                with _writable(self.path), out_of_space_at(self.path, then="try again"):
                    path.parent.mkdir(exist_ok=True)
                    self._groups = Journal.create(path, 1, self.id)
                self._alive = shared(path)
                self.writer = name
        return self.writer

    def dead(self, writers: Iterable[str]) -> set[str]:
        """Writers whose process has ended. For other machines, that is unknown."""
        mine = _host()
        return {name for name in set(writers) if name != self.writer and host_of(name) == mine and self._is_dead(name)}

    def _is_dead(self, writer: str) -> bool:
        try:
            return not is_in_use(self._groups_path(writer))
        except FileNotFoundError:
            return True

    # Groups

    def write_group(self, payload: bytes) -> tuple[int, int, int]:
        """Write a group to disk. Returns (offset, bytes, checksum). Safe to call from several threads."""
        self.begin_writing()
        groups = self._groups
        assert groups is not None
        with self._writing_groups:
            offset = groups.num_bytes
            groups.write(groups.last_number + 1, payload)
        groups.sync()  # for all threads that wrote meanwhile
        return offset, len(payload), _checksum(payload)

    def read_group(self, answer: Add) -> bytes:
        path = self._groups_path(answer.writer)
        with self._reading:
            record = read_record(path, self._opened(answer.writer, path), self.id, answer.offset)
        if len(record.payload) != answer.num_bytes or _checksum(record.payload) != answer.checksum:
            raise damage("this group is not the one that was added", file=path, byte=answer.offset)
        return record.payload

    def has_group(self, answer: Add) -> bool:
        """Whether the group's file exists and is long enough. The content is checked when it is read."""
        try:
            return self._groups_path(answer.writer).stat().st_size >= answer.offset + answer.num_bytes + RECORD_BYTES
        except OSError:
            return False

    def _opened(self, writer: str, path: Path) -> int:
        descriptor = self._open_groups.pop(writer, -1)
        if descriptor < 0:
            if len(self._open_groups) >= _MAX_OPEN:
                os.close(self._open_groups.pop(next(iter(self._open_groups))))
            try:
                descriptor = os.open(path, os.O_RDONLY)
            except FileNotFoundError:
                raise damage("a file of groups is gone", file=path) from None
        self._open_groups[writer] = descriptor  # the most recently used one
        return descriptor

    def _groups_path(self, writer: str) -> Path:
        return inside(self.path / _GROUPS, f"{writer}.journal")

    def close(self, _close: Callable[[int], None] = os.close) -> None:  # bound here: at exit, modules may be gone
        """Close all files. Leases of this process end, and it may open the folder again."""
        for journal in (self._ledger, self._groups):
            if journal is not None:
                journal.close()
        for descriptor in (self._alive, self._lock, *self._open_groups.values()):
            if descriptor >= 0:
                _close(descriptor)
        self._ledger = self._groups = None
        self._alive = self._lock = -1
        self._open_groups.clear()

    def let_go(self) -> None:
        """Forget files and locks in a child process: they are the parent's."""
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_open_groups"):
            self.close()


@contextlib.contextmanager
def _writable(folder: Path) -> Iterator[None]:
    """Turn 'not allowed to write' inside the block into one clear error."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        what = "this log cannot be written to"
        remedy = "the right to write there; RolloutLog(path, read_only=True) to read what is there"
        raise StoreError(what, folder=folder, reason=error.strerror, remedy=remedy) from None


def damage(what: str, **where: Any) -> StoreError:
    """The error for a log whose files are not those that were written."""
    return StoreError(what, **where, remedy="restore the folder from a copy")


def host_of(writer: str) -> str:
    return writer.rpartition("-")[0].rpartition("-")[0]


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", socket.gethostname())[:48].strip(".-") or "host"
