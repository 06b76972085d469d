"""Which row is drawn when: by a slow reference, by golden numbers, and by what must hold for any sizes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.base.seeds import key_of, mix64
from batchwright.order.refills import NoRoom, PoolSize, Refills, generations, lane_share, mixed_in, num_rows_of, replay

NAMES = (7, "pool", 0, 0)


def drawn(shards, sizes, factor=1, names=NAMES):
    """The entries of an epoch, in the order of drawing."""
    refills = Refills(shards.__getitem__, len(shards), sizes, factor)
    return np.concatenate([g.order[: g.until - g.refill.at] for g in generations(refills, names)]).tolist()


def drawn_slowly(shards, entries, threshold, factor=1, names=NAMES):
    """The same, entry by entry, with a list as the pool."""
    pool, result, row, number = [], [], 0, 0
    waiting = list(shards)
    while pool or waiting:
        if waiting and len(pool) <= threshold:
            is_first = True
            while waiting and (is_first or len(pool) + waiting[0] * factor <= entries):
                rows = waiting.pop(0)
                pool += range(row * factor, (row + rows) * factor)
                row, is_first = row + rows, False
            key, bits = np.uint64(key_of(*names, number)), max(len(pool) - 1, 1).bit_length()
            hashes = mix64(np.arange(len(pool), dtype=np.uint64), key).tolist()
            pool = [pool[i] for i in sorted(range(len(pool)), key=lambda i: (hashes[i] >> bits, i))]
            number += 1
        else:
            result.append(pool.pop(0))
    return result


SHARDS = st.lists(st.integers(0, 30), min_size=1, max_size=8)
POOLS = st.integers(1, 60).flatmap(lambda entries: st.tuples(st.just(entries), st.integers(0, entries - 1)))


@given(SHARDS, POOLS, st.sampled_from([1, 2, 5]))
def test_the_stream_is_that_of_a_list_drawn_entry_by_entry(shards, pool, factor):
    assert drawn(shards, [PoolSize(0, *pool)], factor) == drawn_slowly(shards, *pool, factor)


@given(SHARDS, POOLS, st.sampled_from([1, 3]))
def test_every_entry_is_drawn_once(shards, pool, factor):
    assert sorted(drawn(shards, [PoolSize(0, *pool)], factor)) == list(range(sum(shards) * factor))


@given(SHARDS, POOLS, st.sampled_from([1, 3]), st.data())
def test_a_replay_leaves_what_would_be_drawn_next(shards, pool, factor, data):
    sizes = [PoolSize(0, *pool)]
    whole = drawn(shards, sizes, factor)
    at = data.draw(st.integers(0, len(whole)))
    refills = Refills(shards.__getitem__, len(shards), sizes, factor)
    left = replay(refills, at, NAMES)
    due = refills.due()
    until = refills.end() if due is None else due
    assert left[: until - at].tolist() == whole[at:until]


@given(SHARDS, POOLS, POOLS, st.data())
def test_another_size_from_some_draw_on_changes_nothing_before_and_loses_nothing(shards, pool, other, data):
    before = drawn(shards, [PoolSize(0, *pool)])
    at = data.draw(st.integers(0, len(before)))
    after = drawn(shards, [PoolSize(0, *pool), PoolSize(at, *other)])
    assert after[:at] == before[:at]
    assert sorted(after) == sorted(before)


@given(SHARDS, POOLS)
def test_without_names_rows_come_as_they_are(shards, pool):
    assert drawn(shards, [PoolSize(0, *pool)], names=None) == list(range(sum(shards)))


def test_the_order_is_pinned():
    # States saved by running jobs are numbers of draws in this order: if it changes, they mean other rows.
    stream = drawn([6, 5, 7, 4], [PoolSize(0, entries=12, threshold=8)])
    assert stream == [5, 4, 6, 0, 9, 11, 14, 3, 2, 17, 1, 20, 7, 10, 15, 18, 16, 12, 19, 8, 13, 21]


def test_a_refill_happens_at_the_draw_that_leaves_the_threshold():
    refills = Refills([4, 4, 4].__getitem__, 3, [PoolSize(0, entries=8, threshold=6)])
    assert refills.due() == 0
    assert refills.next(0).num_rows == 8
    assert refills.due() == 2


def test_at_least_one_shard_is_added_and_others_while_they_fit():
    refills = Refills([50, 5, 5, 5].__getitem__, 4, [PoolSize(0, entries=20, threshold=10)])
    assert refills.next(0).shards == range(1)  # too large, but the first
    assert refills.due() == 40
    assert refills.next(10).shards == range(1, 3)  # 10 and two of 5 are 20; a third does not fit


def test_the_memory_limit_makes_a_refill_smaller():
    refills = Refills([5, 5, 5, 5].__getitem__, 4, [PoolSize(0, entries=20, threshold=10, most_rows=12)])
    assert refills.next(0).num_rows == 10


def test_where_not_one_shard_fits_nothing_is_added():
    refills = Refills([5, 9].__getitem__, 2, [PoolSize(0, entries=20, threshold=4, most_rows=8)])
    refills.next(0)
    with pytest.raises(NoRoom) as refused:
        refills.next(0)
    assert (refused.value.shard, refused.value.held_rows, refused.value.shard_rows) == (1, 0, 9)
    assert refills.due() == 5  # still


@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=8),
    st.integers(1, 30),
    st.integers(0, 30),
    st.integers(12, 30),
    st.integers(1, 4),
)
def test_any_limit_that_holds_the_largest_shard_is_kept_and_loses_nothing(
    shards, entries, threshold, most_rows, factor
):
    refills = Refills(shards.__getitem__, len(shards), [PoolSize(0, entries, threshold, most_rows)], factor)
    every = []
    for generation in generations(refills, NAMES):
        assert num_rows_of(generation.order, factor) <= most_rows
        every += generation.order[: generation.until - generation.refill.at].tolist()
    assert sorted(every) == list(range(sum(shards) * factor))


def test_a_larger_limit_from_the_refused_draw_on_continues_there():
    sizes = [PoolSize(0, 20, 4, most_rows=8), PoolSize(5, 20, 4, most_rows=9)]
    assert sorted(drawn([5, 9], sizes)) == list(range(14))


@given(st.integers(0, 50), st.integers(0, 40), st.integers(1, 9))
def test_lanes_share_a_shard_without_loss(first, rows, lanes):
    shares = [lane_share(first, rows, lane, lanes) for lane in range(lanes)]
    places = [(offset + n * lanes, lane) for lane, (offset, count) in enumerate(shares) for n in range(count)]
    assert sorted(place for place, _ in places) == list(range(rows))
    assert all((first + place) % lanes == lane for place, lane in places)


@pytest.mark.parametrize("n", [0, 1, 2, 3, 65_537, 200_000])
def test_a_permutation_has_every_number_once(n):
    assert (np.sort(mixed_in(np.arange(n // 3), np.arange(n // 3, n), key=n)) == np.arange(n)).all()


def test_a_permutation_looks_random():
    n = 1_000_000
    permuted = mixed_in(np.empty(0, np.int64), np.arange(n), key=3)
    assert abs(np.corrcoef(permuted % 2, np.arange(n) % 2)[0, 1]) < 0.005
    assert abs(np.corrcoef(permuted, np.arange(n))[0, 1]) < 0.005
    assert abs(np.abs(np.diff(permuted)).mean() / (n / 3) - 1) < 0.005


def test_other_keys_permute_otherwise():
    first, second = (mixed_in(np.empty(0, np.int64), np.arange(1000), key) for key in (1, 2))
    assert (first == second).mean() < 0.01


def test_rows_are_counted_by_their_entries():
    assert num_rows_of(np.array([7, 6, 0]), 2) == 2
    assert num_rows_of(np.array([7, 6, 0]), 1) == 3
