"""The contents of a buffer: rows, committed versions, and their changes and differences.

A change is a function of the contents, the seed and the journal number. It was checked and written down before.
Opening a folder makes the same changes again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from batchwright.base.errors import SpecError
from batchwright.base.words import counted, suggest
from batchwright.buffer import codec
from batchwright.buffer.arrow import equal_rows, has_value
from batchwright.buffer.retain import BufferSettings, column_of, drop, keep, kept_count
from batchwright.buffer.schema import Columns, Numbers, Schema
from batchwright.buffer.table import BufferTable
from batchwright.buffer.view import View


@dataclass(frozen=True, slots=True)
class VersionInfo:
    """A commit."""

    number: int
    """The journal number of the last change before it."""
    name: str
    time: datetime
    rows: int

    def __str__(self) -> str:
        return f"{self.number}  {self.name}  {self.time:%Y-%m-%d %H:%M:%S}  {counted(self.rows, 'row')}"


@dataclass(frozen=True, eq=False)
class CommittedVersion:
    """A version. Its rows are read from disk when they are first needed."""

    ordinal: int
    """The number of the version in its buffer. It is never used again."""
    info: VersionInfo
    kind: str | None
    load: Callable[[], View]

    @cached_property
    def view(self) -> View:
        return self.load().share()

    @property
    def is_loaded(self) -> bool:
        return "view" in vars(self)


@dataclass(frozen=True, slots=True)
class BufferDiff:
    """The differences between a version and an older one, by ids."""

    added: NDArray[np.int64]
    removed: NDArray[np.int64]
    changed: NDArray[np.int64]
    """Rows that are in both, with another value in some column."""
    columns: dict[str, int]
    """The number of these rows with another value, per column. Columns that are in only one version count too."""

    def __bool__(self) -> bool:
        return bool(len(self.added) or len(self.removed) or len(self.changed))

    def __str__(self) -> str:
        text = f"{counted(len(self.added), 'row')} added, {len(self.removed):,} removed, {len(self.changed):,} changed"
        where = ", ".join(f"{name} in {count:,}" for name, count in self.columns.items() if count)
        return f"{text} ({where})" if where else text


def take_diff(older: View, newer: View) -> BufferDiff:
    old, new = older.ids, newer.ids
    both, at_old, at_new = np.intersect1d(old, new, assume_unique=True, return_indices=True)
    different = np.zeros(len(both), bool)
    columns: dict[str, int] = {}
    for name in {**older.schema.by_name, **newer.schema.by_name}:
        mask = _differs(older, newer, name, at_old, at_new)
        columns[name] = int(mask.sum())
        different |= mask
    return BufferDiff(
        np.setdiff1d(new, both, assume_unique=True),
        np.setdiff1d(old, both, assume_unique=True),
        both[different],
        columns,
    )


def _differs(
    older: View, newer: View, name: str, at_old: NDArray[np.int64], at_new: NDArray[np.int64]
) -> NDArray[np.bool_]:
    was_there = name in older.schema.by_name
    if not was_there or name not in newer.schema.by_name:
        view, index = (older, at_old) if was_there else (newer, at_new)
        return has_value(view.columns_at(index, [name])[name])
    differs = np.zeros(len(at_old), bool)
    suspects = np.flatnonzero(_memory_of(older, name, at_old) != _memory_of(newer, name, at_new))
    mine, other = older.columns_at(at_old[suspects], [name]), newer.columns_at(at_new[suspects], [name])
    differs[suspects] = ~equal_rows(mine[name], other[name])
    return differs


def _memory_of(view: View, name: str, index: NDArray[np.int64]) -> NDArray[np.int64]:
    """A number for the block and the column that hold each row. Rows with one number are the same in all versions."""
    columns = np.array([id(segment.columns.get(name)) for segment in view.segments], np.int64)
    return columns[view.locate(index)[0]]


class Contents:
    """The rows of a buffer, their kind of samples, the settings of their choice, and the committed versions."""

    def __init__(self, settings: BufferSettings = BufferSettings()) -> None:  # noqa: B008  # a value: it does not change
        self.table: BufferTable = BufferTable()
        self.kind: str | None = None
        self.settings: BufferSettings = settings
        self.versions: list[CommittedVersion] = []

    @classmethod
    def of(cls, view: View, kind: str | None, settings: BufferSettings, *, next_id: int | None = None) -> Contents:
        """The rows of a view, which keep their ids and their memory."""
        made = cls(settings)
        made.kind = kind
        table = made.table
        table.number, table.origins = view.number, list(view.origins)
        table.next_serial = 1 + max((segment.block.serial for segment in view.segments), default=-1)
        table.next_id = 1 + int(view.ids.max(initial=-1)) if next_id is None else next_id
        table.replace(view.segments, view.schema)
        return made

    def select(self, view: View, index: NDArray[np.int64]) -> None:
        """Let only some rows of the view stay, in this order."""
        if (np.diff(index) > 0).all():
            self.table.keep(index)
        else:
            self.table.replace([self.table.gathered(view, index)], view.schema)
        self.table.number = 1

    # Changes

    def apply(
        self, change: codec.Operation, schema: Schema, columns: Columns, index: NDArray[np.int64] | None = None
    ) -> None:
        """Make a change: now, or again when a journal is read. `columns` are those that it brings.

        `index` are the places of its rows, if they are known.
        """
        table = self.table
        if index is None and isinstance(change, codec.SetValues | codec.DropRows):
            index = table.view().index_of(codec.decode_ids(change.ids))
        match change:
            case codec.Append():
                self._add(change, schema, columns)
            case codec.SetValues():
                assert index is not None
                table.begin_change()
                table.change(index, schema, columns)
            case codec.DropRows():
                assert index is not None
                table.begin_change()
                table.drop(np.sort(index))
            case codec.Rollback():
                kept = self.version_of(change.version)
                assert kept is not None
                table.begin_change()
                table.replace(kept.view.share().segments, kept.view.schema)
                self.kind = kept.kind
            case codec.SettingsChange():
                self.settings = BufferSettings(change.max_size, change.drop_strategy, change.seed)
                table.begin_change()
                self.drop_over()

    def _add(self, change: codec.Append, schema: Schema, columns: Columns) -> None:
        """Choose the existing rows that stay, add others, and drop the rows above `max_size`."""
        table, by = self.table, change.by
        number, kept = table.begin_change(), kept_count(table.num_rows, change.retain)
        if kept < table.num_rows:
            table.keep(keep(table.num_rows, kept, by, self._values_of(by), seed=self.settings.seed, number=number))
        table.add(schema, columns, change.time_us, change.origin)
        if change.num_rows:
            self.kind = change.kind
        self.drop_over()

    def drop_over(self) -> None:
        """Drop the rows above `max_size`."""
        table, (max_size, strategy, seed) = self.table, self.settings
        if max_size is None or table.num_rows <= max_size:
            return
        over = table.num_rows - max_size
        if strategy == "oldest":  # with each row that comes to a full buffer
            table.drop_first(over)
            return
        values = self._values_of(strategy)
        table.drop(drop(table.num_rows, over, strategy, values, seed=seed, number=table.number))

    def _values_of(self, by: str) -> Numbers | None:
        """The column that rows are chosen by, if it is one."""
        column = column_of(by)
        if column is None:
            return None
        view = self.table.view()
        if column in view.schema.by_name:
            found = view.column(column)
            if isinstance(found, Numbers):
                return found
        return Numbers(np.zeros(len(view)), np.zeros(len(view), bool))  # its first numbers are about to be added

    # Versions

    def find(self, wanted: str | int | VersionInfo) -> CommittedVersion:
        """Find a version by name, by number (the last commit there), or by the result of `commit`."""
        for kept in reversed(self.versions):
            info = kept.info
            if wanted == info or (type(wanted), wanted) in ((int, info.number), (str, info.name)):
                return kept
        names = [kept.info.name for kept in self.versions]
        near = suggest(str(wanted), names)
        versions, remedy = ", ".join(map(repr, names[-10:])), "one of them"
        if near is not None:
            remedy = f"version {near!r}"
        elif not names:
            versions, remedy = "none was committed", "buffer.commit('name') keeps one"
        raise SpecError(f"there is no version {wanted!r}", parameter="version", versions=versions, remedy=remedy)

    def version_of(self, ordinal: int) -> CommittedVersion | None:
        return next((kept for kept in self.versions if kept.ordinal == ordinal), None)
