"""The ledger: every prompt that was issued is in exactly one place, whatever happened in whatever order."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.base.errors import SampleError
from batchwright.rollouts.log.ledger import (
    Add,
    Begin,
    Contradiction,
    Drop,
    Event,
    GiveBack,
    Late,
    Lease,
    Ledger,
    Renew,
    Take,
    accepts,
    decide,
    decode,
    encode,
    expired,
    failed_attempts,
    is_over,
    to_issue,
)
from refusals import refused

BEGIN = Begin("prompts", 4, 2, 0, True, 2, 1, None)
"""8 ordinals: 4 prompts, twice."""


def ledger_after(*events: Event, begin: Begin = BEGIN) -> Ledger:
    ledger = Ledger()
    for event in (begin, *events):
        ledger.apply(decode(encode(event)))
    return ledger


def lease(first: int, num_fresh: int, again=(), *, at=0.0, writer="w", seconds=10.0, died=(), overdue=()) -> Lease:
    return Lease(at, writer, seconds, list(died), list(overdue), list(again), first, num_fresh)


def answer(ordinal: int, attempt: int = 1, version: int | None = None, offset: int = 0) -> Add:
    return Add(0.0, "w", ordinal, attempt, version, offset, 1, 0)


def take(num_judged: int, *stale: int, reissue: bool = True, version: int | None = None) -> Take:
    return Take(0.0, "w", version, None, num_judged, list(stale), reissue)


def places(ledger: Ledger) -> dict[int, list[str]]:
    """Every ordinal below the cursor, with all places that it is in."""
    found: dict[int, list[str]] = {ordinal: [] for ordinal in range(ledger.cursor)}
    for name in ("in_flight", "again", "waiting", "dropped"):
        for ordinal in getattr(ledger, name):
            found[ordinal].append(name)
    for group in ledger.taken:
        found[group.ordinal].append("taken")
    return found


# Random histories


def histories(draw: random.Random, num_steps: int) -> Iterator[tuple[Event, Ledger]]:
    """Events that may follow each other, and the ledger after each: generators die, dawdle and come back late."""
    ledger = ledger_after()
    now, dead, jobs, version = 0.0, set(), [], 0
    for step in range(num_steps):
        now += draw.random() * 4
        version += draw.random() < 0.2
        kind = draw.choice(("issue", "issue", "add", "add", "add", "take", "take", "back", "renew", "die", "drop"))
        event: Event | None = None
        if kind == "issue":
            died, overdue = expired(ledger, now, dead)
            again, fresh = to_issue(ledger, draw.randint(1, 3), ended=(*died, *overdue), ahead=draw.choice((None, 4)))
            writer = f"w{step}" if draw.random() < 0.3 else "w"
            event = lease(ledger.cursor, fresh, again, at=now, writer=writer, seconds=5.0, died=died, overdue=overdue)
        elif kind == "add" and jobs:
            ordinal, attempt = draw.choice(jobs)  # those that were answered before, too: stragglers
            late = Late(now, "w", ordinal, attempt, version)
            old = max(0, version - draw.randint(0, 3))
            event = answer(ordinal, attempt, old, step) if accepts(ledger, ordinal, attempt) else late
        elif kind == "take":
            event = decide(
                ledger,
                len(ledger.taken) + draw.randint(0, 3),
                policy_version=version,
                max_staleness=1,
                reissue=draw.random() < 0.7,
                at=now,
                writer="w",
            )
        elif kind == "back" and ledger.in_flight:
            ordinal = draw.choice(list(ledger.in_flight))
            event = GiveBack(now, "w", ordinal, ledger.in_flight[ordinal].attempt, "")
        elif kind == "renew":
            mine = [ordinal for ordinal, held in ledger.in_flight.items() if held.writer == "w"]
            event = Renew(now, "w", 5.0, mine)
        elif kind == "die":
            dead.add(draw.choice(["x", *(held.writer for held in ledger.in_flight.values() if held.writer != "w")]))
        elif kind == "drop" and ledger.issued and draw.random() < 0.3:
            event = Drop(now, "w", [draw.choice(list(ledger.issued))], "")
        if event is not None:
            ledger.apply(event)
            if isinstance(event, Lease):
                issued = (*event.again, *range(event.first_fresh, ledger.cursor))
                jobs += [(ordinal, ledger.in_flight[ordinal].attempt) for ordinal in issued]
            yield event, ledger


# The audit: a count of the events alone, without the rules of the ledger, as a check on them


@dataclass(slots=True)
class Audit:
    """The place of each prompt after its last event, and the groups that were used."""

    places: dict[int, str] = field(default_factory=dict)
    """By ordinal: in flight, again, waiting, taken or dropped."""
    answers: dict[int, Add] = field(default_factory=dict)
    """By ordinal: the last one."""
    waiting: dict[int, None] = field(default_factory=dict)
    """Ordinals, in the order in which they were answered."""
    taken: list[int] = field(default_factory=list)
    """Ordinals, in the order of use."""
    contents: Counter[tuple[str, int]] = field(default_factory=Counter)
    """The number of times each group was taken, by the place of its content."""

    @property
    def cursor(self) -> int:
        return max(self.places, default=-1) + 1

    @property
    def lost(self) -> list[int]:
        """Prompts without a place, before one that was issued."""
        return [ordinal for ordinal in range(self.cursor) if ordinal not in self.places]

    @property
    def used_twice(self) -> list[int]:
        """Prompts with several taken groups, or with one group that was taken twice."""
        twice = {ordinal for ordinal, count in Counter(self.taken).items() if count > 1}
        again = {place for place, count in self.contents.items() if count > 1}
        twice |= {ordinal for ordinal, answer in self.answers.items() if (answer.writer, answer.offset) in again}
        return sorted(twice)


def audit(events: Iterable[Event]) -> Audit:
    """Count the events, without the ledger's checks."""
    found = Audit()
    places = found.places
    for event in events:
        match event:
            case Lease():
                for ordinal in (*event.died, *event.overdue):
                    places[ordinal] = "again"
                for ordinal in (*event.again, *range(event.first_fresh, event.first_fresh + event.num_fresh)):
                    places[ordinal] = "in flight"
            case GiveBack():
                places[event.ordinal] = "again"
            case Add():
                places[event.ordinal] = "waiting"
                found.answers[event.ordinal] = event
                found.waiting[event.ordinal] = None
            case Drop():
                for ordinal in event.ordinals:
                    places[ordinal] = "dropped"
                    found.waiting.pop(ordinal, None)
            case Take():
                _take(found, event)
    return found


