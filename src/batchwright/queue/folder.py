"""One split of a queue: which numbers are being made, wait, are read or done, as names of files.

    train/00000117.batches                         ready: it waits
    train/.00000118.ID.part                        provider ID makes it
    control/train/claimed/00000116.ID.batches      consumer ID reads it; 00000116.ID.rows says how far
    control/train/returned/00000115                ready again: its reader died, this far
    control/train/wanted/00000114                  ready no more, and needed: a provider makes it first
    train/next, control/train/taken                the next number that a provider begins, that a consumer takes
    control/val/seen                               somebody has read the kept batches
    control/train/ranks                            how far ranks are, which share files and claim none (see ranks.py)
    val/kept.batches                               no number: validation batches that are kept; .kept.ID.part while made

Every step from one to the next is one rename, which happened or did not: a process that is killed between two leaves a
number in exactly one of these places. Choosing a number is done under a lock of the split's, by one at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

from batchwright.base.errors import BusyError, QueueError
from batchwright.base.files import is_part, one_at_a_time, sync_folder
from batchwright.queue.batch_file import DamagedFile, read_facts
from batchwright.queue.claim import Claim, mapped_rows, read_rows, rows_beside
from batchwright.queue.entries import (
    DIGITS,
    EXTENSION,
    KEPT,
    file_name,
    kept_by,
    made_by,
    number_of,
    numbers_in,
    read_number,
    read_rows_text,
    write_number,
    write_text,
)
from batchwright.queue.members import Census, Facts, Member
from batchwright.queue.ranks import Progress, RankRecords
from batchwright.queue.reading import Position
from batchwright.queue.refused import deleted, named

__all__ = ["Listing", "Part", "QueueFolder", "SplitFolder"]


@dataclass(frozen=True, slots=True)
class QueueFolder:
    """Where the parts of a queue lie."""

    path: Path

    @property
    def meta(self) -> Path:
        return self.path / "meta.json"

    @property
    def who(self) -> Path:
        return self.path / "who"

    @property
    def quarantine(self) -> Path:
        return self.path / "quarantine"

    def split(self, name: str, census: Census) -> SplitFolder:
        return SplitFolder(self, name, census)

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
    """What there is of a split, at one moment."""

    ready: tuple[int, ...]
    making: dict[int, str]
    """Number to the provider that makes it."""
    claimed: dict[int, str]
    """Number to the consumer that reads it."""
    wanted: tuple[int, ...]
    returned: tuple[int, ...]
    next: int
    taken: int


@dataclass(frozen=True, slots=True)
class Part:
    """A number that a provider makes, and the file that it writes."""

    number: int | None
    """None: of the kept batches."""
    path: Path
    inode: int
    """A file of the same name that is another one is of nobody: its maker seemed dead, and woke up."""


class SplitFolder:
    """One split of a queue, as one process sees it."""

    def __init__(self, queue: QueueFolder, name: str, census: Census) -> None:
        self.queue = queue
        self.name = name
        self.census = census
        self.path: Path = queue.path / name
        self.identity: str = os.path.realpath(self.path)
        """By which a process knows it again, whatever way leads to it."""
        self.control: Path = queue.path / "control" / name
        self.claimed: Path = self.control / "claimed"
        self.returned: Path = self.control / "returned"
        self.wanted: Path = self.control / "wanted"
        self.ranks: Path = self.control / "ranks"
        self.records: RankRecords = RankRecords(self.ranks)

    def ready_path(self, number: int) -> Path:
        return self.path / file_name(number)

    @property
    def kept_path(self) -> Path:
        """Batches that are made once and kept. No number of the stream: it begins and goes on as if they were not."""
        return self.path / f"{KEPT}{EXTENSION}"

    @property
    def _kept_seen(self) -> Path:
        return self.control / "seen"

    def say_kept_was_read(self) -> None:
        with contextlib.suppress(OSError):  # this reader may have no right to write here
            self._kept_seen.touch()

    @contextlib.contextmanager
    def one_at_a_time(self) -> Iterator[None]:
        try:
            with one_at_a_time(self.control):
                yield
        except OSError as error:
            clear = named(error, self.queue.path)
            if clear is None:
                raise
            raise clear from error

    # What there is

    def listing(self) -> Listing:
        ready, making = [], {}
        for name in os.listdir(self.path):
            number = number_of(name)
            if number is not None:
                ready.append(number)
            elif (made := made_by(name)) is not None:
                making[made[0]] = made[1]
        claimed = {}
        for name in os.listdir(self.claimed):
            held = name.split(".")
            if name.endswith(EXTENSION) and len(held) == 3 and held[0].isdigit():
                claimed[int(held[0])] = held[1]
        ready.sort()
        taken = read_number(self.control / "taken")
        following = read_number(self.path / "next")
        if following is None:  # lost, or deleted by hand: never begin again below what was taken
            following = max([taken or 0, *(number + 1 for number in (*ready, *making, *claimed))])
        if taken is None:
            taken = min([following, *ready])
        following = max(following, taken)  # after a reader went back, numbers from there on may be there still
        there = {*ready, *making, *claimed}
        while following in there:
            following += 1
        return Listing(
            tuple(ready), making, claimed, numbers_in(self.wanted), numbers_in(self.returned), following, taken
        )

    def backlog(self) -> int:
        """Files that wait."""
        return sum(number_of(name) is not None for name in os.listdir(self.path))

    def sweep(self) -> None:
        """Remove what those left who were killed while they wrote a number: under the lock nobody writes one."""
        with self.one_at_a_time():
            for folder in (self.path, self.control, self.returned, self.ranks):
                for name in os.listdir(folder):
                    if not is_part(name) or (folder == self.path and made_by(name) is not None):
                        continue
                    keeper = kept_by(name)
                    if keeper is None or not self.census.is_alive(keeper):
                        (folder / name).unlink(missing_ok=True)
            for path in self.queue.quarantine.glob(f".{self.name}-*.part"):
                path.unlink(missing_ok=True)

    # For providers

    def was_read(self) -> bool:
        """Whether a batch was handed out, as far as anybody wrote it down."""
        there = self.listing()
        of_ranks = self.records.left_off()
        was_handed = of_ranks is not None and of_ranks.handed > Position(0, 0)
        return bool(there.taken or there.claimed or there.returned or was_handed or self._kept_seen.exists())

    def begin_anew(self) -> None:
        """Throw away what was made: the first file is made next. For a split of which nothing was read."""
        for path in [*self.path.glob(f"*{EXTENSION}"), *self.path.glob(".*.part"), *self.wanted.iterdir()]:
            path.unlink(missing_ok=True)
        (self.path / "next").unlink(missing_ok=True)

    def begin(self, provider: Member, max_backlog_files: int) -> Part | None:
        """Take the number of a file to make. None: nothing is needed now."""
        with self.one_at_a_time():
            there = self.listing()
            abandoned = {number for number, maker in there.making.items() if not self._lives(maker, provider)}
            for number in sorted({*there.wanted, *abandoned}):
                is_there = number in there.ready or number in there.claimed
                if is_there or (number in there.making and number not in abandoned):
                    self._want_no_more(number)
                    continue
                if number > there.next:  # everything before it comes first
                    continue
                if number in abandoned and not self._take_over(number, there.making[number]):
                    continue
                return self._begin(number, provider, there)
            if sum(number < there.next for number in there.ready) >= max_backlog_files:
                return None
            return self._begin(there.next, provider, there)

    def begin_kept(self, provider: Member, is_due: Callable[[Path], bool]) -> Part | None:
        """As `begin`, of the kept batches: where they are due, and nobody else makes them."""
        with self.one_at_a_time():
            if not is_due(self.kept_path):
                return None
            for maker in self.keepers():
                if maker != provider.id and self._lives(maker, provider):
                    return None
                self._kept_part(maker).unlink(missing_ok=True)
            part = self._kept_part(provider.id)
            part.touch()
            return Part(None, part, part.stat().st_ino)

    def keepers(self) -> list[str]:
        """Providers, dead ones too, that make the kept batches."""
        return sorted(maker for name in os.listdir(self.path) if (maker := kept_by(name)) is not None)

    def _kept_part(self, member_id: str) -> Path:
        return self.path / f".{KEPT}.{member_id}.part"

    def _begin(self, number: int, provider: Member, there: Listing) -> Part:
        part = self._part(number, provider.id)
        part.touch()
        try:
            if number >= there.next:
                write_number(self.path / "next", number + 1)
        except OSError:  # a full disk: or it would seem to be made here, by nobody
            part.unlink(missing_ok=True)
            raise
        self._want_no_more(number)
        return Part(number, part, part.stat().st_ino)

    def _take_over(self, number: int, maker: str) -> bool:
        """Throw away what a dead provider began. False where it is not dead, and was done just now."""
        self._want(number)  # or a kill right here would leave it nowhere
        try:
            self._part(number, maker).unlink()
        except FileNotFoundError:
            self._want_no_more(number)
            return False
        return True

    def _part(self, number: int, member_id: str) -> Path:
        return self.path / f".{number:0{DIGITS}d}.{member_id}.part"

    def publish(self, part: Part, *, durable: bool = False) -> bool:
        """Give a finished file its name. False where nobody waits for it any more: its maker seemed dead, or a reader
        went back to before it."""
        try:
            if part.path.stat().st_ino != part.inode:
                part.path.unlink()
                return False
            os.rename(part.path, self.kept_path if part.number is None else self.ready_path(part.number))
        except FileNotFoundError:
            if not self.path.is_dir():
                raise deleted(self.queue.path) from None
            return False
        if durable:
            sync_folder(self.path)
        return True

    def give_up(self, part: Part) -> None:
        """A number that was begun and will not be made here: another provider makes it."""
        with self.one_at_a_time():
            if part.number is not None and part.path.exists():
                self._want(part.number)  # first: a kill between the two must not leave it nowhere
            part.path.unlink(missing_ok=True)

    # For consumers

    def claim(self, consumer: Member, mine: AbstractSet[int] = frozenset()) -> Claim | int:
        """The next file, which nobody else gets; or the number that must be waited for.

        Files are taken in the order of their numbers. What somebody before did not finish comes first, and what has
        to be made again is waited for. `mine`: what the caller has; another one that is claimed in its name was claimed
        by a call that was interrupted.
        """
        with self.one_at_a_time():
            if self.records.are_there() and (missing := self._go_on_for_ranks(consumer)) is not None:
                return missing
            there = self.listing()
            interrupted = [n for n, holder in there.claimed.items() if holder == consumer.id and n not in mine]
            for number in interrupted:
                self._return(self._claimed_path(number, consumer.id))
            if self.return_what_the_dead_held(there, consumer) or interrupted:
                there = self.listing()
            again = [number for number in (*there.ready, *there.making, *there.wanted) if number < there.taken]
            number = min(again, default=there.taken)
            while not again and number in there.claimed:  # taken by somebody who was killed before he said so
                number += 1
            if number not in there.ready:
                if number <= there.next and number not in there.making:
                    self._want(number)  # also where enough waits, of later numbers: a reader went back
                return number
            return self._claim(number, consumer, there)

    def _claim(self, number: int, consumer: Member, there: Listing) -> Claim:
        recorded, handed = read_rows_text(self.returned / f"{number:0{DIGITS}d}")
        path = self._claimed_path(number, consumer.id)
        rows = mapped_rows(rows_beside(path), recorded, handed)
        is_alone = all(holder == consumer.id for holder in there.claimed.values())
        claim = Claim(number, path, recorded, handed, is_alone, rows)
        try:
            if number >= there.taken:
                write_number(self.control / "taken", number + 1)  # before: a kill, or a full disk, and it comes again
            os.rename(self.ready_path(number), path)
        except BaseException:
            claim.drop()
            with contextlib.suppress(OSError):
                rows_beside(path).unlink()
            raise
        (self.returned / f"{number:0{DIGITS}d}").unlink(missing_ok=True)
        self._want_no_more(number)  # asked for while its maker gave it its name
        return claim

    def _claimed_path(self, number: int, holder: str) -> Path:
        return self.claimed / f"{number:0{DIGITS}d}.{holder}{EXTENSION}"

    def beginning(self) -> tuple[int, int]:
        """The file that `claim` would give next, and how many of its rows were used before."""
        with self.one_at_a_time():
            after_ranks = self.records.left_off()
            if after_ranks is not None:
                return after_ranks.recorded
            there = self.listing()
            again = [number for number in (*there.ready, *there.making, *there.wanted) if number < there.taken]
            dead = [number for number, holder in there.claimed.items() if not self.census.is_alive(holder)]
            number = min([*again, *dead], default=there.taken)
            if number in dead:
                return number, read_rows(self._claimed_path(number, there.claimed[number]))[0]
            return number, read_rows_text(self.returned / f"{number:0{DIGITS}d}")[0]

    # Ranks, which share files, and single consumers, which claim them: one kind after the other

    def living_ranks(self, me: Member | None) -> list[Facts]:
        """Ranks that read this split, but this one, and but the one that this process had before, in a notebook."""
        joined = self.records.began()[1]
        if not joined:
            return []
        living = [
            facts
            for facts in self.census.living("consumer")
            if facts.id in joined and (me is None or not (facts.id == me.id or _is_replaced_by(facts, me.facts)))
        ]
        return sorted(living, key=lambda facts: facts.rank or 0)

    def _go_on_for_ranks(self, consumer: Member) -> int | None:
        """Ranks have read this split: where they are gone, go on from the slowest one. Or a number to wait for."""
        self._refuse_beside(self.living_ranks(consumer))
        left = self.records.left_off()
        if left is None:
            self.records.clear()
            return None
        there = self.listing()
        number, row = left.recorded
        while row:  # it may lie beyond the end of its file, where a step is longer than that
            num_rows = self._num_rows(number)
            if num_rows is None:
                if number <= there.next and number not in there.making:
                    self._want(number)
                return number
            if row < num_rows:
                break
            number, row = number + 1, row - num_rows
        self.forget_returned()
        for old in range(number, left.handed.file + 1):
            recorded = row if old == number else 0
            handed = left.handed.row if old == left.handed.file else self._num_rows(old) or 0
            if max(recorded, handed):
                self._write_returned(old, recorded, max(recorded, handed))
        if row and left.handed.file < number:
            self._write_returned(number, row, row)
        self._drop_below(number, there)
        write_number(self.control / "taken", number)
        self.records.clear(left)
        return None

    def _refuse_beside(self, ranks: list[Facts]) -> None:
        if ranks:
            raise BusyError(
                f"ranks read {self.name} now, and a consumer without rank= would be handed the same rows",
                folder=self.queue.path,
                process=", ".join(f"{one.name} (rank {one.rank} of {one.world_size})" for one in ranks),
                remedy="give this one a rank= of their world_size=; or close or stop them, and it goes on where they "
                "were",
            )

    def _num_rows(self, number: int) -> int | None:
        """Of a file that waits. One that is damaged is found to be when it is read: it has as many as you like."""
        try:
            return read_facts(self.ready_path(number)).num_rows
        except FileNotFoundError:
            return None
        except DamagedFile:
            return 1 << 62

    def _drop_below(self, number: int, there: Listing) -> None:
        for old in there.ready:
            if old < number:
                self.ready_path(old).unlink(missing_ok=True)
        for old, maker in there.making.items():
            if old < number:
                self._part(old, maker).unlink(missing_ok=True)
                self.ready_path(old).unlink(missing_ok=True)  # where its maker was faster
        for old in there.wanted:
            if old < number:
                self._want_no_more(old)

    def left_off(self, there: Listing) -> Progress:
        """Where `claim` would go on, when nobody holds a file, and up to where rows were handed out."""
        again = {number for number in (*there.ready, *there.making, *there.wanted) if number < there.taken}
        for spent in sorted(again):  # its reader died before it was deleted
            recorded_rows = read_rows_text(self._returned_path(spent))[0]
            if not recorded_rows or recorded_rows < (self._num_rows(spent) or 1 << 62):
                break
            again.remove(spent)
        number = min(again, default=there.taken)
        gone = [old + 1 for old in range(number, there.taken) if old not in again]  # read by consumers that were faster
        handed = [Position(old, read_rows_text(self._returned_path(old))[1]) for old in there.returned]
        recorded = Position(number, read_rows_text(self._returned_path(number))[0])
        return Progress(recorded, max([recorded, *handed, *(Position(after, 0) for after in gone)]))

    def forget_returned(self) -> None:
        """How far single consumers were: ranks go on for them, and have written that down."""
        for marker in self.returned.iterdir():
            marker.unlink(missing_ok=True)

    def _returned_path(self, number: int) -> Path:
        return self.returned / f"{number:0{DIGITS}d}"

    def give_back(self, claim: Claim) -> None:
        """End a claim: what of the file is not recorded is there for others, or for this reader later."""
        claim.drop()
        with self.one_at_a_time():
            self._return(claim.path)

    def quarantine(self, number: int | None, reason: str, path: Path, inode: int, claim: Claim | None = None) -> Path:
        """Put a damaged file aside, with the reason, and ask for its number again.

        Kept batches have none: that they are missing is seen.
        """
        name = KEPT if number is None else f"{number:0{DIGITS}d}"
        with self.one_at_a_time():
            for attempt in range(1 << 20):
                aside = self.queue.quarantine / f"{self.name}-{name}.{attempt}{EXTENSION}"
                if not aside.exists():
                    break
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino != inode:  # somebody was faster, and it is made again already
                    return aside
                report = {"split": self.name, "number": number, "reason": reason, "found": time.time()}
                write_text(aside.with_suffix(".json"), json.dumps(report, indent=2) + "\n")
                if number is not None:
                    self._want(number)  # first: a number that is wanted and there is not made again
                if number is not None and claim is not None and claim.handed:
                    self._write_returned(number, claim.recorded, claim.handed)
                os.rename(path, aside)
            if claim is not None:
                claim.drop()
                rows_beside(path).unlink(missing_ok=True)
        return aside

    def want(self, number: int) -> None:
        """Ask for a number that is not there, ahead of all others."""
        with self.one_at_a_time():
            there = self.listing()
            if number <= there.next and number not in there.ready and number not in there.making:
                self._want(number)

    def rewind(self, number: int, consumer: Member, *, can_be_made_again: bool) -> list[Claim]:
        """Let number and all after it come, once more where they came before. For the only reader of a split.

        Files before it are deleted; those that cannot be made again are the caller's, to be deleted later. Nothing is
        done where other ranks of the caller have begun: one of them did it.
        """
        with self.one_at_a_time():
            is_rank, ranks = consumer.facts.rank is not None, self.living_ranks(consumer)
            if ranks and is_rank:
                return []
            self._refuse_beside(ranks)
            there = self.listing()
            others = {holder for holder in there.claimed.values() if self._lives(holder, consumer, other_than=True)}
            if others:
                raise BusyError(
                    f"a position in {self.name} can be set where one consumer reads it: here are others",
                    folder=self.queue.path,
                    process=", ".join(sorted(others)),
                    remedy="rank= and world_size= for several readers that resume exactly; or stop the others",
                )
            kept = {*there.ready, *there.claimed, *there.making}
            lost = [n for n in range(number, min(there.next, there.taken)) if n not in kept]
            if lost and not can_be_made_again:
                raise QueueError(
                    f"{self.name} file {lost[0]} was deleted, and this provider cannot make it again",
                    folder=self.queue.path,
                    remedy="delete='checkpoint' and consumer.commit() after each checkpoint, for a provider with "
                    "reproducible = False",
                )
            for held, holder in there.claimed.items():
                path = self._claimed_path(held, holder)
                rows_beside(path).unlink(missing_ok=True)
                with contextlib.suppress(FileNotFoundError):
                    os.rename(path, self.ready_path(held))
            before = []
            for old in (*there.ready, *there.claimed):
                if old < number and can_be_made_again:
                    self.ready_path(old).unlink(missing_ok=True)
                elif old < number and not is_rank:  # ranks delete what all of them are past, when they record
                    path = self._claimed_path(old, consumer.id)
                    before.append(Claim(old, path, 0, 0, True, mapped_rows(rows_beside(path), 0, 0)))
                    os.rename(self.ready_path(old), path)
                    before[-1].rest()
            for old, maker in there.making.items():
                if old < number:
                    self._part(old, maker).unlink(missing_ok=True)
                    self.ready_path(old).unlink(missing_ok=True)  # where its maker was faster
            for marker in (*self.wanted.iterdir(), *self.returned.iterdir()):
                marker.unlink(missing_ok=True)
            self.records.clear()
            write_number(self.control / "taken", number)
            write_number(self.path / "next", number)
            return before

    def return_what_the_dead_held(self, there: Listing, me: Member) -> bool:
        found = False
        for number, holder in there.claimed.items():
            if not self._lives(holder, me):
                self._return(self._claimed_path(number, holder))
                found = True
        for path in self.claimed.glob("*.rows"):  # of one who was killed before he claimed, or after he was done
            if not path.with_suffix(EXTENSION).exists() and not self._lives(path.name.split(".")[1], me):
                path.unlink(missing_ok=True)
        return found

    def _return(self, path: Path) -> None:
        number = int(path.name.split(".")[0])
        self._write_returned(number, *read_rows(path))
        try:
            os.rename(path, self.ready_path(number))
        except FileNotFoundError:  # its reader was not dead, and is done with it
            (self.returned / f"{number:0{DIGITS}d}").unlink(missing_ok=True)
        rows_beside(path).unlink(missing_ok=True)

    def _write_returned(self, number: int, recorded: int, handed: int) -> None:
        write_text(self.returned / f"{number:0{DIGITS}d}", f"{recorded} {handed}\n")

    def _want(self, number: int) -> None:
        path = self.wanted / f"{number:0{DIGITS}d}"
        if not path.exists():  # whoever waits asks again and again, and each touch would wake all providers
            path.touch()

    def _want_no_more(self, number: int) -> None:
        (self.wanted / f"{number:0{DIGITS}d}").unlink(missing_ok=True)

    def _lives(self, member_id: str, me: Member, *, other_than: bool = False) -> bool:
        if member_id == me.id:
            return not other_than
        return self.census.is_alive(member_id)


def _is_replaced_by(facts: Facts, mine: Facts) -> bool:
    return (facts.pid, facts.boot, facts.rank) == (mine.pid, mine.boot, mine.rank)
