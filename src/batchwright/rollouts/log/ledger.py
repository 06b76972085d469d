"""Where every prompt of a rollout log is, as a function of the events that were written down, in their order.

A prompt has an ordinal: its number in the stream of prompts, epoch after epoch. Every ordinal below the cursor is in
exactly one place:

    in flight   leased to a process that generates
    again       to be leased again: its lease ended, it was given back, or its answer was stale
    waiting     answered; nobody decided yet whether it is used
    taken       decided: it is used, as group number so and so
    dropped     decided: it is not

`Ledger.apply` moves them; it decides nothing. What may be decided from a ledger are functions, each of which gives an
event to write down. Nothing here reads a clock or a file.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Iterable
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from batchwright.base.errors import SampleError

__all__ = [
    "MOST_AT_ONCE",
    "Add",
    "Begin",
    "Contradiction",
    "Drop",
    "Event",
    "GiveBack",
    "Held",
    "Late",
    "Lease",
    "Ledger",
    "Renew",
    "Take",
    "accepts",
    "decide",
    "decode",
    "encode",
    "expired",
    "failed_attempts",
    "is_over",
    "num_fresh_left",
    "to_issue",
]


# Events


class _Base(msgspec.Struct, array_like=True, frozen=True, gc=False):
    pass


class Begin(_Base, tag="begin", frozen=True):
    """The first record: what fixes the stream of prompts, and the stream of uses."""

    prompts: str
    """Fingerprint of their content."""
    num_prompts: int
    group_size: int
    seed: int
    shuffle: bool
    epochs: int | None
    samples_per_insert: int
    round_groups: int | None


class Lease(_Base, tag="lease", frozen=True):
    """Leases that ended, then prompts that a process was given: `again`, and `num_fresh` from the cursor on."""

    at: float
    writer: str
    seconds: float
    died: list[int]
    """Leases that ended because their holder did."""
    overdue: list[int]
    again: list[int]
    first_fresh: int
    num_fresh: int


class Renew(_Base, tag="renew", frozen=True):
    at: float
    writer: str
    seconds: float
    ordinals: list[int]


class GiveBack(_Base, tag="back", frozen=True):
    at: float
    writer: str
    ordinal: int
    attempt: int
    reason: str


class Add(_Base, tag="add", frozen=True):
    """An answer that counts, and where its content lies."""

    at: float
    writer: str
    ordinal: int
    attempt: int
    policy_version: int | None
    offset: int
    """In the writer's file of groups."""
    num_bytes: int
    checksum: int


class Late(_Base, tag="late", frozen=True):
    """An answer that came when another was there already."""

    at: float
    writer: str
    ordinal: int
    attempt: int
    policy_version: int | None


class Take(_Base, tag="take", frozen=True):
    """What was decided about the first `num_judged` waiting groups: all are used but the `stale` ones."""

    at: float
    writer: str
    policy_version: int | None
    max_staleness: int | None
    num_judged: int
    stale: list[int]
    """Ordinals."""
    reissue: bool
    """Whether the prompts of stale ones are asked again; else they are dropped."""


class Drop(_Base, tag="drop", frozen=True):
    at: float
    writer: str
    ordinals: list[int]
    reason: str


Event = Begin | Lease | Renew | GiveBack | Add | Late | Take | Drop

encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Event)


def decode(payload: bytes) -> Event:
    """The event of a record. A Contradiction says that it is none."""
    try:
        event: Event = _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Contradiction(f"this record is no event: {error}") from None
    return event


# State

MOST_AT_ONCE = 1 << 20
"""Prompts of one lease."""


class Contradiction(ValueError):
    """An event that cannot have happened after those before it."""


class Held(NamedTuple):
    """A lease that nobody ended yet."""

    attempt: int
    writer: str
    since: float
    renewed: float
    until: float