def _take(found: Audit, event: Take) -> None:
    stale = set(event.stale)
    for ordinal in list(islice(found.waiting, event.num_judged)):
        del found.waiting[ordinal]
        if ordinal in stale:
            found.places[ordinal] = "again" if event.reissue else "dropped"
        else:
            answer = found.answers[ordinal]
            found.places[ordinal] = "taken"
            found.taken.append(ordinal)
            found.contents[answer.writer, answer.offset] += 1


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 120))
def test_every_ordinal_below_the_cursor_is_always_in_exactly_one_place(seed, num_steps):
    events: list[Event] = [BEGIN]
    for event, ledger in histories(random.Random(seed), num_steps):
        events.append(event)
        assert all(len(where) == 1 for where in places(ledger).values()), places(ledger)
        assert set(ledger.issued) == {*ledger.in_flight, *ledger.again, *ledger.waiting}
        found = audit(events)
        assert (found.lost, found.used_twice, found.cursor) == ([], [], ledger.cursor)
        assert found.taken == [group.ordinal for group in ledger.taken]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 120))
def test_the_events_alone_give_the_same_ledger_again(seed, num_steps):
    events, last = [], ledger_after()
    for event, ledger in histories(random.Random(seed), num_steps):
        events.append(event)
        last = ledger
    assert vars(ledger_after(*events)) == vars(last)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32))
