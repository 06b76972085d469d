"""The order says which row of which source lies at each position, and back, without a list of anything."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.base.errors import SpecError
from batchwright.order.schedule import ORDER_VERSION, Order
from refusals import refused

NAMES = ["web", "code", "books", "notes"]
sizes_by_name = st.lists(st.integers(1, 60), min_size=1, max_size=4).map(
    lambda sizes: dict(zip(NAMES, sizes, strict=False))
)
shuffles = st.sampled_from(["global", "none"])


@given(sizes_by_name, st.integers(0, 100), shuffles)
def test_without_weights_every_epoch_has_every_row_once(sizes, seed, shuffle):
    order = Order(sizes, seed=seed, shuffle=shuffle)
    rows = sum(sizes.values())
    for epoch in range(3):
        draw = order.at(np.arange(epoch * rows, (epoch + 1) * rows))
        assert set(draw.epoch.tolist()) == {epoch}
        for i, size in enumerate(sizes.values()):
            assert sorted(draw.index[draw.source == i].tolist()) == list(range(size))


@settings(max_examples=10)
@given(sizes_by_name, st.integers(0, 100), st.lists(st.floats(0.05, 1.0), min_size=4, max_size=4))
def test_with_weights_a_source_gives_each_row_once_before_any_twice(sizes, seed, weights):
    order = Order(sizes, seed=seed, weights=dict(zip(sizes, weights, strict=False)))
    draw = order.at(np.arange(400))
    for i, size in enumerate(sizes.values()):
        index, epoch = draw.index[draw.source == i], draw.epoch[draw.source == i]
        assert epoch.tolist() == [n // size for n in range(len(epoch))]
        for e in range(len(index) // size):
            assert sorted(index[epoch == e].tolist()) == list(range(size))


@given(sizes_by_name, st.integers(0, 100), shuffles, st.booleans(), st.integers(0, 10**9))
def test_positions_is_the_inverse_of_at(sizes, seed, shuffle, weighted, first):
    weights = {name: 1 + n for n, name in enumerate(sizes)} if weighted else None
    order = Order(sizes, seed=seed, weights=weights, shuffle=shuffle)
    positions = first + np.arange(50)
    draw = order.at(positions)
    for position, i, index, epoch in zip(positions.tolist(), *draw, strict=True):
        assert order.positions(int(i), [index], int(epoch)).tolist() == [position]


@given(sizes_by_name, st.booleans(), st.integers(0, 500))
def test_counts_are_what_a_walk_would_count(sizes, weighted, position):
    order = Order(sizes, seed=1, weights=dict.fromkeys(sizes, 1.0) if weighted else None)
    source = order.at(np.arange(position)).source
    assert order.counts(position) == np.bincount(source, minlength=len(sizes)).tolist()


@given(sizes_by_name, st.booleans())
def test_a_position_does_not_depend_on_what_is_asked_with_it(sizes, weighted):
    order = Order(sizes, seed=3, weights=dict.fromkeys(sizes, 1.0) if weighted else None)
    positions = np.array([0, 5, 200, 7, 100_003, 1])
    together = order.at(positions)
    for n, position in enumerate(positions.tolist()):
        assert [int(part[0]) for part in order.at([position])] == [int(part[n]) for part in together]


def test_every_epoch_is_shuffled_anew():
    order = Order({"web": 50}, seed=0)
    epochs = [tuple(order.at(np.arange(50 * e, 50 * e + 50)).index.tolist()) for e in range(4)]
    assert len(set(epochs)) == 4


def test_shuffle_none_keeps_the_order_of_the_rows():
    draw = Order({"web": 5}, seed=0, shuffle="none").at(range(10))
    assert draw.index.tolist() == [0, 1, 2, 3, 4] * 2


@settings(max_examples=10)  # every new set of weights makes a pattern of 65,536 slots
@given(sizes_by_name, st.lists(st.floats(0.05, 1.0), min_size=4, max_size=4))
def test_exhausted_at_is_where_a_walk_sees_the_last_new_row(sizes, weights):
    order = Order(sizes, seed=0, weights=dict(zip(sizes, weights, strict=False)))
    source = order.at(np.arange(60 * 100)).source
    ends = [int(np.flatnonzero(source == i)[size - 1]) + 1 for i, size in enumerate(order.sizes)]
    assert order.exhausted_at(first=True) == min(ends)
    assert order.exhausted_at(first=False) == max(ends)


def test_a_source_without_weight_is_never_drawn():
    order = Order({"web": 5, "code": 5}, seed=0, weights={"web": 1.0})
    assert set(order.at(range(100)).source.tolist()) == {0}
    assert order.exhausted_at(first=False) == 5


def test_a_weight_for_a_source_that_is_not_there_is_refused_with_the_nearest_name():
    with refused(SpecError, parameter="weights", source="wep", remedy="'web'"):
        Order({"web": 5, "code": 5}, seed=0, weights={"wep": 1.0})


def test_a_weight_for_a_source_without_rows_is_refused():
    with refused(SpecError, parameter="weights", source="web"):
        Order({"web": 0, "code": 5}, seed=0, weights={"web": 1.0, "code": 1.0})


@pytest.mark.parametrize("weights", [None, {"web": 0.7, "code": 0.3}])
def test_a_source_of_a_trillion_rows_needs_no_memory_to_speak_of(weights):
    tracemalloc.start()
    order = Order({"web": 10**12, "code": 10**11}, seed=7, weights=weights)
    positions = 10**11 + np.arange(4096)
    draw = order.at(positions)
    for i in (0, 1):
        back = np.concatenate(
            [
                order.positions(i, draw.index[(draw.source == i) & (draw.epoch == e)], e)
                for e in np.unique(draw.epoch[draw.source == i]).tolist()
            ]
        )
        assert np.array_equal(np.sort(back), positions[draw.source == i])
    order.counts(10**11)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 50e6


def test_the_order_is_pinned():
    # Never change these. A checkpoint is a position in this order, so every job that is running now depends on it. A
    # new algorithm is a new ORDER_VERSION, and the old one stays readable.
    assert ORDER_VERSION == 1
    natural = Order({"web": 6, "code": 2}, seed=7)
    assert [part.tolist() for part in natural.at(range(8))] == [
        [0, 0, 1, 0, 0, 0, 1, 0],
        [4, 1, 0, 2, 0, 5, 1, 3],
        [0, 0, 0, 0, 0, 0, 0, 0],
    ]
    assert [part.tolist() for part in natural.at(range(8, 16))] == [
        [0, 0, 1, 0, 0, 0, 1, 0],
        [5, 1, 1, 3, 2, 0, 0, 4],
        [1, 1, 1, 1, 1, 1, 1, 1],
    ]
    mixture = Order({"web": 6, "code": 2}, seed=7, weights={"web": 0.6, "code": 0.4})
    assert [part.tolist() for part in mixture.at(range(12))] == [
        [0, 1, 0, 1, 0, 0, 1, 0, 1, 0, 0, 1],
        [4, 0, 1, 1, 2, 0, 1, 5, 0, 3, 5, 1],
        [0, 0, 0, 0, 0, 0, 1, 0, 1, 0, 1, 2],
    ]
    large = Order({"web": 10**12, "code": 10**11}, seed=7, weights={"web": 0.9, "code": 0.1})
    assert [part.tolist() for part in large.at([0, 1, 10**13])] == [
        [0, 0, 0],
        [894355866709, 123995508666, 793469531916],
        [0, 0, 8],
    ]
