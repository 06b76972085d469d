"""Where rows lie: blocks to which rows are added and in which they never move, one contiguous array for each column.

Columns of numbers are NumPy arrays of the block's capacity. Other columns are Arrow arrays, put together as rows come:
eight pieces become one, so that a value is copied a few times at most, however rows are added.
"""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchwright.buffer.convert import rebuild
from batchwright.buffer.locks import PIECES
from batchwright.buffer.schema import Columns, Field, Numbers, Schema, Values
from batchwright.columns.addresses import rows_apart

__all__ = [
    "ArrowColumn",
    "Block",
    "Column",
    "Counters",
    "NumberColumn",
    "Segment",
    "capacity_for",
    "missing",
    "missing_column",
]

_SMALLEST_ROWS = 256
_SMALL_BYTES = 16 << 20
_LARGEST_BYTES = 64 << 20
_LARGEST_ROWS = 1 << 20
_PENDING_ROWS = 1024
"""Values that wait as Python objects before they become an Arrow array."""
_FAN = 8
"""Arrow pieces of about one length that are joined into one."""

_LARGEST_PIECE_BYTES = 1 << 30
"""Arrow's text has offsets of 32 bits."""


class Counters:
    """What storing rows has cost so far, in bytes."""

    __slots__ = ("copied", "written")

    def __init__(self) -> None:
        self.written: int = 0
        """Into blocks, when rows came or were changed."""
        self.copied: int = 0
        """Of rows that were there: sparse blocks written anew, Arrow pieces joined, shared columns changed."""