class Ledger:
    """What the events up to now come to."""

    def __init__(self) -> None:
        self.begin: Begin | None = None
        self.cursor: int = 0
        """Ordinals below it were issued at least once."""
        self.in_flight: dict[int, Held] = {}
        self.again: list[int] = []
        """In order."""
        self.waiting: dict[int, Add] = {}
        """By ordinal, in the order in which they were answered."""
        self.taken: list[Add] = []
        """By number of group."""
        self.dropped: dict[int, str] = {}
        """With the reason."""
        self.issued: dict[int, int] = {}
        """How often, of those that are not taken or dropped."""
        self.void: dict[int, int] = {}
        """Attempts up to this one no longer count: one of them was answered, and stale."""
        self.num_stale: int = 0
        self.num_late: int = 0
        self.num_events: int = 0
        self.decided_version: int | None = None
        """The trainer's highest policy version at a decision."""

    def apply(self, event: Event) -> None:
        """Move what the event moves. A Contradiction leaves the ledger unusable: it is damage."""
        if isinstance(event, Begin) != (self.begin is None):
            raise Contradiction("the first event, and no other, says what the log is of")
        _APPLY[type(event)](self, event)
        self.num_events += 1

    # One method for each kind of event

    def _begin(self, event: Begin) -> None:
        self.begin = event

    def _lease(self, event: Lease) -> None:
        for ordinal in (*event.died, *event.overdue):
            self._end_lease(ordinal)
        if event.first_fresh != self.cursor or not 0 <= event.num_fresh <= MOST_AT_ONCE:
            raise Contradiction(f"prompt {event.first_fresh:,} was issued where prompt {self.cursor:,} was next")
        for ordinal in event.again:
            self._remove_from_again(ordinal)
        until = event.at + event.seconds
        self.cursor += event.num_fresh
        for ordinal in (*event.again, *range(event.first_fresh, self.cursor)):
            attempt = self.issued.get(ordinal, 0) + 1
            self.issued[ordinal] = attempt
            self.in_flight[ordinal] = Held(attempt, event.writer, event.at, event.at, until)

    def _renew(self, event: Renew) -> None:
        for ordinal in event.ordinals:
            held = self.in_flight.get(ordinal)
            if held is None or held.writer != event.writer:
                raise Contradiction(f"a lease of prompt {ordinal:,} was renewed that is not there")
            self.in_flight[ordinal] = held._replace(renewed=event.at, until=event.at + event.seconds)

    def _give_back(self, event: GiveBack) -> None:
        self._end_lease(event.ordinal)

    def _add(self, event: Add) -> None:
        if not accepts(self, event.ordinal, event.attempt):
            raise Contradiction(
                f"an answer to prompt {event.ordinal:,}, attempt {event.attempt}, that nobody asked for"
            )
        if self.in_flight.pop(event.ordinal, None) is None:
            self._remove_from_again(event.ordinal)
        self.waiting[event.ordinal] = event

    def _late(self, event: Late) -> None:
        self.num_late += 1

    def _take(self, event: Take) -> None:
        if not 0 <= event.num_judged <= len(self.waiting):
            raise Contradiction(f"{event.num_judged:,} groups were judged, and {len(self.waiting):,} waited")
        stale = set(event.stale)
        for ordinal in list(islice(self.waiting, event.num_judged)):
            answer = self.waiting.pop(ordinal)
            if ordinal not in stale:
                self.taken.append(answer)
                self._forget(ordinal)
            elif event.reissue:
                self.void[ordinal] = self.issued[ordinal]
                bisect.insort(self.again, ordinal)
            else:
                self.dropped[ordinal] = "stale"
                self._forget(ordinal)
            stale.discard(ordinal)
        if stale:
            raise Contradiction(f"group of prompt {min(stale):,} was judged, and did not wait")
        self.num_stale += len(event.stale)
        if event.policy_version is not None:
            self.decided_version = max(event.policy_version, self.decided_version or 0)

    def _drop(self, event: Drop) -> None:
        for ordinal in event.ordinals:
            if self.in_flight.pop(ordinal, None) is None and self.waiting.pop(ordinal, None) is None:
                self._remove_from_again(ordinal)
            self.dropped[ordinal] = event.reason
            self._forget(ordinal)

    def _end_lease(self, ordinal: int) -> None:
        if self.in_flight.pop(ordinal, None) is None:
            raise Contradiction(f"a lease of prompt {ordinal:,} ended that is not there")
        bisect.insort(self.again, ordinal)

    def _remove_from_again(self, ordinal: int) -> None:
        at = bisect.bisect_left(self.again, ordinal)
        if at == len(self.again) or self.again[at] != ordinal:
            raise Contradiction(f"prompt {ordinal:,} is not one of those to be issued again")
        del self.again[at]

    def _forget(self, ordinal: int) -> None:
        del self.issued[ordinal]
        self.void.pop(ordinal, None)


