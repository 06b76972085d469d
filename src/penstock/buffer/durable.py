"""A buffer in a folder: each change is written down before it is made; opening is a checkpoint plus what came after.

Rows are written twice: in the journal when they come, and in a block file once a checkpoint or a commit needs them.
Block files never change, so checkpoints and versions share them; a column that was changed gets a file of its own.
"""

from __future__ import annotations

import base64
import logging
import os
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.buffer import codec
from penstock.buffer.blocks import ArrowColumn, Block, Column, Counters, NumberColumn, Segment
from penstock.buffer.folder import BufferFolder
from penstock.buffer.journal import Record, read_records, salvage_records
from penstock.buffer.retain import Settings, check_by
from penstock.buffer.schema import Columns, Schema, Values
from penstock.buffer.versions import VersionInfo
from penstock.buffer.view import View
from penstock.errors import SpecError, StoreError

if TYPE_CHECKING:
    from penstock.buffer.buffer import DatasetBuffer

__all__ = ["Durable"]

_CHECKPOINT_BYTES = 32 << 20
"""Journal after which a checkpoint is written, at least."""

_CHECKPOINT_RECORDS = 20_000
"""Records after which one is written, at least: a record takes some 30 microseconds to read and make again."""

_LOADED = ("_table", "_versions", "kind", "_settings")
"""What a buffer has from its folder."""

Document = dict[str, Any]

log = logging.getLogger("penstock")


@dataclass(slots=True)
class _Part:
    """A file that has some columns of rows [first, last) of a block."""

    file: str
    columns: dict[str, list[tuple[Column, int]]]
    """What was written of each: the column (one for each length that it was read at) and its edition."""
    first: int
    last: int
    has_ledger: bool


