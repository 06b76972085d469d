"""Views: the rows of one version, which later changes to the buffer do not affect."""

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
from batchwright.base.words import listed, suggest
from batchwright.buffer.blocks import ArrowColumn, RowBlock, Segment, column_of_values, missing
from batchwright.buffer.schema import Columns, Field, Numbers, Schema, Values
from batchwright.columns.addresses import ScatteredRows, gather

__all__ = ["View"]

_HASHED_ROWS = 4096
"""Rows that are hashed at once. Part of a version's fingerprint."""


class View:
    """The rows of one version, by number. Costs nothing to make, and holds no row of its own.

    A batch is one gather for each column of numbers: rows are found by address, in any number of blocks.
    """

    def __init__(self, segments: Sequence[Segment], schema: Schema, number: int, origins: Sequence[str | None]) -> None:
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

    # Selection of rows

    def checked(self, indices: Any, *, what: str = "indices") -> NDArray[np.int64]:
        """Convert row numbers that may count from the end to numbers from 0. Raises RowIndexError if out of range."""
        index, count = whole_numbers(indices, what), len(self)
        if not len(index) or (index.min() >= 0 and index.max() < count):
            return index
        wrong = index[(index < -count) | (index >= count)]
        if len(wrong):
            what, remedy = f"row {wrong[0]} is not in a buffer of {count:,} rows", "append rows first"
            if count:
                remedy = f"a number from {-count} to {count - 1}"
            raise RowIndexError(what, index=int(wrong[0]), remedy=remedy)
        return np.where(index < 0, index + count, index)

    @cached_property
    def ids(self) -> NDArray[np.int64]:
        """The id of every row: a number that it keeps for ever."""
        return np.concatenate([np.empty(0, np.int64), *(segment.ids() for segment in self.segments)])

    def ids_at(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """The ids of some rows."""
        return self._ids(*self.locate(index))

    def _ids(self, segment: NDArray[np.int64], offset: NDArray[np.int64]) -> NDArray[np.int64]:
        first, lists_ids = self._first_ids
        ids: NDArray[np.int64] = offset + first[segment]
        if lists_ids is not None:
            for number in np.unique(segment[lists_ids[segment]]):
                mine = segment == number
                ids[mine] = self.segments[number].block.ids_of(offset[mine])
        return ids

    @cached_property
    def _first_ids(self) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
        """Return (first id of each segment's block, mask of blocks that list ids instead; None if none does)."""
        blocks = [segment.block for segment in self.segments]
        lists_ids = [block.ids is not None for block in blocks]
        first = np.array([block.first_id for block in blocks], np.int64)
        return first, np.array(lists_ids) if any(lists_ids) else None

    def index_of(self, ids: Any) -> NDArray[np.int64]:
        """The row numbers of some ids; Raises RowIndexError if an id is missing."""
        wanted = whole_numbers(ids, "ids")
        if not len(wanted):
            return wanted
        find = self._by_order if self._id_ranges is None else self._by_segment
        found, known = find(wanted)
        if not known.all():
            gone = wanted[~known].tolist()
            remedy = "ids that buffer.ids holds: rows that were dropped are gone, and no id is used twice"
            raise RowIndexError(f"not in the buffer: id {listed(gone, 3)}", id=gone[0], remedy=remedy)
        return found

    @cached_property
    def _id_ranges(self) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        """(first, last) id of every segment; None if ids are not ascending, as after `select` in another order."""
        if not all(segment.block.has_ascending_ids for segment in self.segments):
            return None
        ends = [segment.block.ids_of(np.array([segment.start, segment.stop - 1])) for segment in self.segments]
        first, last = np.array(ends, np.int64).reshape(-1, 2).T
        return (first, last) if (first[1:] > last[:-1]).all() else None

    def _by_segment(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """(row number of each id, whether it is here), without a look at other ids."""
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

    def _by_order(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The same, for ids in any order."""
        order = self._id_order
        at = np.minimum(np.searchsorted(self.ids, ids, sorter=order), len(order) - 1)
        return order[at], self.ids[order[at]] == ids

    @cached_property
    def _id_order(self) -> NDArray[np.int64]:
        return np.argsort(self.ids, kind="stable")

    def locate(self, index: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(segment, offset in its block) of rows by number."""
        if len(self.segments) == 1:
            one = self.segments[0]
            return np.zeros(len(index), np.int64), index + one.start if one.keep is None else one.keep[index]
        segment = self._first[1:].searchsorted(index, side="right")
        shift, lists = self._shifts
        offset: NDArray[np.int64] = index + shift[segment]
        if lists is not None and len(listed := np.flatnonzero(lists[segment])):
            which = segment[listed]
            offset[listed] = gather(lists[which] + (index[listed] - self._first[which]) * 8, np.dtype(np.int64))
        return segment, offset

    @cached_property
    def _shifts(self) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
        """Per segment (shift from row numbers to offsets, the address of its list of live rows, or 0; None: all 0)."""
        shift = np.array([segment.start for segment in self.segments], np.int64) - self._first[:-1]
        lists = [0 if segment.keep is None else segment.keep.ctypes.data for segment in self.segments]
        return shift, np.array(lists) if any(lists) else None

    # Values

    def rows_at(self, index: NDArray[np.int64]) -> tuple[Columns, NDArray[np.int64]]:
        """Return (columns, ids) of some rows by number. All of the rows must exist."""
        place = self.locate(index)
        return {field.name: self._gather(field, *place) for field in self.schema}, self._ids(*place)

    def columns_at(self, index: NDArray[np.int64], names: Sequence[str] | None = None) -> Columns:
        """Return some rows by number. All of the rows must exist. One gather per column, into new memory."""
        place, known = self.locate(index), self.schema.by_name
        return {name: self._gather(known[name], *place) for name in names or known}

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
        joined: Any = joined_values(taken or [pa.nulls(0, field.type)])
        if (np.diff(order) > 0).all():
            return joined
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        return joined.take(pa.array(back))

    def column(self, name: str) -> Values:
        """One column of all rows, to read: a view if they are in one block, else a copy.

        To keep it, `share` first: rows may get new values in the same memory otherwise.
        """
        field = self.schema.by_name[name]
        found: list[Any] = [segment.values(field) for segment in self.segments] or [missing(field, 0)]
        if len(found) == 1 and isinstance(found[0], Numbers):
            found[0].values.flags.writeable = False
        return joined_values(found)

    def columns(self) -> Columns:
        return {name: self.column(name) for name in self.schema.names}

    def pieces(self, rows: int) -> Iterator[NDArray[np.int64]]:
        """The numbers of all rows, a few at a time."""
        for begin in range(0, len(self), rows):
            yield np.arange(begin, min(begin + rows, len(self)))

    # Provenance of rows

    def appends_at(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """(journal number, time in microseconds, number of the origin) of the append that each row came with."""
        segment, offset = self.locate(index)
        entries = np.zeros((len(index), 3), np.int64)
        for number in np.unique(segment):
            mine, ledger = segment == number, self.segments[number].block.origins()
            entries[mine] = ledger[np.searchsorted(ledger[:, 0], offset[mine], side="right") - 1, 1:]
        return entries

    def ledger_at(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """The ledger of a block that has these rows."""
        entries = self.appends_at(index)
        begins = np.flatnonzero(np.r_[True, (entries[1:] != entries[:-1]).any(axis=1)][: len(index)])
        return np.column_stack([begins, entries[begins]])

    def provenance(self, index: NDArray[np.int64]) -> pa.Table:
        """id, journal number, time and origin of the append that each of some rows came with."""
        entries = self.appends_at(index)
        return pa.table(
            {
                "id": pa.array(self.ids_at(index)),
                "number": pa.array(entries[:, 0]),
                "time": pa.array(entries[:, 1]).cast(pa.timestamp("us", "UTC")),
                "origin": pa.array([self.origins[number] for number in entries[:, 2]], pa.string()),
            }
        )

    def only(self, names: Sequence[str]) -> View:
        """The same rows, with some of their columns."""
        known = self.schema.by_name
        unknown = [name for name in names if name not in known]
        if isinstance(names, str) or not names or unknown:
            near, wrong = next(iter(known), "..."), "a list of names, not empty"
            if isinstance(names, str):
                near = suggest(names, known) or near
            elif unknown:
                near, wrong = suggest(str(unknown[0]), known) or near, f"there is no column {unknown[0]!r}"
            listed = ", ".join(map(repr, known))
            raise SpecError(
                f"columns={names!r}: {wrong}", parameter="columns", columns=listed, remedy=f"columns=[{near!r}]"
            )
        schema = Schema(tuple(known[name] for name in dict.fromkeys(names)))
        return View(self.segments, schema, self.number, self.origins)

    def share(self) -> View:
        """Mark all columns as shared: later changes are made in a copy."""
        for segment in self.segments:
            for column in segment.columns.values():
                column.shared = True
        return self

    def content_fingerprint(self) -> str:
        """Names the rows: equal rows have equal fingerprints, in any blocks."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        fields = [[field.name, str(field)] for field in self.schema]
        digests: list[str] = []
        for index in self.pieces(_HASHED_ROWS):
            digest = xxhash.xxh3_128()
            for values in self.columns_at(index).values():
                _hash(values, digest)
            digests.append(digest.hexdigest())
        return fingerprint([fields, len(self), digests])

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by content: rows, ids and provenance, as one block."""
        ledger = self.ledger_at(np.arange(len(self))).ravel()
        return _from_content, (self.schema, self.columns(), self.ids, ledger, self.number, list(self.origins))


def joined_values(pieces: Sequence[Any]) -> Values:
    """Parts of one column, one after the other."""
    if len(pieces) == 1:
        return pieces[0]
    if not isinstance(pieces[0], Numbers):
        return pa.concat_arrays(pieces)
    values = np.concatenate([piece.values for piece in pieces])
    if all(piece.valid is None for piece in pieces):
        return Numbers(values)
    return Numbers(values, np.concatenate([piece.has_value for piece in pieces]))


def _from_content(
    schema: Schema, columns: Columns, ids: NDArray[np.int64], ledger: Any, number: int, origins: list[str | None]
) -> View:
    block = RowBlock(0, len(ids), 0)
    block.num_rows, block.ids = len(ids), ids
    block.ledger.extend(ledger.tolist())
    for name, values in columns.items():
        if not schema.by_name[name].is_null:
            block.columns[name] = column_of_values(values)
    return View([Segment.of(block)], schema, number, origins)


class _Memory:
    """The memory of a column of numbers, in all blocks of a view."""

    def __init__(self, field: Field, columns: Sequence[Any]) -> None:
        assert field.numbers is not None
        self.dtype, self.shape = field.numbers
        self.columns = columns
        self.is_everywhere = all(column is not None for column in columns)
        self.is_valid = self.is_everywhere and all(column.valid is None for column in columns)
        addresses = np.array([getattr(column, "address", 0) for column in columns], np.int64)
        num_rows = [getattr(column, "num_rows", 0) for column in columns]
        self.table = ScatteredRows(addresses, num_rows, self.dtype, self.shape)

    def gather(self, segment: NDArray[np.int64], offset: NDArray[np.int64]) -> Numbers:
        table = self.table
        if not self.is_everywhere:
            there = np.flatnonzero(table.start[segment] >= 0)
            values = np.zeros((len(offset), *self.shape), self.dtype)
            values[there] = table.take(table.start[segment[there]] + offset[there] * table.step)
        elif len(self.columns) == 1:
            values = self.columns[0].values.take(offset, axis=0)
        elif table.step == 1:
            values = table.take(table.start[segment] + offset)
        else:
            values = table.take(table.start[segment] + offset * table.step)
        if self.is_valid:
            return Numbers(values)
        return Numbers(values, self._valid_at(segment, offset))

    def _valid_at(self, segment: NDArray[np.int64], offset: NDArray[np.int64]) -> NDArray[np.bool_] | None:
        valid = np.ones(len(offset), bool)
        for number in np.unique(segment):
            column = self.columns[number]
            mine = segment == number
            if column is None:
                valid[mine] = False
            elif column.valid is not None:
                valid[mine] = column.valid[offset[mine]]
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
        headline = f"{what} are whole numbers, got {found.dtype} of shape {list(found.shape)}"
        remedy = "a list of row numbers"
        if found.dtype == bool:
            remedy = "np.flatnonzero(mask), where this is a mask"
        raise SpecError(headline, parameter=what, remedy=remedy)
    return np.atleast_1d(found).astype(np.int64)


def refuse_twice(numbers: NDArray[np.int64], what: str, remedy: str | None = None) -> None:
    """Refuse a row that is named twice: it would get two values, or stand in two places."""
    ordered = np.sort(numbers)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(twice):
        remedy = remedy or f"each once: np.unique({what})"
        raise SpecError(f"{what} name row {twice[0]} twice", parameter=what, remedy=remedy)
