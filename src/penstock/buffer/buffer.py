"""A dataset that changes while you train: rows are added, thinned out, changed and rolled back, and nothing is lost."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.buffer import codec
from penstock.buffer.blocks import Segment
from penstock.buffer.durable import Durable
from penstock.buffer.folder import POINTER
from penstock.buffer.incoming import columns_in
from penstock.buffer.locks import new_lock
from penstock.buffer.normalize import normalize, takes_dicts
from penstock.buffer.reads import BufferVersion, Reads
from penstock.buffer.retain import Settings, check_by, column_of, drop, keep, kept_count
from penstock.buffer.schema import Columns, Field, Numbers, Schema, num_rows_of
from penstock.buffer.table import Table
from penstock.buffer.values import (
    arrays_to_columns,
    column_for_set,
    infer_schema,
    rows_to_columns,
    schema_of_arrow,
)
from penstock.buffer.versions import BufferDiff, VersionInfo, find_version, take_diff
from penstock.buffer.view import View, refuse_twice
from penstock.errors import SampleError, SampleTypeError, SpecError
from penstock.spec import at_least, whole_number

__all__ = ["DatasetBuffer"]

T = TypeVar("T")


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
        data: Any = None,
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
        """
        most = None if max_size is None else at_least(1, max_size=max_size)
        self._settings = Settings(most, _checked_text(drop_strategy), whole_number(seed=seed))
        self.kind = None
        self._table = Table()
        self._lock = new_lock()
        self._versions: list[_Kept] = []
        self._disk: Durable | None = None
        self._declared: Schema | None = None
        if schema is not None:
            self._table.schema = self._declared = _declared(schema)
        if read_only and path is None:
            raise SpecError(
                "read_only=True needs a path: whose rows are to be read?", parameter="read_only", remedy="path=..."
            )
        if path is not None:
            self._open(path, read_only)
        try:
            if data is not None:
                if self._table.next_id:
                    raise SpecError(
                        f"{path} holds {len(self):,} rows already: data= would add to them each time it is opened",
                        parameter="data",
                        remedy="buffer.append(...) what is new, or another path",
                    )
                is_columns = isinstance(data, dict) and bool(data) and all(map(_is_column, data.values()))
                (self.extend if is_columns else self.append)(data)
        except BaseException as error:
            self.close()
            if isinstance(error, SampleTypeError) and isinstance(data, str | os.PathLike):
                error.remedy = f"path={os.fspath(data)!r}, if a folder is meant"
            raise

    # Settings: those that it was opened with. Changes are chosen by them, so that they are part of a folder's journal.

    @property
    def max_size(self) -> int | None:
        """The most rows that there are after an append."""
        return self._settings.max_size

    @property
    def drop_strategy(self) -> str:
        """Which rows go first where there are more."""
        return self._settings.drop_strategy

    @property
    def seed(self) -> int:
        """What random choices and draws follow."""
        return self._settings.seed

    # Rows in

    def append(
        self,
        samples: Any,
        retain_prior: float = 1.0,
        retain_prior_by: str = "random",
        *,
        origin: str | None = None,
    ) -> range:
        """Add a sample, or a list of them, and give their ids. What is kept of the rows before is decided first.

        A dict, object, tensor or image is one sample; a list, a `datasets.Dataset` or a table is many.
        """
        if type(samples) is dict and retain_prior == 1.0 and retain_prior_by == "random" and origin is None:
            with self._lock:
                try:
                    if self._can_put() and not takes_dicts() and self._table.put(samples):
                        return self._accept(1)
                except BaseException:
                    self._table.take_back()
                    raise
        found = normalize(samples)
        with self._lock:
            self._check_writer()
            if isinstance(found.rows, list) and not found.rows and self.kind is not None:
                found = found._replace(kind=self.kind)  # nothing is of any kind
            known = self._known_schema(found.kind)
            if isinstance(found.rows, pa.Table):
                arrays = {name: found.rows.column(name) for name in found.rows.column_names}
                columns, schema = arrays_to_columns(arrays, known)
            elif not found.rows:
                columns, schema = {}, self._table.schema
            else:
                columns, schema = rows_to_columns(found.rows, known or infer_schema(found.rows))
            return self._add(columns, schema, found.kind, retain_prior, retain_prior_by, origin)

    def extend(
        self,
        columns: Any,
        retain_prior: float = 1.0,
        retain_prior_by: str = "random",
        *,
        origin: str | None = None,
    ) -> range:
        """Add many rows by column, and give their ids: a dict of arrays, a table, a frame, or a tensor [rows, ...]."""
        if type(columns) is dict and retain_prior == 1.0 and retain_prior_by == "random" and origin is None:
            with self._lock:
                count = self._table.put_columns(columns) if self._can_put() else 0
                if count:
                    return self._accept(count)
        kind, arrays = columns_in(columns)
        with self._lock:
            self._check_writer()
            prepared, schema = arrays_to_columns(arrays, self._known_schema(kind))
            return self._add(prepared, schema, kind, retain_prior, retain_prior_by, origin)

    def _known_schema(self, kind: str) -> Schema | None:
        """What new rows must fit; None where they are the first."""
        if self.kind is not None and kind != self.kind:
            raise SampleError(
                f"this buffer holds {_KINDS[self.kind]}, and this is {_KINDS[kind]}",
                has=self.kind,
                got=kind,
                remedy="a buffer of its own for each kind; or dicts that hold both",
            )
        return self._table.schema if len(self._table.schema) else None

    def _check_writer(self) -> None:
        if self._disk is not None:
            self._disk.check_writer()

    def _can_put(self) -> bool:
        return self.kind == "dict" and (self._disk is None or self._disk.is_writer)

    def _accept(self, count: int) -> range:
        """The rows that were put are right: write them down and count them."""
        table, now = self._table, time.time_ns() // 1000
        is_over = self.max_size is not None and table.num_rows + count > self.max_size
        saved = table.save() if is_over and self.drop_strategy != "oldest" else None
        try:
            if self._disk is not None:
                self._disk.write_rows(self, table.last_put(count), count, now)
            ids = table.accept(count, now)
            if is_over:
                self._drop_over()
        except BaseException:
            if saved is not None:
                table.restore(saved)
            elif self.max_size is not None and table.num_rows > self.max_size:
                self._drop_over()
            raise
        if self._disk is not None:
            self._disk.after_change(self)
        return ids

    def _add(self, columns: Columns, schema: Schema, kind: str, retain: Any, by: Any, origin: str | None) -> range:
        table, count = self._table, num_rows_of(columns)
        kept = kept_count(table.num_rows, retain)
        if by != "random":
            check_by(by, schema.numeric, schema.not_numeric, parameter="retain_prior_by")
        if self.max_size is not None and self.drop_strategy != "oldest" and len(schema):
            check_by(self.drop_strategy, schema.numeric, schema.not_numeric, parameter="drop_strategy")
        if origin is not None and not (isinstance(origin, str) and _is_text(origin)):
            raise SpecError(f"origin= is a name, got {origin!r}", parameter="origin", remedy="origin='hard negatives'")
        if not count and kept == table.num_rows:
            return range(table.next_id, table.next_id)

        def record(number: int, time_us: int) -> codec.Append:
            data = codec.encode_columns(schema, columns)
            known = None if schema == table.schema and table.next_id else codec.encode_schema(schema)
            share = float(retain) if retain > 0 else 0.0
            return codec.Append(number, time_us, data, count, share, by, origin, kind, known)

        return self._do(record, lambda now: self._apply_add(columns, schema, kind, kept, by, origin, now))

    def _do(
        self, record: Callable[[int, int], codec.Operation], apply: Callable[[int], T], *, in_place: bool = False
    ) -> T:
        """One change: write it down, then make it. If either fails, the buffer is as it was.

        `in_place`: rows get new values where they lie. An interrupt (Ctrl-C) comes after it then, not in its middle.
        """
        table, kind, now = self._table, self.kind, time.time_ns() // 1000
        if self._disk is not None:
            self._disk.write(record(table.number + 1, now), self)
        saved = table.save()
        try:
            result = apply(now)
        except BaseException:
            table.restore(saved)
            self.kind = kind
            if in_place:  # some rows have their new values already, and the old ones are gone
                apply(now)
            raise
        if self._disk is not None:
            self._disk.after_change(self)
        return result

    def _apply_add(
        self, columns: Columns, schema: Schema, kind: str, kept: int, by: str, origin: str | None, time_us: int
    ) -> range:
        table = self._table
        table.number += 1
        if kept < table.num_rows:
            values, valid = self._values_of(by)
            table.keep(keep(table.num_rows, kept, by, values, valid, seed=self.seed, number=table.number))
        ids = table.add(table.schema if schema == table.schema else schema, columns, time_us, origin)
        if num_rows_of(columns):
            self.kind = kind
        if self.max_size is not None and table.num_rows > self.max_size:
            self._drop_over()
        return ids

    def _replay_add(self, columns: Columns, schema: Schema, change: codec.Append) -> None:
        kept = kept_count(self._table.num_rows, change.retain)
        self._apply_add(columns, schema, change.kind, kept, change.by, change.origin, change.time_us)

    def _drop_over(self) -> None:
        """Drop what is above `max_size`."""
        table = self._table
        assert self.max_size is not None
        over = table.num_rows - self.max_size
        if self.drop_strategy == "oldest":
            table.drop_first(over)
            return
        values, valid = self._values_of(self.drop_strategy)
        table.drop(drop(table.num_rows, over, self.drop_strategy, values, valid, seed=self.seed, number=table.number))

    def _values_of(self, by: str) -> tuple[NDArray[Any] | None, NDArray[np.bool_] | None]:
        """(values, valid) of the column that rows are chosen by, if it is one."""
        column = column_of(by)
        if column is None:
            return None, None
        view = self._table.view()
        found = view.column(column[0]) if column[0] in view.schema.by_name else None
        if not isinstance(found, Numbers):  # its first numbers come with the rows that are about to be added
            return np.zeros(len(view)), np.zeros(len(view), bool)
        return found.values, found.valid

    # Changes

    def update(self, index: int, row: Any) -> None:
        """New values for the columns that `row` names, in one row. Its id stays."""
        found = normalize(row)
        if len(found.rows) != 1:
            raise SpecError(
                f"update takes one row, got {len(found.rows)}", parameter="row", remedy="buffer.set(ids, ...)"
            )
        with self._lock:
            self._check_writer()
            view = self._table.view()
            at = view.checked(whole_number(index=index))
            known = self._known_schema(found.kind)
            assert known is not None
            values = found.rows[0]
            some = Schema(tuple(field for field in known if field.name in values))
            columns, changed = rows_to_columns([values], some if len(some) else known)
            self._change(view.ids_at(at), {n: columns[n] for n in values}, _merged(known, changed.fields))

    def set(self, ids: Any, /, **columns: Any) -> None:
        """New values for many rows at once: `buffer.set(ids, loss=array)`, or one value for all of them.

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
            known = self._table.schema
            prepared: Columns = {}
            fields: list[Field] = []
            for name, values in columns.items():
                prepared[name], field = column_for_set(name, values, len(ids), known.by_name.get(name))
                fields.append(field)
            if len(ids):
                self._change(ids, prepared, _merged(known, fields))

    def _change(self, ids: NDArray[np.int64], columns: Columns, schema: Schema) -> None:
        def record(number: int, time_us: int) -> codec.Change:
            data = codec.encode_columns(Schema(tuple(f for f in schema if f.name in columns)), columns)
            known = None if schema == self._table.schema else codec.encode_schema(schema)
            return codec.Change(number, time_us, codec.encode_ids(ids), data, known)

        self._do(record, lambda now: self._apply_change(ids, columns, schema), in_place=True)

    def _apply_change(self, ids: NDArray[np.int64], columns: Columns, schema: Schema) -> None:
        index = self._table.view().index_of(ids)
        self._table.number += 1
        self._table.change(index, schema, columns)

    def drop(self, ids: Any) -> None:
        """Remove the rows with these ids."""
        with self._lock:
            self._check_writer()
            view = self._table.view()
            index = view.index_of(ids)
            gone = view.ids_at(index)
            refuse_twice(gone, "ids")
            if not len(gone):
                return
            self._do(
                lambda number, now: codec.Drop(number, now, codec.encode_ids(gone)), lambda now: self._apply_drop(index)
            )

    def _apply_drop(self, index: NDArray[np.int64]) -> None:
        self._table.number += 1
        self._table.drop(np.sort(index))

    # Versions

    def commit(self, name: str | None = None) -> VersionInfo:
        """Keep the rows as they are now under a name, for `at`, `diff` and `rollback`.

        A run that repeats itself after a crash may commit again: a version of this name that has the same rows is it,
        and the rows have its ids from then on.
        """
        with self._lock:
            number = self._table.number
            name = f"version {number}" if name is None else name
            same = [kept for kept in self._versions if kept.info.name == name and kept.info.rows == len(self)]
            if same and same[0].view.content_fingerprint() == self.content_fingerprint():
                if not np.array_equal(same[0].view.ids, self._table.view().ids):
                    self.rollback(same[0].info)  # what was added again got new ids: the version's are known to others
                return same[0].info
            name = _checked_name(name, self.versions())
            info = VersionInfo(number, name, datetime.now(UTC), self._table.num_rows)
            view = self._table.view().share()
            ordinal = self._versions[-1].ordinal + 1 if self._versions else 0
            if self._disk is not None:
                self._disk.commit(self, ordinal, info)
            self._add_version(ordinal, info, self.kind, lambda: view)
            return info

    def forget(self, version: str | int | VersionInfo) -> None:
        """Let go of a version: rows that only it had are gone."""
        with self._lock:
            kept = self._kept(version)
            if self._disk is not None:
                self._check_writer()
                self._disk.checkpoint(self)  # a rollback to it may stand in the journal
                self._disk.forget(kept.ordinal)
            self._versions.remove(kept)

    def _add_version(self, ordinal: int, info: VersionInfo, kind: str | None, load: Callable[[], View]) -> None:
        self._versions.append(_Kept(ordinal, info, kind, load))

    def _version_of_ordinal(self, ordinal: int) -> _Kept | None:
        return next((kept for kept in self._versions if kept.ordinal == ordinal), None)

    def versions(self) -> list[VersionInfo]:
        """What was committed, oldest first."""
        return [kept.info for kept in self._versions]

    def at(self, version: str | int | VersionInfo) -> BufferVersion:
        """The rows of a version (by its name, its number, or what `commit` gave), to read."""
        kept = self._kept(version)
        return BufferVersion(kept.view, self.seed, kept.kind)

    def snapshot(self) -> BufferVersion:
        """The rows as they are now, to read: they stay so whatever is done to the buffer."""
        with self._lock:
            return BufferVersion(self._table.view(), self.seed, self.kind)

    def diff(self, older: str | int | VersionInfo, newer: str | int | VersionInfo | None = None) -> BufferDiff:
        """What is not the same in two versions; `newer` is the buffer as it is now, if not given."""
        with self._lock:
            return take_diff(self._kept(older).view, self._table.view() if newer is None else self._kept(newer).view)

    def rollback(self, version: str | int | VersionInfo) -> None:
        """Let the rows be those of a version again, with its ids and columns.

        This is a change like others: versions that were committed after it stay.
        """
        with self._lock:
            kept = self._kept(version)
            self._do(
                lambda number, now: codec.Rollback(number, now, kept.ordinal), lambda now: self._apply_rollback(kept)
            )

    def _apply_rollback(self, kept: _Kept) -> None:
        self._table.number += 1
        self._table.replace(kept.view.share().segments, kept.view.schema)
        self.kind = kept.kind

    def _kept(self, version: str | int | VersionInfo) -> _Kept:
        return self._versions[find_version(version, self.versions())]

    # Reading

    def _look(self) -> View:
        with self._lock:
            return self._table.view()

    def _hold(self) -> View:
        with self._lock:
            return self._table.view().share()

    def __len__(self) -> int:
        return self._table.num_rows

    # In and out

    @classmethod
    def from_table(cls, table: Any, **settings: Any) -> Self:
        """A buffer with the rows of a table: lists of a fixed length, of numbers, are arrays in it."""
        buffer = cls(**settings)
        buffer.extend(table)
        return buffer

    @classmethod
    def from_hf_dataset(cls, dataset: Any, **settings: Any) -> Self:
        """A buffer with the rows of a `datasets.Dataset`. `settings` are those of `DatasetBuffer`."""
        buffer = cls(**settings)
        buffer.append(dataset)
        return buffer

    @classmethod
    def _of_rows(cls, view: View, index: NDArray[np.int64], like: Reads) -> DatasetBuffer:
        """A buffer in memory with some rows of a view."""
        made = DatasetBuffer(seed=like.seed)
        made.kind = like.kind
        table = made._table
        table.origins = list(view.origins)
        table.next_serial = 1 + max((s.block.serial for s in view.segments), default=-1)
        table.next_id = 1 + int(view.ids.max(initial=-1))
        if len(index) < 2 or (np.diff(index) > 0).all():
            table.replace(view.segments, view.schema)
            table.keep(index)
        else:
            table.schema = view.schema
            block = table.gathered(view, index)
            table.replace([Segment(block, block.columns, 0, block.num_rows)], view.schema)
        table.number = 1
        return made

    # Files

    def _open(self, path: str | os.PathLike[str], read_only: bool) -> None:
        self._disk = Durable.open(path, self, read_only=read_only)
        stored = self._table.schema
        if self._declared is None or not self._table.next_id:
            self._table.schema = self._declared or stored
        elif stored.arrow != self._declared.arrow:
            self.close()
            raise SpecError(
                f"{path} has other columns than schema= says",
                parameter="schema",
                has=", ".join(f"{field.name} {field}" for field in stored),
                got=", ".join(f"{field.name} {field}" for field in self._declared),
                remedy="leave schema= out: the folder has its own",
            )

    @property
    def path(self) -> Path | None:
        """The folder that the buffer lives in, if it does."""
        return None if self._disk is None else self._disk.folder.path

    def _begin_again(self) -> None:
        """An empty buffer: what a folder is read into."""
        self._table, self._versions, self.kind, self._settings = Table(), [], None, Settings()

    def _apply_settings(self, settings: Settings) -> None:
        self._settings = settings
        self._table.number += 1
        self._table._view = None
        if self.max_size is not None and self._table.num_rows > self.max_size:
            self._drop_over()

    @classmethod
    def salvage(cls, path: str | os.PathLike[str], to: str | os.PathLike[str]) -> Self:
        """The rows of a folder with a damaged journal, after every change before the damage, in a new folder.

        Versions are not taken along.
        """
        found = cls()
        Durable.open(path, found, read_only=True, salvage=True).close()
        if (Path(to) / POINTER).exists():
            raise SpecError(f"{to} has a buffer already", parameter="to", remedy="a new folder")
        saved = cls(**found._settings._asdict(), path=to)
        saved._take_over(found)
        return saved

    def _take_over(self, other: DatasetBuffer) -> None:
        table, disk = self._table, self._disk
        assert disk is not None
        view = other._hold()
        table.replace(view.segments, view.schema)
        table.origins, self.kind = list(other._table.origins), other.kind
        table.next_id, table.next_serial = other._table.next_id, other._table.next_serial
        disk.checkpoint(self)

    def refresh(self) -> Self:
        """Let a reader see what was written since."""
        if self._disk is not None:
            with self._lock:
                self._disk.refresh(self)
        return self

    def sync(self) -> None:
        """Return when everything is on disk, so that a power cut cannot take it."""
        if self._disk is not None:
            self._disk.sync()

    def close(self) -> None:
        """Let go of the folder. What is in memory can still be read."""
        if self._disk is not None:
            self._disk.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        view = self._hold()
        return _rebuild, (view, self.kind, self._settings._asdict(), self._table.next_id)


def _rebuild(view: View, kind: str | None, settings: dict[str, Any], next_id: int) -> DatasetBuffer:
    buffer = DatasetBuffer(**settings)
    buffer.kind = kind
    table = buffer._table
    table.replace(view.segments, view.schema)
    table.origins, table.number = list(view.origins), view.number
    table.next_serial, table.next_id = len(view.segments), next_id
    return buffer


@dataclass(frozen=True, eq=False)
class _Kept:
    """A version, which is read from disk when it is first asked for."""

    ordinal: int
    info: VersionInfo
    kind: str | None
    load: Callable[[], View]

    @cached_property
    def view(self) -> View:
        return self.load().share()

    @property
    def is_loaded(self) -> bool:
        return "view" in vars(self)


_KINDS = {"dict": "rows (dicts)", "tensor": "tensors", "image": "images"}


def _declared(schema: Any) -> Schema:
    if not isinstance(schema, pa.Schema):
        raise SpecError(
            f"schema= is a pyarrow schema, got {type(schema).__name__}",
            parameter="schema",
            remedy="schema=pa.schema([pa.field('label', pa.int64(), nullable=False)])",
        )
    return schema_of_arrow(schema)


def _merged(schema: Schema, fields: Sequence[Field]) -> Schema:
    """A schema in which some fields are others, or new."""
    changed = {field.name: field for field in fields}
    new = [field for field in fields if field.name not in schema.by_name]
    merged = Schema((*(changed.get(field.name, field) for field in schema), *new))
    return schema if merged == schema else merged


def _checked_text(strategy: Any) -> str:
    if not isinstance(strategy, str):
        check_by(strategy, [], [], parameter="drop_strategy")
    return str(strategy)


def _checked_name(name: Any, known: Sequence[VersionInfo]) -> str:
    if not isinstance(name, str) or not name or not name.isprintable():
        raise SpecError(f"a version cannot be named {name!r}", parameter="name", remedy="commit('after epoch 3')")
    if name in [info.name for info in known]:
        raise SpecError(
            f"there is a version {name!r} already",
            parameter="name",
            remedy=f"another name: {name + ' (again)'!r}; or buffer.forget({name!r}) before",
        )
    return name


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:  # half a surrogate pair
        return False
    return True


def _is_column(value: Any) -> bool:
    return hasattr(value, "shape") and len(value.shape) >= 1