class Durable:
    """The folder behind a buffer: writes changes down, makes checkpoints, opens again."""

    def __init__(self, folder: BufferFolder, *, read_only: bool) -> None:
        self.folder, self.read_only = folder, read_only
        self._is_open = True
        self._process = os.getpid()
        self._parts: dict[int, list[_Part]] = {}
        """What is on disk of each block, by its serial number."""
        self._kept_files: dict[int, tuple[NDArray[np.int64], str]] = {}
        """Files with lists of live rows, by the identity of the list."""
        self._columns: dict[tuple[str, ...], Column] = {}
        """Columns that were read, by the files they were read from: versions share them."""
        self._checkpoint_number = self._try_again_at = 0
        self._seen: tuple[str, int | None] = ("", None)
        """(journal, offset) up to which a reader has read."""

    # Opening

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], buffer: DatasetBuffer, *, read_only: bool, salvage: bool = False
    ) -> Durable:
        """Open a folder, let `buffer` have what is in it, and be what it writes to from now on."""
        path = Path(path).absolute()  # whoever changes the current folder later means this one still
        folder = BufferFolder.open_to_read(path) if read_only else BufferFolder.create_or_open(path)
        disk = cls(folder, read_only=read_only)
        try:
            disk._load(buffer, salvage)
        except BaseException:
            folder.close()
            raise
        return disk

    def _load(self, buffer: DatasetBuffer, salvage: bool = False) -> None:
        asked = buffer._settings

        def load(checkpoint: Document | None, journal: Path) -> Record | None:
            buffer._begin_again()
            self._parts.clear()
            self._kept_files.clear()
            self._columns.clear()
            self._restore_versions(buffer)
            if checkpoint is not None:
                self._restore(buffer, checkpoint)
            self._checkpoint_number = buffer._table.number
            last = None
            for record in salvage_records(journal) if salvage else read_records(journal):
                self._replay(buffer, codec.decode(record.payload))
                last = record
            self._seen = journal.name, None if last is None else last.end_offset
            return last

        last = self.folder.read(load)
        if not self.read_only:
            self.folder.open_journal(after=last)
            self._take_settings(buffer, asked)

    def _take_settings(self, buffer: DatasetBuffer, asked: Settings) -> None:
        """Settings that were asked for replace those that are stored, where they are not the defaults."""
        stored, defaults = buffer._settings, Settings()._asdict()
        wanted = stored._replace(**{name: new for name, new in asked._asdict().items() if new != defaults[name]})
        if wanted != stored:
            schema = buffer._table.schema
            if wanted.max_size is not None and len(schema):
                check_by(wanted.drop_strategy, schema.numeric, schema.not_numeric, parameter="drop_strategy")
            if not buffer._table.number:  # a new folder: these are what it begins with, and no change
                buffer._settings = wanted
                self.checkpoint(buffer)
                return
            settings = codec.Settings(buffer.number + 1, _now_us(), *wanted)
            self.write(settings, buffer)
            self._replay(buffer, settings)

    def _replay(self, buffer: DatasetBuffer, change: codec.Operation) -> None:
        """Make a change that was written down."""
        table = buffer._table
        if change.number != table.number + 1:
            raise StoreError(
                f"change {change.number} cannot follow change {table.number}",
                folder=self.folder.path,
                remedy="restore the folder from a copy",
            )
        if isinstance(change, codec.Append):
            schema = table.schema if change.schema is None else codec.decode_schema(change.schema)
            columns = codec.decode_columns(schema, change.columns, change.num_rows)
            buffer._replay_add(columns, schema, change)
        elif isinstance(change, codec.Change):
            schema = table.schema if change.schema is None else codec.decode_schema(change.schema)
            ids = codec.decode_ids(change.ids)
            buffer._apply_change(ids, codec.decode_columns(schema, change.columns, len(ids)), schema)
        elif isinstance(change, codec.Drop):
            buffer._apply_drop(table.view().index_of(codec.decode_ids(change.ids)))
        elif isinstance(change, codec.Rollback):
            kept = buffer._version_of_ordinal(change.version)
            if kept is None:  # committed since they were listed
                self._restore_versions(buffer)
                kept = buffer._version_of_ordinal(change.version)
            if kept is None:
                raise self.folder.missing_version(change.version)
            buffer._apply_rollback(kept)
        else:
            buffer._apply_settings(Settings(change.max_size, change.drop_strategy, change.seed))

    # Writing down

    @property
    def is_writer(self) -> bool:
        return not self.read_only and self._is_open and self._process == os.getpid()

    def write(self, change: codec.Operation, buffer: DatasetBuffer) -> None:
        """Write a change down. If this raises, nothing happened."""
        self.check_writer()
        self._catch_up(buffer)
        self.folder.journal.write(change.number, codec.encode(change))

    def write_rows(self, buffer: DatasetBuffer, columns: Columns, count: int, time_us: int) -> None:
        """More rows, which fit."""
        self._catch_up(buffer)
        table = buffer._table
        data = codec.encode_columns(table.schema, columns)
        change = codec.Append(table.number + 1, time_us, data, count, 1.0, "random", None, "dict", None)
        self.folder.journal.write(change.number, codec.encode(change))

    def _catch_up(self, buffer: DatasetBuffer) -> None:
        """A change that was written down and then interrupted has happened: the folder says so."""
        written = self.folder.journal.last_number
        if written != buffer._table.number:
            self._load(buffer)
            raise StoreError(
                f"change {written} was interrupted after it had been written down, and is there",
                folder=self.folder.path,
                remedy="look at the buffer, and make this call again",
            )

    def check_writer(self) -> None:
        if self.read_only:
            raise SpecError(
                "this buffer was opened to read",
                parameter="read_only",
                folder=self.folder.path,
                remedy="DatasetBuffer(path=...) without read_only=True, in the one process that writes",
            )
        if not self._is_open:
            raise SpecError(
                "this buffer was closed", folder=self.folder.path, remedy="DatasetBuffer(path=...) opens it again"
            )

    def after_change(self, buffer: DatasetBuffer) -> None:
        """A checkpoint, where the journal has become long: opening again reads at most so much."""
        journal, size = self.folder.journal, max(len(buffer), 1)
        is_long = journal.num_bytes > max(_CHECKPOINT_BYTES, 16 * size)
        has_many = journal.last_number - self._checkpoint_number > max(_CHECKPOINT_RECORDS, size // 16)
        if (is_long or has_many) and journal.last_number >= self._try_again_at:
            try:
                self.checkpoint(buffer)
            except OSError as error:  # the change itself is safe: this only makes opening quicker
                self._try_again_at = journal.last_number + _CHECKPOINT_RECORDS
                log.warning("%s: no checkpoint could be written (%s); the journal goes on", self.folder.path, error)

    def checkpoint(self, buffer: DatasetBuffer) -> None:
        self.folder.write_checkpoint(buffer._table.number, self._document(buffer))
        self._checkpoint_number = buffer._table.number
        self._forget_blocks(buffer)
        unused = self.folder.unused()
        self._forget_files(unused)  # before they go: nothing that is written from now on may name them
        self.folder.remove_blocks(unused)

    def commit(self, buffer: DatasetBuffer, ordinal: int, info: VersionInfo) -> None:
        self.check_writer()
        self.folder.journal.sync()
        document = self._document(buffer)
        document["version"] = {
            "ordinal": ordinal,
            "name": info.name,
            "time_us": int(info.time.timestamp() * 1_000_000),
            "rows": info.rows,
        }
        self.folder.write_version(ordinal, document)

    def forget(self, ordinal: int) -> None:
        self.check_writer()
        self.folder.remove_version(ordinal)
        known = {part.file for parts in self._parts.values() for part in parts}
        self.folder.remove_blocks(self.folder.unused() - known - {file for _, file in self._kept_files.values()})

    def sync(self) -> None:
        if not self.read_only:
            self.check_writer()
            self.folder.journal.sync()

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self.folder.close()

    def refresh(self, buffer: DatasetBuffer) -> None:
        """Read what was written since."""
        if not self.read_only:
            return
        journal, offset = self._seen
        if self.folder.pointer.journal == journal:
            try:
                self._restore_versions(buffer)
                for record in read_records(self.folder.path / journal, offset):
                    self._replay(buffer, codec.decode(record.payload))
                    self._seen = journal, record.end_offset
            except (FileNotFoundError, StoreError):
                if self.folder.pointer.journal == journal:
                    raise
            else:
                if self.folder.pointer.journal == journal:
                    return
        before = {name: getattr(buffer, name) for name in _LOADED}
        try:
            self._load(buffer)
        except BaseException:  # a reader stays at a whole version
            for name, value in before.items():
                setattr(buffer, name, value)
            raise

    # Rows on disk

    def _document(self, buffer: DatasetBuffer) -> Document:
        """All that a checkpoint or version says. What it names is on disk."""
        table = buffer._table
        return {
            "number": table.number,
            "next_id": table.next_id,
            "next_serial": table.next_serial,
            "kind": buffer.kind,
            "schema": base64.b64encode(codec.encode_schema(table.schema)).decode(),
            "settings": list(buffer._settings),
            "origins": table.origins,
            "segments": [self._written(segment, table.schema, buffer) for segment in table.segments()],
        }

    def _written(self, segment: Segment, schema: Schema, buffer: DatasetBuffer) -> Document:
        """Have a segment's rows on disk, and say where."""
        block = segment.block
        parts = self._parts.setdefault(block.serial, [])
        stop = segment.stop  # rows behind it are nobody's, and an older column may not have them
        missing: dict[int, list[str]] = {}
        for name, column in segment.columns.items():
            missing.setdefault(_num_rows(self._files_with(parts, name, column)), []).append(name)
        has_ledger = _num_rows(_one_after_another([part for part in parts if part.has_ledger]))
        missing.setdefault(has_ledger, [])
        for first, names in sorted(missing.items()):
            if first < stop or (not stop and not parts):
                parts.append(self._write_part(segment, schema, names, first, stop, first == has_ledger, buffer))
        columns: dict[str, list[str]] = {part.file: [] for part in parts}
        for name, column in segment.columns.items():
            for part in self._files_with(parts, name, column):
                columns[part.file].append(name)
        ledger = {part.file for part in _one_after_another([part for part in parts if part.has_ledger])}
        return {
            "serial": block.serial,
            "first_id": block.first_id,
            "num_rows": stop,
            "start": segment.start,
            "stop": segment.stop,
            "keep": None if segment.keep is None else self._written_keep(block.serial, segment.keep, schema),
            "parts": [
                {
                    "file": part.file,
                    "columns": columns[part.file],
                    "first": part.first,
                    "last": part.last,
                    "ledger": part.file in ledger,
                }
                for part in sorted(parts, key=lambda part: part.first)
                if part.file in ledger or columns[part.file]
            ],
        }

    @staticmethod
    def _is_current(part: _Part, name: str, column: Column | None) -> bool:
        return any(column is known and column.edition == edition for known, edition in part.columns.get(name, ()))

    def _files_with(self, parts: list[_Part], name: str, column: Column) -> list[_Part]:
        """The files that together have a column as it is now, from its first row on."""
        return _one_after_another([part for part in parts if self._is_current(part, name, column)])

    def _write_part(
        self,
        segment: Segment,
        schema: Schema,
        names: list[str],
        first: int,
        last: int,
        has_ledger: bool,
        buffer: DatasetBuffer,
    ) -> _Part:
        block, counters = segment.block, buffer._table.counters
        columns: Columns = {}
        for name in names:
            column = segment.columns[name]
            columns[name] = (
                column.read(first, last) if isinstance(column, NumberColumn) else column.read(first, last, counters)
            )
        extra = {}
        if has_ledger:
            ledger = block.origins()
            extra["ledger"] = ledger[(ledger[:, 0] >= first) & (ledger[:, 0] < last)].ravel()
            if block.ids is not None:
                extra["ids"] = block.ids[first:last]
        file = self.folder.write_block(block.serial, columns, schema, extra)
        written = {name: [(segment.columns[name], segment.columns[name].edition)] for name in names}
        return _Part(file, written, first, last, has_ledger)

    def _written_keep(self, serial: int, keep: NDArray[np.int64], schema: Schema) -> str:
        known = self._kept_files.get(id(keep))
        if known is None:
            known = keep, self.folder.write_block(serial, {}, schema, {"keep": keep})
            self._kept_files[id(keep)] = known
        return known[1]

    def _forget_files(self, names: set[str]) -> None:
        self._parts = {
            serial: [part for part in parts if part.file not in names] for serial, parts in self._parts.items()
        }
        self._kept_files = {key: known for key, known in self._kept_files.items() if known[1] not in names}

    def _forget_blocks(self, buffer: DatasetBuffer) -> None:
        """Of rows that neither the buffer nor a version has, nothing needs to be known."""
        views = [buffer._table.view(), *(kept.view for kept in buffer._versions if kept.is_loaded)]
        segments = [segment for view in views for segment in view.segments]
        serials, lists = {segment.block.serial for segment in segments}, {id(segment.keep) for segment in segments}
        columns = {id(column) for segment in segments for column in segment.columns.values()}
        self._parts = {serial: parts for serial, parts in self._parts.items() if serial in serials}
        for part in (part for parts in self._parts.values() for part in parts):
            part.columns = {
                name: [pair for pair in pairs if id(pair[0]) in columns] for name, pairs in part.columns.items()
            }
        self._columns = {key: column for key, column in self._columns.items() if id(column) in columns}
        self._kept_files = {key: value for key, value in self._kept_files.items() if key in lists}

    # Rows from disk

    def _restore(self, buffer: DatasetBuffer, document: Document) -> None:
        table = buffer._table
        view = self.view_of(document)
        table.replace(view.segments, view.schema)
        table.number, table.next_id, table.next_serial = (
            document["number"],
            document["next_id"],
            document["next_serial"],
        )
        table.origins = list(document["origins"])
        buffer.kind = document["kind"]
        buffer._settings = Settings(*document["settings"])

    def _restore_versions(self, buffer: DatasetBuffer) -> None:
        known = {(kept.ordinal, kept.info): kept for kept in buffer._versions}
        buffer._versions = []  # without those that the writer has let go of
        for document in self.folder.read_versions():
            said = document["version"]
            time = datetime.fromtimestamp(said["time_us"] / 1_000_000, UTC)
            ordinal, info = said["ordinal"], VersionInfo(document["number"], said["name"], time, said["rows"])
            if (ordinal, info) in known:
                buffer._versions.append(known[ordinal, info])
            else:
                buffer._add_version(ordinal, info, document["kind"], partial(self.view_of, document))

    def view_of(self, document: Document) -> View:
        """The rows that a checkpoint or version names, over the memory of their files."""
        schema = codec.decode_schema(base64.b64decode(document["schema"]))
        segments = [self._segment(entry, schema) for entry in document["segments"]]
        return View(segments, schema, document["number"], document["origins"], Counters())

    def _segment(self, entry: Document, schema: Schema) -> Segment:
        block = Block(entry["serial"], entry["num_rows"], entry["first_id"])
        block.num_rows = entry["num_rows"]
        pieces: dict[str, list[Values]] = {}
        files: dict[str, list[str]] = {}
        ids: list[NDArray[np.int64]] = []
        for part in sorted(entry["parts"], key=lambda part: int(part["first"])):
            asked = ["ledger"] if part["ledger"] else []
            columns, extra = self.folder.map_block(part["file"], schema, part["columns"], asked)
            for name in part["columns"]:
                pieces.setdefault(name, []).append(columns[name])
                files.setdefault(name, []).append(part["file"])
            if part["ledger"]:
                block.ledger.extend(extra["ledger"].tolist())
                if "ids" in extra:
                    ids.append(extra["ids"])
        if ids:
            block.ids = ids[0] if len(ids) == 1 else np.concatenate(ids)
        for name, found in pieces.items():
            key = (name, *files[name])
            if key not in self._columns:
                self._columns[key] = _column(schema, name, found)
            block.columns[name] = column = self._columns[key]
            if entry["stop"] > (len(column.values) if isinstance(column, NumberColumn) else column.num_rows):
                raise self.folder.damaged_block(files[name][-1], f"too few rows in {name!r}")
        self._remember(block, entry["parts"])
        keep = None
        if entry["keep"] is not None:
            keep = self.folder.map_block(entry["keep"], schema, (), ["keep"])[1]["keep"]
            ends = [int(keep[0]), int(keep[-1]) + 1] if len(keep) else []
            if ends != [entry["start"], entry["stop"]] or (keep[1:] <= keep[:-1]).any():  # rows are read where it says
                raise self.folder.damaged_block(entry["keep"], "rows out of their order")
            self._kept_files[id(keep)] = keep, entry["keep"]
        return Segment(block, block.columns, entry["start"], entry["stop"], keep)

    def _remember(self, block: Block, entries: list[Document]) -> None:
        """Which files have a block's columns, so that they are not written again."""
        parts = self._parts.setdefault(block.serial, [])
        known = {part.file: part for part in parts}
        for entry in entries:
            part = known.get(entry["file"])
            if part is None:
                part = _Part(entry["file"], {}, entry["first"], entry["last"], entry["ledger"])
                parts.append(part)
            for name in entry["columns"]:
                column = block.columns[name]
                if not self._is_current(part, name, column):
                    part.columns.setdefault(name, []).append((column, column.edition))


def _one_after_another(parts: list[_Part]) -> list[_Part]:
    """Those of the parts that begin with row 0 and where another one ends. They were met in any order."""
    found: list[_Part] = []
    for part in sorted(parts, key=lambda part: (part.first, -part.last)):
        if part.first == _num_rows(found):
            found.append(part)
    return found


def _num_rows(parts: list[_Part]) -> int:
    """Rows that parts which follow each other have."""
    return parts[-1].last if parts else 0


def _column(schema: Schema, name: str, pieces: list[Values]) -> Column:
    field = schema.by_name[name]
    if field.numbers is None:
        whole = pieces[0] if len(pieces) == 1 else pa.concat_arrays(pieces)
        return ArrowColumn(field.type, whole)
    if len(pieces) == 1:
        return NumberColumn(pieces[0].values, pieces[0].valid, shared=True)
    numbers: list[Any] = pieces
    valid = None
    if any(piece.valid is not None for piece in numbers):
        valid = np.concatenate([np.ones(len(p.values), bool) if p.valid is None else p.valid for p in numbers])
    # Shared as well: versions have the column from `_columns`, so that changes to it are made in a copy.
    return NumberColumn(np.concatenate([piece.values for piece in numbers]), valid, shared=True)


def _now_us() -> int:
    return time.time_ns() // 1000
