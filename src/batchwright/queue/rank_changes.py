"""Changes between ranks, which share files, and single consumers, which claim them: one kind goes on for the other."""

from __future__ import annotations

from batchwright.base.errors import BusyError
from batchwright.queue.batch_file import DamagedFile, read_facts
from batchwright.queue.file_names import write_number
from batchwright.queue.folder import Listing, SplitFolder
from batchwright.queue.members import MemberFacts, QueueMember
from batchwright.queue.ranks import RankProgress
from batchwright.queue.reading import Position

__all__ = ["continue_for_ranks", "forget_returned", "left_off", "living_ranks", "names_of_ranks", "refuse_beside_ranks"]

_ENDLESS = 1 << 62


def living_ranks(folder: SplitFolder, me: QueueMember | None) -> list[MemberFacts]:
    """Other ranks that read this split, without the one that `me` replaces (a notebook cell that ran twice)."""
    joined = folder.records.began()[1]
    if not joined:
        return []
    living = [facts for facts in folder.liveness.living("consumer") if facts.id in joined]
    if me is not None:
        living = [facts for facts in living if facts.id != me.id and not facts.is_replaced_by(me.facts)]
    return sorted(living, key=lambda facts: facts.rank or 0)


def refuse_beside_ranks(folder: SplitFolder, ranks: list[MemberFacts]) -> None:
    if ranks:
        raise BusyError(
            f"ranks read {folder.name} now, and a consumer without rank= would be handed the same rows",
            folder=folder.queue.path,
            process=names_of_ranks(ranks),
            remedy="give this one a rank= of their world_size=; or close or stop them, and it goes on where they were",
        )


def names_of_ranks(ranks: list[MemberFacts]) -> str:
    return ", ".join(f"{one.name} (rank {one.rank} of {one.world_size})" for one in ranks)


def continue_for_ranks(folder: SplitFolder, consumer: QueueMember) -> int | None:
    """Let a single consumer go on where ranks ended: at the slowest one. Or the number that must be waited for."""
    records = folder.records
    if not records.are_there():
        return None
    refuse_beside_ranks(folder, living_ranks(folder, consumer))
    progress = records.left_off()
    if progress is None:
        records.clear()
        return None
    there = folder.listing()
    number, row = progress.recorded
    while row:  # it may be beyond the end of its file, where a step is longer than that
        num_rows = _num_rows(folder, number)
        if num_rows is None:
            folder.want_if_missing(number, there)
            return number
        if row < num_rows:
            break
        number, row = number + 1, row - num_rows
    forget_returned(folder)
    _return_what_ranks_were_handed(folder, Position(number, row), progress.handed)
    for old in there.ready:
        if old < number:
            folder.ready_path(old).unlink(missing_ok=True)
    folder.drop_unfinished_below(number, there)
    for old in there.wanted:
        if old < number:
            folder.forget_wanted(old)
    write_number(folder.control / "taken", number)
    records.clear(progress)
    return None


def _return_what_ranks_were_handed(folder: SplitFolder, recorded: Position, handed: Position) -> None:
    """Write down for each file how far ranks were, as single consumers do."""
    for number in range(recorded.file, max(handed.file, recorded.file) + 1):
        first = last = 0
        if number == recorded.file:
            first = recorded.row
        if number == handed.file:
            last = handed.row
        elif number < handed.file:
            last = _num_rows(folder, number) or 0
        if max(first, last):
            folder.write_returned(number, first, max(first, last))


def _num_rows(folder: SplitFolder, number: int) -> int | None:
    """Rows of a file that waits. A damaged one has no end: it is found to be damaged when it is read."""
    try:
        return read_facts(folder.ready_path(number)).num_rows
    except FileNotFoundError:
        return None
    except DamagedFile:
        return _ENDLESS


def left_off(folder: SplitFolder, there: Listing) -> RankProgress:
    """Where ranks go on after single consumers, when no file is claimed, and up to where rows were handed out."""
    again = there.again
    for number in there.again:  # its reader may have died before it deleted it
        recorded = folder.read_returned(number)[0]
        if not recorded or recorded < (_num_rows(folder, number) or _ENDLESS):
            break
        again.remove(number)
    first = min(again, default=there.taken)
    gone = [number for number in range(first, there.taken) if number not in again]  # read by faster consumers
    handed = [Position(number, folder.read_returned(number)[1]) for number in there.returned]
    recorded_at = Position(first, folder.read_returned(first)[0])
    return RankProgress(recorded_at, max([recorded_at, *handed, *(Position(number + 1, 0) for number in gone)]))


def forget_returned(folder: SplitFolder) -> None:
    """Remove how far single consumers were: ranks go on for them, and have written that down."""
    for marker in folder.returned.iterdir():
        marker.unlink(missing_ok=True)
