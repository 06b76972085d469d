"""Quarantine of damaged files. A damaged file is put aside with the reason, and its number is made again."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from pathlib import Path

from batchwright.queue.claims import Claim, rows_beside
from batchwright.queue.file_names import EXTENSION, KEPT, digits_of, write_text
from batchwright.queue.folder import SplitFolder

__all__ = ["quarantine"]


def quarantine(
    folder: SplitFolder, number: int | None, reason: str, path: Path, inode: int, claim: Claim | None = None
) -> Path:
    """Put the file at `path` aside, and return its new path.

    A file with another inode is left alone: the old one was put aside before, and is made again already. Kept
    batches have no number: a provider sees that they are missing.
    """
    name = KEPT
    if number is not None:
        name = digits_of(number)
    with folder.one_at_a_time():
        names = (f"{folder.name}-{name}.{attempt}{EXTENSION}" for attempt in itertools.count())
        aside = next(path for path in map(folder.queue.quarantine.joinpath, names) if not path.exists())
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino != inode:
                return aside
            report = {"split": folder.name, "number": number, "reason": reason, "found": time.time()}
            write_text(aside.with_suffix(".json"), json.dumps(report, indent=2) + "\n")
            if number is not None:
                folder.want(number)  # first: a number that is wanted and there is not made again
                if claim is not None and claim.handed:
                    folder.write_returned(number, claim.recorded, claim.handed)
            os.rename(path, aside)
        if claim is not None:
            claim.rest()
            rows_beside(path).unlink(missing_ok=True)
    return aside