_APPLY: dict[type, Callable[[Ledger, Any], None]] = {
    Begin: Ledger._begin,
    Lease: Ledger._lease,
    Renew: Ledger._renew,
    GiveBack: Ledger._give_back,
    Add: Ledger._add,
    Late: Ledger._late,
    Take: Ledger._take,
    Drop: Ledger._drop,
}


# Decisions


def accepts(ledger: Ledger, ordinal: int, attempt: int) -> bool:
    """Whether an answer would count: the prompt has none, and this attempt is newer than a stale one."""
    is_open = ordinal in ledger.in_flight or _is_again(ledger, ordinal)
    return is_open and ledger.void.get(ordinal, 0) < attempt <= ledger.issued[ordinal]


def _is_again(ledger: Ledger, ordinal: int) -> bool:
    at = bisect.bisect_left(ledger.again, ordinal)
    return at < len(ledger.again) and ledger.again[at] == ordinal


def failed_attempts(ledger: Ledger, ordinal: int) -> int:
    """How often a prompt was issued since its last answer, without one."""
    return ledger.issued.get(ordinal, 0) - ledger.void.get(ordinal, 0)


def expired(ledger: Ledger, now: float, dead: Collection[str] = ()) -> tuple[list[int], list[int]]:
    """Leases that are over, though nobody wrote it down: (those of dead writers, those whose time is up)."""
    died, overdue = [], []
    for ordinal, held in ledger.in_flight.items():
        if held.writer in dead:
            died.append(ordinal)
        elif held.until <= now:
            overdue.append(ordinal)
    return died, overdue


def num_fresh_left(ledger: Ledger) -> int | None:
    """Prompts that were never issued; None where there is no end of them."""
    assert ledger.begin is not None
    epochs = ledger.begin.epochs
    return None if epochs is None else epochs * ledger.begin.num_prompts - ledger.cursor


def to_issue(
    ledger: Ledger, num_prompts: int, *, ended: Iterable[int] = (), ahead: int | None = None
) -> tuple[list[int], int]:
    """What to lease: (ordinals once more, the lowest first; how many fresh ones).

    `ended` are leases that are over. Fresh ones only while fewer than `ahead` groups are asked for and not taken.
    """
    ended = set(ended)
    every = sorted((*ledger.again, *ended))
    again = every[:num_prompts]
    num_fresh = num_prompts - len(again)
    left = num_fresh_left(ledger)
    if left is not None:
        num_fresh = min(num_fresh, left)
    if ahead is not None:
        num_asked = len(ledger.in_flight) - len(ended) + len(every) + len(ledger.waiting)
        num_fresh = max(0, min(num_fresh, ahead - num_asked))
    return again, num_fresh


def decide(
    ledger: Ledger,
    num_groups: int,
    *,
    policy_version: int | None,
    max_staleness: int | None,
    reissue: bool,
    at: float,
    writer: str,
) -> Take | None:
    """Judge waiting groups, in order, until `num_groups` are taken in all; None where there is nothing to decide."""
    num_taken, num_judged, stale = len(ledger.taken), 0, []
    oldest = None if policy_version is None or max_staleness is None else policy_version - max_staleness
    for ordinal, answer in ledger.waiting.items():
        if num_taken >= num_groups:
            break
        num_judged += 1
        if oldest is not None and _version_of(answer) < oldest:
            stale.append(ordinal)
        else:
            num_taken += 1
    if not num_judged:
        return None
    return Take(at, writer, policy_version, max_staleness, num_judged, stale, reissue)


def _version_of(answer: Add) -> int:
    if answer.policy_version is None:
        raise SampleError(
            "a group without a policy version cannot be judged by its age",
            ordinal=answer.ordinal,
            column="policy_version",
            remedy="log.add(..., policy_version=...) where it is generated; this one: log.drop(ordinal, reason=...), "
            "or max_staleness=None",
        )
    return answer.policy_version


def is_over(ledger: Ledger) -> bool:
    """Whether there will never be another group: everything was issued, and is taken or dropped."""
    return num_fresh_left(ledger) == 0 and not (ledger.in_flight or ledger.again or ledger.waiting)
