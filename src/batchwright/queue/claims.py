"""Claims of files. A claimed file belongs to one consumer; 16 bytes beside it record its progress.

A file ends in one of three ways: its consumer deletes it, gives it back, or puts it aside because it is damaged. A
consumer that is alone can go back to an earlier file.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import struct
import time
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

from batchwright.base.errors import BusyError, QueueError
from batchwright.queue.batch_file import DamagedFile, read_facts
from batchwright.queue.folder import EXTENSION, Listing, SplitFolder, digits_of, write_number, write_text
from batchwright.queue.members import QueueMember
from batchwright.queue.ranks import RankProgress, living_ranks, refuse_after_ranks, refuse_beside_ranks
from batchwright.queue.reading import Position

_ROWS = struct.Struct("<qq")


@dataclass(slots=True)
class Claim:
    """A file that a consumer has for itself, until it is done with it or dead."""

    number: int
    path: Path
    recorded: int
    """Rows that a consumer before this one took and recorded: they are not handed out again."""
    handed: int
    """Rows that were handed out before, recorded or not."""
    is_alone: bool
    """Whether no other consumer reads this split."""
    _rows: mmap.mmap

    def record(self, recorded: int, handed: int) -> None:
        """Write down how far this reader is. It survives a kill -9 of the reader."""
        # A reader before this one may have been handed more: that comes again too, and is counted.
        handed = max(handed, self.handed)
        if self._rows.closed:
            _mapped_rows(self.path, recorded, handed).close()
        else:
            _ROWS.pack_into(self._rows, 0, recorded, handed)

    def rest(self) -> None:
        """Close the open files of the claim. It stays claimed, and can be recorded, given back or done."""
        self._rows.close()

    def is_mine(self) -> bool:
        """False once it was given to another consumer, while this process seemed dead."""
        return self.path.exists()

    def done(self) -> bool:
        """Delete the file, which makes room for another. False if it was given to another consumer meanwhile."""
        is_there = True
        try:
            self.path.unlink()
        except FileNotFoundError:
            is_there = False
        self.rest()  # not if the file could not be deleted: it is still claimed
        with contextlib.suppress(OSError):
            _rows_beside(self.path).unlink()
        return is_there


def _mapped_rows(path: Path, recorded: int, handed: int) -> mmap.mmap:
    """Map a new file beside a claimed one. Writing into the map needs no system call, and survives this process."""
    descriptor = os.open(_rows_beside(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.pwrite(descriptor, _ROWS.pack(recorded, handed), 0)
        return mmap.mmap(descriptor, _ROWS.size)
    finally:
        os.close(descriptor)


def read_rows(path: Path) -> tuple[int, int]:
    """(rows recorded, rows handed out) of a claimed file."""
    try:
        content = _rows_beside(path).read_bytes()
    except FileNotFoundError:
        return 0, 0
    if len(content) != _ROWS.size:
        return 0, 0
    recorded, handed = _ROWS.unpack(content)
    return recorded, handed


def _rows_beside(path: Path) -> Path:
    return path.with_suffix(".rows")


# Claiming and giving back


def claim_next(folder: SplitFolder, consumer: QueueMember, mine: AbstractSet[int] = frozenset()) -> Claim | int:
    """The next file, which no other consumer gets; or the number that must be waited for.

    Files are taken in the order of their numbers. An unfinished file of a dead consumer comes first, and one that has
    to be made again is waited for. `mine`: the numbers that the caller has; another one that is claimed in its name was
    claimed by a call that was interrupted.
    """
    with folder.one_at_a_time():
        refuse_after_ranks(folder, consumer)
        there = folder.listing()
        interrupted = [n for n, holder in there.claimed.items() if holder == consumer.id and n not in mine]
        for number in interrupted:
            _return(folder, number, folder.claimed_path(number, consumer.id))
        if return_claims_of_dead(folder, there, consumer) or interrupted:
            there = folder.listing()
        number = there.taken
        if there.again:
            number = there.again[0]
        else:
            while number in there.claimed:  # by a consumer that was killed before it wrote `taken`
                number += 1
        if number not in there.ready:
            folder.want_if_missing(number, there)  # also where enough later numbers wait: a reader went back
            return number
        return _claim(folder, number, consumer, there)


def _claim(folder: SplitFolder, number: int, consumer: QueueMember, there: Listing) -> Claim:
    recorded, handed = folder.read_returned(number)
    path = folder.claimed_path(number, consumer.id)
    is_alone = all(holder == consumer.id for holder in there.claimed.values())
    claim = Claim(number, path, recorded, handed, is_alone, _mapped_rows(path, recorded, handed))
    try:
        if number >= there.taken:
            write_number(folder.control / "taken", number + 1)  # first: after a kill, or on a full disk, it comes again
        os.rename(folder.ready_path(number), path)
    except BaseException:
        claim.rest()
        with contextlib.suppress(OSError):
            _rows_beside(path).unlink()
        raise
    folder.returned_path(number).unlink(missing_ok=True)
    folder.forget_wanted(number)  # it may have been asked for while its maker gave it its name
    return claim


def _claim_in_place(folder: SplitFolder, number: int, consumer: QueueMember) -> Claim:
    """A file before the position that a consumer goes back to, kept until that consumer commits."""
    path = folder.claimed_path(number, consumer.id)
    claim = Claim(number, path, 0, 0, True, _mapped_rows(path, 0, 0))
    os.rename(folder.ready_path(number), path)
    claim.rest()
    return claim


def beginning(folder: SplitFolder) -> Position:
    """The place where the next reader begins."""
    with folder.one_at_a_time():
        return left_off(folder).recorded


def left_off(folder: SplitFolder) -> RankProgress:
    """The place where ranks continue: after earlier ranks, or in the file that `claim_next` would give. Under the
    lock."""
    after_ranks = folder.records.left_off()
    if after_ranks is not None:
        return after_ranks
    there = folder.listing()
    dead = [number for number, holder in there.claimed.items() if not folder.liveness.is_alive(holder)]
    for number in sorted([*there.again, *dead]):
        path, (recorded, handed) = folder.ready_path(number), folder.read_returned(number)
        if number in dead:
            path = folder.claimed_path(number, there.claimed[number])
            recorded, handed = read_rows(path)
        with contextlib.suppress(FileNotFoundError, DamagedFile):
            if recorded and recorded >= read_facts(path).num_rows:
                continue  # its reader died before it deleted it
        return RankProgress(Position(number, recorded), Position(number, max(recorded, handed)))
    start = Position(there.taken, 0)
    return RankProgress(start, start)


def give_back(folder: SplitFolder, claim: Claim) -> None:
    """End a claim: rows that are not recorded are left to others, or to this consumer later."""
    claim.rest()
    with folder.one_at_a_time():
        _return(folder, claim.number, claim.path)


def return_claims_of_dead(folder: SplitFolder, there: Listing, me: QueueMember) -> bool:
    """Whether there were any. Under the lock of the split."""
    dead = {number: holder for number, holder in there.claimed.items() if not folder.lives(holder, me)}
    for number, holder in dead.items():
        _return(folder, number, folder.claimed_path(number, holder))
    for path in folder.claimed.glob("*.rows"):  # its consumer was killed before it claimed, or after it was done
        if not path.with_suffix(EXTENSION).exists() and not folder.lives(path.name.split(".")[1], me):
            path.unlink(missing_ok=True)
    return bool(dead)


def _return(folder: SplitFolder, number: int, path: Path) -> None:
    folder.write_returned(number, *read_rows(path))
    try:
        os.rename(path, folder.ready_path(number))
    except FileNotFoundError:  # its consumer was not dead, and is done with it
        folder.returned_path(number).unlink(missing_ok=True)
    _rows_beside(path).unlink(missing_ok=True)


# Damaged files


def quarantine(
    folder: SplitFolder, number: int | None, reason: str, path: Path, inode: int, claim: Claim | None = None
) -> Path:
    """Put the file at `path` aside, and return its new path.

    A file with another inode is left alone: the old one was put aside before, and is made again already. Kept
    batches have no number: a provider sees that they are missing.
    """
    with folder.one_at_a_time():
        names = (f"{folder.name}-{digits_of(number)}.{attempt}{EXTENSION}" for attempt in itertools.count())
        aside = next(path for path in map(folder.queue.quarantine.joinpath, names) if not path.exists())
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino != inode:
                return aside
            report = {"split": folder.name, "number": number, "reason": reason, "found": time.time()}
            write_text(aside.with_suffix(".json"), json.dumps(report, indent=2) + "\n")
            if number is not None:
                folder.want(number)  # first: a number that is wanted and there is not made again
                if claim is not None and claim.handed:
                    folder.write_returned(number, claim.recorded, claim.handed)
            os.rename(path, aside)
        if claim is not None:
            claim.rest()
            _rows_beside(path).unlink(missing_ok=True)
    return aside


# Going back


def rewind(folder: SplitFolder, number: int, consumer: QueueMember, *, can_be_made_again: bool) -> list[Claim]:
    """Let `number` and all later files come, even if they came before. For the only reader of a split.

    Files before it are deleted; those that cannot be made again become claims of the caller, to be deleted later.
    If another rank of the caller's run has begun, that rank did it already.
    """
    with folder.one_at_a_time():
        is_rank, ranks = consumer.facts.rank is not None, living_ranks(folder, consumer)
        if ranks and is_rank:
            return []
        refuse_beside_ranks(folder, ranks)
        there = folder.listing()
        _refuse_beside_readers(folder, there, consumer)
        if not can_be_made_again:
            _refuse_lost_files(folder, number, there)
        for claimed, holder in there.claimed.items():
            path = folder.claimed_path(claimed, holder)
            _rows_beside(path).unlink(missing_ok=True)
            with contextlib.suppress(FileNotFoundError):
                os.rename(path, folder.ready_path(claimed))
        claims = []
        before = [old for old in (*there.ready, *there.claimed) if old < number]
        for old in before:
            if can_be_made_again:
                folder.ready_path(old).unlink(missing_ok=True)
            elif not is_rank:  # ranks delete a file when all of them have recorded that they are past it
                claims.append(_claim_in_place(folder, old, consumer))
        for old, maker in there.making.items():  # no consumer needs those before `number`
            if old < number:
                folder.part_path(old, maker).unlink(missing_ok=True)
                folder.ready_path(old).unlink(missing_ok=True)  # its maker may have been faster
        for marker in (*folder.wanted.iterdir(), *folder.returned.iterdir()):
            marker.unlink(missing_ok=True)
        folder.records.clear()
        write_number(folder.control / "taken", number)
        write_number(folder.path / "next", number)
        return claims


def _refuse_beside_readers(folder: SplitFolder, there: Listing, consumer: QueueMember) -> None:
    others = {holder for holder in there.claimed.values() if holder != consumer.id and folder.liveness.is_alive(holder)}
    if others:
        raise BusyError(
            f"a position in {folder.name} can be set where one consumer reads it: here are others",
            folder=folder.queue.path,
            process=", ".join(sorted(others)),
            remedy="rank= and world_size= for several readers that resume exactly; or stop the others",
        )


def _refuse_lost_files(folder: SplitFolder, number: int, there: Listing) -> None:
    kept = {*there.ready, *there.claimed, *there.making}
    lost = [old for old in range(number, min(there.next, there.taken)) if old not in kept]
    if lost:
        raise QueueError(
            f"{folder.name} file {lost[0]} was deleted, and this provider cannot make it again",
            folder=folder.queue.path,
            remedy="for reproducible = False: delete='checkpoint', and consumer.commit() after each checkpoint",
        )
