"""The common part of the streams of a split: their interface and counts, waiting for a file, and reading it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from numpy.typing import NDArray

from batchwright.base.errors import NotReadyError, PlanError, QueueError, SpecError
from batchwright.base.machine import FolderWatch
from batchwright.queue.batch_file import DamagedFile, FileShape, read_facts
from batchwright.queue.claims import Claim, quarantine
from batchwright.queue.folder import EXTENSION, SplitFolder, digits_of
from batchwright.queue.members import Activity, Membership
from batchwright.queue.messages import deleted, file_in_words, purge_command
from batchwright.queue.reading import Arrays, BatchFileReader, LoadedFile, Position

T = TypeVar("T")

_LONGEST_LOOK_SECONDS = 0.5
"""The interval between checks for dead processes. The death of a process wakes no waiter."""
_AFTER_A_FAILURE = "mend it, and start the provider again with --accept-change; this consumer then goes on"


class Waiter:
    """The waits of one split, and how long they took in all."""

    def __init__(self, folder: SplitFolder, timeout_seconds: float) -> None:
        self.folder = folder
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
        began, queue = time.monotonic(), self.folder.queue
        watch = self._watch
        if watch is None:
            watch = self._watch = FolderWatch(self.folder.path, queue.who)
        try:
            while True:
                found = look()
                if not isinstance(found, int):
                    return found
                if self.is_stopped:
                    raise closed("this consumer was closed while it waited")
                self.folder.liveness.raise_failure(_AFTER_A_FAILURE)
                if not queue.path.is_dir():
                    raise deleted(queue.path)
                left = self.timeout_seconds - (time.monotonic() - began)
                if left <= 0:
                    raise self._late(what or file_in_words(self.folder.name, found))
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
        liveness = self.folder.liveness
        members = [(facts, activity) for facts, activity in liveness.members("provider") if liveness.is_alive(facts.id)]
        remedy = "timeout_seconds= waits longer"
        if not members:
            remedy = "batchwright prepare CONFIG, with the same config, in another terminal"
        return NotReadyError(
            f"{what} was not there after {self.timeout_seconds:g} s",
            folder=self.folder.queue.path,
            providers="\n".join(f"{facts.name}: {_in_words(activity)}" for facts, activity in members)
            or "none is running",
            remedy=remedy,
        )


def _in_words(activity: Activity) -> str:
    if activity.since is None:
        return "is there"
    said = activity.what
    if activity.number is not None:
        said += f" {activity.split} file {activity.number}"
    clock = time.strftime("%H:%M:%S", time.localtime(activity.since))
    return f"{said}, since {clock} ({max(time.time() - activity.since, 0):.0f} s ago)"


def closed(what: str) -> SpecError:
    return SpecError(what, parameter="consumer", remedy="DatasetConsumer(...) opens the queue again")


@dataclass
class StreamCounts:
    """The counts of events on a split, in this consumer."""

    batches: int = 0
    rows: int = 0
    files: int = 0
    redelivered_batches: int = 0
    """Handed out before, to a consumer that died or did not record them."""
    quarantined_files: int = 0
    lost_claims: int = 0
    """Files that were given to others, because this process seemed dead."""


class BatchStream(Protocol):
    """The rows of a split, for one consumer. A stream overrides what it needs."""

    counts: StreamCounts
    waiter: Waiter | None = None

    def peek(self, num_rows: int | None) -> tuple[Arrays, Any]:
        """The next rows, with the argument for `move`. None: as many as the provider put into a batch."""

    def move(self, taken: Any) -> None:
        """The rows that `peek` gave are handed out."""

    def begin_again(self) -> None:
        """The next evaluation begins, with the first of the kept batches."""
        return

    def record(self) -> None:
        """All rows that were handed out are used: they do not come again."""
        return

    def position(self) -> tuple[Position, FileShape | None] | None:
        """The place of the next row, and the cut of its file, if known. None if there is no position to keep."""

    def seek(self, position: Position, shape: FileShape | None, *, can_be_made_again: bool) -> None:
        """Go on at a place of files that are cut like this."""

    def release(self, *, record: bool) -> None:
        """Give all files back. Rows that are not recorded are left to others."""
        self.drop()

    def drop(self) -> None:
        """Close everything, without giving files back. Others find that their holder is gone."""

    def forget_lost_files(self) -> None:
        """After a time in which this process seemed dead: others may have its files."""
        return


class SplitReader:
    """Reads files of a split for one consumer: waits for them, checks them, and puts damaged ones aside."""

    def __init__(
        self,
        folder: SplitFolder,
        waiter: Waiter,
        fingerprint: str,
        memory: Callable[[int], NDArray[Any]] | None = None,
    ) -> None:
        self.folder = folder
        self.waiter = waiter
        self.fingerprint = fingerprint
        self.reader: BatchFileReader = BatchFileReader(memory)
        self.counts: StreamCounts = StreamCounts()

    def load(self, path: Path, number: int | None, claim: Claim | None = None) -> LoadedFile | None:
        """A file that was verified. None if it was damaged: it is in quarantine now."""
        inode = path.stat().st_ino
        try:
            file = self.reader.load(path)
            self._check_identity(file, number)
        except DamagedFile as error:
            quarantine(self.folder, number, error.reason, path, inode, claim)
            self.counts.quarantined_files += 1
            return None
        return file

    def _check_identity(self, file: LoadedFile, number: int | None) -> None:
        """Check that a file matches its name, and the queue that this consumer was opened on."""
        facts, folder = file.facts, self.folder
        reason = facts.under_another_name(folder.name, number)
        if reason is not None:
            raise DamagedFile(f"a file of {folder.path} is another: {reason}", file=folder.path, reason=reason)
        if facts.stamp != self.fingerprint:
            name, purge = file_in_words(folder.name, number), purge_command(folder.queue.path)
            raise QueueError(
                f"{name} was made by another provider than the queue that this consumer opened",
                folder=folder.queue.path,
                remedy=f"a new DatasetConsumer reads the new queue; to throw old files away:\n{purge}",
            )

    def shape_at(self, place: Position) -> FileShape | None:
        """The cut of the file at a place. Needed only inside a file, which then exists."""
        if not place.row:
            return None
        claimed = self.folder.claimed.glob(f"{digits_of(place.file)}.*{EXTENSION}")
        for path in (self.folder.ready_path(place.file), *claimed):
            with contextlib.suppress(OSError, DamagedFile):
                return read_facts(path).shape
        return None

    def delete_files_cut_otherwise(self, shape: FileShape) -> None:
        """Delete files that wait and are cut otherwise than a state counts: they are made again as the provider cuts
        now."""
        for number in self.folder.listing().ready:
            with contextlib.suppress(DamagedFile, FileNotFoundError):
                if read_facts(self.folder.ready_path(number)).shape != shape:
                    self.folder.ready_path(number).unlink()


def check_shape(of_state: FileShape | None, of_file: FileShape, file: str) -> None:
    """Check that a file is cut as in a state. With another cut, its batches hold other rows."""
    if of_state is None or of_state == of_file:
        return
    parameter = "batches_per_file"
    if of_state.batch_size != of_file.batch_size:
        parameter = "batch_size"
    raise PlanError(
        f"the state counts in files of {of_state.num_batches} batches of {of_state.batch_size} rows, "
        f"and {file} has {of_file.num_batches} of {of_file.batch_size}",
        parameter=parameter,
        remedy=f"prepare with batch_size = {of_state.batch_size} and batches_per_file = {of_state.num_batches}; "
        "a consumer's own batch_size= may be any",
    )


class RecordedStream(BatchStream):
    """A stream of numbered files whose progress is recorded in the folder. A process has one of a split and rank."""

    def __init__(self, source: SplitReader, membership: Membership, rank: int | None, *, at_once: bool) -> None:
        """`at_once`: rows are recorded as used at the request for the next ones; otherwise only by `record`."""
        self.source = source
        self.folder = source.folder
        self.reader = source.reader
        self.counts: StreamCounts = source.counts
        self.waiter = source.waiter
        self.membership = membership
        self.rank = rank
        self.at_once = at_once
        self.is_replaced = False
        self._member_number = membership.number

    def _replace_older(self) -> None:
        """Replace an older stream of the same process, which ends. A notebook cell may run twice."""
        if self.is_replaced:
            raise QueueError(
                "a newer DatasetConsumer of this process reads this queue",
                folder=self.folder.queue.path,
                split=self.folder.name,
                remedy="use that one; several readers are several processes, or have rank= and world_size=",
            )
        key = (self.folder.identity, self.rank, os.getpid())
        if _readers.get(key) is self:
            return
        with _readers_lock:
            before = _readers.get(key)
            _readers[key] = self
        if before is not None and before is not self:
            before.is_replaced = True
            before.release(record=False)


_readers: weakref.WeakValueDictionary[tuple[str, int | None, int], RecordedStream] = weakref.WeakValueDictionary()
_readers_lock = threading.Lock()
