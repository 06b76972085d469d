"""The files of each block's columns. Columns are written once, and versions share them.

A block is written as it grows. Each part is a file with some columns of rows [first, last). A column that got new
values is written anew. The parts with the old values stay for the versions that name them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from batchwright.buffer.blocks import Column, RowBlock, Segment, column_of_values
from batchwright.buffer.folder import BufferFolder
from batchwright.buffer.schema import Schema, Values
from batchwright.buffer.view import View, joined_values

Document = dict[str, Any]
_LEDGER = ""
"""The name of a block's ledger among its columns. Columns have names."""


class _Part(NamedTuple):
    """A file that has a column's rows [first, last)."""

    file: str
    first: int
    last: int


class Parts:
    """The files of a folder's blocks."""

    def __init__(self, folder: BufferFolder) -> None:
        self.folder = folder
        self._written: WeakKeyDictionary[Column | RowBlock, tuple[int, list[_Part]]] = WeakKeyDictionary()
        """The edition of each column that is in files, and these files, one after the other. A block is its ledger."""
        self._columns: WeakValueDictionary[tuple[str, ...], Column] = WeakValueDictionary()
        """Columns that were read, by the files they were read from: versions share them."""
        self._lists: dict[int, tuple[NDArray[np.int64], str]] = {}
        """Files with lists of live rows, by the identity of the list."""

    # Writing

    def write(self, segment: Segment) -> Document:
        """Write a segment's rows to disk if needed, and return their place."""
        block, stop = segment.block, segment.stop  # no version has rows behind it, and an older column may lack them
        columns = _columns_of(segment)
        missing: dict[int, list[str]] = {}
        for name, column in columns.items():
            missing.setdefault(_end_of(self._parts_of(column)), []).append(name)
        for first, names in sorted(missing.items()):
            if first < stop or not self._parts_of(block):
                self._write_part(segment, names, first)
        named: dict[_Part, list[str]] = {}
        for name, column in columns.items():
            for part in self._parts_of(column):
                named.setdefault(part, []).append(name)
        return {
            "serial": block.serial,
            "first_id": block.first_id,
            "num_rows": stop,
            "start": segment.start,
            "stop": stop,
            "keep": None if segment.keep is None else self._write_list(block.serial, segment.keep),
            "parts": [
                {
                    "file": part.file,
                    "columns": [name for name in names if name != _LEDGER],
                    "first": part.first,
                    "last": part.last,
                    "ledger": _LEDGER in names,
                }
                for part, names in sorted(named.items(), key=lambda item: item[0].first)
            ],
        }

    def _write_part(self, segment: Segment, names: list[str], first: int) -> None:
        block, last, extra = segment.block, segment.stop, {}
        if _LEDGER in names:
            ledger = block.origins()
            extra["ledger"] = ledger[(ledger[:, 0] >= first) & (ledger[:, 0] < last)].ravel()
            if block.ids is not None:
                extra["ids"] = block.ids[first:last]
        columns = {name: segment.columns[name].read(first, last) for name in names if name != _LEDGER}
        part = _Part(self.folder.write_block(block.serial, columns, extra), first, last)
        written = _columns_of(segment)
        for name in names:
            self._add_part(written[name], part)

    def _parts_of(self, column: Column | RowBlock) -> list[_Part]:
        """The files with the current edition of a column."""
        edition, parts = self._written.get(column, (0, []))
        if edition != column.edition:
            return []
        return parts

    def _add_part(self, column: Column | RowBlock, part: _Part) -> None:
        self._written[column] = column.edition, [*self._parts_of(column), part]

    def _write_list(self, serial: int, keep: NDArray[np.int64]) -> str:
        if id(keep) not in self._lists:
            self._lists[id(keep)] = keep, self.folder.write_block(serial, {}, {"keep": keep})
        return self._lists[id(keep)][1]

    # Reading

    def read(self, entry: Document, schema: Schema) -> Segment:
        """The segment that `write` was given, over the memory of its files."""
        block = RowBlock(entry["serial"], entry["num_rows"], entry["first_id"])
        block.num_rows = entry["num_rows"]
        pieces: dict[str, list[tuple[_Part, Values]]] = {}
        ids: list[NDArray[np.int64]] = []
        for said in sorted(entry["parts"], key=lambda said: int(said["first"])):
            part = _Part(said["file"], said["first"], said["last"])
            asked = ["ledger"] * said["ledger"]
            columns, extra = self.folder.map_block(part.file, schema, said["columns"], asked)
            for name in said["columns"]:
                pieces.setdefault(name, []).append((part, columns[name]))
            if said["ledger"]:
                block.ledger.extend(extra["ledger"].tolist())
                ids += [extra[name] for name in extra if name == "ids"]
                self._add_part(block, part)
        if ids:
            block.ids = np.concatenate(ids)
        for name, found in pieces.items():
            block.columns[name] = column = self._column(name, found)
            if entry["stop"] > column.num_rows:
                raise self.folder.damaged_block(found[-1][0].file, f"too few rows in {name!r}")
        keep = None
        if entry["keep"] is not None:
            keep = self._read_list(entry, schema)
        return Segment(block, block.columns, entry["start"], entry["stop"], keep)

    def _column(self, name: str, found: list[tuple[_Part, Values]]) -> Column:
        """A column that was read from some files: the same one for all versions."""
        key = (name, *(part.file for part, _ in found))
        column = self._columns.get(key)
        if column is None:
            column = self._columns[key] = column_of_values(joined_values([values for _, values in found]))
            for part, _ in found:
                self._add_part(column, part)
        return column

    def _read_list(self, entry: Document, schema: Schema) -> NDArray[np.int64]:
        keep: NDArray[np.int64] = self.folder.map_block(entry["keep"], schema, (), ["keep"])[1]["keep"]
        ends = [int(keep[0]), int(keep[-1]) + 1] if len(keep) else []
        if ends != [entry["start"], entry["stop"]] or (keep[1:] <= keep[:-1]).any():  # rows are read where it says
            raise self.folder.damaged_block(entry["keep"], "rows out of their order")
        self._lists[id(keep)] = keep, entry["keep"]
        return keep

    # Forgetting

    def forget_files(self, names: set[str]) -> None:
        """Do not name these any more: they are about to be removed."""
        for column, (edition, parts) in list(self._written.items()):
            kept = [part for part in parts if part.file not in names]
            if len(kept) < len(parts):
                self._written[column] = edition, _in_a_row(kept)
        self._lists = {key: known for key, known in self._lists.items() if known[1] not in names}

    def forget_lists(self, views: Iterable[View]) -> None:
        """Forget the lists of live rows that no view has."""
        lists = {id(segment.keep) for view in views for segment in view.segments}
        self._lists = {key: known for key, known in self._lists.items() if key in lists}


def _columns_of(segment: Segment) -> dict[str, Column | RowBlock]:
    """The columns that files hold for a segment, with its block's ledger."""
    return {**segment.columns, _LEDGER: segment.block}


def _end_of(parts: list[_Part]) -> int:
    """The row behind the last one of parts that follow each other."""
    return max((part.last for part in parts), default=0)


def _in_a_row(parts: list[_Part]) -> list[_Part]:
    """The first parts that follow each other."""
    found: list[_Part] = []
    for part in parts:
        if part.first == _end_of(found):
            found.append(part)
    return found
