"""Steps by tokens. A batch has as many rows of similar length as fit. Batches are cut inside blocks of 4,096 rows.

The batches of a block and their order depend on the block's widths alone, so every rank cuts the same batches. A
position (rows handed over) identifies the place of a run: its block, and by row counts the batches before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchwright.base.errors import SpecError
from batchwright.base.seeds import key_of, mix64
from batchwright.order.epochs import NEVER, Epochs

__all__ = ["BLOCK_ROWS", "Blocks", "BudgetCut", "refuse_wide_rows"]

BLOCK_ROWS = 4096
"""Rows that are cut together. More would leave less padding; saved positions depend on it."""
_KEPT_BLOCKS = 8
"""Cuts that are remembered: of the block in which a run is, and of some around it."""

Numbers = NDArray[np.int64]
Entry = tuple[int, int, int]
"""(rows of the block handed over before, batch_tokens, row_multiple): from there on it is cut so."""
Record = Sequence[Sequence[int]]
"""[[from_step, from_position, batch_tokens, row_multiple], ...]: how a run cut batches."""


def cut_block(widths: Numbers, batch_tokens: int, *, row_multiple: int = 1, key: int) -> list[Numbers]:
    """Batches of the rows of a block: the row numbers of each, every row once.

    A batch of r rows whose widest has w tokens has r * w <= batch_tokens, where r is rounded up to row_multiple. The
    number of rows of every batch is a multiple of row_multiple, except for at most one batch, when rows run out. Rows
    of similar width share a batch. `key` fixes the order of the batches. Rows inside a batch are in ascending order.

    >>> [rows.tolist() for rows in cut_block(np.array([5, 2, 9, 2, 4]), 10, key=2)]
    [[0, 4], [2], [1, 3]]
    """
    by_width = np.argsort(widths, kind="stable")
    sorted_widths, count = widths[by_width].tolist(), len(widths)
    batches, first = [], 0
    while first < count:
        last = min(first + row_multiple, count)
        while last < count:
            more = min(last + row_multiple, count)
            full_rows = -(-(more - first) // row_multiple) * row_multiple
            if full_rows * sorted_widths[more - 1] > batch_tokens:
                break
            last = more
        batches.append(np.sort(by_width[first:last]))
        first = last
    noise = mix64(np.arange(len(batches), dtype=np.uint64), np.uint64(key))
    return [batches[number] for number in np.argsort(noise, kind="stable").tolist()]


def block_batches(widths: Numbers, record: Sequence[Entry], *, key: int) -> list[Numbers]:
    """The batches of a block. The budget may have changed inside it; the remaining rows were then cut anew.

    >>> [rows.tolist() for rows in block_batches(np.array([5, 2, 9, 2, 4]), [(0, 10, 1), (2, 30, 1)], key=2)]
    [[0, 4], [1, 2, 3]]
    """
    batches: list[Numbers] = []
    rest = np.arange(len(widths))
    for (offset, batch_tokens, row_multiple), (until, *_) in pairwise([*record, (len(widths), 0, 0)]):
        taken: list[Numbers] = []
        room = until - offset
        for rows in cut_block(widths[rest], batch_tokens, row_multiple=row_multiple, key=key):
            if room <= 0:
                break
            taken.append(rest[rows[:room]])  # only a part of a batch if a run was moved to a position inside it
            room -= len(taken[-1])
        batches += taken
        rest = np.setdiff1d(rest, np.concatenate([rest[:0], *taken]), assume_unique=True)
    return batches


def refuse_wide_rows(widths: Numbers, batch_tokens: int, row_multiple: int, positions: Numbers | None = None) -> None:
    """Refuse a row that is too wide for any batch. `positions` are the positions of the rows, for the message."""
    over = np.flatnonzero(widths * row_multiple > batch_tokens)
    if not len(over):
        return
    row = int(over[0])
    tokens, position, times = int(widths[row]), None, ""
    if positions is not None:
        position = int(positions[row])
    if row_multiple > 1:
        times = f", {row_multiple} times (row_multiple),"
    raise SpecError(
        f"a row of {tokens:,} tokens{times} is more than batch_tokens={batch_tokens:,}",
        parameter="batch_tokens",
        row=row,
        position=position,
        tokens=tokens,
        remedy=f"batch_tokens={int(widths.max()) * row_multiple} or more, or shorter rows",
    )


class _Cut(NamedTuple):
    """One block's batches."""

    rows: list[Numbers]
    """The rows of each batch, counted from the block's first row."""
    borders: Numbers
    """The number of rows before each batch, and of all batches."""
    lengths: Numbers
    """The lengths of the block's rows."""


