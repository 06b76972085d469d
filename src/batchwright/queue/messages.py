"""The messages of a queue: its files in words, and errors of the operating system with their meaning for it."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
from collections.abc import Iterator
from pathlib import Path

from batchwright.base.errors import BatchwrightError, OutOfSpaceError, QueueError


def is_out_of_space(error: OSError) -> bool:
    return isinstance(error, OutOfSpaceError) or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def clear_errors(queue: Path) -> Iterator[None]:
    """Turn errors of the system, raised in the block, into errors that explain their meaning for the queue."""
    try:
        yield
    except BatchwrightError:
        raise
    except OSError as error:
        clear = _in_words(error, queue)
        if clear is None:
            raise
        raise clear from error


def _in_words(error: OSError, queue: Path) -> BatchwrightError | None:
    """Return the error in terms of the queue. None if it does not concern the queue."""
    if is_out_of_space(error):
        return OutOfSpaceError(
            f"no space left for the queue: {error.strerror}",
            folder=queue,
            file=error.filename,
            remedy="make room, then do the same again: nothing was lost",
        )
    if isinstance(error, FileNotFoundError):  # in a folder that was there before
        return deleted(queue)
    if error.errno == errno.EROFS or isinstance(error, PermissionError):
        what = "this process may no longer read and write the queue"
        remedy = "give it permission, or mount the file system for writing; then run this again: nothing was lost"
    elif isinstance(error, NotADirectoryError | FileExistsError):
        what, remedy = "there is a file where the queue has a folder", "move that file away"
    else:
        return None
    return QueueError(f"{what}: {error.strerror}", folder=queue, file=error.filename, remedy=remedy)


def file_in_words(split: str, number: int | None) -> str:
    """A file, as a message names it. Kept batches have no number."""
    if number is None:
        return f"kept {split} batches"
    return f"{split} file {number}"


def purge_command(queue: Path) -> str:
    """The command that throws a queue away. Put it at the end of a line: it is copied from there."""
    return f"batchwright queue purge {shlex.quote(str(queue.parent))}"


def deleted(queue: Path) -> QueueError:
    return QueueError(
        "the queue folder was deleted while it was in use",
        folder=queue,
        reason=os.strerror(errno.ENOENT),
        remedy="batchwright prepare CONFIG makes it anew; a consumer goes on with load_state_dict of its last state",
    )
