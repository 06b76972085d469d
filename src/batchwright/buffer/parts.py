"""The files of each block's columns. Columns are written once, and versions share them.

A block is written as it grows. Each part is a file with some columns of rows [first, last). A column that got new
values is written anew. The parts with the old values stay for the versions that name them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.buffer.blocks import ArrowColumn, Column, NumberColumn, RowBlock, Segment
from batchwright.buffer.folder import BufferFolder
from batchwright.buffer.schema import Numbers, Schema, Values
from batchwright.buffer.view import View, joined_values

__all__ = ["Parts"]

Document = dict[str, Any]
_LEDGER = ""
"""The name of a block's ledger among its columns. Columns have names."""


@dataclass(slots=True)
class _Part:
    """A file that has some columns of rows [first, last) of a block."""

    file: str
    first: int
    last: int
    columns: dict[str, list[tuple[Any, int]]]
    """The written state of each column: the column (one for each length that it was read at) and its edition. For the
    ledger, the block."""

    def has(self, name: str, column: Any) -> bool:
        """Whether it has the current edition of this column."""
        return any(column is known and column.edition == edition for known, edition in self.columns.get(name, ()))


class Parts:
    """The files of a folder's blocks."""

    def __init__(self, folder: BufferFolder) -> None:
        self.folder = folder
        self._parts: dict[int, list[_Part]] = {}
        """The parts of each block, by its serial number."""
        self._lists: dict[int, tuple[NDArray[np.int64], str]] = {}
        """Files with lists of live rows, by the identity of the list."""
        self._columns: dict[tuple[str, ...], Column] = {}
        """Columns that were read, by the files they were read from: versions share them."""

    # Writing

    def write(self, segment: Segment, schema: Schema) -> Document:
        """Write a segment's rows to disk if needed, and return their place."""
        block, stop = segment.block, segment.stop  # no version has rows behind it, and an older column may lack them
        parts = self._parts.setdefault(block.serial, [])
        columns = _columns_of(segment)
        missing: dict[int, list[str]] = {}
        for name, column in columns.items():
            there = _files_with(parts, name, column)
            missing.setdefault(_end_of(there), []).append(name)
        for first, names in sorted(missing.items()):
            if first < stop or (not stop and not parts):
                parts.append(self._write_part(segment, schema, names, first))
        files = {name: {part.file for part in _files_with(parts, name, column)} for name, column in columns.items()}
        named = set().union(*files.values())
        return {
            "serial": block.serial,
            "first_id": block.first_id,
            "num_rows": stop,
            "start": segment.start,
            "stop": stop,
            "keep": None if segment.keep is None else self._write_list(block.serial, segment.keep, schema),
            "parts": [
                {
                    "file": part.file,
                    "columns": [name for name in segment.columns if part.file in files[name]],
                    "first": part.first,
                    "last": part.last,
                    "ledger": part.file in files[_LEDGER],
                }
                for part in sorted(parts, key=lambda part: part.first)
                if part.file in named
            ],
        }

    def _write_part(self, segment: Segment, schema: Schema, names: list[str], first: int) -> _Part:
        block, last, extra = segment.block, segment.stop, {}
        if _LEDGER in names:
            ledger = block.origins()
            extra["ledger"] = ledger[(ledger[:, 0] >= first) & (ledger[:, 0] < last)].ravel()
            if block.ids is not None:
                extra["ids"] = block.ids[first:last]
        columns = {name: segment.columns[name].read(first, last) for name in names if name != _LEDGER}
        file = self.folder.write_block(block.serial, columns, schema, extra)
        written = _columns_of(segment)
        return _Part(file, first, last, {name: [(written[name], written[name].edition)] for name in names})

    def _write_list(self, serial: int, keep: NDArray[np.int64], schema: Schema) -> str:
        if id(keep) not in self._lists:
            self._lists[id(keep)] = keep, self.folder.write_block(serial, {}, schema, {"keep": keep})
        return self._lists[id(keep)][1]

    # Reading

    def read(self, entry: Document, schema: Schema) -> Segment:
        """The segment that `write` was given, over the memory of its files."""
        block = RowBlock(entry["serial"], entry["num_rows"], entry["first_id"])
        block.num_rows = entry["num_rows"]
        pieces: dict[str, list[tuple[str, Values]]] = {}
        ids: list[NDArray[np.int64]] = []
        for part in sorted(entry["parts"], key=lambda part: int(part["first"])):
            asked = ["ledger"] * part["ledger"]
            columns, extra = self.folder.map_block(part["file"], schema, part["columns"], asked)
            for name in part["columns"]:
                pieces.setdefault(name, []).append((part["file"], columns[name]))
            if part["ledger"]:
                block.ledger.extend(extra["ledger"].tolist())
                ids += [extra[name] for name in extra if name == "ids"]
        if ids:
            block.ids = np.concatenate(ids)
        for name, found in pieces.items():
            block.columns[name] = column = self._column(name, found)
            if entry["stop"] > column.num_rows:
                raise self.folder.damaged_block(found[-1][0], f"too few rows in {name!r}")
        self._remember(block, entry["parts"])
        if entry["keep"] is None:
            return Segment(block, block.columns, entry["start"], entry["stop"])
        return Segment(block, block.columns, entry["start"], entry["stop"], self._read_list(entry, schema))

    def _column(self, name: str, found: list[tuple[str, Values]]) -> Column:
        """A column that was read from some files: the same one for all versions."""
        key = (name, *(file for file, _ in found))
        if key not in self._columns:
            values = joined_values([values for _, values in found])
            if isinstance(values, Numbers):
                self._columns[key] = NumberColumn(*values, shared=True)  # so that changes are made in a copy
            else:
                self._columns[key] = ArrowColumn(values.type, values)
        return self._columns[key]

    def _read_list(self, entry: Document, schema: Schema) -> NDArray[np.int64]:
        keep: NDArray[np.int64] = self.folder.map_block(entry["keep"], schema, (), ["keep"])[1]["keep"]
        ends = [int(keep[0]), int(keep[-1]) + 1] if len(keep) else []
        if ends != [entry["start"], entry["stop"]] or (keep[1:] <= keep[:-1]).any():  # rows are read where it says
            raise self.folder.damaged_block(entry["keep"], "rows out of their order")
        self._lists[id(keep)] = keep, entry["keep"]
        return keep

    def _remember(self, block: RowBlock, entries: list[Document]) -> None:
        """Remember the files of a block's columns, so that they are not written again."""
        parts = self._parts.setdefault(block.serial, [])
        known = {part.file: part for part in parts}
        columns = _columns_of(Segment.of(block))
        for entry in entries:
            part = known.get(entry["file"])
            if part is None:
                part = _Part(entry["file"], entry["first"], entry["last"], {})
                parts.append(part)
            for name in (*entry["columns"], *[_LEDGER] * entry["ledger"]):
                if not part.has(name, columns[name]):
                    part.columns.setdefault(name, []).append((columns[name], columns[name].edition))

    # Forgetting

    def files(self) -> set[str]:
        """All that something here can still name."""
        parts = {part.file for parts in self._parts.values() for part in parts}
        return parts | {file for _, file in self._lists.values()}

    def forget_files(self, names: set[str]) -> None:
        """Do not name these any more: they are about to be removed."""
        self._parts = {
            serial: [part for part in parts if part.file not in names] for serial, parts in self._parts.items()
        }
        self._lists = {key: known for key, known in self._lists.items() if known[1] not in names}

    def forget_all_but(self, views: Iterable[View]) -> None:
        """Forget the rows that no view has."""
        segments = [segment for view in views for segment in view.segments]
        serials, lists = {segment.block.serial for segment in segments}, {id(segment.keep) for segment in segments}
        columns = {id(column) for segment in segments for column in _columns_of(segment).values()}
        self._parts = {serial: parts for serial, parts in self._parts.items() if serial in serials}
        for part in (part for parts in self._parts.values() for part in parts):
            part.columns = {name: [p for p in pairs if id(p[0]) in columns] for name, pairs in part.columns.items()}
        self._columns = {key: column for key, column in self._columns.items() if id(column) in columns}
        self._lists = {key: value for key, value in self._lists.items() if key in lists}


def _columns_of(segment: Segment) -> dict[str, Any]:
    """The columns that files hold for a segment, with its block's ledger."""
    return {**segment.columns, _LEDGER: segment.block}


def _end_of(parts: list[_Part]) -> int:
    """The row behind the last one of parts that follow each other."""
    return max((part.last for part in parts), default=0)


def _files_with(parts: list[_Part], name: str, column: Any) -> list[_Part]:
    """The files that together have the current edition of a column, from its first row. Their order is arbitrary."""
    found: list[_Part] = []
    for part in sorted(parts, key=lambda part: (part.first, -part.last)):
        if part.has(name, column) and part.first == _end_of(found):
            found.append(part)
    return found
