"""The stream of a split for ranks: in each step rank r of W gets the r-th of W batches. Files are shared, not claimed.

A position is where a step begins, so it is the same on every rank, and any number of ranks can go on from it. A file
is deleted when every rank has recorded that it is past it.
"""

from __future__ import annotations

import contextlib
import os
import struct
from functools import partial
from pathlib import Path

from penstock.errors import BusyError
from penstock.queue.batch_file import DamagedFile
from penstock.queue.claimed import Counts, be_the_only_one_here, check_facts, check_shape
from penstock.queue.folder import SplitFolder, write_number
from penstock.queue.members import Facts
from penstock.queue.reading import Arrays, FileShape, LoadedFile, Position, Reader, joined
from penstock.queue.seat import Seat
from penstock.queue.waiting import Waiter

__all__ = ["StripedStream"]

_PLACE = struct.Struct("<qq")


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
        self.waiter = waiter
        self.reader = reader
        self.rank: int | None = rank
        self._rank = rank
        self.world_size = world_size
        self.at_once = at_once
        self.counts = Counts()
        self._at: Position | None = None
        """Where the next step begins."""
        self._files: dict[int, LoadedFile] = {}
        self._deleted_below = -1
        self._counts_in: FileShape | None = None
        """How files were cut, of the state that was loaded."""
        self._record = -1
        self.is_replaced = False

    # Rows

    def take(self, num_rows: int | None) -> Arrays:
        be_the_only_one_here(self)
        start = self._normal(self._at if self._at is not None else self._join(None))
        if self.at_once:
            self._write_down(start)
        size = num_rows or self._file(start.file).facts.batch_size
        rows = self._rows(Position(start.file, start.row + self._rank * size), size)
        self._at = self._end_of(start, size * self.world_size)
        self._look_ahead()
        return rows

    def _rows(self, place: Position, num_rows: int) -> Arrays:
        number, row = place
        pieces = []
        while num_rows > 0:
            file = self._file(number)
            if row >= file.num_rows:
                number, row = number + 1, row - file.num_rows
                continue
            stop = min(row + num_rows, file.num_rows)
            pieces.append(file.rows(row, stop))
            num_rows -= stop - row
            row = stop
        return joined(pieces)

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

    def _look_ahead(self) -> None:
        if self._at is not None and not self.reader.is_ahead:
            last = max(self._files)
            if 2 * self._at.row >= self._files[last].num_rows or self._at.file > last:
                self.reader.read_ahead(self.folder.ready_path(last + 1))

    # Ranks that come, and what they have recorded

    def _join(self, position: Position | None) -> Position:
        """Where this rank begins: where it was told to, where it was, or where the ranks begin together."""
        folder, mine = self.folder, self._record_path(self._rank)
        with folder.one_at_a_time():
            ranks = self._other_ranks()
            there = folder.listing()
            single = [holder for holder in there.claimed.values() if folder.census.is_alive(holder)]
            wrong = [facts for facts in ranks if facts.world_size != self.world_size or facts.rank == self._rank]
            if single or wrong:
                raise BusyError(
                    f"rank {self.rank} of {self.world_size} cannot read {folder.name} beside those that read it now",
                    folder=folder.queue.path,
                    process=", ".join(single or [f"{one.name} (rank {one.rank} of {one.world_size})" for one in wrong]),
                    remedy="all readers have another rank= of the same world_size=; stop the others",
                )
            folder.return_what_the_dead_held(there, self.seat.member)
            began, joined_before = _read_begin(self._begin_path())
            joined = [facts.id for facts in ranks if facts.id in joined_before]
            if not joined:  # the first of its run, though others may be about to join
                begin = position or min(self._left_off(began), default=Position(there.taken, 0))
                for path in folder.ranks.iterdir():
                    path.unlink(missing_ok=True)
                began = begin
            else:
                begin = position or _read_place(mine) or began or Position(there.taken, 0)
            _write_begin(self._begin_path(), began or begin, [*joined, self.seat.member.id])
            self._record = os.open(mine, os.O_RDWR | os.O_CREAT, 0o644)
            os.pwrite(self._record, _PLACE.pack(*begin), 0)
        return begin

    def _left_off(self, began: Position | None) -> list[Position]:
        """Where each rank of the run before was. One that recorded nothing is where it all began."""
        worlds = {int(path.name.partition("-of-")[2]) for path in self.folder.ranks.glob("*-of-*")}
        found = [
            _read_place(self.folder.ranks / f"{rank:05d}-of-{world_size:05d}") or began
            for world_size in worlds
            for rank in range(world_size)
        ]
        return [place for place in found if place is not None]

    def _is_first(self) -> bool:
        """Whether no rank of this run has begun to read."""
        joined = _read_begin(self._begin_path())[1]
        return not any(facts.id in joined for facts in self._other_ranks())

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

    def _record_path(self, rank: int) -> Path:
        return self.folder.ranks / f"{rank:05d}-of-{self.world_size:05d}"

    def _begin_path(self) -> Path:
        return self.folder.ranks / "begin"

    def _write_down(self, place: Position) -> None:
        """This rank needs nothing before `place` again; what no rank needs is deleted."""
        os.pwrite(self._record, _PLACE.pack(*place), 0)
        for number in [number for number in self._files if number < place.file]:
            del self._files[number]
        if place.file <= self._deleted_below:
            return
        self._deleted_below = place.file
        with self.folder.one_at_a_time():
            begin = _read_begin(self._begin_path())[0] or Position(0, 0)
            places = [_read_place(self._record_path(rank)) or begin for rank in range(self.world_size)]
            lowest = min(places).file
            there = self.folder.listing()
            for number in there.ready:
                if number < lowest:
                    path = self.folder.ready_path(number)
                    self.reader.do_later(partial(path.unlink, missing_ok=True))
            if lowest > there.taken:
                write_number(self.folder.control / "taken", lowest)

    def record(self) -> None:
        if self._at is not None:
            self._write_down(self._at)

    # Where it is

    def position(self) -> tuple[Position, FileShape] | None:
        shape = self._files[max(self._files)].shape if self._files else self._counts_in
        return None if self._at is None or shape is None else (self._at, shape)

    def seek(self, position: Position, shape: FileShape, *, can_be_made_again: bool) -> None:
        be_the_only_one_here(self)
        self._leave()
        if self._is_first():
            self.folder.rewind(position.file, self.seat.member, can_be_made_again=can_be_made_again)
        self._files.clear()
        self._deleted_below = -1
        self._counts_in = shape
        self._at = self._join(position)

    def release(self, *, record: bool) -> None:
        if record:
            with contextlib.suppress(OSError):
                self.record()
        self.reader.close()
        self._leave()
        self._files.clear()

    def _leave(self) -> None:
        if self._record >= 0:
            os.close(self._record)
            self._record = -1

    def forget_lost_files(self) -> None:
        """Nothing is claimed: nothing can be lost."""


def _read_begin(path: Path) -> tuple[Position | None, list[str]]:
    """Where a run of ranks began, and the members that have joined it."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None, []
    if len(content) < _PLACE.size:
        return None, []
    return Position(*_PLACE.unpack_from(content)), content[_PLACE.size :].decode().split()


def _write_begin(path: Path, place: Position, members: list[str]) -> None:
    part = path.with_name(f".{path.name}.part")  # under the lock: one at a time
    part.write_bytes(_PLACE.pack(*place) + "\n".join(members).encode())
    os.rename(part, path)


def _read_place(path: Path) -> Position | None:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    return Position(*_PLACE.unpack(content)) if len(content) == _PLACE.size else None
