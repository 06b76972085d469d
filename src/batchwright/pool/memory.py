"""What a pool takes of memory: what it will take, computed before it does, and what it takes, for a report."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from batchwright.base.machine import anonymous_bytes, available_bytes

__all__ = ["ENTRY_BYTES", "MachineFull", "MemoryReport", "Needs", "machine_has"]

_CHUNK_BYTES = 2 << 20
ENTRY_BYTES = 28
"""Of an entry: its number in two orders and in what becomes the second (4 each), and its hash while they are permuted
(8, and 8 for what sorting needs)."""
_SPARE_BYTES = 64 << 20
"""Of the machine's memory that is left to others."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What one lane's pool needs, from what is known before anything is read."""

    row_bytes: int
    factor: int
    decode_bytes: int
    """What decoding the largest shard takes."""

    @property
    def chunk_rows(self) -> int:
        """Rows that are read at once.

        >>> Needs(row_bytes=304, factor=1, decode_bytes=0).chunk_rows
        6898
        """
        return max(1, min(_CHUNK_BYTES // self.row_bytes, 1 << 16))

    def headroom_rows(self, pool_entries: int) -> int:
        """Places beyond the pool, so that reading is ahead of drawing: a 64th of it, and two chunks at least."""
        return max(2 * self.chunk_rows, pool_entries // self.factor // 64)

    def bytes_of(self, rows: int, pool_entries: int) -> int:
        """What a pool with so many rows takes at most, with all that is needed to refill it."""
        fixed = (self.headroom_rows(pool_entries) + 2 * self.chunk_rows) * self.row_bytes + self.decode_bytes
        return rows * self._bytes_of_a_row + fixed

    def most_rows(self, limit_bytes: int, pool_entries: int) -> int:
        """Rows that fit under a limit: none, where the limit does not hold what any pool needs."""
        return max(0, (limit_bytes - self.bytes_of(0, pool_entries)) // self._bytes_of_a_row)

    @property
    def _bytes_of_a_row(self) -> int:
        return self.row_bytes + ENTRY_BYTES * self.factor


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Where the memory is. All in bytes."""

    limit: int
    """`max_memory_gb`, for this process: workers share it."""
    pool: int
    """Rows in memory, and the numbers that order them."""
    shards: int
    """What decoding a shard takes at most."""
    needed: int
    """What the next refill needs beyond `pool`; 0 where nothing was refused."""
    ours: int
    """pool and shards."""
    rss: int
    """What this process holds in all, mapped files not counted."""
    machine_free: int

    @classmethod
    def now(cls, *, limit: int, pool: int, shards: int, needed: int = 0) -> MemoryReport:
        return cls(limit, pool, shards, needed, pool + shards, anonymous_bytes(), available_bytes())

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        """
        >>> print(MemoryReport(5 * 10**9, 3 * 10**9, 25 * 10**7, 0, 325 * 10**7, 4 * 10**9, 10**9))
        limit 5.00 GB, ours 3.25 GB (pool 3.00 GB, shards 250 MB), process 4.00 GB, machine free 1.00 GB
        """
        words = {name: _in_words(value) for name, value in asdict(self).items()}
        needed = f", the next refill needs {words['needed']} more" if self.needed else ""
        return (
            f"limit {words['limit']}, ours {words['ours']} (pool {words['pool']}, shards {words['shards']}){needed}, "
            f"process {words['rss']}, machine free {words['machine_free']}"
        )


def _in_words(num_bytes: int) -> str:
    return f"{num_bytes / 10**9:.2f} GB" if num_bytes >= 10**9 else f"{num_bytes / 10**6:,.0f} MB"


class MachineFull(Exception):
    """The machine cannot give what a refill needs. Nothing was read."""


def machine_has(num_bytes: int) -> bool:
    """Whether the machine can give so much, and still has something left."""
    return available_bytes() >= num_bytes + _SPARE_BYTES
