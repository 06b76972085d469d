"""Removal of a queue, with its files and its state. Other files in its folder are left, and named."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from batchwright.base.checks import one_of
from batchwright.base.errors import BusyError, QueueError
from batchwright.base.files import one_at_a_time
from batchwright.base.words import counted
from batchwright.queue.folder import QueueFolder
from batchwright.queue.members import Liveness
from batchwright.queue.status import find_queue, names_of_splits

__all__ = ["Purged", "purge"]

_PART = r"\.[^/]+\.part"
_OF_A_SPLIT = (
    rf"SPLIT/((\d+|kept)\.batches|next|{_PART})",
    rf"control/SPLIT/(taken|seen|{_PART})",
    rf"control/SPLIT/(claimed|returned|wanted|ranks)/(\d+(\.[\w-]+\.(batches|rows)|-of-\d+)?|begin|{_PART})",
    rf"quarantine/(SPLIT-(\d+|kept)\.\d+\.(batches|json)|\.SPLIT-{_PART[2:]})",
)
_OF_ALL = (r"meta\.json", _PART, rf"who/((provider|consumer)-[\w-]+(\.died)?|{_PART})")


def is_of_a_queue(name: str, splits: Sequence[str], *, all_of_it: bool = True) -> bool:
    """Whether a queue with these splits writes a file of this name, given from its folder on; or whether a split does.

    >>> is_of_a_queue("train/00000117.batches", ["train"]), is_of_a_queue("train/notes.txt", ["train"])
    (True, False)
    >>> is_of_a_queue("meta.json", ["train"]), is_of_a_queue("meta.json", ["train"], all_of_it=False)
    (True, False)
    """
    patterns = [pattern.replace("SPLIT", re.escape(split)) for pattern in _OF_A_SPLIT for split in splits]
    if all_of_it:
        patterns += _OF_ALL
    return any(re.fullmatch(pattern, name) for pattern in patterns)


@dataclass
class Purged:
    """The result of a purge."""

    queue: Path
    removed: list[str] = field(default_factory=list)
    """Files, as named from the queue's folder on."""
    num_bytes: int = 0
    left: list[str] = field(default_factory=list)
    """Files that are not of a queue: they were not touched."""


def purge(path: str | os.PathLike[str], split: str | None = None, *, force: bool = False) -> Purged:
    """Remove the queue at `path`, or one split of it, with all that it remembers: numbers begin at 0 again.

    BusyError names the processes that use it; `force` removes the queue anyway, and those processes then fail.
    """
    queue = find_queue(path)
    splits = names_of_splits(queue)
    chosen = splits
    if split is not None:
        chosen = [one_of(splits or ["train"], split=split)]
    done = Purged(queue.path)
    # A process that comes now waits for this lock, or finds that the queue is gone.
    with contextlib.nullcontext() if force else one_at_a_time(queue.path):
        if not force:
            _refuse_if_used(queue)
        for file in _removable_files(queue.path):
            name = file.relative_to(queue.path).as_posix()
            if file.is_symlink() or not is_of_a_queue(name, splits):
                done.left.append(name)
            elif is_of_a_queue(name, chosen, all_of_it=split is None):
                with contextlib.suppress(FileNotFoundError):
                    num_bytes = file.stat().st_size
                    file.unlink()
                    done.num_bytes += num_bytes
                    done.removed.append(name)
        for folder, _, _ in os.walk(queue.path, topdown=False):
            if split is None or split in Path(folder).relative_to(queue.path).parts:
                with contextlib.suppress(OSError):  # it is not empty
                    os.rmdir(folder)
    return done


def _refuse_if_used(queue: QueueFolder) -> None:
    living = [facts.name for facts in Liveness(queue.who).living()]
    if living:
        headline = f"{counted(len(living), 'process uses', 'processes use')} this queue"
        remedy = "stop them first; --force removes the queue under them"
        raise BusyError(headline, folder=queue.path, process="\n".join(living), remedy=remedy)


def _removable_files(top: Path) -> list[Path]:
    """All files; a link to a folder is not followed. meta.json first: without it no process begins.

    Refused before the first one is gone: half a queue, without its meta, would be taken for a new one.
    """

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # which another process has removed just now
            raise _not_allowed(error.filename, error.strerror) from error

    found = []
    for parent, folders, files in os.walk(top, onerror=refuse):
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        found += [Path(parent, name) for name in (*files, *links)]
        if (files or links) and not os.access(parent, os.W_OK | os.X_OK):
            raise _not_allowed(parent, os.strerror(errno.EACCES))
    return sorted(found, key=lambda path: (path.name != "meta.json", path))


def _not_allowed(folder: str | Path, reason: str | None) -> QueueError:
    return QueueError(
        "this process may not remove the files of this queue",
        folder=folder,
        reason=reason,
        remedy=f"chmod u+rwx {shlex.quote(str(folder))}, or as the user that it belongs to; nothing was removed",
    )
