"""A buffer that is written to step by step: its number alone says what is in it. Tests kill it at any moment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import batchwright as bw
from batchwright.buffer import durable
from harness import say

SETTINGS: dict[str, Any] = {"max_size": 60, "drop_strategy": "random", "seed": 5}
EVERY, KEPT = 7, 21
"""A commit every so many changes; one is let go of after so many."""


def row(number: int, place: int = 0) -> dict[str, Any]:
    key = number * 100 + place
    return {"key": key, "check": key * 7919 % 1009, "text": f"{key}", "obs": np.full(2, key, np.float32)}


def version_at(number: int) -> str:
    return f"at {number}"


def keep_versions(buffer: bw.DatasetBuffer) -> None:
    """Commit, where the change before was one to keep; done again, it does nothing."""
    number, known = buffer.number, {info.name for info in buffer.versions()}
    if number % EVERY == 0 and version_at(number) not in known:
        buffer.commit(version_at(number))
    if number % EVERY == 0 and version_at(number - KEPT) in known:
        buffer.forget(version_at(number - KEPT))


def step(buffer: bw.DatasetBuffer) -> None:
    """The one change that follows this number."""
    keep_versions(buffer)
    number = buffer.number + 1
    kind = number % 11
    if number == 1 or kind == 0:
        buffer.append([row(number, place) for place in range(8)], origin=f"origin {number % 3}")
    elif kind == 1:
        buffer.append(row(number), retain_prior=0.9)
    elif kind == 2:
        rows = [row(number, place) for place in range(20)]
        columns = {name: [r[name] for r in rows] for name in ("key", "check", "text")}
        buffer.extend(columns | {"obs": np.stack([r["obs"] for r in rows])})
    elif kind == 3:
        ids = buffer.ids[::3]
        buffer.set(ids, loss=ids.astype(np.float64) + number)
    elif kind == 4:
        buffer.update(-1, {"text": f"changed at {number}"})
    elif kind == 5:
        buffer.drop(buffer.ids[:2])
    elif kind == 6 and number > 2 * EVERY:
        buffer.rollback(version_at((number - 1) // EVERY * EVERY - EVERY * (number % 2)))
    elif kind == 7:
        buffer.append(row(number), retain_prior=0.95, retain_prior_by="latest")
    else:
        buffer.append(row(number))


def fault_in(rows: dict[str, list[Any]]) -> str | None:
    """What cannot be, whatever the writer was doing."""
    for place, key in enumerate(rows["key"]):
        if rows["check"][place] != key * 7919 % 1009 or rows["obs"][place].tolist() != [key, key]:
            return f"row {place} is mixed up: {[column[place] for column in rows.values()]}"
    return None


def write_until_killed(path: Path) -> None:
    """Say each number once the call has returned."""
    durable._CHECKPOINT_BYTES, durable._CHECKPOINT_RECORDS = 4000, 9  # so that many are hit in the middle of one
    buffer = bw.DatasetBuffer(path=path, **SETTINGS)
    while True:
        step(buffer)
        say(number=buffer.number)


def read_until(path: Path, last: int) -> None:
    """Refresh until the last change is there; say the number, rows and fingerprint of every version seen."""
    reader = bw.DatasetBuffer(path=path, read_only=True)
    while True:
        reader.refresh()
        assert len(reader) == 0 or fault_in(reader.to_pydict()) is None, reader.number
        say(number=reader.number, seen=[len(reader), reader.content_fingerprint()])
        if reader.number >= last:
            return
