"""What is in a rollout log, counted from its journal; and all that happened to one prompt. Nothing is written."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from batchwright.base.checks import at_least, local_path
from batchwright.base.errors import SpecError, StoreError
from batchwright.base.journal import read_records
from batchwright.rollouts.log.audit import Audit, audit
from batchwright.rollouts.log.folder import LogFolder, Place
from batchwright.rollouts.log.groups import decode_content
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
    decode,
    is_over,
)
from batchwright.rollouts.log.prompts import rows_of
from batchwright.rollouts.log.uses import Uses

__all__ = ["history", "ordinal_at", "status"]

Facts = dict[str, Any]


def status(path: str | os.PathLike[str], position: int | None = None) -> Facts:
    """Where all prompts are. With the position of a checkpoint, in rows: what that run has used, and what it will.

    `lost` are prompts that are nowhere, groups whose content is gone, and groups that the checkpoint used and the
    journal does not have. Both `lost` and `used_twice` are counted from the events, not from the ledger's state.
    """
    folder = _opened(path)
    try:
        return _status(folder, position)
    finally:
        folder.close()


def _status(folder: LogFolder, position: int | None) -> Facts:
    events = list(_events(folder))
    ledger = _replayed(folder, events)
    begin = ledger.begin
    assert begin is not None
    found = audit(event for _, event in events)
    gone = [
        ordinal
        for ordinal, answer in found.answers.items()
        if found.places[ordinal] in ("waiting", "taken")
        and not folder.has_group(answer.writer, Place(answer.offset, answer.num_bytes, answer.checksum))
    ]
    now = time.time()
    dead = folder.dead(held.writer for held in ledger.in_flight.values())
    facts: Facts = {
        "prompts": {name: getattr(begin, name) for name in Begin.__struct_fields__} | {"fingerprint": begin.prompts},
        "cursor": ledger.cursor,
        "in_flight": [
            {
                "ordinal": ordinal,
                "attempt": held.attempt,
                "holder": held.writer,
                "is_dead": held.writer in dead,
                "age_seconds": round(now - held.since, 3),
                "seconds_left": round(held.until - now, 3),
            }
            for ordinal, held in sorted(ledger.in_flight.items())
        ],
        "again": list(ledger.again),
        "waiting": len(ledger.waiting),
        "taken": len(ledger.taken),
        "stale": ledger.num_stale,
        "dropped": dict(sorted(ledger.dropped.items())),
        "late": ledger.num_late,
        "is_over": is_over(ledger),
        "journal": len(events),
        "lost": sorted({*found.lost, *gone}),
        "used_twice": found.used_twice,
    }
    del facts["prompts"]["prompts"]
    if position is not None:
        facts["checkpoint"] = _checkpoint(begin, found, at_least(0, position=position), is_over(ledger))
    return facts


def _checkpoint(begin: Begin, found: Audit, position: int, is_last: bool) -> Facts:
    """What a run that restores this position has used, and what it gets again."""
    uses = Uses(begin.samples_per_insert, begin.round_groups or 1, begin.seed)
    num_uses = -(-position // begin.group_size)
    known = uses.known(len(found.taken), is_last)
    needed = uses.groups_needed(num_uses, len(found.taken) if is_last else None)
    return {
        "position": position,
        "groups_used": min(needed, len(found.taken)),
        "groups_to_come": max(len(found.taken) - needed, 0),
        "missing": max(num_uses - known, 0),
    }


def history(path: str | os.PathLike[str], ordinal: int) -> Facts:
    """All that happened to one prompt, in order."""
    folder = _opened(path)
    try:
        return _history(folder, ordinal)
    finally:
        folder.close()


def _history(folder: LogFolder, ordinal: int) -> Facts:
    events = list(_events(folder))
    ledger = Ledger()
    told: list[Facts] = []
    for number, event in events:
        try:
            before = ledger.waiting.get(ordinal)
            num_taken = len(ledger.taken)
            waiting_before = list(ledger.waiting) if isinstance(event, Take) else []
            ledger.apply(event)
        except Contradiction as error:
            raise _damaged(folder, number, str(error)) from None
        told += [
            {"record": number, "at": getattr(event, "at", None), **line} for line in _lines(event, ordinal, ledger)
        ]
        if isinstance(event, Take) and before is not None and ordinal not in ledger.waiting:
            told.append({"record": number, "at": event.at, **_verdict(event, ordinal, waiting_before, num_taken)})
    begin = ledger.begin
    assert begin is not None
    if not 0 <= ordinal < ledger.cursor:
        raise SpecError(
            f"prompt {ordinal:,} was never issued",
            parameter="ordinal",
            folder=folder.path,
            remedy=f"an ordinal from 0 to {ledger.cursor - 1:,}" if ledger.cursor else "next_prompts issues the first",
        )
    (epoch,), (row,) = rows_of([ordinal], num_prompts=begin.num_prompts, seed=begin.seed, shuffle=begin.shuffle)
    answer = next((e for _, e in reversed(events) if isinstance(e, Add) and e.ordinal == ordinal), None)
    return {"ordinal": ordinal, "epoch": epoch, "row": row, "events": told, "answer": _answer(folder, begin, answer)}


def _answer(folder: LogFolder, begin: Begin, answer: Add | None) -> Facts | None:
    """What was asked, answered last, and what that was worth."""
    if answer is None:
        return None
    where = {"folder": folder.path, "writer": answer.writer, "ordinal": answer.ordinal}
    try:
        payload = folder.read_group(answer.writer, Place(answer.offset, answer.num_bytes, answer.checksum))
        content = decode_content(payload, begin.group_size, **where)
    except StoreError as error:  # what happened is known all the same
        return {"damaged": error.headline}
    rewards = [float(np.sum(reward)) for reward in content.rewards]
    return {"prompt": _plain(content.prompt), "responses": _plain(content.responses), "rewards": rewards}


def _plain(value: Any) -> Any:
    """What JSON has a word for."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return {name: _plain(each) for name, each in value.items()} if isinstance(value, dict) else value


