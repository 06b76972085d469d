"""Whole sources are interleaved in proportion to their sizes: every row once per epoch, found both ways."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.order.mix import Natural

sizes_of_sources = st.lists(st.integers(0, 60), min_size=1, max_size=6).filter(any).map(tuple)


@given(sizes_of_sources)
def test_an_epoch_has_every_row_of_every_source_once(sizes):
    source, ordinal = Natural(sizes).at(np.arange(sum(sizes)))
    for i, size in enumerate(sizes):
        assert ordinal[source == i].tolist() == list(range(size))


@given(sizes_of_sources, st.randoms(use_true_random=False))
def test_positions_may_be_asked_in_any_order(sizes, random):
    natural = Natural(sizes)
    positions = list(range(natural.num_rows))
    random.shuffle(positions)
    source, ordinal = natural.at(np.array(positions))
    straight_source, straight_ordinal = natural.at(np.arange(natural.num_rows))
    assert np.array_equal(source, straight_source[positions])
    assert np.array_equal(ordinal, straight_ordinal[positions])


@given(sizes_of_sources)
def test_position_is_the_inverse_of_at(sizes):
    natural = Natural(sizes)
    positions = np.arange(natural.num_rows)
    source, ordinal = natural.at(positions)
    for i in np.unique(source).tolist():
        assert np.array_equal(natural.position(i, ordinal[source == i]), positions[source == i])


@given(sizes_of_sources)
def test_counts_are_what_a_walk_would_count(sizes):
    natural = Natural(sizes)
    source, _ = natural.at(np.arange(natural.num_rows))
    for position in range(natural.num_rows + 1):
        assert natural.counts(position) == np.bincount(source[:position], minlength=len(sizes)).tolist()


@given(st.lists(st.integers(1, 10**15), min_size=2, max_size=6).map(tuple), st.data())
def test_both_ways_agree_in_sources_too_large_to_list(sizes, data):
    natural = Natural(sizes)
    positions = np.array(sorted(data.draw(st.sets(st.integers(0, natural.num_rows - 1), min_size=1, max_size=5))))
    source, ordinal = natural.at(positions)
    for position, i, j in zip(positions.tolist(), source.tolist(), ordinal, strict=True):
        assert 0 <= j < sizes[i]
        assert natural.position(i, np.array([j])).tolist() == [position]
        assert natural.counts(position)[i] == j
        assert sum(natural.counts(position)) == position


@pytest.mark.parametrize("sizes", [(6, 2), (100, 10, 1), (1000, 999), (5, 5, 5), (4000, 1, 77)])
def test_every_prefix_is_in_natural_proportion(sizes):
    source, _ = Natural(sizes).at(np.arange(sum(sizes)))
    prefix = np.arange(1, sum(sizes) + 1)
    for i, size in enumerate(sizes):
        stray = np.abs(np.cumsum(source == i) - prefix * size / sum(sizes)).max()
        assert stray < len(sizes)


@pytest.mark.parametrize("gap", [1000, 4000, 60_000])
def test_memory_depends_on_how_many_positions_are_asked_not_on_how_far_they_lie_apart(gap):
    natural = Natural((10**12, 10**11))
    positions = 10**11 + gap * np.arange(4_000_000 // gap)  # so near to each other that merging what is between tempts
    tracemalloc.start()
    source, ordinal = natural.at(positions)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 20e6
    for i in (0, 1):
        assert np.array_equal(natural.position(i, ordinal[source == i]), positions[source == i])


def test_the_interleaving_is_pinned():
    # Never change these: the interleaving decides which source lies at every saved position of every running union.
    source, ordinal = Natural((6, 3, 1)).at(np.arange(10))
    assert source.tolist() == [0, 1, 0, 0, 1, 2, 0, 0, 1, 0]
    assert ordinal.tolist() == [0, 0, 1, 2, 1, 0, 3, 4, 2, 5]
    assert Natural((10**12, 3 * 10**11)).counts(10**12) == [769230761532, 230769238468]
