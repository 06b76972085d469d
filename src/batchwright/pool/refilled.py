"""One lane's pool of rows in memory. The caller draws rows, and a thread that reads ahead refills the pool.

A new row takes the place of a drawn one, so the pool needs no second copy of itself. While one generation is drawn, the
thread writes the rows of the next into the free places, and a second thread permutes their numbers. At the refill the
caller only switches to the next order. If reading is slower than drawing, the caller waits a little before every draw,
and not for long at the refill. The threads never change the order of draws.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.base.errors import PlanError
from batchwright.base.memory import BlockPool
from batchwright.columns.shard import Column, Schema
from batchwright.order.refills import Names, NoRoom, Refills, mixed_in, refill_key, replay
from batchwright.pool.memory import ENTRY_BYTES
from batchwright.pool.shards import Columns, LaneShards

log: logging.Logger = logging.getLogger("batchwright")
Records = NDArray[np.void]
_AHEAD = 0.25
"""The lead of draws over reading at the start of a generation, as a part of it. It shrinks towards the end."""
_FEWEST_PLACED = 1024
"""Rows for which there must be a place before some of a chunk are written."""
_PATIENCE_SECONDS = 1.0
"""After which a reader looks by itself whether anybody still draws."""
_LOOKED_UP_AT_ONCE = 1 << 18


@dataclass(frozen=True, slots=True)
class Room:
    """The memory that a lane's pool may take."""

    most_rows: int
    """Rows that it may hold, by the memory limit."""
    rows: int
    """Rows that it will hold, as far as that is known: it may grow beyond."""
    headroom_rows: int
    """Places beyond those, so that reading can be ahead of drawing."""
    check: Callable[[int], None]
    """Called with the bytes of new memory that a refill will touch; raises if the machine does not have them."""


@dataclass(frozen=True, slots=True)
class _Generation:
    """The draws between two refills, as places in memory."""

    number: int
    order: NDArray[Any]
    """place * factor + which, in the order of drawing."""
    draws: int
    """The number of them that are drawn before the next refill."""
    is_last: bool


