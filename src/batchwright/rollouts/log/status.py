"""The contents of a rollout log, counted from its journal, and the history of one prompt. Nothing is written."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np

from batchwright.base.checks import at_least, local_path
from batchwright.base.errors import SpecError, StoreError
from batchwright.base.journal import Record, read_records
from batchwright.rollouts.log import ledger as rules
from batchwright.rollouts.log.folder import LogFolder
from batchwright.rollouts.log.jobs import read_answer
from batchwright.rollouts.log.ledger import Add, Begin, Event, GiveBack, Late, Ledger, Take
from batchwright.rollouts.log.shared_ledger import replayed
from batchwright.rollouts.log.stream import rounds_of, rows_of

__all__ = ["history", "ordinal_at", "status"]

Facts = dict[str, Any]


def status(path: str | os.PathLike[str], position: int | None = None) -> Facts:
    """The places of all prompts. With the position of a checkpoint, in rows, also the groups its run used and will use.

    `lost` has prompts without a place, and groups whose content is gone. `used_twice` has prompts that were taken
    twice, and prompts whose groups have the same content.
    """
    with _opened(path) as folder:
        ledger = Ledger()
        num_events = sum(1 for _ in _replay(folder, ledger))
        begin, is_over = ledger.first_event, rules.is_over(ledger)
        settings = msgspec.structs.asdict(begin)
        facts: Facts = {
            "prompts": {"fingerprint": settings.pop("prompts"), **settings},
            "cursor": ledger.cursor,
            "in_flight": _open_leases(folder, ledger),
            "again": sorted(ledger.again),
            "waiting": len(ledger.waiting),
            "taken": len(ledger.taken),
            "stale": ledger.num_stale,
            "dropped": dict(sorted(ledger.dropped.items())),
            "late": ledger.num_late,
            "is_over": is_over,
            "journal": num_events,
            "lost": _lost(folder, ledger),
            "used_twice": _used_twice(ledger.taken),
        }
        if position is not None:
            facts["checkpoint"] = _checkpoint(begin, len(ledger.taken), at_least(0, position=position), is_over)
        return facts


def _lost(folder: LogFolder, ledger: Ledger) -> list[int]:
    answers = [*ledger.waiting.values(), *ledger.taken]
    placed = {*ledger.in_flight, *ledger.again, *ledger.dropped}
    placed |= {answer.ordinal for answer in answers if folder.has_group(answer)}
    return [ordinal for ordinal in range(ledger.cursor) if ordinal not in placed]


def _used_twice(taken: Sequence[Add]) -> list[int]:
    ordinals = Counter(answer.ordinal for answer in taken)
    contents = Counter((answer.writer, answer.offset) for answer in taken)
    return sorted({a.ordinal for a in taken if ordinals[a.ordinal] > 1 or contents[a.writer, a.offset] > 1})


def _open_leases(folder: LogFolder, ledger: Ledger) -> list[Facts]:
    now = time.time()
    dead = folder.dead(lease.writer for lease in ledger.in_flight.values())
    return [
        {
            "ordinal": ordinal,
            "attempt": lease.attempt,
            "holder": lease.writer,
            "is_dead": lease.writer in dead,
            "age_seconds": round(now - lease.since, 3),
            "seconds_left": round(lease.until - now, 3),
        }
        for ordinal, lease in sorted(ledger.in_flight.items())
    ]


def _checkpoint(begin: Begin, num_taken: int, position: int, is_last: bool) -> Facts:
    """The groups used by a run that restores this position, and those that it gets again."""
    rounds = rounds_of(begin)
    num_uses = -(-position // begin.group_size)
    used = min(rounds.groups_needed(num_uses), num_taken)
    return {
        "position": position,
        "groups_used": used,
        "groups_to_come": num_taken - used,
        "missing": max(num_uses - rounds.num_uses(num_taken, is_last), 0),
    }


def history(path: str | os.PathLike[str], ordinal: int) -> Facts:
    """The history of one prompt, in order, and its last answer."""
    with _opened(path) as folder:
        ledger, lines, answer, num_taken = Ledger(), [], None, 0
        for record, event in _replay(folder, ledger):
            when = {"record": record.number, "at": getattr(event, "at", None)}
            lines += [{**when, **line} for line in _lines(event, ordinal, ledger, num_taken)]
            if isinstance(event, Add) and event.ordinal == ordinal:
                answer = event
            num_taken = len(ledger.taken)
        if not 0 <= ordinal < ledger.cursor:
            what, remedy = f"prompt {ordinal:,} was never issued", "next_prompts issues the first"
            if ledger.cursor:
                remedy = f"an ordinal below {ledger.cursor:,}"
            raise SpecError(what, parameter="ordinal", folder=folder.path, remedy=remedy)
        begin = ledger.first_event
        (epoch,), (row,) = rows_of([ordinal], begin)
        facts: Facts = {"ordinal": ordinal, "epoch": epoch, "row": row, "events": lines, "answer": None}
        if answer is not None:
            facts["answer"] = _content(folder, answer, begin.group_size)
        return facts


def _content(folder: LogFolder, answer: Add, group_size: int) -> Facts:
    """The prompt, its responses and their rewards."""
    try:
        group = read_answer(folder, answer, group_size)
    except StoreError as error:  # the history is known without the content
        return {"damaged": error.headline}
    rewards = [float(np.sum(reward)) for reward in group.rewards]
    return {"prompt": _as_json(group.prompt), "responses": _as_json(group.responses), "rewards": rewards}


def _as_json(value: Any) -> Any:
    return msgspec.to_builtins(value, enc_hook=lambda array: array.tolist())


def ordinal_at(path: str | os.PathLike[str], position: int) -> tuple[int, int]:
    """(prompt, number of its response) of the row at a position of the trainer's stream."""
    with _opened(path) as folder:
        ledger = Ledger()
        for _ in _replay(folder, ledger):
            pass
    begin = ledger.first_event
    use, response = divmod(position, begin.group_size)
    rounds = rounds_of(begin)
    num_uses = rounds.num_uses(len(ledger.taken), rules.is_over(ledger))
    if not 0 <= use < num_uses:
        what, remedy = f"no row was taken at position {position:,}", "take some first"
        if num_uses:
            remedy = f"a position below {num_uses * begin.group_size:,}"
        raise SpecError(what, parameter="position", folder=path, remedy=remedy)
    (group,) = rounds.group_of(np.array([use]), rules.last_group(ledger)).tolist()
    return ledger.taken[group].ordinal, response


