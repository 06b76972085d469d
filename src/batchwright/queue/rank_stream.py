"""The stream of a split for ranks. In each step rank r of W gets the r-th of W batches. Files are shared, not claimed.

A position is the start of a step, so it is the same on every rank, and any number of ranks can continue from it. A
file is deleted when every rank has recorded that it is past it.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from batchwright.base.errors import BusyError
from batchwright.queue.batch_file import FileShape
from batchwright.queue.claims import beginning, left_off, return_claims_of_dead, rewind
from batchwright.queue.folder import write_number
from batchwright.queue.members import Membership
from batchwright.queue.ranks import RankProgress, living_ranks, names_of_ranks
from batchwright.queue.reading import Arrays, LoadedFile, Position, joined
from batchwright.queue.streams import RecordedStream, SplitReader, check_shape


@dataclass(frozen=True, slots=True)
class _Step:
    """One step of all ranks, and this rank's rows in it."""

    start: Position
    end: Position
    first_row: Position
    """The first row of this rank."""
    after_last_row: Position
    shape: FileShape


class RankStream(RecordedStream):
    """Every W-th batch of a split, from the rank's on."""

    def __init__(
        self, source: SplitReader, membership: Membership, rank: int, world_size: int, *, at_once: bool
    ) -> None:
        super().__init__(source, membership, rank, at_once=at_once)
        self._rank = rank
        self._world_size = world_size
        self._at: Position | None = None
        """The beginning of the next step. None: this rank has not joined the others."""
        self._files: dict[int, LoadedFile] = {}
        """The files that the next step may need."""
        self._shape: FileShape | None = None
        """The cut of the last file whose rows were handed out."""
        self._counts_in: FileShape | None = None
        """The cut of files in the loaded state."""
        self._deleted_below = -1
        self._record = -1
        """The descriptor of this rank's record."""
        self._written = RankProgress(Position(0, 0), Position(0, 0))
        """The content of the record. Rows may have been handed out to a process that had this rank before."""

    # Rows

    def peek(self, num_rows: int | None) -> tuple[Arrays, _Step]:
        self._replace_older()
        while True:
            self._renew_membership()
            if self._at is None or self._record < 0:
                self._at = self._join(None)
            for old in [old for old in self._files if old < self._at.file]:
                del self._files[old]  # on disk they may be kept until `record`
            start = self._inside_file(self._at)
            if self.at_once and start != self._written.recorded and self._member_number == self.membership.number:
                self._record_place(start)
            shape = self._file(start.file).facts.shape
            size = num_rows or shape.batch_size
            rows, first_row, after_last_row = self._rows(Position(start.file, start.row + self._rank * size), size)
            if self._member_number == self.membership.number:
                break
            # Others took this process for dead while it waited, and may have gone on without it.
        return rows, _Step(start, self._end_of(start, size * self._world_size), first_row, after_last_row, shape)

    def move(self, step: _Step) -> None:
        self._look_ahead(step.end)
        recorded, handed = self._written
        self._write(RankProgress(recorded, max(handed, step.after_last_row)))
        self.counts.redelivered_batches += step.first_row < handed
        self._shape = step.shape
        self._at = step.end  # last: an error before this line takes no batch

    def _rows(self, place: Position, num_rows: int) -> tuple[Arrays, Position, Position]:
        """Rows, the place of the first one, and the place after the last one."""
        first = place = self._inside_file(place)
        pieces: list[Arrays] = []
        while num_rows > 0:
            place = self._inside_file(place)
            file = self._file(place.file)
            stop = min(place.row + num_rows, file.num_rows)
            pieces.append(file.rows(place.row, stop))
            num_rows -= stop - place.row
            place = Position(place.file, stop)
        return joined(pieces), first, place

    def _inside_file(self, place: Position) -> Position:
        """The same place, as an existing row of its file."""
        number, row = place
        while row >= (num_rows := self._file(number).num_rows):
            number, row = number + 1, row - num_rows
        return Position(number, row)

    def _end_of(self, start: Position, num_rows: int) -> Position:
        """The beginning of the next step, the same on every rank: none needs to have seen the file after this one."""
        rows = self._file(start.file).num_rows
        end = start.row + num_rows
        if end >= rows:
            return Position(start.file + 1, end - rows)
        return Position(start.file, end)

    def _file(self, number: int) -> LoadedFile:
        if number in self._files:
            return self._files[number]
        file: LoadedFile | None = None
        while file is None:
            self.membership.renew()
            path: Path = self.source.waiter.until(lambda: self._find(number))
            with contextlib.suppress(FileNotFoundError):
                file = self.source.load(path, number)
        check_shape(self._counts_in, file.facts.shape, f"{self.folder.name} file {number}")
        self._files[number] = file
        self.counts.files += 1
        return file

    def _find(self, number: int) -> Path | int:
        path = self.folder.ready_path(number)
        if path.exists():
            return path
        # Other ranks may wait for this one before they record: demand does not wait for files to be deleted.
        with self.folder.one_at_a_time():
            self.folder.want_if_missing(number, self.folder.listing())
        return number

    def _look_ahead(self, at: Position) -> None:
        """Read the next file while the rest of this one is used."""
        if self.reader.is_ahead:
            return
        last = max(self._files, default=at.file - 1)
        if last < at.file or (last == at.file and 2 * at.row >= self._files[last].num_rows):
            self.reader.read_ahead(self.folder.ready_path(last + 1))

    # Joining the other ranks

    def _renew_membership(self) -> None:
        self.membership.renew()
        if self._member_number != self.membership.number:
            self.forget_lost_files()
            self._leave()  # and join again, under the new name

    def forget_lost_files(self) -> None:
        """After a silence a single consumer may have gone on for all ranks."""
        if self._record >= 0 and not os.fstat(self._record).st_nlink:
            self.counts.lost_claims += 1
            self._leave()
            self._at = None
            self._files.clear()

    def _join(self, position: Position | None) -> Position:
        """The first place of this rank: the given one, its last one, or the common start of the ranks."""
        self._leave()
        folder, records, me = self.folder, self.folder.records, self.membership.member
        with folder.one_at_a_time():
            self._refuse_others()
            return_claims_of_dead(folder, folder.listing(), me)
            others = [facts.id for facts in living_ranks(folder, me)]
            comes_back = position is None and self._at is not None and self._is_my_record()
            progress: RankProgress | None = None
            if position is not None:
                progress = RankProgress(position, position)
            elif comes_back:
                progress = self._written
            elif others:
                progress = records.of_rank(self._rank, self._world_size)
            progress = progress or left_off(folder)
            if others or comes_back:
                records.write_began(records.began()[0] or progress, [*others, me.id])
            else:
                progress = self._begin_run(progress)
            path = records.path(self._rank, self._world_size)
            self._record = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._write(progress)
            self._member_number = self.membership.number
        if comes_back and self._at is not None:
            return self._at
        return progress.recorded

    def _begin_run(self, progress: RankProgress) -> RankProgress:
        """Begin a run as its first rank. The progress of this rank in it."""
        self.folder.records.begin_again(progress, self._world_size, [self.membership.member.id])
        for marker in self.folder.returned.iterdir():  # how far single consumers were is in the record now
            marker.unlink(missing_ok=True)
        return self.folder.records.of_rank(self._rank, self._world_size) or progress

    def _is_my_record(self) -> bool:
        """Whether no process went on for this rank while it seemed dead: it would have recorded more."""
        written = self.folder.records.written(self._rank, self._world_size)
        mine = self._written
        return written is not None and written.recorded <= mine.recorded and written.handed <= mine.handed

    def _refuse_others(self) -> None:
        folder, me = self.folder, self.membership.member.facts
        single = [holder for holder in folder.listing().claimed.values() if folder.liveness.is_alive(holder)]
        ranks = [one for one in folder.liveness.living("consumer") if one.world_size is not None]
        others = [one for one in ranks if one.id != me.id and not one.is_replaced_by(me)]
        wrong = [one for one in others if one.world_size != me.world_size or one.rank == me.rank]
        if single or wrong:
            raise BusyError(
                f"rank {self.rank} of {self._world_size} cannot read {folder.name} beside those that read it now",
                folder=folder.queue.path,
                process=", ".join(single) or names_of_ranks(wrong),
                remedy="all readers have another rank= of the same world_size=; stop the others",
            )

    # Recording

    def _write(self, progress: RankProgress) -> None:
        os.pwrite(self._record, progress.packed(), 0)
        self._written = progress

    def _record_place(self, place: Position) -> None:
        """Record that this rank needs no rows before `place` again. Files that no rank needs are deleted."""
        self._write(RankProgress(place, max(place, self._written.handed)))
        if place.file <= self._deleted_below:
            return
        with self.folder.one_at_a_time():
            records = self.folder.records
            ranks = [records.of_rank(rank, self._world_size) for rank in range(self._world_size)]
            lowest = min((one.recorded.file for one in ranks if one is not None), default=0)
            there = self.folder.listing()
            for number in there.ready:
                if number < lowest:
                    path = self.folder.ready_path(number)
                    self.reader.do_later(partial(path.unlink, missing_ok=True))
            if lowest > there.taken:
                write_number(self.folder.control / "taken", lowest)
        self._deleted_below = place.file

    def record(self) -> None:
        if self._at is not None and self._record >= 0:
            self._record_place(self._at)
            self.reader.finish()

    # Position

    def position(self) -> tuple[Position, FileShape | None] | None:
        """The beginning of the next step."""
        if self._at is not None:
            return self._at, self._shape or self._counts_in or self.source.shape_at(self._at)
        folder = self.folder
        mine: RankProgress | None = None
        with folder.one_at_a_time():
            if living_ranks(folder, None):
                mine = folder.records.of_rank(self._rank, self._world_size)
        place = mine.recorded if mine is not None else beginning(folder)
        return place, self.source.shape_at(place)

    def seek(self, position: Position, shape: FileShape | None, *, can_be_made_again: bool) -> None:
        self._replace_older()
        self._renew_membership()
        member = self.membership.member
        with self.folder.one_at_a_time():
            self._refuse_others()
            is_first = not living_ranks(self.folder, member)
        if is_first:
            rewind(self.folder, position.file, member, can_be_made_again=can_be_made_again)
            if shape is not None and can_be_made_again:
                self.source.delete_files_cut_otherwise(shape)
        self._files.clear()
        self._shape = None
        self._deleted_below = -1
        self._counts_in = shape
        self._at = self._join(position)

    # The end

    def release(self, *, record: bool) -> None:
        if record:
            with contextlib.suppress(OSError):
                self.record()
        self.reader.finish()
        self.drop()

    def drop(self) -> None:
        self._leave()
        self._files.clear()
        self._at = None
        self.reader.end()

    def _leave(self) -> None:
        record, self._record = self._record, -1
        if record >= 0:
            os.close(record)
