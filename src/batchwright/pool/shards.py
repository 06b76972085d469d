"""The shards of an epoch as one sequence of rows, and the rows of one lane of it."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.base.errors import SourceError
from batchwright.base.files import home, write_whole
from batchwright.columns.shard import Column, Schema, ShardReader, content_mark, open_shard, peek
from batchwright.order.refills import Refill, lane_share
from batchwright.pool.lane import Columns
from batchwright.pool.shard_files import ShardFile

__all__ = ["LaneShards", "ShardSet"]

log: logging.Logger = logging.getLogger("batchwright")


class ShardSet:
    """An epoch's shards: what each has, and where its rows lie in the sequence. Nothing stays open.

    Headers are read when it is made, and compared. How many rows a shard has is asked one by one: where only decoding
    tells, it is done when it is needed, and remembered under $BATCHWRIGHT_HOME.
    """

    def __init__(
        self,
        files: Sequence[ShardFile],
        *,
        allow_pickle: bool = False,
        columns: Sequence[str] | None = None,
        most_rows: int | None = None,
        budget: int | None = None,
    ) -> None:
        """`most_rows`: the sequence ends there. `budget`: bytes that decoding a shard may take."""
        self.files: list[ShardFile] = list(files)
        self._allow_pickle, self._columns, self._most_rows = allow_pickle, columns, most_rows
        self._budget, self._lock = budget, threading.RLock()
        self._stamps = [_stamp(file.path) for file in self.files]
        self.marks: list[str] = [content_mark(file.path) for file in self.files]
        """A cheap name for the content of each."""
        facts = [peek(file.path, allow_pickle=allow_pickle, columns=columns) for file in self.files]
        self.decode_bytes: int = max(fact.decode_bytes for fact in facts)
        """What decoding any of them takes at most."""
        hardest = max(range(len(facts)), key=lambda shard: facts[shard].decode_bytes)
        self.hardest: str = self.files[hardest].path
        """The shard that takes most to decode."""
        self._rows = [fact.rows for fact in facts]
        self.is_counted_by_headers: bool = None not in self._rows
        """Whether every process knows all rows from the beginning."""
        self._starts = [0]
        self._schema: Schema | None = None
        self._schema_of = ""
        for file, fact in zip(self.files, facts, strict=True):
            if fact.schema is not None:
                self._check_schema(file.path, fact.schema, fact.rows or 0)
        if None not in self._rows:
            self._some_schema()

    @property
    def schema(self) -> Schema:
        """The columns of every shard. Where no header tells, the first shard with a row is decoded."""
        for shard in range(len(self.files)):
            if self._schema is None:
                self.open(shard).close()
        return self._some_schema()

    def _some_schema(self) -> Schema:
        if self._schema is None:
            raise SourceError(
                "not one shard has a row",
                file=self.files[0].path,
                shards=len(self.files),
                remedy="ranges of shards that have some",
            )
        return self._schema

    def rows(self, shard: int) -> int:
        """How many rows of a shard belong to the sequence."""
        if not self.is_counted(shard):
            self.open(shard).close()
        rows = self._rows[shard]
        assert rows is not None
        return rows if self._most_rows is None else max(0, min(rows, self._most_rows - self.start(shard)))

    def is_counted(self, shard: int) -> bool:
        """Whether the rows of a shard are known without decoding it."""
        return self._rows[shard] is not None or self._remembered(shard) is not None

    def start(self, shard: int) -> int:
        """Where a shard begins in the sequence. Asks for the rows of all before it."""
        with self._lock:
            while len(self._starts) <= shard:
                self._starts.append(self._starts[-1] + self.rows(len(self._starts) - 1))
        return self._starts[shard]

    @property
    def num_shards(self) -> int:
        """Shards of which the sequence has a row, all but the last ones."""
        if self._most_rows is None:
            return len(self.files)
        return next(
            (shard for shard in range(len(self.files)) if self.start(shard) >= self._most_rows), len(self.files)
        )

    @property
    def num_rows(self) -> int:
        return self.start(self.num_shards)

    @property
    def known_rows(self) -> int | None:
        """Rows of the sequence, if no shard must be decoded to tell."""
        return self.num_rows if all(map(self.is_counted, range(len(self.files)))) else None

    def open(self, shard: int, budget: int | None = None) -> ShardReader:
        """A shard to read from, which is what it was when this set was made."""
        path, budget = self.files[shard].path, self._budget if budget is None else budget
        opened = open_shard(path, allow_pickle=self._allow_pickle, columns=self._columns, budget=budget)
        try:
            self._check_schema(path, opened.schema, opened.rows)
            if self._rows[shard] is None:
                self._rows[shard] = opened.rows
                self._remember(shard, opened.rows)
            elif self._rows[shard] != opened.rows:
                raise SourceError(
                    f"this shard has {opened.rows:,} rows, and had {self._rows[shard]:,} when the dataset was made",
                    file=path,
                    remedy="shards must not change while they are read: make the dataset again",
                )
            if _stamp(path) != self._stamps[shard]:
                raise SourceError(
                    "this shard was written again since the dataset was made",
                    file=path,
                    remedy="shards must not change while they are read: make the dataset again; if it is what it was, "
                    "load_state_dict(ds.state_dict()) goes on there",
                )
        except BaseException:
            opened.close()
            raise
        return opened

    def _check_schema(self, path: str, schema: Schema, rows: int) -> None:
        if not rows:  # an empty shard cannot tell: lists have no length, and JSON no columns
            return
        if self._schema is None:
            self._schema, self._schema_of = schema, path
            return
        other = os.path.basename(self._schema_of)
        for name in sorted({*schema, *self._schema}):
            here, there = schema.get(name), self._schema.get(name)
            if here != there:
                raise SourceError(
                    f"column {name!r} is {_in_words(here)}, and in {other} {_in_words(there)}",
                    file=path,
                    column=name,
                    other_file=self._schema_of,
                    remedy="write one of them again; or columns=[...] with columns that all shards share",
                )

    # What only decoding tells

    def _remembered(self, shard: int) -> int | None:
        with contextlib.suppress(OSError, ValueError):
            self._rows[shard] = int(self._memory(shard).read_text())
        return self._rows[shard]

    def _remember(self, shard: int, rows: int) -> None:
        with contextlib.suppress(OSError):
            self._memory(shard).parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._memory(shard), str(rows).encode())

    def _memory(self, shard: int) -> Path:
        return home() / "shards" / f"{self.marks[shard]}.rows"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, sent: dict[str, Any]) -> None:
        self.__dict__.update(sent, _lock=threading.RLock())


def _stamp(path: str) -> tuple[int, int] | None:
    """Size and time of a file; None where it is gone."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _in_words(column: Column | None) -> str:
    return "not there" if column is None else f"{column.dtype}{list(column.shape) if column.shape else ''}"


