"""Shards of an epoch as one sequence of rows, and the rows of one lane of it."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.base.errors import SourceError
from batchwright.base.files import home, write_whole
from batchwright.columns.shard import Column, Schema, ShardReader, content_mark, open_shard, peek
from batchwright.order.refills import Refill, lane_share
from batchwright.pool.shard_files import ShardFile

log: logging.Logger = logging.getLogger("batchwright")
Columns = dict[str, NDArray[Any]]


class ShardSet:
    """An epoch's shards: their columns and rows, and the place of their rows in the sequence. Nothing stays open.

    Headers are read when it is made, and compared. Rows are counted when they are first asked for: where only decoding
    tells, all shards are decoded then, and their counts kept under $BATCHWRIGHT_HOME.
    """

    decode_bytes: int

    def __init__(
        self,
        files: Sequence[ShardFile],
        *,
        allow_pickle: bool,
        columns: Sequence[str] | None,
        most_rows: int | None,
        budget: int,
    ) -> None:
        """`most_rows`: the sequence ends there. `budget`: bytes that decoding a shard may take."""
        self.files: list[ShardFile] = list(files)
        self._allow_pickle, self._columns, self._budget = allow_pickle, columns, budget
        self.most_rows: int | None = most_rows
        self._stamps = [_stamp(file.path) for file in self.files]
        self.marks: list[str] = [content_mark(file.path) for file in self.files]
        """A cheap name for the content of each."""
        facts = [peek(file.path, allow_pickle=allow_pickle, columns=columns) for file in self.files]
        self.decode_bytes, hardest = max((fact.decode_bytes, -shard) for shard, fact in enumerate(facts))
        self.hardest: str = self.files[-hardest].path
        """The shard that takes most to decode: `decode_bytes`."""
        self._counts = [fact.rows for fact in facts]
        self._schema: Schema | None = None
        self._schema_of = ""
        for file, fact in zip(self.files, facts, strict=True):
            if fact.schema is not None:
                self._check_schema(file.path, fact.schema, fact.rows)
        if None not in self._counts and self._schema is None:
            self._refuse_no_rows()

    @cached_property
    def schema(self) -> Schema:
        """The columns of every shard. Where no header tells, the first shard with a row is decoded."""
        for shard in range(len(self.files)):
            if self._schema is not None:
                return self._schema
            self.open(shard).close()
        return self._schema or self._refuse_no_rows()

    def _refuse_no_rows(self) -> Any:
        what = "not one shard has a row"
        remedy = "ranges of shards that have some"
        raise SourceError(what, file=self.files[0].path, shards=len(self.files), remedy=remedy)

    @cached_property
    def starts(self) -> list[int]:
        """The row of the sequence with which each shard begins, and the end of the last shard that has a row of it."""
        starts = [0]
        for shard in range(len(self.files)):
            starts.append(starts[-1] + self._count(shard))
            if self.most_rows is not None and starts[-1] >= self.most_rows:
                starts[-1] = self.most_rows
                break
        return starts

    @property
    def num_shards(self) -> int:
        return len(self.starts) - 1

    @property
    def num_rows(self) -> int:
        return self.starts[-1]

    def rows(self, shard: int) -> int:
        """Rows of a shard that belong to the sequence."""
        return self.starts[shard + 1] - self.starts[shard]

    def open(self, shard: int, budget: int | None = None) -> ShardReader:
        """A shard to read from, with the content that it had when this set was made."""
        path = self.files[shard].path
        opened = open_shard(path, allow_pickle=self._allow_pickle, columns=self._columns, budget=budget or self._budget)
        try:
            self._check_schema(path, opened.schema, opened.rows)
            count = self._counts[shard]
            if count not in (None, opened.rows):
                self._refuse_changed(path, f"this shard has {opened.rows:,} rows, and had {count:,} when")
            if _stamp(path) != self._stamps[shard]:
                self._refuse_changed(path, "this shard was written again after")
        except BaseException:
            opened.close()
            raise
        return opened

    def _refuse_changed(self, path: str, what: str) -> None:
        raise SourceError(
            f"{what} the dataset was made",
            file=path,
            remedy="shards must not change while they are read: make the dataset again; if the shard is what it was, "
            "load_state_dict(ds.state_dict()) goes on there",
        )

    def _check_schema(self, path: str, schema: Schema, rows: int | None) -> None:
        if not rows:  # an empty shard cannot tell: lists have no length, and JSON no columns
            return
        if self._schema is None:
            self._schema, self._schema_of = schema, path
        for name in sorted({*schema, *self._schema}):
            here, there = schema.get(name), self._schema.get(name)
            if here != there:
                raise SourceError(
                    f"column {name!r} is {_in_words(here)}, and in {os.path.basename(self._schema_of)} "
                    f"{_in_words(there)}",
                    file=path,
                    column=name,
                    other_file=self._schema_of,
                    remedy="write one of them again; or columns=[...] with columns that all shards share",
                )

    def _count(self, shard: int) -> int:
        """The rows of a shard, from its header, an earlier count, or decoding."""
        count = self._counts[shard]
        if count is not None:
            return count
        kept = home() / "shards" / f"{self.marks[shard]}.rows"
        with contextlib.suppress(OSError, ValueError):
            return int(kept.read_text())
        with self.open(shard) as opened:
            count = opened.rows
        log.info("counted %s rows in %s", f"{count:,}", self.files[shard].path)
        with contextlib.suppress(OSError):
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_whole(kept, str(count).encode())
        self._counts[shard] = count
        return count


def _stamp(path: str) -> tuple[int, int] | None:
    """Size and time of a file; None if it is gone."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _in_words(column: Column | None) -> str:
    if column is None:
        return "not there"
    return f"{column.dtype}{list(column.shape) or ''}"


