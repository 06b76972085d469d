"""The online path on one page: rows in, an order over them, blocks of gathered rows out.

rows     = windows of each source            batches/window.py: planned once, never changed by the order
           or whole documents                batches/row_index.py, samples.py: packed, or one in a row
draw     = order.at(positions)               order/: position -> (source, row, epoch), no data yet
located  = places of those rows              for thousands of positions at once
block    = one gather                        batches/gather.py: tokens, widened, in reused memory
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from batchwright.base.plugins import Rows
from batchwright.batches.batch import Block, Padding, add_border_fields, add_sample_fields, fill_up, mask_padding
from batchwright.batches.gather import Allocate, windows_at
from batchwright.batches.samples import PaddedSamples, SampleRows, join_padded
from batchwright.batches.settings import Fields
from batchwright.batches.window import JointWindows, WindowRows
from batchwright.order.schedule import Draw, Order
from batchwright.order.sharding import Share, last_row, row_numbers
from batchwright.store.stream import StoredDocument

__all__ = ["Flow", "LocatedRows", "Picked", "Task"]


@dataclass(frozen=True, slots=True)
class Task:
    """Consecutive steps of one rank. Plain numbers, so that it can be sent to any thread or process."""

    live: int
    """The first row of the first step's global batch. All rows here are counted without skipped ones."""
    num_steps: int
    stride: int
    """Rows from one step's first row to the next one's: one global batch, or several if workers take turns."""
    rows: Share
    """This rank's rows of each step, as numbers in the global batch: at least one."""
    real_rows: int
    """The number of data rows in each step. The rows after them repeat the last one, with weight 0."""

    @property
    def num_rows(self) -> int:
        return self.num_steps * len(self.rows)

    def live_rows(self) -> NDArray[np.int64]:
        rows = np.minimum(row_numbers(self.rows), self.real_rows - 1)
        steps = self.live + self.stride * np.arange(self.num_steps)
        return (steps[:, None] + rows).ravel()

    def weights(self) -> NDArray[np.float32] | None:
        if last_row(self.rows) < self.real_rows:
            return None
        return np.tile((row_numbers(self.rows) < self.real_rows).astype(np.float32), self.num_steps)


@dataclass(frozen=True, slots=True)
class Picked:
    """One rank's rows of one step, if they are not consecutive."""

    num_steps: ClassVar[int] = 1

    positions: NDArray[np.int64]
    weight: NDArray[np.float32] | None
    width: int
    """Tokens of the global batch's rows."""

    @property
    def num_rows(self) -> int:
        return len(self.positions)


