"""The stream of a split for one of several consumers: files are claimed, read to their end, and deleted."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import weakref
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from batchwright.base.errors import PlanError, QueueError
from batchwright.queue.batch_file import DamagedFile, FileFacts, read_facts
from batchwright.queue.claim import Claim
from batchwright.queue.folder import SplitFolder
from batchwright.queue.reading import Arrays, FileShape, LoadedFile, Position, Reader, joined
from batchwright.queue.refused import purge_command
from batchwright.queue.seat import Seat
from batchwright.queue.waiting import Waiter

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


@dataclass(slots=True, eq=False)
class _Held:
    """A claimed file, until it is deleted or given back."""

    claim: Claim
    file: LoadedFile | None
    """None when all of it was handed out."""
    shape: FileShape
    num_rows: int
    first: int
    """The row from which it is handed out."""
    recorded: int

    @property
    def number(self) -> int:
        return self.claim.number


Taken = list[tuple[_Held, int, int]]
"""Rows of a batch: of which files, from where to where."""


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
        self.counts: Counts = Counts()
        self._files: list[_Held] = []
        """Those that are claimed, in this order: read to their end, being read, and opened for the next batch."""
        self._at: tuple[_Held, int] | None = None
        """Where the next row is: in this file, at this row, or after its end. What moves, moves by setting this."""
        self._start: tuple[Position, FileShape | None] | None = None
        """Where it was told to begin, and how files were cut then. It counts until a batch was handed out."""
        self._behind: list[Claim] = []
        """Files before a start, which cannot be made again: kept until `record`."""
        self._ending: set[int] = set()
        """Files that the thread is about to delete."""
        self._pid = -1
        """Of the process in which this is known to be the only reader."""
        self.rank: int | None = None
        self.is_replaced = False

    # Rows

    def peek(self, num_rows: int | None) -> tuple[Arrays, Taken]:
        """The next rows; None: as many as the provider put into a batch. They are handed out by `move`, not before."""
        if self._at is not None and self._pid == os.getpid() and not self.is_replaced:  # most batches: a microsecond
            held, row = self._at
            stop = row + (num_rows or held.shape.batch_size)
            if stop <= held.num_rows and held.file is not None and self._files and held is self._files[0]:
                return held.file.rows(row, stop), [(held, row, stop)]
        be_the_only_one_here(self)
        self._pid = os.getpid()
        self._put_spent_away()
        while True:
            seated = self._seated
            taken = self._found(num_rows)
            if seated == self._seated:
                break
            # Others took this process for dead while it looked: what it had found may be theirs.
        return joined([held.file.rows(start, stop) for held, start, stop in taken if held.file is not None]), taken

    def _found(self, num_rows: int | None) -> Taken:
        held, row = self._at or (None, 0)
        index = self._files.index(held) if held in self._files else 0
        taken: Taken = []
        missing = num_rows
        while missing is None or missing > 0:
            if index == len(self._files):
                self._open()
                if index >= len(self._files):
                    return taken
            file = self._files[index]
            start = row if file is held else file.first
            if missing is None and start < file.num_rows:
                missing = file.shape.batch_size
            stop = min(start + (missing or 0), file.num_rows)
            if stop > start:
                taken.append((file, start, stop))
                missing = (missing or 0) - (stop - start)
            index += 1
        return taken

    def move(self, taken: Taken) -> None:
        """What `peek` gave is handed out."""
        for held, start, stop in taken:
            if self.at_once:
                held.recorded = start  # all before it was used
            held.claim.record(held.recorded, stop)
        held, _, stop = taken[-1]
        self._look_ahead(held, stop)
        self._at = held, stop  # last: until here nothing was taken

    def _look_ahead(self, held: _Held, row: int) -> None:
        """Read the next file while the rest of this one is used; where others read too, it may be theirs."""
        is_time = self.counts.batches % _TAKES_PER_LOOK == 1 and not self.reader.is_ahead
        if is_time and held is self._files[-1] and row < held.num_rows and held.claim.is_alone:
            self.reader.read_ahead(self.folder.ready_path(held.number + 1))

    def _open(self) -> None:
        """Claim the next file, and read it. Where an interrupt comes in between, the file is found again by `claim`."""
        while True:
            self._stay()
            claim: Claim = self.waiter.until(self.folder.name, self._claim)
            try:
                held = self._load(claim)
            except BaseException:
                self.folder.give_back(claim)
                raise
            if held is not None:
                self._files.append(held)
                self.counts.files += 1
                return

    def _claim(self) -> Claim | int:
        mine = [held.claim for held in self._files] + self._behind
        return self.folder.claim(self.seat.member, {*self._ending, *(claim.number for claim in mine)})

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
        if self._start is not None and self._at is None:
            first = self._first_row(claim, file, *self._start)
            claim.record(first, first)  # or after a kill what lies before the start would come
        else:
            first = min(claim.recorded, file.num_rows)
            again = min(claim.handed, file.num_rows) - first
            self.counts.redelivered_batches += math.ceil(max(again, 0) / file.facts.batch_size)
            if first == file.num_rows:
                claim.done()
                return None
        return _Held(claim, file, file.shape, file.num_rows, first, first)

    def _first_row(self, claim: Claim, file: LoadedFile, start: Position, shape: FileShape | None) -> int:
        """Where a stream begins that was told to; a start may lie beyond the end of its file."""
        if claim.number != start.file + len(self._files):
            raise QueueError(
                f"{self.folder.name} file {start.file} was asked for, and file {claim.number} came",
                folder=self.folder.queue.path,
                remedy="load the state again, with no other consumer on this queue",
            )
        try:
            check_shape(shape, file.shape, f"{self.folder.name} file {claim.number}")
        except PlanError:
            if self.seat.meta.reproducible:  # or the right one could not be made
                claim.done()
                self.folder.want(claim.number)
            raise
        before = sum(held.num_rows for held in self._files)
        return min(max(start.row - before, 0), file.num_rows)

    # What is recorded

    def record(self) -> None:
        """Everything that was handed out is used: it does not come again, and files that were read are deleted."""
        for held in self._spent():
            held.claim.record(held.num_rows, held.num_rows)  # now: whenever it is deleted, nothing of it comes again
            self._ending.add(held.number)
            self._files.remove(held)
            self.reader.do_later(partial(self._finish, held.claim))
        if self._at is not None and self._at[0] in self._files:
            held, row = self._at
            held.recorded = row
            held.claim.record(row, row)
        while self._behind:
            self._behind.pop().done()
        self.reader.finish()

    def _spent(self) -> list[_Held]:
        """Files of which every row was handed out."""
        if self._at is None:
            return []
        held, row = self._at
        if held not in self._files:
            return []
        return self._files[: self._files.index(held) + (row >= held.num_rows)]

    def _put_spent_away(self) -> None:
        """Files that were handed out wholly, the last batch of them too: deleted, or kept on disk until `record`."""
        for held in self._spent():
            if self.at_once:
                held.claim.record(held.num_rows, held.num_rows)
                self._ending.add(held.number)
                self._files.remove(held)
                self.reader.do_later(partial(self._finish, held.claim))
            elif held.file is not None:
                held.file = None
                held.claim.rest()

    def _finish(self, claim: Claim) -> None:
        if not claim.done():
            self.counts.lost_claims += 1
        self._ending.discard(claim.number)

    # Where it is

    def position(self) -> tuple[Position, FileShape | None]:
        """The next row, and how its file is cut, where that is known."""
        if self._at is not None:
            held, row = self._at
            if row < held.num_rows:
                return Position(held.number, row), held.shape
            after = self._files.index(held) + 1 if held in self._files else 0
            if after >= len(self._files):
                return Position(held.number + 1, 0), held.shape
            return Position(self._files[after].number, self._files[after].first), self._files[after].shape
        if self._start is not None:
            return self._start
        if self._files:
            return Position(self._files[0].number, self._files[0].first), self._files[0].shape
        number, row = self.folder.beginning()
        if not row:
            return Position(number, 0), None
        facts = read_facts(self.folder.ready_path(number))
        return Position(number, row), FileShape(facts.batch_size, facts.num_batches)

    def seek(self, position: Position, shape: FileShape | None, *, can_be_made_again: bool) -> None:
        be_the_only_one_here(self)
        self.release(record=False)
        before = self.folder.rewind(position.file, self.seat.member, can_be_made_again=can_be_made_again)
        self._behind = before
        self._start = position, shape
        if shape is not None and can_be_made_again:
            self._throw_away_others(shape)

    def _throw_away_others(self, shape: FileShape) -> None:
        """Files that wait and are cut otherwise than a state counts: they are made again as the provider cuts now."""
        for number in self.folder.listing().ready:
            with contextlib.suppress(DamagedFile, FileNotFoundError):
                facts = read_facts(self.folder.ready_path(number))
                if (facts.batch_size, facts.num_batches) != shape:
                    self.folder.ready_path(number).unlink()

    def release(self, *, record: bool) -> None:
        """Let go of all files: what is not recorded is there for others."""
        if record:
            self.record()
        self.reader.close()
        for claim in (*self._behind, *(held.claim for held in self._files)):
            try:
                self.folder.give_back(claim)
            except QueueError:  # the folder was deleted
                claim.drop()
        self.drop()

    def drop(self) -> None:
        """Let go of all files without saying so. Whoever comes next finds that their holder is gone."""
        for claim in (*self._behind, *(held.claim for held in self._files)):
            claim.drop()
        self._behind.clear()
        self._files.clear()
        self._at = self._start = None
        self.reader.end()

    def forget_lost_files(self) -> None:
        """After a time in which this process seemed dead: others may have what it held."""
        for held in [*self._files]:
            if not held.claim.is_held():
                self.counts.lost_claims += 1
                held.claim.drop()
                self._files.remove(held)


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
    key = (stream.folder.identity, stream.rank, os.getpid())
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
            remedy="a new DatasetConsumer reads the new queue; to throw old files away:\n"
            f"{purge_command(folder.queue.path)}",
        )


def check_shape(of_state: FileShape | None, of_file: FileShape, file: str) -> None:
    """That a file is cut as a state counts: made with other batches, it holds other rows."""
    if of_state is not None and of_state != of_file:
        raise PlanError(
            f"the state counts in files of {of_state.num_batches} batches of {of_state.batch_size} rows, "
            f"and {file} has {of_file.num_batches} of {of_file.batch_size}",
            parameter="batch_size" if of_state.batch_size != of_file.batch_size else "batches_per_file",
            remedy=f"prepare with batch_size = {of_state.batch_size} and batches_per_file = {of_state.num_batches}; "
            "a consumer's own batch_size= may be any",
        )
