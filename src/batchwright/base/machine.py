"""Facilities of some machines, each with a fallback: process facts, CPU count, memory, page cache, parent death,
folders that report changes.

Everything Linux-only that batchwright uses is in this module. `BATCHWRIGHT_PORTABLE=1` turns that half off, so that the
portable half (what macOS runs) can be tested anywhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import platform
import resource
import select
import signal
import struct
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Self

__all__ = [
    "FolderWatch",
    "advise",
    "anonymous_bytes",
    "available_bytes",
    "boot_id",
    "cpu_count",
    "die_with_parent",
    "expect_random_reads",
    "is_cached",
    "is_linux",
    "limit_memory",
    "name_of_descriptor",
    "shared_memory",
    "unmap_pages",
]


def is_linux() -> bool:
    return sys.platform == "linux" and os.environ.get("BATCHWRIGHT_PORTABLE") != "1"


def cpu_count() -> int:
    """CPUs this process may use: its affinity on Linux, otherwise all of them."""
    if is_linux():
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def anonymous_bytes() -> int:
    """Memory this process holds that is not a mapped file (RssAnon). Not on Linux: the peak of all memory."""
    if is_linux():
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":
        return peak
    return peak * 1024


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@functools.cache
def boot_id() -> str:
    """A name for this run of this machine's kernel: processes with the same one see each other's locks."""
    if is_linux():
        with contextlib.suppress(OSError):
            return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return platform.node()


def name_of_descriptor(descriptor: int) -> str:
    """The path of an open file, for errors; its number where the system does not tell."""
    if is_linux():
        with contextlib.suppress(OSError):
            return os.readlink(f"/proc/self/fd/{descriptor}")
    return f"descriptor {descriptor}"


def die_with_parent(parent_pid: int) -> None:
    """End this process when its parent ends, however that ends: a signal from Linux, otherwise a watching thread.

    Linux means the thread that started this process: start it from one that lives as long as the parent.
    """
    if not (is_linux() and _ask_for_parent_death_signal()):
        threading.Thread(target=_watch_parent, args=(parent_pid,), daemon=True).start()
    if os.getppid() != parent_pid:  # it died before we began to watch
        os._exit(1)


def _ask_for_parent_death_signal() -> bool:
    parent_death_signal = 1  # PR_SET_PDEATHSIG
    try:
        return int(_libc().prctl(parent_death_signal, signal.SIGKILL, 0, 0, 0)) == 0
    except (OSError, AttributeError):
        return False


def _watch_parent(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(0.2)
    os._exit(1)


def shared_memory(num_bytes: int) -> int:
    """A file descriptor of memory that processes can share. It has no name, so nothing is left behind by any death."""
    if is_linux():
        descriptor = os.memfd_create("batchwright", os.MFD_CLOEXEC)
    else:
        descriptor, path = tempfile.mkstemp(prefix="batchwright-")
        os.unlink(path)
    os.ftruncate(descriptor, num_bytes)
    return descriptor


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that can still be used, cached files counted as free: of the machine, and under every limit set on us.

    Not on Linux: half of the memory that is there.
    """
    if not is_linux():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    free = [1024 * _numbers(proc / "meminfo").get("MemAvailable:", 0)]
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            for folder in (cgroups, cgroups / "unified"):
                free += _left_below(folder, path, "memory.max", "memory.current", ("inactive_file", "active_file"))
        elif "memory" in controllers.split(","):
            names = ("total_inactive_file", "total_active_file")
            free += _left_below(cgroups / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", names)
    return max(min(free), 0)


def _left_below(root: Path, path: str, limit: str, usage: str, files: tuple[str, ...]) -> list[int]:
    """What each limit from a cgroup up to the root leaves, where there is one. A container may see only the root."""
    folder = root / path.lstrip("/")
    left = []
    for level in (folder, *folder.parents):
        most, used = _text(level / limit).strip(), _text(level / usage).strip()
        if most.isdigit() and used.isdigit():
            stat = _numbers(level / "memory.stat")
            left.append(int(most) - int(used) + sum(stat.get(name, 0) for name in files))
        if level == root:
            break
    return left


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _numbers(path: Path) -> dict[str, int]:
    """The first two words of each line, where the second is a number."""
    lines = (line.split()[:2] for line in _text(path).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) == 2 and words[1].isdigit()}


