"""Durability of a buffer. Each change is written before it is made; opening reads a checkpoint and the later changes.

Rows are written twice: in the journal when they arrive, and in a block file once a checkpoint or a commit needs them.
Block files never change, so checkpoints and versions share them. A changed column gets a new file.
"""

from __future__ import annotations

import base64
import logging
import os
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from batchwright.base.checks import local_path
from batchwright.base.errors import StoreError
from batchwright.base.journal import Record, read_records
from batchwright.buffer import codec
from batchwright.buffer.contents import CommittedVersion, Contents, VersionInfo
from batchwright.buffer.folder import SALVAGE, BufferFolder
from batchwright.buffer.parts import Parts
from batchwright.buffer.retain import BufferSettings, check_by
from batchwright.buffer.schema import Columns, Schema
from batchwright.buffer.view import View

_CHECKPOINT_BYTES = 32 << 20
"""A checkpoint is written when the journal is at least this long,"""

_CHECKPOINT_RECORDS = 20_000
"""or has at least this many records. Reading and replaying one takes about 30 microseconds."""

Document = dict[str, Any]

log: logging.Logger = logging.getLogger("batchwright")


class Durable:
    """The folder behind a buffer: writes changes down, makes checkpoints, opens again."""

    def __init__(self, folder: BufferFolder) -> None:
        self.folder: BufferFolder = folder
        self._parts = Parts(folder)
        self._checkpoint_number = self._try_again_at = 0
        self._seen: tuple[str, int | None] = ("", None)
        """(journal, offset) up to which a reader has read."""

    # Opening

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], asked: BufferSettings, *, read_only: bool, salvage: bool = False
    ) -> tuple[Durable, Contents]:
        """Open a folder to write (or to read), and return it with its contents. The settings are those given."""
        path = local_path(path=path).absolute()  # the process may change its current folder
        folder = BufferFolder.open_to_read(path) if read_only else BufferFolder.create_or_open(path)
        disk = cls(folder)
        try:
            contents = disk._load(salvage=salvage)
            if not read_only:
                disk._take_settings(contents, asked)
        except BaseException:
            folder.close()
            raise
        return disk, contents

    def _load(self, *, salvage: bool = False) -> Contents:
        """All that the folder has: the checkpoint, and the changes since."""

        def load(checkpoint: Document | None, journal: Path) -> tuple[Contents, Record | None]:
            contents = Contents()
            self._parts = Parts(self.folder)
            self._find_versions(contents)
            if checkpoint is not None:
                self._restore(contents, checkpoint)
            self._checkpoint_number = contents.table.number
            last = None
            for record in read_records(journal, whole_file=not salvage, remedy=SALVAGE):
                self._replay(contents, codec.decode(record.payload))
                last = record
            self._seen = journal.name, None if last is None else last.end_offset
            return contents, last

        contents, last = self.folder.read(load)
        if not self.folder.is_read_only:
            self.folder.open_journal(after=last)
        return contents

    def _take_settings(self, contents: Contents, asked: BufferSettings) -> None:
        """Given settings replace the stored ones, unless they are the defaults."""
        stored, defaults = contents.settings, BufferSettings()._asdict()
        wanted = stored._replace(**{name: new for name, new in asked._asdict().items() if new != defaults[name]})
        if wanted == stored:
            return
        schema = contents.table.schema
        if wanted.max_size is not None and len(schema):
            check_by(wanted.drop_strategy, schema.numeric, schema.not_numeric, parameter="drop_strategy")
        if not contents.table.number:  # a new folder: these are its first settings, not a change
            contents.settings = wanted
            self.checkpoint(contents)
            return
        change = codec.SettingsChange(contents.table.number + 1, time.time_ns() // 1000, *wanted)
        self.write(contents, change, schema, {})
        contents.apply(change, schema, {})

    def _replay(self, contents: Contents, change: codec.Operation) -> None:
        """Make a change that was written down."""
        table = contents.table
        if change.number != table.number + 1:
            what = f"change {change.number} cannot follow change {table.number}"
            raise StoreError(what, folder=self.folder.path, remedy="restore the folder from a copy")
        schema, columns = table.schema, Columns()
        match change:
            case codec.Append() | codec.SetValues():
                if change.schema is not None:
                    schema = codec.decode_schema(change.schema)
                columns = codec.decode_columns(schema, change.columns, change.num_rows)
            case codec.Rollback() if contents.version_of(change.version) is None:
                self._find_versions(contents)  # it was committed since they were listed
                if contents.version_of(change.version) is None:
                    raise self.folder.missing_version(change.version)
        contents.apply(change, schema, columns)

    def refresh(self, contents: Contents) -> Contents:
        """Return the current contents of the folder: the same contents with later changes, or others."""
        if not self.folder.is_read_only:
            return contents
        journal, offset = self._seen
        if self.folder.pointer.journal == journal:
            try:
                self._find_versions(contents)
                for record in read_records(self.folder.path / journal, offset, remedy=SALVAGE):
                    self._replay(contents, codec.decode(record.payload))
                    self._seen = journal, record.end_offset
            except (FileNotFoundError, StoreError):
                if self.folder.pointer.journal == journal:
                    raise
            else:
                if self.folder.pointer.journal == journal:
                    return contents
        return self._load()

    # Writing down

    def write(self, contents: Contents, change: codec.Operation, schema: Schema, columns: Columns) -> None:
        """Write a change to the journal, with the columns that it brings. If this raises, no change was made."""
        self.folder.check_writer()
        if isinstance(change, codec.Append | codec.SetValues):
            table, new = contents.table, None
            if schema != table.schema or not table.next_id:
                new = codec.encode_schema(schema)
            change = replace(change, columns=codec.encode_columns(schema, columns), schema=new)
        self.folder.journal.write(change.number, codec.encode(change))

    def caught_up(self, contents: Contents) -> Contents | None:
        """Return new contents if a change was written and then interrupted. By the folder, it has happened."""
        if self.folder.is_writer and self.folder.journal.last_number != contents.table.number:
            return self._load()
        return None

    def after_change(self, contents: Contents) -> None:
        """Write a checkpoint if the journal has become long. This limits the reading at the next opening."""
        journal, size = self.folder.journal, max(contents.table.num_rows, 1)
        is_long = journal.num_bytes > max(_CHECKPOINT_BYTES, 16 * size)
        has_many = journal.last_number - self._checkpoint_number > max(_CHECKPOINT_RECORDS, size // 16)
        if (is_long or has_many) and journal.last_number >= self._try_again_at:
            try:
                self.checkpoint(contents)
            except OSError as error:  # the change itself is safe: this only makes opening quicker
                self._try_again_at = journal.last_number + _CHECKPOINT_RECORDS
                log.warning("%s: no checkpoint could be written (%s); the journal goes on", self.folder.path, error)

    def checkpoint(self, contents: Contents) -> None:
        """Have everything in files that are read at once, and begin the journal anew."""
        self.folder.check_writer()
        number = contents.table.number
        self.folder.write_checkpoint(number, self._document(contents))
        self._checkpoint_number = number
        loaded = (kept.view for kept in contents.versions if kept.is_loaded)
        self._parts.forget_lists([contents.table.view(), *loaded])
        self._remove_unused()

    def _remove_unused(self) -> None:
        unused = self.folder.unused()
        self._parts.forget_files(unused)  # before they are removed: later writes must not name them
        self.folder.remove_blocks(unused)

    def commit(self, contents: Contents, ordinal: int, info: VersionInfo) -> None:
        self.folder.check_writer()
        self.folder.journal.sync()
        document = self._document(contents)
        document["version"] = {
            "ordinal": ordinal,
            "name": info.name,
            "time_us": int(info.time.timestamp() * 1_000_000),
            "rows": info.rows,
        }
        self.folder.write_version(ordinal, document)

    def forget(self, contents: Contents, ordinal: int) -> None:
        self.checkpoint(contents)  # a rollback to it may stand in the journal
        self.folder.remove_version(ordinal)
        self._remove_unused()

    def sync(self) -> None:
        if not self.folder.is_read_only:
            self.folder.check_writer()
            self.folder.journal.sync()

    # Documents: the content of a checkpoint or a version

    def _document(self, contents: Contents) -> Document:
        """Contents as a document. The rows that it names are on disk."""
        table = contents.table
        return {
            "number": table.number,
            "next_id": table.next_id,
            "next_serial": table.next_serial,
            "kind": contents.kind,
            "schema": base64.b64encode(codec.encode_schema(table.schema)).decode(),
            "settings": list(contents.settings),
            "origins": table.origins,
            "segments": [self._parts.write(segment) for segment in table.segments()],
        }

    def _restore(self, contents: Contents, document: Document) -> None:
        table, view = contents.table, self._view_of(document)
        table.replace(view.segments, view.schema)
        table.number, table.next_id = document["number"], document["next_id"]
        table.next_serial, table.origins = document["next_serial"], list(document["origins"])
        contents.kind, contents.settings = document["kind"], BufferSettings(*document["settings"])

    def _find_versions(self, contents: Contents) -> None:
        """Find the versions that are listed now, without those that the writer has dropped."""
        known = {(kept.ordinal, kept.info): kept for kept in contents.versions}
        contents.versions = []
        for document in self.folder.read_versions():
            said = document["version"]
            committed = datetime.fromtimestamp(said["time_us"] / 1_000_000, UTC)
            ordinal, info = said["ordinal"], VersionInfo(document["number"], said["name"], committed, said["rows"])
            if (ordinal, info) in known:
                contents.versions.append(known[ordinal, info])
            else:
                load = partial(self._view_of, document)
                contents.versions.append(CommittedVersion(ordinal, info, document["kind"], load))

    def _view_of(self, document: Document) -> View:
        """The rows that a document names, over the memory of their files."""
        schema = codec.decode_schema(base64.b64decode(document["schema"]))
        segments = [self._parts.read(entry, schema) for entry in document["segments"]]
        return View(segments, schema, document["number"], document["origins"])
