"""A queue seen from outside, without locks: its status, and the verification of its files."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from batchwright.base.checks import local_path
from batchwright.base.errors import MissingQueueError, QueueError, SpecError
from batchwright.base.machine import boot_id
from batchwright.base.memory import BlockPool
from batchwright.queue.batch_file import DamagedFile, FileFacts, pooled, read_batches, read_facts
from batchwright.queue.claims import quarantine as quarantine_file
from batchwright.queue.claims import read_rows
from batchwright.queue.folder import EXTENSION, Listing, QueueFolder, SplitFolder
from batchwright.queue.members import Activity, Liveness, MemberFacts, read_failures
from batchwright.queue.meta import Meta, read_meta
from batchwright.queue.schema import BatchField, fields_of

__all__ = ["Verified", "queue_status", "verify_queue"]

_BEAT_IS_DUE_SECONDS = 3.0
"""A living member has incremented its counter in this time, or, with a short lease, in half of that."""

Status = dict[str, Any]


def find_queue(path: str | os.PathLike[str]) -> QueueFolder:
    """The queue of a dataset's folder, or the queue's folder itself. Anything else is refused by name."""
    given = local_path(path=path)
    inside = given / "queue"
    for folder in (inside, given):
        if (folder / "control").is_dir() and (folder / "who").is_dir():  # meta.json may be lost or damaged
            return QueueFolder(folder)
    if inside.exists():
        raise QueueError(
            "this is not a queue: it does not have the folders control and who",
            folder=inside,
            remedy="data/<dataset> as PATH; if that is the path, move away what is in the place of its queue",
        )
    raise MissingQueueError(
        "Queue directory not found",
        folder=inside,
        remedy="data/<dataset> as PATH; `batchwright prepare CONFIG` makes its queue",
    )


def names_of_splits(queue: QueueFolder) -> list[str]:
    """Splits that the queue has, train first."""
    folders = (queue.path, queue.path / "control")
    return [name for name in ("train", "val") if any((folder / name).is_dir() for folder in folders)]


def queue_status(path: str | os.PathLike[str], look_seconds: float = 0.3) -> Status:
    """The status of a queue, as JSON has it.

    It looks twice, `look_seconds` apart, to see which members move; a member that was silent for long is watched until
    it should have moved. Ages are by this machine's clock, and only shown. No decision depends on them.
    """
    queue = find_queue(path)
    meta = read_meta(queue.meta)
    liveness = Liveness(queue.who)
    splits = {name: queue.split(name, liveness) for name in names_of_splits(queue)}
    rows_before = {name: _rows_read(split) for name, split in splits.items()}
    began = time.monotonic()
    members = _members(queue, liveness, look_seconds)
    found = {name: _split(split, members, meta) for name, split in splits.items()}
    seconds = time.monotonic() - began
    for name, split in splits.items():
        found[name]["reading_rows_per_second"] = _reading_rate(rows_before[name], _rows_read(split), seconds)
    return {
        "queue": str(queue.path),
        "stamp": meta and meta.fingerprint,
        "reproducible": meta and meta.reproducible,
        "val_batches": meta and meta.val_batches,
        "batch_size": meta and meta.batch_size,
        "splits": found,
        "providers": [member for member in members.values() if member["role"] == "provider"],
        "consumers": [member for member in members.values() if member["role"] != "provider"],
        "died": _failures(queue),
        "quarantine": _quarantine(queue),
    }


# Splits


def _look_at(number: int | None, path: Path) -> Status | None:
    """A file of batches, as its header and the file system have it. None if it was removed meanwhile."""
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
    return {
        "number": number,
        "num_bytes": status.st_size,
        "num_batches": facts and facts.num_batches,
        "num_rows": facts and facts.num_rows,
        "age_seconds": _seconds_since(status.st_mtime),
        "damage": damage,
    }


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


def _split(split: SplitFolder, members: Mapping[str, Status], meta: Meta | None) -> Status:
    there = _listing(split)
    ready = [file for number in there.ready if (file := _look_at(number, split.ready_path(number)))]
    claimed = []
    for number, consumer in there.claimed.items():
        path = split.claimed_path(number, consumer)
        if file := _look_at(number, path):
            claimed.append({**file, **_rows(read_rows(path)), "by": _by(consumer, members)})
    making = [*((None, maker) for maker in split.makers_of_kept()), *sorted(there.making.items())]
    return {
        "next": there.next,
        "taken": there.taken,
        "is_kept": split.name == "val" and meta is not None and bool(meta.val_batches),
        "kept": _look_at(None, split.kept_path),
        "backlog": len(ready),
        "ready": ready,
        "claimed": claimed,
        "making": [_making(split, number, maker, members) for number, maker in making],
        "returned": [{"number": number, **_rows(split.read_returned(number))} for number in there.returned],
        "wanted": list(there.wanted),
        "ranks": [
            {"rank": rank, "world_size": world_size, **progress.recorded._asdict()}
            for rank, world_size, progress in split.records.all()
        ],
        "files_per_second": production_rate([(file["number"], -file["age_seconds"]) for file in (*ready, *claimed)]),
        "oldest_seconds": max((file["age_seconds"] for file in ready), default=None),
    }


def _rows(recorded_and_handed: tuple[int, int]) -> Status:
    recorded, handed = recorded_and_handed
    return {"recorded": recorded, "handed": handed}


def _seconds_since(clock: float) -> float:
    return max(time.time() - clock, 0.0)


def _making(split: SplitFolder, number: int | None, maker: str, members: Mapping[str, Status]) -> Status:
    """A file that is being made, and for how long: as its maker says, since its first batch may be older than it."""
    seconds, member = None, members.get(maker)
    if member is not None and (member["split"], member["number"]) == (split.name, number):
        seconds = member["doing_seconds"]
    return {"number": number, "by": _by(maker, members), "age_seconds": seconds}


def production_rate(made: list[tuple[int, float]]) -> float | None:
    """Files a second, from the numbers and times of those that are still there; None if too few are.

    Numbers in between are counted too: they were made, read and deleted. If files were made out of order, only those
    that exist count.

    >>> production_rate([(7, 100.0), (8, 102.0), (11, 108.0)]), production_rate([(7, 100.0)])
    (0.5, None)
    """
    in_time = sorted(made, key=lambda file: file[1])
    if len(in_time) < 2 or in_time[-1][1] <= in_time[0][1]:
        return None
    numbers = [number for number, _ in in_time]
    num_made = len(numbers) - 1
    if numbers == sorted(numbers):
        num_made = numbers[-1] - numbers[0]
    return num_made / (in_time[-1][1] - in_time[0][1])


def _rows_read(split: SplitFolder) -> tuple[int, int] | None:
    """(rows of all files that were handed out, rows of a file); None if no file is claimed."""
    there = _listing(split)
    missing, rows_of_file = 0, 0
    for number, consumer in there.claimed.items():
        path = split.claimed_path(number, consumer)
        try:
            rows_of_file = read_facts(path).num_rows
        except (OSError, DamagedFile):
            return None
        missing += rows_of_file - read_rows(path)[1]
    if not rows_of_file:
        return None
    return there.taken * rows_of_file - missing, rows_of_file


def _reading_rate(before: tuple[int, int] | None, after: tuple[int, int] | None, seconds: float) -> float | None:
    if before is None or after is None or before[1] != after[1] or after[0] < before[0]:
        return None  # no consumer reads, or one died or went back
    return (after[0] - before[0]) / seconds


# Members


def _members(queue: QueueFolder, liveness: Liveness, look_seconds: float) -> dict[str, Status]:
    """Members by their ids, looked at twice: a counter that moves is in their files."""
    before = {}
    for name in liveness.ids():
        with contextlib.suppress(OSError):
            before[name] = (queue.who / name).read_bytes()
    time.sleep(look_seconds)
    silent = [facts for facts, _ in liveness.members() if _silent_seconds(queue, facts) > facts.lease_seconds]
    if silent:
        longest = max(min(facts.lease_seconds / 2, _BEAT_IS_DUE_SECONDS) for facts in silent)
        time.sleep(max(longest - look_seconds, 0.0))
    looks = [(before.get(facts.id), facts, activity) for facts, activity in liveness.members()]
    return {facts.id: _member(queue, liveness, content, facts, activity) for content, facts, activity in looks}


def _silent_seconds(queue: QueueFolder, facts: MemberFacts) -> float:
    """Seconds since a member has written, by the clock, so they are only a reason to look closer."""
    try:
        return _seconds_since((queue.who / facts.id).stat().st_mtime)
    except OSError:
        return 0.0


def _member(
    queue: QueueFolder, liveness: Liveness, before: bytes | None, facts: MemberFacts, activity: Activity
) -> Status:
    silent_seconds = _silent_seconds(queue, facts)
    is_moving = False
    with contextlib.suppress(OSError):
        is_moving = (queue.who / facts.id).read_bytes() != before
    is_here = facts.boot == boot_id()
    state = "alive"
    if not liveness.is_alive(facts.id):
        state = "dead"
    elif not is_moving and silent_seconds > facts.lease_seconds:
        # It holds its lock, or is on another machine, where that cannot be seen from here.
        state = "hung" if is_here else "silent"
    return {
        "id": facts.id,
        "role": facts.role,
        "pid": facts.pid,
        "host": facts.host,
        "is_here": is_here,
        "state": state,
        "doing": activity.what,
        "split": activity.split,
        "number": activity.number,
        "doing_seconds": activity.since and _seconds_since(activity.since),
        "silent_seconds": silent_seconds,
        "age_seconds": _seconds_since(facts.started),
        "rank": facts.rank,
        "world_size": facts.world_size,
    }


def _by(member_id: str, members: Mapping[str, Status]) -> Status:
    """The member of an id. If it has left no file, only the facts in its id."""
    if member_id in members:
        return {name: members[member_id][name] for name in ("id", "role", "pid", "host", "state")}
    role, _, rest = member_id.partition("-")
    pid = rest.partition("-")[0]
    return {"id": member_id, "role": role, "pid": int(pid) if pid.isdecimal() else None, "host": None, "state": "dead"}


def _failures(queue: QueueFolder) -> list[Status]:
    return [
        {**msgspec.structs.asdict(failure), "headline": failure.headline, "age_seconds": _seconds_since(failure.at)}
        for failure in read_failures(queue.who)
    ]


def _quarantine(queue: QueueFolder) -> list[Status]:
    found = []
    for path in sorted(queue.quarantine.glob(f"*{EXTENSION}")):
        report: Status = {"split": None, "number": None, "reason": None}
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            written = json.loads(path.with_suffix(".json").read_bytes())
            report = {name: written[name] for name in report}
        with contextlib.suppress(OSError):
            found.append({"file": path.name, "num_bytes": path.stat().st_size, **report})
    return found


# Verification: every byte of each file against its checksums, its name and the queue's meta


@dataclass(frozen=True, slots=True)
class FileDamage:
    file: Path
    what: str
    moved_to: Path | None = None
    """The path where the file was put aside, so that a provider makes it again."""


@dataclass
class Verified:
    """The files that were read, and those that are damaged."""

    queue: Path
    num_files: int = 0
    num_bytes: int = 0
    num_gone: int = 0
    """Read and deleted by a consumer, or claimed, while this looked."""
    damaged: list[FileDamage] = field(default_factory=list)


def verify_queue(path: str | os.PathLike[str], *, quarantine: bool = False) -> Verified:
    """Check all files that wait, are claimed or kept. Others may work on the queue meanwhile.

    `quarantine`: damaged files that wait are put aside, and requested again. One that a consumer has is left to it.
    """
    queue = find_queue(path)
    found = Verified(queue.path)
    meta, fields = _meta_of(queue, found)
    memory = pooled(BlockPool())
    liveness = Liveness(queue.who)
    for split in (queue.split(name, liveness) for name in names_of_splits(queue)):
        _check_counters(split, found)
        for number, file, is_claimed in _files_of(split):
            try:
                status = file.stat()
                facts = read_batches(file, memory)[0]
            except FileNotFoundError:
                found.num_gone += 1
                continue
            except DamagedFile as error:
                what: str | None = error.reason
            except PermissionError as error:
                found.damaged.append(FileDamage(file, f"it may not be read: {error.strerror}"))
                continue
            else:
                what = _mismatch(facts, split.name, number, meta, fields)
                found.num_files += 1
                found.num_bytes += status.st_size
            if what is not None:
                moved_to = None
                if quarantine and not is_claimed:
                    moved_to = quarantine_file(split, number, what, file, status.st_ino)
                found.damaged.append(FileDamage(file, what, moved_to))
    return found


def _meta_of(queue: QueueFolder, found: Verified) -> tuple[Meta | None, tuple[BatchField, ...] | None]:
    """Read the meta of the queue. Faults in it are reported like any other damage."""
    try:
        meta = read_meta(queue.meta)
        fields = None if meta is None else fields_of(meta.said)
    except (QueueError, SpecError) as error:
        found.damaged.append(FileDamage(queue.meta, error.headline))
        return None, None
    if meta is None:
        found.damaged.append(FileDamage(queue.meta, "it is not there"))
    return meta, fields


def _check_counters(split: SplitFolder, found: Verified) -> None:
    for file in (split.path / "next", split.control / "taken"):
        with contextlib.suppress(FileNotFoundError):
            if not re.fullmatch(rb"[0-9]+\s*", file.read_bytes()):
                found.damaged.append(FileDamage(file, "it does not hold a number"))


def _files_of(split: SplitFolder) -> Iterator[tuple[int | None, Path, bool]]:
    """Yield (number, file, whether a consumer has it) of a split's files. The number of the kept batches is None."""
    there = _listing(split)
    if split.kept_path.exists():
        yield None, split.kept_path, False
    for number in there.ready:
        yield number, split.ready_path(number), False
    for number, consumer in sorted(there.claimed.items()):
        yield number, split.claimed_path(number, consumer), True


def _mismatch(
    facts: FileFacts, split: str, number: int | None, meta: Meta | None, fields: tuple[BatchField, ...] | None
) -> str | None:
    """The reason why an undamaged file does not belong in its place."""
    reason = facts.under_another_name(split, number)
    if reason is not None or meta is None:
        return reason
    if facts.stamp != meta.fingerprint:
        return f"it was made from something else than meta.json says ({facts.stamp}, not {meta.fingerprint})"
    if facts.fields != fields:
        return "its fields are not those of meta.json"
    return None
