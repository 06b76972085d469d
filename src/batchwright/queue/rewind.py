"""Going back in a split. The files from a number on are read again, and made again if they were deleted."""

from __future__ import annotations

import contextlib
import os

from batchwright.base.errors import BusyError, QueueError
from batchwright.queue.claims import Claim, claim_in_place, rows_beside
from batchwright.queue.file_names import write_number
from batchwright.queue.folder import Listing, SplitFolder
from batchwright.queue.members import QueueMember
from batchwright.queue.rank_start import living_ranks, refuse_beside_ranks

__all__ = ["rewind"]


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
            rows_beside(path).unlink(missing_ok=True)
            with contextlib.suppress(FileNotFoundError):
                os.rename(path, folder.ready_path(claimed))
        before = [old for old in (*there.ready, *there.claimed) if old < number]
        claims = []
        for old in before:
            if can_be_made_again:
                folder.ready_path(old).unlink(missing_ok=True)
            elif not is_rank:  # ranks delete a file when all of them have recorded that they are past it
                claims.append(claim_in_place(folder, old, consumer))
        folder.drop_unfinished_below(number, there)
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
    for lost in range(number, min(there.next, there.taken)):
        if lost not in kept:
            raise QueueError(
                f"{folder.name} file {lost} was deleted, and this provider cannot make it again",
                folder=folder.queue.path,
                remedy="delete='checkpoint' and consumer.commit() after each checkpoint, for a provider with "
                "reproducible = False",
            )
