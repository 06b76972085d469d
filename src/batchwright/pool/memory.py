"""Memory of a pool: its needs, computed before it is filled, and its current use, for a report."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from batchwright.base.machine import anonymous_bytes, available_bytes
from batchwright.base.words import bytes_in_words

_CHUNK_BYTES = 2 << 20
ENTRY_BYTES = 28
"""Bytes per entry: its number in two orders and in the second while it is made (4 each), and its hash while they are
permuted (8, and 8 for sorting)."""
_SPARE_BYTES = 64 << 20
"""Memory of the machine that is left to others."""


@dataclass(frozen=True, slots=True)
class Needs:
    """The needs of one lane's pool, from facts that are known before anything is read."""

    row_bytes: int
    factor: int
    decode_bytes: int
    """Bytes for decoding the largest shard."""

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
        """Most bytes that a pool of `rows` rows takes, with all that is needed to refill it."""
        fixed = (self.headroom_rows(pool_entries) + 2 * self.chunk_rows) * self.row_bytes + self.decode_bytes
        return rows * self._bytes_of_a_row + fixed

    def most_rows(self, limit_bytes: int, pool_entries: int) -> int:
        """The rows that fit under a limit. 0 if the limit is below the needs of any pool."""
        return max(0, (limit_bytes - self.bytes_of(0, pool_entries)) // self._bytes_of_a_row)

    @property
    def _bytes_of_a_row(self) -> int:
        return self.row_bytes + ENTRY_BYTES * self.factor


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """The memory of a pool by purpose, in bytes."""

    limit: int
    """`max_memory_gb`, for this process: workers share it."""
    pool: int
    """Rows in memory, and the numbers that order them."""
    shards: int
    """Most bytes for decoding a shard."""
    needed: int
    """Bytes that the next refill needs beyond `pool`; 0 if no refill was refused."""
    ours: int
    """pool and shards."""
    rss: int
    """Memory of this process in all, mapped files not counted."""
    machine_free: int

    @classmethod
    def now(cls, *, limit: int, pool: int, shards: int, needed: int = 0) -> MemoryReport:
        return cls(limit, pool, shards, needed, pool + shards, anonymous_bytes(), available_bytes())

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        """
        >>> print(MemoryReport(5 * 10**9, 3 * 10**9, 25 * 10**7, 0, 325 * 10**7, 4 * 10**9, 10**9))
        limit 5.0 GB, ours 3.2 GB (pool 3.0 GB, shards 250.0 MB), process 4.0 GB, machine free 1.0 GB
        """
        words = {name: bytes_in_words(value) for name, value in asdict(self).items()}
        text = "limit {limit}, ours {ours} (pool {pool}, shards {shards}), "
        if self.needed:
            text += "the next refill needs {needed} more, "
        return (text + "process {rss}, machine free {machine_free}").format(**words)


class MachineFull(Exception):
    """The machine lacks the memory for a refill. Nothing was read."""


def check_machine(num_bytes: int) -> None:
    """Raise unless the machine can give this much, and still has something left."""
    if not num_bytes:
        return
    free = available_bytes()
    if free < num_bytes + _SPARE_BYTES:
        raise MachineFull(f"{bytes_in_words(num_bytes)} more are needed, and {bytes_in_words(free)} are free")
