"""A refilled pool: threads decide when a row is there, and never which one is drawn."""

from __future__ import annotations

import time

import numpy as np
import pytest

from batchwright.columns.shard import Column, row_bytes
from batchwright.order.refills import NoRoom, PoolSize, Refills, generations
from batchwright.pool.refilled import RefilledPool, Room
from harness import no_thread_left

NAMES = (1, "lane")
SCHEMA = {"row": Column(np.dtype(np.int64), ()), "pair": Column(np.dtype(np.int16), (2,))}


class Rows:
    """Rows that say their own number, in chunks; slow or failing where a test asks for it."""

    def __init__(self, shards, chunk=7, delay=0.0, fails_at=None):
        self.shards, self.chunk, self.delay, self.fails_at = shards, chunk, delay, fails_at

    def read(self, refill):
        yield from self.pick(np.arange(refill.first_row, refill.first_row + refill.num_rows))

    def pick(self, rows):
        rows = rows.astype(np.int64)
        for begin in range(0, len(rows), self.chunk):
            part = rows[begin : begin + self.chunk]
            if self.fails_at is not None and part[-1] >= self.fails_at:
                raise OSError(f"row {self.fails_at} cannot be read")
            time.sleep(self.delay)
            yield {"row": part, "pair": np.stack([part, -part], 1).astype(np.int16)}

    def shares(self):
        return "all from here"

    def log(self, text):
        pass


def opened(shards, size, *, factor=1, drawn=0, most_rows=None, rows=None, headroom=3, check=lambda num_bytes: None):
    sizes = size if isinstance(size, list) else [size]
    most = sum(shards) if most_rows is None else most_rows
    refills = Refills(shards.__getitem__, len(shards), sizes, factor)
    return RefilledPool(rows or Rows(shards), refills, drawn, SCHEMA, Room(most, most, headroom, check), NAMES)


def planned(shards, size, factor=1):
    refills = Refills(shards.__getitem__, len(shards), [size], factor)
    return np.concatenate([g.order[: g.until - g.refill.at] for g in generations(refills, NAMES)])


def drawn_from(pool, *sizes, factor=1):
    """Everything that is drawn, in draws of these sizes, one after another."""
    entries, number = [], 0
    while True:
        columns, which, count = pool.draw(sizes[number % len(sizes)])
        number += 1
        if not count:
            return np.concatenate([np.empty(0, np.int64), *entries])
        rows = columns["row"]
        assert (columns["pair"] == np.stack([rows, -rows], 1)).all()
        entries.append(rows * factor + which)


@pytest.mark.parametrize("factor", [1, 3])
@pytest.mark.parametrize("delay", [0.0, 0.002])
@pytest.mark.parametrize("draws", [(1,), (5, 11), (64,)])
def test_what_is_drawn_does_not_depend_on_how_fast_rows_come(factor, delay, draws):
    shards, size = [40, 25, 60, 1, 33], PoolSize(0, 90, 50)
    pool = opened(shards, size, factor=factor, rows=Rows(shards, delay=delay))
    got = drawn_from(pool, *draws, factor=factor)
    pool.close()
    assert got.tolist() == planned(shards, size, factor).tolist()


@pytest.mark.parametrize("drawn", [0, 1, 39, 40, 41, 100, 158, 159])
def test_a_lane_may_begin_at_any_draw(drawn):
    shards, size = [40, 25, 60, 1, 33], PoolSize(0, 90, 50)
    pool = opened(shards, size, drawn=drawn)
    assert drawn_from(pool, 16).tolist() == planned(shards, size)[drawn:].tolist()
    pool.close()


def test_a_resume_reads_only_rows_that_are_left():
    shards, size, asked = [50] * 8, PoolSize(0, 100, 50), []

    class Recording(Rows):
        def pick(self, rows):
            asked.append(rows)
            return super().pick(rows)

        def read(self, refill):
            return Rows.pick(self, np.arange(refill.first_row, refill.first_row + refill.num_rows))

    pool = opened(shards, size, drawn=200, rows=Recording(shards))
    rest = drawn_from(pool, 16)
    pool.close()
    assert set(asked[0]) <= set(rest.tolist())
    assert len(asked[0]) <= 100


def test_new_rows_go_where_drawn_ones_were():
    shards, size = [50] * 40, PoolSize(0, 200, 150)
    pool = opened(shards, size, most_rows=10_000, headroom=10)
    assert len(drawn_from(pool, 16)) == 2000
    assert pool._num_opened <= 200 + 10
    pool.close()


@pytest.mark.parametrize("draws", [7, 1000])
def test_what_stops_the_reader_is_raised_when_all_before_it_was_drawn(draws):
    shards, size = [50, 50, 50], PoolSize(0, 100, 60)
    pool = opened(shards, size, rows=Rows(shards, fails_at=120))
    got: list[int] = []
    with pytest.raises(OSError, match="120"):
        got.extend(pool.draw(draws)[2] for _ in range(1000))
    pool.close()
    assert sum(got) == 40  # the refill is due after them


def test_a_refill_without_room_is_raised_at_its_draw():
    pool = opened([50, 80], PoolSize(0, 100, 30, most_rows=70), most_rows=70)
    assert pool.draw(1000)[2] == 50
    with pytest.raises(NoRoom) as caught:
        pool.draw(1)
    assert (caught.value.shard, caught.value.held_rows, caught.value.shard_rows) == (1, 0, 80)
    pool.close()


def test_memory_is_asked_for_before_it_is_touched():
    asked = []
    pool = opened([50, 50, 50], PoolSize(0, 100, 60), check=asked.append)
    drawn_from(pool, 16)
    pool.close()
    assert sum(asked) == pool._num_opened * row_bytes(SCHEMA)


def test_a_closed_lane_leaves_no_thread():
    rows = Rows([50] * 10, delay=0.001)
    with no_thread_left():
        pool = opened([50] * 10, PoolSize(0, 100, 60), rows=rows)
        pool.draw(10)
        pool.close()


def test_a_lane_that_nobody_draws_from_can_be_closed():
    rows = Rows([50] * 10, delay=0.001)
    with no_thread_left():
        opened([50] * 10, PoolSize(0, 100, 60), rows=rows).close()
