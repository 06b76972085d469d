"""One split of a queue: every number is in one place, also where a process is killed between any two steps."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from pathlib import Path

import pytest

from batchwright.base.errors import BusyError, QueueError
from batchwright.queue.claims import Claim, claim_next, give_back, quarantine, rewind
from batchwright.queue.folder import QueueFolder, SplitFolder, file_name
from batchwright.queue.members import Liveness, QueueMember, read_failures
from batchwright.queue.production import begin, give_up, publish
from refusals import refused

ROWS = 4
"""Of every file here; what is in them does not matter."""


class Killed(BaseException):
    """The process ends here: nothing that it would still do is done."""


class Kill:
    """Counts what changes a folder, and ends the process before its n-th change."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, before_change: int | None = None) -> None:
        self.num_changes = 0
        self.before_change = before_change
        for name in ("rename", "unlink", "open", "pwrite"):
            monkeypatch.setattr(os, name, self._counted(getattr(os, name), name))
        monkeypatch.setattr(Path, "write_text", self._counted(Path.write_text, "write_text"))

    def _counted(self, change, name):
        def counted(*args, **kwargs):
            is_beat = threading.current_thread() is not threading.main_thread()  # of a member: no step of its process
            if is_beat or (name == "open" and not args[1] & os.O_CREAT):
                return change(*args, **kwargs)
            if self.before_change is not None and self.num_changes >= self.before_change:
                raise Killed
            self.num_changes += 1
            return change(*args, **kwargs)

        return counted


def kill(member: QueueMember) -> None:
    """As the kernel does it: the lock is gone, everything else stays."""
    member._left.set()
    with contextlib.suppress(OSError):
        os.close(member._descriptor)


@pytest.fixture
def queue(tmp_path):
    queue = QueueFolder(tmp_path / "queue")
    queue.make(("train",))
    return queue


def open_split(queue: QueueFolder) -> SplitFolder:
    return queue.split("train", Liveness(queue.who))


def join(queue: QueueFolder, role: str) -> QueueMember:
    return QueueMember(queue.who, role, lease_seconds=30)


def make(split: SplitFolder, provider: QueueMember, max_backlog_files: int = 2) -> int | None:
    part = begin(split, provider, max_backlog_files)
    if part is not None:
        assert publish(split, part)
    return None if part is None else part.number


def read(
    split: SplitFolder, consumer: QueueMember, handed: list[tuple[int, int]], recorded: list[tuple[int, int]]
) -> bool:
    """Claim the next file, hand its rows out one by one, each recorded when the next is asked for, and delete it."""
    claim = claim_next(split, consumer)
    if not isinstance(claim, Claim):
        return False
    for row in range(claim.recorded, ROWS):
        claim.record(row, row + 1)
        handed.append((claim.number, row))
        if row > claim.recorded:
            recorded.append((claim.number, row - 1))
    assert claim.done()
    recorded.append((claim.number, ROWS - 1))
    return True


# Numbers


def test_numbers_are_made_in_order_while_fewer_than_the_backlog_wait(queue):
    split, provider = open_split(queue), join(queue, "provider")
    assert [make(split, provider) for _ in range(4)] == [0, 1, None, None]
    consumer = join(queue, "consumer")
    assert read(split, consumer, [], [])
    assert make(split, provider) == 2


def test_an_empty_folder_does_not_start_again_at_0(queue):
    split, provider, consumer = open_split(queue), join(queue, "provider"), join(queue, "consumer")
    for number in range(3):
        assert make(split, provider) == number
        assert read(split, consumer, [], [])
    assert int((queue.path / "train" / "next").read_text()) == 3
    assert not list((queue.path / "train").glob("*.batches"))
    assert make(open_split(queue), join(queue, "provider")) == 3


@pytest.mark.parametrize("content", [None, "", "garbage", "-4"])
def test_a_lost_or_broken_next_is_found_again_from_what_there_is(queue, content):
    split, provider, consumer = open_split(queue), join(queue, "provider"), join(queue, "consumer")
    for _ in range(3):
        make(split, provider)
        read(split, consumer, [], [])
    path = queue.path / "train" / "next"
    path.unlink() if content is None else path.write_text(content)
    assert make(split, provider) == 3


def test_a_number_that_a_dead_provider_made_is_made_by_the_next_one_and_its_part_is_gone(queue):
    split, dead = open_split(queue), join(queue, "provider")
    part = begin(split, dead, 2)
    kill(dead)
    assert make(split, join(queue, "provider")) == part.number == 0
    assert sorted(path.name for path in split.path.iterdir()) == [file_name(0), "next"]