class Flow:
    """Rows of several sources in one order. Pure: the same positions give the same blocks, on any thread or process."""

    def __init__(
        self,
        rows: Sequence[Rows],
        order: Order,
        fields: Fields | None = None,
        *,
        row_tokens: int | None = None,
        pad: int | None = None,
        padding: Padding | None = None,
    ) -> None:
        """Shorter rows are filled up to `row_tokens` with the token `pad`.

        `padding` is the width of a batch that has rows of samples.
        """
        self.rows: list[Rows] = list(rows)
        self.order: Order = order
        self.fields: Fields = fields or Fields().with_defaults(is_packed=False)
        self.row_tokens: int = row_tokens or rows[0].row_tokens
        self.pad: int | None = pad
        self.windows: list[WindowRows] = [r for r in rows if isinstance(r, WindowRows)]
        self.stored: list[WindowRows | SampleRows] = [r for r in rows if isinstance(r, WindowRows | SampleRows)]
        """The rows in stores."""
        self.has_samples: bool = any(isinstance(r, SampleRows) for r in rows)
        self.padding: Padding = padding or Padding("max_length")
        self.asks_all_ranks: bool = self.has_samples and self.padding.to != "max_length"
        """Whether the rows of all ranks are looked up, because the longest one decides the width of a batch."""
        self.sequences: Any | int = max(getattr(r, "sequences", 1) for r in rows)
        """The number of batch rows for one row of the order: two for preference pairs."""
        self.joint: JointWindows | None = None
        is_equal = len(self.windows) == len(rows) and all(r.row_tokens == self.row_tokens for r in rows)
        if is_equal and len(rows) > 1 and JointWindows.can(self.windows):
            self.joint = JointWindows(self.windows)
        self.one_gather: bool = is_equal and (len(rows) == 1 or self.joint is not None)
        """Whether all rows are windows of mapped memory that one gather can take."""

    @property
    def width_in_words(self) -> str:
        """Tokens of a row of a batch."""
        if self.padding.to == "max_length":
            return str(self.row_tokens)
        return f"up to {self.row_tokens}"

    def locate(self, task: Task | Picked) -> LocatedRows:
        """Find the rows of a task. The order is computed for all rows at once, so many rows are cheap."""
        if isinstance(task, Picked):
            draw = self.order.at(task.positions)
            return LocatedRows(self, task.positions, task.weight, draw, np.full(task.num_rows, task.width))
        positions = self.order.skips.positions(task.live_rows())
        return LocatedRows(self, positions, task.weights(), self.order.at(positions), self._widths(task))

    def _widths(self, task: Task) -> NDArray[np.int64]:
        """The width in tokens of each row's batch, from the longest row of all ranks."""
        if not self.asks_all_ranks:
            return np.full(task.num_rows, self.row_tokens)
        steps = task.live + task.stride * np.arange(task.num_steps)
        everything = self.order.skips.positions((steps[:, None] + np.arange(task.real_rows)).ravel())
        lengths = self.lengths(everything)
        longest = lengths.reshape(task.num_steps, task.real_rows).max(axis=1)
        return np.repeat(self.padding.widths(longest, self.row_tokens), len(task.rows))

    def lengths(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The lengths of the rows at some positions in tokens, without padding."""
        draw = self.order.at(positions)
        lengths = np.empty(len(draw.index), np.int64)
        for number, rows in enumerate(self.rows):
            mine = np.flatnonzero(draw.source == number)
            lengths[mine] = rows.row_tokens
            if isinstance(rows, SampleRows):
                lengths[mine] = rows.lengths(draw.index[mine])
        return lengths

    def totals(self, positions: NDArray[np.int64]) -> tuple[float, int] | None:
        """(sum of the loss masks, samples) of the rows at some positions; None if some are windows."""
        if not all(isinstance(rows, SampleRows) for rows in self.rows):
            return None
        draw, tokens, samples = self.order.at(positions), 0.0, 0
        for number, rows in enumerate(self.rows):
            assert isinstance(rows, SampleRows)
            learned, count = rows.totals(draw.index[draw.source == number])
            tokens, samples = tokens + learned, samples + count
        return tokens, samples

    def documents(self, positions: NDArray[np.int64]) -> list[list[StoredDocument]]:
        """The documents in the rows at some positions, in reading order."""
        draw, found = self.order.at(positions), []
        for source, index, epoch in zip(draw.source.tolist(), draw.index.tolist(), draw.epoch.tolist(), strict=True):
            rows = self.stored[source]
            pieces = rows.pieces_of(index, epoch)
            numbers = [number for _, begin, stop in pieces for number, _, _ in rows.stream.documents_in(begin, stop)]
            found.append([rows.stream.document(number) for number in numbers])
        return found

    def at(self, positions: NDArray[np.int64], allocate: Allocate) -> Block:
        """The rows at some positions, skipped ones included."""
        widths = np.full(len(positions), self.row_tokens)
        return LocatedRows(self, positions, None, self.order.at(positions), widths).make(0, len(positions), allocate)

    def make(self, task: Task | Picked, allocate: Allocate) -> Block:
        return self.locate(task).make(0, task.num_rows, allocate)


@dataclass(eq=False)
class LocatedRows:
    """Rows at some positions, looked up. `make` gathers any run of them."""

    flow: Flow
    positions: NDArray[np.int64]
    weight: NDArray[np.float32] | None
    draw: Draw
    widths: NDArray[np.int64]
    """The width of each row's batch in tokens."""

    def __post_init__(self) -> None:
        self.windows: NDArray[Any] | None = None
        self.start: NDArray[np.int64]
        self.rows: NDArray[np.int64]
        self.apart: NDArray[np.int64] | None = None
        """Rows over the border of a shard, which are read one by one."""
        if self.flow.one_gather:
            self._find_windows()
        elif self.flow.fields.need_borders and not self.flow.has_samples:
            self._find_starts()

    def _find_starts(self) -> None:
        """The starts of rows in their streams, for sources that are gathered one by one."""
        source, index, epoch = self.draw
        self.start = np.empty(len(index), np.int64)
        for number in np.unique(source).tolist():
            mine = np.flatnonzero(source == number)
            self.start[mine] = self.flow.windows[number].starts(index[mine], epoch[mine])

    def _find_windows(self) -> None:
        source, index, epoch = self.draw
        rows = self.flow.windows[0]
        if self.flow.joint is not None:
            address, is_whole, self.start = self.flow.joint.find(source, index, epoch)
        else:  # an address is valid only while its shard is mapped: `_mapped` keeps it mapped
            address, is_whole, self._mapped, self.start = rows.addresses(index, epoch)
        if not is_whole.all():
            self.apart = np.flatnonzero(~is_whole)
            if len(self.apart) == len(address):
                return
            address[self.apart] = address[is_whole][0]  # any row that is safe to gather; it is overwritten later
        self.windows, self.rows = windows_at(address, self.flow.row_tokens + 1, rows.stream.dtype)

    def make(self, first: int, last: int, allocate: Allocate) -> Block:
        """Gather rows [first, last) of the located ones."""
        flow = self.flow
        if flow.has_samples:
            return self._make_samples(first, last, allocate)
        out = allocate(last - first, flow.row_tokens + 1)
        if flow.one_gather:
            self._gather_at_once(first, last, out)
        else:
            self._gather_by_source(first, last, out)
        block = self._block(first, last, out)
        if flow.fields.need_borders:
            add_border_fields(block, self._borders(first, last), flow.fields)
        if flow.pad is not None:
            fill_up(block, np.array([rows.row_tokens for rows in flow.rows])[block.source], flow.pad)
        mask_padding(block)
        return block

    def _block(self, first: int, last: int, out: NDArray[np.int64]) -> Block:
        weight = None if self.weight is None else self.weight[first:last]
        return Block(out, self.draw.source[first:last], self.positions[first:last], weight)

    def _borders(self, first: int, last: int) -> list[NDArray[np.int64]]:
        """The offsets of document starts in each row."""
        draw, windows = self.draw, self.flow.windows
        places = zip(draw.source[first:last].tolist(), self.start[first:last], draw.epoch[first:last], strict=True)
        return [windows[source].borders(int(start), int(epoch)) for source, start, epoch in places]

    def _gather_at_once(self, first: int, last: int, out: NDArray[np.int64]) -> None:
        if self.windows is not None:
            np.copyto(out, self.windows[self.rows[first:last]])
        if self.apart is None:
            return
        for row in self.apart[(self.apart >= first) & (self.apart < last)].tolist():
            windows = self.flow.windows[int(self.draw.source[row])]
            windows.read_row(int(self.start[row]), out[row - first], int(self.draw.epoch[row]))

    def _make_samples(self, first: int, last: int, allocate: Allocate) -> Block:
        """Make rows that include samples, padded source by source."""
        flow, per = self.flow, self.flow.sequences
        source, index, epoch = self.draw.source[first:last], self.draw.index[first:last], self.draw.epoch[first:last]
        widths = self.widths[first:last]
        width = int(widths.max(initial=1)) + 1
        out = allocate((last - first) * per, width)
        parts: list[tuple[NDArray[np.int64], PaddedSamples]] = []
        for number, rows in enumerate(flow.rows):
            mine = np.flatnonzero(source == number)
            if not len(mine):
                continue
            target = out
            if len(mine) < len(source):
                target = np.empty((len(mine) * per, width), np.int64)
            if isinstance(rows, SampleRows):
                show, left, pad = bool(flow.fields.roles), flow.padding.left, flow.pad or 0
                padded = rows.padded(
                    index[mine], widths[mine], target, pad=pad, left=left, show=show, allocate=allocate
                )
            else:
                padded = self._padded_windows(rows, index[mine], epoch[mine], widths[mine], target)
            parts.append(((mine[:, None] * per + np.arange(per)).ravel(), padded))
        padded = parts[0][1]
        if padded.tokens is not out:
            padded = join_padded(parts, out)
        block = self._block(first, last, out)
        add_sample_fields(block, padded, flow.fields, allocate)
        block.shown = padded.shown
        mask_padding(block)
        return block

    def _padded_windows(
        self,
        rows: Rows,
        index: NDArray[np.int64],
        epoch: NDArray[np.int64],
        widths: NDArray[np.int64],
        out: NDArray[np.int64],
    ) -> PaddedSamples:
        """Windows beside samples. A window is one long sample, or one per document if borders are requested."""
        fields, length = self.flow.fields, rows.row_tokens + 1
        part = np.empty((len(index), length), np.int64)
        rows.gather(index, epoch, part)
        out[:] = self.flow.pad or 0
        out[:, :length] = part
        weight = np.zeros(out.shape, np.float32)
        weight[:, 1:length] = 1
        begins = np.zeros(out.shape, bool)
        begins[:, 0] = True
        if fields.need_borders and isinstance(rows, WindowRows):
            starts = rows.starts(index, epoch)
            for row, (start, e) in enumerate(zip(starts.tolist(), epoch.tolist(), strict=True)):
                begins[row, rows.borders(start, e)] = True
        if not fields.border_loss:
            weight[begins] = 0
        begins[:, length - 1 :] = False  # a window's last token is only a target: a document that begins there has none
        count = len(index)
        return PaddedSamples(out, weight, begins, np.full(count, length - 1), np.zeros(count, np.int64), widths)

    def _gather_by_source(self, first: int, last: int, out: NDArray[np.int64]) -> None:
        source, index, epoch = self.draw.source[first:last], self.draw.index[first:last], self.draw.epoch[first:last]
        for number, rows in enumerate(self.flow.rows):
            mine = np.flatnonzero(source == number)
            width = rows.row_tokens + 1
            if len(mine) == len(source) and width == out.shape[1]:
                rows.gather(index, epoch, out)
            elif len(mine):
                part: NDArray[Any] = np.empty((len(mine), width), np.int64)
                rows.gather(index[mine], epoch[mine], part)
                out[mine, :width] = part