@dataclass(eq=False)
class Blocks:
    """The cuts of blocks. Each is computed on first use; the last used ones are cached."""

    epochs: Epochs
    seed: int
    lengths_at: Callable[[Numbers], Numbers]
    """(positions) -> the lengths of these rows."""
    tokens_of: Callable[[Numbers], Numbers]
    """(lengths) -> the tokens that each row takes in a batch whose longest row it is."""

    def __post_init__(self) -> None:
        self.limit: int = NEVER
        """The live row at which the stream ends."""
        if self.epochs.limit is not None:
            self.limit = self.epochs.skips.live(self.epochs.limit)
        self._cuts: dict[tuple[int, tuple[Entry, ...]], _Cut] = {}
        self._counts: dict[tuple[int, tuple[Entry, ...]], int] = {}

    def span(self, live: int) -> tuple[int, int]:
        """(first row, last row + 1) of the block of a live row: blocks begin anew with each epoch."""
        _, begin, end = self.epochs.span(live)
        start = begin + (live - begin) // BLOCK_ROWS * BLOCK_ROWS
        return start, min(start + BLOCK_ROWS, end or NEVER, self.limit)

    def cut(self, live: int, record: tuple[Entry, ...]) -> _Cut:
        """The batches of the block of a live row."""
        start, stop = self.span(live)
        known = self._cuts.pop((start, record), None)
        if known is None:
            number, begin, _ = self.epochs.span(start)
            positions = self.epochs.skips.positions(np.arange(start, stop))
            lengths = self.lengths_at(positions)
            tokens = self.tokens_of(lengths)
            _, batch_tokens, row_multiple = record[-1]
            refuse_wide_rows(tokens, batch_tokens, row_multiple, positions)
            key = key_of(self.seed, "batches of a block", number, (start - begin) // BLOCK_ROWS)
            rows = block_batches(tokens, record, key=key)
            borders = np.concatenate([[0], np.cumsum([len(batch) for batch in rows], dtype=np.int64)])
            known = _Cut(rows, borders, lengths)
            self._counts[start, record] = len(rows)
            while len(self._cuts) >= _KEPT_BLOCKS:
                self._cuts.pop(next(iter(self._cuts)))
        self._cuts[start, record] = known
        return known

    def count(self, live: int, record: tuple[Entry, ...]) -> int:
        """The number of batches of the block of a live row. One number for each block stays in memory."""
        key = (self.span(live)[0], record)
        if key not in self._counts:
            self.cut(live, record)
        return self._counts[key]


class BudgetBatch(NamedTuple):
    """The rows of one step."""

    positions: Numbers
    """The positions of its data rows, in ascending order."""
    lengths: Numbers
    num_rows: int
    """The number of rows, with those that fill it up to a multiple of row_multiple."""
    after: int
    """The position after it."""
    after_in_block: int
    """Batches before it in the block of this position."""


@dataclass(frozen=True, slots=True)
class BudgetCut:
    """Steps of at most `batch_tokens` tokens, one after another: `Cut` for steps by tokens.

    Arguments and results are positions. Finding a step by its number cuts all blocks before it, once.
    """

    record: Record
    blocks: Blocks

    is_linear = False
    """No batch crosses the end of an epoch."""

    @property
    def epochs(self) -> Epochs:
        return self.blocks.epochs

    def settle(self, position: int) -> int:
        """The position at which the next batch really starts, after skipped rows."""
        return self._position(self._live(position))

    def is_over(self, position: int, end: int | None) -> bool:
        """Whether a run that ends at a position (None: never) has no batch left at a (settled) position."""
        live = self._live(position)
        return live >= self.blocks.limit or (end is not None and live >= self._live(end))

    def batch(self, position: int) -> BudgetBatch:
        """The batch that begins at a (settled) position."""
        live = self._live(position)
        start, stop = self.blocks.span(live)
        entries = self._entries(start, stop)
        cut = self.blocks.cut(live, entries)
        number = _number(cut, live - start)
        multiple = next(entry[2] for entry in reversed(entries) if entry[0] <= live - start)
        rows, after = cut.rows[number], start + int(cut.borders[number + 1])
        return BudgetBatch(
            positions=self.epochs.skips.positions(start + rows),
            lengths=cut.lengths[rows],
            num_rows=-(-len(rows) // multiple) * multiple,
            after=self._position(after),
            after_in_block=(number + 1) * (after < stop),
        )

    def in_block(self, position: int) -> int | None:
        """Batches before a position in its block; None if it is inside a batch."""
        live = self._live(position)
        start, stop = self.blocks.span(live)
        if live == start or live >= stop:
            return 0
        cut = self._cut(live)
        number = _number(cut, live - start)
        if int(cut.borders[number]) != live - start:
            return None
        return number

    def after(self, position: int, num_steps: int, end: int | None = None) -> int:
        """The position after `num_steps` more steps, or the `end` of a run that has fewer."""
        live = self._live(position)
        while num_steps:
            start, stop = self.blocks.span(live)
            if live >= stop or (end is not None and live >= self._live(end)):
                break  # the stream or the run ends here
            number = self._before(live)
            left = self._count(live) - number
            if num_steps < left:
                return self._position(start + int(self._cut(live).borders[number + num_steps]))
            live, num_steps = stop, num_steps - left
        return self._position(live)

    def steps_until(self, position: int, later: int) -> int:
        """The number of whole steps from one position to a later one."""
        live, goal = self._live(position), self._live(later)
        steps = 0
        while live < goal:
            start, stop = self.blocks.span(live)
            if live >= stop:
                break
            before = self._before(live)
            if goal < stop:
                return steps + _number(self._cut(live), goal - start) - before
            steps, live = steps + self._count(live) - before, stop
        return steps

    def steps_of_epoch(self, live: int) -> int:
        """Steps of the epoch of a live row, from its beginning."""
        _, begin, end = self.epochs.span(live)
        assert end is not None
        return sum(self._count(start) for start in range(begin, min(end, self.blocks.limit), BLOCK_ROWS))

    def most_steps_of_epoch(self, position: int) -> int:
        return self.steps_of_epoch(self._live(position))

    def _before(self, live: int) -> int:
        """Batches before a row in its block."""
        start, _ = self.blocks.span(live)
        if live == start:
            return 0
        return _number(self._cut(live), live - start)

    def _count(self, live: int) -> int:
        return self.blocks.count(live, self._entries(*self.blocks.span(live)))

    def _cut(self, live: int) -> _Cut:
        return self.blocks.cut(live, self._entries(*self.blocks.span(live)))

    def _entries(self, start: int, stop: int) -> tuple[Entry, ...]:
        """The record entries by which the block of these rows was cut."""
        found: dict[int, Entry] = {}
        for _, position, batch_tokens, row_multiple in self.record:
            offset = max(self._live(position) - start, 0)
            if offset < stop - start:
                found[offset] = (offset, batch_tokens, row_multiple)
        return tuple(found.values())

    def _live(self, position: int) -> int:
        return self.epochs.skips.live(position)

    def _position(self, live: int) -> int:
        return self.epochs.skips.position(live)


def _number(cut: _Cut, offset: int) -> int:
    """The batch of the row at an offset into the order of batches."""
    return int(np.searchsorted(cut.borders, offset, side="right")) - 1
