"""An order that is changed on the way: nothing before the change moves, nothing is lost, nothing comes twice."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.order.schedule import NEVER, Order
from batchwright.order.sweep import OrderChange

FAR = 900
"""Positions that are looked at."""


def weights_of(draw, names):
    return {name: draw(st.sampled_from([0.5, 1.0, 2.0, 3.0])) for name in names if draw(st.booleans())} or {names[0]: 1}


@st.composite
def histories(draw):
    """(settings of an order, its changes, one after another)."""
    sizes = {name: draw(st.integers(1, 90)) for name in ["web", "code", "math"][: draw(st.integers(1, 3))]}
    weights = None if draw(st.booleans()) else weights_of(draw, list(sizes))
    caps = {} if weights is None else {n: draw(st.integers(1, 3)) for n in sizes if draw(st.integers(0, 3)) == 0}
    spec = {"sizes": sizes, "seed": draw(st.integers(0, 5)), "weights": weights, "max_epochs": caps}
    spec["shuffle"] = draw(st.sampled_from(["global", "none"]))
    names, changes, at, is_mixture = dict(sizes), [], 0, weights is not None
    for _ in range(draw(st.integers(0, 4))):
        at += draw(st.integers(1, 200))
        joining = {}
        if draw(st.booleans()):
            known = draw(st.sampled_from([*names, f"new-{at}"]))
            joining[known] = names.get(known, 0) + draw(st.integers(1, 40))
        names |= joining
        asked = weights_of(draw, list(names)) if draw(st.booleans()) else None
        is_mixture |= asked is not None
        changes.append(OrderChange(at, None if asked is None else ((at, asked),), tuple(joining.items())))
    return spec, changes


def made(spec, changes):
    return Order(**{**spec, "changes": changes})


def end_of(order):
    return FAR if order.epochs.limit is None else min(FAR, order.epochs.limit)


@settings(deadline=None, max_examples=150)
@given(histories())
def test_positions_before_a_change_are_those_of_the_order_without_it(history):
    spec, changes = history
    for number, change in enumerate(changes):
        before, after = made(spec, changes[:number]), made(spec, changes[: number + 1])
        positions = np.arange(min(change.at, end_of(before)))
        for one, two in zip(before.at(positions), after.at(positions), strict=True):
            assert np.array_equal(one, two)


@settings(deadline=None, max_examples=150)
@given(histories())
def test_every_source_gives_every_row_of_each_epoch_once_and_in_order(history):
    order = made(*history)
    draw = order.at(np.arange(end_of(order)))
    given_rows = defaultdict(list)
    for source, index, epoch in zip(draw.source.tolist(), draw.index.tolist(), draw.epoch.tolist(), strict=True):
        given_rows[source].append((epoch, index))
    for source, rows in given_rows.items():
        epochs = [epoch for epoch, _ in rows]
        assert epochs == sorted(epochs)
        for epoch in range(epochs[-1] + 1):
            indices = [index for e, index in rows if e == epoch]
            _, size = order.epoch_size(source, epoch)
            assert len(set(indices)) == len(indices)
            assert set(indices) <= set(range(size))
            if epoch < epochs[-1]:
                assert len(indices) == size, "an epoch must end before the next one begins"


@settings(deadline=None, max_examples=100)
@given(histories(), st.data())
def test_a_row_is_found_where_it_lies_and_counts_are_what_came_before(history, data):
    order = made(*history)
    end = end_of(order)
    if not end:
        return
    draw = order.at(np.arange(end))
    for position in data.draw(st.lists(st.integers(0, end - 1), min_size=1, max_size=8)):
        source, index, epoch = (int(part[position]) for part in draw)
        assert order.positions(source, [index], epoch).tolist() == [position]
        assert order.counts(position) == [int((draw.source[:position] == s).sum()) for s in range(len(order.names))]


@settings(deadline=None, max_examples=100)
@given(histories())
def test_a_capped_source_never_gives_more_than_its_epochs(history):
    spec, changes = history
    order = made(spec, changes)
    draw = order.at(np.arange(end_of(order)))
    for name, cap in spec["max_epochs"].items():
        if spec["weights"] is not None:
            mine = draw.source == order.names.index(name)
            assert not mine.any() or draw.epoch[mine].max() < cap


def test_a_capped_source_leaves_and_the_others_share_its_place():
    order = Order({"web": 100, "code": 10}, seed=0, weights={"web": 1, "code": 1}, max_epochs={"code": 2})
    (binding,) = order.bindings
    assert (binding.source, binding.epochs) == ("code", 2)
    draw = order.at(np.arange(200))
    assert (draw.source[: binding.position] == 1).sum() == 20
    assert draw.source[binding.position - 1] == 1  # its last row
    assert not draw.source[binding.position :].any()


@pytest.mark.parametrize(("exhausted", "ends"), [("repeat", None), ("renormalise", 110), ("stop", 20)])
def test_what_happens_when_a_source_has_given_its_rows(exhausted, ends):
    order = Order({"web": 100, "code": 10}, seed=0, weights={"web": 1, "code": 1}, exhausted=exhausted)
    assert order.epochs.limit == ends
    assert len(order.bindings) == {"repeat": 0, "renormalise": 2, "stop": 1}[exhausted]


def test_without_weights_a_new_source_waits_for_the_next_epoch():
    order = Order({"web": 10}, seed=0, changes=[OrderChange(4, sizes=(("code", 5),))])
    assert order.at(np.arange(10)).source.tolist() == [0] * 10
    assert sorted(order.at(np.arange(10, 25)).source.tolist()) == [0] * 10 + [1] * 5
    assert order.epochs.eras == ((0, 10), (10, 15))


def test_a_source_that_grew_ends_its_epoch_over_the_rows_it_had():
    order = Order(
        {"web": 10, "code": 4}, seed=3, weights={"web": 1, "code": 1}, changes=[OrderChange(5, sizes=(("web", 13),))]
    )
    draw = order.at(np.arange(60))
    web = [(e, i) for s, i, e in zip(*(part.tolist() for part in draw), strict=True) if s == 0]
    assert sorted(i for e, i in web if e == 0) == list(range(10))
    assert sorted(i for e, i in web if e == 1) == list(range(13))


def test_weights_that_come_later_by_schedule_are_replaced_by_a_change_before_them():
    order = Order(
        {"a": 50, "b": 50},
        seed=0,
        weights=((0, {"a": 1}), (100, {"b": 1})),
        changes=[OrderChange(60, weights=((60, {"a": 1, "b": 1}),))],
    )
    assert not order.at(np.arange(60)).source.any()
    assert abs(int(order.at(np.arange(60, 160)).source.sum()) - 50) <= 1


def test_a_row_that_is_never_given_has_no_position():
    order = Order({"a": 5, "b": 5}, seed=0, weights={"a": 1}, changes=[OrderChange(3, weights=((3, {"a": 1}),))])
    assert order.positions(1, [0], 0).tolist() == [NEVER]


def test_num_rows_can_move_the_end_of_the_run():
    order = Order({"a": 5}, seed=0, weights={"a": 1}, num_rows=20, changes=[OrderChange(20, num_rows=30)])
    assert order.epochs.end_of(1) == 30


def test_where_a_changed_pattern_goes_on_is_pinned():
    """Saved positions of running jobs depend on it: a change here is a new order_version."""
    schedule = ((0, {"web": 3, "code": 1}), (10, {"web": 2, "code": 1}), (20, {"web": 1, "code": 2}))
    order = Order({"web": 200, "code": 50}, seed=0, weights=schedule, shuffle="none")
    draw = order.at(np.arange(30))
    assert "".join(map(str, draw.source.tolist())) == "001000100010010010011101101101"
    assert draw.index[-6:].tolist() == [9, 15, 10, 11, 16, 12]
