"""Some lanes of a mixed stream: each a pool of its own, drawn from by number."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from batchwright.base.memory import BlockPool
from batchwright.columns.shard import Schema
from batchwright.order.refills import Names, Refills
from batchwright.pool.lane import Columns, Lane, LaneRows, Room
from batchwright.pool.records import Layout

__all__ = ["Draws"]


class Draws:
    """The lanes that this process draws from. Threads read for them until it is closed."""

    def __init__(
        self,
        lanes: Mapping[int, tuple[LaneRows, Refills, int]],
        schema: Schema,
        *,
        room: Room,
        names: Mapping[int, Names],
    ) -> None:
        """`lanes`: of each its rows, its refills and how many were drawn before. `room`: what each may take."""
        self._layout = Layout(schema)
        self._memory = BlockPool(arrays_per_block=len(schema))
        self._lanes = {
            lane: Lane(rows, refills, drawn, self._layout, room, names[lane])
            for lane, (rows, refills, drawn) in lanes.items()
        }

    def take(self, lane: int, most: int) -> tuple[Columns, NDArray[np.int64] | None]:
        """The next entries of a lane, by column, and which entry of its row each is; fewer at the end, or before what
        stopped the reader, which the next call raises."""
        records, which = self._lanes[lane].draw(most)
        return self._layout.unpack(records, self._memory), which

    def is_at_end(self, lane: int) -> bool:
        """Whether everything of a lane was drawn."""
        return self._lanes[lane].is_at_end

    @property
    def num_bytes(self) -> int:
        """What the pools have in memory."""
        return sum(lane.num_bytes for lane in self._lanes.values())

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.stop()
        for lane in self._lanes.values():
            lane.close()
