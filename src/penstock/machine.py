"""What only some machines have, each with a fallback: process facts, CPU count, shared memory, parent death.

Everything Linux-only that penstock uses is in this module. `PENSTOCK_PORTABLE=1` turns that half off, so that the
portable half (what macOS runs) can be tested anywhere.
"""

from __future__ import annotations

import ctypes
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
    "cpu_count",
    "die_with_parent",
    "is_alive",
    "is_linux",
    "shared_memory",
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
        return int(ctypes.CDLL(None, use_errno=True).prctl(parent_death_signal, signal.SIGKILL, 0, 0, 0)) == 0
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
