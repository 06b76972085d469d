"""Locks that a child process finds open: a fork waits until no thread is in the middle of a change.

Else torch's workers, which are forks, would wait for ever for a thread that appends in their parent and not in them.
"""

from __future__ import annotations

import os
import threading
import weakref

__all__ = ["PIECES", "new_lock"]

PIECES = threading.Lock()
"""Held while values become Arrow arrays, in whichever column; after a buffer's own lock, where both are held."""

_locks: weakref.WeakSet[threading.RLock] = weakref.WeakSet()
_registering = threading.Lock()
_held: list[threading.RLock] = []


def new_lock() -> threading.RLock:
    """A lock of its own for a buffer."""
    lock = threading.RLock()
    with _registering:
        _locks.add(lock)
    return lock


def _hold_all() -> None:
    _registering.acquire()
    for lock in list(_locks):
        lock.acquire()
        _held.append(lock)
    PIECES.acquire()


def _release_all() -> None:
    PIECES.release()
    while _held:
        _held.pop().release()
    _registering.release()


os.register_at_fork(before=_hold_all, after_in_parent=_release_all, after_in_child=_release_all)
