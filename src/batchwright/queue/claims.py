"""Claims of files. A claimed file belongs to one consumer; 16 bytes beside it record its progress."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

from batchwright.queue.file_names import EXTENSION, write_number
from batchwright.queue.folder import Listing, SplitFolder
from batchwright.queue.members import QueueMember
from batchwright.queue.rank_start import refuse_after_ranks

__all__ = ["Claim", "beginning", "claim_in_place", "claim_next", "give_back", "read_rows", "return_claims_of_dead"]

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
            rows_beside(self.path).unlink()
        return is_there


def _mapped_rows(path: Path, recorded: int, handed: int) -> mmap.mmap:
    """Map a new file beside a claimed one. Writing into the map needs no system call, and survives this process."""
    descriptor = os.open(rows_beside(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.pwrite(descriptor, _ROWS.pack(recorded, handed), 0)
        return mmap.mmap(descriptor, _ROWS.size)
    finally:
        os.close(descriptor)


def read_rows(path: Path) -> tuple[int, int]:
    """(rows recorded, rows handed out) of a claimed file."""
    try:
        content = rows_beside(path).read_bytes()
    except FileNotFoundError:
        return 0, 0
    if len(content) != _ROWS.size:
        return 0, 0
    recorded, handed = _ROWS.unpack(content)
    return recorded, handed


def rows_beside(path: Path) -> Path:
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
            _return(folder, number, consumer.id)
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
            rows_beside(path).unlink()
        raise
    folder.returned_path(number).unlink(missing_ok=True)
    folder.forget_wanted(number)  # it may have been asked for while its maker gave it its name
    return claim


def claim_in_place(folder: SplitFolder, number: int, consumer: QueueMember) -> Claim:
    """A file before the position that a consumer goes back to, kept until that consumer commits."""
    path = folder.claimed_path(number, consumer.id)
    claim = Claim(number, path, 0, 0, True, _mapped_rows(path, 0, 0))
    os.rename(folder.ready_path(number), path)
    claim.rest()
    return claim


def beginning(folder: SplitFolder) -> tuple[int, int]:
    """The file that `claim_next` would give, and how many of its rows were used before."""
    with folder.one_at_a_time():
        after_ranks = folder.records.left_off()
        if after_ranks is not None:
            return after_ranks.recorded
        there = folder.listing()
        dead = [number for number, holder in there.claimed.items() if not folder.liveness.is_alive(holder)]
        number = min([*there.again, *dead], default=there.taken)
        if number in dead:
            return number, read_rows(folder.claimed_path(number, there.claimed[number]))[0]
        return number, folder.read_returned(number)[0]


def give_back(folder: SplitFolder, claim: Claim) -> None:
    """End a claim: rows that are not recorded are left to others, or to this consumer later."""
    claim.rest()
    with folder.one_at_a_time():
        _return_path(folder, claim.number, claim.path)


def return_claims_of_dead(folder: SplitFolder, there: Listing, me: QueueMember) -> bool:
    """Whether there were any. Under the lock of the split."""
    dead = {number: holder for number, holder in there.claimed.items() if not folder.lives(holder, me)}
    for number, holder in dead.items():
        _return(folder, number, holder)
    for path in folder.claimed.glob("*.rows"):  # its consumer was killed before it claimed, or after it was done
        if not path.with_suffix(EXTENSION).exists() and not folder.lives(path.name.split(".")[1], me):
            path.unlink(missing_ok=True)
    return bool(dead)


def _return(folder: SplitFolder, number: int, holder: str) -> None:
    _return_path(folder, number, folder.claimed_path(number, holder))


def _return_path(folder: SplitFolder, number: int, path: Path) -> None:
    folder.write_returned(number, *read_rows(path))
    try:
        os.rename(path, folder.ready_path(number))
    except FileNotFoundError:  # its consumer was not dead, and is done with it
        folder.returned_path(number).unlink(missing_ok=True)
    rows_beside(path).unlink(missing_ok=True)
