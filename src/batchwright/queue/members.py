"""Members of a queue, the processes that make or read its batches, and whether they are alive.

A member is a file that its process keeps locked. The file contains a counter that a thread increments. The kernel
releases the lock when the process ends, for any reason, and processes on the same machine see that at once. If the
lock cannot tell (another machine, a process that hangs), the counter does: a member whose counter stands still for
`lease_seconds`, on the observer's own clock, is dead. No decision here uses the time of day, because the clocks of
machines differ, and jump.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from batchwright.base.errors import QueueError, WorkerError
from batchwright.base.files import part_name
from batchwright.base.machine import boot_id
from batchwright.base.words import error_in_words
from batchwright.queue.messages import deleted, file_in_words
from batchwright.queue.meta import Meta, read_meta

if TYPE_CHECKING:
    from batchwright.queue.folder import QueueFolder

__all__ = ["Liveness"]

_BEATS_PER_LEASE = 6
_LONGEST_BEAT_SECONDS = 2.0
_COUNTER_BYTES = 20
_DOING_BYTES = 400
_PACKAGE = Path(__file__).parents[1]


class MemberFacts(msgspec.Struct, frozen=True):
    """The facts that a member writes about itself when it joins."""

    id: str
    role: str
    pid: int
    host: str
    boot: str
    started: float
    """Seconds since 1970, for people to read."""
    lease_seconds: float
    rank: int | None = None
    world_size: int | None = None

    @property
    def name(self) -> str:
        if self.boot == boot_id():
            return f"{self.role}, pid {self.pid}"
        return f"{self.role}, pid {self.pid} on {self.host}"

    def is_replaced_by(self, other: MemberFacts) -> bool:
        """Whether another member is of the same process and rank: a consumer that was made again in a notebook."""
        return (self.pid, self.boot, self.rank) == (other.pid, other.boot, other.rank)


class Activity(msgspec.Struct, frozen=True, omit_defaults=True):
    """The current activity of a member, for people to read."""

    what: str = ""
    split: str | None = None
    number: int | None = None
    since: float | None = None


class ProviderFailure(msgspec.Struct, frozen=True):
    """The error that ended a provider, left for those that wait for it."""

    pid: int
    host: str
    split: str | None
    number: int | None
    error: str
    """Its class and text."""
    place: str
    """The file and line of the user's code, if known."""
    traceback: str
    at: float

    @property
    def headline(self) -> str:
        said = f"provider, pid {self.pid}, died"
        if self.split is not None:
            said += f" making {file_in_words(self.split, self.number)}"
        return ", ".join(filter(None, [f"{said}: {self.error}", self.place]))


