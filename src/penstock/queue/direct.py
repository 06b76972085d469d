"""A provider in the consumer's own process, without files: for breakpoints and tests. The batches are the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.queue.claimed import Counts, check_shape
from penstock.queue.reading import Arrays, FileShape, Position, joined

if TYPE_CHECKING:
    from penstock.queue.provider import DataProviderBase

__all__ = ["DirectStream"]


class DirectStream:
    """The rows that a provider makes, when they are asked for. Kept batches of a split come again and again."""

    def __init__(self, provider: DataProviderBase, split: str, rank: int, world_size: int) -> None:
        self.provider = provider
        self.split = split
        self.counts = Counts()
        self._is_kept = split == "val" and bool(provider.val_batches)
        self._rank, self._world_size = (0, 1) if self._is_kept else (rank, world_size)
        self._kept: list[Arrays] = []
        self._go_to(Position(0, 0))

    def _go_to(self, position: Position) -> None:
        self._file, self._row = position
        self._batches: Iterator[Arrays] | None = None
        self._made = 0
        self._batch: Arrays = []

    def take(self, num_rows: int | None) -> Arrays:
        size = num_rows or self.provider.batch_size
        before = Position(self._file, self._row)
        try:
            for _ in range(self._rank):
                self._next_rows(size)
            rows = joined(self._next_rows(size))
            for _ in range(self._world_size - self._rank - 1):
                self._skip(size)
        except BaseException:
            self._go_to(before)  # sample_batch raised: nothing was taken
            raise
        return rows

    def _skip(self, num_rows: int) -> None:
        rows_per_file = self._rows_per_file
        if self._row + num_rows > rows_per_file:
            self._go_to(Position(self._file + 1, self._row + num_rows - rows_per_file))
        else:
            self._row += num_rows

    @property
    def _shape(self) -> FileShape:
        return FileShape(self.provider.batch_size, self.provider.num_batches(self.split))

    @property
    def _rows_per_file(self) -> int:
        return self._shape.batch_size * self._shape.num_batches

    def _next_rows(self, num_rows: int) -> list[Arrays]:
        pieces: list[Arrays] = []
        batch_size = self.provider.batch_size
        while num_rows > 0:
            while self._row >= self._rows_per_file:
                self._go_to(Position(0 if self._is_kept else self._file + 1, self._row - self._rows_per_file))
            batch = self._made_batch(self._row // batch_size)
            start = self._row % batch_size
            stop = min(start + num_rows, batch_size)
            pieces.append([array[start:stop] for array in batch])
            num_rows -= stop - start
            self._row += stop - start
        return pieces

    def _made_batch(self, index: int) -> Arrays:
        """A batch of the current file. Those before it are made too: they all draw from one generator."""
        if self._is_kept:
            if not self._kept:
                self._kept = list(self.provider.batches(self.split, 0))
            return [array.copy() for array in self._kept[index]]
        if self._batches is None or index < self._made - 1:
            self._batches, self._made = self.provider.batches(self.split, self._file), 0
        while self._made <= index:
            self._batch = next(self._batches)
            self._made += 1
            if self._made == 1:
                self.counts.files += 1
        return self._batch

    def begin_again(self) -> None:
        """The next evaluation begins with the first kept batch."""
        if self._is_kept:
            self._go_to(Position(0, 0))

    def record(self) -> None:
        """Nothing is used up."""

    def position(self) -> tuple[Position, FileShape] | None:
        if self._is_kept:
            return None
        number, row = self._file, self._row
        if row >= self._rows_per_file:
            number, row = number + 1, row - self._rows_per_file
        return Position(number, row), self._shape

    def seek(self, position: Position, shape: FileShape, *, can_be_made_again: bool) -> None:
        check_shape(shape, self._shape, f"{self.split} file {position.file}")
        self._go_to(position)

    def release(self, *, record: bool) -> None:
        self._batches = None

    def forget_lost_files(self) -> None:
        """It holds none."""
