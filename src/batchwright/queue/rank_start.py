"""The start of a run of ranks: its ranks, the readers beside them, and the place of earlier single consumers."""

from __future__ import annotations

from batchwright.base.errors import BusyError, QueueError
from batchwright.queue.batch_file import DamagedFile, read_facts
from batchwright.queue.folder import SplitFolder
from batchwright.queue.members import MemberFacts, QueueMember
from batchwright.queue.ranks import RankProgress
from batchwright.queue.reading import Position

__all__ = ["left_off", "living_ranks", "names_of_ranks", "refuse_after_ranks", "refuse_beside_ranks"]


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
