"""Waiting for a file that a provider makes. Changes wake it; a failed provider or a timeout ends it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from batchwright.base.errors import NotReadyError, SpecError
from batchwright.base.machine import FolderWatch
from batchwright.queue.file_names import file_in_words
from batchwright.queue.folder import QueueFolder
from batchwright.queue.members import Activity, Liveness, raise_failure
from batchwright.queue.system_errors import deleted

__all__ = ["Waiter"]

T = TypeVar("T")

_LONGEST_LOOK_SECONDS = 0.5
"""The interval between checks for dead processes. The death of a process wakes no waiter."""
_AFTER_A_FAILURE = (
    "mend it and start the provider again: batchwright prepare CONFIG --accept-change; this consumer then goes on"
)


class Waiter:
    """The waits of one split, and how long they took in all."""

    def __init__(self, queue: QueueFolder, split: str, liveness: Liveness, timeout_seconds: float) -> None:
        self.queue = queue
        self.split = split
        self.liveness = liveness
        self.timeout_seconds = timeout_seconds
        self.seconds: float = 0.0
        self.longest_seconds: float = 0.0
        self.is_stopped: bool = False
        self._watch: FolderWatch | None = None

    def stop(self) -> None:
        """End a wait in another thread, or in the call that a signal handler interrupted."""
        self.is_stopped = True
        if self._watch is not None:
            self._watch.wake()

    def until(self, look: Callable[[], T | int], what: str | None = None) -> T:
        """Wait until `look` finds a value, and return it. While it gives a number, that file is awaited, or `what`."""
        found = look()
        if not isinstance(found, int):
            return found
        began = time.monotonic()
        watch = self._watch
        if watch is None:
            watch = self._watch = FolderWatch(self.queue.path / self.split, self.queue.who)
        try:
            while True:
                found = look()
                if not isinstance(found, int):
                    return found
                if self.is_stopped:
                    raise SpecError(
                        "this consumer was closed while it waited",
                        parameter="consumer",
                        remedy="DatasetConsumer(...) opens the queue again",
                    )
                raise_failure(self.queue.who, _AFTER_A_FAILURE)
                if not self.queue.path.is_dir():
                    raise deleted(self.queue.path)
                left = self.timeout_seconds - (time.monotonic() - began)
                if left <= 0:
                    raise self._late(what or file_in_words(self.split, found))
                watch.wait(min(left, _LONGEST_LOOK_SECONDS))
        finally:
            passed = time.monotonic() - began
            self.seconds += passed
            self.longest_seconds = max(self.longest_seconds, passed)

    def close(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    def _late(self, what: str) -> NotReadyError:
        members = list(self.liveness.members("provider"))
        providers = [
            f"{facts.name}: {_in_words(activity)}" for facts, activity in members if self.liveness.is_alive(facts.id)
        ]
        remedy = "timeout_seconds= waits longer"
        if not providers:
            remedy = "batchwright prepare CONFIG, with the same config, in another terminal"
        return NotReadyError(
            f"{what} was not there after {self.timeout_seconds:g} s",
            folder=self.queue.path,
            providers="\n".join(providers) or "none is running",
            remedy=remedy,
        )


def _in_words(activity: Activity) -> str:
    said = activity.what or "is there"
    if activity.number >= 0 and said == "makes":
        said += f" {activity.split} file {activity.number}"
    elif activity.number >= 0:
        said += f" ({activity.split} file {activity.number})"
    if not activity.since:
        return said
    clock = time.strftime("%H:%M:%S", time.localtime(activity.since))
    return f"{said}, since {clock} ({max(time.time() - activity.since, 0):.0f} s ago)"
