"""The folder of a queue. The place of a file is its state.

    train/00000117.batches                         ready: it waits
    train/.00000118.ID.part                        provider ID makes it
    control/train/claimed/00000116.ID.batches      consumer ID reads it; its progress is in 00000116.ID.rows
    control/train/returned/00000115                ready again: its reader died; its progress is inside
    control/train/wanted/00000114                  no longer ready, and needed: a provider makes it first
    train/next, control/train/taken                the next number that a provider begins, that a consumer takes
    control/val/seen                               the kept batches were read
    control/train/ranks                            progress of ranks, which share files and claim none (see ranks.py)
    val/kept.batches                               validation batches that are kept; .kept.ID.part while made

Each step from one place to the next is one rename. A process that is killed between two steps leaves a number in
exactly one place. Numbers are chosen under the lock of their split, by one process at a time.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from batchwright.base.files import is_part, one_at_a_time
from batchwright.queue.members import Liveness, QueueMember
from batchwright.queue.messages import clear_errors
from batchwright.queue.ranks import RankRecords

# Names of files, and small files that hold numbers


EXTENSION = ".batches"
_READY = re.compile(r"([0-9]+)\.batches")
_MADE_OR_CLAIMED = re.compile(r"\.?([0-9]+|kept)\.([^.]+)\.(?:part|batches)")


def digits_of(number: int | None) -> str:
    """The number of a file as its name has it. None: of the kept batches, which have no number."""
    return "kept" if number is None else f"{number:08d}"


def file_name(number: int | None) -> str:
    """
    >>> file_name(117), file_name(None)
    ('00000117.batches', 'kept.batches')
    """
    return digits_of(number) + EXTENSION


def number_of(name: str) -> int | None:
    """The number of a ready file, None of anything else.

    >>> number_of("00000117.batches"), number_of("next"), number_of(".00000118.provider-1-ab.part")
    (117, None, None)
    """
    found = _READY.fullmatch(name)
    return int(found[1]) if found else None


def number_and_member(name: str) -> tuple[int | None, str] | None:
    """The number and the member's id of a file that is being made (by a provider) or read (by a consumer).

    The number of kept batches is None.

    >>> number_and_member(".00000118.provider-1-ab.part"), number_and_member("00000116.consumer-1-cd.batches")
    ((118, 'provider-1-ab'), (116, 'consumer-1-cd'))
    >>> number_and_member(".kept.provider-1-ab.part"), number_and_member(".next.part")
    ((None, 'provider-1-ab'), None)
    """
    found = _MADE_OR_CLAIMED.fullmatch(name)
    if found is None:
        return None
    number, member = found.groups()
    return (None if number == "kept" else int(number)), member


def _read_number(path: Path) -> int | None:
    with contextlib.suppress(FileNotFoundError, ValueError):
        number = int(path.read_text())
        if number >= 0:
            return number
    return None


def write_number(path: Path, number: int) -> None:
    """Written in place: a rename over a file makes some file systems write it out at once. A reader copes with none."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.pwrite(descriptor, f"{number:<20d}\n".encode(), 0)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a file under the lock of its split: it appears in full, or not at all. Not synced to disk."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text)
    os.rename(part, path)


def _numbers_in(folder: Path) -> tuple[int, ...]:
    return tuple(sorted(int(name) for name in os.listdir(folder) if name.isascii() and name.isdigit()))


# The folder


