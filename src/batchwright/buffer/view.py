"""A version of a buffer: rows that do not change, whatever is done to the buffer afterwards. All reads happen here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from batchwright.base.errors import RowIndexError, SpecError
from batchwright.base.fingerprint import fingerprint
from batchwright.base.words import suggest
from batchwright.buffer.blocks import ArrowColumn, Block, NumberColumn, Segment, missing
from batchwright.buffer.schema import Columns, Field, Numbers, Schema, Values
from batchwright.columns.addresses import Table, gather

__all__ = ["View", "refuse_twice"]

_HASHED_ROWS = 4096
"""Rows that are hashed at once. Part of a version's fingerprint."""


class View:
    """The rows of one version, by number. Costs nothing to make, and holds no row of its own.

    A batch is one gather for each column of numbers: rows are found by their address, in however many blocks they lie.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        schema: Schema,
        number: int,
        origins: Sequence[str | None],
    ) -> None:
        self.segments: list[Segment] = [segment for segment in segments if segment.num_rows]
        self.schema: Schema = schema
        self.number: int = number
        self.origins: Sequence[str | None] = origins
        self._first: NDArray[np.int64] = np.cumsum([0, *(segment.num_rows for segment in self.segments)])
        """Number of the first row of each segment, and of all rows."""
        self._num_rows = int(self._first[-1])
        self._memory: dict[str, _Memory] = {}

    def __len__(self) -> int:
        return self._num_rows

    # Which rows

    def checked(self, indices: Any, *, what: str = "indices") -> NDArray[np.int64]:
        """Row numbers from 0 of numbers that may count from the end; RowIndexError where there is no such row."""
        index = whole_numbers(indices, what)
        count = len(self)
        if len(index) and (int(index.min()) < -count or int(index.max()) >= count):
            wrong = index[(index < -count) | (index >= count)][0]
            raise RowIndexError(
                f"row {wrong} is not in a buffer of {count:,} rows",
                index=int(wrong),
                remedy=f"a number from {-count} to {count - 1}" if count else "the buffer is empty: append rows first",
            )
        return np.where(index < 0, index + count, index) if len(index) and int(index.min()) < 0 else index

    @cached_property
    def ids(self) -> NDArray[np.int64]:
        """The id of every row: a number that it keeps for ever."""
        found = [segment.ids() for segment in self.segments]
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def ids_at(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """The ids of some rows."""
        return self._ids(*self.locate(index)) if len(index) else index

    def _ids(self, segment: NDArray[np.int64], offset: NDArray[np.int64]) -> NDArray[np.int64]:
        first, is_listed = self._first_ids
        ids: NDArray[np.int64] = offset + first[segment]
        if is_listed is not None:
            for number in np.unique(segment[is_listed[segment]]):
                mine = segment == number
                ids[mine] = self.segments[number].block.ids_of(offset[mine])
        return ids

    @cached_property
    def _first_ids(self) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
        """(first id of each segment's block, whether it lists its ids instead; None: no one does)."""
        blocks = [segment.block for segment in self.segments]
        first = np.array([block.first_id for block in blocks], np.int64)
        return first, np.array([b.ids is not None for b in blocks]) if any(b.ids is not None for b in blocks) else None

    def index_of(self, ids: Any) -> NDArray[np.int64]:
        """The row numbers of some ids; RowIndexError where one is not here."""
        wanted = whole_numbers(ids, "ids")
        if not len(wanted):
            return wanted
        found, known = self._by_segment(wanted) if self._id_ranges is not None else self._by_id(wanted)
        if not known.all():
            gone = wanted[~known]
            raise RowIndexError(
                f"id {gone[0]} is not in the buffer" + (f", and {len(gone) - 1:,} others" if len(gone) > 1 else ""),
                id=int(gone[0]),
                remedy="ids that buffer.ids holds: rows that were dropped are gone, and no id is used twice",
            )
        return found

    @cached_property
    def _id_ranges(self) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        """(first, last) id of every segment; None where ids are not ascending, as after `select` in another order."""
        if not all(segment.block.has_ascending_ids for segment in self.segments):
            return None
        ends = [segment.block.ids_of(np.array([segment.start, segment.stop - 1])) for segment in self.segments]
        first, last = np.array(ends, np.int64).reshape(-1, 2).T
        return (first, last) if (first[1:] > last[:-1]).all() else None

    def _by_segment(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """(row number of each id, whether it is here): without a look at ids that nobody asked for."""
        assert self._id_ranges is not None
        first, last = self._id_ranges
        segment = np.searchsorted(last, ids)
        found = np.zeros(len(ids), np.int64)
        known = np.zeros(len(ids), bool)
        for number in np.unique(segment):
            if number < len(self.segments):
                mine = np.flatnonzero((segment == number) & (ids >= first[number]))
                local, is_here = self.segments[number].find(ids[mine])
                found[mine], known[mine] = local + self._first[number], is_here
        return found, known

    def _by_id(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        order = self._id_order
        sorted_ids = self.ids[order]
        at = np.minimum(np.searchsorted(sorted_ids, ids), len(order) - 1)
        return order[at], sorted_ids[at] == ids

    @cached_property
    def _id_order(self) -> NDArray[np.int64]:
        return np.argsort(self.ids, kind="stable")

    def locate(self, index: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(segment, offset in its block) of rows by number."""
        if len(self.segments) == 1:
            segment = np.zeros(len(index), np.int64)
            one = self.segments[0]
            return segment, index + one.start if one.keep is None else one.keep[index]
        segment = self._first[1:].searchsorted(index, side="right")
        shift, listed = self._shifts
        offset: NDArray[np.int64] = index + shift[segment]
        if listed is not None:
            kept = np.flatnonzero(listed[segment])
            if len(kept):
                which = segment[kept]
                offset[kept] = gather(listed[which] + (index[kept] - self._first[which]) * 8, np.dtype(np.int64))
        return segment, offset

    @cached_property
    def _shifts(self) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
        """(from row numbers to offsets, for each segment; addresses of the lists of those that have one, else 0)."""
        shift = np.array([segment.start for segment in self.segments], np.int64) - self._first[:-1]
        if all(segment.keep is None for segment in self.segments):
            return shift, None
        return shift, np.array([0 if s.keep is None else s.keep.ctypes.data for s in self.segments], np.int64)

    # Values

    def rows_at(self, index: NDArray[np.int64]) -> tuple[Columns, NDArray[np.int64]]:
        """(columns, ids) of some rows by number, each of which is there."""
        if not len(index):
            return {field.name: missing(field, 0) for field in self.schema}, index
        segment, offset = self.locate(index)
        return {f.name: self._gather(f, segment, offset) for f in self.schema}, self._ids(segment, offset)

    def columns_at(self, index: NDArray[np.int64], names: Sequence[str] | None = None) -> Columns:
        """Some rows by number, each of which is there: one gather for each column, in memory of its own."""
        fields = self.schema.fields if names is None else [self.schema.by_name[name] for name in names]
        if not len(index):
            return {field.name: missing(field, 0) for field in fields}
        segment, offset = self.locate(index)
        return {field.name: self._gather(field, segment, offset) for field in fields}

    def _gather(self, field: Field, segment: NDArray[np.int64], offset: NDArray[np.int64]) -> Values:
        if field.numbers is None:
            return pa.nulls(len(offset)) if field.is_null else self._take(field, segment, offset)
        memory = self._memory.get(field.name)
        if memory is None:
            memory = self._memory[field.name] = _Memory(field, [s.columns.get(field.name) for s in self.segments])
        return memory.gather(segment, offset)

    def _take(self, field: Field, segment: NDArray[np.int64], offset: NDArray[np.int64]) -> pa.Array:
        """Rows of an Arrow column: one take for each piece touched, then one that puts them in order."""
        order = np.lexsort((offset, segment))
        taken = []
        segment, offset = segment[order], offset[order]
        borders = np.flatnonzero(np.diff(segment, prepend=-1, append=len(self.segments)))
        for begin, end in pairwise(borders):
            column, rows = self.segments[segment[begin]].columns.get(field.name), offset[begin:end]
            if not isinstance(column, ArrowColumn):
                taken.append(pa.nulls(end - begin, field.type))
                continue
            pieces = column.pieces(self.segments[segment[begin]].stop)
            first = np.cumsum([0, *map(len, pieces)])
            cuts = np.searchsorted(rows, first)
            taken += [
                piece.take(pa.array(rows[cuts[n] : cuts[n + 1]] - first[n]))
                for n, piece in enumerate(pieces)
                if cuts[n] < cuts[n + 1]
            ]
        joined = taken[0] if len(taken) == 1 else pa.concat_arrays(taken)
        if (np.diff(order) > 0).all():
            return joined
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        return joined.take(pa.array(back))

    def column(self, name: str) -> Values:
        """One column of all rows, to read: a view where they lie in one run, else a copy.

        Whoever keeps it must have asked to `share` first: rows may get new values in the same memory otherwise.
        """
        field = self.schema.by_name[name]
        found = [segment.values(field) for segment in self.segments]
        if len(found) == 1:
            if isinstance(found[0], Numbers):
                found[0].values.flags.writeable = False
            return found[0]
        if not found:
            return missing(field, 0)
        if field.numbers is None:
            return pa.concat_arrays(found)
        values = np.concatenate([piece.values for piece in found])
        if all(piece.valid is None for piece in found):
            return Numbers(values)
        return Numbers(
            values, np.concatenate([np.ones(len(p.values), bool) if p.valid is None else p.valid for p in found])
        )

    def columns(self) -> Columns:
        return {name: self.column(name) for name in self.schema.names}

    def pieces(self, rows: int) -> Iterator[Columns]:
        """All rows, so many at a time."""
        for begin in range(0, len(self), rows):
            yield self.columns_at(np.arange(begin, min(begin + rows, len(self))))

    # Where rows came from

    def appends_at(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """(journal number, time in microseconds, number of the origin) of the append that each row came with."""
        segment, offset = self.locate(index) if len(index) else (index, index)
        entries = np.zeros((len(index), 3), np.int64)
        for number in np.unique(segment):
            mine, ledger = segment == number, self.segments[number].block.origins()
            entries[mine] = ledger[np.searchsorted(ledger[:, 0], offset[mine], side="right") - 1, 1:]
        return entries

    def ledger_at(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """What the ledger of a block with these rows says."""
        entries = self.appends_at(index)
        begins = np.flatnonzero(np.r_[True, (entries[1:] != entries[:-1]).any(axis=1)][: len(index)])
        return np.column_stack([begins, entries[begins]])

    def provenance(self, index: NDArray[np.int64]) -> pa.Table:
        """id, journal number, time and origin of the append that each of some rows came with."""
        entries = self.appends_at(index)
        return pa.table(
            {
                "id": pa.array(self.ids_at(index) if len(index) else index),
                "number": pa.array(entries[:, 0]),
                "time": pa.array(entries[:, 1]).cast(pa.timestamp("us", "UTC")),
                "origin": pa.array([self.origins[number] for number in entries[:, 2]], pa.string()),
            }
        )

    def only(self, names: Sequence[str]) -> View:
        """The same rows, with some of their columns."""
        unknown = [name for name in names if name not in self.schema.by_name]
        if isinstance(names, str) or unknown or not names:
            near = suggest(unknown[0], self.schema.names) if unknown and not isinstance(names, str) else None
            raise SpecError(
                f"columns={names!r}: " + (f"there is no column {unknown[0]!r}" if unknown else "a list of names"),
                parameter="columns",
                columns=", ".join(map(repr, self.schema.names)),
                remedy=f"columns=[{near or next(iter(self.schema.names), '...')!r}]",
            )
        schema = Schema(tuple(self.schema.by_name[name] for name in dict.fromkeys(names)))
        return View(self.segments, schema, self.number, self.origins)

    def share(self) -> View:
        """Mark everything as seen by somebody else: whoever changes rows does so in a copy from now on."""
        for segment in self.segments:
            for column in segment.columns.values():
                column.shared = True
        return self

    def content_fingerprint(self) -> str:
        """Names the rows: equal rows give the same, however they came and wherever they lie."""
        if self._fingerprint is None:
            fields = [[field.name, str(field)] for field in self.schema]
            digests: list[str] = []
            for columns in self.pieces(_HASHED_ROWS):
                digest = xxhash.xxh3_128()
                for field in self.schema:
                    _hash(columns[field.name], digest)
                digests.append(digest.hexdigest())
            self._fingerprint = fingerprint([fields, len(self), digests])
        return self._fingerprint

    _fingerprint: str | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """By content: rows, ids and where they came from, as one block."""
        every = np.arange(len(self))
        columns = {name: _plain(values) for name, values in self.columns().items()}
        ledger = self.ledger_at(every).ravel()
        return _from_content, (self.schema, columns, self.ids, ledger, self.number, list(self.origins))


def _plain(values: Values) -> Any:
    return tuple(values) if isinstance(values, Numbers) else values


def _from_content(
    schema: Schema, columns: dict[str, Any], ids: NDArray[np.int64], ledger: Any, number: int, origins: list[str | None]
) -> View:
    block = Block(0, len(ids), 0)
    block.num_rows, block.ids = len(ids), ids
    block.ledger.extend(ledger.tolist())
    for name, values in columns.items():
        if not schema.by_name[name].is_null:
            block.columns[name] = (
                NumberColumn(*values, shared=True)
                if isinstance(values, tuple)
                else ArrowColumn(schema.by_name[name].type, values)
            )
    return View([Segment(block, block.columns, 0, len(ids))], schema, number, origins)


class _Memory:
    """Where a column of numbers lies, in all blocks of a view."""

    def __init__(self, field: Field, columns: Sequence[Any]) -> None:
        assert field.numbers is not None
        self.dtype, self.shape = field.numbers
        self.columns = columns
        self.is_whole = all(column is not None for column in columns)
        self.valid = [None if column is None else column.valid for column in columns]
        self.is_valid = self.is_whole and all(valid is None for valid in self.valid)
        addresses = np.array([0 if column is None else column.address for column in columns], np.int64)
        num_rows = [0 if column is None else len(column.values) for column in columns]
        self.table = Table(addresses, num_rows, self.dtype, self.shape)

    def gather(self, segment: NDArray[np.int64], offset: NDArray[np.int64]) -> Numbers:
        table = self.table
        if len(self.columns) == 1 and self.is_whole:
            values = self.columns[0].values.take(offset, axis=0)
        elif self.is_whole:
            step = offset if table.step == 1 else offset * table.step
            values = table.take(table.start[segment] + step)
        else:
            there = np.flatnonzero(table.start[segment] >= 0)
            values = np.zeros((len(offset), *self.shape), self.dtype)
            values[there] = table.take(table.start[segment[there]] + offset[there] * table.step)
        return Numbers(values, None if self.is_valid else self._valid_at(segment, offset))

    def _valid_at(self, segment: NDArray[np.int64], offset: NDArray[np.int64]) -> NDArray[np.bool_] | None:
        valid = np.ones(len(offset), bool)
        for number in np.unique(segment):
            column, known = self.columns[number], self.valid[number]
            if column is None or known is not None:
                mine = segment == number
                valid[mine] = False if column is None else known[offset[mine]]
        return None if valid.all() else valid


def _hash(values: Values, digest: Any) -> None:
    if isinstance(values, Numbers):
        if values.valid is not None:
            values.values[~values.valid] = 0
            digest.update(values.valid.data)
        digest.update(np.ascontiguousarray(values.values).tobytes())
        return
    sink = pa.BufferOutputStream()
    batch = pa.RecordBatch.from_arrays([values.take(pa.array(np.arange(len(values))))], names=["v"])
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write(batch)
    digest.update(memoryview(sink.getvalue()))


def whole_numbers(numbers: Any, what: str) -> NDArray[np.int64]:
    """Row numbers or ids as int64: a range, a list, any array of whole numbers, or one number."""
    if isinstance(numbers, range):
        return np.arange(numbers.start, numbers.stop, numbers.step)
    if hasattr(numbers, "detach"):
        numbers = numbers.detach().cpu().numpy()
    found = np.asarray(numbers)
    if not found.size:
        return np.empty(0, np.int64)
    if found.dtype.kind not in "iu" or found.ndim > 1 or (found.dtype == np.uint64 and int(found.max()) >= 1 << 63):
        raise SpecError(
            f"{what} are whole numbers, got {found.dtype} of shape {list(found.shape)}",
            parameter=what,
            remedy="np.flatnonzero(mask), where this is a mask" if found.dtype == bool else "a list of row numbers",
        )
    return np.atleast_1d(found).astype(np.int64)


def refuse_twice(numbers: NDArray[np.int64], what: str, remedy: str | None = None) -> None:
    """Which of two values a row would get, or where it would stand, is not for us to choose."""
    if len(numbers) > 1:
        ordered = np.sort(numbers)
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        if len(twice):
            raise SpecError(
                f"{what} name row {twice[0]} twice", parameter=what, remedy=remedy or f"each once: np.unique({what})"
            )
