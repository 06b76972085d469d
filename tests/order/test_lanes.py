"""Lanes: every row still comes once in an epoch, and a rank that reads whole lanes touches only their windows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.base.errors import SpecError
from batchwright.order.lanes import LanedOrder
from refusals import refused

SIZES = {"web": 331, "code": 77}


def laned(lanes=(4, 3), sizes=SIZES, weights=None, **given_):
    settings = {"seed": 5, "pool": (8, 3), "num_rows": None, "skips": ()} | given_
    return LanedOrder(
        sizes, weights=((0, weights),) if not isinstance(weights, tuple) else weights, lanes=lanes, **settings
    )


@given(
    lanes=st.integers(1, 6),
    lane_rows=st.integers(1, 9),
    block=st.integers(1, 20),
    window=st.integers(1, 5),
    web=st.integers(24, 300),
    code=st.integers(24, 90),
)
def test_without_weights_every_row_comes_once_in_every_epoch(lanes, lane_rows, block, window, web, code):
    order = laned((lanes, lane_rows), {"web": web, "code": code}, pool=(block, window))
    total = web + code
    for epoch in range(2):
        draw = order.at(np.arange(epoch * total, (epoch + 1) * total))
        pairs = sorted(zip(draw.source.tolist(), draw.index.tolist(), strict=True))
        assert pairs == [(0, i) for i in range(web)] + [(1, i) for i in range(code)]
        assert set(draw.epoch.tolist()) == {epoch}


@given(lanes=st.integers(1, 6), lane_rows=st.integers(1, 9), data=st.data())
def test_with_weights_every_epoch_of_a_source_has_each_of_its_rows_once(lanes, lane_rows, data):
    weights = ((0, {"web": 1.0, "code": 2.0}), (data.draw(st.integers(1, 500)), {"web": 3.0, "code": 1.0}))
    order = laned((lanes, lane_rows), weights=weights)
    draw = order.at(np.arange(3000))
    for source, size in enumerate(SIZES.values()):
        mine = draw.source == source
        pairs = list(zip(draw.epoch[mine].tolist(), draw.index[mine].tolist(), strict=True))
        assert len(set(pairs)) == len(pairs)
        for epoch in range(max(e for e, _ in pairs) - 1):  # lanes end an epoch a little before or after each other
            assert sorted(i for e, i in pairs if e == epoch) == list(range(size))


@given(lanes=st.integers(1, 5), weights=st.sampled_from([None, {"web": 2.0, "code": 1.0}]), data=st.data())
def test_a_row_is_found_where_it_lies(lanes, weights, data):
    order = laned((lanes, 4), weights=weights)
    draw = order.at(np.arange(1500))
    for position in data.draw(st.lists(st.integers(0, 1499), min_size=1, max_size=6)):
        source, index, epoch = (int(part[position]) for part in draw)
        assert order.positions(source, [index], epoch).tolist() == [position]
        assert order.counts(position) == [int((draw.source[:position] == s).sum()) for s in range(2)]
        assert order.epochs_begun(source, position + 1) >= epoch + 1


@pytest.mark.parametrize("weights", [None, {"web": 2.0, "code": 1.0}])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_rank_reads_only_the_windows_of_its_lanes(weights, world_size):
    lanes, lane_rows = 4, 6
    order = laned((lanes, lane_rows), {"web": 960, "code": 480}, weights=weights, pool=(16, 5))
    batch = lanes * lane_rows
    places = {}
    for rank in range(world_size):
        share = np.arange(batch * rank // world_size, batch * (rank + 1) // world_size)
        draw = order.at((np.arange(40)[:, None] * batch + share).ravel())
        first = draw.epoch == 0
        touched = set(zip(draw.source[first].tolist(), (draw.index[first] // 16).tolist(), strict=True))
        mine = set()
        for view in order.views(rank, world_size):
            for source in range(2):
                for stretch in view.stretches(source, 0, 10**6):
                    if stretch.epoch:
                        break
                    mine |= {(source, row // 16) for a, b in stretch.rows for row in range(a, b)}
        assert touched <= mine
        places[rank] = mine
    if world_size > 1:
        assert len(set.intersection(*places.values())) <= 2 * lanes, "only blocks at the border of two lanes are shared"


def test_each_batch_has_equally_many_rows_of_each_lane_whatever_the_ranks():
    order = laned((4, 3))
    lane, _ = order._split(np.arange(24))
    assert lane.tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3 + [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3


def test_a_source_with_too_few_rows_for_its_lanes_is_refused_by_name():
    with refused(SpecError, "7 rows", "4 lanes", parameter="lanes", source="code", remedy="lanes=1"):
        laned(sizes={"web": 100, "code": 7})


def test_the_order_in_lanes_is_pinned():
    """Saved positions of running jobs depend on it: a change here is a new order_version."""
    draw = laned((2, 2), {"web": 40, "code": 9}, pool=(4, 2)).at(np.arange(12))
    assert draw.source.tolist() == [0, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0]
    assert draw.index.tolist() == [9, 8, 27, 35, 4, 20, 33, 7, 10, 21, 32, 34]
    weighted = laned((2, 2), {"web": 40, "code": 9}, pool=(4, 2), weights={"web": 1.0, "code": 1.0})
    assert weighted.at(np.arange(12)).index.tolist() == [9, 0, 27, 8, 8, 1, 35, 6, 20, 2, 33, 7]
