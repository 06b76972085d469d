"""The stream of a split for one of several consumers: files are claimed, read to their end, and deleted."""

from __future__ import annotations

import math
import os
import threading
import weakref
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from penstock.errors import PlanError, QueueError
from penstock.queue.batch_file import DamagedFile, FileFacts
from penstock.queue.folder import Claim, SplitFolder
from penstock.queue.reading import Arrays, FileShape, LoadedFile, Position, Reader, joined
from penstock.queue.seat import Seat
from penstock.queue.waiting import Waiter

__all__ = ["ClaimedStream", "Counts", "be_the_only_one_here", "check_facts", "check_shape"]

_TAKES_PER_LOOK = 8
"""So often is looked whether the next file is there, to read it ahead."""


@dataclass
class Counts:
    """What happened to a split, in this consumer."""

    batches: int = 0
    rows: int = 0
    files: int = 0
    redelivered_batches: int = 0
    """Handed out before, to a consumer that died or did not record them."""
    quarantined_files: int = 0
    lost_claims: int = 0
    """Files that were given to others, because this process seemed dead."""


@dataclass(slots=True)
class _Held:
    claim: Claim
    file: LoadedFile
    row: int
    """The next one to hand out."""
    recorded: int

    @property
    def is_spent(self) -> bool:
        return self.row >= self.file.num_rows


class ClaimedStream:
    """Rows of the files that this consumer claims, in the order of their numbers."""

    def __init__(self, folder: SplitFolder, seat: Seat, waiter: Waiter, reader: Reader, *, at_once: bool) -> None:
        """`at_once`: what was handed out is recorded with the next batch; otherwise only by `record`."""
        self.folder = folder
        self.seat = seat
        self._seated = seat.number
        self.waiter = waiter
        self.reader = reader
        self.at_once = at_once
        self.counts = Counts()
        self._files: list[_Held] = []
        """Being read: the first one, and those after it that a batch needed too. Then spent ones are in `_spent`."""
        self._spent: list[_Held] = []
        self._start: tuple[Position, FileShape] | None = None
        """Where it was told to begin, and how files were cut then."""
        self._last: tuple[int, FileShape] | None = None
        self.rank: int | None = None
        self.is_replaced = False

    # Rows

    def take(self, num_rows: int | None) -> Arrays:
        """The next rows; None: as many as the provider put into a batch. Nothing is taken where this raises."""
        be_the_only_one_here(self)
        if self.at_once:
            self._finish_spent()
        parts: list[tuple[_Held, int]] = []
        missing, at = num_rows, 0
        while missing is None or missing > 0:
            if at == len(self._files):
                self._files.append(self._open())
            held = self._files[at]
            if missing is None:
                missing = held.file.facts.batch_size - held.row % held.file.facts.batch_size
            stop = min(held.row + missing, held.file.num_rows)
            parts.append((held, stop))
            missing -= stop - held.row
            at += 1
        for held, stop in parts:  # all of it, before anything counts as taken
            held.claim.record(held.row if self.at_once else held.recorded, stop)
        pieces = []
        for held, stop in parts:
            pieces.append(held.file.rows(held.row, stop))
            if self.at_once:
                held.recorded = held.row
            held.row = stop
        last = parts[-1][0]
        self._last = last.claim.number, last.file.shape
        while self._files and self._files[0].is_spent:
            self._spent.append(self._files.pop(0))
        self._look_ahead()
        return joined(pieces)

    def _look_ahead(self) -> None:
        """Read the next file while the rest of this one is used; where others read too, it may be theirs."""
        if len(self._files) == 1 and not self.reader.is_ahead:
            held = self._files[0]
            if held.claim.is_alone and self.counts.batches % _TAKES_PER_LOOK == 1:
                self.reader.read_ahead(self.folder.ready_path(held.claim.number + 1))

    def _open(self) -> _Held:
        while True:
            self._stay()
            claim: Claim = self.waiter.until(self.folder.name, lambda: self.folder.claim(self.seat.member))
            try:
                held = self._load(claim)
            except BaseException:
                self.folder.give_back(claim)
                raise
            if held is not None:
                self.counts.files += 1
                return held

    def _stay(self) -> None:
        """Be seen by others. What this process held while it seemed dead is theirs, or comes again from the queue."""
        self.seat.stay()
        if self._seated != self.seat.number:
            self._seated = self.seat.number
            self.forget_lost_files()
            self.release(record=False)

    def _load(self, claim: Claim) -> _Held | None:
        """A claimed file, from where it is to be read. None where it is damaged, or nothing of it is left."""
        inode = claim.path.stat().st_ino
        try:
            file = self.reader.load(claim.path)
            check_facts(file.facts, self.folder, claim.number, self.seat.meta.fingerprint)
        except DamagedFile as error:
            self.folder.quarantine(claim.number, error.reason, claim.path, inode, claim)
            self.counts.quarantined_files += 1
            return None
        row = claim.recorded
        if self._start is not None:
            row = self._first_row(claim, file)
        else:
            again = min(claim.handed, file.num_rows) - claim.recorded
            self.counts.redelivered_batches += math.ceil(max(again, 0) / file.facts.batch_size)
        if row >= file.num_rows:
            claim.done()
            return None
        return _Held(claim, file, row, row)

    def _first_row(self, claim: Claim, file: LoadedFile) -> int:
        """Where a stream begins that was told to; a start may lie beyond the end of its file."""
        assert self._start is not None
        start, shape = self._start
        if claim.number != start.file:
            raise QueueError(
                f"{self.folder.name} file {start.file} was asked for, and file {claim.number} came",
                folder=self.folder.queue.path,
                remedy="load the state again, with no other consumer on this queue",
            )
        check_shape(shape, file.shape, f"{self.folder.name} file {claim.number}")
        beyond = start.row - file.num_rows
        self._start = (Position(start.file + 1, beyond), shape) if beyond > 0 else None
        return min(start.row, file.num_rows)

    # What is recorded

    def record(self) -> None:
        """Everything that was handed out is used: it does not come again, and files that were read are deleted."""
        self._finish_spent()
        for held in self._files:
            held.recorded = held.row
            held.claim.record(held.row, held.row)
        self.reader.finish()

    def _finish_spent(self) -> None:
        while self._spent:
            held = self._spent[0]
            held.claim.record(held.row, held.row)  # now: whenever the file is deleted, nothing of it comes again
            self._spent.pop(0)
            self.reader.do_later(partial(self._finish, held.claim))

    def _finish(self, claim: Claim) -> None:
        if not claim.done():
            self.counts.lost_claims += 1

    # Where it is

    def position(self) -> tuple[Position, FileShape] | None:
        """The next row, and how its file is cut. None: nothing was taken yet."""
        if self._start is not None:
            return self._start
        if self._files:
            held = self._files[0]
            return Position(held.claim.number, held.row), held.file.shape
        if self._last is not None:
            number, shape = self._last
            return Position(number + 1, 0), shape
        return None

    def seek(self, position: Position, shape: FileShape, *, can_be_made_again: bool) -> None:
        be_the_only_one_here(self)
        self.release(record=False)
        self.folder.rewind(position.file, self.seat.member, can_be_made_again=can_be_made_again)
        self._start = position, shape
        self._last = None

    def release(self, *, record: bool) -> None:
        """Let go of all files: what is not recorded is there for others."""
        if record:
            self.record()
        self.reader.close()
        for held in (*self._spent, *self._files):
            try:
                self.folder.give_back(held.claim)
            except QueueError:  # the folder was deleted
                held.claim.drop()
        self._spent.clear()
        self._files.clear()

    def forget_lost_files(self) -> None:
        """After a time in which this process seemed dead: others may have what it held."""
        for held in [*self._spent, *self._files]:
            if not held.claim.is_held():
                self.counts.lost_claims += 1
                held.claim.drop()
                (self._spent if held in self._spent else self._files).remove(held)


