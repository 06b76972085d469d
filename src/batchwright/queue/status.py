"""Where every file of a queue is and who works on it, read from outside: nothing is locked, taken or changed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchwright.base.checks import local_path
from batchwright.base.errors import MissingQueueError, QueueError
from batchwright.base.machine import boot_id
from batchwright.queue.batch_file import DamagedFile, FileFacts, read_facts
from batchwright.queue.claim import read_rows
from batchwright.queue.entries import EXTENSION, file_name
from batchwright.queue.folder import Listing, QueueFolder, SplitFolder
from batchwright.queue.members import Census, Doing, Facts, read_deaths
from batchwright.queue.meta_file import Meta, read_meta

__all__ = ["find_queue", "names_of_splits", "production_rate", "queue_status"]

_BEAT_IS_DUE_SECONDS = 3.0
"""A member that lives has moved its counter in this time, or, with a short lease, in half of that."""
_PLACE = struct.Struct("<qq")

Told = dict[str, Any]


def find_queue(path: str | os.PathLike[str]) -> QueueFolder:
    """The queue of a dataset's folder, or the queue's folder itself. Anything else is refused by name."""
    given = local_path(path=path)
    for folder in (given / "queue", given):
        if _is_queue(folder):
            return QueueFolder(folder)
    if (given / "queue").is_dir():
        raise QueueError(
            "this folder is not a queue: it has no meta.json, and nothing else of one",
            folder=given / "queue",
            remedy="look for a mistake in the path",
        )
    if (given / "queue").exists() or given.is_file():
        raise QueueError(
            "this is a file, and a queue is a folder",
            file=given if given.is_file() else given / "queue",
            remedy="data/<dataset> as PATH; a file in the place of the queue must be moved away",
        )
    raise MissingQueueError(
        "Queue directory not found",
        folder=given / "queue",
        remedy="data/<dataset> as PATH; `batchwright prepare CONFIG` makes its queue",
    )


def _is_queue(folder: Path) -> bool:
    """By its meta, or, where that is lost or damaged, by the folders that only a queue has."""
    if all((folder / name).is_dir() for name in ("control", "who")):
        return True
    try:
        return isinstance(json.loads((folder / "meta.json").read_bytes())["batchwright"]["made_from"], dict)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def names_of_splits(queue: QueueFolder) -> list[str]:
    """Splits that the queue has, train first."""
    names = {name for name in ("train", "val") if (queue.path / name).is_dir()}
    with contextlib.suppress(FileNotFoundError):
        names |= {entry.name for entry in os.scandir(queue.path / "control") if entry.is_dir(follow_symlinks=False)}
    return sorted(names, key=lambda name: (name != "train", name))


def queue_status(path: str | os.PathLike[str], look_seconds: float = 0.3) -> Told:
    """All that can be told of a queue, as JSON has it.

    It looks twice, `look_seconds` apart, to see who moves; a member that was silent for long is watched until it should
    have moved. Ages are by this machine's clock, and only shown: nothing is decided by them.
    """
    queue = find_queue(path)
    meta = read_meta(queue.meta)
    census = Census(queue.who)
    splits = [queue.split(name, census) for name in names_of_splits(queue)]
    before = {split.name: _rows_read(split) for split in splits}
    counters, began = _counters(census), time.monotonic()
    time.sleep(look_seconds)
    silent = [facts for facts, _ in census.look() if _silent_seconds(queue, facts) > facts.lease_seconds]
    if silent:
        longest = max(min(facts.lease_seconds / 2, _BEAT_IS_DUE_SECONDS) for facts in silent)
        time.sleep(max(longest - look_seconds, 0.0))
    members = {facts.id: _told_of_member(queue, census, counters, facts, doing) for facts, doing in census.look()}
    told = {split.name: _told_of_split(split, members, meta) for split in splits}
    seconds = time.monotonic() - began
    for split in splits:
        told[split.name]["reading_rows_per_second"] = _reading_rate(before[split.name], _rows_read(split), seconds)
    return {
        "queue": str(queue.path),
        "stamp": None if meta is None else meta.fingerprint,
        "reproducible": None if meta is None else meta.reproducible,
        "val_batches": None if meta is None else meta.val_batches,
        "batch_size": None if meta is None else meta.batch_size,
        "splits": told,
        "providers": [member for member in members.values() if member["role"] == "provider"],
        "consumers": [member for member in members.values() if member["role"] != "provider"],
        "died": [
            {
                **{name: getattr(death, name) for name in ("pid", "host", "split", "number", "error", "place")},
                "headline": death.headline,
                "traceback": death.traceback,
                "age_seconds": max(time.time() - death.at, 0.0),
            }
            for death in read_deaths(queue.who)
        ],
        "quarantine": _told_of_quarantine(queue),
    }


# Splits


@dataclass(frozen=True, slots=True)
class _Known:
    """A file of batches, as its header and the file system have it."""

    number: int | None
    """None: of the kept batches."""
    path: Path
    num_bytes: int
    made_at: float
    facts: FileFacts | None
    damage: str | None


def _know(number: int | None, path: Path) -> _Known | None:
    """None where it went away meanwhile."""
    facts, damage = None, None
    try:
        status = path.stat()
        facts = read_facts(path)
    except FileNotFoundError:
        return None
    except DamagedFile as error:
        damage = error.reason
    except PermissionError as error:
        damage = f"it may not be read: {error.strerror}"
    return _Known(number, path, status.st_size, status.st_mtime, facts, damage)


def _listing(split: SplitFolder) -> Listing:
    try:
        return split.listing()
    except FileNotFoundError as error:
        raise QueueError(
            "a folder of this queue is missing",
            folder=error.filename,
            remedy=f"batchwright prepare CONFIG makes it again, or batchwright queue purge "
            f"{shlex.quote(str(split.queue.path))} --split {split.name} removes the rest",
        ) from None


def _claimed_path(split: SplitFolder, number: int, holder: str) -> Path:
    return split.claimed / f"{_digits(number)}.{holder}{EXTENSION}"


def _digits(number: int) -> str:
    return file_name(number).removesuffix(EXTENSION)


def _told_of_split(split: SplitFolder, members: Mapping[str, Told], meta: Meta | None) -> Told:
    there, now = _listing(split), time.time()
    waiting = [number for number in there.ready if number not in there.claimed]
    ready = [known for number in waiting if (known := _know(number, split.ready_path(number)))]
    claimed = [
        (known, holder)
        for number, holder in there.claimed.items()
        if (known := _know(number, _claimed_path(split, number, holder)))
    ]
    kept = _know(None, split.kept_path)
    made = [
        (known.number, known.made_at)
        for known in (*ready, *(known for known, _ in claimed))
        if known.number is not None
    ]
    making = [*((None, maker) for maker in split.keepers()), *sorted(there.making.items())]
    oldest = min((known.made_at for known in ready), default=None)
    return {
        "next": there.next,
        "taken": there.taken,
        "is_kept": split.name == "val" and meta is not None and bool(meta.val_batches),
        "kept": None if kept is None else _told_of_file(kept, now),
        "backlog": len(ready),
        "ready": [_told_of_file(known, now) for known in ready],
        "claimed": [
            {**_told_of_file(known, now), **_told_of_rows(known), "by": _by(holder, members)}
            for known, holder in claimed
        ],
        "making": [
            {"number": number, "by": _by(maker, members), "age_seconds": _age(split, number, maker, now)}
            for number, maker in making
        ],
        "returned": [
            {"number": number, **dict(zip(("recorded", "handed"), _returned_rows(split, number), strict=True))}
            for number in there.returned
        ],
        "wanted": list(there.wanted),
        "ranks": _told_of_ranks(split),
        "files_per_second": production_rate(made),
        "oldest_seconds": None if oldest is None else max(now - oldest, 0.0),
    }


def _told_of_file(known: _Known, now: float) -> Told:
    facts = known.facts
    return {
        "number": known.number,
        "num_bytes": known.num_bytes,
        "num_batches": None if facts is None else facts.num_batches,
        "num_rows": None if facts is None else facts.num_rows,
        "age_seconds": max(now - known.made_at, 0.0),
        "damage": known.damage,
    }


def _told_of_rows(known: _Known) -> Told:
    recorded, handed = read_rows(known.path)
    return {"recorded": recorded, "handed": handed}


def _returned_rows(split: SplitFolder, number: int) -> tuple[int, int]:
    with contextlib.suppress(OSError, ValueError):
        recorded, handed = (split.returned / _digits(number)).read_text().split()
        return int(recorded), int(handed)
    return 0, 0


def _told_of_ranks(split: SplitFolder) -> list[Told]:
    """Up to which file and row each rank of a rank-striped run has recorded."""
    told = []
    for path in sorted(split.ranks.glob("*-of-*")):
        match = re.fullmatch(r"(\d+)-of-(\d+)", path.name)
        with contextlib.suppress(OSError, struct.error):
            file, row = _PLACE.unpack_from(path.read_bytes())
            if match:
                told.append({"rank": int(match[1]), "world_size": int(match[2]), "file": file, "row": row})
    return told


def _age(split: SplitFolder, number: int | None, maker: str, now: float) -> float | None:
    """Since when a file is being made: its first batch may be older than its last write, so by its maker's word."""
    for facts, doing in Census(split.queue.who).look():
        if facts.id == maker and (doing.split, doing.number) == (split.name, -1 if number is None else number):
            return max(now - doing.since, 0.0)
    return None


