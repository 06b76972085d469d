"""Validation batches that are made once and kept: every evaluation reads the same ones, from the first."""

from __future__ import annotations

from penstock.queue.batch_file import DamagedFile
from penstock.queue.claimed import Counts, check_facts
from penstock.queue.folder import SplitFolder
from penstock.queue.reading import Arrays, FileShape, LoadedFile, Position, Reader, joined
from penstock.queue.waiting import Waiter

__all__ = ["KeptStream"]


class KeptStream:
    """The rows of the one file of a split, again and again. No claim: all who want read it."""

    def __init__(self, folder: SplitFolder, waiter: Waiter, fingerprint: str) -> None:
        self.folder = folder
        self.waiter = waiter
        self.fingerprint = fingerprint
        self.counts = Counts()
        self._reader = Reader()
        self._file: LoadedFile | None = None
        self._inode = -1
        self._row = 0

    def take(self, num_rows: int | None) -> Arrays:
        file = self._loaded()
        pieces, missing = [], num_rows or file.facts.batch_size
        while missing > 0:
            stop = min(self._row + missing, file.num_rows)
            pieces.append([column.copy() for column in file.rows(self._row, stop)])  # others get these rows too
            missing -= stop - self._row
            self._row = stop % file.num_rows
        return joined(pieces)

    def _loaded(self) -> LoadedFile:
        while self._file is None:
            inode: tuple[int] = self.waiter.until(self.folder.name, self._look)
            try:
                file = self._reader.load(self.folder.ready_path(0))
                check_facts(file.facts, self.folder, 0, self.fingerprint)
            except FileNotFoundError:
                continue
            except DamagedFile as error:
                self.folder.quarantine(0, error.reason, self.folder.ready_path(0), inode[0])
                self.counts.quarantined_files += 1
                continue
            self._file, self._inode = file, inode[0]
            self.counts.files += 1
        return self._file

    def _look(self) -> tuple[int] | int:
        try:
            return (self.folder.ready_path(0).stat().st_ino,)
        except FileNotFoundError:
            return 0

    def begin_again(self) -> None:
        """The next evaluation. Kept batches that were made anew meanwhile, of another number, count from here."""
        self._row = 0
        if self._file is not None and self._look() != (self._inode,):
            self._file = None

    def record(self) -> None:
        """Nothing is used up."""

    def position(self) -> tuple[Position, FileShape] | None:
        return None

    def seek(self, position: Position, shape: FileShape, *, can_be_made_again: bool) -> None:
        self._row = 0

    def release(self, *, record: bool) -> None:
        self._file = None

    def forget_lost_files(self) -> None:
        """It holds none."""