class _OneOfAProcess(Protocol):
    folder: SplitFolder
    rank: int | None
    is_replaced: bool

    def release(self, *, record: bool) -> None: ...


_readers: weakref.WeakValueDictionary[tuple[str, int | None, int], _OneOfAProcess] = weakref.WeakValueDictionary()
_readers_lock = threading.Lock()


def be_the_only_one_here(stream: _OneOfAProcess) -> None:
    """A consumer that was made again, in a notebook, goes on for the one before it, which ends."""
    if stream.is_replaced:
        raise QueueError(
            "a newer DatasetConsumer of this process reads this queue",
            folder=stream.folder.queue.path,
            split=stream.folder.name,
            remedy="use that one; several readers are several processes, or have rank= and world_size=",
        )
    key = (str(stream.folder.path), stream.rank, os.getpid())
    if _readers.get(key) is stream:
        return
    with _readers_lock:
        before = _readers.get(key)
        _readers[key] = stream
    if before is not None and before is not stream:
        before.is_replaced = True
        before.release(record=False)


def check_facts(facts: FileFacts, folder: SplitFolder, number: int, fingerprint: str) -> None:
    """That a file is the one that its name says, of the queue that this consumer was opened on."""
    if (facts.split, facts.number) != (folder.name, number):
        reason = f"it is {facts.split} file {facts.number}, under the name of {folder.name} file {number}"
        raise DamagedFile(f"a file of {folder.path} is another: {reason}", file=folder.path, reason=reason)
    if facts.stamp != fingerprint:
        raise QueueError(
            f"{folder.name} file {number} was made by another provider than the queue that this consumer opened",
            folder=folder.queue.path,
            remedy="a new DatasetConsumer reads the new queue; to throw old files away: penstock queue purge "
            f"{folder.queue.path.parent}",
        )


def check_shape(of_state: FileShape, of_file: FileShape, file: str) -> None:
    """That a file is cut as a state counts: made with other batches, it holds other rows."""
    if of_state != of_file:
        raise PlanError(
            f"the state counts in files of {of_state.num_batches} batches of {of_state.batch_size} rows, "
            f"and {file} has {of_file.num_batches} of {of_file.batch_size}",
            parameter="batch_size" if of_state.batch_size != of_file.batch_size else "batches_per_file",
            remedy=f"prepare with batch_size = {of_state.batch_size} and batches_per_file = {of_state.num_batches}; "
            "a consumer's own batch_size= may be any",
        )
