"""Reading ahead of a loader. The order of its rows is known long before they are needed.

A background thread follows the loader's cursor. It never makes or changes a batch. It only brings bytes of files into
the page cache, so that the gather finds them there. Its work depends on whether the data fits into free memory:

fits                       everything once, block by block, the blocks needed first at the start; then the thread ends
does not fit, pool or none the blocks of the current window, then those of the next; used windows are dropped
does not fit, global       single rows, some thousands ahead; many reads run at once
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from batchwright.base.errors import StoreError
from batchwright.base.machine import available_bytes, is_linux
from batchwright.batches.ahead import FileReader, Span, cached_share
from batchwright.batches.flow import Flow
from batchwright.batches.window import WindowRows
from batchwright.loaders.blocks import CountedBatches
from batchwright.order.lanes import LaneView
from batchwright.order.schedule import Order, Stretch
from batchwright.store.stream import TokenStream

if TYPE_CHECKING:
    from batchwright.batches.types import TrainingBatch
    from batchwright.loaders.loader import Loader
    from batchwright.loaders.stored import StoreStream

log: logging.Logger = logging.getLogger("batchwright")

_THREAD_NAME = "batchwright-read-ahead"
_UNIT_BYTES = 64 << 20
"""The most that is read before the cursor is looked at again."""
_LEAST_BYTES = 16 << 20
"""Less data than this is read faster than a thread is worth."""
_CACHED_ENOUGH = 0.98
_MEMORY_SHARE = 0.8
"""The share of free memory for reading ahead. The rest is for batches and for the program."""
_POLL_SECONDS = 0.02
_END_SECONDS = 1.0
"""To wait for the thread when the process ends, at most: it may be in a read of a slow disk."""
_ROWS_AHEAD = 8192
_ROWS_AT_ONCE = 256
_LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")


def start_read_ahead(loader: Loader[TrainingBatch], asked: bool | None) -> threading.Thread | None:
    """Start to read ahead for a loader. None if that is turned off, impossible, or (by default) useless.

    The thread ends with the loader, or with the process. A copy of the loader has none, nor has a forked process.
    """
    follower = _follower(loader, asked)
    if follower is None:
        return None
    stop = threading.Event()
    weakref.finalize(loader, stop.set)
    thread = threading.Thread(
        target=_follow, args=(weakref.ref(loader), follower, stop), name=_THREAD_NAME, daemon=True
    )
    thread.start()
    atexit.register(_end, weakref.ref(thread), stop)
    return thread


def _follower(loader: Loader[TrainingBatch], asked: bool | None) -> _Blocks | _Rows | None:
    flow = _flow(loader)
    streams = [rows.stream for rows in flow.windows if isinstance(rows.stream, TokenStream)]
    if asked is False or len(streams) < len(flow.rows):
        return None
    total = sum(stream.num_tokens * stream.dtype.itemsize for stream in streams)
    if asked is None and (total < _LEAST_BYTES or _is_cached(streams)):
        return None
    is_first = next((os.environ[name] for name in _LOCAL_RANKS if name in os.environ), "0") == "0"
    budget = int(available_bytes() * _MEMORY_SHARE)
    if total <= budget:
        if not is_first and not asked:
            return None
        return _Blocks(loader, once=True)
    if flow.order.shuffle != "global":
        _warn_of_large_windows(flow.order, flow.windows, budget)
        return _Blocks(loader, once=False, reads=is_first or loader.plan.lanes is not None or asked is True)
    if not is_linux():
        return None
    log.info("%d MB of tokens, %d MB of memory: shuffle='pool' would read fewer places", total >> 20, budget >> 20)
    return _Rows()


def _flow(loader: Loader[TrainingBatch]) -> Flow:
    return cast("StoreStream", loader.stream).flow


def _end(thread: weakref.ref[threading.Thread], stop: threading.Event) -> None:
    """Stop the thread before the process ends. A thread killed inside C++ (Arrow) would crash the process."""
    stop.set()
    running = thread()
    if running is not None and running.is_alive():
        running.join(timeout=_END_SECONDS)


def _is_cached(streams: list[TokenStream]) -> bool:
    """Whether the data is already in the page cache, from a sample of some shards, spread over the streams."""
    spans: list[Span] = []
    for stream in streams:
        shards = len(stream.shard_tokens)
        for shard in range(0, shards, -(-shards // 16)):
            try:
                spans += stream.spans(int(stream.token_starts[shard]), int(stream.token_starts[shard + 1]))
            except StoreError:  # damaged: reading it will raise, so nothing is read ahead
                return True
    share = cached_share(spans)
    return share is not None and share >= _CACHED_ENOUGH


def _warn_of_large_windows(order: Order, rows: list[WindowRows], budget: int) -> None:
    if order.pool is None:
        return
    pool_rows = order.pool[0] * order.pool[1]
    window = sum(min(pool_rows, r.num_rows) * _row_bytes(r) for r in rows)
    if 2 * window > budget:
        log.warning(
            "two windows of %d MB each do not fit into %d MB of memory: reading ahead will be late; pool_rows=%d would",
            *(window >> 20, budget >> 20, max(pool_rows * budget // (3 * window), 1)),
        )


def _follow(ref: weakref.ref[Loader[TrainingBatch]], follower: _Blocks | _Rows, stop: threading.Event) -> None:
    with FileReader() as files:
        while not stop.is_set():
            loader = ref()
            if loader is None:
                return
            try:
                work = follower.next(loader)
            except StoreError:  # damaged: reading it will raise
                return
            del loader  # not referenced during a read, so that the user can drop it
            if work is None:
                return
            if not work.do(files, stop):
                stop.wait(_POLL_SECONDS)


def _row_bytes(rows: WindowRows) -> int:
    return rows.row_tokens * np.dtype(rows.stream.dtype).itemsize


@dataclass(slots=True)
class _Work:
    """The next reads and drops, in plain numbers, without a reference to a store."""

    read: list[Span] = field(default_factory=list)
    read_again: list[Span] = field(default_factory=list)
    """Needed now, and read so long ago that the cache may have lost it."""
    drop: list[Span] = field(default_factory=list)
    ask_for: list[tuple[Path, NDArray[np.int64], int]] = field(default_factory=list)
    """(file, where small parts of it begin, bytes of each)."""

    def do(self, files: FileReader, stop: threading.Event) -> bool:
        """Do the work. Return whether there was any."""
        files.drop(self.drop)
        for path, offsets, num_bytes in self.ask_for:
            files.ask_for(path, offsets, num_bytes)
        for read, spans in ((files.read_again, self.read_again), (files.read, self.read)):
            for span in spans:
                if not stop.is_set():
                    read(span)
        return bool(self.read or self.read_again or self.drop or self.ask_for)


@dataclass(slots=True)
class _Unit:
    """Some consecutive rows of a stretch that are read together."""

    stretch: Stretch
    first_row: int
    last_row: int
    num_bytes: int
    is_needed: bool = False

    def overlaps(self, other: _Unit) -> bool:
        """Whether they share rows. Epochs cut rows at different places, so neighbours share less than one."""
        return min(self.last_row, other.last_row) - max(self.first_row, other.first_row) > 0


def _spans(loader: Loader[TrainingBatch], unit: _Unit) -> list[Span]:
    """The byte ranges of the tokens of a unit."""
    stream, pieces = _pieces(loader, unit)
    return [span for start, stop in pieces for span in stream.spans(start, stop)]


def _pieces(loader: Loader[TrainingBatch], unit: _Unit) -> tuple[TokenStream, list[tuple[int, int]]]:
    rows = _flow(loader).windows[unit.stretch.source]
    return _stream(rows), rows.stretch(unit.first_row, unit.last_row, unit.stretch.epoch)


def _stream(rows: WindowRows) -> TokenStream:
    assert isinstance(rows.stream, TokenStream)
    return rows.stream


class _Blocks:
    """Follows a cursor through stretches of rows, block by block."""

    def __init__(self, loader: Loader[TrainingBatch], *, once: bool, reads: bool = True) -> None:
        self.once, self.reads = once, reads
        self.position = -1
        self.held_bytes = 0
        self.budget, self.measured = 0, float("-inf")
        self._look_up_order(loader)

    def _look_up_order(self, loader: Loader[TrainingBatch]) -> None:
        """Take the order of the loader's plan, or of this rank's lanes of it."""
        ranks = 0, 1
        if loader.this_run.sharding.is_contiguous:  # other shardings have rows of every lane
            ranks = loader.rank, loader.world_size
        self.order = _flow(loader).order
        self.views: Sequence[Order | LaneView] = self.order.views(*ranks)
        self.row_bytes = [_row_bytes(rows) for rows in _flow(loader).windows]
        self.sources: list[_Source] = []

    def next(self, loader: Loader[TrainingBatch]) -> _Work | None:
        """The next work; None if there will be no more."""
        if self.order is not _flow(loader).order:  # amended
            self._look_up_order(loader)
        position, end = loader.position, loader.this_run.end
        counts = [count for view in self.views for count in view.counts(position)]
        if position < self.position or not self.sources:
            self._start_at(counts)
        self.position = position
        work = _Work()
        if not self.once:
            self._let_go(loader, counts, work)
        if not self.once and self.reads:
            self._look_again(loader, counts, work)
        for source, count in zip(self.sources, counts, strict=True):
            source.skip_to(count)
        chosen = min(self.sources, key=lambda source: source.needed_at)
        is_over = end is not None and chosen.needed_at >= end
        if self.once and (is_over or all(source.is_covered for source in self.sources)):
            return None
        if not is_over and self._has_room(chosen):
            self._take(loader, chosen, work)
        return work

    def _start_at(self, counts: list[int]) -> None:
        num_sources = len(self.row_bytes)
        self.held_bytes, self.sources = 0, []
        for number, count in enumerate(counts):
            view, source = divmod(number, num_sources)
            self.sources.append(_Source(self.views[view], source, count, self.row_bytes[source]))

    def _has_room(self, source: _Source) -> bool:
        """Whether the next unit fits into memory. Rows needed now are read in any case."""
        is_needed = self.once or source.needed_at <= self.position
        return is_needed or self.held_bytes + source.unit.num_bytes <= self._budget()

    def _take(self, loader: Loader[TrainingBatch], source: _Source, work: _Work) -> None:
        """Read the next unit of a source."""
        unit = source.unit
        source.held.append(unit)
        self.held_bytes += unit.num_bytes
        if not self.once and self.order.shuffle == "pool":
            # A late row must not read its surroundings, which mostly belong to other windows.
            stream, pieces = _pieces(loader, unit)
            for start, stop in pieces:
                stream.expect_random_reads(start, stop)
        source.advance()
        if self.reads:
            work.read = _spans(loader, unit)

    def _let_go(self, loader: Loader[TrainingBatch], counts: list[int], work: _Work) -> None:
        """Unmap used units, so that the page cache can drop them."""
        for source, count in zip(self.sources, counts, strict=True):
            held = source.held
            while held and held[0].stretch.last <= count:
                unit = held.popleft()
                self.held_bytes -= unit.num_bytes
                if any(unit.overlaps(other) for other in held):
                    continue  # the next epoch has begun, and will need it soon again
                stream, pieces = _pieces(loader, unit)
                for start, stop in pieces:
                    stream.unmap(start, stop)
                work.drop += _spans(loader, unit)

    def _look_again(self, loader: Loader[TrainingBatch], counts: list[int], work: _Work) -> None:
        """Read a window again when it comes into use. Under memory pressure, the page cache may have lost it."""
        for source, count in zip(self.sources, counts, strict=True):
            for unit in source.held:
                if unit.stretch.first <= count and not unit.is_needed:
                    unit.is_needed = True
                    work.read_again += _spans(loader, unit)

    def _budget(self) -> int:
        """The number of bytes that may be held. Bytes already held are in the cache, so they count as free."""
        now = time.monotonic()
        if now - self.measured > 1:
            self.budget, self.measured = int(available_bytes() * _MEMORY_SHARE), now
        return self.budget


class _Source:
    """The rows of one source in their order, unit by unit."""

    def __init__(self, order: Order | LaneView, source: int, count: int, row_bytes: int) -> None:
        self.order, self.source, self.row_bytes = order, source, row_bytes
        self.unit_rows = max(_UNIT_BYTES // row_bytes, 1)
        self.started_at = count
        self.held: deque[_Unit] = deque()
        """Units that were read and are not used up."""
        self._open(count)

    @property
    def is_covered(self) -> bool:
        """Whether every row of the source was given."""
        return self.unit.stretch.first >= self.started_at + self.order.sizes[self.source]

    def skip_to(self, count: int) -> None:
        """Skip rows that were used before they could be read."""
        if self.unit.stretch.last <= count:
            self._open(count)

    def advance(self) -> None:
        self.unit = next(self._units)
        first = np.array([self.unit.stretch.first], np.int64)
        self.needed_at = int(self.order.position_of(self.source, first)[0])

    def _open(self, count: int) -> None:
        self._units = self._cut(self.order.stretches(self.source, count, self.unit_rows))
        self.advance()

    def _cut(self, stretches: Iterator[Stretch]) -> Iterator[_Unit]:
        for stretch in stretches:
            for first, last in stretch.rows:
                for start in range(first, last, self.unit_rows):
                    stop = min(start + self.unit_rows, last)
                    yield _Unit(stretch, start, stop, (stop - start) * self.row_bytes)


class _Rows:
    """Follows a cursor row by row, for scattered rows: this rank's rows, some thousands ahead."""

    def __init__(self) -> None:
        self.position = self.done = -1
        self.coming: NDArray[np.int64] = np.empty(0, np.int64)
        """Positions of this rank's rows that were looked up and not asked for yet."""

    def next(self, loader: Loader[TrainingBatch]) -> _Work | None:
        position = loader.position
        if position < self.position or position > self.done:
            self.done, self.coming = position, self.coming[:0]
        self.position = position
        batches = loader.stream.open(loader.this_run, loader.batch_size, loader.record, loader.making)
        assert isinstance(batches, CountedBatches)  # windows have no lengths, so their steps are not planned
        ahead = _ROWS_AHEAD * loader.batch_size // batches.width
        if not len(self.coming) and self.done < position + ahead:
            task = next(batches.tasks(self.done), None)
            if task is None:
                return _Work()  # the end of the run; a caller may yet go back
            skips = batches.cut.epochs.skips
            self.coming = skips.positions(task.live_rows())
            self.done = batches.cut.after(skips.position(task.live), task.num_steps)
        some = self.coming[:_ROWS_AT_ONCE]
        if not len(some) or some[0] > position + ahead:
            return _Work()
        self.coming = self.coming[len(some) :]
        return _Work(ask_for=self._parts(loader, some[some >= position]))

    def _parts(
        self, loader: Loader[TrainingBatch], positions: NDArray[np.int64]
    ) -> list[tuple[Path, NDArray[np.int64], int]]:
        draw = _flow(loader).order.at(positions)
        found = []
        for source in np.unique(draw.source).tolist():
            mine = draw.source == source
            rows = _flow(loader).windows[source]
            stream = _stream(rows)
            shard, local = stream.locate(rows.starts(draw.index[mine], draw.epoch[mine]))
            for number in np.unique(shard).tolist():
                mapped = stream.shard(number)
                mapped.expect_random_reads()
                size = stream.dtype.itemsize
                offsets = np.sort(local[shard == number]) * size + mapped.data_start
                found.append((mapped.data_path, offsets, (rows.row_tokens + 1) * size))
        return found
