"""What is said where memory ends a stream: what did not fit, what is held, and which settings would do."""

from __future__ import annotations

import math

from batchwright.base.errors import MemoryLimitError
from batchwright.order.refills import NoRoom
from batchwright.pool.memory import MemoryReport
from batchwright.pool.plan import PoolPlan
from batchwright.pool.state import Cursor

__all__ = ["limit_error", "smaller_pool"]


def smaller_pool(plan: PoolPlan, cursor: Cursor, lanes_here: int) -> str | None:
    """What to say of a limit under which refills come later than `refill_threshold` says; None where they do not."""
    lanes, most_rows = cursor.lanes, cursor.sizes[-1].most_rows
    rows = plan.rows_for_any_refill(lanes)
    largest = 1 if plan.shards.known_rows is None else plan.largest_share(lanes)
    if most_rows is None or not largest <= most_rows < rows:  # without room for a shard there is an error to come
        return None
    asked = math.ceil(plan.bytes_of(rows, lanes, lanes_here) / 10**7) / 100
    return (
        f"max_memory_gb={plan.max_memory_bytes / 10**9:g} holds {most_rows * lanes:,} rows: no room for a shard beside "
        f"refill_threshold={plan.threshold:,}, so refills come later and the pool mixes less. What fits is "
        f"pool_size={most_rows * lanes}, refill_threshold={(most_rows - largest) * lanes}; what was asked for "
        f"takes max_memory_gb={asked:g}"
    )


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
    headline = f"a shard with {refused.shard_rows:,} rows does not fit under {limit}, which holds {refused.most_rows:,}"
    return headline, plan.shards.files[refused.shard].path, needed, f"{enough}; or smaller shards"