class LaneShards:
    """The rows of one lane: every L-th of the sequence, by their number in the lane."""

    def __init__(
        self, shards: ShardSet, lane: int, lanes: int, *, chunk_rows: int, budget: int, verbose: bool = False
    ) -> None:
        self._shards, self._lane, self._lanes = shards, lane, lanes
        self._chunk_rows, self._budget = chunk_rows, budget
        self._level = logging.INFO if verbose else logging.DEBUG
        self._rows_of_directories: Counter[int] = Counter()
        """Rows that were read, for the log."""

    def rows_of(self, shard: int) -> int:
        """Rows of a shard that are of this lane."""
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
        places = rows.astype(np.int64) * self._lanes + self._lane
        while len(places):
            shard = bisect_right(self._shards.starts, places[0]) - 1
            start = self._shards.starts[shard]
            here = int(np.searchsorted(places, start + self._shards.rows(shard)))
            yield from self._chunks(shard, places[:here] - start, here)
            places = places[here:]

    def _share(self, shard: int) -> tuple[int, int]:
        return lane_share(self._shards.starts[shard], self._shards.rows(shard), self._lane, self._lanes)

    def _chunks(self, shard: int, wanted: slice | NDArray[np.int64], num_rows: int) -> Iterator[Columns]:
        path, begun, reading, num_read = self._shards.files[shard].path, time.perf_counter(), 0.0, 0
        with self._shards.open(shard, self._budget) as opened:
            for columns in opened.chunks(wanted, self._chunk_rows):
                reading += time.perf_counter() - begun
                num_read += len(next(iter(columns.values())))
                yield columns
                begun = time.perf_counter()
        if num_read != num_rows:
            what = f"{num_read:,} rows were read where there should be {num_rows:,}"
            raise SourceError(what, file=path, remedy="write the shard again")
        self.log(f"{path}: {num_rows:,} of its {self._shards.rows(shard):,} rows, {reading:.3f} s of reading")

    def log(self, text: str) -> None:
        log.log(self._level, "lane %d of %d: %s", self._lane, self._lanes, text)

    def shares(self) -> str:
        """The share of each directory in the rows read so far, for the log: "0: 66.7 %, 1: 33.3 %"."""
        total = max(1, self._rows_of_directories.total())
        return ", ".join(f"{d}: {100 * n / total:.1f} %" for d, n in sorted(self._rows_of_directories.items()))
