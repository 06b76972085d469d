"""The plan of a mixed stream: its shards, its pool and its seed. A plan and a cursor determine all draws."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchwright.base.errors import MemoryLimitError
from batchwright.columns.shard import row_bytes
from batchwright.order.mixing_report import MixingReport, mixing_report
from batchwright.order.refills import Names, NoRoom, Refills, generations
from batchwright.pool.memory import MemoryReport, Needs, check_machine
from batchwright.pool.refilled import RefilledPool, Room
from batchwright.pool.shards import LaneShards, ShardSet
from batchwright.pool.state import Cursor, SizeFrom


def lane_sizes(num_rows: int, lanes: int, factor: int = 1) -> list[int]:
    """The number of entries of an epoch in each lane.

    >>> lane_sizes(10, 4)
    [3, 3, 2, 2]
    """
    return [max(0, -(-(num_rows - lane) // lanes)) * factor for lane in range(lanes)]


@dataclass(frozen=True, slots=True)
class TracedPosition:
    """The row of a file that an entry of the stream is."""

    lane: int
    draw: int
    """Its number among the draws of its lane in this epoch."""
    file: str
    row: int
    which: int
    """Its number among the augmented entries of the row: 0 is the row as it was stored."""


@dataclass(frozen=True, kw_only=True)
class PoolPlan:
    """The mixing of positions. `lanes_here` is always the number of lanes of one rank, which share its memory."""

    shards: ShardSet
    seed: int
    factor: int
    """Entries that each row gives."""
    pool_entries: int
    threshold: int
    max_memory_bytes: int
    in_order: bool = False
    """Whether positions are not mixed. One shard is in memory at a time, and read in its own order."""
    verbose: bool = False

    def lane_sizes(self, lanes: int) -> list[int]:
        """Entries of an epoch in each lane."""
        return lane_sizes(self.shards.num_rows, lanes, self.factor)

    # Sizes

    @property
    def needs(self) -> Needs:
        return Needs(row_bytes(self.shards.schema), self.factor, self.shards.decode_bytes)

    def size(self, drawn: Sequence[int], lanes_here: int) -> SizeFrom:
        """The size of each lane's pool from these draws on."""
        lanes = len(drawn)
        entries = self._entries(lanes)
        threshold = min(self._threshold(lanes), entries - 1)
        most_rows = self._most_rows(lanes, lanes_here)
        if most_rows >= self._rows_at_most(lanes):
            return SizeFrom(tuple(drawn), entries, threshold, None)
        return SizeFrom(tuple(drawn), entries, threshold, most_rows)

    def bytes_of(self, rows: int, lanes: int, lanes_here: int) -> int:
        """Bytes that the lanes of a rank take with `rows` rows in each."""
        return self.needs.bytes_of(rows, self._entries(lanes)) * max(1, lanes_here)

    def _entries(self, lanes: int) -> int:
        if self.in_order:
            return 1
        return max(1, self.pool_entries // lanes)

    def _threshold(self, lanes: int) -> int:
        if self.in_order:
            return 0
        return self.threshold // lanes

    def _most_rows(self, lanes: int, lanes_here: int) -> int:
        """Rows that a lane may hold by the memory limit."""
        return self.needs.most_rows(self.max_memory_bytes // max(1, lanes_here), self._entries(lanes))

    def _rows_at_most(self, lanes: int) -> int:
        """The most rows that a lane ever holds, for any limit."""
        most_added = self._largest_share(lanes)[1] * self.factor
        return min(-(-self.shards.num_rows // lanes), self._entries(lanes) + most_added)

    def _largest_share(self, lanes: int) -> tuple[int, int]:
        """(shard, rows) of the largest share that a lane has of a shard."""
        rows, shard = max((self.shards.rows(shard), -shard) for shard in range(self.shards.num_shards))
        return -shard, -(-rows // lanes)

    def _rows_for_any_refill(self, lanes: int) -> int:
        """Rows that a lane must be able to hold for any refill to bring a shard."""
        threshold = self._threshold(lanes)  # entries: each may be of another row
        return min(-(-self.shards.num_rows // lanes), threshold + self._largest_share(lanes)[1])

    # Draws

    def open(self, cursor: Cursor, mine: Sequence[int], lanes_here: int) -> dict[int, RefilledPool]:
        """The pools of some lanes, at a cursor."""
        lanes, most_rows = cursor.lanes, self._most_rows(cursor.lanes, lanes_here)
        room = Room(
            most_rows=most_rows,
            rows=min(most_rows, self._rows_at_most(lanes)),
            headroom_rows=self.needs.headroom_rows(self._entries(lanes)),
            check=check_machine,
        )
        pools = {}
        for lane in mine:
            rows = self._lane_shards(lane, lanes, self.max_memory_bytes // max(1, lanes_here))
            refills = self._refills(rows, cursor, lane)
            names = self._names(cursor.epoch, lane)
            pools[lane] = RefilledPool(rows, refills, cursor.drawn[lane], self.shards.schema, room, names)
        return pools

    def drawn_from(self, cursor: Cursor, lane: int) -> Iterator[tuple[NDArray[np.int64], int]]:
        """(entries, number of entries before them) of a lane in an epoch, from one refill to the next. Nothing is
        read: an entry is row * factor + which, by the row's number in the lane. Ends if memory would run out."""
        rows = self._lane_shards(lane, cursor.lanes, self.max_memory_bytes)
        with suppress(NoRoom):
            for generation in generations(self._refills(rows, cursor, lane), self._names(cursor.epoch, lane)):
                begin = generation.refill.at
                yield generation.order[: generation.until - begin].astype(np.int64), begin

    def _lane_shards(self, lane: int, lanes: int, budget: int) -> LaneShards:
        return LaneShards(
            self.shards, lane, lanes, chunk_rows=self.needs.chunk_rows, budget=budget, verbose=self.verbose
        )

    def _refills(self, rows: LaneShards, cursor: Cursor, lane: int) -> Refills:
        sizes = [size.of_lane(lane) for size in cursor.sizes]
        return Refills(rows.rows_of, self.shards.num_shards, sizes, self.factor)

    def _names(self, epoch: int, lane: int) -> Names:
        if self.in_order:
            return None
        return self.seed, "pool", epoch, lane

    # Reports

    def trace(self, cursor: Cursor, lane: int, first: int, count: int) -> list[TracedPosition]:
        """The rows that are the draws [first, first + count) of a lane."""
        entries = self._entries_of(cursor, lane, first, first + count)
        rows, which = np.divmod(entries, self.factor)
        places = rows * cursor.lanes + lane
        return [
            TracedPosition(
                lane,
                first + number,
                self.shards.files[shard].path,
                int(places[number]) - self.shards.starts[shard],
                int(which[number]),
            )
            for number, shard in enumerate(self._shards_of(places).tolist())
        ]

    def mixing(self, cursor: Cursor, block: int, most_draws: int) -> MixingReport:
        """Measure the mixing of the epoch of a cursor. Its lanes take turns of a block."""
        most = -(-most_draws // cursor.lanes)
        of_lanes = [
            self._entries_of(cursor, lane, 0, most) // self.factor * cursor.lanes + lane for lane in range(cursor.lanes)
        ]
        turns = range(0, max(map(len, of_lanes)), block)
        places = np.concatenate([rows[turn : turn + block] for turn in turns for rows in of_lanes])
        directories = np.array([file.directory for file in self.shards.files])
        return mixing_report(directories[self._shards_of(places)], places, block=block, seed=self.seed)

    def _entries_of(self, cursor: Cursor, lane: int, first: int, last: int) -> NDArray[np.int64]:
        """The entries that are the draws [first, last) of a lane."""
        parts = [np.empty(0, np.int64)]
        for entries, begin in self.drawn_from(cursor, lane):
            parts.append(entries[max(0, first - begin) : max(0, last - begin)])
            if begin + len(entries) >= last:
                break
        return np.concatenate(parts)

    def _shards_of(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The shard of each row of the sequence."""
        shards: NDArray[np.int64] = np.searchsorted(self.shards.starts, places, "right") - 1
        return shards

    # The memory limit

    def limit_warning(self, cursor: Cursor, lanes_here: int) -> str | None:
        """The effect of the memory limit on this epoch. None if it has none."""
        lanes, most_rows = cursor.lanes, cursor.sizes[-1].most_rows
        rows = self._rows_for_any_refill(lanes)
        if most_rows is None or rows <= most_rows:
            return None
        shard, largest = self._largest_share(lanes)
        if largest > most_rows:
            error = self.limit_error(NoRoom(shard, 0, largest, most_rows), cursor, lanes_here, 0)
            return f"a refill of this epoch may have no room: {error}"
        return (
            f"{self._limit} holds {most_rows * lanes:,} rows: no room for a shard beside "
            f"refill_threshold={self.threshold:,}, so refills come later and the pool mixes less. What fits is "
            f"pool_size={most_rows * lanes}, refill_threshold={(most_rows - largest) * lanes}; what was asked for "
            f"takes {_setting_for(self.bytes_of(rows, lanes, lanes_here))}"
        )

    def limit_error(self, refused: BaseException, cursor: Cursor, lanes_here: int, pool_bytes: int) -> MemoryLimitError:
        """The error for a refill that had no room, with a report; its `state` is for the caller to add."""
        decode_bytes, shard, needed = self.shards.decode_bytes * lanes_here, None, 0
        if isinstance(refused, NoRoom):
            rows = max(refused.held_rows + refused.shard_rows, self._rows_for_any_refill(cursor.lanes))
            needed = self.bytes_of(rows, cursor.lanes, lanes_here)
            headline, shard = self._no_room(refused, self.bytes_of(0, cursor.lanes, lanes_here))
            remedy = f"{_setting_for(needed)} is enough for every refill; or smaller shards, or fewer workers"
        else:
            headline = f"the machine has no memory left for a refill: {refused or 'none was given'}"
            remedy = "a smaller pool_size, fewer workers, or a machine with more memory"
        report = MemoryReport.now(
            limit=self.max_memory_bytes,
            pool=pool_bytes,
            shards=decode_bytes,
            needed=max(0, needed - pool_bytes - decode_bytes),
        )
        error = MemoryLimitError(
            headline,
            shard=shard,
            drawn=f"{sum(cursor.drawn):,} in epoch {cursor.epoch}",
            memory=str(report),
            remedy=f"{remedy}; load_state_dict(error.state) then goes on where this ended",
        )
        error.report = report
        return error

    def _no_room(self, refused: NoRoom, bytes_without_rows: int) -> tuple[str, str | None]:
        """(headline, shard)."""
        if bytes_without_rows > self.max_memory_bytes:
            what = f"{self._limit} is less than decoding a shard and reading ahead take, without any pool"
            return what, self.shards.hardest
        if refused.shard is None:
            return f"the {refused.held_rows:,} rows that are left in the pool do not fit under {self._limit}", None
        most_rows = f"{self._limit}, which holds {refused.most_rows:,}"
        what = f"a shard with {refused.shard_rows:,} rows does not fit under {most_rows}"
        return what, self.shards.files[refused.shard].path

    @property
    def _limit(self) -> str:
        return f"max_memory_gb={self.max_memory_bytes / 10**9:g}"


def _setting_for(num_bytes: int) -> str:
    """The limit that holds this much, rounded up."""
    return f"max_memory_gb={math.ceil(num_bytes / 10**7) / 100:g}"
