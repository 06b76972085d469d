"""Records of the ranks that read a split together. They are files in `control/SPLIT/ranks`.

    begin              the place where their run began, and the members that have joined it
    00001-of-00004     rank 1 of 4: the place that it needs rows from, and the end of the rows it was handed

`begin` is written first and deleted last. A rank without a file of its own is at the place in `begin`, so a process
that is killed in between moves no rank.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from batchwright.base.errors import BusyError, QueueError
from batchwright.queue.batch_file import DamagedFile, read_facts
from batchwright.queue.members import MemberFacts, QueueMember
from batchwright.queue.reading import Position

if TYPE_CHECKING:
    from batchwright.queue.folder import SplitFolder

__all__ = [
    "RankProgress",
    "RankRecords",
    "left_off",
    "living_ranks",
    "names_of_ranks",
    "refuse_after_ranks",
    "refuse_beside_ranks",
]

_PLACES = struct.Struct("<qqqq")


class RankProgress(NamedTuple):
    """The progress of one rank, or of a whole run."""

    recorded: Position
    """Nothing before it comes again."""
    handed: Position
    """Rows before it may have been handed out already: from `recorded` on they come again."""

    def packed(self) -> bytes:
        return _PLACES.pack(*self.recorded, *self.handed)


class RankRecords:
    """The records of all ranks of a split. To write another rank's record takes the split's lock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._begin = folder / "begin"

    def are_there(self) -> bool:
        """Whether ranks have read here, and no single consumer has gone on for them."""
        return any(not name.startswith(".") for name in os.listdir(self.folder))

    def path(self, rank: int, world_size: int) -> Path:
        return self.folder / f"{rank:05d}-of-{world_size:05d}"

    def began(self) -> tuple[RankProgress | None, list[str]]:
        """The place where a run of ranks began, and the members that have joined it."""
        try:
            content = self._begin.read_bytes()
        except FileNotFoundError:
            return None, []
        return _unpacked(content[: _PLACES.size]), content[_PLACES.size :].decode(errors="replace").split()

    def write_began(self, progress: RankProgress, members: list[str]) -> None:
        part = self._begin.with_name(".begin.part")  # under the lock: one at a time
        part.write_bytes(progress.packed() + "\n".join(members).encode())
        os.rename(part, self._begin)

    def of_rank(self, rank: int, world_size: int) -> RankProgress | None:
        """The progress of a rank. None if it is unknown."""
        return self.written(rank, world_size) or self.began()[0]

    def written(self, rank: int, world_size: int) -> RankProgress | None:
        """The record of a rank. None if it has none."""
        return _read(self.path(rank, world_size))

    def left_off(self) -> RankProgress | None:
        """The place where all ranks of an ended run continue: that of the slowest one. None if there was no run."""
        began = self.began()[0]
        worlds = {int(path.name.partition("-of-")[2]) for path in self._of_ranks()}
        found = [self.written(rank, world_size) or began for world_size in worlds for rank in range(world_size)]
        known = [progress for progress in found or [began] if progress is not None]
        if not known:
            return None
        return RankProgress(min(one.recorded for one in known), max(one.handed for one in known))

    def all(self) -> list[tuple[int, int, RankProgress]]:
        """(rank, world size, progress) of each rank that has written a record."""
        found = []
        for path in self._of_ranks():
            progress = _read(path)
            if progress is not None:
                rank, _, world_size = path.name.partition("-of-")
                found.append((int(rank), int(world_size), progress))
        return found

    def begin_again(self, progress: RankProgress, world_size: int, members: list[str]) -> None:
        """Start a new run from one place. It remembers the rows that each rank was handed before."""
        self.write_began(progress, members)
        for path in self._of_ranks():
            before = _read(path)
            if before is not None and path.name.endswith(f"-of-{world_size:05d}"):
                with open(path, "r+b") as file:  # the same file: who seemed dead, and wakes up, writes into it
                    file.write(RankProgress(progress.recorded, min(before.handed, progress.handed)).packed())
            else:
                path.unlink(missing_ok=True)

    def clear(self) -> None:
        for path in self._of_ranks():
            path.unlink(missing_ok=True)
        self._begin.unlink(missing_ok=True)

    def _of_ranks(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("*-of-*") if path.name.replace("-of-", "").isdigit())


def _read(path: Path) -> RankProgress | None:
    try:
        return _unpacked(path.read_bytes())
    except FileNotFoundError:
        return None


def _unpacked(content: bytes) -> RankProgress | None:
    if len(content) != _PLACES.size:
        return None
    numbers = _PLACES.unpack(content)
    return RankProgress(Position(*numbers[:2]), Position(*numbers[2:]))


# The start of a run of ranks


def living_ranks(folder: SplitFolder, me: QueueMember | None) -> list[MemberFacts]:
    """Other ranks that read this split, without the one that `me` replaces (a notebook cell that ran twice)."""
    joined = folder.records.began()[1]
    if not joined:
        return []
    living = [facts for facts in folder.liveness.living("consumer") if facts.id in joined]
    if me is not None:
        living = [facts for facts in living if facts.id != me.id and not facts.is_replaced_by(me.facts)]
    return sorted(living, key=lambda facts: facts.rank or 0)


def names_of_ranks(ranks: list[MemberFacts]) -> str:
    return ", ".join(f"{one.name} (rank {one.rank} of {one.world_size})" for one in ranks)


def refuse_beside_ranks(folder: SplitFolder, ranks: list[MemberFacts]) -> None:
    if ranks:
        raise BusyError(
            f"ranks read {folder.name} now, and a consumer without rank= would be handed the same rows",
            folder=folder.queue.path,
            process=names_of_ranks(ranks),
            remedy="give this one a rank= of their world_size=; or close or stop them",
        )


def refuse_after_ranks(folder: SplitFolder, consumer: QueueMember) -> None:
    """Refuse a single consumer after ranks have read. Their records count in steps of all ranks."""
    if not folder.records.are_there():
        return
    refuse_beside_ranks(folder, living_ranks(folder, consumer))
    progress = folder.records.left_off()
    if progress is not None and progress.handed > Position(0, 0):
        raise QueueError(
            f"ranks have read {folder.name}, and a consumer without rank= cannot go on for them",
            folder=folder.queue.path,
            remedy="rank=0, world_size=1 goes on where the slowest of them was; so does load_state_dict of their state",
        )
    folder.records.clear()


def left_off(folder: SplitFolder) -> RankProgress:
    """The place where ranks continue after single consumers, without claimed files, and the end of rows handed out."""
    there = folder.listing()
    again = there.again
    for number in there.again:  # its reader may have died before it deleted it
        recorded = folder.read_returned(number)[0]
        if not recorded or not _is_used_up(folder, number, recorded):
            break
        again.remove(number)
    first = min(again, default=there.taken)
    gone = [number for number in range(first, there.taken) if number not in again]  # read by faster consumers
    handed = [Position(number, folder.read_returned(number)[1]) for number in there.returned]
    recorded_at = Position(first, folder.read_returned(first)[0])
    return RankProgress(recorded_at, max([recorded_at, *handed, *(Position(number + 1, 0) for number in gone)]))


def _is_used_up(folder: SplitFolder, number: int, recorded: int) -> bool:
    try:
        return recorded >= read_facts(folder.ready_path(number)).num_rows
    except (FileNotFoundError, DamagedFile):
        return False
