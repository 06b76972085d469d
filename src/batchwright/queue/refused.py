"""What goes wrong with a queue, in words: what it means, and what to do."""

from __future__ import annotations

import errno
import os
import shlex
from pathlib import Path

from batchwright.base.errors import BatchwrightError, OutOfSpaceError, QueueError

__all__ = ["FULL", "deleted", "named", "purge_command"]

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the system calls a full disk."""


def named(error: OSError, queue: Path) -> BatchwrightError | None:
    """What an error of the system means for a queue; None where it is clear already, or means nothing to us."""
    if isinstance(error, BatchwrightError):
        return None
    if error.errno in FULL:
        return OutOfSpaceError(
            f"no space left for the queue: {error.strerror}",
            folder=queue,
            file=error.filename,
            remedy="make room, then do the same again: nothing was lost",
        )
    if error.errno == errno.EROFS:
        return QueueError(
            f"the queue cannot be written: {error.strerror}",
            folder=queue,
            file=error.filename,
            remedy="mount it so that it can be written, or put the dataset elsewhere; nothing was lost",
        )
    if isinstance(error, PermissionError):
        return QueueError(
            f"this process may no longer read and write the queue: {error.strerror}",
            folder=queue,
            file=error.filename,
            remedy="give it back its permissions, then run this again: nothing was lost",
        )
    if isinstance(error, NotADirectoryError | FileExistsError):
        return QueueError(
            f"there is a file where the queue has a folder: {error.strerror}",
            folder=queue,
            file=error.filename,
            remedy="move that file away",
        )
    if isinstance(error, FileNotFoundError):  # in a folder that was there before
        return deleted(queue)
    return None


def purge_command(queue: Path) -> str:
    """What throws a queue away, as a shell takes it. Put it at the end of a line: it is copied from there."""
    return f"batchwright queue purge {shlex.quote(str(queue.parent))}"


def deleted(queue: Path) -> QueueError:
    return QueueError(
        "the queue folder was deleted while it was in use",
        folder=queue,
        reason=os.strerror(errno.ENOENT),
        remedy="batchwright prepare CONFIG makes it anew; a consumer goes on with load_state_dict of its last state",
    )
