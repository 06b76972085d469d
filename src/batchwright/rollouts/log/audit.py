"""An independent count of prompts, from the events alone and without the ledger's rules: a check on them.

The ledger refuses impossible events. This module only counts, so it can find that a prompt was lost or used twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from batchwright.rollouts.log.ledger import Add, Drop, Event, GiveBack, Lease, Take

__all__ = ["Audit", "audit"]


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
