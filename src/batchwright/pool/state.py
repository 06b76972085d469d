"""The state of a mixed stream, as JSON: entries drawn from each lane, the sizes of the pool so far, and the shards."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from typing import Annotated, Any, NoReturn

import msgspec

from batchwright.base.errors import PlanError
from batchwright.base.fingerprint import fingerprint
from batchwright.base.words import counted, listed, shortened
from batchwright.order.refills import PoolSize
from batchwright.pool.shard_files import ShardFile, parse_range, range_text

State = dict[str, Any]
_MARK_DIGITS = 4
"""Digits kept of each shard's mark: enough to say which one changed; the fingerprint says that one did."""
_Count = Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class SizeFrom:
    """The size of each lane's pool from some draws on: other settings may come into force at a resume."""

    at: tuple[int, ...]
    """The entries drawn from each lane when this came into force."""
    entries: int
    threshold: int
    most_rows: int | None

    def of_lane(self, lane: int) -> PoolSize:
        return PoolSize(self.at[lane], self.entries, self.threshold, self.most_rows)

    def is_like(self, other: SizeFrom) -> bool:
        """Whether both make the same refills."""
        return replace(self, at=()) == replace(other, at=())


@dataclass(slots=True)
class Cursor:
    """A place in a stream."""

    epoch: int = 0
    drawn: list[int] = field(default_factory=list)
    """Entries drawn from each lane in this epoch. Empty: no pass has begun, so there are no lanes yet."""
    sizes: list[SizeFrom] = field(default_factory=list)
    """The sizes of this epoch, the earliest first."""

    @property
    def lanes(self) -> int:
        return len(self.drawn)

    @property
    def is_at_start(self) -> bool:
        return not any(self.drawn)

    def next_epoch(self) -> Cursor:
        """The start of the next epoch, with the current pools."""
        none = (0,) * self.lanes
        return Cursor(self.epoch + 1, list(none), [replace(self.sizes[-1], at=none)])

    def copy(self) -> Cursor:
        return Cursor(self.epoch, list(self.drawn), list(self.sizes))

    def with_size(self, size: SizeFrom) -> None:
        """Let pools have a size from here on."""
        if not self.sizes or not self.sizes[-1].is_like(size):
            self.sizes.append(size)


class SavedShards(msgspec.Struct):
    fingerprint: str
    ranges: list[str]
    marks: str


class SavedState(msgspec.Struct):
    """A state that was saved, with its parts checked."""

    epoch: _Count
    drawn: int
    lanes: int
    seed: int
    shards: SavedShards
    by_lane: list[_Count]
    pool: list[SizeFrom]
    own_lanes: list[int] | None = None

    def __post_init__(self) -> None:
        sizes = self.pool
        is_whole = len(self.by_lane) == self.lanes and sum(self.by_lane) == self.drawn
        is_whole &= all(len(size.at) == self.lanes and size.entries > size.threshold >= 0 for size in sizes)
        is_whole &= bool(sizes) == bool(self.lanes) and not any(at for size in sizes[:1] for at in size.at)
        if not is_whole:
            raise ValueError("numbers that contradict each other")

    @classmethod
    def of(cls, state: Any) -> SavedState:
        try:
            return msgspec.convert(state, cls)
        except msgspec.ValidationError as error:
            what = "this is not the state of a mixed stream"
            remedy = "what state_dict() returned"
            raise PlanError(what, got=shortened(state, 200), reason=error, remedy=remedy) from None

    @property
    def cursor(self) -> Cursor:
        return Cursor(self.epoch, self.by_lane, self.pool)


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


class ShardNames:
    """Numbers and contents of the shards of an epoch, independent of their folders."""

    def __init__(self, files: Sequence[ShardFile], marks: Sequence[str], num_directories: int) -> None:
        """`marks` has a name for the content of each file."""
        pairs = sorted(zip(files, marks, strict=True), key=lambda pair: (pair[0].directory, pair[0].number))
        self.files: list[ShardFile] = [file for file, _ in pairs]
        ordered = [mark for _, mark in pairs]
        self.ranges: list[str] = [range_text(file.number for file in self._of(n)) for n in range(num_directories)]
        """The numbers of the shards of each directory."""
        self.state: dict[str, Any] = {
            "fingerprint": fingerprint([self.ranges, ordered]),
            "ranges": self.ranges,
            "marks": "".join(mark[-_MARK_DIGITS:] for mark in ordered),
        }
        """The part of a state: a name for all shards, and the marks that find changed ones."""

    def _of(self, directory: int) -> list[ShardFile]:
        return [file for file in self.files if file.directory == directory]

    def refuse_others(self, saved: SavedShards) -> None:
        """Raise if a state was saved over other shards, naming them."""
        if saved.fingerprint == self.state["fingerprint"]:
            return
        for directory, (before, now) in enumerate(zip_longest(saved.ranges, self.ranges, fillvalue="none")):
            if before != now:
                self._refuse_other_numbers(directory, before, saved.ranges)
        places = range(0, len(saved.marks), _MARK_DIGITS)
        changed = [
            file.path
            for file, at in zip(self.files, places, strict=True)
            if saved.marks[at : at + _MARK_DIGITS] != self.state["marks"][at : at + _MARK_DIGITS]
        ]
        what = f"{counted(len(changed), 'shard')} changed since this state was saved"
        remedy = "put the files back that were there; or begin again, without this state"
        raise PlanError(what, file=listed(changed, 5), remedy=remedy)

    def _refuse_other_numbers(self, directory: int, before: str, ranges: list[str]) -> NoReturn:
        files = self._of(directory)
        new = {file.number for file in files}
        old = {n for first, last in parse_range(before).stretches or () for n in range(first, last + 1)}
        raise PlanError(
            "shards were added or taken away since this state was saved, or directories have changed places",
            parameter="shard_ranges",
            directory=next((os.path.dirname(file.path) for file in files), directory),
            added=range_text(new - old),
            taken_away=range_text(old - new),
            remedy=f"the data_dirs of that run, and shard_ranges={ranges!r}; new shards are for the next run, or the "
            "next epoch's dataset",
        )
