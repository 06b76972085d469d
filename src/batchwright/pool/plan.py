"""What a mixed stream is: its shards, its pool and its seed. Everything that is drawn follows from it and a cursor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchwright.base.machine import available_bytes
from batchwright.columns.shard import row_bytes
from batchwright.order.mixing_report import MixingReport, mixing_report
from batchwright.order.refills import Names, NoRoom, Refills, generations
from batchwright.pool.draws import Draws
from batchwright.pool.lane import Room
from batchwright.pool.memory import MachineFull, Needs, machine_has
from batchwright.pool.shards import LaneShards, ShardSet
from batchwright.pool.state import Cursor, SizeFrom
from batchwright.pool.turns import lane_sizes

__all__ = ["PoolPlan", "TracedPosition"]


@dataclass(frozen=True, slots=True)
class TracedPosition:
    """Which row of which file an entry of the stream is."""

    lane: int
    draw: int
    """Its number among the draws of its lane in this epoch."""
    file: str
    row: int
    which: int
    """Which of its augmented entries: 0 is the row as it was stored."""


@dataclass(frozen=True, kw_only=True)
class PoolPlan:
    """How positions are mixed. `lanes_here` is always the number of lanes of one rank, which share its memory."""

    shards: ShardSet
    seed: int
    factor: int
    """Entries that each row gives."""
    pool_entries: int
    threshold: int
    max_memory_bytes: int
    in_order: bool = False
    """Nothing is mixed: one shard is held at a time, and read as it is."""
    verbose: bool = False

    def lane_sizes(self, lanes: int) -> list[int]:
        """Entries of an epoch in each lane."""
        return lane_sizes(self.shards.num_rows, lanes, self.factor)

    # Sizes

    @property
    def needs(self) -> Needs:
        return Needs(row_bytes(self.shards.schema), self.factor, self.shards.decode_bytes)

    def size(self, drawn: Sequence[int], lanes_here: int) -> SizeFrom:
        """How large each lane's pool is from these draws on."""
        most, lanes = self._most_rows(len(drawn), lanes_here), len(drawn)
        # Not by what was decoded so far: processes differ in that, and their states must not.
        is_unlimited = self.shards.is_counted_by_headers and most >= self._rows_at_most(lanes)
        most_rows = None if is_unlimited else most
        entries = self._entries(lanes)
        threshold = 0 if self.in_order else min(self.threshold // lanes, entries - 1)
        return SizeFrom(tuple(drawn), entries, threshold, most_rows)

    def lane_limit(self, lanes_here: int) -> int:
        """Bytes that each lane may take."""
        return self.max_memory_bytes // max(1, lanes_here)

    def bytes_of(self, rows: int, lanes: int, lanes_here: int) -> int:
        """What the lanes of a rank take with so many rows in each."""
        return self.needs.bytes_of(rows, self._entries(lanes)) * max(1, lanes_here)

    def _entries(self, lanes: int) -> int:
        return 1 if self.in_order else max(1, self.pool_entries // lanes)

    def _most_rows(self, lanes: int, lanes_here: int) -> int:
        """Rows that a lane may hold by the memory limit."""
        return self.needs.most_rows(self.lane_limit(lanes_here), self._entries(lanes))

    def _rows_at_most(self, lanes: int) -> int:
        """Rows that a lane ever holds, whatever the limit. Where shards must be decoded to tell: about."""
        rows = self.shards.known_rows
        if rows is None:
            needs = self.needs
            return self._entries(lanes) + needs.decode_bytes // needs.row_bytes
        return min(-(-rows // lanes), self._entries(lanes) + self.largest_share(lanes) * self.factor)

    def largest_share(self, lanes: int) -> int:
        """Rows that a lane has of a shard, at most."""
        return -(-max(self.shards.rows(shard) for shard in range(self.shards.num_shards)) // lanes)

    def rows_for_any_refill(self, lanes: int) -> int:
        """Rows that a lane must be able to hold for any refill to bring a shard, as far as that is known."""
        threshold = 0 if self.in_order else self.threshold // lanes  # entries: each may be of another row
        if self.shards.known_rows is None:
            return threshold
        return min(-(-self.shards.known_rows // lanes), threshold + self.largest_share(lanes))

    def foreseen_stop(self, cursor: Cursor) -> tuple[int, NoRoom] | None:
        """(draws, what is refused) where memory will end the epoch of the first lane, if numbers can tell."""
        if self.shards.known_rows is None or self.factor > 1 or cursor.sizes[-1].most_rows is None:
            return None
        refills = self._refills(self._lane_shards(0, cursor.lanes, None), cursor, 0)
        while (due := refills.due()) is not None:
            try:
                refills.next(refills.end() - due)  # one entry for each row
            except NoRoom as refused:
                return due, refused
        return None

    # Draws

    def open(self, cursor: Cursor, mine: Sequence[int], lanes_here: int) -> Draws:
        """The pools of some lanes, at a cursor."""
        lanes, most_rows = cursor.lanes, self._most_rows(cursor.lanes, lanes_here)
        rows = {lane: self._lane_shards(lane, lanes, self.lane_limit(lanes_here)) for lane in mine}
        room = Room(
            most_rows=most_rows,
            rows=min(most_rows, self._rows_at_most(lanes)),
            headroom_rows=self.needs.headroom_rows(self._entries(lanes)),
            check=_check_machine,
        )
        return Draws(
            {lane: (rows[lane], self._refills(rows[lane], cursor, lane), cursor.drawn[lane]) for lane in mine},
            self.shards.schema,
            room=room,
            names={lane: self._names(cursor.epoch, lane) for lane in mine},
        )

    def drawn_from(self, cursor: Cursor, lane: int) -> Iterator[tuple[NDArray[np.int64], int]]:
        """(entries, how many were drawn before them) of a lane in an epoch, from one refill to the next. Nothing is
        read: an entry is row * factor + which, by the row's number in the lane. Ends where memory would end it."""
        with closing(self._lane_shards(lane, cursor.lanes, self.max_memory_bytes)) as rows, suppress(NoRoom):
            for generation in generations(self._refills(rows, cursor, lane), self._names(cursor.epoch, lane)):
                begin = generation.refill.at
                yield generation.order[: generation.until - begin].astype(np.int64), begin

    def _lane_shards(self, lane: int, lanes: int, budget: int | None) -> LaneShards:
        return LaneShards(
            self.shards, lane, lanes, chunk_rows=self.needs.chunk_rows, budget=budget, verbose=self.verbose
        )

    def _refills(self, rows: LaneShards, cursor: Cursor, lane: int) -> Refills:
        sizes = [size.of_lane(lane) for size in cursor.sizes]
        return Refills(rows.rows_of, self.shards.num_shards, sizes, self.factor)

    def _names(self, epoch: int, lane: int) -> Names:
        return None if self.in_order else (self.seed, "pool", epoch, lane)

    # Where entries come from

    def trace(self, cursor: Cursor, lane: int, first: int, count: int) -> list[TracedPosition]:
        """Which rows the draws [first, first + count) of a lane are."""
        traced: list[TracedPosition] = []
        for entries, begin in self.drawn_from(cursor, lane):
            here = entries[max(0, first - begin) : max(0, first + count - begin)]
            traced += [self._traced(cursor, lane, max(first, begin) + n, int(entry)) for n, entry in enumerate(here)]
            if begin + len(entries) >= first + count:
                break
        return traced

    def _traced(self, cursor: Cursor, lane: int, draw: int, entry: int) -> TracedPosition:
        row, which = divmod(entry, self.factor)
        place = row * cursor.lanes + lane
        shard = self._shards_of(np.array([place]))[0]
        return TracedPosition(lane, draw, self.shards.files[shard].path, place - self.shards.start(shard), which)

    def mixing(self, cursor: Cursor, block: int, most_draws: int) -> MixingReport:
        """How well the epoch of a cursor is mixed: its lanes take turns of a block."""
        places = self._places(cursor, block, most_draws)
        directories = np.array([file.directory for file in self.shards.files])
        return mixing_report(directories[self._shards_of(places)], places, block=block, seed=self.seed)

    def _places(self, cursor: Cursor, block: int, most_draws: int) -> NDArray[np.int64]:
        """Which rows of the sequence are drawn, in order."""
        most = -(-most_draws // cursor.lanes)
        of_lanes = []
        for lane in range(cursor.lanes):
            parts = [np.empty(0, np.int64)]
            for entries, begin in self.drawn_from(cursor, lane):
                parts.append(entries[: most - begin] // self.factor * cursor.lanes + lane)
                if begin + len(entries) >= most:
                    break
            of_lanes.append(np.concatenate(parts))
        turns = range(0, max(map(len, of_lanes)), block)
        return np.concatenate([rows[turn : turn + block] for turn in turns for rows in of_lanes])

    def _shards_of(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The shard in which each row of the sequence lies."""
        starts = [self.shards.start(shard) for shard in range(self.shards.num_shards)]
        shards: NDArray[np.int64] = np.searchsorted(starts, places, "right") - 1
        return shards


def _check_machine(num_bytes: int) -> None:
    if num_bytes and not machine_has(num_bytes):
        raise MachineFull(
            f"{num_bytes / 10**9:.2f} GB more are needed, and {available_bytes() / 10**9:.2f} GB are free"
        )
