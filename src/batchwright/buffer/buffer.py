"""DatasetBuffer: a dataset that changes while a model trains."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchwright.base.checks import at_least, local_path, whole_number
from batchwright.base.errors import SampleError, SampleTypeError, SpecError, StoreError
from batchwright.base.files import lock_across_forks
from batchwright.base.words import counted
from batchwright.buffer import codec
from batchwright.buffer.contents import BufferDiff, CommittedVersion, Contents, VersionInfo, take_diff
from batchwright.buffer.durable import Durable
from batchwright.buffer.folder import POINTER
from batchwright.buffer.normalize import Normalized, columns_to_extend, normalize, takes_dicts
from batchwright.buffer.reads import BufferVersion, Reads
from batchwright.buffer.retain import BufferSettings, check_by, column_of, kept_count
from batchwright.buffer.schema import Columns, Schema, num_rows_of
from batchwright.buffer.table import BufferTable
from batchwright.buffer.values import (
    arrays_to_columns,
    column_for_set,
    infer_schema,
    refuse_column,
    rows_to_columns,
    schema_of_arrow,
)
from batchwright.buffer.view import View, refuse_twice
from batchwright.typing import Array

__all__ = ["DatasetBuffer"]


class DatasetBuffer(Reads):
    """Rows that change between epochs.

    >>> buffer = DatasetBuffer([{"label": 0, "meta": "first"}, {"label": 1, "meta": "second"}])
    >>> buffer.append({"label": 1, "meta": "third"}, retain_prior=0.5, retain_prior_by="latest")
    range(2, 3)
    >>> len(buffer), buffer[0], buffer.ids.tolist()
    (2, {'label': 1, 'meta': 'second'}, [1, 2])
    """

    def __init__(
        self,
        data: object = None,
        max_size: int | None = None,
        drop_strategy: str = "oldest",
        seed: int = 0,
        path: str | os.PathLike[str] | None = None,
        *,
        schema: pa.Schema | None = None,
        read_only: bool = False,
    ) -> None:
        """`data`: samples, as for `append`; or columns, as for `extend`, where each value of a dict is an array.

        With `path` every change is kept in that folder, and a folder that has a buffer is opened: settings that are
        left at their defaults are then the folder's. `read_only` looks at it while another process writes.

        `max_size`: the most rows; `drop_strategy`: which go first then ("oldest", "random" or a column of numbers).
        `seed`: the seed of random choices. `schema`: the columns; by default they follow from the first rows.
        """
        strategy: Any = drop_strategy
        if not isinstance(strategy, str):
            check_by(strategy, (), (), parameter="drop_strategy")
        most = None if max_size is None else at_least(1, max_size=max_size)
        settings = BufferSettings(most, strategy, whole_number(seed=seed))
        declared = None if schema is None else _declared(schema)
        if read_only and path is None:
            raise SpecError("read_only=True needs a path", parameter="read_only", remedy="path=...")
        self._contents = Contents(settings)
        self._lock = lock_across_forks()
        self._disk: Durable | None = None
        if path is not None:
            self._disk, self._contents = Durable.open(path, settings, read_only=read_only)
        try:
            if declared is not None:
                self._declare(declared)
            if data is not None:
                self._fill(data)
        except BaseException:
            self.close()
            raise

    def _declare(self, schema: Schema) -> None:
        """Let rows have these columns. The rows of a folder have them already."""
        table = self._table
        if not table.next_id:
            table.schema = schema
        elif table.schema.arrow != schema.arrow:
            what, has = f"{self.path} has other columns than schema= says", str(table.schema)
            raise SpecError(what, parameter="schema", has=has, got=str(schema), remedy="leave schema= out")

    def _fill(self, data: Any) -> None:
        """The first rows."""
        if self._table.next_id:  # only a folder has had any
            what = f"{self.path} holds {len(self):,} rows already: data= would add to them each time it is opened"
            raise SpecError(what, parameter="data", remedy="buffer.append(...) what is new, or another path")
        is_columns = isinstance(data, dict) and data and all(len(getattr(v, "shape", ())) for v in data.values())
        try:
            (self.extend if is_columns else self.append)(data)
        except SampleTypeError as error:
            if isinstance(data, str | os.PathLike):
                error.remedy = f"path={os.fspath(data)!r}, if a folder is meant"
            raise

    @property
    def _table(self) -> BufferTable:
        return self._contents.table

    @property
    def kind(self) -> str | None:
        """The kind of samples: "dict", "tensor" or "image". None before the first sample."""
        return self._contents.kind

    # Settings are given when a buffer is opened. A folder's journal holds them, since changes depend on them.

    @property
    def max_size(self) -> int | None:
        """The most rows that there are after an append."""
        return self._contents.settings.max_size

    @property
    def drop_strategy(self) -> str:
        """The strategy that chooses the rows to drop when there are too many."""
        return self._contents.settings.drop_strategy

    @property
    def seed(self) -> int:
        """The seed of random choices and draws."""
        return self._contents.settings.seed

    # Rows in

    def append(
        self, samples: object, retain_prior: float = 1.0, retain_prior_by: str = "random", *, origin: str | None = None
    ) -> range:
        """Add a sample, or a list of `samples`, and give their ids. What is kept of the rows before is decided first:
        the share `retain_prior` of them, chosen by `retain_prior_by` ("random", "oldest", "latest" or a column).

        `origin` is a name for `provenance`. A dict, object, tensor or image is one sample; a list, a `datasets.Dataset`
        or a table is many.
        """
        if type(samples) is dict and retain_prior == 1.0 and retain_prior_by == "random" and origin is None:
            with self._lock:
                try:
                    if self._can_put() and not takes_dicts() and self._table.put(samples):
                        return self._accept(1)
                except BaseException:
                    self._table.take_back()
                    raise
        return self._add_new(normalize(samples), retain_prior, retain_prior_by, origin)

    def extend(
        self, columns: object, retain_prior: float = 1.0, retain_prior_by: str = "random", *, origin: str | None = None
    ) -> range:
        """Add many rows by `columns`, and give their ids: a dict of arrays, a table, a frame, or a tensor [rows, ...].

        `retain_prior`, `retain_prior_by` and `origin` are as in `append`.
        """
        if type(columns) is dict and retain_prior == 1.0 and retain_prior_by == "random" and origin is None:
            with self._lock:
                count = self._table.put_columns(columns) if self._can_put() else 0
                if count:
                    return self._accept(count)
        return self._add_new(columns_to_extend(columns), retain_prior, retain_prior_by, origin)

    def _add_new(self, found: Normalized, retain: Any, by: Any, origin: str | None) -> range:
        with self._lock:
            self._check_writer()
            if found.columns is None and not found.rows:  # no samples are of any kind
                return self._add({}, self._table.schema, self.kind or "dict", retain, by, origin)
            known = self._known_schema(found.kind)
            if found.columns is None:
                columns, schema = rows_to_columns(found.rows, known or infer_schema(found.rows))
            else:
                columns, schema = arrays_to_columns(found.columns, known)
            return self._add(columns, schema, found.kind, retain, by, origin)

    def _known_schema(self, kind: str) -> Schema:
        """The schema that new rows must fit. Without columns before the first rows."""
        if self.kind is not None and kind != self.kind:
            what = f"this buffer holds {_KINDS[self.kind]}, and this is {_KINDS[kind]}"
            remedy = "a buffer of its own for each kind; or dicts that hold both"
            raise SampleError(what, has=self.kind, got=kind, remedy=remedy)
        return self._table.schema

    def _check_writer(self) -> None:
        if self._disk is not None:
            self._disk.folder.check_writer()

    def _can_put(self) -> bool:
        """Whether valid rows can be written without a closer check."""
        contents = self._contents
        if contents.kind != "dict" or not (self._disk is None or self._disk.folder.is_writer):
            return False
        max_size, strategy, _ = contents.settings
        if max_size is None or strategy == "oldest":
            return True
        column = column_of(strategy)
        return column is None or column in contents.table.schema.numeric

    def _accept(self, count: int) -> range:
        """The rows that were put are right: write them down and count them."""
        contents, disk, now = self._contents, self._disk, time.time_ns() // 1000
        table, (max_size, strategy, _) = contents.table, contents.settings
        if max_size is None and disk is None:
            return table.accept(count, now)
        is_over = max_size is not None and table.num_rows + count > max_size
        saved = table.save() if is_over and strategy != "oldest" else None
        try:
            if disk is not None:
                self._catch_up(disk)
                change = codec.Append(table.number + 1, now, b"", count, 1.0, "random", None, "dict", None)
                disk.write(contents, change, table.schema, table.last_put(count))
            ids = table.accept(count, now)
            if is_over:
                contents.drop_over()
        except BaseException:
            if saved is not None:
                table.restore(saved)
            elif contents is self._contents:
                contents.drop_over()
            raise
        if disk is not None:
            disk.after_change(contents)
        return ids

    def _catch_up(self, disk: Durable) -> None:
        """A change that was written down and then interrupted has happened: the folder says so."""
        others = disk.caught_up(self._contents)
        if others is not None:
            self._contents = others
            what = f"change {others.table.number} was interrupted after it had been written down, and is there"
            raise StoreError(what, folder=self.path, remedy="look at the buffer, and make this call again")

    def _add(self, columns: Columns, schema: Schema, kind: str, retain: Any, by: Any, origin: str | None) -> range:
        table, count = self._table, num_rows_of(columns)
        kept = kept_count(table.num_rows, retain)
        if by != "random":
            check_by(by, schema.numeric, schema.not_numeric, parameter="retain_prior_by")
        if self.max_size is not None and self.drop_strategy != "oldest" and len(schema):
            check_by(self.drop_strategy, schema.numeric, schema.not_numeric, parameter="drop_strategy")
        if origin is not None and not _is_name(origin):
            raise SpecError(f"origin= is a name, got {origin!r}", parameter="origin", remedy="origin='hard negatives'")
        if not count and kept == table.num_rows:
            return range(table.next_id, table.next_id)

        change = codec.Append(*self._next(), b"", count, max(float(retain), 0.0), by, origin, kind, None)
        self._do(change, schema, columns)
        return range(table.next_id - count, table.next_id)

    def _next(self) -> tuple[int, int]:
        """The number of the next change, and its time in microseconds."""
        return self._table.number + 1, time.time_ns() // 1000

    def _do(
        self, change: codec.Operation, schema: Schema, columns: Columns, index: NDArray[np.int64] | None = None
    ) -> None:
        """One change: write it down, then make it. If either fails, the buffer is as it was.

        `SetValues` overwrites values. An interrupt (Ctrl-C) then takes effect after it, not in its middle.
        """
        contents, disk = self._contents, self._disk
        saved, kind = contents.table.save(), contents.kind
        if disk is not None:
            self._catch_up(disk)
            disk.write(contents, change, schema, columns)
        try:
            contents.apply(change, schema, columns, index)
        except BaseException:
            contents.table.restore(saved)
            contents.kind = kind
            if isinstance(change, codec.SetValues):  # some rows have new values already, and the old ones are gone
                contents.apply(change, schema, columns, index)
            raise
        if disk is not None:
            disk.after_change(contents)

    # Changes

    def update(self, index: int, row: object) -> None:
        """New values for the columns that `row` names, in row number `index`. Its id stays."""
        found = normalize(row)
        if len(found.rows) != 1:
            what = f"update takes one row, got {len(found.rows)}"
            raise SpecError(what, parameter="row", remedy="buffer.set(ids, ...)")
        with self._lock:
            self._check_writer()
            view = self._table.view()
            ids = view.ids_at(view.checked(whole_number(index=index)))
            known = self._known_schema(found.kind)
            for name in found.rows[0]:
                if name not in known.by_name:
                    refuse_column(name, known, row=0)
            self._set(ids, {name: [value] for name, value in found.rows[0].items()})

    def set(self, ids: Array, /, **columns: object) -> None:
        """New values in `columns` of many rows at once: `buffer.set(ids, loss=array)`, or one value for all of them.

        Each id once: a batch that was drawn may have a row twice. A column that is not there yet is added.
        """
        with self._lock:
            self._check_writer()
            view = self._table.view()
            index = view.index_of(ids)
            ids = view.ids_at(index)
            refuse_twice(ids, "ids", remedy="ids, at = np.unique(ids, return_index=True), and of the values those [at]")
            if not columns:
                raise SpecError("set needs a column", parameter="columns", remedy="buffer.set(ids, loss=array)")
            self._set(ids, columns, index)

    def _set(self, ids: NDArray[np.int64], values: dict[str, Any], index: NDArray[np.int64] | None = None) -> None:
        known = self._table.schema
        columns, fields = {}, []
        for name, column in values.items():
            columns[name], field = column_for_set(name, column, len(ids), known.by_name.get(name))
            fields.append(field)
        if not len(ids):
            return
        change = codec.SetValues(*self._next(), codec.encode_ids(ids), b"", None)
        self._do(change, known.merged(fields), columns, index)

    def drop(self, ids: Array) -> None:
        """Remove the rows with these ids."""
        with self._lock:
            self._check_writer()
            view = self._table.view()
            index = view.index_of(ids)
            gone = view.ids_at(index)
            refuse_twice(gone, "ids")
            if not len(gone):
                return
            self._do(codec.DropRows(*self._next(), codec.encode_ids(gone)), self._table.schema, {}, index)

    # Versions

    def commit(self, name: str | None = None) -> VersionInfo:
        """Keep the current rows under a name, for `at`, `diff` and `rollback`.

        A run that repeats itself after a crash may commit again: a version of this name that has the same rows is it,
        and the rows have its ids from then on.
        """
        with self._lock:
            number = self._table.number
            name = f"version {number}" if name is None else name
            contents = self._contents
            same = [kept for kept in contents.versions if kept.info.name == name and kept.info.rows == len(self)]
            if same and same[0].view.content_fingerprint() == self.content_fingerprint():
                if not np.array_equal(same[0].view.ids, self._table.view().ids):
                    self.rollback(same[0].info)  # rows added again got new ids: others know the version's
                return same[0].info
            self._check_new_name(name)
            info = VersionInfo(number, name, datetime.now(UTC), self._table.num_rows)
            view = self._table.view().share()
            ordinal = 1 + max((kept.ordinal for kept in contents.versions), default=-1)
            if self._disk is not None:
                self._disk.commit(contents, ordinal, info)
            contents.versions.append(CommittedVersion(ordinal, info, contents.kind, lambda: view))
            return info

    def _check_new_name(self, name: Any) -> None:
        if not name or not _is_name(name):
            raise SpecError(f"a version cannot be named {name!r}", parameter="name", remedy="commit('epoch 3')")
        if name in [kept.info.name for kept in self._contents.versions]:
            remedy = f"another name: {name + ' (again)'!r}; or buffer.forget({name!r}) before"
            raise SpecError(f"there is a version {name!r} already", parameter="name", remedy=remedy)

    def forget(self, version: str | int | VersionInfo) -> None:
        """Let go of a version: rows that only it had are gone."""
        with self._lock:
            kept = self._contents.find(version)
            if self._disk is not None:
                self._disk.forget(self._contents, kept.ordinal)
            self._contents.versions.remove(kept)

    def versions(self) -> list[VersionInfo]:
        """The committed versions, oldest first."""
        return [kept.info for kept in self._contents.versions]

    def at(self, version: str | int | VersionInfo) -> BufferVersion:
        """The rows of a version (by its name, its number, or the result of `commit`), to read."""
        kept = self._contents.find(version)
        return BufferVersion(kept.view, self.seed, kept.kind)

    def snapshot(self) -> BufferVersion:
        """Return the current rows, to read. Later changes to the buffer do not affect them."""
        with self._lock:
            return BufferVersion(self._table.view(), self.seed, self.kind)

    def diff(self, older: str | int | VersionInfo, newer: str | int | VersionInfo | None = None) -> BufferDiff:
        """Return the differences between versions `older` and `newer`. `newer` defaults to the current buffer."""
        with self._lock:
            find = self._contents.find
            return take_diff(find(older).view, self._table.view() if newer is None else find(newer).view)

    def rollback(self, version: str | int | VersionInfo) -> None:
        """Restore the rows of a version, with its ids and columns.

        This is a change like others: versions that were committed after it stay.
        """
        with self._lock:
            kept = self._contents.find(version)
            self._do(codec.Rollback(*self._next(), kept.ordinal), self._table.schema, {})

    # Reading

    def _look(self) -> View:
        with self._lock:
            return self._table.view()

    def __len__(self) -> int:
        return self._table.num_rows

    # In and out

    @classmethod
    def from_table(cls, table: object, **settings: Any) -> Self:
        """Return a buffer with the rows of a table. Lists of numbers of a fixed length become arrays. `settings` are
        those of `DatasetBuffer`."""
        buffer = cls(**settings)
        buffer.extend(table)
        return buffer

    @classmethod
    def from_hf_dataset(cls, dataset: object, **settings: Any) -> Self:
        """Return a buffer with the rows of `dataset`, a `datasets.Dataset`. `settings` are those of `DatasetBuffer`."""
        buffer = cls(**settings)
        buffer.append(dataset)
        return buffer

    # Files

    @property
    def path(self) -> Path | None:
        """The folder that the buffer lives in, if it does."""
        return None if self._disk is None else self._disk.folder.path

    @classmethod
    def salvage(cls, path: str | os.PathLike[str], to: str | os.PathLike[str]) -> Self:
        """The rows of the folder `path` with a damaged journal, after every change before the damage, in the new folder
        `to`.

        Versions are not taken along.
        """
        disk, found = Durable.open(path, BufferSettings(), read_only=True, salvage=True)
        disk.folder.close()
        if (local_path(to=to) / POINTER).exists():
            raise SpecError(f"{to} has a buffer already", parameter="to", remedy="a new folder")
        saved = cls(**found.settings._asdict(), path=to)
        view, next_id = found.table.view().share(), found.table.next_id
        saved._contents = Contents.of(view, found.kind, found.settings, next_id=next_id)
        saved.checkpoint()
        return saved

    def checkpoint(self) -> None:
        """Have all rows in files that are mapped when the folder is opened, so that no journal has to be read first.

        This happens by itself when the journal has become long.
        """
        if self._disk is not None:
            with self._lock:
                self._disk.checkpoint(self._contents)

    def verify(self) -> None:
        """Read every file of the folder and compare it with its hash: a StoreError names those that were damaged.

        Opening compares the hashes of the journal and of all data except rows. Blocks of rows are mapped unchecked.
        """
        if self._disk is None:
            return
        damaged = list(self._disk.folder.damaged_blocks())
        if damaged:
            files = "\n".join(f"{file}: {what}" for file, what in damaged)
            what = f"{counted(len(damaged), 'damaged file')} in this buffer"
            raise StoreError(what, files=files, remedy="restore the folder from a copy")

    def refresh(self) -> Self:
        """Let a reader see later changes of the writer."""
        if self._disk is not None:
            with self._lock:
                self._contents = self._disk.refresh(self._contents)
        return self

    def sync(self) -> None:
        """Return when everything is on disk, so that a power cut cannot take it."""
        if self._disk is not None:
            self._disk.sync()

    def close(self) -> None:
        """Let go of the folder. What is in memory can still be read."""
        if self._disk is not None:
            self._disk.folder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        contents = self._contents
        return _from_content, (self._hold(), contents.kind, contents.settings, contents.table.next_id)


def _from_content(view: View, kind: str | None, settings: BufferSettings, next_id: int) -> DatasetBuffer:
    return buffer_of(Contents.of(view, kind, settings, next_id=next_id))


def buffer_of(contents: Contents) -> DatasetBuffer:
    """A buffer in memory that holds this."""
    buffer = DatasetBuffer()
    buffer._contents = contents
    return buffer


_KINDS = {"dict": "rows (dicts)", "tensor": "tensors", "image": "images"}


def _declared(schema: Any) -> Schema:
    if not isinstance(schema, pa.Schema):
        remedy = "schema=pa.schema([pa.field('label', pa.int64(), nullable=False)])"
        raise SpecError(f"schema= is a pyarrow schema, got {type(schema).__name__}", parameter="schema", remedy=remedy)
    return schema_of_arrow(schema)


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and name.isprintable()  # half a surrogate pair is not