def _lines(event: Event, ordinal: int, ledger: Ledger, num_taken: int) -> Iterator[Facts]:
    """The lines of one event in the history of a prompt. `ledger` is the state after it, `num_taken` the one before."""
    match event:
        case rules.Lease():
            yield from _lease_lines(event, ordinal, ledger)
        case rules.Renew() if ordinal in event.ordinals:
            yield {"event": "lease renewed", "holder": event.writer}
        case rules.Drop() if ordinal in event.ordinals:
            yield {"event": "dropped", "reason": event.reason}
        case Take():
            yield from _judgements(event, ordinal, [answer.ordinal for answer in ledger.taken[num_taken:]], num_taken)
        case GiveBack(ordinal=each) | Add(ordinal=each) | Late(ordinal=each) if each == ordinal:
            yield _answer_line(event)


def _lease_lines(event: rules.Lease, ordinal: int, ledger: Ledger) -> Iterator[Facts]:
    if ordinal in event.died:
        yield {"event": "lease ended", "reason": "its holder died"}
    if ordinal in event.overdue:
        yield {"event": "lease ended", "reason": "its time was up"}
    if ordinal in event.again or event.first_fresh <= ordinal < event.first_fresh + event.num_fresh:
        attempt = ledger.issued[ordinal]
        yield {"event": "issued", "attempt": attempt, "holder": event.writer, "seconds": event.seconds}


def _answer_line(event: GiveBack | Add | Late) -> Facts:
    match event:
        case GiveBack():
            return {"event": "given back", "attempt": event.attempt, "reason": event.reason}
        case Late():
            return {"event": "answered too late", "attempt": event.attempt, "holder": event.writer}
    names = ("attempt", "policy_version", "num_bytes")
    return {"event": "answered", "holder": event.writer, **{name: getattr(event, name) for name in names}}


def _judgements(event: Take, ordinal: int, taken: list[int], num_taken: int) -> Iterator[Facts]:
    judged_by = {"policy_version": event.policy_version, "max_staleness": event.max_staleness}
    if ordinal in event.stale:
        fate = "to be issued again" if event.reissue else "dropped"
        yield {"event": f"stale: {fate}", **judged_by}
    elif ordinal in taken:
        yield {"event": "taken", "group": num_taken + taken.index(ordinal), **judged_by}


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[LogFolder]:
    folder = LogFolder(local_path(path=path))
    try:
        if not folder.has_events():
            raise StoreError("there is no rollout log here", folder=path, remedy="look for a mistake in the path")
        yield folder
    finally:
        folder.close()


def _replay(folder: LogFolder, ledger: Ledger) -> Iterator[tuple[Record, Event]]:
    return replayed(folder, ledger, read_records(folder.ledger_path))
