"""Versions of a buffer: commits, and the differences between two of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from batchwright.base.errors import SpecError
from batchwright.base.words import counted, suggest
from batchwright.buffer.compare import equal_rows, has_value
from batchwright.buffer.view import View

__all__ = ["BufferDiff", "CommittedVersion", "VersionInfo", "find_version", "take_diff"]


@dataclass(frozen=True, slots=True)
class VersionInfo:
    """A commit."""

    number: int
    """The journal number of the last change before it."""
    name: str
    time: datetime
    rows: int

    def __str__(self) -> str:
        return f"{self.number}  {self.name}  {self.time:%Y-%m-%d %H:%M:%S}  {counted(self.rows, 'row')}"


@dataclass(frozen=True, eq=False)
class CommittedVersion:
    """A version. Its rows are read from disk when they are first needed."""

    ordinal: int
    """The number of the version in its buffer. It is never used again."""
    info: VersionInfo
    kind: str | None
    load: Callable[[], View]

    @cached_property
    def view(self) -> View:
        return self.load().share()

    @property
    def is_loaded(self) -> bool:
        return "view" in vars(self)


@dataclass(frozen=True, slots=True)
class BufferDiff:
    """The differences between a version and an older one, by ids."""

    added: NDArray[np.int64]
    removed: NDArray[np.int64]
    changed: NDArray[np.int64]
    """Rows that are in both, with another value in some column."""
    columns: dict[str, int]
    """The number of these rows with another value, per column. Columns that are in only one version count too."""

    def __bool__(self) -> bool:
        return bool(len(self.added) or len(self.removed) or len(self.changed))

    def __str__(self) -> str:
        text = f"{counted(len(self.added), 'row')} added, {len(self.removed):,} removed, {len(self.changed):,} changed"
        where = ", ".join(f"{name} in {count:,}" for name, count in self.columns.items() if count)
        return f"{text} ({where})" if where else text


def find_version(wanted: str | int | VersionInfo, known: Sequence[VersionInfo]) -> int:
    """Find a version by name, by number (the last commit there), or by the result of `commit`."""
    for at in reversed(range(len(known))):
        info = known[at]
        if wanted == info or (type(wanted), wanted) in ((int, info.number), (str, info.name)):
            return at
    names = [info.name for info in known]
    near = suggest(str(wanted), names)
    remedy = "one of them"
    if near is not None:
        remedy = f"version {near!r}"
    elif not names:
        remedy = "buffer.commit('name') keeps one"
    raise SpecError(
        f"there is no version {wanted!r}",
        parameter="version",
        versions=", ".join(map(repr, names[-10:])) or "none was committed",
        remedy=remedy,
    )


def take_diff(older: View, newer: View) -> BufferDiff:
    old, new = older.ids, newer.ids
    both, at_old, at_new = np.intersect1d(old, new, assume_unique=True, return_indices=True)
    different = np.zeros(len(both), bool)
    columns: dict[str, int] = {}
    for name in {**older.schema.by_name, **newer.schema.by_name}:
        mask = _differs(older, newer, name, at_old, at_new)
        columns[name] = int(mask.sum())
        different |= mask
    return BufferDiff(
        np.setdiff1d(new, both, assume_unique=True),
        np.setdiff1d(old, both, assume_unique=True),
        both[different],
        columns,
    )


def _differs(
    older: View, newer: View, name: str, at_old: NDArray[np.int64], at_new: NDArray[np.int64]
) -> NDArray[np.bool_]:
    was_there = name in older.schema.by_name
    if not was_there or name not in newer.schema.by_name:
        view, index = (older, at_old) if was_there else (newer, at_new)
        return has_value(view.columns_at(index, [name])[name])
    differs = np.zeros(len(at_old), bool)
    suspects = np.flatnonzero(_memory_of(older, name, at_old) != _memory_of(newer, name, at_new))
    mine, other = older.columns_at(at_old[suspects], [name]), newer.columns_at(at_new[suspects], [name])
    differs[suspects] = ~equal_rows(mine[name], other[name])
    return differs


def _memory_of(view: View, name: str, index: NDArray[np.int64]) -> NDArray[np.int64]:
    """A number for the block and the column that hold each row. Rows with one number are the same in all versions."""
    columns = np.array([id(segment.columns.get(name)) for segment in view.segments], np.int64)
    return columns[view.locate(index)[0]]
