"""The stream of kept validation batches. Every evaluation reads the same batches, from the first."""

from __future__ import annotations

import contextlib
import os

from batchwright.queue.reading import Arrays, FileShape, LoadedFile, Position, joined
from batchwright.queue.streams import SplitReader, StreamCounts

__all__ = ["ValidationStream"]


class ValidationStream:
    """The rows of the file of kept batches, again and again. It is not claimed: all consumers read it."""

    def __init__(self, source: SplitReader) -> None:
        self.source = source
        self.folder = source.folder
        self.counts: StreamCounts = source.counts
        self._file: LoadedFile | None = None
        self._status: os.stat_result | None = None
        self._is_first = True
        """The next batch is the first one of an evaluation."""
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
        """The file that this evaluation reads: the one present at its start, else that of the last evaluation."""
        if self._file is not None and self._is_first:
            found = self._find()
            if isinstance(found, os.stat_result) and not _is_same(found, self._status):
                self._load(found)
        while self._file is None:
            what = f"the file of kept {self.folder.name} batches"
            self._load(self.source.waiter.until(self._find, what))
        self._is_first = False
        return self._file

    def _load(self, found: os.stat_result) -> None:
        """Take the current file in place of the last one, if it can be read."""
        with contextlib.suppress(FileNotFoundError):
            file = self.source.load(self.folder.kept_path, None)
            if file is not None:
                self._file, self._status = file, found
                self.counts.files += 1
                with contextlib.suppress(OSError):  # this reader may have no right to write here
                    self.folder.kept_seen_path.touch()

    def _find(self) -> os.stat_result | int:
        try:
            return self.folder.kept_path.stat()
        except FileNotFoundError:
            return 0

    def begin_again(self) -> None:
        """Begin the next evaluation, with the current file."""
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
        self.source.reader.end()

    def forget_lost_files(self) -> None:
        """It holds none."""


def _is_same(found: os.stat_result, before: os.stat_result | None) -> bool:
    """Whether two looks saw one file. The time is compared too, because inode numbers are reused."""
    return before is not None and (found.st_ino, found.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
