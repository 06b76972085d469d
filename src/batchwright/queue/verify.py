"""Read every file of a queue, all bytes of it, and compare it with its checksums, its name and the queue's meta."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from batchwright.base.errors import QueueError, SpecError
from batchwright.queue.batch_file import DamagedFile, FileFacts, read_batches
from batchwright.queue.entries import number_of
from batchwright.queue.folder import QueueFolder, SplitFolder
from batchwright.queue.members import Census
from batchwright.queue.meta_file import Meta, read_meta
from batchwright.queue.schema import Field, fields_of
from batchwright.queue.status import find_queue, names_of_splits

__all__ = ["Damage", "Verified", "verify_queue"]


@dataclass(frozen=True, slots=True)
class Damage:
    file: Path
    what: str
    moved_to: Path | None = None
    """Where it was put aside, so that a provider makes it again."""


@dataclass
class Verified:
    """What was read, and what of it is damaged."""

    queue: Path
    num_files: int = 0
    num_bytes: int = 0
    num_gone: int = 0
    """Read and deleted by a consumer, or claimed, while this looked."""
    damaged: list[Damage] = field(default_factory=list)


def verify_queue(path: str | os.PathLike[str], *, quarantine: bool = False) -> Verified:
    """Check all files that wait, are claimed or kept. Others may work on the queue meanwhile.

    `quarantine`: damaged files that wait are put aside, and asked for again. One that a consumer has is left to it.
    """
    queue = find_queue(path)
    found = Verified(queue.path)
    meta, fields = _meta_of(queue, found)
    memory = _Memory()
    census = Census(queue.who)
    for split in (queue.split(name, census) for name in names_of_splits(queue)):
        _check_counters(split, found)
        for number, file, is_claimed in _files_of(split):
            try:
                inode = file.stat().st_ino
                facts, _ = read_batches(file, memory.of)
                num_bytes = file.stat().st_size
            except FileNotFoundError:
                found.num_gone += 1
                continue
            except DamagedFile as error:
                what: str | None = error.reason
            except PermissionError as error:
                found.damaged.append(Damage(file, f"it may not be read: {error.strerror}"))
                continue
            else:
                what = _mismatch(facts, split.name, number, meta, fields)
                found.num_files += 1
                found.num_bytes += num_bytes
            if what is not None:
                moved_to = None
                if quarantine and not is_claimed:
                    moved_to = split.quarantine(number, what, file, inode)
                found.damaged.append(Damage(file, what, moved_to))
    return found


class _Memory:
    """Room for one file at a time, used again for the next."""

    def __init__(self) -> None:
        self._bytes: NDArray[np.uint8] = np.empty(0, np.uint8)

    def of(self, num_bytes: int) -> NDArray[np.uint8]:
        if len(self._bytes) < num_bytes:
            self._bytes = np.empty(0, np.uint8)  # not both at once
            self._bytes = np.empty(num_bytes, np.uint8)
        return self._bytes[:num_bytes]


def _meta_of(queue: QueueFolder, found: Verified) -> tuple[Meta | None, tuple[Field, ...] | None]:
    """What the queue's meta says; what is wrong with it is a damage like any other."""
    try:
        meta = read_meta(queue.meta)
        fields = None if meta is None else fields_of(meta.said)
    except (QueueError, SpecError) as error:
        found.damaged.append(Damage(queue.meta, error.headline))
        return None, None
    if meta is None:
        found.damaged.append(Damage(queue.meta, "it is not there"))
    return meta, fields


def _check_counters(split: SplitFolder, found: Verified) -> None:
    for file in (split.path / "next", split.control / "taken"):
        try:
            text = file.read_text().strip()
        except FileNotFoundError:
            continue
        except UnicodeDecodeError:
            text = ""
        if not re.fullmatch(r"[0-9]+", text):
            found.damaged.append(Damage(file, "it does not hold a number"))


def _files_of(split: SplitFolder) -> Iterator[tuple[int | None, Path, bool]]:
    """(number, file, whether a consumer has it) of all files of a split; None for that of the kept batches."""
    if split.kept_path.exists():
        yield None, split.kept_path, False
    for name in sorted(_names_in(split.path)):
        number = number_of(name)
        if number is not None:
            yield number, split.path / name, False
    for name in sorted(_names_in(split.claimed)):
        match = re.fullmatch(r"(\d+)\.[\w-]+\.batches", name)
        if match:
            yield int(match[1]), split.claimed / name, True


def _names_in(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _mismatch(
    facts: FileFacts, split: str, number: int | None, meta: Meta | None, fields: tuple[Field, ...] | None
) -> str | None:
    """How a whole file does not belong where it lies."""
    if (facts.split, facts.number) != (split, number or 0):
        name = f"the kept {split} batches" if number is None else f"{split} file {number}"
        return f"it is {facts.split} file {facts.number}, under the name of {name}"
    if meta is None:
        return None
    if facts.stamp != meta.fingerprint:
        return f"it was made from something else than meta.json says ({facts.stamp}, not {meta.fingerprint})"
    if facts.fields != fields:
        return "its fields are not those of meta.json"
    return None
