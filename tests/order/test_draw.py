"""Each slot draws the released row that is due first, whichever way the slots are gone through."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.order import draw
from batchwright.order.draw import draw_slots


def drawn_by_the_rule(counts: tuple[int, ...]) -> list[int]:
    """The rule of the module's docstring, in fractions and without any haste."""
    live, slots = [i for i, count in enumerate(counts) if count], sum(counts)
    if len(live) == 1:
        return live * slots
    s, given, drawn = Fraction(1, 2 * len(live) - 2), [0] * len(counts), []
    for slot in range(1, slots + 1):
        due = [
            (Fraction(slots, counts[i]) * (given[i] + 1 - s), i)
            for i in live
            if given[i] < counts[i] and slot >= Fraction(slots, counts[i]) * (given[i] + s)
        ]
        drawn.append(min(due)[1])
        given[drawn[-1]] += 1
    return drawn


@settings(max_examples=40)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any).map(tuple))
def test_slots_are_drawn_by_the_rule(counts):
    assert draw_slots(counts).tolist() == drawn_by_the_rule(counts)


def test_due_dates_that_fit_no_machine_word_give_the_same_slots(monkeypatch):
    counts = (300, 211, 7, 7, 50, 1)
    expected = draw_slots(counts).tolist()
    monkeypatch.setattr(draw, "_WORD_BITS", 0)
    assert draw_slots(counts).tolist() == expected


def test_a_pattern_that_is_drawn_in_parts_is_the_same(monkeypatch):
    counts = (300, 211, 7, 7, 50, 1)
    expected = draw_slots(counts).tolist()
    monkeypatch.setattr(draw, "_SLOTS_AT_ONCE", 100)
    assert draw_slots(counts).tolist() == expected


@pytest.fixture
def small_parts(monkeypatch):
    """Patterns of any length are drawn in parts of 64 slots; and whether the parts fitted together, each time."""
    fitted, in_parts = [], draw._draw_in_parts
    monkeypatch.setattr(draw, "_LONG", 1)
    monkeypatch.setattr(draw, "_PART_SLOTS", 64)
    monkeypatch.setattr(draw, "_LEAD_SLOTS", 40)

    def watched(*arguments):
        found = in_parts(*arguments)
        fitted.append(found is not None)
        return found

    monkeypatch.setattr(draw, "_draw_in_parts", watched)
    return fitted


def drawn_in_turn(counts: tuple[int, ...]) -> list[int]:
    live = [i for i, count in enumerate(counts) if count]
    return np.array(live)[draw._draw_in_turn(sum(counts), len(live), *draw._rows(counts, live, sum(counts)))].tolist()


@pytest.mark.parametrize("weights", ["equal", "zipf", "dirichlet", "one rare", "some zero"])
def test_a_pattern_that_is_drawn_in_many_places_at_once_is_the_same(weights, small_parts):
    random = np.random.default_rng(1)
    for num_sources in (2, 3, 7, 20):
        shares = {
            "equal": np.ones(num_sources),
            "zipf": 1 / np.arange(1, num_sources + 1),
            "dirichlet": random.dirichlet(np.ones(num_sources)) + 1e-3,
            "one rare": np.array([1e-3] + [1.0] * (num_sources - 1)),
            "some zero": np.array([1.0, *random.integers(0, 3, num_sources - 2), 1.0]),
        }[weights]
        counts = (shares / shares.sum() * 4096).astype(int)
        counts[-1] += 4096 - counts.sum()
        assert draw_slots(tuple(counts.tolist())).tolist() == drawn_in_turn(tuple(counts.tolist()))
    assert any(small_parts)


@pytest.mark.parametrize("counts", [(2693, 1402, 1), (2700, 1300, 96), (3000, 1000, 90, 6)])
def test_a_row_that_arrives_where_one_still_waits_comes_after_it(counts, small_parts):
    assert draw_slots(counts).tolist() == drawn_in_turn(counts)
    assert small_parts == [True]


def test_a_wrong_guess_is_noticed(small_parts, monkeypatch):
    counts = (1500, 1000, 1000, 500, 90, 6)
    guess = draw._guess_waiting
    monkeypatch.setattr(draw, "_LEAD_SLOTS", 1)
    monkeypatch.setattr(draw, "_guess_waiting", lambda *arguments: guess(*arguments)[:, ::-1].copy())
    assert draw_slots(counts).tolist() == drawn_in_turn(counts)
    assert small_parts == [False]


@given(st.lists(st.integers(0, 400), min_size=2, max_size=8).filter(any), st.integers(1, 700))
def test_the_first_slots_alone_are_those_of_the_whole(counts, num_slots):
    whole = draw_slots(tuple(counts))
    assert draw_slots(tuple(counts), num_slots).tolist() == whole[:num_slots].tolist()