def limit_memory(more_bytes: int) -> None:
    """Let this process allocate `more_bytes` more than it has. Beyond that, it gets MemoryError. Linux only."""
    if is_linux():
        has_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = has_bytes + more_bytes
        if hard != resource.RLIM_INFINITY:
            most = min(most, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def is_cached(descriptor: int, offset: int) -> bool | None:
    """Whether a byte of a file is in memory already; None where the system does not tell."""
    if not is_linux():
        return None
    if _may_ask_for_pages(descriptor):
        with contextlib.suppress(OSError, ValueError):
            return _is_resident(descriptor, offset)
    try:  # less exact: to look brings the page in, and a disk that answers at once looks like memory
        os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError:  # a file system that cannot say
        return None
    return True


def _may_ask_for_pages(descriptor: int) -> bool:
    """Whether the kernel answers truly: of files that one may not write it says that all is in memory."""
    return os.geteuid() in (0, os.fstat(descriptor).st_uid) or os.access(f"/proc/self/fd/{descriptor}", os.W_OK)


def _is_resident(descriptor: int, offset: int) -> bool:
    begin = offset // mmap.PAGESIZE * mmap.PAGESIZE
    resident = ctypes.c_ubyte()
    with mmap.mmap(descriptor, offset - begin + 1, access=mmap.ACCESS_COPY, offset=begin) as page:
        first = ctypes.c_ubyte.from_buffer(page)  # writable only so that ctypes takes it: nothing is written
        answer = _libc().mincore(ctypes.byref(first), ctypes.c_size_t(1), ctypes.byref(resident))
        del first  # a map that is still looked at cannot be closed
    if answer:
        raise OSError(ctypes.get_errno(), "mincore")
    return bool(resident.value & 1)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def advise(descriptor: int, advice: str, offset: int = 0, num_bytes: int = 0) -> None:
    """Advise the kernel on a part of a file (0 bytes: on all of it), where it takes advice.

    "RANDOM": reads bring only what they ask for into the page cache. "WILLNEED": begin to read it into the cache.
    "DONTNEED": drop it from the cache, except pages that a process has mapped.
    """
    if is_linux():
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, offset, num_bytes, getattr(os, f"POSIX_FADV_{advice}"))


def unmap_pages(mapped: mmap.mmap, start: int, stop: int) -> None:
    """Let go of the whole pages in bytes [start, stop) of a mapped file, which come back unchanged when touched."""
    start, stop = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
    if is_linux() and start < stop:
        mapped.madvise(mmap.MADV_DONTNEED, start, stop - start)


def expect_random_reads(mapped: mmap.mmap) -> None:
    """Touching a page of a mapped file then reads that page, and not megabytes around it."""
    if is_linux():
        mapped.madvise(mmap.MADV_RANDOM)