class RefilledPool:
    """Draws of one lane in one epoch, from some draw on."""

    def __init__(
        self, rows: LaneShards, refills: Refills, drawn: int, schema: Schema, room: Room, names: Names
    ) -> None:
        """`names` key the permutations. The thread starts at once: the pool is full when the first draw returns."""
        self._rows, self._refills, self._drawn, self._room, self._names = rows, refills, drawn, room, names
        self._factor = refills.factor
        self._layout, self._memory = RecordLayout(schema), BlockPool(arrays_per_block=len(schema))
        self._records = self._layout.empty(0)
        self._num_opened = 0
        """Places that were ever used."""
        self._free = np.empty(0, np.int32)
        """Places among them that have no row."""

        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # of all that follows
        self._ready: deque[_Generation] = deque()
        self._current: _Generation | None = None
        self._taken = 0
        """Draws made from the current generation."""
        self._share_read = 0.0
        """The share of the next refill that is in its place."""
        self._is_starved = False
        """Whether the reader waits for places, so that waiting for the reader is useless."""
        self._is_closed = False
        self._error: BaseException | None = None
        self._pid = os.getpid()
        self._reader = _PoolThread(target=self._read, name="batchwright-pool", daemon=True)
        self._reader.start()
        _open_pools.add(self)

    # The caller

    def draw(self, most: int) -> tuple[Columns, NDArray[np.int64], int]:
        """The next entries by column, the number of each among the entries of its row, and how many they are: `most`,
        or fewer at the end.

        Raises the error that stopped the reader, once all earlier rows were drawn.
        """
        if os.getpid() != self._pid:
            raise PlanError(
                "this pass was begun by the parent of this process, and its threads are there",
                remedy="begin a pass of its own in each process; load_state_dict() goes to a place in the stream",
            )
        records, which, filled = self._layout.empty(most), np.zeros(most, np.int64), 0
        while filled < most:
            generation = self._generation(may_raise=not filled)
            if generation is None:
                break
            first = self._taken
            num = min(generation.draws - first, most - filled)
            self._keep_pace(generation, first + num)
            places = generation.order[first : first + num]
            if self._factor > 1:
                places, which[filled : filled + num] = np.divmod(places, self._factor)
            np.take(self._records, places, out=records[filled : filled + num], mode="clip")
            filled += num
            with self._changed:
                self._taken += num
                if self._is_starved:
                    self._is_starved = False
                    self._changed.notify_all()
        return self._layout.unpack(records[:filled], self._memory), which[:filled], filled

    def _generation(self, may_raise: bool) -> _Generation | None:
        """The generation from which the next entry is drawn; None if there is none, or an error is to be raised."""
        while (current := self._current) is None or self._taken == current.draws:
            if self._is_closed or self.is_at_end:
                return None
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self._error or self._is_closed)
                if self._ready:
                    self._current, self._taken, self._share_read = self._ready.popleft(), 0, 0.0
                    self._changed.notify_all()
                    continue
            if may_raise and self._error is not None:
                raise self._error
            return None
        return current

    def _keep_pace(self, generation: _Generation, taken: int) -> None:
        """Wait until reading has come nearly as far in the next refill as draws will be in this generation."""
        if generation.is_last:
            return
        progress = taken / generation.draws
        needed = progress - _AHEAD * (1 - progress)
        if self._share_read >= needed:
            return
        with self._changed:
            self._changed.wait_for(
                lambda: self._share_read >= needed or self._is_starved or self._ready or self._error or self._is_closed
            )

    @property
    def is_at_end(self) -> bool:
        current = self._current
        return current is not None and current.is_last and self._taken == current.draws

    @property
    def num_bytes(self) -> int:
        """Memory of the pool: the places used so far, and the numbers of two generations being permuted."""
        with self._changed:
            generations = [*self._ready]
            if self._current is not None:
                generations.append(self._current)
        entries = max((len(generation.order) for generation in generations), default=0)
        return self._num_opened * self._layout.row_bytes + entries * ENTRY_BYTES

    # The end

    def stop(self) -> None:
        """Let the reader end, without waiting for it."""
        self._is_closed = True
        if os.getpid() != self._pid:  # a fork has a copy of the lock, and no thread that would release it
            return
        if self._lock.acquire(timeout=_PATIENCE_SECONDS):  # else the reader sees it when it looks next
            self._changed.notify_all()
            self._lock.release()

    def close(self) -> None:
        """End the reader, and free the rows. Nothing can be drawn any more. May be called from any thread."""
        if os.getpid() == self._pid and not isinstance(threading.current_thread(), _PoolThread):
            # An interrupt may have come right after this thread took the lock: then it is still ours.
            with contextlib.suppress(RuntimeError):
                while True:
                    self._lock.release()
            self.stop()
            self._reader.join()
        else:  # a collector that runs in one of our own threads must not wait for another one
            self.stop()
        self._records, self._current = self._layout.empty(0), None
        self._ready.clear()
        _open_pools.discard(self)

    # The reader

    def _read(self) -> None:
        try:
            number, at, order = 0, self._drawn, self._restore()
            self._publish(number, order, at)
            while (due := self._refills.due()) is not None:
                number += 1
                order = self._refill(number, order, due - at)
                at = due
        except _Closed:
            pass
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _publish(self, number: int, order: NDArray[Any], at: int) -> None:
        draws = max(0, self._refills.until() - at)
        is_last = self._refills.due() is None
        with self._changed:
            self._ready.append(_Generation(number, order, draws, is_last))
            self._changed.notify_all()

    def _restore(self) -> NDArray[Any]:
        """Read the rows that were in the pool after the earlier draws."""
        begun = time.perf_counter()
        order, rows = _placed(replay(self._refills, self._drawn, self._names), self._factor)
        replayed = time.perf_counter()
        if len(rows) > self._room.most_rows:
            raise NoRoom(None, len(rows), 0, self._room.most_rows)
        self._room.check(len(rows) * self._layout.row_bytes)
        self._grow(max(self._room.rows, len(rows)) + self._room.headroom_rows)
        self._num_opened = len(rows)
        self._place(self._rows.pick(rows), np.arange(len(rows), dtype=order.dtype), lambda: len(rows))
        if self._drawn:
            log.info(
                "resumed after %s draws: %.2f s for their order, %.2f s to read %s rows that are left of them",
                *(f"{self._drawn:,}", replayed - begun, time.perf_counter() - replayed, f"{len(rows):,}"),
            )
        return order

    def _refill(self, number: int, order: NDArray[Any], draws: int) -> NDArray[Any]:
        """Add the rows that are due after some draws from an order. Returns the order of the next generation."""
        if number > 1:  # places that the generation before left over are free only when draws are made from it
            self._wait(lambda: self._current is not None and self._current.number >= number - 1)
        freed, free_after, held_rows = _freed(order, draws, self._factor, self._num_opened)
        refill = self._refills.next(held_rows)
        places, num_free_now = self._places(refill.num_rows, freed)
        key = refill_key(self._names, refill.number)
        permuted = _in_thread(lambda: mixed_in(order[draws:], _entries(places, self._factor), key))

        def num_free() -> int:
            """The number of places that can be written to by now."""
            taken = self._taken_from(number - 1)
            if free_after is not None:
                taken = int(np.searchsorted(free_after, taken, "right"))
            return num_free_now + taken

        try:
            self._place(self._rows.read(refill), places, num_free)
        finally:
            new_order = permuted.result()
        self._publish(number, new_order, refill.at)
        self._rows.log(
            f"refill {refill.number} after {refill.at:,} draws: {refill.num_rows:,} rows of {len(refill.shards)} "
            f"shards, {len(new_order):,} entries in {self.num_bytes / 10**9:.2f} GB; by directory {self._rows.shares()}"
        )
        return new_order

    def _places(self, num_rows: int, freed: NDArray[Any]) -> tuple[NDArray[Any], int]:
        """Places for new rows, in the order in which they become free; and the number that are free already.

        Places that were never used are opened for the headroom, and for what will not fit into those that become free.
        """
        not_freed = num_rows - len(freed) - len(self._free)
        room = len(self._records) - self._num_opened
        num_opened = max(not_freed, min(min(self._room.headroom_rows, num_rows) - len(self._free), room), 0)
        self._room.check(num_opened * self._layout.row_bytes)
        self._grow(self._num_opened + num_opened)
        opened = np.arange(self._num_opened, self._num_opened + num_opened)
        places = np.concatenate([self._free, opened.astype(_type_for(self._num_opened + num_opened)), freed])
        num_free_now = len(self._free) + num_opened
        self._num_opened += num_opened
        self._free = places[num_rows:].copy()
        return places[:num_rows], num_free_now

    def _grow(self, places: int) -> None:
        """Have at least this many places. Their pages are there when they are written to, not before."""
        if places > len(self._records):
            larger = self._layout.empty(places)
            larger[: self._num_opened] = self._records[: self._num_opened]
            self._records = larger

    def _taken_from(self, number: int) -> int:
        """Draws made from a generation, which may not have begun."""
        if self._current is None or self._current.number != number:
            return 0
        return self._taken

    def _place(self, chunks: Iterator[Columns], places: NDArray[Any], num_free: Callable[[], int]) -> None:
        """Write rows to their places, as these become free."""
        placed = 0
        for columns in chunks:
            packed = self._layout.pack(columns)
            while len(packed):
                self._wait_for_places(num_free, placed + min(_FEWEST_PLACED, len(packed)))
                num = min(num_free() - placed, len(packed))
                self._records[places[placed : placed + num]] = packed[:num]
                packed, placed = packed[num:], placed + num
                with self._changed:
                    self._share_read = placed / len(places)
                    self._changed.notify_all()

    def _wait_for_places(self, num_free: Callable[[], int], fewest: int) -> None:
        self._wait(lambda: num_free() >= fewest, is_starved=True)

    def _wait(self, until: Callable[[], bool], is_starved: bool = False) -> None:
        """Wait as the reader, until something holds."""
        with self._changed:
            while not self._is_closed and not until():
                if is_starved:
                    self._is_starved = True
                    self._changed.notify_all()
                self._changed.wait(_PATIENCE_SECONDS)
            self._is_starved = False
            if self._is_closed:
                raise _Closed