def production_rate(made: list[tuple[int, float]]) -> float | None:
    """Files a second, of (number, when it was made) of those that are still there; None where too few are.

    Numbers in between are counted too: they were made, read and deleted. Made out of order, only what is there counts.

    >>> production_rate([(7, 100.0), (8, 102.0), (11, 108.0)]), production_rate([(7, 100.0)])
    (0.5, None)
    """
    in_time = sorted(made, key=lambda file: file[1])
    if len(in_time) < 2 or in_time[-1][1] <= in_time[0][1]:
        return None
    numbers = [number for number, _ in in_time]
    num_made = numbers[-1] - numbers[0] if numbers == sorted(numbers) else len(numbers) - 1
    return num_made / (in_time[-1][1] - in_time[0][1])


def _rows_read(split: SplitFolder) -> tuple[int, int] | None:
    """(rows of all files that were handed over, rows of a file); None where nobody has a file."""
    there = _listing(split)
    total, rows_of_file = 0, None
    for number, holder in there.claimed.items():
        path = _claimed_path(split, number, holder)
        try:
            rows_of_file = read_facts(path).num_rows
        except (OSError, DamagedFile):
            return None
        total -= rows_of_file - read_rows(path)[1]
    return None if rows_of_file is None else (total + there.taken * rows_of_file, rows_of_file)