def test_no_answer_is_accepted_twice_and_no_stale_one_used(seed):
    answered: set[tuple[int, int]] = set()
    for event, ledger in histories(random.Random(seed), 150):
        if isinstance(event, Add):
            assert (event.ordinal, event.attempt) not in answered
            answered.add((event.ordinal, event.attempt))
        if isinstance(event, Take) and event.policy_version is not None:
            used = ledger.taken[len(ledger.taken) - event.num_judged + len(event.stale) :]
            assert all(group.policy_version >= event.policy_version - 1 for group in used)


# Leases


def test_what_must_be_issued_again_comes_first_and_lowest_first_then_fresh_ones():
    ledger = ledger_after(lease(0, 4), GiveBack(0.0, "w", 3, 1, ""), GiveBack(0.0, "w", 1, 1, ""))
    assert to_issue(ledger, 3) == ([1, 3], 1)
    assert to_issue(ledger, 4, ended=[0]) == ([0, 1, 3], 1)
    assert to_issue(ledger, 1) == ([1], 0)


def test_fresh_prompts_end_with_the_last_epoch_or_never():
    assert to_issue(ledger_after(lease(0, 7)), 5) == ([], 1)
    assert to_issue(ledger_after(lease(0, 7), begin=Begin("p", 4, 2, 0, True, None, 1, None)), 5) == ([], 5)


def test_fresh_prompts_wait_while_enough_groups_are_asked_for_and_not_taken():
    asked = lease(0, 3), answer(0), GiveBack(0.0, "w", 1, 1, "")
    assert to_issue(ledger_after(*asked), 9, ahead=4) == ([1], 1)
    assert to_issue(ledger_after(*asked), 9, ahead=3) == ([1], 0)
    assert to_issue(ledger_after(*asked, take(1)), 9, ahead=3) == ([1], 1)


def test_a_lease_ends_when_its_time_is_up_or_its_holder_died():
    ledger = ledger_after(lease(0, 2, seconds=10.0), lease(2, 1, writer="other", seconds=99.0))
    assert expired(ledger, 9.0) == ([], [])
    assert expired(ledger, 10.0) == ([], [0, 1])
    assert expired(ledger, 10.0, {"other"}) == ([2], [0, 1])
    ledger.apply(Renew(8.0, "w", 10.0, [1]))
    assert expired(ledger, 10.0) == ([], [0])


def test_attempts_count_up_and_failed_ones_count_anew_after_a_stale_answer():
    ledger = ledger_after(lease(0, 1), lease(1, 0, [0], overdue=[0]))
    assert (ledger.in_flight[0].attempt, failed_attempts(ledger, 0)) == (2, 2)
    for event in (answer(0, 2, 0), take(1, 0), lease(1, 0, [0])):
        ledger.apply(event)
    assert (ledger.in_flight[0].attempt, failed_attempts(ledger, 0)) == (3, 1)


# Answers


def test_the_first_answer_counts_whichever_attempt_it_is_of():
    ledger = ledger_after(lease(0, 1), lease(1, 0, [0], overdue=[0]))
    assert accepts(ledger, 0, 1)
    assert accepts(ledger, 0, 2)
    ledger.apply(answer(0, 1))
    assert not accepts(ledger, 0, 2)


def test_an_answer_counts_between_the_end_of_a_lease_and_the_next():
    assert accepts(ledger_after(lease(0, 1), GiveBack(0.0, "w", 0, 1, "")), 0, 1)


def test_attempts_from_before_a_stale_answer_do_not_count_any_more():
    ledger = ledger_after(lease(0, 1), lease(1, 0, [0], overdue=[0]), answer(0, 2), take(1, 0))
    assert not accepts(ledger, 0, 1)
    assert not accepts(ledger, 0, 2)
    ledger.apply(lease(1, 0, [0]))
    assert accepts(ledger, 0, 3)