def ordinal_at(path: str | os.PathLike[str], position: int) -> tuple[int, int]:
    """(prompt, number of its response) of the row at a position of the trainer's stream."""
    folder = _opened(path)
    try:
        ledger = _replayed(folder, list(_events(folder)))
    finally:
        folder.close()
    begin = ledger.begin
    assert begin is not None
    use, response = divmod(position, begin.group_size)
    uses = Uses(begin.samples_per_insert, begin.round_groups or 1, begin.seed)
    num_uses = uses.known(len(ledger.taken), is_over(ledger))
    if not 0 <= use < num_uses:
        raise SpecError(
            f"no row was taken at position {position:,}",
            parameter="position",
            folder=path,
            remedy=f"a position from 0 to {num_uses * begin.group_size - 1:,}" if num_uses else "take some first",
        )
    last_group = len(ledger.taken) if is_over(ledger) else None
    return ledger.taken[int(uses.at(np.array([use]), last_group)[0])].ordinal, response


def _lines(event: Event, ordinal: int, ledger: Ledger) -> Iterator[Facts]:
    """What an event says of a prompt; `ledger` is the state after it."""
    match event:
        case Lease():
            if ordinal in event.died:
                yield {"event": "lease ended", "reason": "its holder died"}
            if ordinal in event.overdue:
                yield {"event": "lease ended", "reason": "its time was up"}
            is_fresh = event.first_fresh <= ordinal < event.first_fresh + event.num_fresh
            if ordinal in event.again or is_fresh:
                attempt = ledger.issued[ordinal]
                yield {"event": "issued", "attempt": attempt, "holder": event.writer, "seconds": event.seconds}
        case Renew():
            if ordinal in event.ordinals:
                yield {"event": "lease renewed", "holder": event.writer}
        case GiveBack() if event.ordinal == ordinal:
            yield {"event": "given back", "attempt": event.attempt, "reason": event.reason}
        case Add() if event.ordinal == ordinal:
            yield {
                "event": "answered",
                "attempt": event.attempt,
                "holder": event.writer,
                "policy_version": event.policy_version,
                "num_bytes": event.num_bytes,
            }
        case Late() if event.ordinal == ordinal:
            yield {"event": "answered too late", "attempt": event.attempt, "holder": event.writer}
        case Drop() if ordinal in event.ordinals:
            yield {"event": "dropped", "reason": event.reason}


def _verdict(event: Take, ordinal: int, waiting: list[int], num_taken: int) -> Facts:
    told: Facts = {"policy_version": event.policy_version, "max_staleness": event.max_staleness}
    if ordinal in event.stale:
        return {"event": "stale: " + ("to be issued again" if event.reissue else "dropped"), **told}
    stale = set(event.stale)
    before = sum(1 for each in waiting[: waiting.index(ordinal)] if each not in stale)
    return {"event": "taken", "group": num_taken + before, **told}


def _opened(path: str | os.PathLike[str]) -> LogFolder:
    folder = LogFolder(local_path(path=path))
    if not folder.has_events():
        folder.close()
        raise StoreError("there is no rollout log here", folder=path, remedy="look for a mistake in the path")
    return folder


def _events(folder: LogFolder) -> Iterator[tuple[int, Event]]:
    for record in read_records(folder.ledger_path):
        try:
            yield record.number, decode(record.payload)
        except Contradiction as error:
            raise _damaged(folder, record.number, str(error)) from None


def _replayed(folder: LogFolder, events: list[tuple[int, Event]]) -> Ledger:
    ledger = Ledger()
    for number, event in events:
        try:
            ledger.apply(event)
        except Contradiction as error:
            raise _damaged(folder, number, str(error)) from None
    return ledger


def _damaged(folder: LogFolder, record: int, reason: str) -> StoreError:
    return StoreError(
        "this log is damaged",
        file=folder.ledger_path,
        record=record,
        reason=reason,
        remedy="restore the folder from a copy",
    )