class _Closed(Exception):
    """The pool was closed, and has no more draws."""


class _PoolThread(threading.Thread):
    """A thread of a pool, known by its class."""


def _in_thread(function: Callable[[], NDArray[Any]]) -> Future[NDArray[Any]]:
    """The result of a function that a thread computes meanwhile."""
    future: Future[NDArray[Any]] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    _PoolThread(target=run, name="batchwright-pool-order", daemon=True).start()
    return future


_open_pools: weakref.WeakSet[RefilledPool] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """End the threads of passes that were not ended. They cannot be awaited any more when a program is over."""
    for pool in list(_open_pools):
        pool.close()


def _type_for(places: int) -> type[np.signedinteger[Any]]:
    if places < 1 << 31:
        return np.int32
    return np.int64


def _entries(places: NDArray[Any], factor: int) -> NDArray[Any]:
    """All entries of the rows at some places.

    >>> _entries(np.array([7, 2]), 3).tolist()
    [21, 22, 23, 6, 7, 8]
    """
    if factor == 1:
        return places
    dtype = _type_for((int(places.max(initial=0)) + 1) * factor)
    return (places.astype(dtype)[:, None] * factor + np.arange(factor, dtype=dtype)).ravel()


def _placed(left: NDArray[Any], factor: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """(entries as places, the rows by place), where rows are placed in the order of their numbers.

    >>> order, rows = _placed(np.array([40, 13, 12, 41]), factor=4)
    >>> order.tolist(), rows.tolist()
    ([4, 1, 0, 5], [3, 10])
    """
    rows = np.sort(left // factor)  # np.unique hashes: ten times the memory
    rows = rows[np.append(True, rows[1:] != rows[:-1])[: len(rows)]]
    order = np.empty(len(left), _type_for(len(rows) * factor))
    for start in range(0, len(left), _LOOKED_UP_AT_ONCE):  # the memory for finding places stays small beside the result
        part = slice(start, start + _LOOKED_UP_AT_ONCE)
        row, which = np.divmod(left[part], factor)
        order[part] = np.searchsorted(rows, row) * factor + which
    return order, rows


def _freed(
    order: NDArray[Any], draws: int, factor: int, num_opened: int
) -> tuple[NDArray[Any], NDArray[np.int64] | None, int]:
    """(places, the draw after which each is free, rows that are left after all draws): in the order of becoming free.

    A place is free when the last entry of its row was drawn. None: after 1, 2, 3, ... draws.

    >>> _freed(np.array([4, 0, 5, 1, 2]), 4, 2, num_opened=3)     # rows 2, 0, 2, 0, 1: the last entry of row 2 is third
    (array([2, 0]), array([3, 4]), 1)
    """
    if factor == 1:
        return order[:draws], None, len(order) - draws
    last = np.full(num_opened, -1, np.int64)
    last[order // factor] = np.arange(len(order))  # of places that come more than once the last value stays
    places = np.flatnonzero((last >= 0) & (last < draws))
    places = places[np.argsort(last[places])]
    return places.astype(order.dtype), last[places] + 1, int(np.count_nonzero(last >= draws))


# Records


class RecordLayout:
    """Rows as records: the place of each column in a record.

    The columns of a row are next to each other, so that drawing a row is one read from memory. A batch is gathered as
    records, and taken apart into columns while it is in the cache.

    >>> from batchwright.columns.shard import Column
    >>> layout = RecordLayout({"board": Column(np.dtype("u1"), (2, 2)), "value": Column(np.dtype("f4"), ())})
    >>> layout.row_bytes
    8
    >>> records = layout.pack({"board": np.arange(8, dtype="u1").reshape(2, 2, 2), "value": np.array([1, -1], "f4")})
    >>> columns = layout.unpack(records[::-1].copy(), BlockPool())
    >>> columns["value"].tolist(), columns["board"][0].tolist()
    ([-1.0, 1.0], [[4, 5], [6, 7]])
    """

    def __init__(self, schema: Schema) -> None:
        self.schema: dict[str, Column] = dict(schema)
        sizes = [column.num_bytes for column in schema.values()]
        self.row_bytes: int = sum(sizes)
        self.dtype: np.dtype[Any] = np.dtype(f"V{self.row_bytes}")
        self._packed = self.empty(0)
        # Columns as opaque bytes: NumPy then copies each row's part at once, for any type and alignment.
        self._fields = np.dtype(
            {
                "names": list(schema),
                "formats": [f"V{size}" for size in sizes],
                "offsets": [sum(sizes[:place]) for place in range(len(sizes))],
                "itemsize": self.row_bytes,
            }
        )

    def empty(self, rows: int) -> Records:
        return np.empty(rows, self.dtype)

    def pack(self, columns: Mapping[str, NDArray[Any]]) -> Records:
        """Columns as records, until the next ones are packed: their memory is used again."""
        rows = len(columns[next(iter(self.schema))])
        if len(self._packed) < rows:
            self._packed = self.empty(rows)
        records = self._packed[:rows]
        fields = records.view(self._fields)
        for name in self.schema:
            array = np.ascontiguousarray(columns[name])
            fields[name] = array.reshape(-1).view(np.uint8).view(self._fields[name])
        return records

    def unpack(self, records: Records, memory: BlockPool) -> dict[str, NDArray[Any]]:
        """The columns of some records, copied."""
        fields, rows = records.view(self._fields), len(records)
        columns = {}
        for name, column in self.schema.items():
            num_bytes = column.num_bytes * rows
            block = memory.take(1, -(-num_bytes // 8))[0].view(np.uint8)[:num_bytes]
            block.view(self._fields[name])[:] = fields[name]
            columns[name] = block.view(column.dtype).reshape(rows, *column.shape)
        return columns