class QueueMember:
    """This process as a member of a queue, from its construction to `leave`."""

    def __init__(self, who: Path, role: str, lease_seconds: float, **facts: Any) -> None:
        pid = os.getpid()
        self.facts: MemberFacts = MemberFacts(
            id=f"{role}-{pid}-{secrets.token_hex(4)}",
            role=role,
            pid=pid,
            host=socket.gethostname(),
            boot=boot_id(),
            started=time.time(),
            lease_seconds=lease_seconds,
            **facts,
        )
        self.id: str = self.facts.id
        self.path: Path = who / self.id
        self._line = msgspec.json.encode(self.facts) + b"\n"
        self._lock = threading.RLock()  # a collector may free a member in the middle of a beat
        self._count = 0
        self._left = threading.Event()
        self._last_beat = time.monotonic()
        self._was_silent = False
        self._descriptor = self._join(who)
        _here.add(self)
        seconds = min(lease_seconds / _BEATS_PER_LEASE, _LONGEST_BEAT_SECONDS)
        threading.Thread(target=_beat, args=(weakref.ref(self), self._left, seconds), daemon=True).start()

    def _join(self, who: Path) -> int:
        while True:
            try:
                return self._join_once()
            except FileNotFoundError:
                if not who.is_dir():
                    raise
                # Another process that joined just now took the unfinished file for one that a dead process left.

    def _join_once(self) -> int:
        """The file is locked before it has its name: no process finds it without a holder."""
        part = part_name(self.path)
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            with contextlib.suppress(OSError):  # no locks on this file system: the counter must do
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.pwrite(descriptor, self._line + b"0".zfill(_COUNTER_BYTES) + b"\n" + b"{}".ljust(_DOING_BYTES), 0)
            os.rename(part, self.path)
        except BaseException:
            os.close(descriptor)
            part.unlink(missing_ok=True)
            raise
        return descriptor

    def beat(self) -> None:
        """Increment the counter: this process is alive."""
        with self._lock:
            if not self._left.is_set():
                self._count += 1
                os.pwrite(self._descriptor, str(self._count).zfill(_COUNTER_BYTES).encode(), len(self._line))
                now = time.monotonic()
                self._was_silent |= now - self._last_beat > self.facts.lease_seconds
                self._last_beat = now

    def say(self, what: str, split: str | None = None, number: int | None = None) -> None:
        """Record the current activity of this process."""
        line = msgspec.json.encode(Activity(what[:200], split, number, time.time())).ljust(_DOING_BYTES)
        with self._lock, contextlib.suppress(OSError):  # for people only: a full disk is not this call's to tell
            if not self._left.is_set():
                os.pwrite(self._descriptor, line[:_DOING_BYTES], len(self._line) + _COUNTER_BYTES + 1)

    @property
    def was_silent(self) -> bool:
        """Whether others may have taken this process for dead: it was stopped, or its threads did not get to run."""
        return self._was_silent or time.monotonic() - self._last_beat > self.facts.lease_seconds

    def come_back(self) -> None:
        """End a silence, after others may have taken the files of this process."""
        self.beat()
        self._was_silent = False

    @property
    def is_here(self) -> bool:
        """Whether others can still see this member. Its folder may be gone, or this process may be a fork."""
        if self._left.is_set() or self.facts.pid != os.getpid():
            return False
        try:
            return os.fstat(self._descriptor).st_nlink > 0
        except OSError:
            return False

    def leave(self) -> None:
        """Leave the queue. Twice is fine."""
        with self._lock:
            if self._left.is_set():
                return
            self._left.set()
            _here.discard(self)
            with contextlib.suppress(OSError):
                self.path.unlink()
            os.close(self._descriptor)

    def died(self, error: BaseException, split: str | None, number: int | None) -> None:
        """Write down the error that ended this provider."""
        failure = ProviderFailure(
            pid=self.facts.pid,
            host=self.facts.host,
            split=split,
            number=number,
            error=error_in_words(error).strip().split("\n")[0],
            place=place_of(error),
            traceback="".join(traceback.format_exception(error)).rstrip(),
            at=time.time(),
        )
        part = part_name(self.path)
        with contextlib.suppress(OSError):  # it may have died because of the disk
            part.write_bytes(msgspec.json.encode(failure))
            os.rename(part, self.path.with_name(self.id + ".died"))


_here: weakref.WeakSet[QueueMember] = weakref.WeakSet()


def _forget_all() -> None:
    """In a forked child: members are the parent's. Their locks must end with the parent, not with this process."""
    for member in list(_here):
        member._left.set()
        os.close(member._descriptor)
    _here.clear()


os.register_at_fork(after_in_child=_forget_all)


def _beat(member: weakref.ref[QueueMember], left: threading.Event, seconds: float) -> None:
    while not left.wait(seconds):
        here = member()
        if here is None:
            return
        with contextlib.suppress(OSError):  # a disk that fails for a while: the next beat may come through
            here.beat()
        del here


def place_of(error: BaseException) -> str:
    """The file and line of the user's code that raised it: the last frame outside of this package."""
    while error.__cause__ is not None:
        error = error.__cause__
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if not Path(frame.filename).is_relative_to(_PACKAGE):
            place = f"{os.path.basename(frame.filename)}:{frame.lineno}"
    return place


