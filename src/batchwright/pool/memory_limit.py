"""Errors and warnings about the memory limit, with settings that would fit."""

from __future__ import annotations

import math

from batchwright.base.errors import MemoryLimitError
from batchwright.order.refills import NoRoom
from batchwright.pool.memory import MemoryReport
from batchwright.pool.plan import PoolPlan
from batchwright.pool.state import Cursor

__all__ = ["limit_error", "limit_warning"]


def limit_warning(plan: PoolPlan, cursor: Cursor, lanes_here: int) -> str | None:
    """The effect of the memory limit on this epoch. None if it has none."""
    lanes, most_rows = cursor.lanes, cursor.sizes[-1].most_rows
    rows = plan.rows_for_any_refill(lanes)
    if most_rows is None or rows <= most_rows:
        return None
    shard, largest = plan.largest_share(lanes)
    if largest > most_rows:
        error = limit_error(plan, NoRoom(shard, 0, largest, most_rows), cursor, lanes_here, 0)
        return f"a refill of this epoch may have no room: {error}"
    return (
        f"{_limit(plan)} holds {most_rows * lanes:,} rows: no room for a shard beside "
        f"refill_threshold={plan.threshold:,}, so refills come later and the pool mixes less. What fits is "
        f"pool_size={most_rows * lanes}, refill_threshold={(most_rows - largest) * lanes}; what was asked for "
        f"takes {_setting_for(plan.bytes_of(rows, lanes, lanes_here))}"
    )


def limit_error(
    plan: PoolPlan, refused: BaseException, cursor: Cursor, lanes_here: int, pool_bytes: int
) -> MemoryLimitError:
    """The error for a refill that had no room, with a report; its `state` is for the caller to add."""
    decode_bytes, shard, needed = plan.shards.decode_bytes * lanes_here, None, 0
    if isinstance(refused, NoRoom):
        rows = max(refused.held_rows + refused.shard_rows, plan.rows_for_any_refill(cursor.lanes))
        needed = plan.bytes_of(rows, cursor.lanes, lanes_here)
        headline, shard = _no_room(plan, refused, plan.bytes_of(0, cursor.lanes, lanes_here))
        remedy = f"{_setting_for(needed)} is enough for every refill; or smaller shards, or fewer workers"
    else:
        headline = f"the machine has no memory left for a refill: {refused or 'none was given'}"
        remedy = "a smaller pool_size, fewer workers, or a machine with more memory"
    report = MemoryReport.now(
        limit=plan.max_memory_bytes,
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


def _no_room(plan: PoolPlan, refused: NoRoom, bytes_without_rows: int) -> tuple[str, str | None]:
    """(headline, shard)."""
    if bytes_without_rows > plan.max_memory_bytes:
        return f"{_limit(plan)} is less than decoding a shard and reading ahead take, without any pool", (
            plan.shards.hardest
        )
    if refused.shard is None:
        return f"the {refused.held_rows:,} rows that are left in the pool do not fit under {_limit(plan)}", None
    path = plan.shards.files[refused.shard].path
    return (
        f"a shard with {refused.shard_rows:,} rows does not fit under {_limit(plan)}, which holds {refused.most_rows:,}"
    ), path


def _limit(plan: PoolPlan) -> str:
    return f"max_memory_gb={plan.max_memory_bytes / 10**9:g}"


def _setting_for(num_bytes: int) -> str:
    """The limit that holds this much, rounded up."""
    return f"max_memory_gb={math.ceil(num_bytes / 10**7) / 100:g}"
