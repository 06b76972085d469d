"""Verification of a queue: every byte of each file against its checksums, its name and the queue's meta."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from batchwright.base.errors import QueueError, SpecError
from batchwright.base.memory import BlockPool
from batchwright.queue.batch_file import DamagedFile, FileFacts, pooled, read_batches
from batchwright.queue.claims import quarantine as quarantine_file
from batchwright.queue.folder import QueueFolder, SplitFolder
from batchwright.queue.members import Liveness
from batchwright.queue.meta import Meta, read_meta
from batchwright.queue.schema import BatchField, fields_of
from batchwright.queue.status import find_queue, listing_of, names_of_splits

__all__ = ["FileDamage", "Verified", "verify_queue"]


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
    there = listing_of(split)
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