def test_a_provider_that_seemed_dead_cannot_publish_what_another_made(queue):
    split, slow, other = open_split(queue), join(queue, "provider"), join(queue, "provider")
    part = begin(split, slow, 2)
    kill(slow)
    make(split, other)
    assert not publish(split, part)
    assert split.listing().ready == (0,)


def test_a_number_that_was_given_up_comes_before_new_ones(queue):
    split, provider = open_split(queue), join(queue, "provider")
    give_up(split, begin(split, provider, 2))
    assert split.listing().wanted == (0,)
    assert [make(split, provider), make(split, provider)] == [0, 1]


def test_files_are_taken_in_the_order_of_their_numbers_even_if_a_later_one_is_ready_first(queue):
    split, consumer = open_split(queue), join(queue, "consumer")
    slow, fast = join(queue, "provider"), join(queue, "provider")
    part = begin(split, slow, 2)
    assert make(split, fast) == 1
    assert claim_next(split, consumer) == 0  # waits for it
    assert publish(split, part)
    handed: list[tuple[int, int]] = []
    assert read(split, consumer, handed, [])
    assert read(split, consumer, handed, [])
    assert [number for number, row in handed if row == 0] == [0, 1]


def test_a_file_that_somebody_deleted_by_hand_is_asked_for_again(queue):
    split, provider, consumer = open_split(queue), join(queue, "provider"), join(queue, "consumer")
    make(split, provider)
    make(split, provider)
    split.ready_path(0).unlink()
    assert claim_next(split, consumer) == 0
    assert make(split, provider) == 0
    assert claim_next(split, consumer).number == 0


# Claims


def test_a_claimed_file_is_nobody_elses(queue):
    split, provider = open_split(queue), join(queue, "provider")
    make(split, provider)
    make(split, provider)
    first, second = join(queue, "consumer"), join(queue, "consumer")
    assert (claim_next(split, first).number, claim_next(split, second).number) == (0, 1)
    assert claim_next(split, first, {0}) == 2


def test_a_dead_consumers_file_returns_from_what_it_recorded(queue):
    split, provider, dead = open_split(queue), join(queue, "provider"), join(queue, "consumer")
    make(split, provider)
    claim = claim_next(split, dead)
    claim.record(2, 3)
    kill(dead)
    again = claim_next(split, join(queue, "consumer"))
    assert (again.number, again.recorded, again.handed) == (0, 2, 3)
    assert not list(split.returned.iterdir())
    assert len(list(split.claimed.iterdir())) == 2  # the file and its rows: nothing of the dead one


def test_a_consumer_whose_file_was_given_to_another_learns_it_when_it_is_done(queue):
    split, provider, slow = open_split(queue), join(queue, "provider"), join(queue, "consumer")
    make(split, provider)
    claim = claim_next(split, slow)
    kill(slow)
    other = claim_next(split, join(queue, "consumer"))
    assert not claim.is_mine()
    assert not claim.done()
    assert other.is_mine()
    assert other.done()


def test_a_file_that_is_given_back_waits_for_the_next_reader(queue):
    split, provider, consumer = open_split(queue), join(queue, "provider"), join(queue, "consumer")
    make(split, provider)
    claim = claim_next(split, consumer)
    claim.record(3, 3)
    give_back(split, claim)
    again = claim_next(split, consumer)
    assert (again.number, again.recorded, again.handed) == (0, 3, 3)


def test_a_quarantined_file_is_kept_with_its_reason_and_made_again_before_others_are_read(queue):
    split, provider, consumer = open_split(queue), join(queue, "provider"), join(queue, "consumer")
    make(split, provider)
    make(split, provider)
    claim = claim_next(split, consumer)
    aside = quarantine(split, 0, "a bit flipped", claim.path, claim.path.stat().st_ino, claim)
    assert aside.exists()
    assert "a bit flipped" in aside.with_suffix(".json").read_text()
    assert claim_next(split, consumer) == 0
    assert make(split, provider) == 0
    assert claim_next(split, consumer).number == 0


def test_two_readers_that_find_the_same_damage_put_one_file_aside(queue):
    split, provider = open_split(queue), join(queue, "provider")
    make(split, provider)
    inode = split.ready_path(0).stat().st_ino
    quarantine(split, 0, "damaged", split.ready_path(0), inode)
    (queue.path / "keeps-the-inode").write_text("")  # or the new file might get the number of the old one
    make(split, provider)
    quarantine(split, 0, "damaged", split.ready_path(0), inode)
    assert split.listing().ready == (0,)
    assert len(list(queue.quarantine.glob("*.batches"))) == 1


# Going back


