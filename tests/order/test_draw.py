"""Each slot draws the released row that is due first, whichever way the slots are gone through."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.order import mix
from batchwright.order.mix import draw_slots


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
    monkeypatch.setattr(mix, "_WORD_BITS", 0)
    assert draw_slots(counts).tolist() == expected


def test_a_pattern_that_is_drawn_in_parts_is_the_same(monkeypatch):
    counts = (300, 211, 7, 7, 50, 1)
    expected = draw_slots(counts).tolist()
    monkeypatch.setattr(mix, "_SLOTS_AT_ONCE", 100)
    assert draw_slots(counts).tolist() == expected


@given(st.lists(st.integers(0, 400), min_size=2, max_size=8).filter(any), st.integers(1, 700))
def test_the_first_slots_alone_are_those_of_the_whole(counts, num_slots):
    whole = draw_slots(tuple(counts))
    assert draw_slots(tuple(counts), num_slots).tolist() == whole[:num_slots].tolist()
