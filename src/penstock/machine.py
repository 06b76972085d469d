"""What only some machines have, each with a fallback: process facts, CPU count, memory, cached files, parent death.

Everything Linux-only that penstock uses is in this module. `PENSTOCK_PORTABLE=1` turns that half off, so that the
portable half (what macOS runs) can be tested anywhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import resource
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

__all__ = [
    "anonymous_bytes",
    "available_bytes",
    "cpu_count",
    "die_with_parent",
    "drop_cached",
    "expect_random_reads",
    "is_alive",
    "is_cached",
    "is_linux",
    "limit_memory",
    "read_only_what_is_asked",
    "shared_memory",
    "unmap_pages",
    "will_need",
]


def is_linux() -> bool:
    return sys.platform == "linux" and os.environ.get("PENSTOCK_PORTABLE") != "1"


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
    return peak if sys.platform == "darwin" else peak * 1024


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


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
        descriptor = os.memfd_create("penstock", os.MFD_CLOEXEC)
    else:
        descriptor, path = tempfile.mkstemp(prefix="penstock-")
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
    """This process may take so many bytes more than it has; then it gets MemoryError. Nothing where there is no way."""
    if is_linux():
        has_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = has_bytes + more_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


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


def read_only_what_is_asked(descriptor: int) -> None:
    """Reads from this descriptor bring nothing more into the cache than they ask for."""
    if is_linux():
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)


def will_need(descriptor: int, offset: int, num_bytes: int) -> None:
    """Begin to read a small part of a file into the cache, without waiting for it. Nothing where there is no way."""
    if is_linux():
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, offset, num_bytes, os.POSIX_FADV_WILLNEED)


def drop_cached(descriptor: int, offset: int, num_bytes: int) -> None:
    """Let the cache forget a part of a file that nobody has mapped. Nothing where there is no way."""
    if is_linux():
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, offset, num_bytes, os.POSIX_FADV_DONTNEED)


def unmap_pages(mapped: mmap.mmap, start: int, stop: int) -> None:
    """Let go of the whole pages in bytes [start, stop) of a mapped file, which come back unchanged when touched."""
    start, stop = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
    if is_linux() and start < stop:
        mapped.madvise(mmap.MADV_DONTNEED, start, stop - start)


def expect_random_reads(mapped: mmap.mmap) -> None:
    """Touching a page of a mapped file then reads that page, and not megabytes around it."""
    if is_linux():
        mapped.madvise(mmap.MADV_RANDOM)