@dataclass
class Liveness:
    """The members that are alive, as this process sees it. It remembers when it last saw each counter move."""

    who: Path
    _moved: dict[str, tuple[bytes, float]] = field(default_factory=dict)

    def ids(self, role: str = "") -> list[str]:
        try:
            names = os.listdir(self.who)
        except FileNotFoundError:
            return []
        return sorted(name for name in names if name.startswith(role) and "." not in name)

    def living(self, role: str = "") -> list[MemberFacts]:
        """Members of a role that are alive."""
        return [facts for facts, _ in self.members(role) if self.is_alive(facts.id)]

    def members(self, role: str = "") -> Iterator[tuple[MemberFacts, Activity]]:
        """All members of a role, dead ones too."""
        for name in self.ids(role):
            with contextlib.suppress(OSError, ValueError):
                first, _, doing = (self.who / name).read_bytes().split(b"\n", 2)
                yield msgspec.json.decode(first, type=MemberFacts), msgspec.json.decode(doing, type=Activity)

    def is_alive(self, member_id: str) -> bool:
        try:
            with open(self.who / member_id, "rb", buffering=0) as file:
                first, counter, _ = file.readall().split(b"\n", 2)
                facts = msgspec.json.decode(first, type=MemberFacts)
                # Of this machine, also before it was started again: a living member holds its lock.
                is_ours = facts.boot == boot_id() or facts.host == socket.gethostname()
                if is_ours and _is_free(file.fileno()):
                    return False
        except FileNotFoundError:
            self._moved.pop(member_id, None)
            return False
        except ValueError:  # a member's file is complete before it has its name
            return False
        now = time.monotonic()
        known, since = self._moved.get(member_id, (b"", now))
        if counter != known:
            self._moved[member_id] = (counter, now)
            return True
        return now - since <= facts.lease_seconds

    def remove_dead(self) -> None:
        """Remove the files of dead members, and those that they did not finish."""
        for member_id in self.ids():
            if not self.is_alive(member_id):
                self._moved.pop(member_id, None)
                with contextlib.suppress(OSError):
                    (self.who / member_id).unlink()
        for path in self.who.glob(".*.part"):
            if not self.is_alive(path.name[1:].split(".")[0]):
                path.unlink(missing_ok=True)

    def raise_failure(self, remedy: str) -> None:
        """Raise the error that ended a provider, if one was left."""
        failures = read_failures(self.who)
        if failures:
            raise WorkerError(failures[-1].headline, traceback=failures[-1].traceback, remedy=remedy)


def _is_free(descriptor: int) -> bool:
    """Whether no process holds the lock of a member's file. False on a file system without locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return True


def read_failures(who: Path) -> list[ProviderFailure]:
    """The errors that ended providers, the latest last."""
    failures = []
    for path in who.glob("*.died"):
        with contextlib.suppress(OSError, ValueError):
            failures.append(msgspec.json.decode(path.read_bytes(), type=ProviderFailure))
    return sorted(failures, key=lambda failure: failure.at)


# The member of a consumer


class Membership:
    """The member that a consumer is. `number` grows when it has to become another one."""

    def __init__(
        self, queue: QueueFolder, meta: Meta, lease_seconds: float, rank: int | None, world_size: int | None
    ) -> None:
        self.queue = queue
        self.meta = meta
        self.lease_seconds = lease_seconds
        self.ranks = {"rank": rank, "world_size": world_size}
        self.number: int = 0
        self.pid: int = os.getpid()
        self._member: QueueMember | None = None

    @property
    def member(self) -> QueueMember:
        if self._member is None:
            self._member = QueueMember(self.queue.who, "consumer", self.lease_seconds, **self.ranks)
            with contextlib.suppress(OSError):
                Liveness(self.queue.who).remove_dead()
        return self._member

    @property
    def was_silent(self) -> bool:
        return self._member is not None and self._member.was_silent

    def renew(self) -> None:
        """Join again if this member was removed. The queue must still be the one that this consumer opened."""
        if self._member is None or self._member.is_here:
            return
        meta = read_meta(self.queue.meta)
        if meta is None:
            raise deleted(self.queue.path)
        remedy = "a new DatasetConsumer reads the new one"
        if meta.fingerprint != self.meta.fingerprint:
            raise self._replaced("by another provider", remedy)
        if meta.born != self.meta.born:
            raise self._replaced("from its beginning", f"{remedy}; load_state_dict of the last state goes on in it")
        self.leave()
        self.number += 1

    def _replaced(self, how: str, remedy: str) -> QueueError:
        return QueueError(
            f"the queue was deleted while it was in use, and made again {how}", folder=self.queue.path, remedy=remedy
        )

    def leave(self) -> None:
        if self._member is not None:
            self._member.leave()
            self._member = None
