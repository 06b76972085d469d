"""Take units from versions that were baked before: what did not change is not read and tokenised again.

A version keeps a table of the units that it was joined from: for each its name (which is what went in), its report,
and where in the shards its documents lie. A unit of a new bake with the same name is those documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from batchwright.baking.rows import UnitReport
from batchwright.baking.unit import NO_MARKS, SPLITS, Documents, marks_of
from batchwright.base.errors import StoreError
from batchwright.store.reader import Store
from batchwright.store.stream import MappedShard
from batchwright.store.texts import TextHashes, texts_by_document
from batchwright.store.verify import CheckedShards
from batchwright.store.versions import list_versions

__all__ = ["KeptUnit", "Placed", "find_kept", "units_table"]


@dataclass(slots=True)
class Placed:
    """Where a version has the documents of one unit."""

    report: UnitReport
    files: list[int]
    """The version's number of the raw file that each span of the unit is of."""
    first_rows: list[int]
    """The number, in that file, of each span's first row."""
    places: list[tuple[str, int, int]]
    """For each split: shard, first document in it, number of documents."""
    is_whole: bool = True
    """Not where a split of the unit lies in several shards."""


def units_table(placed: list[Placed]) -> dict[str, Any]:
    """The table of a version's units, as columns."""
    kept = [unit for unit in placed if unit.is_whole]
    columns: dict[str, Any] = {
        "key": [unit.report.key for unit in kept],
        "report": [msgspec.json.encode(unit.report).decode() for unit in kept],
        "files": [unit.files for unit in kept],
        "first_rows": [unit.first_rows for unit in kept],
    }
    for number, split in enumerate(SPLITS):
        for part, name in enumerate(("shard", "first", "count")):
            columns[f"{split}_{name}"] = [unit.places[number][part] for unit in kept]
    return columns


@dataclass(frozen=True, slots=True)
class KeptUnit:
    """A unit whose documents lie in the shards of a version that was baked before."""

    report: UnitReport
    _placed: Placed
    _shards: list[MappedShard | None]
    """For each split; None where the unit has no documents on that side."""
    _texts: list[TextHashes]
    """For each split the hashes of its documents' texts."""

    def documents(self, split: int) -> Documents:
        shard, (_, first, count) = self._shards[split], self._placed.places[split]
        if shard is None:
            empty = np.empty(0, np.int64)
            return Documents(empty, empty, empty, empty, self._texts[split], *NO_MARKS)
        offsets = shard.offsets[first : first + count + 1].astype(np.int64)
        span = np.searchsorted(np.array(self._placed.files), shard.file[first : first + count])
        row = shard.row[first : first + count] - np.array(self._placed.first_rows, np.int64)[span]
        num_marks, marks = NO_MARKS
        if shard.spans is not None:
            starts, fields = shard.spans
            begin, end = int(starts[first]), int(starts[first + count])
            num_marks = np.diff(starts[first : first + count + 1]).astype(np.int64)
            marks = marks_of({name: values[begin:end] for name, values in fields.items()})
        tokens = shard.tokens[offsets[0] : offsets[-1]]
        return Documents(tokens, np.diff(offsets), span, row, self._texts[split], num_marks, marks)


def find_kept(to: Path, wanted: set[str]) -> dict[str, KeptUnit]:
    """Units that a version of this store has, by name. A shard whose bytes are not what they were is not used."""
    found: dict[str, KeptUnit] = {}
    for version in list_versions(to):
        if wanted <= found.keys():
            break
        try:
            old = _OldVersion(Store(to, version=version), to / "work")
        except StoreError:
            continue
        for key, placed in old.units(wanted - found.keys()):
            shards = old.shards_of(placed)
            if shards is not None:
                found[key] = KeptUnit(placed.report, placed, shards, old.texts_of(placed))
    return found


class _OldVersion:
    """The units and shards of one version."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.store, self.table, self.text_table, self.folder = store, store.units, store.texts, folder
        self.rows = {name: row for row, name in enumerate(store.shards["file"].to_pylist())}
        # Damage must not travel into a new version, where it would get a hash of its own and never be found.
        self.checked = CheckedShards(store)
        self.first_document = np.concatenate([[0], np.cumsum(store.shards["num_documents"])])
        """Of each shard, by its row; the numbers of documents go through all shards."""

    def units(self, wanted: set[str]) -> Iterator[tuple[str, Placed]]:
        for row, key in enumerate(self.table["key"].to_pylist()):
            if key in wanted and self.text_table is not None:
                report = msgspec.json.decode(self._value("report", row), type=UnitReport)
                places = [self._place(split, row) for split in SPLITS]
                yield key, Placed(report, self._value("files", row), self._value("first_rows", row), places)

    def _place(self, split: str, row: int) -> tuple[str, int, int]:
        return (
            self._value(f"{split}_shard", row),
            self._value(f"{split}_first", row),
            self._value(f"{split}_count", row),
        )

    def _value(self, column: str, row: int) -> Any:
        value = self.table[column][row]
        return value.as_py() if hasattr(value, "as_py") else int(value)

    def shards_of(self, placed: Placed) -> list[MappedShard | None] | None:
        """For each split the unit's shard, or None where it has no documents there; no list if a shard is not used."""
        shards: list[MappedShard | None] = []
        for name, _, count in placed.places:
            shards.append(self._shard(name) if count else None)
            if count and shards[-1] is None:
                return None
        return shards

    def _shard(self, name: str) -> MappedShard | None:
        row = self.rows.get(name)
        return None if row is None else self.checked.shard(row)

    def texts_of(self, placed: Placed) -> list[TextHashes]:
        """For each split the hashes of the texts of a unit's documents."""
        starts = [int(self.first_document[self.rows.get(name, 0)]) + first for name, first, _ in placed.places]
        return [self._texts[start : start + count] for start, (_, _, count) in zip(starts, placed.places, strict=True)]

    @cached_property
    def _texts(self) -> TextHashes:
        assert self.text_table is not None
        return texts_by_document(self.text_table, self.folder)