class QueueFolder:
    """The paths of a queue."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.meta: Path = path / "meta.json"
        self.who: Path = path / "who"
        self.quarantine: Path = path / "quarantine"

    def split(self, name: str, liveness: Liveness) -> SplitFolder:
        return SplitFolder(self, name, liveness)

    def make(self, splits: tuple[str, ...]) -> None:
        """Make all folders. Twice is fine."""
        for folder in (self.who, self.quarantine):
            folder.mkdir(parents=True, exist_ok=True)
        for name in splits:
            (self.path / name).mkdir(exist_ok=True)
            for part in ("claimed", "returned", "wanted", "ranks"):
                (self.path / "control" / name / part).mkdir(parents=True, exist_ok=True)
            if not (self.path / name / "next").exists():  # a new one: the first file is taken first
                with contextlib.suppress(FileExistsError), open(self.path / "control" / name / "taken", "x") as file:
                    file.write("0\n")


@dataclass(frozen=True, slots=True)
class Listing:
    """The numbers of a split at one moment, by their places."""

    ready: tuple[int, ...]
    making: dict[int, str]
    """Number to the provider that makes it."""
    claimed: dict[int, str]
    """Number to the consumer that reads it."""
    wanted: tuple[int, ...]
    returned: tuple[int, ...]
    next: int
    taken: int

    @property
    def again(self) -> list[int]:
        """Numbers that were taken before, and are to be read again."""
        return sorted({number for number in (*self.ready, *self.making, *self.wanted) if number < self.taken})


class SplitFolder:
    """One split of a queue. Methods that change something and do not lock are called under `one_at_a_time`."""

    def __init__(self, queue: QueueFolder, name: str, liveness: Liveness) -> None:
        self.queue = queue
        self.name = name
        self.liveness = liveness
        self.path: Path = queue.path / name
        self.identity: str = os.path.realpath(self.path)
        """The same for every path that leads to this folder."""
        self.control: Path = queue.path / "control" / name
        self.claimed: Path = self.control / "claimed"
        self.returned: Path = self.control / "returned"
        self.wanted: Path = self.control / "wanted"
        self.ranks: Path = self.control / "ranks"
        self.records: RankRecords = RankRecords(self.ranks)
        self.kept_path: Path = self.path / file_name(None)
        """Batches that are made once and kept. They have no number: the stream is the same with or without them."""
        self.kept_seen_path: Path = self.control / "seen"

    # Paths

    def ready_path(self, number: int | None) -> Path:
        return self.path / file_name(number)

    def part_path(self, number: int | None, provider: str) -> Path:
        """The file of a number while a provider makes it. None: of the kept batches."""
        return self.path / f".{digits_of(number)}.{provider}.part"

    def claimed_path(self, number: int, consumer: str) -> Path:
        return self.claimed / f"{digits_of(number)}.{consumer}{EXTENSION}"

    def returned_path(self, number: int) -> Path:
        return self.returned / digits_of(number)

    @contextlib.contextmanager
    def one_at_a_time(self) -> Iterator[None]:
        with clear_errors(self.queue.path), one_at_a_time(self.control):
            yield

    # Numbers

    def listing(self) -> Listing:
        ready = [number for name in os.listdir(self.path) if (number := number_of(name)) is not None]
        making, claimed = self._members_of(self.path), self._members_of(self.claimed)
        taken = _read_number(self.control / "taken")
        following = _read_number(self.path / "next")
        if following is None:  # lost, or deleted by hand: never begin again below a number that was taken
            following = max([taken or 0, *(number + 1 for number in (*ready, *making, *claimed))])
        if taken is None:
            taken = min([following, *ready])
        following = max(following, taken)  # after a reader went back, numbers from there on may still exist
        there = {*ready, *making, *claimed}
        while following in there:
            following += 1
        wanted, returned = _numbers_in(self.wanted), _numbers_in(self.returned)
        return Listing(tuple(sorted(ready)), making, claimed, wanted, returned, following, taken)

    def _members_of(self, folder: Path) -> dict[int, str]:
        found = filter(None, map(number_and_member, os.listdir(folder)))
        return {number: member for number, member in found if number is not None}

    def backlog(self) -> int:
        """The number of files that wait."""
        return sum(number_of(name) is not None for name in os.listdir(self.path))

    def makers_of_kept(self) -> list[str]:
        """Providers, dead ones too, that make the kept batches."""
        found = filter(None, map(number_and_member, os.listdir(self.path)))
        return sorted(member for number, member in found if number is None)

    def lives(self, member_id: str, me: QueueMember) -> bool:
        return member_id == me.id or self.liveness.is_alive(member_id)

    def want(self, number: int) -> None:
        """Ask for a number ahead of all others."""
        path = self.wanted / digits_of(number)
        if not path.exists():  # a consumer that waits asks again and again, and each touch would wake all providers
            path.touch()

    def forget_wanted(self, number: int) -> None:
        (self.wanted / digits_of(number)).unlink(missing_ok=True)

    def want_if_missing(self, number: int, there: Listing) -> None:
        if number <= there.next and number not in there.ready and number not in there.making:
            self.want(number)

    def read_returned(self, number: int) -> tuple[int, int]:
        """(rows recorded, rows handed out) of a file that was given back."""
        try:
            recorded, handed = self.returned_path(number).read_text().split()
            return int(recorded), int(handed)
        except (FileNotFoundError, ValueError):
            return 0, 0

    def write_returned(self, number: int, recorded: int, handed: int) -> None:
        write_text(self.returned_path(number), f"{recorded} {handed}\n")

    def sweep(self) -> None:
        """Remove unfinished files of processes that were killed: under the lock no number is being written."""
        with self.one_at_a_time():
            for folder in (self.path, self.control, self.returned, self.ranks):
                for name in filter(is_part, os.listdir(folder)):
                    made = number_and_member(name)
                    # A number's part is taken over with its number. That of kept batches has its maker.
                    is_abandoned = made is None or (made[0] is None and not self.liveness.is_alive(made[1]))
                    if is_abandoned or folder != self.path:
                        (folder / name).unlink(missing_ok=True)
            for path in self.queue.quarantine.glob(f".{self.name}-*.part"):
                path.unlink(missing_ok=True)