@pytest.mark.parametrize(("ordinal", "attempt"), [(0, 2), (0, 0), (5, 1), (-1, 1)])
def test_answers_that_nobody_asked_for_do_not_count(ordinal, attempt):
    assert not accepts(ledger_after(lease(0, 1)), ordinal, attempt)


# Decisions


def decided(ledger: Ledger, num_groups: int, version: int | None = None, staleness: int | None = None) -> Take | None:
    return decide(ledger, num_groups, policy_version=version, max_staleness=staleness, reissue=True, at=0.0, writer="w")


def test_groups_are_decided_in_the_order_of_the_journal_and_never_more_than_asked():
    ledger = ledger_after(lease(0, 3), answer(2), answer(0), answer(1))
    for num_groups in (1, 1, 3):
        event = decided(ledger, num_groups)
        if event is not None:
            ledger.apply(event)
        assert len(ledger.taken) == num_groups
    assert [group.ordinal for group in ledger.taken] == [2, 0, 1]


def test_stale_groups_are_passed_over_and_their_prompts_asked_again():
    ledger = ledger_after(lease(0, 3), answer(0, 1, 7), answer(1, 1, 8), answer(2, 1, 9))
    event = decided(ledger, 2, version=10, staleness=2)
    assert (event.num_judged, event.stale) == (3, [0])
    ledger.apply(event)
    assert ([group.ordinal for group in ledger.taken], ledger.again, ledger.num_stale) == ([1, 2], {0}, 1)


def test_stale_groups_are_dropped_where_that_was_decided():
    ledger = ledger_after(lease(0, 1), answer(0, 1, 0), take(1, 0, reissue=False))
    assert (ledger.again, ledger.dropped) == (set(), {0: "stale"})


def test_a_group_of_unknown_age_cannot_be_judged_by_it():
    ledger = ledger_after(lease(0, 1), answer(0, 1, None))
    with refused(SampleError, ordinal=0, column="policy_version", remedy="max_staleness=None"):
        decided(ledger, 1, version=3, staleness=1)
    assert decided(ledger, 1, version=3) is not None


def test_a_log_is_over_when_everything_was_issued_and_is_taken_or_dropped():
    ledger = ledger_after(lease(0, 8), *(answer(n) for n in range(7)), take(7))
    assert not is_over(ledger)
    ledger.apply(Drop(0.0, "w", [7], "no"))
    assert is_over(ledger)


# Events that cannot have been


@pytest.mark.parametrize(
    "event",
    [
        BEGIN,
        lease(5, 1),
        lease(2, -1),
        lease(2, 1, [0]),
        lease(2, 1, died=[7]),
        Renew(0.0, "other", 1.0, [0]),
        Renew(0.0, "w", 1.0, [6]),
        GiveBack(0.0, "w", 6, 1, ""),
        answer(0, 2),
        answer(1, 1),
        take(2),
        take(1, 0),
        Drop(0.0, "w", [6], ""),
    ],
)
def test_an_event_that_contradicts_those_before_it_is_refused(event):
    with pytest.raises(Contradiction):
        ledger_after(lease(0, 2), answer(1), event)


def test_a_ledger_begins_with_what_it_is_of():
    with refused(Contradiction, "first"):
        Ledger().apply(lease(0, 1))


@pytest.mark.parametrize("payload", [b"", b"\xc1", encode(["lease", 1]), encode(["unknown"]), encode({"a": 1})])
def test_a_record_that_is_no_event_is_refused(payload):
    with refused(Contradiction, "record"):
        decode(payload)


# The audit itself can find something


def test_the_audit_counts_what_was_lost():
    assert audit([BEGIN, lease(0, 2), lease(3, 1)]).lost == [2]


@pytest.mark.parametrize(
    "events",
    [
        [lease(0, 1), answer(0), take(1), answer(0, 1, None, 5), take(1)],
        [lease(0, 2), answer(0), answer(1, 1, None, 0), take(2)],
    ],
    ids=["one prompt answered twice", "one content for two prompts"],
)
def test_the_audit_counts_what_was_used_twice(events):
    assert 0 in audit([BEGIN, *events]).used_twice
