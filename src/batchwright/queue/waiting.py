"""Waiting for a file that somebody else makes: woken by changes, ended by a provider's death or by time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from batchwright.base.errors import NotReadyError, SpecError, WorkerError
from batchwright.base.machine import FolderWatch
from batchwright.queue.folder import QueueFolder
from batchwright.queue.members import Census, read_deaths
from batchwright.queue.refused import deleted

__all__ = ["Waiter"]

T = TypeVar("T")

_LONGEST_LOOK_SECONDS = 0.5
"""Not everywhere does the death of a process wake those who wait: so often is looked for it."""


class Waiter:
    """How one consumer waits, and how long it has waited in all."""

    def __init__(self, queue: QueueFolder, census: Census, timeout_seconds: float) -> None:
        self.queue = queue
        self.census = census
        self.timeout_seconds = timeout_seconds
        self.seconds: float = 0.0
        self.longest_seconds: float = 0.0
        self.is_stopped: bool = False
        self._watches: dict[str, FolderWatch] = {}

    def stop(self) -> None:
        """End a wait in another thread, or in the call that a signal handler interrupted."""
        self.is_stopped = True
        for watch in [*self._watches.values()]:
            watch.wake()

    def until(self, split: str, look: Callable[[], T | int], what: str | None = None) -> T:
        """What `look` finds; while it gives a number, that file is waited for, or `what`."""
        found = look()
        if not isinstance(found, int):
            return found
        began = time.monotonic()
        watch = self._watches.get(split)
        if watch is None:
            watch = self._watches[split] = FolderWatch(self.queue.path / split, self.queue.who)
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
                self._raise_if_a_provider_died()
                left = self.timeout_seconds - (time.monotonic() - began)
                if left <= 0:
                    raise self._late(what or f"{split} file {found}")
                watch.wait(min(left, _LONGEST_LOOK_SECONDS))
        finally:
            passed = time.monotonic() - began
            self.seconds += passed
            self.longest_seconds = max(self.longest_seconds, passed)

    def close(self) -> None:
        for watch in self._watches.values():
            watch.close()
        self._watches.clear()

    def _raise_if_a_provider_died(self) -> None:
        deaths = read_deaths(self.queue.who)
        if deaths:
            raise WorkerError(
                deaths[-1].headline,
                traceback=deaths[-1].traceback,
                remedy="mend it and start the provider again: batchwright prepare CONFIG --accept-change; "
                "this consumer then goes on",
            )
        if not self.queue.path.is_dir():
            raise deleted(self.queue.path)

    def _late(self, what: str) -> NotReadyError:
        providers = []
        for facts, doing in self.census.look("provider"):
            if not self.census.is_alive(facts.id):
                continue
            said = doing.what or "is there"
            if doing.number >= 0:
                said += (
                    f" {doing.split} file {doing.number}"
                    if said == "makes"
                    else f" ({doing.split} file {doing.number})"
                )
            providers.append(f"{facts.name}: {said}" + (f", since {_ago(doing.since)}" if doing.since else ""))
        return NotReadyError(
            f"{what} was not there after {self.timeout_seconds:g} s",
            folder=self.queue.path,
            providers="\n".join(providers) if providers else "none is running",
            remedy="timeout_seconds= waits longer"
            if providers
            else "batchwright prepare CONFIG, with the same config, in another terminal",
        )


def _ago(since: float) -> str:
    return f"{time.strftime('%H:%M:%S', time.localtime(since))} ({max(time.time() - since, 0):.0f} s ago)"