def test_rewinding_lets_everything_from_a_number_on_come_again_and_nothing_before(queue):
    split, provider, consumer = open_split(queue), join(queue, "provider"), join(queue, "consumer")
    for _ in range(4):
        make(split, provider)
        assert read(split, consumer, [], [])
    make(split, provider)
    rewind(split, 2, consumer, can_be_made_again=True)
    handed: list[tuple[int, int]] = []
    while len(handed) < 5 * ROWS:
        make(split, provider)
        read(split, consumer, handed, [])
    assert [number for number, row in handed if row == 0] == [2, 3, 4, 5, 6]


def test_files_that_still_waited_when_a_reader_went_back_come_once(queue):
    split, provider, consumer = open_split(queue), join(queue, "provider"), join(queue, "consumer")
    while make(split, provider, max_backlog_files=3) is not None:
        pass
    rewind(split, 0, consumer, can_be_made_again=True)  # 0, 1 and 2 wait, and need not be made again
    handed: list[tuple[int, int]] = []
    while len(handed) < 6 * ROWS:
        read(split, consumer, handed, [])
        make(split, provider)
    assert [number for number, row in handed if row == 0] == [0, 1, 2, 3, 4, 5]


def test_rewinding_ahead_of_a_new_queue_begins_there(queue):
    split, provider, consumer = open_split(queue), join(queue, "provider"), join(queue, "consumer")
    early = begin(split, join(queue, "provider"), 2)
    rewind(split, 42, consumer, can_be_made_again=True)
    assert not publish(split, early)  # nobody needs number 0 any more
    assert make(split, provider) == 42
    assert claim_next(split, consumer).number == 42


def test_a_reader_cannot_go_back_under_another_living_one(queue):
    split, provider = open_split(queue), join(queue, "provider")
    mine, other = join(queue, "consumer"), join(queue, "consumer")
    make(split, provider)
    claim = claim_next(split, other)
    before = split.listing()
    with refused(BusyError) as caught:
        rewind(split, 0, mine, can_be_made_again=True)
    assert other.id in caught.value.where["process"]
    assert "world_size" in caught.value.remedy
    assert split.listing() == before
    assert claim.is_mine()


def test_files_that_cannot_be_made_again_are_not_promised(queue):
    split, provider, consumer = open_split(queue), join(queue, "provider"), join(queue, "consumer")
    make(split, provider)
    read(split, consumer, [], [])
    make(split, provider)
    before = split.listing()
    with refused(QueueError, "train file 0") as caught:
        rewind(split, 0, consumer, can_be_made_again=False)
    assert "checkpoint" in caught.value.remedy
    assert split.listing() == before
    rewind(split, 1, consumer, can_be_made_again=False)
    assert claim_next(split, consumer).number == 1


# Killed anywhere


def life(split: SplitFolder, provider: QueueMember, consumer: QueueMember, handed: list, recorded: list) -> None:
    """Two files made and read, a third one begun and given up, a fourth claimed and returned."""
    make(split, provider)
    make(split, provider)
    read(split, consumer, handed, recorded)
    give_up(split, begin(split, provider, 3))
    read(split, consumer, handed, recorded)
    make(split, provider)
    claim = claim_next(split, consumer)
    claim.record(0, 2)
    handed += [(claim.number, 0), (claim.number, 1)]
    give_back(split, claim)
    read(split, consumer, handed, recorded)