class FolderWatch:
    """Waits until something changes in folders: Linux tells of it, elsewhere one looks again, ever less often.

        with FolderWatch(folder) as watch:
            while not (found := look(folder)):
                watch.wait(timeout_seconds=60)

    No change is missed between two waits, or before the first wait; many changes are one wake-up. True means "look
    again": there may be nothing new. Names that begin with a dot are work in progress and end no wait. A missing
    folder, or one that cannot be watched, is polled after 1 ms, 2 ms, ... 50 ms, and watched once it exists. A forked
    child makes its own watch. One thread waits at a time.
    """

    def __init__(self, *folders: str | os.PathLike[str]) -> None:
        self._folders = tuple(dict.fromkeys(os.path.abspath(folder) for folder in folders))
        self._descriptors: list[int] = []
        self._is_closed = False
        self._open()

    def wait(self, timeout_seconds: float) -> bool:
        """Whether something changed, or wake() was called, since the last wait. False: the time is up.

        A closed watch answers False at once.
        """
        self._take_over_after_fork()
        with self._lock:
            if self._is_closed:
                return False
            self._num_waiting += 1
        try:
            return self._wait_until(time.monotonic() + timeout_seconds)
        finally:
            self._end_wait()

    def wake(self) -> None:
        """End the wait of another thread, or the next one. May be called in a signal handler."""
        self._take_over_after_fork()
        with self._lock:
            if not self._is_closed:
                with contextlib.suppress(BlockingIOError):  # the pipe is full of earlier calls: one is enough
                    os.write(self._wake_to, b"1")

    def close(self) -> None:
        """Let go of everything. A wait in another thread ends, with False."""
        self._take_over_after_fork()
        with self._lock:
            if self._num_waiting:
                self.wake()  # that thread lets go: a descriptor closed under it might soon be another file's
            else:
                self._release()
            self._is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        for descriptor in getattr(self, "_descriptors", ()):
            os.close(descriptor)

    def _open(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()  # a signal handler may call wake() while its own thread holds it
        self._num_waiting = 0
        self._nap_seconds = _SHORTEST_NAP_SECONDS
        self._watches: dict[str, int] = {}
        self._seen: dict[str, tuple[int, ...]] = {}
        self._inotify = _new_inotify()
        if self._inotify >= 0:
            self._descriptors.append(self._inotify)
        self._wake_from, self._wake_to = os.pipe()
        self._descriptors += [self._wake_from, self._wake_to]
        for descriptor in (self._wake_from, self._wake_to):
            os.set_blocking(descriptor, False)
        self._poll = select.poll()
        self._poll.register(self._wake_from, select.POLLIN)
        if self._inotify >= 0:
            self._poll.register(self._inotify, select.POLLIN)
        self._look_at_folders()

    def _release(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _take_over_after_fork(self) -> None:
        if self._pid != os.getpid():  # the queue of events is shared with the parent, which would miss what we read
            self._release()
            if self._is_closed:
                self._pid = os.getpid()
            else:
                self._open()

    def _end_wait(self) -> None:
        with self._lock:
            self._num_waiting -= 1
            if self._is_closed and not self._num_waiting:
                self._release()

    def _wait_until(self, deadline: float) -> bool:
        is_changed = self._look_at_folders()
        began = time.monotonic()
        while True:
            is_blind = len(self._watches) < len(self._folders)
            left_seconds = max(deadline - time.monotonic(), 0.0)
            pause_seconds = min(left_seconds, self._nap_seconds if is_blind else _LOOK_SECONDS)
            self._poll.poll(1000 * pause_seconds * (not is_changed))
            news = (is_changed, self._drain_wakes(), self._drain_events(), self._look_at_folders())
            if self._is_closed:
                return False
            if any(news):
                self._nap_seconds = _SHORTEST_NAP_SECONDS
                return True
            if is_blind:
                self._nap_seconds = min(2 * self._nap_seconds, _LONGEST_NAP_SECONDS)
                if time.monotonic() > began + _LONGEST_UNPOLLED_SECONDS:
                    return True
            if pause_seconds == left_seconds:
                return False

    def _drain_wakes(self) -> bool:
        try:
            return len(os.read(self._wake_from, 65_536)) > 0
        except BlockingIOError:
            return False

    def _drain_events(self) -> bool:
        is_changed = False
        with contextlib.suppress(BlockingIOError):
            while self._inotify >= 0:
                for watch, mask, name in _inotify_events(os.read(self._inotify, 65_536)):
                    is_ours = watch in self._watches.values() and not name.startswith(b".")
                    is_changed |= is_ours or bool(mask & _IN_Q_OVERFLOW)
        return is_changed

    def _look_at_folders(self) -> bool:
        """Watch folders that are not watched yet, or changed. Returns whether one has changed since the last look.

        Events do not tell that a folder further up was renamed, nor what another machine did on a network disk.
        """
        is_changed = False
        for folder in self._folders:
            seen, before = _folder_facts(folder), self._seen.get(folder)
            if seen != before or folder not in self._watches:
                self._watch(folder)  # it may be another folder under the same name
                seen = _folder_facts(folder)  # after the watch, which tells of everything later
            is_changed |= seen != before
            self._seen[folder] = seen
        return is_changed

    def _watch(self, folder: str) -> None:
        """Watch what is under this name now. A folder that cannot be watched (too many watches) is polled."""
        if self._inotify < 0:
            return
        old = self._watches.pop(folder, None)
        new = int(_libc().inotify_add_watch(self._inotify, os.fsencode(folder), ctypes.c_uint32(_WATCHED_EVENTS)))
        if new >= 0:
            self._watches[folder] = new
        if old is not None and old not in self._watches.values():
            _libc().inotify_rm_watch(self._inotify, old)


_SHORTEST_NAP_SECONDS, _LONGEST_NAP_SECONDS = 0.001, 0.05
_LOOK_SECONDS = 1.0
_LONGEST_UNPOLLED_SECONDS = 0.25
"""The folder's modification time shows most changes. A waiter lists the folder this often, not after every nap."""

_IN_CLOSE_WRITE, _IN_MOVED_FROM, _IN_MOVED_TO, _IN_CREATE, _IN_DELETE = 0x8, 0x40, 0x80, 0x100, 0x200
_IN_DELETE_SELF, _IN_MOVE_SELF, _IN_Q_OVERFLOW, _IN_ONLYDIR = 0x400, 0x800, 0x4000, 0x0100_0000
_WATCHED_EVENTS = (
    _IN_CLOSE_WRITE | _IN_MOVED_FROM | _IN_MOVED_TO | _IN_CREATE | _IN_DELETE | _IN_DELETE_SELF | _IN_MOVE_SELF
) | _IN_ONLYDIR


def _new_inotify() -> int:
    """A descriptor that tells of changes; -1 where there is none: another system, or too many of them in use."""
    if not is_linux():
        return -1
    try:
        return int(_libc().inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
    except AttributeError:
        return -1


def _inotify_events(data: bytes) -> list[tuple[int, int, bytes]]:
    """Watch, mask and name of each event that one read gave."""
    events, offset = [], 0
    while offset < len(data):
        watch, mask, _, name_bytes = struct.unpack_from("iIII", data, offset)
        offset += 16 + name_bytes
        events.append((watch, mask, data[offset - name_bytes : offset].rstrip(b"\0")))
    return events


def _folder_facts(folder: str) -> tuple[int, ...]:
    """What changes when a folder is replaced, its names change, or its permissions; nothing where it is not there."""
    try:
        facts = os.stat(folder)
    except OSError:
        return ()
    return (facts.st_dev, facts.st_ino, facts.st_mtime_ns, facts.st_mode)
