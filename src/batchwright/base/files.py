"""Files that appear whole or not at all, one writer at a time, and both across a fork.

Store, plans and bake all lean on these few functions: a temporary name, then a rename; a lock that dies with its
process; sizes and names checked before they are trusted.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from batchwright.base.checks import local_path
from batchwright.base.errors import BusyError, OutOfSpaceError, StoreError

__all__ = [
    "exclusive",
    "home",
    "inside",
    "is_in_use",
    "is_part",
    "let_go_in_children",
    "lock_across_forks",
    "one_at_a_time",
    "out_of_space_at",
    "part_name",
    "publish",
    "reserve",
    "shared",
    "sync_folder",
    "unused",
    "write_whole",
    "writing_whole",
]

_counter = itertools.count()


def part_name(path: Path) -> Path:
    """A temporary name beside `path`, unique to this call, that every reader ignores."""
    return path.with_name(f".{path.name}.{os.getpid()}.{next(_counter)}.part")


def is_part(name: str) -> bool:
    """Whether a name is one that `part_name` gave: what a killed writer left behind.

    >>> is_part(part_name(Path("a.json")).name), is_part("a.json")
    (True, False)
    """
    return name.startswith(".") and name.endswith(".part")


def home() -> Path:
    """Where batchwright keeps what belongs to no store: $BATCHWRIGHT_HOME, else ~/.cache/batchwright."""
    folder = os.environ.get("BATCHWRIGHT_HOME")
    if folder:
        return local_path(BATCHWRIGHT_HOME=folder)
    return Path.home() / ".cache" / "batchwright"


def reserve(descriptor: int, num_bytes: int) -> None:
    """Give an empty file its size and its place on disk. A full disk is an OSError now, not a dead process later."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, num_bytes)
        return
    zeros = bytes(1 << 20)
    for start in range(0, num_bytes, len(zeros)):
        os.write(descriptor, zeros[: num_bytes - start])


@contextlib.contextmanager
def writing_whole(path: Path) -> Iterator[BinaryIO]:
    """A file to write into that gets its name when the block is done: all of it, on disk; or nothing, on an error."""
    part = part_name(path)
    try:
        with open(part, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        publish(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_whole(path: Path, data: bytes | memoryview) -> None:
    """Write a file that others may be watching for.

    A reader sees the old file or the new one, never a part. Survives a crash after return.
    Not for appending, and not across file systems.
    """
    with writing_whole(path) as file:
        file.write(data)


def publish(part: Path, path: Path) -> None:
    """Give a finished, synced file its name."""
    os.replace(part, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    # Without this a power cut can keep the manifest and lose the shard that it names.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def exclusive(path: Path, *, doing: str) -> Iterator[None]:
    """Hold the one writer's lock at `path`. A second writer gets a BusyError that names the first.

    The lock is the kernel's and ends with the process, however it ends; the file itself stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise BusyError(
                f"another process is {doing} {path.parent}",
                folder=path.parent,
                process=file.read().strip() or "unknown",
                remedy="wait for it, or stop it; then run this again",
            ) from None
        file.truncate(0)
        file.write(f"pid {os.getpid()}")
        file.flush()
        yield


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Wait until no other process is in such a block for this folder: for reading a file, then writing it anew.

    The folder itself is locked, so nothing is left in it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def shared(path: Path) -> int:
    """Mark `path` as in use until the returned descriptor is closed (or the process ends).

    Raises FileNotFoundError where the file is gone, or goes while this waits for `unused` to be done with it.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems have no locks: then nothing protects the file
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        if not os.fstat(descriptor).st_nlink:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextlib.contextmanager
def unused(path: Path) -> Iterator[bool]:
    """Whether no process holds `shared(path)`. None can begin to, inside the block."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = True
        except OSError:  # held, or not to be known here: both mean hands off
            free = False
        yield free
    finally:
        os.close(descriptor)


def is_in_use(path: Path) -> bool:
    """Whether some process holds `shared(path)` right now."""
    with unused(path) as free:
        return not free


def inside(folder: Path, name: str) -> Path:
    """`folder / name`, refusing names that would leave the folder.

    >>> inside(Path("store"), "web-00000.arrow")
    PosixPath('store/web-00000.arrow')
    """
    if not name or name.startswith("/") or ".." in Path(name).parts or "\0" in name:
        raise StoreError(
            "a name in this store leaves its folder",
            folder=folder,
            name=repr(name),
            remedy="do not use this store: somebody changed it; copy it again from a source that you trust",
        )
    return folder / name


@contextlib.contextmanager
def out_of_space_at(
    folder: Path, *, then: str = "run the same call again: it continues where it stopped"
) -> Iterator[None]:
    """Turn 'disk full' inside the block into one clear error."""
    try:
        yield
    except OutOfSpaceError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OutOfSpaceError(
                f"no space left while writing {folder}",
                folder=folder,
                reason=os.strerror(error.errno),
                remedy=f"free some space and {then}",
            ) from error
        raise


# Forks
#
# A child has one thread. A lock that another thread of its parent held at the fork would never be released in it, and a
# file that it keeps open keeps the file's lock when the parent is dead. So a fork waits for the locks, and the child
# lets go of its parent's files.


class _Holder(Protocol):
    def let_go(self) -> None: ...


_held: weakref.WeakSet[Any] = weakref.WeakSet()
_locks: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_registering = threading.Lock()
_taken: list[Any] = []


def let_go_in_children(held: _Holder) -> None:
    """After a fork, `held.let_go()` is called in the child."""
    _held.add(held)


def lock_across_forks() -> threading.RLock:
    """A lock that no other thread holds while this process forks.

    A fork takes these locks, the newest first: make a lock that is taken inside of others before them.
    """
    lock = threading.RLock()
    with _registering:
        _locks[next(_numbers)] = lock
    return lock


def _take_all() -> None:
    _registering.acquire()
    for _, lock in sorted(_locks.items(), reverse=True):
        lock.acquire()
        _taken.append(lock)


def _release_all() -> None:
    while _taken:
        _taken.pop().release()
    _registering.release()


def _let_go() -> None:
    for held in list(_held):
        held.let_go()


os.register_at_fork(before=_take_all, after_in_parent=_release_all, after_in_child=_release_all)
os.register_at_fork(after_in_child=_let_go)