def _reading_rate(before: tuple[int, int] | None, after: tuple[int, int] | None, seconds: float) -> float | None:
    if before is None or after is None or before[1] != after[1] or after[0] < before[0]:
        return None  # nobody reads, or somebody died or went back
    return (after[0] - before[0]) / seconds


# Members


def _counters(census: Census) -> dict[str, bytes]:
    """What moves of each member's file."""
    found = {}
    for name in census.ids():
        with contextlib.suppress(OSError):
            found[name] = (census.who / name).read_bytes()
    return found


def _silent_seconds(queue: QueueFolder, facts: Facts) -> float:
    """Since when a member has not written. By the clock, so it is a reason to look closer, and no more."""
    try:
        return max(time.time() - (queue.who / facts.id).stat().st_mtime, 0.0)
    except OSError:
        return 0.0


def _told_of_member(
    queue: QueueFolder, census: Census, before: Mapping[str, bytes], facts: Facts, doing: Doing
) -> Told:
    now = time.time()
    silent_seconds = _silent_seconds(queue, facts)
    try:
        is_moving = (queue.who / facts.id).read_bytes() != before.get(facts.id)
    except OSError:
        is_moving = False
    if not census.is_alive(facts.id):
        state = "dead"
    elif is_moving or silent_seconds <= facts.lease_seconds:
        state = "alive"
    else:  # it holds its lock, or is on another machine, where nobody here can see that
        state = "hung" if facts.boot == boot_id() else "silent"
    return {
        "id": facts.id,
        "role": facts.role,
        "pid": facts.pid,
        "host": facts.host,
        "is_here": facts.boot == boot_id(),
        "state": state,
        "doing": doing.what,
        "split": doing.split or None,
        "number": doing.number if doing.number >= 0 else None,
        "doing_seconds": max(now - doing.since, 0.0) if doing.since else None,
        "silent_seconds": silent_seconds,
        "age_seconds": max(now - facts.started, 0.0),
        "rank": facts.rank,
        "world_size": facts.world_size,
    }


def _by(member_id: str, members: Mapping[str, Told]) -> Told:
    """Who that is; of one that has left no file, what its id says."""
    if member_id in members:
        return {name: members[member_id][name] for name in ("id", "role", "pid", "host", "state")}
    role, _, rest = member_id.partition("-")
    pid = rest.partition("-")[0]
    return {"id": member_id, "role": role, "pid": int(pid) if pid.isdecimal() else None, "host": None, "state": "dead"}


# Quarantine


def _told_of_quarantine(queue: QueueFolder) -> list[Told]:
    told = []
    for path in sorted(queue.quarantine.glob(f"*{EXTENSION}")):
        name, _, _ = path.name.partition(".")
        split, _, digits = name.rpartition("-")
        reason = None
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            reason = str(json.loads(path.with_suffix(".json").read_bytes())["reason"])
        with contextlib.suppress(OSError):
            number = int(digits) if digits.isdecimal() else None
            told.append(
                {
                    "file": path.name,
                    "split": split,
                    "number": number,
                    "num_bytes": path.stat().st_size,
                    "reason": reason,
                }
            )
    return told
