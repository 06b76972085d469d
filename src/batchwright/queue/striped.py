"""The stream of a split for ranks: in each step rank r of W gets the r-th of W batches. Files are shared, not claimed.

A position is where a step begins, so it is the same on every rank, and any number of ranks can go on from it. A file
is deleted when every rank has recorded that it is past it.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from batchwright.base.errors import BusyError
from batchwright.queue.batch_file import DamagedFile, read_facts
from batchwright.queue.claimed import Counts, be_the_only_one_here, check_facts, check_shape
from batchwright.queue.entries import write_number
from batchwright.queue.folder import SplitFolder
from batchwright.queue.members import Facts
from batchwright.queue.ranks import Progress
from batchwright.queue.reading import Arrays, FileShape, LoadedFile, Position, Reader, joined
from batchwright.queue.seat import Seat
from batchwright.queue.waiting import Waiter

__all__ = ["StripedStream"]


@dataclass(frozen=True, slots=True)
class _Step:
    """One step of all ranks, and this rank's rows in it."""

    start: Position
    end: Position
    first_row: Position
    """Of this rank's."""
    after_last_row: Position
    shape: FileShape


class StripedStream:
    """Every W-th batch of a split, from the rank's on."""

    def __init__(
        self,
        folder: SplitFolder,
        seat: Seat,
        waiter: Waiter,
        reader: Reader,
        rank: int,
        world_size: int,
        *,
        at_once: bool,
    ) -> None:
        self.folder = folder
        self.seat = seat
        self._seated = seat.number
        self.waiter = waiter
        self.reader = reader
        self.rank: int | None = rank
        self._rank = rank
        self.world_size = world_size
        self.at_once = at_once
        self.counts: Counts = Counts()
        self._at: Position | None = None
        """Where the next step begins. None: this rank has not joined the others."""
        self._files: dict[int, LoadedFile] = {}
        """Those that the next step may need."""
        self._shape: FileShape | None = None
        """How the last file was cut that rows were handed out of."""
        self._counts_in: FileShape | None = None
        """How files were cut, of the state that was loaded."""
        self._deleted_below = -1
        self._record = -1
        """The descriptor of what this rank has recorded."""
        self._recorded = Position(0, 0)
        self._handed = Position(0, 0)
        """What is written in it. Up to `_handed` rows were handed out, also by who had this rank before."""
        self.is_replaced = False

    # Rows

    def peek(self, num_rows: int | None) -> tuple[Arrays, _Step]:
        """The next rows; None: as many as the provider put into a batch. They are handed out by `move`, not before."""
        be_the_only_one_here(self)
        while True:
            self._stay()
            at = self._joined()
            for number in [number for number in self._files if number < at.file]:
                del self._files[number]  # also where they are kept on disk
            start = self._normal(at)
            if self.at_once and start != self._recorded and self._seated == self.seat.number:
                self._write_down(start)
            shape = self._file(start.file).shape
            size = num_rows or shape.batch_size
            rows, first_row, after_last_row = self._rows(Position(start.file, start.row + self._rank * size), size)
            if self._seated == self.seat.number:
                break
            # Others took this process for dead while it waited, and may have gone on without it.
        return rows, _Step(start, self._end_of(start, size * self.world_size), first_row, after_last_row, shape)

    def move(self, step: _Step) -> None:
        """What `peek` gave is handed out."""
        self._look_ahead(step.end)
        is_again = step.first_row < self._handed
        self._write(self._recorded, max(self._handed, step.after_last_row))
        self.counts.redelivered_batches += is_again
        self._shape = step.shape
        self._at = step.end  # last: until here nothing was taken

    def _rows(self, place: Position, num_rows: int) -> tuple[Arrays, Position, Position]:
        """Rows, and where they begin and end."""
        number, row = place
        pieces, first_row = [], None
        while num_rows > 0:
            file = self._file(number)
            if row >= file.num_rows:
                number, row = number + 1, row - file.num_rows
                continue
            first_row = first_row or Position(number, row)
            stop = min(row + num_rows, file.num_rows)
            pieces.append(file.rows(row, stop))
            num_rows -= stop - row
            row = stop
        return joined(pieces), first_row or place, Position(number, row)

    def _normal(self, place: Position) -> Position:
        """The same place, inside its file."""
        number, row = place
        while row >= (rows := self._file(number).num_rows):
            number, row = number + 1, row - rows
        return Position(number, row)

    def _end_of(self, start: Position, num_rows: int) -> Position:
        """Where the next step begins, as every rank says it: none needs to have seen the file after this one."""
        rows = self._file(start.file).num_rows
        end = start.row + num_rows
        return Position(start.file + 1, end - rows) if end >= rows else Position(start.file, end)

    def _file(self, number: int) -> LoadedFile:
        file = self._files.get(number)
        while file is None:
            self.seat.stay()
            path: Path = self.waiter.until(self.folder.name, lambda: self._look(number))
            with contextlib.suppress(FileNotFoundError):
                inode = path.stat().st_ino
                try:
                    file = self.reader.load(path)
                    check_facts(file.facts, self.folder, number, self.seat.meta.fingerprint)
                except DamagedFile as error:
                    self.folder.quarantine(number, error.reason, path, inode)
                    self.counts.quarantined_files += 1
                    file = None
        if number not in self._files:
            if self._counts_in is not None:
                check_shape(self._counts_in, file.shape, f"{self.folder.name} file {number}")
            self._files[number] = file
            self.counts.files += 1
        return file

    def _look(self, number: int) -> Path | int:
        path = self.folder.ready_path(number)
        if path.exists():
            return path
        # Other ranks may wait for this one before they record: demand does not wait for files to be deleted.
        self.folder.want(number)
        return number

    def _look_ahead(self, at: Position) -> None:
        """Read the next file while the rest of this one is used."""
        if self.reader.is_ahead:
            return
        last = max(self._files, default=at.file - 1)
        if last < at.file or (last == at.file and 2 * at.row >= self._files[last].num_rows):
            self.reader.read_ahead(self.folder.ready_path(last + 1))

    # Ranks that come, and what they have recorded

    def _joined(self) -> Position:
        if self._at is None or self._record < 0:
            self._at = self._join(None)
        return self._at

    def _stay(self) -> None:
        """Be seen by others; again, where they took this process for dead."""
        self.seat.stay()
        if self._seated != self.seat.number:
            self.forget_lost_files()
            self._leave()  # and join again, under the new name

    def forget_lost_files(self) -> None:
        """After a time in which this process seemed dead: somebody may have gone on for all ranks, as one reader."""
        if self._record >= 0 and not os.fstat(self._record).st_nlink:
            self.counts.lost_claims += 1
            self._leave()
            self._at = None
            self._files.clear()

    def _join(self, position: Position | None) -> Position:
        """Where this rank begins: where it was told to, where it was, or where the ranks begin together."""
        self._leave()
        folder, records, me = self.folder, self.folder.records, self.seat.member.id
        with folder.one_at_a_time():
            self._refuse_others()
            folder.return_what_the_dead_held(folder.listing(), self.seat.member)
            began = records.began()[0]
            joined = [facts.id for facts in folder.living_ranks(self.seat.member)]
            told = None if position is None else Progress(position, position)
            comes_back = told is None and self._at is not None and self._is_mine()
            if joined or comes_back:
                back = Progress(self._recorded, self._handed) if comes_back else None
                progress = told or back or records.of_rank(self._rank, self.world_size) or self._all_left_off()
                records.write_began(began or progress, [*joined, me])
            else:  # the first of its run, though others may be about to join
                progress = told or self._all_left_off()
                records.begin_again(progress, self.world_size, [me])
                progress = records.of_rank(self._rank, self.world_size) or progress
                folder.forget_returned()
            mine = records.path(self._rank, self.world_size)
            self._record = os.open(mine, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._write(*progress)
            self._seated = self.seat.number
        return self._at if comes_back and self._at is not None else progress.recorded

    def _is_mine(self) -> bool:
        """Whether nobody went on for this rank while it seemed dead: then more would be written down."""
        written = self.folder.records.written(self._rank, self.world_size)
        return written is not None and written.recorded <= self._recorded and written.handed <= self._handed

    def _refuse_others(self) -> None:
        folder = self.folder
        single = [holder for holder in folder.listing().claimed.values() if folder.census.is_alive(holder)]
        wrong = [one for one in self._other_ranks() if one.world_size != self.world_size or one.rank == self._rank]
        if single or wrong:
            raise BusyError(
                f"rank {self.rank} of {self.world_size} cannot read {folder.name} beside those that read it now",
                folder=folder.queue.path,
                process=", ".join(single or [f"{one.name} (rank {one.rank} of {one.world_size})" for one in wrong]),
                remedy="all readers have another rank= of the same world_size=; stop the others",
            )

    def _all_left_off(self) -> Progress:
        """Where the ranks before were, or single consumers."""
        return self.folder.records.left_off() or self.folder.left_off(self.folder.listing())

    def _other_ranks(self) -> list[Facts]:
        """Living ranks but this one, and but the one that this process had before, in a notebook."""
        me = self.seat.member.facts
        return [
            facts
            for facts in self.folder.census.living("consumer")
            if facts.world_size is not None
            and facts.id != me.id
            and (facts.pid, facts.boot, facts.rank) != (me.pid, me.boot, me.rank)
        ]

    def _write(self, recorded: Position, handed: Position) -> None:
        os.pwrite(self._record, Progress(recorded, handed).packed(), 0)
        self._recorded, self._handed = recorded, handed

    def _write_down(self, place: Position) -> None:
        """This rank needs nothing before `place` again; what no rank needs is deleted."""
        self._write(place, max(place, self._handed))
        if place.file <= self._deleted_below:
            return
        with self.folder.one_at_a_time():
            records = self.folder.records
            ranks = [records.of_rank(rank, self.world_size) for rank in range(self.world_size)]
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
        """Everything that was handed out is used."""
        if self._at is not None and self._record >= 0:
            self._write_down(self._at)
            self.reader.finish()

    # Where it is

    def position(self) -> tuple[Position, FileShape | None] | None:
        """Where the next step begins, and how its file is cut, where that is known."""
        if self._at is not None:
            return self._at, self._shape or self._counts_in or self._shape_of(self._at)
        folder = self.folder
        with folder.one_at_a_time():
            is_running = bool(folder.living_ranks(None))
            mine = folder.records.of_rank(self._rank, self.world_size) if is_running else None
        place = Position(*folder.beginning()) if mine is None else mine.recorded
        return place, self._shape_of(place)

    def _shape_of(self, place: Position) -> FileShape | None:
        """Needed only where a place is inside of a file: that one is there."""
        if not place.row:
            return None
        with contextlib.suppress(OSError, DamagedFile):
            facts = read_facts(self.folder.ready_path(place.file))
            return FileShape(facts.batch_size, facts.num_batches)
        return None

    def seek(self, position: Position, shape: FileShape | None, *, can_be_made_again: bool) -> None:
        be_the_only_one_here(self)
        self._stay()
        with self.folder.one_at_a_time():
            self._refuse_others()
            is_first = not self.folder.living_ranks(self.seat.member)
        if is_first:
            self.folder.rewind(position.file, self.seat.member, can_be_made_again=can_be_made_again)
            if shape is not None and can_be_made_again:
                self._throw_away_others(shape)
        self._files.clear()
        self._shape = None
        self._deleted_below = -1
        self._counts_in = shape
        self._at = self._join(position)

    def _throw_away_others(self, shape: FileShape) -> None:
        """Files that wait and are cut otherwise than a state counts: they are made again as the provider cuts now."""
        for number in self.folder.listing().ready:
            with contextlib.suppress(DamagedFile, FileNotFoundError):
                facts = read_facts(self.folder.ready_path(number))
                if (facts.batch_size, facts.num_batches) != shape:
                    self.folder.ready_path(number).unlink()

    def release(self, *, record: bool) -> None:
        if record:
            with contextlib.suppress(OSError):
                self.record()
        self.reader.close()
        self.drop()

    def drop(self) -> None:
        """Let go of everything. What was not recorded comes again."""
        self._leave()
        self._files.clear()
        self._at = None
        self.reader.end()

    def _leave(self) -> None:
        record, self._record = self._record, -1
        if record >= 0:
            os.close(record)
