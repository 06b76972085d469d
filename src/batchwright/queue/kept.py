"""Validation batches that are made once and kept: every evaluation reads the same ones, from the first."""

from __future__ import annotations

import os

from batchwright.queue.batch_file import DamagedFile
from batchwright.queue.claimed import Counts, check_facts
from batchwright.queue.folder import SplitFolder
from batchwright.queue.reading import Arrays, FileShape, LoadedFile, Position, Reader, joined
from batchwright.queue.waiting import Waiter

__all__ = ["KeptStream"]


class KeptStream:
    """The rows of the file of kept batches, again and again. No claim: all who want read it."""

    def __init__(self, folder: SplitFolder, waiter: Waiter, fingerprint: str) -> None:
        self.folder = folder
        self.waiter = waiter
        self.fingerprint = fingerprint
        self.counts: Counts = Counts()
        self._reader = Reader()
        self._file: LoadedFile | None = None
        self._status: os.stat_result | None = None
        self._is_first = True
        self._row = 0

    def peek(self, num_rows: int | None) -> tuple[Arrays, int]:
        file = self._loaded()
        pieces, row, missing = [], self._row, num_rows or file.facts.batch_size
        while missing > 0:
            stop = min(row + missing, file.num_rows)
            pieces.append([column.copy() for column in file.rows(row, stop)])  # others get these rows too
            missing -= stop - row
            row = stop % file.num_rows
        return joined(pieces), row

    def move(self, row: int) -> None:
        self._row = row

    def _loaded(self) -> LoadedFile:
        """The file that this evaluation reads: the one that is there when it begins, else the one of the last."""
        if self._file is not None and self._is_first:
            found = self._look()
            if isinstance(found, os.stat_result) and not _is_same(found, self._status):
                self._load(found)
        while self._file is None:
            what = f"the file of kept {self.folder.name} batches"
            self._load(self.waiter.until(self.folder.name, self._look, what))
        self._is_first = False
        return self._file

    def _load(self, found: os.stat_result) -> None:
        """Take what is there now for what was read before, if it can be read."""
        path = self.folder.kept_path
        try:
            file = self._reader.load(path)
            check_facts(file.facts, self.folder, 0, self.fingerprint)
        except FileNotFoundError:
            return
        except DamagedFile as error:
            self.folder.quarantine(None, error.reason, path, found.st_ino)
            self.counts.quarantined_files += 1
            return
        self._file, self._status = file, found
        self.folder.say_kept_was_read()
        self.counts.files += 1

    def _look(self) -> os.stat_result | int:
        try:
            return self.folder.kept_path.stat()
        except FileNotFoundError:
            return 0

    def begin_again(self) -> None:
        """The next evaluation. Kept batches that were made anew meanwhile, or are others, count from here."""
        self._row = 0
        self._is_first = True

    def record(self) -> None:
        """Nothing is used up."""

    def position(self) -> tuple[Position, FileShape | None] | None:
        return None

    def seek(self, position: Position, shape: FileShape | None, *, can_be_made_again: bool) -> None:
        self._row = 0

    def release(self, *, record: bool) -> None:
        self.drop()

    def drop(self) -> None:
        self._file = None
        self._reader.end()

    def forget_lost_files(self) -> None:
        """It holds none."""


def _is_same(found: os.stat_result, before: os.stat_result | None) -> bool:
    """Whether two looks saw one file. By its time too: an inode number is given again."""
    return before is not None and (found.st_ino, found.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
