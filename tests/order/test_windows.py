"""The pool shuffle is a bijection like any other, whose windows take their rows from a few blocks only."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.order.schedule import Order
from batchwright.order.windows import WindowShuffle, blocks_for, window_shuffle

lengths = st.integers(1, 3000)
block_rows = st.integers(1, 400)
window_blocks = st.integers(1, 20)
NAMES = ["web", "code", "books", "notes"]
sizes_by_name = st.lists(st.integers(1, 60), min_size=1, max_size=4).map(
    lambda sizes: dict(zip(NAMES, sizes, strict=False))
)
pools = st.tuples(st.integers(1, 20), st.integers(1, 5))


def assert_bijection(shuffled: WindowShuffle) -> None:
    image = shuffled.at(np.arange(shuffled.n))
    assert image.dtype == np.int64
    assert np.array_equal(np.sort(image), np.arange(shuffled.n))
    assert np.array_equal(shuffled.inverse(image), np.arange(shuffled.n))


def test_it_is_a_bijection_with_its_inverse_for_every_small_n_block_and_window():
    for n in range(1, 40):
        for rows in range(1, 12):
            for blocks in (1, 2, 3, 5, 16):
                assert_bijection(WindowShuffle(n, rows, blocks, n, "web", 0))


@settings(max_examples=40)
@given(lengths, block_rows, window_blocks, st.integers(0, 100))
def test_it_is_a_bijection_for_any_length_and_any_blocks(n, rows, blocks, seed):
    assert_bijection(WindowShuffle(n, rows, blocks, seed, "web", 0))


@settings(max_examples=40)
@given(lengths, block_rows, window_blocks, st.integers(0, 100))
def test_a_window_gives_the_rows_of_its_blocks_and_no_others(n, rows, blocks, seed):
    shuffled = WindowShuffle(n, rows, blocks, seed, "web", 0)
    image = shuffled.at(np.arange(n))
    for window in range(shuffled.num_windows):
        first, last = shuffled.window_start(window), shuffled.window_start(window + 1)
        assert set(shuffled.window_of(np.arange(first, last)).tolist()) == {window}
        there = shuffled.blocks(window)
        assert len(there) <= blocks
        assert np.sort(image[first:last]).tolist() == [row for begin, end in there for row in range(begin, end)]
    assert shuffled.window_start(shuffled.num_windows) == n


@given(st.integers(1, 2**60), st.integers(1, 2**61), st.integers(1, 64), st.data())
def test_the_inverse_leads_back_for_any_length(n, rows, blocks, data):
    index = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20))
    shuffled = WindowShuffle(n, rows, blocks, 7, "web", 0)
    assert shuffled.inverse(shuffled.at(index)).tolist() == index
    assert shuffled.at(shuffled.inverse(index)).tolist() == index


def test_one_window_over_everything_is_possible():
    assert_bijection(WindowShuffle(1000, 10, 10**9, 7, "web", 0))
    assert_bijection(WindowShuffle(1000, 10**9, 1, 7, "web", 0))


def test_an_index_does_not_depend_on_what_is_asked_with_it():
    shuffled = window_shuffle(10**9, 4096, 16, 5, "web", 0)
    places = [3, 14, 65_535, 65_536, 999_999_999]
    assert shuffled.at(places).tolist() == [int(shuffled.at([place])[0]) for place in places]


def test_nothing_asked_is_nothing_given():
    assert window_shuffle(100, 7, 3, 5, "web", 0).at([]).tolist() == []


@pytest.mark.parametrize(("rows", "blocks"), [(65_536, 16), (10_001, 7)])
def test_it_looks_random_inside_a_window(rows, blocks):
    shuffled = WindowShuffle(4_000_003, rows, blocks, 3, "web", 0)
    size = shuffled.window_start(2) - shuffled.window_start(1)
    image = shuffled.at(shuffled.window_start(1) + np.arange(size))
    rank = np.argsort(np.argsort(image))  # of each row among the window's rows
    error = 5 / np.sqrt(size)
    assert abs(np.corrcoef(np.arange(size) & 1, rank & 1)[0, 1]) < error
    assert abs(np.corrcoef(rank[:-1], rank[1:])[0, 1]) < error
    assert abs(np.corrcoef(np.arange(size), rank)[0, 1]) < error
    assert np.abs(np.diff(rank)).mean() == pytest.approx(size / 3, rel=0.02)  # what a true random permutation has
    assert (np.abs(np.diff(rank)) == 1).sum() < 20  # about 2 are expected


def test_windows_take_their_blocks_from_the_whole_epoch():
    shuffled = WindowShuffle(1_000_000, 1000, 16, 3, "web", 0)
    first = np.array([[begin for begin, _ in shuffled.blocks(w)] for w in range(shuffled.num_windows - 1)])
    assert first.mean(axis=1) == pytest.approx(500_000, abs=5 * 289_000 / 4)  # the mean of 16 uniform draws
    assert (np.diff(first, axis=1) == 1000).mean() < 0.05  # blocks that stayed neighbours


def test_epochs_seeds_and_sources_have_their_own_windows():
    shuffles = [
        window_shuffle(1000, 10, 4, *names) for names in [(7, "web", 0), (7, "web", 1), (7, "code", 0), (8, "web", 0)]
    ]
    assert len({tuple(shuffled.blocks(0)) for shuffled in shuffles}) == 4
    assert len({tuple(shuffled.at(range(1000)).tolist()) for shuffled in shuffles}) == 4


def test_a_window_has_16_blocks_where_it_has_the_rows_for_them():
    assert blocks_for(262_144) == (16_384, 16)
    assert blocks_for(17) == (2, 16)
    assert blocks_for(5) == (1, 5)
    assert blocks_for(1) == (1, 1)


def test_a_trillion_rows_need_no_memory_to_speak_of():
    tracemalloc.start()
    shuffled = WindowShuffle(10**12, 16_384, 16, 7, "web", 0)
    positions = 10**11 + np.arange(4096)
    assert np.array_equal(shuffled.inverse(shuffled.at(positions)), positions)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 5e6


@pytest.mark.parametrize(("rows", "blocks"), [(0, 4), (4, 0), (-1, 4)])
def test_blocks_without_rows_are_refused(rows, blocks):
    with pytest.raises(ValueError, match=f"{blocks} of {rows}"):
        WindowShuffle(10, rows, blocks, 7, "web", 0)


# As the order of a stream


@given(sizes_by_name, st.integers(0, 100), pools)
def test_every_epoch_has_every_row_once(sizes, seed, blocks):
    order = Order(sizes, seed=seed, shuffle="pool", pool=blocks)
    rows = sum(sizes.values())
    for epoch in range(3):
        draw = order.at(np.arange(epoch * rows, (epoch + 1) * rows))
        for i, size in enumerate(sizes.values()):
            assert sorted(draw.index[draw.source == i].tolist()) == list(range(size))


@given(sizes_by_name, st.integers(0, 100), pools, st.booleans(), st.integers(0, 10**9))
def test_positions_is_the_inverse_of_at(sizes, seed, blocks, weighted, first):
    weights = {name: 1 + n for n, name in enumerate(sizes)} if weighted else None
    order = Order(sizes, seed=seed, weights=weights, shuffle="pool", pool=blocks)
    positions = first + np.arange(50)
    draw = order.at(positions)
    for position, i, index, epoch in zip(positions.tolist(), *draw, strict=True):
        assert order.positions(int(i), [index], int(epoch)).tolist() == [position]


@settings(max_examples=30)
@given(
    sizes_by_name,
    st.sampled_from(["pool", "none", "global"]),
    pools,
    st.booleans(),
    st.integers(0, 200),
    st.integers(1, 30),
)
def test_stretches_foretell_the_rows_that_a_source_gives(sizes, shuffle, blocks, weighted, first, longest):
    weights = {name: 1 + n for n, name in enumerate(sizes)} if weighted else None
    order = Order(sizes, seed=1, weights=weights, shuffle=shuffle, pool=blocks if shuffle == "pool" else None)
    for source, size in enumerate(order.sizes):
        stretches = order.stretches(source, first, longest)
        expected = first
        while expected < first + 2 * size:
            stretch = next(stretches)
            assert stretch.first <= expected < stretch.last
            given_rows = order.at(order.position_of(source, np.arange(stretch.first, stretch.last)))
            assert set(given_rows.source.tolist()) == {source}
            assert set(given_rows.epoch.tolist()) == {stretch.epoch}
            foretold = [row for begin, end in stretch.rows for row in range(begin, end)]
            assert sorted(given_rows.index.tolist()) == foretold
            expected = stretch.last


@pytest.mark.parametrize(("shuffle", "blocks"), [("pool", None), ("global", (4, 4)), ("none", (4, 4))])
def test_an_order_has_blocks_if_and_only_if_it_is_a_pool(shuffle, blocks):
    with pytest.raises(AssertionError, match="if and only if"):
        Order({"web": 10}, seed=0, shuffle=shuffle, pool=blocks)


def test_the_pool_shuffle_is_pinned():
    # Never change these. A checkpoint is a position in this order: see test_the_order_is_pinned.
    assert window_shuffle(10, 2, 2, 7, "web", 0).at(range(10)).tolist() == [0, 9, 1, 8, 2, 7, 6, 3, 4, 5]
    assert window_shuffle(10, 2, 2, 7, "web", 1).at(range(10)).tolist() == [3, 2, 5, 4, 8, 9, 0, 1, 6, 7]
    assert window_shuffle(11, 3, 2, 7, "web", 0).at(range(11)).tolist() == [5, 2, 1, 3, 0, 4, 9, 7, 6, 10, 8]
    assert window_shuffle(10**6, 4096, 16, 7, "web", 0).at([0, 1, 2, 500_000, 999_999]).tolist() == [
        398315,
        19385,
        680726,
        229,
        99630,
    ]
    assert window_shuffle(10**12, 16_384, 16, 7, "web", 3).at([0, 1, 2, 10**12 - 1]).tolist() == [
        712023005623,
        712023009611,
        313360427609,
        44551147241,
    ]
    order = Order({"web": 6, "code": 3}, seed=7, shuffle="pool", pool=(2, 2))
    assert [part.tolist() for part in order.at(range(18))] == [
        [0, 1, 0, 0, 1, 0, 0, 1, 0, 0, 1, 0, 0, 1, 0, 0, 1, 0],
        [2, 2, 1, 3, 0, 0, 4, 1, 5, 3, 2, 2, 5, 1, 4, 0, 0, 1],
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1],
    ]
