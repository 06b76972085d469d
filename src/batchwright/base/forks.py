"""Locks and files across a fork: it waits for the locks, and the child lets go of its parent's files.

A child has one thread. A lock that another thread of its parent held at the fork would never be released in it, and a
file that it keeps open keeps the file's lock when the parent is dead.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from typing import Any, Protocol

__all__ = ["let_go_in_children", "lock_across_forks"]


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
