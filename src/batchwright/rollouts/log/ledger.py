"""The ledger of a rollout log: the state of every prompt, as a pure function of the journal's events.

A prompt has an ordinal: its number in the stream of prompts, epoch after epoch. Every ordinal below the cursor is in
exactly one place:

    in flight   leased to a process that generates
    again       waits to be leased again: its lease ended, it was given back, or its answer was stale
    waiting     answered, not decided on
    taken       decided: used by the trainer, as a group with a number
    dropped     decided: not used

`Ledger.apply` moves prompts between these places and decides nothing. Decisions are functions of a ledger, below it;
each returns an event for the journal. Nothing here reads a clock or a file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import islice
from typing import NamedTuple

import msgspec

from batchwright.base.errors import SampleError

# Events


class _Base(msgspec.Struct, array_like=True, frozen=True, gc=False):
    pass


class Begin(_Base, tag="begin", frozen=True):
    """The first record. It fixes the stream of prompts and the stream of uses."""

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
    """Leases that ended, then prompts leased to a process: `again`, and `num_fresh` from the cursor on."""

    at: float
    writer: str
    seconds: float
    died: list[int]
    """Leases that ended because their holder died."""
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
    """An answer that counts, and the place of its content."""

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
    """An answer that came after the one that counts."""

    at: float
    writer: str
    ordinal: int
    attempt: int
    policy_version: int | None


class Take(_Base, tag="take", frozen=True):
    """A decision on the first `num_judged` waiting groups. All but the `stale` ones are used."""

    at: float
    writer: str
    policy_version: int | None
    max_staleness: int | None
    num_judged: int
    stale: list[int]
    """Ordinals."""
    reissue: bool
    """Whether the prompts of stale groups are issued again. Otherwise they are dropped."""


class Drop(_Base, tag="drop", frozen=True):
    at: float
    writer: str
    ordinals: list[int]
    reason: str


Event = Begin | Lease | Renew | GiveBack | Add | Late | Take | Drop

encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Event)


def decode(payload: bytes) -> Event:
    """The event of a record. Other bytes are a Contradiction."""
    try:
        event: Event = _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Contradiction(f"this record is not an event: {error}") from None
    return event


# State

MOST_AT_ONCE = 1 << 20
"""Prompts of one lease."""


class Contradiction(ValueError):
    """An event that cannot have happened after those before it."""


class OpenLease(NamedTuple):
    """A lease that has not ended."""

    attempt: int
    writer: str
    since: float
    renewed: float
    until: float


class Ledger:
    """The place of every prompt after the events so far."""

    def __init__(self) -> None:
        self.begin: Begin | None = None
        self.cursor: int = 0
        """Ordinals below it were issued at least once."""
        self.in_flight: dict[int, OpenLease] = {}
        self.again: set[int] = set()
        self.waiting: dict[int, Add] = {}
        """By ordinal, in the order in which they were answered."""
        self.taken: list[Add] = []
        """By number of group."""
        self.dropped: dict[int, str] = {}
        """With the reason."""
        self.issued: dict[int, int] = {}
        """The number of times each prompt was issued, for prompts that are not taken or dropped."""
        self.void: dict[int, int] = {}
        """Attempts up to this one no longer count: one of them was answered and stale."""
        self.num_stale: int = 0
        self.num_late: int = 0
        self.decided_version: int | None = None
        """The trainer's highest policy version at a decision."""

    @property
    def first_event(self) -> Begin:
        assert self.begin is not None
        return self.begin

    def apply(self, event: Event) -> None:
        """Apply an event. A Contradiction means damage, and leaves the ledger unusable."""
        if isinstance(event, Begin) != (self.begin is None):
            raise Contradiction("the first event, and no other, says what the log is of")
        match event:
            case Begin():
                self.begin = event
            case Lease():
                self._lease(event)
            case Renew():
                self._renew(event)
            case GiveBack():
                self._end_lease(event.ordinal)
            case Add():
                self._add(event)
            case Late():
                self.num_late += 1
            case Take():
                self._take(event)
            case Drop():
                self._drop(event)

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
            self.in_flight[ordinal] = OpenLease(attempt, event.writer, event.at, event.at, until)

    def _renew(self, event: Renew) -> None:
        for ordinal in event.ordinals:
            lease = self.in_flight.get(ordinal)
            if lease is None or lease.writer != event.writer:
                raise Contradiction(f"a lease of prompt {ordinal:,} was renewed that is not there")
            self.in_flight[ordinal] = lease._replace(renewed=event.at, until=event.at + event.seconds)

    def _add(self, event: Add) -> None:
        if not accepts(self, event.ordinal, event.attempt):
            raise Contradiction(
                f"an answer to prompt {event.ordinal:,}, attempt {event.attempt}, that was not asked for"
            )
        if self.in_flight.pop(event.ordinal, None) is None:
            self._remove_from_again(event.ordinal)
        self.waiting[event.ordinal] = event

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
                self.again.add(ordinal)
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
        self.again.add(ordinal)

    def _remove_from_again(self, ordinal: int) -> None:
        if ordinal not in self.again:
            raise Contradiction(f"prompt {ordinal:,} is not one of those to be issued again")
        self.again.remove(ordinal)

    def _forget(self, ordinal: int) -> None:
        del self.issued[ordinal]
        self.void.pop(ordinal, None)


# Decisions


def accepts(ledger: Ledger, ordinal: int, attempt: int) -> bool:
    """Whether an answer would count: the prompt has none, and this attempt is newer than a stale one."""
    is_open = ordinal in ledger.in_flight or ordinal in ledger.again
    return is_open and ledger.void.get(ordinal, 0) < attempt <= ledger.issued[ordinal]


def failed_attempts(ledger: Ledger, ordinal: int) -> int:
    """The number of times that a prompt was issued since its last answer, without an answer."""
    return ledger.issued.get(ordinal, 0) - ledger.void.get(ordinal, 0)


def expired(ledger: Ledger, now: float, dead: Collection[str] = ()) -> tuple[list[int], list[int]]:
    """Ended leases that are not yet recorded as ended: (those of dead writers, those past their time)."""
    died, overdue = [], []
    for ordinal, lease in ledger.in_flight.items():
        if lease.writer in dead:
            died.append(ordinal)
        elif lease.until <= now:
            overdue.append(ordinal)
    return died, overdue


def num_fresh_left(ledger: Ledger) -> int | None:
    """Prompts that were never issued; None in endless epochs."""
    begin = ledger.first_event
    if begin.epochs is None:
        return None
    return begin.epochs * begin.num_prompts - ledger.cursor


def to_issue(
    ledger: Ledger, num_prompts: int, *, ended: Iterable[int] = (), ahead: int | None = None
) -> tuple[list[int], int]:
    """The next lease: (ordinals to issue again, lowest first; number of fresh prompts).

    `ended` has the leases that are over. Prompts are fresh only while fewer than `ahead` groups are requested and not
    taken.
    """
    ended = set(ended)
    every = sorted(ledger.again | ended)
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
    """Judge waiting groups in order until `num_groups` are taken in all. Returns None if none waits."""
    num_taken, num_judged, stale = len(ledger.taken), 0, []
    oldest = None
    if policy_version is not None and max_staleness is not None:
        oldest = policy_version - max_staleness
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
    """Whether no group will follow: every prompt was issued, and is taken or dropped."""
    return num_fresh_left(ledger) == 0 and not (ledger.in_flight or ledger.again or ledger.waiting)


def last_group(ledger: Ledger) -> int | None:
    """The final number of groups; None while it is unknown."""
    return len(ledger.taken) if is_over(ledger) else None
