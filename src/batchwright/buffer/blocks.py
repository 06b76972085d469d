"""Blocks of rows: one contiguous array for each column. Rows are added at the end and never move.

Columns of numbers are NumPy arrays of the block's capacity. Other columns are Arrow arrays, joined as rows
arrive. Eight pieces become one, so a value is copied a few times at most, in any pattern of additions.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchwright.base.files import lock_across_forks
from batchwright.buffer.schema import Columns, Field, Numbers, Schema, Values, part_of
from batchwright.columns.addresses import rows_apart

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

_pieces_lock = lock_across_forks()
"""Held while values become Arrow arrays, in any column. Taken after a buffer's own lock, if both are held."""


class Costs:
    """Bytes that storing rows has cost this process. Tests hold them to a bound for each row."""

    __slots__ = ("copied", "written")

    def __init__(self) -> None:
        self.written: int = 0
        """Bytes written into blocks for new or changed rows."""
        self.copied: int = 0
        """Bytes of existing rows: sparse blocks written anew, Arrow pieces joined, shared columns changed."""


costs: Costs = Costs()


class SlowWrite(Exception):
    """This value is not of exactly the type that its column takes without a check."""


def capacity_for(num_rows: int, schema: Schema, at_least: int) -> int:
    """Rows of the next block of a buffer with this many: as many again while it is small, then a quarter more.

    So there are few blocks, and dropping the oldest leaves at most a quarter of the memory to rows that are gone, or
    16 MB. Small blocks are expensive: their memory comes in small pages.
    """
    row_bytes = sum(field.row_bytes for field in schema) or 1
    more = num_rows
    if num_rows * row_bytes >= _SMALL_BYTES:
        more = num_rows // 4
    most = max(_LARGEST_BYTES // row_bytes, _SMALLEST_ROWS)
    return max(min(max(more, _SMALLEST_ROWS), most, _LARGEST_ROWS), at_least)


class NumberColumn:
    """Numbers of one type and shape: values [capacity, *shape], and the mask of rows that have one (None: all)."""

    __slots__ = ("__weakref__", "address", "edition", "row_bytes", "shared", "valid", "values")

    def __init__(self, values: NDArray[Any], valid: NDArray[np.bool_] | None = None, *, shared: bool = False) -> None:
        self.values: NDArray[Any] = values
        self.valid: NDArray[np.bool_] | None = valid
        self.shared: bool = shared
        """`shared`: a version sees this memory too, so changes are made in a copy."""
        self.edition: int = 0
        """The number of times that existing rows got new values."""
        self.address: int = values.ctypes.data
        self.row_bytes: int = values.dtype.itemsize * int(np.prod(values.shape[1:]))

    @property
    def num_rows(self) -> int:
        """Rows that there is room for."""
        return len(self.values)

    def writer(self) -> Callable[[int, Any], None]:
        """A function that writes one value of exactly this type to a row; others are a `SlowWrite`."""
        values, dtype, shape, row_bytes = self.values, self.values.dtype, self.values.shape[1:], self.row_bytes
        exact: Any = {"i8": int, "f8": float, "b1": bool}.get(dtype.str[1:], dtype.type)
        if shape:
            exact = np.ndarray

        def write_array(at: int, value: Any) -> None:
            if type(value) is not exact or value.dtype != dtype or value.shape != shape:
                raise SlowWrite
            values[at] = value
            costs.written += row_bytes

        def write_scalar(at: int, value: Any) -> None:
            if type(value) is not exact:
                raise SlowWrite
            values[at] = value
            costs.written += row_bytes

        return write_array if shape else write_scalar

    def write(self, start: int, numbers: Numbers) -> None:
        stop = start + len(numbers.values)
        self.values[start:stop] = numbers.values
        if numbers.valid is not None:
            self._make_valid()[start:stop] = numbers.valid
        costs.written += len(numbers.values) * self.row_bytes

    def write_missing(self, start: int, count: int) -> None:
        self.values[start : start + count] = 0
        self._make_valid()[start : start + count] = False

    def take_back(self, num_rows: int) -> None:
        """Forget the rows behind the first ones: those that are written there next have values again."""
        if self.valid is not None:
            self.valid[num_rows:] = True

    def _make_valid(self) -> NDArray[np.bool_]:
        if self.valid is None:
            self.valid = np.ones(len(self.values), bool)
        return self.valid

    def read(self, start: int, stop: int) -> Numbers:
        return Numbers(self.values, self.valid).part(slice(start, stop))

    last_put = read

    def changed(self, rows: NDArray[np.int64], numbers: Numbers, num_rows: int) -> NumberColumn:
        """This column after some rows got new values: itself, or a copy if others see it."""
        column = self
        if self.shared or not self.values.flags.writeable:
            column = NumberColumn(rows_apart(len(self.values), self.values.dtype, self.values.shape[1:]))
            column.values[:num_rows] = self.values[:num_rows]
            if self.valid is not None:
                column._make_valid()[:num_rows] = self.valid[:num_rows]
            costs.copied += num_rows * self.row_bytes
        column.edition += 1
        column.values[rows] = numbers.values
        costs.written += len(rows) * self.row_bytes
        if numbers.valid is not None or column.valid is not None:
            column._make_valid()[rows] = numbers.has_value
        return column

    def seal(self) -> None: ...


class ArrowColumn:
    """Values of any Arrow type. Pieces are joined as they come; the values themselves never change."""

    __slots__ = ("__weakref__", "_pending", "_pieces", "shared", "type")

    edition = 0

    def __init__(self, kind: pa.DataType, values: pa.Array | None = None) -> None:
        self.type: pa.DataType = kind
        self.shared: bool = False
        self._pieces: list[pa.Array] = []
        self._pending: list[Any] = []
        if values is not None and len(values):
            self._pieces = [values]

    @property
    def num_rows(self) -> int:
        """Counted, not kept: an interrupt (Ctrl-C) between a value and its count would shift all values after it."""
        with _pieces_lock:
            return sum(map(len, self._pieces)) + len(self._pending)

    def writer(self) -> Callable[[int, Any], None]:
        """A function that adds one value, if it is text and so is this column; others are a `SlowWrite`."""
        return self._put_text if self.type == pa.string() else refuse_write

    def _put_text(self, at: int, value: Any) -> None:
        if type(value) is not str:
            raise SlowWrite
        if not value.isascii():
            value.encode()  # refuses half a surrogate pair
        if len(self._pending) >= _PENDING_ROWS:
            self.flush()
        self._pending.append(value)

    def take_back(self, num_rows: int) -> None:
        """Forget the rows behind the first ones."""
        with _pieces_lock:
            first = sum(map(len, self._pieces))
            if first <= num_rows:
                del self._pending[num_rows - first :]
                return
            rest = [_rows(self._pieces, 0, num_rows, self.type)]
            self._pieces, self._pending = rest[:num_rows], []

    def last_put(self, start: int, stop: int) -> pa.Array:
        return pa.array(self._pending[start - stop :], self.type)

    def write(self, start: int, values: pa.Array) -> None:
        self.flush()
        with _pieces_lock:
            self._pieces = self._with(values)

    def write_missing(self, start: int, count: int) -> None:
        self.write(start, pa.nulls(count, self.type))

    def flush(self, num_rows: int | None = None) -> None:
        """Turn the first rows (by default all of them) into Arrow arrays.

        Readers in other threads do so too, while rows are put: rows that they do not ask for stay, since these may be
        taken back.
        """
        with _pieces_lock:
            wanted = len(self._pending) if num_rows is None else num_rows - sum(map(len, self._pieces))
            if wanted > 0:
                waiting = self._pending[:wanted]
                pieces, count = self._with(pa.array(waiting, self.type)), len(waiting)
                # No function is called between these, so an interrupt or another thread sees all of the change or none.
                self._pieces = pieces
                del self._pending[:count]

    def _with(self, values: pa.Array) -> list[pa.Array]:
        """The pieces, with more values."""
        if not len(values):
            return self._pieces
        pieces = [*self._pieces, values]
        costs.written += values.nbytes
        while len(pieces) >= _FAN and _can_join(pieces[-_FAN:]):
            pieces[-_FAN:] = [_joined(pieces[-_FAN:])]
        return pieces

    def pieces(self, num_rows: int) -> list[pa.Array]:
        """The first rows, and perhaps more, in a few arrays."""
        if self._pending:
            self.flush(num_rows)
        return self._pieces

    def read(self, start: int, stop: int) -> pa.Array:
        """Rows [start, stop) as one array."""
        return _rows(self.pieces(stop), start, stop, self.type)

    def seal(self) -> None:
        """No more rows will come: one piece from now on."""
        pieces = self.pieces(self.num_rows)
        if len(pieces) > 1 and _is_one_piece(pieces):
            self._pieces = [_joined(pieces)]

    def changed(self, rows: NDArray[np.int64], values: pa.Array, num_rows: int) -> ArrowColumn:
        """A column in which some rows have new values."""
        num_rows = min(num_rows, self.num_rows)  # an older version's: rows came to its block since, not to this column
        order = np.arange(num_rows)
        order[rows] = num_rows + np.arange(len(rows))
        changed = pa.concat_arrays([self.read(0, num_rows), values]).take(pa.array(order))
        costs.written += values.nbytes
        costs.copied += changed.nbytes
        return ArrowColumn(self.type, changed)

    def retyped(self, kind: pa.DataType) -> ArrowColumn:
        """This column as a more specific type, where the old type had null parts: struct<a: null>, list<null>."""
        retyped = self.read(0, self.num_rows).cast(kind)
        costs.copied += retyped.nbytes
        return ArrowColumn(kind, retyped)


def refuse_write(at: int, value: Any) -> None:
    """The writer of a column that checks each value first."""
    raise SlowWrite


def _rows(pieces: list[pa.Array], start: int, stop: int, kind: pa.DataType) -> pa.Array:
    """Rows [start, stop) of some pieces as one array."""
    found, first = [], 0
    for piece in pieces:
        begin, end = max(start - first, 0), min(stop - first, len(piece))
        if begin < end:
            found.append(piece.slice(begin, end - begin))
        first += len(piece)
    if len(found) == 1:
        return found[0]
    return pa.concat_arrays(found or [pa.nulls(0, kind)])


def _joined(pieces: list[pa.Array]) -> pa.Array:
    joined = pa.concat_arrays(pieces)
    costs.copied += joined.nbytes
    return joined


def _can_join(pieces: list[pa.Array]) -> bool:
    """Whether pieces are of about one length: the same power of `_FAN`."""
    level = _level(len(pieces[0]))
    return all(_level(len(piece)) == level for piece in pieces) and _is_one_piece(pieces)


def _is_one_piece(pieces: list[pa.Array]) -> bool:
    return bool(sum(piece.nbytes for piece in pieces) <= _LARGEST_PIECE_BYTES)


def _level(num_rows: int) -> int:
    return (num_rows.bit_length() - 1) // (_FAN.bit_length() - 1)


Column = NumberColumn | ArrowColumn


class RowBlock:
    """Rows that came one after the other. Rows are added at its end, up to its capacity; those there never move.

    A column that is not in `columns` is null in every row.
    """

    __slots__ = (
        *("__weakref__", "_is_ascending", "capacity", "columns", "first_id", "ids", "ledger", "num_rows", "serial"),
    )

    edition = 0
    """The edition of its ledger, as columns have one. Existing entries do not change."""

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

    def write(self, schema: Schema, columns: Columns, begin: int, end: int) -> None:
        """Add rows [begin, end) of some columns. There is room for them."""
        for field in schema:
            values = columns.get(field.name)
            if values is None or field.is_null:
                if field.name in self.columns:
                    self.columns[field.name].write_missing(self.num_rows, end - begin)
                continue
            part: Any = part_of(values, slice(begin, end))
            self.column_for(field).write(self.num_rows, part)
        self.num_rows += end - begin

    def column_for(self, field: Field) -> Column:
        """The column. It is made if missing, with null in the rows so far."""
        column = self.columns.get(field.name)
        if column is None:
            column = self.missing_column(field)
            self.columns = {**self.columns, field.name: column}  # a new dict: versions hold the old one
        return column

    def missing_column(self, field: Field) -> Column:
        """A column that is null in all rows."""
        if field.numbers is None:
            return ArrowColumn(field.type, pa.nulls(self.num_rows, field.type))
        column = NumberColumn(rows_apart(self.capacity, *field.numbers))
        if self.num_rows:
            column.write_missing(0, self.num_rows)
        return column

    def seal(self) -> None:
        for column in self.columns.values():
            column.seal()

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

    block: RowBlock
    columns: dict[str, Column]
    start: int
    stop: int
    keep: NDArray[np.int64] | None = None
    """Offsets in the block, ascending; start and stop are then the first and the last one's end."""

    @classmethod
    def of(cls, block: RowBlock) -> Segment:
        """All rows of a block."""
        return cls(block, block.columns, 0, block.num_rows)

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
        if self.keep is None and len(local) and int(local[-1]) - int(local[0]) == len(local) - 1:
            return self.part(int(local[0]), int(local[-1]) + 1)
        return self.only(self.offsets()[local])

    def only(self, offsets: NDArray[np.int64]) -> Segment:
        if not len(offsets):
            return self._replace(start=self.start, stop=self.start, keep=None)
        return self._replace(start=int(offsets[0]), stop=int(offsets[-1]) + 1, keep=np.ascontiguousarray(offsets))

    def values(self, field: Field) -> Values:
        """One column of all live rows: a view where they are consecutive."""
        column = self.columns.get(field.name)
        if column is None:
            return missing(field, self.num_rows)
        if self.keep is None:
            return column.read(self.start, self.stop)
        if isinstance(column, NumberColumn):
            return part_of(Numbers(column.values, column.valid), self.keep)
        return part_of(column.read(self.start, self.stop), self.keep - self.start)


def column_of_values(values: Values) -> Column:
    """A column over memory that others may see: changes are made in a copy."""
    if isinstance(values, Numbers):
        return NumberColumn(*values, shared=True)
    return ArrowColumn(values.type, values)


def missing(field: Field, num_rows: int) -> Values:
    """A column without a value in any row."""
    if field.numbers is None:
        return pa.nulls(num_rows, field.type)
    dtype, shape = field.numbers
    return Numbers(np.zeros((num_rows, *shape), dtype), np.zeros(num_rows, bool))
