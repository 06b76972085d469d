"""Where a mixed stream is, as JSON: rows drawn from each lane, the sizes of the pool so far, and which shards."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import islice
from operator import index
from typing import Any

from batchwright.base.errors import PlanError
from batchwright.base.fingerprint import fingerprint
from batchwright.order.refills import PoolSize
from batchwright.pool.shard_files import ShardFile
from batchwright.pool.shard_ranges import parse_range, range_text

__all__ = ["Cursor", "ShardNames", "SizeFrom", "State", "cursor_of", "state_of"]

State = dict[str, Any]
_MOST_NAMED = 1_000_000
_MARK_DIGITS = 4
"""Digits kept of each shard's mark: enough to say which one changed; that one did, the fingerprint says."""


@dataclass(frozen=True, slots=True)
class SizeFrom:
    """How large the pool of each lane is, from some draws on: other settings may come into force at a resume."""

    at: tuple[int, ...]
    """Of each lane, the entries that were drawn when this came into force."""
    entries: int
    threshold: int
    most_rows: int | None

    def of_lane(self, lane: int) -> PoolSize:
        return PoolSize(self.at[lane], self.entries, self.threshold, self.most_rows)

    def is_like(self, other: SizeFrom) -> bool:
        """Whether both make the same refills."""
        return (self.entries, self.threshold, self.most_rows) == (other.entries, other.threshold, other.most_rows)


@dataclass(slots=True)
class Cursor:
    """Where a stream is."""

    epoch: int = 0
    drawn: list[int] = field(default_factory=list)
    """Entries drawn from each lane in this epoch. Empty: nobody has begun, so there are no lanes yet."""
    sizes: list[SizeFrom] = field(default_factory=list)
    """Of this epoch, the earliest first."""

    @property
    def lanes(self) -> int:
        return len(self.drawn)

    @property
    def is_at_start(self) -> bool:
        return not any(self.drawn)

    def next_epoch(self) -> Cursor:
        """The beginning of the next epoch, with the pools as they are."""
        none = (0,) * self.lanes
        return Cursor(self.epoch + 1, list(none), [replace(self.sizes[-1], at=none)])

    def copy(self) -> Cursor:
        return Cursor(self.epoch, list(self.drawn), list(self.sizes))


@dataclass(frozen=True)
class ShardNames:
    """What the shards of an epoch are called, and what they contain: independent of where they lie."""

    ranges: tuple[str, ...]
    """Of each directory, the numbers of its shards."""
    marks: tuple[str, ...]
    """Of each shard, by directory and number."""

    @classmethod
    def of(cls, files: Sequence[ShardFile], marks: Sequence[str], num_directories: int) -> ShardNames:
        ordered = sorted(zip(files, marks, strict=True), key=lambda pair: (pair[0].directory, pair[0].number))
        numbers: list[list[int]] = [[] for _ in range(num_directories)]
        for file, _ in ordered:
            numbers[file.directory].append(file.number)
        return cls(tuple(map(range_text, numbers)), tuple(mark for _, mark in ordered))

    @cached_property
    def state(self) -> dict[str, Any]:
        """For a state: what names all of them, and what finds the ones that changed."""
        return {
            "fingerprint": fingerprint([list(self.ranges), list(self.marks)]),
            "ranges": list(self.ranges),
            "marks": "".join(mark[-_MARK_DIGITS:] for mark in self.marks),
        }

    def refuse_others(self, saved: Mapping[str, Any], files: Sequence[ShardFile]) -> None:
        """Raise if a state was saved over other shards, naming them."""
        if saved["fingerprint"] == self.state["fingerprint"]:
            return
        ranges = [str(text) for text in saved["ranges"]]
        if len(ranges) != len(self.ranges):
            raise PlanError(
                f"this state was saved over {len(ranges)} directories, and here are {len(self.ranges)}",
                parameter="data_dirs",
                saved_ranges=", ".join(map(repr, ranges)),
                remedy="the data_dirs with which it was saved, in their order",
            )
        for directory, (before, now) in enumerate(zip(ranges, self.ranges, strict=True)):
            if before != now:
                new, old = {file.number for file in files if file.directory == directory}, _numbers(before)
                raise PlanError(
                    "shards were added or taken away since this state was saved, or directories have changed places",
                    parameter="shard_ranges",
                    directory=next((os.path.dirname(f.path) for f in files if f.directory == directory), directory),
                    added=range_text(new - old) if new - old else None,
                    taken_away=range_text(old - new) if old - new else None,
                    remedy=f"shard_ranges={ranges!r}, as it was; new shards are for the next run, or the next epoch's "
                    "dataset",
                )
        ordered = sorted(files, key=lambda file: (file.directory, file.number))
        marks = str(saved["marks"])
        changed = [
            file.path
            for place, (file, mark) in enumerate(zip(ordered, self.marks, strict=True))
            if marks[place * _MARK_DIGITS : (place + 1) * _MARK_DIGITS] != mark[-_MARK_DIGITS:]
        ]
        who = f"{len(changed)} shards have" if len(changed) > 1 else "a shard has"
        raise PlanError(
            f"{who} changed since this state was saved",
            file="\n".join(changed[:5]) + ("\n..." if len(changed) > 5 else "") if changed else None,
            remedy="put the files back that were there; or begin again, without this state",
        )


def _numbers(text: str) -> set[int]:
    stretches = parse_range(text).stretches or ()
    return set(islice((number for first, last in stretches for number in range(first, last + 1)), _MOST_NAMED))


def state_of(cursor: Cursor, names: ShardNames, **settings: Any) -> State:
    return {
        "epoch": cursor.epoch,
        "drawn": sum(cursor.drawn),
        "lanes": cursor.lanes,
        **settings,
        "shards": names.state,
        "by_lane": list(cursor.drawn),
        "pool": [asdict(size) | {"at": list(size.at)} for size in cursor.sizes],
    }


def cursor_of(state: Any) -> Cursor:
    """The cursor that a state describes."""
    try:
        epoch, lanes = index(state["epoch"]), index(state["lanes"])
        drawn = [index(number) for number in state["by_lane"]]
        sizes = [
            SizeFrom(
                tuple(index(number) for number in size["at"]),
                index(size["entries"]),
                index(size["threshold"]),
                None if size["most_rows"] is None else index(size["most_rows"]),
            )
            for size in state["pool"]
        ]
        is_whole = (
            epoch >= 0
            and len(drawn) == lanes
            and min(drawn, default=0) >= 0
            and sum(drawn) == index(state["drawn"])
            and all(len(size.at) == lanes and size.entries > size.threshold >= 0 for size in sizes)
            and bool(sizes) == bool(lanes)
            and not (sizes and any(sizes[0].at))
            and {"fingerprint", "ranges", "marks"} <= state["shards"].keys()
            and index(state["seed"]) is not None
        )
    except (KeyError, TypeError, AttributeError):
        is_whole = False
    if not is_whole:
        shown = repr(state)
        raise PlanError(
            "this is not the state of a mixed stream",
            got=shown if len(shown) <= 200 else shown[:197] + "...",
            remedy="what state_dict() returned",
        )
    return Cursor(epoch, drawn, sizes)
