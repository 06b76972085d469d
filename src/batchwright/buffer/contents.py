"""The contents of a buffer and their changes. A change is a function of the contents, the seed and the journal number.

A change was checked and written down before. Opening a folder makes the same changes again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.buffer.retain import BufferSettings, column_of, drop, keep, kept_count
from batchwright.buffer.schema import Columns, Numbers, Schema, num_rows_of
from batchwright.buffer.table import BufferTable
from batchwright.buffer.versions import CommittedVersion, VersionInfo, find_version
from batchwright.buffer.view import View

__all__ = ["Contents"]


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

    @contextmanager
    def or_nothing(self) -> Iterator[None]:
        """Undo the changes of the block if it fails. Values that were changed in place are not undone."""
        saved, kind = self.table.save(), self.kind
        try:
            yield
        except BaseException:
            self.table.restore(saved)
            self.kind = kind
            raise

    # Changes

    def add(
        self, schema: Schema, columns: Columns, *, kind: str, retain: Any, by: str, origin: str | None, time_us: int
    ) -> range:
        """Choose the existing rows that stay, add others, and drop the rows above `max_size`."""
        table = self.table
        number, kept = table.begin_change(), kept_count(table.num_rows, retain)
        if kept < table.num_rows:
            table.keep(keep(table.num_rows, kept, by, *self._values_of(by), seed=self.settings.seed, number=number))
        ids = table.add(schema, columns, time_us, origin)
        if num_rows_of(columns):
            self.kind = kind
        self.drop_over()
        return ids

    def change(self, ids: NDArray[np.int64], schema: Schema, columns: Columns) -> None:
        """New values of some columns for some rows."""
        index = self.table.view().index_of(ids)
        self.table.begin_change()
        self.table.change(index, schema, columns)

    def drop(self, ids: NDArray[np.int64]) -> None:
        index = self.table.view().index_of(ids)
        self.table.begin_change()
        self.table.drop(np.sort(index))

    def roll_back(self, kept: CommittedVersion) -> None:
        self.table.begin_change()
        self.table.replace(kept.view.share().segments, kept.view.schema)
        self.kind = kept.kind

    def choose_by(self, settings: BufferSettings) -> None:
        """Other settings from now on."""
        self.settings = settings
        self.table.begin_change()
        self.drop_over()

    def drop_over(self) -> None:
        """Drop the rows above `max_size`."""
        table, (max_size, strategy, seed) = self.table, self.settings
        over = 0 if max_size is None else table.num_rows - max_size
        if over <= 0:
            return
        if strategy == "oldest":  # with each row that comes to a full buffer
            table.drop_first(over)
            return
        values = self._values_of(strategy)
        table.drop(drop(table.num_rows, over, strategy, *values, seed=seed, number=table.number))

    def _values_of(self, by: str) -> tuple[NDArray[Any] | None, NDArray[np.bool_] | None]:
        """(values, valid) of the column that rows are chosen by, if it is one."""
        column = column_of(by)
        if column is None:
            return None, None
        view = self.table.view()
        found = view.column(column[0]) if column[0] in view.schema.by_name else None
        if not isinstance(found, Numbers):  # its first numbers come with the rows that are about to be added
            return np.zeros(len(view)), np.zeros(len(view), bool)
        return found.values, found.valid

    # Versions

    def add_version(self, ordinal: int, info: VersionInfo, kind: str | None, load: Callable[[], View]) -> None:
        self.versions.append(CommittedVersion(ordinal, info, kind, load))

    def find(self, version: str | int | VersionInfo) -> CommittedVersion:
        return self.versions[find_version(version, [kept.info for kept in self.versions])]

    def version_of(self, ordinal: int) -> CommittedVersion | None:
        return next((kept for kept in self.versions if kept.ordinal == ordinal), None)
