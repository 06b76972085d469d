"""Which files have which rows of which blocks, so that nothing is written twice and versions share what they read.

A block is written as it grows: each part is a file with some columns of rows [first, last). A column that got new
values is written anew; the parts with the old ones stay for the versions that name them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchwright.buffer.blocks import ArrowColumn, Block, Column, NumberColumn, Segment
from batchwright.buffer.folder import BufferFolder
from batchwright.buffer.schema import Columns, Schema, Values
from batchwright.buffer.view import View

__all__ = ["Parts"]

Document = dict[str, Any]


@dataclass(slots=True)
class _Part:
    """A file that has some columns of rows [first, last) of a block."""

    file: str
    columns: dict[str, list[tuple[Column, int]]]
    """What was written of each: the column (one for each length that it was read at) and its edition."""
    first: int
    last: int
    has_ledger: bool

    def has(self, name: str, column: Column | None) -> bool:
        """Whether it has this column as it is now."""
        return any(column is known and column.edition == edition for known, edition in self.columns.get(name, ()))


class Parts:
    """The files of a folder's blocks."""

    def __init__(self, folder: BufferFolder) -> None:
        self.folder = folder
        self._parts: dict[int, list[_Part]] = {}
        """Of each block, by its serial number."""
        self._lists: dict[int, tuple[NDArray[np.int64], str]] = {}
        """Files with lists of live rows, by the identity of the list."""
        self._columns: dict[tuple[str, ...], Column] = {}
        """Columns that were read, by the files they were read from: versions share them."""

    # Writing

    def write(self, segment: Segment, schema: Schema) -> Document:
        """Have a segment's rows on disk, and say where."""
        block = segment.block
        parts = self._parts.setdefault(block.serial, [])
        stop = segment.stop  # rows behind it are nobody's, and an older column may not have them
        missing: dict[int, list[str]] = {}
        for name, column in segment.columns.items():
            missing.setdefault(_num_rows(_with_column(parts, name, column)), []).append(name)
        has_ledger = _num_rows(_with_ledger(parts))
        missing.setdefault(has_ledger, [])
        for first, names in sorted(missing.items()):
            if first < stop or (not stop and not parts):
                parts.append(self._write_part(segment, schema, names, first, first == has_ledger))
        columns: dict[str, list[str]] = {part.file: [] for part in parts}
        for name, column in segment.columns.items():
            for part in _with_column(parts, name, column):
                columns[part.file].append(name)
        ledger = {part.file for part in _with_ledger(parts)}
        return {
            "serial": block.serial,
            "first_id": block.first_id,
            "num_rows": stop,
            "start": segment.start,
            "stop": segment.stop,
            "keep": None if segment.keep is None else self._write_list(block.serial, segment.keep, schema),
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

    def _write_part(self, segment: Segment, schema: Schema, names: list[str], first: int, has_ledger: bool) -> _Part:
        block, last = segment.block, segment.stop
        columns: Columns = {name: segment.columns[name].read(first, last) for name in names}
        extra = {}
        if has_ledger:
            ledger = block.origins()
            extra["ledger"] = ledger[(ledger[:, 0] >= first) & (ledger[:, 0] < last)].ravel()
            if block.ids is not None:
                extra["ids"] = block.ids[first:last]
        file = self.folder.write_block(block.serial, columns, schema, extra)
        written = {name: [(segment.columns[name], segment.columns[name].edition)] for name in names}
        return _Part(file, written, first, last, has_ledger)

    def _write_list(self, serial: int, keep: NDArray[np.int64], schema: Schema) -> str:
        known = self._lists.get(id(keep))
        if known is None:
            known = keep, self.folder.write_block(serial, {}, schema, {"keep": keep})
            self._lists[id(keep)] = known
        return known[1]

    # Reading

    def read(self, entry: Document, schema: Schema) -> Segment:
        """The segment that `write` was given, over the memory of its files."""
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
            if entry["stop"] > column.num_rows:
                raise self.folder.damaged_block(files[name][-1], f"too few rows in {name!r}")
        self._remember(block, entry["parts"])
        keep = None if entry["keep"] is None else self._read_list(entry, schema)
        return Segment(block, block.columns, entry["start"], entry["stop"], keep)

    def _read_list(self, entry: Document, schema: Schema) -> NDArray[np.int64]:
        keep: NDArray[np.int64] = self.folder.map_block(entry["keep"], schema, (), ["keep"])[1]["keep"]
        ends = [int(keep[0]), int(keep[-1]) + 1] if len(keep) else []
        if ends != [entry["start"], entry["stop"]] or (keep[1:] <= keep[:-1]).any():  # rows are read where it says
            raise self.folder.damaged_block(entry["keep"], "rows out of their order")
        self._lists[id(keep)] = keep, entry["keep"]
        return keep

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
                if not part.has(name, column):
                    part.columns.setdefault(name, []).append((column, column.edition))

    # Forgetting

    def files(self) -> set[str]:
        """All that something here can still name."""
        parts = {part.file for parts in self._parts.values() for part in parts}
        return parts | {file for _, file in self._lists.values()}

    def forget_files(self, names: set[str]) -> None:
        """Name these no more: they are about to be removed."""
        self._parts = {
            serial: [part for part in parts if part.file not in names] for serial, parts in self._parts.items()
        }
        self._lists = {key: known for key, known in self._lists.items() if known[1] not in names}

    def forget_all_but(self, views: Iterable[View]) -> None:
        """Of rows that no view has, nothing needs to be known."""
        segments = [segment for view in views for segment in view.segments]
        serials, lists = {segment.block.serial for segment in segments}, {id(segment.keep) for segment in segments}
        columns = {id(column) for segment in segments for column in segment.columns.values()}
        self._parts = {serial: parts for serial, parts in self._parts.items() if serial in serials}
        for part in (part for parts in self._parts.values() for part in parts):
            part.columns = {
                name: [pair for pair in pairs if id(pair[0]) in columns] for name, pairs in part.columns.items()
            }
        self._columns = {key: column for key, column in self._columns.items() if id(column) in columns}
        self._lists = {key: value for key, value in self._lists.items() if key in lists}


def _with_column(parts: list[_Part], name: str, column: Column) -> list[_Part]:
    """The files that together have a column as it is now, from its first row on."""
    return _one_after_another([part for part in parts if part.has(name, column)])


def _with_ledger(parts: list[_Part]) -> list[_Part]:
    return _one_after_another([part for part in parts if part.has_ledger])


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
