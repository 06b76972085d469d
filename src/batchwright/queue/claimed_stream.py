"""The stream of a split for single consumers: files are claimed, read to their end, and deleted."""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import dataclass
from functools import partial

from batchwright.base.errors import QueueError
from batchwright.queue.batch_file import FileShape
from batchwright.queue.claims import Claim, beginning, claim_next, give_back, rewind
from batchwright.queue.members import Membership
from batchwright.queue.reading import Arrays, LoadedFile, Position, joined
from batchwright.queue.streams import RecordedStream, SplitReader, check_shape

_TAKES_PER_LOOK = 8
"""The number of batches between two checks for the next file, to read it ahead."""


@dataclass(slots=True, eq=False)
class _ClaimedFile:
    """A claimed file, until it is deleted or given back."""

    claim: Claim
    file: LoadedFile | None
    """None if all rows were handed out."""
    shape: FileShape
    num_rows: int
    first: int
    """The first row to hand out."""
    recorded: int


Taken = list[tuple[_ClaimedFile, int, int]]
"""Rows of a batch: their files, each with the first row and the one after the last."""


class ClaimedStream(RecordedStream):
    """Rows of the files that this consumer claims, in the order of their numbers."""

    def __init__(self, source: SplitReader, membership: Membership, *, at_once: bool) -> None:
        super().__init__(source, membership, None, at_once=at_once)
        self._files: list[_ClaimedFile] = []
        """The claimed ones, in order: read to their end, being read, and opened for the next batch."""
        self._at: tuple[_ClaimedFile, int] | None = None
        """The place of the next row: a file and a row of it, or its end. Only this moves the stream."""
        self._start: tuple[Position, FileShape | None] | None = None
        """The place given to `seek`, and the cut of files at that time. Used until a batch was handed out."""
        self._behind: list[Claim] = []
        """Files before that, which cannot be made again: kept until `record`."""
        self._ending: set[int] = set()
        """Files that the thread is about to delete."""
        self._pid = -1
        """The process in which this is known to be the only reader."""

    # Rows

    def peek(self, num_rows: int | None) -> tuple[Arrays, Taken]:
        is_same = self._pid == os.getpid() and not self.is_replaced
        if is_same and self._at is not None and self._files:  # most batches: a microsecond
            current, row = self._at
            stop = row + (num_rows or current.shape.batch_size)
            if current is self._files[0] and stop <= current.num_rows and current.file is not None:
                return current.file.rows(row, stop), [(current, row, stop)]
        self._replace_older()
        self._pid = os.getpid()
        self._put_spent_away()
        while True:
            member_number = self._member_number
            taken = self._next_rows(num_rows)
            if member_number == self._member_number:
                break
            # Others took this process for dead while it looked: the files that it had found may be theirs.
        return joined([file.file.rows(start, stop) for file, start, stop in taken if file.file is not None]), taken

    def _next_rows(self, num_rows: int | None) -> Taken:
        """Take rows from the current place, claiming files until there are enough. None: the rows of one batch."""
        current, row = self._at or (None, 0)
        index = 0
        if current in self._files:
            index = self._files.index(current)
        taken: Taken = []
        num_taken = 0
        while num_rows is None or num_taken < num_rows:
            if index == len(self._files):
                self._open()
                if index >= len(self._files):  # this process joined anew, and lost its files
                    return taken
            file = self._files[index]
            start = row if file is current else file.first
            if start < file.num_rows:
                num_rows = num_rows or file.shape.batch_size
                stop = min(start + num_rows - num_taken, file.num_rows)
                taken.append((file, start, stop))
                num_taken += stop - start
            index += 1
        return taken

    def move(self, taken: Taken) -> None:
        for file, start, stop in taken:
            if self.at_once:
                file.recorded = start  # all before it was used
            file.claim.record(file.recorded, stop)
        file, _, stop = taken[-1]
        self._look_ahead(file, stop)
        self._at = file, stop  # last: until here nothing was taken

    def _look_ahead(self, current: _ClaimedFile, row: int) -> None:
        """Read the next file while the rest of this one is used. Where others read too, it may be theirs."""
        is_time = self.counts.batches % _TAKES_PER_LOOK == 1 and not self.reader.is_ahead
        if is_time and current is self._files[-1] and row < current.num_rows and current.claim.is_alone:
            self.reader.read_ahead(self.folder.ready_path(current.claim.number + 1))

    def _open(self) -> None:
        """Claim the next file, and read it. After an interrupt in between, `claim_next` finds the file again."""
        while True:
            self._renew_membership()
            claim: Claim = self.source.waiter.until(self._claim)
            try:
                opened = self._load(claim)
            except BaseException:
                give_back(self.folder, claim)
                raise
            if opened is not None:
                self._files.append(opened)
                self.counts.files += 1
                return

    def _claim(self) -> Claim | int:
        mine = {claim.number for claim in self._claims()} | self._ending
        return claim_next(self.folder, self.membership.member, mine)

    def _claims(self) -> list[Claim]:
        return [*self._behind, *(file.claim for file in self._files)]

    def _renew_membership(self) -> None:
        """Files of a time in which this process seemed dead belong to others, or come again from the queue."""
        self.membership.renew()
        if self._member_number != self.membership.number:
            self._member_number = self.membership.number
            self.forget_lost_files()
            self.release(record=False)

    def _load(self, claim: Claim) -> _ClaimedFile | None:
        """Load a claimed file from the row where reading starts. None if it is damaged, or has no rows left."""
        file = self.source.load(claim.path, claim.number, claim)
        if file is None:
            return None
        if self._start is not None and self._at is None:
            first = self._first_row(claim, file, *self._start)
            claim.record(first, first)  # or after a kill the rows before the start would come
        else:
            first = min(claim.recorded, file.num_rows)
            again = max(min(claim.handed, file.num_rows) - first, 0)
            self.counts.redelivered_batches += math.ceil(again / file.facts.batch_size)
            if first == file.num_rows:
                claim.done()
                return None
        return _ClaimedFile(claim, file, file.facts.shape, file.num_rows, first, first)

    def _first_row(self, claim: Claim, file: LoadedFile, start: Position, shape: FileShape | None) -> int:
        """The first row of a stream after `seek`. The start may be beyond the end of its file."""
        if claim.number != start.file + len(self._files):
            raise QueueError(
                f"{self.folder.name} file {start.file} was asked for, and file {claim.number} came",
                folder=self.folder.queue.path,
                remedy="load the state again, with no other consumer on this queue",
            )
        check_shape(shape, file.facts.shape, f"{self.folder.name} file {claim.number}")
        before = sum(file.num_rows for file in self._files)
        return min(max(start.row - before, 0), file.num_rows)

    # Recording

    def record(self) -> None:
        for file in self._spent():
            self._delete(file)
        if self._at is not None and self._at[0] in self._files:
            current, row = self._at
            current.recorded = row
            current.claim.record(row, row)
        while self._behind:
            self._behind.pop().done()
        self.reader.finish()

    def _spent(self) -> list[_ClaimedFile]:
        """The files whose rows were all handed out."""
        if self._at is None or self._at[0] not in self._files:
            return []
        current, row = self._at
        index = self._files.index(current)
        if row >= current.num_rows:
            index += 1
        return self._files[:index]

    def _put_spent_away(self) -> None:
        """Files that were used to their end are deleted, or kept on disk until `record`."""
        for file in self._spent():
            if self.at_once:
                self._delete(file)
            elif file.file is not None:
                file.file = None
                file.claim.rest()

    def _delete(self, file: _ClaimedFile) -> None:
        """Record a file as used, now, and delete it in the thread."""
        file.claim.record(file.num_rows, file.num_rows)
        self._ending.add(file.claim.number)
        self._files.remove(file)
        self.reader.do_later(partial(self._finish, file.claim))

    def _finish(self, claim: Claim) -> None:
        if not claim.done():
            self.counts.lost_claims += 1
        self._ending.discard(claim.number)

    # Position

    def position(self) -> tuple[Position, FileShape | None]:
        after = 0
        if self._at is not None:
            current, row = self._at
            if row < current.num_rows:
                return Position(current.claim.number, row), current.shape
            if current in self._files:
                after = self._files.index(current) + 1
            if after >= len(self._files):
                return Position(current.claim.number + 1, 0), current.shape
        elif self._start is not None:
            return self._start
        if self._files:
            following = self._files[after]
            return Position(following.claim.number, following.first), following.shape
        place = beginning(self.folder)
        return place, self.source.shape_at(place)

    def seek(self, position: Position, shape: FileShape | None, *, can_be_made_again: bool) -> None:
        self._replace_older()
        self.release(record=False)
        member = self.membership.member
        self._behind = rewind(self.folder, position.file, member, can_be_made_again=can_be_made_again)
        self._start = position, shape
        if shape is not None and can_be_made_again:
            self.source.delete_files_cut_otherwise(shape)

    # The end

    def release(self, *, record: bool) -> None:
        if record:
            self.record()
        self.reader.finish()
        for claim in self._claims():
            with contextlib.suppress(QueueError):  # the folder was deleted
                give_back(self.folder, claim)
        self.drop()

    def drop(self) -> None:
        for claim in self._claims():
            claim.rest()
        self._behind.clear()
        self._files.clear()
        self._at = self._start = None
        self.reader.end()

    def forget_lost_files(self) -> None:
        for file in [*self._files]:
            if not file.claim.is_mine():
                self.counts.lost_claims += 1
                file.claim.rest()
                self._files.remove(file)
