"""The table of a buffer: its blocks, and the live rows of each.

The table checks no values and writes no files. Changes were checked before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchwright.buffer.blocks import (
    ArrowColumn,
    Column,
    NumberColumn,
    RowBlock,
    Segment,
    SlowWrite,
    capacity_for,
    costs,
    refuse_write,
)
from batchwright.buffer.schema import Columns, Row, Schema, num_rows_of, part_of
from batchwright.buffer.view import View

_SPARSE = 0.75
"""A block with a smaller share of live rows is written anew."""
_FAN, _SMALL = 8, 32
"""Neighbours that are joined at once, if each has at most this part (1/32) of all rows."""


class _Writers(NamedTuple):
    """The writers that put rows into the last block without a closer check."""

    rows: list[tuple[str, Callable[[int, Any], None]]]
    """A function per column that writes one value to a row, or raises `SlowWrite`."""
    columns: list[tuple[str, NDArray[Any], np.dtype[Any], tuple[int, ...]]]
    """The name, memory, type and shape of each column of numbers."""
    row_bytes: int


class BufferTable:
    """The rows of a buffer. A view of them is made in no time and never changes; rows that stay are not moved."""

    def __init__(self) -> None:
        self.schema: Schema = Schema()
        self.num_rows: int = 0
        self.next_id: int = 0
        self.number: int = 0
        """The number of the last change."""
        self.origins: list[str | None] = [None]
        self.next_serial: int = 0
        self._sealed: list[Segment] = []
        self._tail: RowBlock | None = None
        self._tail_start = 0
        self._view: View | None = None
        self._origin_numbers: dict[str | None, int] = {}
        """The number of each origin. Made again if its length differs from `origins`."""
        self._writers: _Writers | None = None

    # Undoing

    def save(self) -> tuple[Any, ...]:
        """Return the state that `restore` needs, in case the next change fails. The cost does not grow with rows."""
        tail = self._tail
        of_tail = tail and (tail.num_rows, tail.columns, len(tail.ledger))
        numbers = self.num_rows, self.next_id, self.number, self.next_serial, len(self.origins)
        # Not vars(self): that would make each later access to an attribute slower.
        return self.schema, list(self._sealed), tail, self._tail_start, numbers, of_tail

    def restore(self, saved: tuple[Any, ...]) -> None:
        self.schema, self._sealed, self._tail, self._tail_start, numbers, of_tail = saved
        self.num_rows, self.next_id, self.number, self.next_serial, num_origins = numbers
        self._view = self._writers = None
        del self.origins[num_origins:]
        tail = self._tail
        if tail is not None:
            tail.num_rows, tail.columns, ledger_items = of_tail
            del tail.ledger[ledger_items:]
            for column in tail.columns.values():
                column.take_back(tail.num_rows)

    # Reading

    def view(self) -> View:
        if self._view is None:
            self._view = View(self.segments(), self.schema, self.number, self.origins)
        return self._view

    def segments(self) -> list[Segment]:
        tail = self._tail
        if tail is None or tail.num_rows == self._tail_start:
            return list(self._sealed)
        return [*self._sealed, Segment(tail, tail.columns, self._tail_start, tail.num_rows)]

    # Adding

    def begin_change(self) -> int:
        """Count one more change, and give its number."""
        self._view = None
        self.number += 1
        return self.number

    def put(self, row: Row) -> bool:
        """Add one row, if each value is of exactly the type that its column takes without a look; else False."""
        tail = self._tail
        if tail is None or tail.num_rows == tail.capacity or not self.num_rows:
            return False
        writers = (self._writers or self._make_writers(tail)).rows
        if len(row) != len(writers):
            return False
        at = tail.num_rows
        try:
            for name, write in writers:
                write(at, row[name])
        except (SlowWrite, KeyError, OverflowError, UnicodeEncodeError):
            self.take_back()
            return False
        return True

    def put_columns(self, columns: dict[str, Any]) -> int:
        """Add rows by column, if each is an array of exactly the type that its column takes; else 0. How many."""
        tail = self._tail
        if tail is None or not self.num_rows:
            return 0
        writers = self._writers or self._make_writers(tail)
        if columns.keys() != self.schema.by_name.keys() or len(writers.columns) < len(columns):
            return 0
        for name, _, dtype, shape in writers.columns:
            array = columns[name]
            if type(array) is not np.ndarray or (array.dtype, array.shape[1:]) != (dtype, shape) or not array.ndim:
                return 0
        count, at = num_rows_of(columns), tail.num_rows
        if at + count > tail.capacity or any(len(array) != count for array in columns.values()):
            return 0
        for name, values, _, _ in writers.columns:
            values[at : at + count] = columns[name]
        costs.written += count * writers.row_bytes
        return count

    def last_put(self, count: int) -> Columns:
        """The rows that `put` or `put_columns` wrote and `accept` has not counted yet."""
        tail = self._tail
        assert tail is not None
        return {name: column.last_put(tail.num_rows, tail.num_rows + count) for name, column in tail.columns.items()}

    def take_back(self) -> None:
        """Forget the row that `put` wrote, or some of it, unless it was counted."""
        if self._tail is not None:
            for column in self._tail.columns.values():
                if isinstance(column, ArrowColumn):
                    column.take_back(self._tail.num_rows)

    def accept(self, count: int, time_us: int) -> range:
        """Count the rows that were put, and give their ids."""
        self._view = None
        tail = self._tail
        assert tail is not None
        tail.ledger.extend((tail.num_rows, self.number + 1, time_us, 0))
        # From here on no function is called: an interrupt (Ctrl-C) finds the rows counted everywhere, or nowhere.
        self.number += 1
        tail.num_rows += count
        self.num_rows += count
        first = self.next_id
        self.next_id = first + count
        return range(first, first + count)

    def _make_writers(self, tail: RowBlock) -> _Writers:
        columns = {field.name: tail.columns.get(field.name) for field in self.schema}
        numbers = {name: column for name, column in columns.items() if isinstance(column, NumberColumn)}
        self._writers = _Writers(
            rows=[(name, refuse_write if column is None else column.writer()) for name, column in columns.items()],
            columns=[(name, c.values, c.values.dtype, c.values.shape[1:]) for name, c in numbers.items()],
            row_bytes=sum(column.row_bytes for column in numbers.values()),
        )
        return self._writers

    def add(self, schema: Schema, columns: Columns, time_us: int, origin: str | None) -> None:
        """Add rows."""
        self._view = None
        self._take_schema(schema)
        count, done = num_rows_of(columns), 0
        which = self.origin_number(origin)
        while done < count:
            tail = self._tail
            if tail is None or tail.num_rows == tail.capacity:
                tail = self._open(capacity_for(self.num_rows, schema, count - done))
            part = min(count - done, tail.capacity - tail.num_rows)
            tail.ledger.extend((tail.num_rows, self.number, time_us, which))
            names = tail.columns.keys()
            tail.write(schema, columns, done, done + part)
            if tail.columns.keys() != names:
                self._writers = None
            done += part
            self.num_rows += part
            self.next_id += part

    def _take_schema(self, schema: Schema) -> None:
        if schema == self.schema:  # of a journal, it is another object
            return
        old, self.schema, self._writers = self.schema.by_name, schema, None
        grown = [f for f in schema if f.name in old and old[f.name].type != f.type and not old[f.name].is_null]
        if not grown:
            return

        def retyped(columns: dict[str, Column]) -> dict[str, Column]:
            new = dict(columns)
            for field in grown:
                if isinstance(column := columns.get(field.name), ArrowColumn):
                    new[field.name] = column.retyped(field.type)
            return new

        self._sealed = [segment._replace(columns=retyped(segment.columns)) for segment in self._sealed]
        if self._tail is not None:
            self._tail.columns = retyped(self._tail.columns)

    def origin_number(self, origin: str | None) -> int:
        if origin is None:
            return 0
        if len(self._origin_numbers) != len(self.origins):  # others came, or some were taken back
            self._origin_numbers = {known: number for number, known in enumerate(self.origins)}
        number = self._origin_numbers.get(origin)
        if number is None:
            number = self._origin_numbers[origin] = len(self.origins)
            self.origins.append(origin)
        return number

    def _open(self, capacity: int) -> RowBlock:
        """A new block at the end."""
        self.seal()
        self._tail = RowBlock(self._new_serial(), capacity, self.next_id)
        for field in self.schema:
            if not field.is_null:
                self._tail.column_for(field)
        return self._tail

    def _new_serial(self) -> int:
        self.next_serial += 1
        return self.next_serial - 1

    def seal(self) -> None:
        """Let no more rows into the last block."""
        if self._tail is not None:
            self._part_tail()
            self._tail.seal()
        self._tail, self._tail_start, self._writers = None, 0, None

    def _part_tail(self) -> None:
        """Count the last block's rows among the sealed ones, so that some can go. It takes more rows at its end."""
        if self._tail is not None and self._tail.num_rows > self._tail_start:
            self._sealed = _with_last_joined(self.segments())
            self._tail_start = self._tail.num_rows

    # Thinning out

    def keep(self, which: slice | NDArray[np.int64]) -> None:
        """Only these rows stay: consecutive ones, or some, ascending."""
        self._view = None
        if isinstance(which, slice) and which.stop == self.num_rows:
            self.drop_first(which.start)
            if 2 * self.num_rows < sum(block.num_rows for block in self._blocks()):
                self._part_tail()
                self._compact()
            return
        if isinstance(which, slice):
            which = np.arange(which.start, which.stop)
        self._part_tail()
        self._sealed = [segment.at(local) for segment, local in self._by_segment(which) if len(local)]
        self.num_rows = len(which)
        self._compact()

    def drop(self, which: slice | NDArray[np.int64]) -> None:
        """These rows go: the first ones (a slice), or some, ascending."""
        self._view = None
        if isinstance(which, slice):
            self.drop_first(which.stop - (which.start or 0))
            return
        if len(which) and int(which[-1]) >= sum(segment.num_rows for segment in self._sealed):
            self._part_tail()
        left = []
        for segment, local in self._by_segment(which):
            if len(local):
                segment = segment.only(np.delete(segment.offsets(), local))
            if segment.num_rows:
                left.append(segment)
        self._sealed = left
        self.num_rows -= len(which)
        self._compact()

    def _by_segment(self, which: NDArray[np.int64]) -> list[tuple[Segment, NDArray[np.int64]]]:
        """Each sealed segment, with the rows of a selection that are in it."""
        first = np.cumsum([0, *(segment.num_rows for segment in self._sealed)])
        cuts = np.searchsorted(which, first).tolist()
        found = []
        for number, (begin, end) in enumerate(pairwise(cuts)):
            local = which[begin:end]
            if begin < end:
                local = local - first[number]
            found.append((self._sealed[number], local))
        return found

    def drop_first(self, count: int) -> None:
        """Drop the oldest rows. Rows that stay are not touched."""
        sealed, left, gone = self._sealed, count, 0
        while left and gone < len(sealed):
            rows = sealed[gone].num_rows
            if left < rows:
                sealed, left, gone = [sealed[gone].part(left, rows), *sealed[gone + 1 :]], 0, 0
            else:
                left, gone = left - rows, gone + 1
        # No function is called from here on: an interrupt (Ctrl-C) finds all of the change or none.
        self._view, self._sealed = None, sealed[gone:]
        self._tail_start += left
        self.num_rows -= count

    def _compact(self) -> None:
        """Write neighbours that have few live rows anew, as one block: the rows that went have paid for it."""
        live = Counter[RowBlock]()
        for segment in self.segments():
            live[segment.block] += segment.num_rows
        sparse = {block for block in self._blocks() if live[block] < _SPARSE * block.num_rows}
        if self._tail in sparse:
            self.seal()
        segments = self._sealed
        if sparse:
            segments = []
            for group in _neighbours(self._sealed, sparse, capacity_for(1 << 62, self.schema, 0)):
                if group[0].block in sparse:
                    group = [self._rewritten(group)]
                segments += group
        self._sealed = self._with_small_ones_joined(list(segments))

    def _with_small_ones_joined(self, segments: list[Segment]) -> list[Segment]:
        """Eight neighbours as one block, if each is small, and none as large as the others together.

        So there are few blocks, and the block that holds a row has doubled each time that the row is copied.
        """
        at = 0
        while at + _FAN <= len(segments):
            some = segments[at : at + _FAN]
            sizes = [segment.num_rows for segment in some]
            is_open = any(segment.block is self._tail for segment in some)
            if is_open or max(sizes) * 2 > sum(sizes) or max(sizes) * _SMALL > self.num_rows:
                at += 1
            else:
                segments[at : at + _FAN] = [self._rewritten(some)]
                at = max(at - _FAN + 1, 0)
        return segments

    def _blocks(self) -> set[RowBlock]:
        return {segment.block for segment in self._sealed} | set(filter(None, [self._tail]))

    def _rewritten(self, segments: Sequence[Segment]) -> Segment:
        view = View(segments, self.schema, self.number, self.origins)
        return self.gathered(view, np.arange(len(view)))

    def gathered(self, view: View, index: NDArray[np.int64]) -> Segment:
        """A block of its own with some rows of a view. The rows keep their ids and provenance."""
        block = RowBlock(self._new_serial(), len(index), 0)
        written = costs.written
        block.write(self.schema, view.columns_at(index), 0, len(index))
        costs.copied += costs.written - written
        costs.written = written
        block.ids = view.ids_at(index)
        block.ledger.extend(view.ledger_at(index).ravel().tolist())
        return Segment.of(block)

    # Changing

    def change(self, index: NDArray[np.int64], schema: Schema, columns: Columns) -> None:
        """New values in some columns of some rows, each named once."""
        self._view = self._writers = None
        self._take_schema(schema)
        view = View(self.segments(), schema, self.number, self.origins)
        segment, offset = view.locate(index)
        sealed = [number for number, place in enumerate(self._sealed) if place.num_rows]
        for number in np.unique(segment):
            mine, place = segment == number, view.segments[number]
            changed = dict(place.columns)
            for name, values in columns.items():
                field = schema.by_name[name]
                if not field.is_null:
                    column: Any = changed.get(name) or place.block.missing_column(field)
                    changed[name] = column.changed(offset[mine], part_of(values, mine), place.block.num_rows)
            if number < len(sealed):
                self._sealed[sealed[number]] = place._replace(columns=changed)
            else:
                assert self._tail is not None
                self._tail.columns = changed

    def replace(self, segments: Sequence[Segment], schema: Schema) -> None:
        """Replace all rows by those of a view."""
        self._view = None
        self._tail, self._tail_start, self._writers = None, 0, None
        self.schema, self._sealed = schema, list(segments)
        self.num_rows = sum(segment.num_rows for segment in segments)


def _with_last_joined(segments: list[Segment]) -> list[Segment]:
    """The last two as one, if they are rows of one block whose columns are the same."""
    if len(segments) < 2:
        return segments
    *rest, one, two = segments
    if one.block is not two.block or any(two.columns.get(n) is not column for n, column in one.columns.items()):
        return segments
    if one.keep is None and two.keep is None and one.stop == two.start:
        return [*rest, two._replace(start=one.start)]
    return [*rest, two.only(np.concatenate([one.offsets(), two.offsets()]))]


def _neighbours(segments: list[Segment], sparse: set[RowBlock], limit: int) -> list[list[Segment]]:
    """Groups of neighbours in sparse blocks, with at most `limit` rows. Each of the other segments is its own group."""
    groups: list[list[Segment]] = []
    num_rows, was_sparse = 0, False
    for segment in segments:
        is_sparse = segment.block in sparse
        if is_sparse and was_sparse and num_rows + segment.num_rows <= limit:
            groups[-1].append(segment)
            num_rows += segment.num_rows
        else:
            groups.append([segment])
            num_rows = segment.num_rows
        was_sparse = is_sparse
    return groups
