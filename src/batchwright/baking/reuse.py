"""Reuse of units from older versions: unchanged inputs are not read and tokenised again.

A version keeps a table of its units: for each its key (a fingerprint of its inputs), its report, and the place of its
documents in the shards. A unit of a new bake with the same key consists of those documents.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from batchwright.baking.document_columns import Documents, marks_of
from batchwright.baking.unit import SPLITS
from batchwright.baking.unit_rows import UnitReport
from batchwright.base.errors import StoreError
from batchwright.prepare.chat.spans import SPAN_DTYPE
from batchwright.store.reader import Store
from batchwright.store.texts import TextHashes, texts_by_document
from batchwright.store.versions import list_versions

__all__ = ["ReusedUnit", "UnitPlace", "find_reusable", "units_table"]

Range = tuple[str, int, int]
"""(shard, number of the first document in it, number of documents)."""


@dataclass(slots=True)
class UnitPlace:
    """The place of one unit's documents in a version."""

    report: UnitReport
    files: list[int]
    """The version's number of each span's raw file."""
    first_rows: list[int]
    """The number of each span's first row in its file."""
    ranges: list[Range] = field(default_factory=lambda: [("", 0, 0)] * len(SPLITS))
    """For each split."""
    is_whole: bool = True
    """False if a split of the unit is in several shards: such a unit is not reused."""

    def put(self, side: int, documents: Range) -> None:
        self.is_whole &= not self.ranges[side][2]
        self.ranges[side] = documents


def units_table(places: list[UnitPlace]) -> dict[str, Any]:
    """The table of a version's units, as columns."""
    places = [place for place in places if place.is_whole]
    columns: dict[str, Any] = {
        "key": [place.report.key for place in places],
        "report": [msgspec.json.encode(place.report).decode() for place in places],
        "files": [place.files for place in places],
        "first_rows": [place.first_rows for place in places],
    }
    for side, split in enumerate(SPLITS):
        for part, name in enumerate(("shard", "first", "count")):
            columns[f"{split}_{name}"] = [place.ranges[side][part] for place in places]
    return columns


@dataclass(frozen=True, slots=True)
class ReusedUnit:
    """A unit whose documents are in the shards of an older version."""

    report: UnitReport
    version: _OldVersion
    row: int
    """In the version's table of units."""

    def documents(self, side: int) -> Documents:
        return self.version.documents(self.row, side)


def find_reusable(to: Path, wanted: set[str]) -> dict[str, ReusedUnit]:
    """The wanted units that versions of this store have, by key. Damaged shards are not used."""
    found: dict[str, ReusedUnit] = {}
    for version in list_versions(to):
        if wanted <= found.keys():
            break
        with contextlib.suppress(StoreError):
            found |= _OldVersion(Store(to, version=version), to / "work").find(wanted - found.keys())
    return found


class _OldVersion:
    """The units and shards of one version. `folder` is for a temporary file."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.store, self.table, self.text_table, self.folder = store, store.units, store.texts, folder
        self.shard_rows = {name: row for row, name in enumerate(store.shards["file"].to_pylist())}
        self.first_document = np.concatenate([[0], np.cumsum(store.shards["num_documents"])])
        """The number of the first document in each shard, counted through all shards."""

    def find(self, wanted: set[str]) -> dict[str, ReusedUnit]:
        if self.text_table is None:  # a release without it wrote this version
            return {}
        return {
            key: ReusedUnit(msgspec.json.decode(self._value("report", row), type=UnitReport), self, row)
            for row, key in enumerate(self.table["key"].to_pylist())
            if key in wanted and self._is_undamaged(row)
        }

    def _is_undamaged(self, row: int) -> bool:
        ranges = [self._range(row, side) for side in range(len(SPLITS))]
        shards = [self.shard_rows.get(shard) for shard, _, count in ranges if count]
        # Damage must not be copied into a new version, where it would get a valid hash.
        return all(shard is not None and self.store.undamaged_shard(shard) for shard in shards)

    def documents(self, row: int, side: int) -> Documents:
        """The documents of one split of a unit."""
        name, first, count = self._range(row, side)
        num_marks, marks = np.empty(0, np.int64), np.empty(0, SPAN_DTYPE)
        if not count:
            empty = np.empty(0, np.int64)
            return Documents(empty, empty, empty, empty, self._texts[:0], num_marks, marks)
        last, shard_row = first + count, self.shard_rows[name]
        shard = self.store.undamaged_shard(shard_row)
        assert shard is not None
        offsets = shard.offsets[first : last + 1].astype(np.int64)
        span = np.searchsorted(np.array(self._value("files", row)), shard.file[first:last])
        number = shard.row[first:last] - np.array(self._value("first_rows", row), np.int64)[span]
        if shard.spans is not None:
            starts, fields = shard.spans
            begin, end = int(starts[first]), int(starts[last])
            num_marks = np.diff(starts[first : last + 1]).astype(np.int64)
            marks = marks_of({name: values[begin:end] for name, values in fields.items()})
        tokens = shard.tokens[offsets[0] : offsets[-1]]
        first_text = int(self.first_document[shard_row]) + first
        texts = self._texts[first_text : first_text + count]
        return Documents(tokens, np.diff(offsets), span, number, texts, num_marks, marks)

    def _range(self, row: int, side: int) -> Range:
        shard, first, count = (self._value(f"{SPLITS[side]}_{name}", row) for name in ("shard", "first", "count"))
        return shard, int(first), int(count)

    def _value(self, column: str, row: int) -> Any:
        value = self.table[column][row]
        return value.as_py() if hasattr(value, "as_py") else value

    @cached_property
    def _texts(self) -> TextHashes:
        assert self.text_table is not None
        return texts_by_document(self.text_table, self.folder)
