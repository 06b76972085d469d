"""What is said where memory ends a stream: what did not fit, what is held, and which settings would do."""

from __future__ import annotations

import math

from batchwright.errors import MemoryLimitError
from batchwright.order.refills import NoRoom
from batchwright.pool.memory import MemoryReport
from batchwright.pool.plan import PoolPlan
from batchwright.pool.state import Cursor

__all__ = ["limit_error"]


def limit_error(
    plan: PoolPlan, refused: BaseException, cursor: Cursor, lanes_here: int, pool_bytes: int
) -> MemoryLimitError:
    """The error for a refill that had no room, with a report; its `state` is for the caller to add."""
    if isinstance(refused, NoRoom):
        headline, shard, needed, remedy = _no_room(plan, refused, cursor.lanes, lanes_here)
    else:
        headline, shard, needed = f"the machine has no memory left for a refill: {refused or 'none was given'}", None, 0
        remedy = "a smaller pool_size, fewer workers, or a machine with more memory"
    report = MemoryReport.now(
        limit=plan.max_memory_bytes,
        pool=pool_bytes,
        shards=plan.shards.decode_bytes * lanes_here,
        needed=max(0, needed - pool_bytes - plan.shards.decode_bytes * lanes_here),
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


def _no_room(plan: PoolPlan, refused: NoRoom, lanes: int, lanes_here: int) -> tuple[str, str | None, int, str]:
    """(headline, shard, bytes that all lanes of a rank need at most, remedy)."""
    limit = f"max_memory_gb={plan.max_memory_bytes / 10**9:g}"
    rows = max(refused.held_rows + refused.shard_rows, plan.rows_for_any_refill(lanes))
    needed = plan.bytes_of(rows, lanes, lanes_here)
    enough = f"max_memory_gb={math.ceil(needed / 10**7) / 100:g} is enough for every refill"
    if plan.bytes_of(0, lanes, lanes_here) > plan.max_memory_bytes:
        headline = f"{limit} is less than decoding a shard and reading ahead take, without any pool"
        return headline, plan.shards.hardest, needed, f"{enough}; or smaller shards, or fewer workers"
    if refused.shard is None:
        headline = f"the {refused.held_rows:,} rows that are left in the pool do not fit under {limit}"
        return headline, None, needed, enough
    headline = (
        f"not one more shard fits under {limit}: {refused.held_rows:,} rows are in the pool, and "
        f"{refused.shard_rows:,} come with the next"
    )
    largest = refused.shard_rows if plan.shards.known_rows is None else plan.largest_share(lanes)
    smaller = (refused.most_rows - largest) * lanes  # entries: each may be of another row
    if smaller > 0 and plan.shards.known_rows is not None:
        enough += f"; or pool_size={max(refused.most_rows * lanes, smaller + 1)}, refill_threshold={smaller}"
    return headline, plan.shards.files[refused.shard].path, needed, f"{enough}; or smaller shards"