def test_killed_between_any_two_steps_no_row_is_lost_and_none_that_was_recorded_comes_again(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        whole = QueueFolder(tmp_path / "whole")
        whole.make(("train",))
        split, provider, consumer = open_split(whole), join(whole, "provider"), join(whole, "consumer")
        count = Kill(patch)
        life(split, provider, consumer, [], [])
    assert count.num_changes > 40
    for change in range(count.num_changes):
        queue = QueueFolder(tmp_path / str(change))
        queue.make(("train",))
        split, provider, consumer = open_split(queue), join(queue, "provider"), join(queue, "consumer")
        handed: list[tuple[int, int]] = []
        recorded: list[tuple[int, int]] = []
        with monkeypatch.context() as patch:
            Kill(patch, before_change=change)
            with contextlib.suppress(Killed):
                life(split, provider, consumer, handed, recorded)
        kill(provider)
        kill(consumer)
        again: list[tuple[int, int]] = []
        split, provider, consumer = open_split(queue), join(queue, "provider"), join(queue, "consumer")
        for _ in range(8):
            make(split, provider)
            read(split, consumer, again, [])
        counts = Counter(handed + again)
        numbers = range(1 + max(number for number, _ in counts))
        assert set(counts) == {(number, row) for number in numbers for row in range(ROWS)}, f"lost, at change {change}"
        assert not set(recorded) & set(again), f"recorded rows came again, at change {change}"
        for member in (provider, consumer):
            member.leave()
        assert not split.listing().making, f"somebody's part is left, at change {change}"
        assert not list(split.claimed.iterdir()), f"a claim is left, at change {change}"


# Members


def test_a_member_is_alive_until_it_leaves_and_dead_when_its_lock_is_gone(queue):
    liveness = Liveness(queue.who)
    first, second = join(queue, "provider"), join(queue, "consumer")
    assert [facts.id for facts in liveness.living("provider")] == [first.id]
    kill(first)
    assert liveness.living("provider") == []
    assert liveness.is_alive(second.id)
    second.leave()
    second.leave()
    assert not liveness.is_alive(second.id)
    assert liveness.ids() == [first.id]  # dead, and not yet buried
    liveness.remove_dead()
    assert liveness.ids() == []


def test_one_that_holds_its_lock_and_does_not_move_is_dead_after_its_lease_on_the_observers_clock(queue, monkeypatch):
    member = QueueMember(queue.who, "consumer", lease_seconds=1000)
    liveness, now = Liveness(queue.who), [50.0]
    monkeypatch.setattr("batchwright.queue.members.time.monotonic", lambda: now[0])
    assert liveness.is_alive(member.id)
    now[0] += 999
    assert liveness.is_alive(member.id)
    now[0] += 2
    assert not liveness.is_alive(member.id)
    member.beat()
    assert liveness.is_alive(member.id)


def as_if(queue: QueueFolder, member: QueueMember, **facts: str) -> None:
    """Let a member's file say something else."""
    path = queue.who / member.id
    content = path.read_bytes()
    for name, value in facts.items():
        content = content.replace(f'"{name}":"{getattr(member.facts, name)}"'.encode(), f'"{name}":"{value}"'.encode())
    path.write_bytes(content)


def test_one_of_another_machine_is_judged_by_its_counter_alone(queue, monkeypatch):
    member = QueueMember(queue.who, "consumer", lease_seconds=1000)
    kill(member)
    as_if(queue, member, boot="another", host="elsewhere")
    liveness, now = Liveness(queue.who), [50.0]
    monkeypatch.setattr("batchwright.queue.members.time.monotonic", lambda: now[0])
    assert liveness.is_alive(member.id)
    now[0] += 1001
    assert not liveness.is_alive(member.id)


def test_one_of_this_machine_before_it_was_started_again_is_dead_at_once(queue):
    split, provider, dead = open_split(queue), join(queue, "provider"), join(queue, "consumer")
    make(split, provider)
    claim_next(split, dead)
    kill(dead)
    as_if(queue, dead, boot="before")
    rewind(split, 0, join(queue, "consumer"), can_be_made_again=True)


@pytest.mark.parametrize("facts", [{"host": "renamed"}, {"boot": "before"}])
def test_one_that_holds_its_lock_is_alive_whatever_its_machine_was_called(queue, facts):
    member = join(queue, "consumer")
    as_if(queue, member, **facts)
    assert Liveness(queue.who).is_alive(member.id)


def test_a_wrong_clock_decides_nothing(queue, monkeypatch):
    for wrong in (0.0, 4e9):
        monkeypatch.setattr("batchwright.queue.members.time.time", lambda wrong=wrong: wrong)
        member = join(queue, "consumer")
        assert Liveness(queue.who).is_alive(member.id)
        os.utime(queue.who / member.id, (0, 0))
        assert Liveness(queue.who).is_alive(member.id)


def test_a_forked_child_does_not_keep_its_parents_member_alive(queue):
    member = join(queue, "consumer")
    (begun, say_begun), (ended, say_ended) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.close(say_ended)
        os.write(say_begun, b"1")
        os.read(ended, 1)  # until the parent has looked, or is gone
        os._exit(0 if not member.is_here else 1)
    try:
        os.read(begun, 1)
        kill(member)
        assert not Liveness(queue.who).is_alive(member.id)
    finally:
        os.close(say_ended)
        status = os.waitpid(child, 0)[1]
    assert status == 0


def test_what_a_provider_died_of_is_left_for_others(queue):
    member = join(queue, "provider")
    try:
        raise ValueError("low >= high\nand more")
    except ValueError as error:
        member.died(error, "train", 118)
    (death,) = read_failures(queue.who)
    line = test_what_a_provider_died_of_is_left_for_others.__code__.co_firstlineno + 3
    assert death.headline == (
        f"provider, pid {os.getpid()}, died making train file 118: ValueError: low >= high, test_queue_folder.py:{line}"
    )
    assert "and more" in death.traceback