class LaneShards:
    """The rows of one lane: every L-th of the sequence, by their number in the lane."""

    def __init__(
        self, shards: ShardSet, lane: int, lanes: int, *, chunk_rows: int, budget: int | None, verbose: bool = False
    ) -> None:
        self._shards, self._lane, self._lanes = shards, lane, lanes
        self._chunk_rows, self._budget = chunk_rows, budget
        self._level = logging.INFO if verbose else logging.DEBUG
        self._opened: dict[int, ShardReader] = {}
        """The shard that was opened last to know its rows, if it was: one at a time is decoded."""
        self._rows_of_directories: Counter[int] = Counter()
        """Rows that were read, for the log."""

    def rows_of(self, shard: int) -> int:
        """How many rows of a shard are of this lane."""
        if not self._shards.is_counted(shard):
            self.close()
            self._opened[shard] = self._shards.open(shard, self._budget)
        return self._share(shard)[1]

    def read(self, refill: Refill) -> Iterator[Columns]:
        """The rows that a refill adds, in order."""
        for shard in refill.shards:
            first, count = self._share(shard)
            last = first + (count - 1) * self._lanes + 1
            if count:
                yield from self._chunks(shard, slice(first, last, self._lanes), count)
            self._rows_of_directories[self._shards.files[shard].directory] += count

    def pick(self, rows: NDArray[Any]) -> Iterator[Columns]:
        """Some rows, by their sorted numbers in the lane. Only shards that have one are opened."""
        begin, shard = 0, 0
        while len(rows):
            first, count = self._share(shard)
            here = int(np.searchsorted(rows, begin + count))
            if here:
                wanted = first + (rows[:here].astype(np.int64) - begin) * self._lanes
                yield from self._chunks(shard, wanted, here)
            rows, begin, shard = rows[here:], begin + count, shard + 1

    def close(self) -> None:
        while self._opened:
            self._opened.popitem()[1].close()

    def _share(self, shard: int) -> tuple[int, int]:
        return lane_share(self._shards.start(shard), self._shards.rows(shard), self._lane, self._lanes)

    def _chunks(self, shard: int, wanted: slice | NDArray[np.int64], num_rows: int) -> Iterator[Columns]:
        path, begun, reading, num_read = self._shards.files[shard].path, time.perf_counter(), 0.0, 0
        opened_before = self._opened.pop(shard, None)
        self.close()
        with opened_before or self._shards.open(shard, self._budget) as opened:
            chunks = opened.chunks(wanted, self._chunk_rows)
            while True:
                columns = next(chunks, None)
                reading += time.perf_counter() - begun
                if columns is None:
                    break
                num_read += len(next(iter(columns.values())))
                yield columns
                begun = time.perf_counter()
        if num_read != num_rows:
            raise SourceError(
                f"{num_read:,} rows were read where there should be {num_rows:,}",
                file=path,
                remedy="write the shard again",
            )
        self.log(f"{path}: {num_rows:,} of its {self._shards.rows(shard):,} rows, {reading:.3f} s of reading")

    def log(self, text: str) -> None:
        """Say something about this lane, to whoever asked for it."""
        log.log(self._level, "lane %d of %d: %s", self._lane, self._lanes, text)

    def shares(self) -> str:
        """Which part of the rows read so far came from which directory.

        For the log: "0: 66.7 %, 1: 33.3 %".
        """
        total = max(1, self._rows_of_directories.total())
        return ", ".join(f"{d}: {100 * n / total:.1f} %" for d, n in sorted(self._rows_of_directories.items()))