def capacity_for(num_rows: int, schema: Schema, at_least: int) -> int:
    """Rows of the next block of a buffer that has so many: as many again while it is small, then a quarter more.

    So there are few blocks, and dropping the oldest leaves at most a quarter of the memory to rows that are gone, or
    16 MB. Small blocks are dear: their memory comes in small pages.
    """
    row_bytes = max(_row_bytes(schema), 1)
    more = num_rows if num_rows * row_bytes < _SMALL_BYTES else num_rows // 4
    most = max(_LARGEST_BYTES // row_bytes, _SMALLEST_ROWS)
    return max(min(max(more, _SMALLEST_ROWS), most, _LARGEST_ROWS), at_least)


def _row_bytes(schema: Schema) -> int:
    """Bytes of a row, about: text and lists are guessed."""
    return sum(64 if field.numbers is None else field.row_bytes for field in schema)


class NumberColumn:
    """Numbers of one type and shape: values [capacity, *shape], and which rows have one (None: all)."""

    __slots__ = ("address", "edition", "row_bytes", "shared", "valid", "values")

    def __init__(self, values: NDArray[Any], valid: NDArray[np.bool_] | None = None, *, shared: bool = False) -> None:
        self.values: NDArray[Any] = values
        self.valid: NDArray[np.bool_] | None = valid
        self.shared: bool = shared
        """`shared`: somebody else sees this memory, so rows that are there are changed in a copy."""
        self.edition: int = 0
        """How often rows that were there got new values."""
        self.address: int = values.ctypes.data
        self.row_bytes: int = values.dtype.itemsize * int(np.prod(values.shape[1:]))

    @classmethod
    def empty(cls, field: Field, capacity: int, missing: int = 0) -> NumberColumn:
        """Of which the first `missing` rows have no value."""
        assert field.numbers is not None
        dtype, shape = field.numbers
        column = cls(rows_apart(capacity, dtype, shape))
        if missing:
            column.values[:missing] = 0
            column.invalidate(0, missing)
        return column

    def write(self, start: int, numbers: Numbers) -> None:
        values, valid = numbers
        self.values[start : start + len(values)] = values
        if valid is not None:
            self._make_valid()[start : start + len(values)] = valid

    def invalidate(self, start: int, stop: int) -> None:
        self._make_valid()[start:stop] = False

    def _make_valid(self) -> NDArray[np.bool_]:
        if self.valid is None:
            self.valid = np.ones(len(self.values), bool)
        return self.valid

    def read(self, start: int, stop: int) -> Numbers:
        return Numbers(self.values[start:stop], None if self.valid is None else self.valid[start:stop])

    def changed(self, rows: NDArray[np.int64], numbers: Numbers, num_rows: int, counters: Counters) -> NumberColumn:
        """This column after some rows got new values: itself, or a copy where others see it."""
        column = self
        if self.shared or not self.values.flags.writeable:
            values = rows_apart(len(self.values), self.values.dtype, self.values.shape[1:])
            values[:num_rows] = self.values[:num_rows]
            valid = None if self.valid is None else np.ones(len(values), bool)
            if valid is not None and self.valid is not None:
                valid[:num_rows] = self.valid[:num_rows]
            column = NumberColumn(values, valid)
            counters.copied += num_rows * self.row_bytes
        column.edition += 1
        column.values[rows] = numbers.values
        counters.written += len(rows) * self.row_bytes
        if numbers.valid is not None or column.valid is not None:
            column._make_valid()[rows] = True if numbers.valid is None else numbers.valid
        return column


class ArrowColumn:
    """Values of any Arrow type. Pieces are joined as they come; the values themselves never change."""

    __slots__ = ("_levels", "_pending", "_pieces", "shared", "type")

    edition = 0

    def __init__(self, kind: pa.DataType, whole: pa.Array | None = None) -> None:
        self.type: pa.DataType = kind
        self.shared: bool = False
        self._pieces: list[pa.Array] = [] if whole is None else [whole]
        self._levels: list[int] = [] if whole is None else [_level(len(whole))]
        self._pending: list[Any] = []

    @classmethod
    def missing(cls, field: Field, num_rows: int) -> ArrowColumn:
        return cls(field.type, pa.nulls(num_rows, field.type) if num_rows else None)

    @property
    def num_rows(self) -> int:
        """Counted, not kept: an interrupt (Ctrl-C) between a value and its count would shift all values after it."""
        with PIECES:
            return sum(map(len, self._pieces)) + len(self._pending)

    def put(self, value: Any, counters: Counters) -> None:
        """Add one value that is known to be of this type, and that nobody can change."""
        if len(self._pending) >= _PENDING_ROWS:
            self.flush(counters)
        self._pending.append(value)

    def take_back(self, num_rows: int) -> None:
        """Forget the values that came last, so that so many rows are left."""
        with PIECES:
            first = sum(map(len, self._pieces))
            if first <= num_rows:
                del self._pending[num_rows - first :]
                return
            rest = _rows(self._pieces, 0, num_rows, self.type)
            pieces, levels = ([rest], [_level(num_rows)]) if num_rows else ([], [])
            self._pieces, self._levels, self._pending = pieces, levels, []

    def last_put(self) -> pa.Array:
        return pa.array(self._pending[-1:], self.type)

    def write(self, values: pa.Array, counters: Counters) -> None:
        self.flush(counters)
        with PIECES:
            self._pieces, self._levels = self._with(values, counters)

    def flush(self, counters: Counters, num_rows: int | None = None) -> None:
        """Let the first so many rows (else all) be Arrow arrays. Readers in other threads ask too, while rows are put:
        what they do not ask for stays, since it may be taken back."""
        with PIECES:
            wanted = len(self._pending) if num_rows is None else num_rows - sum(map(len, self._pieces))
            if wanted > 0:
                waiting = self._pending[:wanted]
                pieces, levels, count = *self._with(pa.array(waiting, self.type), counters), len(waiting)
                # No function is called between these, so an interrupt or another thread sees all of it or nothing.
                self._pieces, self._levels = pieces, levels
                del self._pending[:count]

    def _with(self, values: pa.Array, counters: Counters) -> tuple[list[pa.Array], list[int]]:
        """(pieces, levels) with more values."""
        if not len(values):
            return self._pieces, self._levels
        pieces, levels = [*self._pieces, values], [*self._levels, _level(len(values))]
        counters.written += values.nbytes
        while len(levels) >= _FAN and len(set(levels[-_FAN:])) == 1 and _can_join(pieces[-_FAN:]):
            joined = pa.concat_arrays(pieces[-_FAN:])
            counters.copied += joined.nbytes
            pieces[-_FAN:], levels[-_FAN:] = [joined], [levels[-1] + 1]
        return pieces, levels

    def pieces(self, counters: Counters, num_rows: int) -> list[pa.Array]:
        """The first so many values, and maybe more, in a few arrays."""
        if self._pending:
            self.flush(counters, num_rows)
        return self._pieces

    def read(self, start: int, stop: int, counters: Counters) -> pa.Array:
        """Rows [start, stop) as one array."""
        return _rows(self.pieces(counters, stop), start, stop, self.type)

    def seal(self, counters: Counters) -> None:
        """No more rows will come: one piece from now on."""
        if len(pieces := self.pieces(counters, self.num_rows)) > 1 and _can_join(pieces):
            joined = pa.concat_arrays(pieces)
            counters.copied += joined.nbytes
            self._pieces, self._levels = [joined], [_level(len(joined))]

    def changed(self, rows: NDArray[np.int64], values: pa.Array, num_rows: int, counters: Counters) -> ArrowColumn:
        """A column in which some rows have new values."""
        num_rows = min(num_rows, self.num_rows)  # an older version's: rows came to its block since, not to this column
        order = np.arange(num_rows)
        order[rows] = num_rows + np.arange(len(rows))
        whole = pa.concat_arrays([self.read(0, num_rows, counters), values]).take(pa.array(order))
        counters.written += values.nbytes
        counters.copied += whole.nbytes
        return ArrowColumn(self.type, whole)

    def retyped(self, kind: pa.DataType, counters: Counters) -> ArrowColumn:
        """This column as a type that says more, where nothing was known before: struct<a: null>, list<null>."""
        whole = rebuild(self.read(0, self.num_rows, counters), kind)
        counters.copied += whole.nbytes
        return ArrowColumn(kind, whole)


def _rows(pieces: list[pa.Array], start: int, stop: int, kind: pa.DataType) -> pa.Array:
    """Rows [start, stop) of some pieces as one array."""
    found, first = [], 0
    for piece in pieces:
        begin, end = max(start - first, 0), min(stop - first, len(piece))
        if begin < end:
            found.append(piece.slice(begin, end - begin))
        first += len(piece)
    if not found:
        return pa.nulls(0, kind)
    return found[0] if len(found) == 1 else pa.concat_arrays(found)


def _can_join(pieces: list[pa.Array]) -> bool:
    return bool(sum(piece.nbytes for piece in pieces) <= _LARGEST_PIECE_BYTES)


def _level(num_rows: int) -> int:
    return max(num_rows.bit_length() - 1, 0) // (_FAN.bit_length() - 1)


Column = NumberColumn | ArrowColumn


class Block:
    """Rows that came one after the other. Rows are added at its end, up to its capacity; those there never move.

    A column that is not in `columns` is null in every row.
    """

    __slots__ = ("_is_ascending", "capacity", "columns", "first_id", "ids", "ledger", "num_rows", "serial")

    def __init__(self, serial: int, capacity: int, first_id: int) -> None:
        self.serial: int = serial
        self.capacity: int = capacity
        self.num_rows: int = 0
        self.columns: dict[str, Column] = {}
        self.first_id: int = first_id
        """Row i has the id first_id + i,"""
        self.ids: NDArray[np.int64] | None = None
        """unless the block was put together of rows from others."""
        self._is_ascending: bool | None = None
        self.ledger: array[int] = array("q")
        """(first row, journal number, time in microseconds, number of the origin) of every append, end to end."""

    def write(self, schema: Schema, columns: Columns, begin: int, end: int, counters: Counters) -> None:
        """Add rows [begin, end) of some columns. There is room for them."""
        for field in schema:
            values = columns.get(field.name)
            if values is None or field.is_null:
                self._write_missing(field, end - begin, counters)
                continue
            column = self.column_for(field)
            if isinstance(values, Numbers):
                assert isinstance(column, NumberColumn)
                valid = None if values.valid is None else values.valid[begin:end]
                column.write(self.num_rows, Numbers(values.values[begin:end], valid))
                counters.written += (end - begin) * column.row_bytes
            else:
                assert isinstance(column, ArrowColumn)
                column.write(values.slice(begin, end - begin), counters)
        self.num_rows += end - begin

    def _write_missing(self, field: Field, count: int, counters: Counters) -> None:
        column = self.columns.get(field.name)
        if isinstance(column, NumberColumn):
            column.values[self.num_rows : self.num_rows + count] = 0
            column.invalidate(self.num_rows, self.num_rows + count)
        elif isinstance(column, ArrowColumn):
            column.write(pa.nulls(count, column.type), counters)

    def column_for(self, field: Field) -> Column:
        """The column, made where it is not there yet: null in the rows so far."""
        column = self.columns.get(field.name)
        if column is None:
            column = missing_column(field, self)
            self.columns = {**self.columns, field.name: column}  # a new dict: versions hold the old one
        return column

    def seal(self, counters: Counters) -> None:
        for column in self.columns.values():
            if isinstance(column, ArrowColumn):
                column.seal(counters)

    def ids_of(self, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        return offsets + self.first_id if self.ids is None else self.ids[offsets]

    @property
    def has_ascending_ids(self) -> bool:
        if self._is_ascending is None:
            self._is_ascending = self.ids is None or bool((self.ids[1:] > self.ids[:-1]).all())
        return self._is_ascending

    def origins(self) -> NDArray[np.int64]:
        """The ledger as a table [appends, 4]."""
        return np.array(self.ledger, np.int64).reshape(-1, 4)


class Segment(NamedTuple):
    """The live rows of a block as one version sees them: rows [start, stop), or those that `keep` lists."""

    block: Block
    columns: dict[str, Column]
    start: int
    stop: int
    keep: NDArray[np.int64] | None = None
    """Offsets in the block, ascending; start and stop are then the first and the last one's end."""

    @property
    def num_rows(self) -> int:
        return self.stop - self.start if self.keep is None else len(self.keep)

    def offsets(self) -> NDArray[np.int64]:
        return np.arange(self.start, self.stop) if self.keep is None else self.keep

    def ids(self) -> NDArray[np.int64]:
        return self.block.ids_of(self.offsets())

    def find(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """(number of the live row with each id, whether there is one); ids of the block ascend."""
        offsets = ids - self.block.first_id
        if self.block.ids is not None:
            offsets = np.minimum(np.searchsorted(self.block.ids, ids), len(self.block.ids) - 1)
        known = self.block.ids_of(offsets) == ids
        known &= (offsets >= self.start) & (offsets < self.stop)
        if self.keep is None:
            return offsets - self.start, known
        local = np.minimum(np.searchsorted(self.keep, offsets), len(self.keep) - 1)
        return local, known & (self.keep[local] == offsets)

    def part(self, begin: int, end: int) -> Segment:
        """Its live rows [begin, end)."""
        if self.keep is None:
            return self._replace(start=self.start + begin, stop=self.start + end)
        return self.only(self.keep[begin:end])

    def at(self, local: NDArray[np.int64]) -> Segment:
        """Some of its live rows, by number, ascending."""
        if len(local) == self.num_rows:
            return self
        if len(local) and int(local[-1]) - int(local[0]) == len(local) - 1 and self.keep is None:
            return self.part(int(local[0]), int(local[-1]) + 1)
        return self.only(local + self.start if self.keep is None else self.keep[local])

    def only(self, offsets: NDArray[np.int64]) -> Segment:
        if not len(offsets):
            return self._replace(start=self.start, stop=self.start, keep=None)
        return self._replace(start=int(offsets[0]), stop=int(offsets[-1]) + 1, keep=np.ascontiguousarray(offsets))

    def values(self, field: Field, counters: Counters) -> Values:
        """One column of all live rows: a view where they are consecutive."""
        column = self.columns.get(field.name)
        if column is None:
            return missing(field, self.num_rows)
        if isinstance(column, NumberColumn):
            if self.keep is None:
                return column.read(self.start, self.stop)
            valid = None if column.valid is None else column.valid[self.keep]
            return Numbers(column.values[self.keep], valid)
        whole = column.read(self.start, self.stop, counters)
        return whole if self.keep is None else whole.take(pa.array(self.keep - self.start))


def missing_column(field: Field, block: Block) -> Column:
    """A column of a block that is null in all of its rows."""
    if field.numbers is None:
        return ArrowColumn.missing(field, block.num_rows)
    return NumberColumn.empty(field, block.capacity, block.num_rows)


def missing(field: Field, num_rows: int) -> Values:
    """A column without a value in any row."""
    if field.numbers is None:
        return pa.nulls(num_rows, field.type)
    dtype, shape = field.numbers
    return Numbers(np.zeros((num_rows, *shape), dtype), np.zeros(num_rows, bool))
