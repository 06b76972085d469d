"""The making of numbered files: taking a number, publishing its file, giving it up."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from batchwright.base.files import sync_folder
from batchwright.queue.folder import EXTENSION, Listing, SplitFolder, write_number
from batchwright.queue.members import QueueMember
from batchwright.queue.messages import deleted
from batchwright.queue.reading import Position

__all__ = ["UnfinishedFile", "begin", "begin_anew", "begin_kept", "give_up", "publish", "was_read"]


@dataclass(frozen=True, slots=True)
class UnfinishedFile:
    """A number that a provider makes, and the file that it writes."""

    number: int | None
    """None for the kept batches."""
    path: Path
    """It is made once, when the number is taken. A file that is gone belongs to nobody, and is not made again."""


def begin(folder: SplitFolder, provider: QueueMember, max_backlog_files: int) -> UnfinishedFile | None:
    """Take the number of a file to make. None if no file is needed now."""
    with folder.one_at_a_time():
        there = folder.listing()
        abandoned = {number for number, maker in there.making.items() if not folder.lives(maker, provider)}
        for number in sorted({*there.wanted, *abandoned}):
            is_made = number in there.making and number not in abandoned
            if is_made or number in there.ready or number in there.claimed:
                folder.forget_wanted(number)
            elif number > there.next:  # all before it come first
                continue
            elif number not in abandoned or _take_over(folder, number, there.making[number]):
                return _begin(folder, number, provider, there)
        if sum(number < there.next for number in there.ready) >= max_backlog_files:
            return None
        return _begin(folder, there.next, provider, there)


def _begin(folder: SplitFolder, number: int, provider: QueueMember, there: Listing) -> UnfinishedFile:
    part = folder.part_path(number, provider.id)
    part.touch()
    try:
        if number >= there.next:
            write_number(folder.path / "next", number + 1)
    except OSError:  # a full disk: the number must not seem to be made here
        part.unlink(missing_ok=True)
        raise
    folder.forget_wanted(number)
    return UnfinishedFile(number, part)


def _take_over(folder: SplitFolder, number: int, maker: str) -> bool:
    """Throw away the unfinished file of a dead provider. False if it was not dead, and has just finished."""
    folder.want(number)  # or a kill right here would lose it
    try:
        folder.part_path(number, maker).unlink()
    except FileNotFoundError:
        folder.forget_wanted(number)
        return False
    return True


def begin_kept(folder: SplitFolder, provider: QueueMember, is_due: Callable[[Path], bool]) -> UnfinishedFile | None:
    """Like `begin`, for the kept batches, if they are due and no other provider makes them."""
    with folder.one_at_a_time():
        if not is_due(folder.kept_path):
            return None
        for maker in folder.makers_of_kept():
            if maker != provider.id and folder.liveness.is_alive(maker):
                return None
            folder.part_path(None, maker).unlink(missing_ok=True)
        part = folder.part_path(None, provider.id)
        part.touch()
        return UnfinishedFile(None, part)


def publish(folder: SplitFolder, part: UnfinishedFile, *, durable: bool = False) -> bool:
    """Give a finished file its name. False if it is no longer needed: its maker seemed dead, or a reader went back
    to before it."""
    try:
        os.rename(part.path, folder.ready_path(part.number))
    except FileNotFoundError:
        if not folder.path.is_dir():
            raise deleted(folder.queue.path) from None
        return False
    if durable:
        sync_folder(folder.path)
    return True


def give_up(folder: SplitFolder, part: UnfinishedFile) -> None:
    """Leave a number that was begun to another provider."""
    with folder.one_at_a_time():
        if part.number is not None and part.path.exists():
            folder.want(part.number)  # first: a kill between the two must not lose it
        part.path.unlink(missing_ok=True)


# A queue that was begun by another provider


def was_read(folder: SplitFolder) -> bool:
    """Whether a batch was handed out, as far as it was recorded."""
    there, of_ranks = folder.listing(), folder.records.left_off()
    if of_ranks is not None and of_ranks.handed > Position(0, 0):
        return True
    return bool(there.taken or there.claimed or there.returned or folder.kept_seen_path.exists())


def begin_anew(folder: SplitFolder) -> None:
    """Throw away all files. The first file is made next. For a split that was never read."""
    for path in [*folder.path.glob(f"*{EXTENSION}"), *folder.path.glob(".*.part"), *folder.wanted.iterdir()]:
        path.unlink(missing_ok=True)
    (folder.path / "next").unlink(missing_ok=True)
