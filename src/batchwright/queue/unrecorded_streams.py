"""Two streams that record nothing: kept validation batches, and a provider in the consumer's own process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from batchwright.queue.batch_file import FileShape
from batchwright.queue.reading import Arrays, LoadedFile, Position, joined
from batchwright.queue.streams import BatchStream, SplitReader, StreamCounts, check_shape

if TYPE_CHECKING:
    from batchwright.queue.provider import DataProviderBase


class ValidationStream(BatchStream):
    """The rows of the file of kept batches, again and again. It is not claimed: all consumers read it."""

    def __init__(self, source: SplitReader) -> None:
        self.source = source
        self.folder = source.folder
        self.counts: StreamCounts = source.counts
        self.waiter = source.waiter
        self._file: LoadedFile | None = None
        self._found: tuple[int, int] | None = None
        """The inode and the time of the file that was read. Inode numbers are reused."""
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
            if not isinstance(found, int) and found != self._found:
                self._load(found)
        while self._file is None:
            what = f"the file of kept {self.folder.name} batches"
            self._load(self.source.waiter.until(self._find, what))
        self._is_first = False
        return self._file

    def _load(self, found: tuple[int, int]) -> None:
        """Take the current file in place of the last one, if it can be read."""
        with contextlib.suppress(FileNotFoundError):
            file = self.source.load(self.folder.kept_path, None)
            if file is not None:
                self._file, self._found = file, found
                self.counts.files += 1
                with contextlib.suppress(OSError):  # this reader may have no right to write here
                    self.folder.kept_seen_path.touch()

    def _find(self) -> tuple[int, int] | int:
        try:
            status = self.folder.kept_path.stat()
        except FileNotFoundError:
            return 0
        return status.st_ino, status.st_mtime_ns

    def begin_again(self) -> None:
        """Begin the next evaluation, with the current file."""
        self._row = 0
        self._is_first = True

    def position(self) -> tuple[Position, FileShape | None] | None:
        return None

    def seek(self, position: Position, shape: FileShape | None, *, can_be_made_again: bool) -> None:
        self._row = 0

    def drop(self) -> None:
        self._file = None
        self.source.reader.end()


class InProcessStream(BatchStream):
    """The rows of a provider, made on demand. They equal the rows of its files."""

    def __init__(self, provider: DataProviderBase, split: str, rank: int, world_size: int) -> None:
        self.provider = provider
        self.split = split
        self.counts: StreamCounts = StreamCounts()
        self._shape = FileShape(provider.batch_size, provider.num_batches(split))
        self._rows_per_file = self._shape.batch_size * self._shape.num_batches
        self._is_kept = split == "val" and bool(provider.val_batches)
        self._rank, self._world_size = (0, 1) if self._is_kept else (rank, world_size)
        self._kept: list[Arrays] = []
        self._row = 0
        """The number of rows before the next one, over all ranks and files."""
        self._file: int | None = None
        """The file that is being made."""
        self._making: Iterator[Arrays] = iter(())
        self._num_made = 0
        self._last: Arrays = []
        """The batch of that file that was made last."""

    def peek(self, num_rows: int | None) -> tuple[Arrays, int]:
        size = num_rows or self.provider.batch_size
        rows = joined(self._rows(self._row + self._rank * size, size))
        return rows, self._row + self._world_size * size

    def move(self, row: int) -> None:
        self._row = row % self._rows_per_file if self._is_kept else row

    def _rows(self, first: int, num_rows: int) -> list[Arrays]:
        pieces: list[Arrays] = []
        size = self.provider.batch_size
        while num_rows > 0:
            file, row = divmod(first, self._rows_per_file)
            start = row % size
            stop = min(start + num_rows, size)
            batch = self._batch(0 if self._is_kept else file, row // size)
            pieces.append([array[start:stop].copy() for array in batch])
            num_rows -= stop - start
            first += stop - start
        return pieces

    def _batch(self, file: int, index: int) -> Arrays:
        """A batch of a file. Those before it are made too: they all draw from one generator."""
        if self._is_kept:
            if not self._kept:
                self._kept = [_copied(batch) for batch in self.provider.batches(self.split, 0)]
            return self._kept[index]
        if self._file != file or self._num_made > index + 1:
            self._making, self._num_made = self.provider.batches(self.split, file), 0
            self.counts.files += 1
        self._file = None  # if sample_batch raises, the next call begins the file again
        while self._num_made <= index:
            self._last = _copied(next(self._making))
            self._num_made += 1
        self._file = file
        return self._last

    def begin_again(self) -> None:
        """The next evaluation begins with the first kept batch."""
        if self._is_kept:
            self._row = 0

    def position(self) -> tuple[Position, FileShape | None] | None:
        return None if self._is_kept else (Position(*divmod(self._row, self._rows_per_file)), self._shape)

    def seek(self, position: Position, shape: FileShape | None, *, can_be_made_again: bool) -> None:
        check_shape(shape, self._shape, f"{self.split} file {position.file}")
        if not self._is_kept:
            self._row = position.file * self._rows_per_file + position.row

    def drop(self) -> None:
        self._file, self._making, self._last = None, iter(()), []


def _copied(batch: Arrays) -> Arrays:
    """A batch of its own memory: a provider may fill the same arrays again."""
    return [array.copy() for array in batch]
