"""Records of the ranks that read a split together. They are files in `control/SPLIT/ranks`.

    begin              the place where their run began, and the members that have joined it
    00001-of-00004     rank 1 of 4: the place that it needs rows from, and the end of the rows it was handed

`begin` is written first and deleted last. A rank without a file of its own is at the place in `begin`, so a process
that is killed in between moves no rank.
"""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from batchwright.base.errors import BusyError, QueueError
from batchwright.queue.members import MemberFacts, QueueMember
from batchwright.queue.reading import Position

if TYPE_CHECKING:
    from batchwright.queue.folder import SplitFolder

_RANK = re.compile(r"([0-9]+)-of-([0-9]+)")
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
        worlds = {world_size for _, world_size, _ in self._paths()}
        found = [self.of_rank(rank, world_size) for world_size in worlds for rank in range(world_size)]
        known = [progress for progress in found or [began] if progress is not None]
        if not known:
            return None
        return RankProgress(min(one.recorded for one in known), max(one.handed for one in known))

    def all(self) -> list[tuple[int, int, RankProgress]]:
        """(rank, world size, progress) of each rank that has written a record."""
        found = [(rank, world_size, _read(path)) for rank, world_size, path in self._paths()]
        return [(rank, world_size, progress) for rank, world_size, progress in found if progress is not None]

    def begin_again(self, progress: RankProgress, world_size: int, members: list[str]) -> None:
        """Start a new run from one place. It remembers the rows that each rank was handed before."""
        self.write_began(progress, members)
        for _, ranks, path in self._paths():
            before = _read(path)
            if before is not None and ranks == world_size:
                with open(path, "r+b") as file:  # the same file: who seemed dead, and wakes up, writes into it
                    file.write(RankProgress(progress.recorded, min(before.handed, progress.handed)).packed())
            else:
                path.unlink(missing_ok=True)

    def clear(self) -> None:
        for *_, path in self._paths():
            path.unlink(missing_ok=True)
        self._begin.unlink(missing_ok=True)

    def _paths(self) -> list[tuple[int, int, Path]]:
        """(rank, world size, file) of each rank."""
        found = [(_RANK.fullmatch(path.name), path) for path in sorted(self.folder.glob("*-of-*"))]
        return [(int(name[1]), int(name[2]), path) for name, path in found if name]


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
