"""A mixture by weight is a pattern of slots: every prefix is within one row of its share, and both ways are lookups."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.base.errors import SpecError
from batchwright.order.mix import build_pattern, integer_shares
from refusals import refused

counts_of_sources = st.lists(st.integers(0, 400), min_size=1, max_size=40).filter(any).map(tuple)


def largest_stray(counts: tuple[int, ...]) -> float:
    """How far any source is from its share after any number of draws, in rows."""
    drawn = build_pattern(counts).source_of_slot
    assert sum(counts) % len(drawn) == 0
    prefix = np.arange(1, len(drawn) + 1)
    return max(
        float(np.abs(np.cumsum(drawn == i) - prefix * (count / sum(counts))).max()) for i, count in enumerate(counts)
    )


@given(counts_of_sources)
def test_every_prefix_is_within_one_row_of_its_share(counts):
    assert largest_stray(counts) < 1


@pytest.mark.parametrize(
    "counts",
    [
        (59,) * 11 + (1,) * 28,  # where taking the largest deficit strays 1.57 rows
        (1,) * 100,
        (1000, 1),
        (1, 1000),
        (1, 2, 3, 5, 8, 13, 21, 34, 55, 89),
        (0, 7, 0, 3),
    ],
)
def test_every_prefix_of_hard_mixtures_is_within_one_row(counts):
    assert largest_stray(counts) < 1


@settings(max_examples=10)
@given(st.lists(st.floats(0.01, 1.0), min_size=2, max_size=12))
def test_every_prefix_of_weights_is_within_one_row(weights):
    _, counts = integer_shares(weights, [str(i) for i in range(len(weights))])
    assert largest_stray(tuple(counts)) < 1


@given(counts_of_sources)
def test_a_cycle_draws_each_source_as_often_as_its_count_says(counts):
    pattern = build_pattern(counts)
    repeats = sum(counts) // pattern.num_slots
    assert (pattern.counts_per_cycle * repeats).tolist() == list(counts)


@given(counts_of_sources, st.integers(0, 10**12))
def test_at_and_position_are_inverses(counts, first):
    pattern = build_pattern(counts)
    positions = first + np.arange(300)
    source, ordinal = pattern.at(positions)
    for i in np.unique(source).tolist():
        mine = source == i
        assert np.array_equal(pattern.position(i, ordinal[mine]), positions[mine])


@given(counts_of_sources)
def test_ordinals_count_each_source_from_0_without_gaps(counts):
    pattern = build_pattern(counts)
    source, ordinal = pattern.at(np.arange(3 * pattern.num_slots))
    for i in range(len(counts)):
        assert ordinal[source == i].tolist() == list(range(3 * int(pattern.counts_per_cycle[i])))


@given(counts_of_sources, st.integers(0, 2000))
def test_counts_are_what_a_walk_would_count(counts, position):
    pattern = build_pattern(counts)
    source, _ = pattern.at(np.arange(position))
    assert pattern.counts(position) == np.bincount(source, minlength=len(counts)).tolist()


@given(st.lists(st.floats(0.01, 10.0), min_size=1, max_size=20))
def test_shares_are_whole_slots_that_sum_up_and_are_within_one_slot_of_what_was_asked(weights):
    names = [str(i) for i in range(len(weights))]
    slots, counts = integer_shares(weights, names)
    assert sum(counts) == slots
    assert all(count >= 50 for count in counts)
    for weight, count in zip(weights, counts, strict=True):
        assert abs(count - weight / sum(weights) * slots) <= 1


def test_the_pattern_grows_until_the_rarest_source_has_50_slots():
    assert integer_shares([1, 1], ["a", "b"])[0] == 65_536
    slots, counts = integer_shares([0.9999, 0.0001], ["a", "b"])
    assert (slots, counts[1]) == (2**19, 52)


def test_a_share_too_small_to_keep_is_refused_by_name():
    with refused(SpecError, 1e-06, parameter="weights", source="rare"):
        integer_shares([1.0, 1e-6], ["web", "rare"])


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_weight_that_is_no_share_is_refused_by_name(weight):
    with refused(SpecError, weight, parameter="weights", source="code"):
        integer_shares([1.0, weight], ["web", "code"])


def test_weights_that_are_all_0_are_refused():
    with refused(SpecError, parameter="weights", sources="web, code"):
        integer_shares([0.0, 0.0], ["web", "code"])


def test_the_pattern_is_pinned():
    # Never change these. The pattern decides which source lies at every saved position of every running mixture.
    assert integer_shares([0.7, 0.3], ["web", "code"]) == (65_536, [45_875, 19_661])
    assert build_pattern((3, 1)).source_of_slot.tolist() == [0, 0, 1, 0]
    assert build_pattern((7, 3)).source_of_slot.tolist() == [0, 1, 0, 0, 0, 1, 0, 0, 1, 0]
    assert build_pattern((5, 3, 2)).source_of_slot.tolist() == [0, 1, 0, 2, 0, 1, 0, 2, 1, 0]
    assert build_pattern((1, 1, 1)).source_of_slot.tolist() == [0, 1, 2]
    assert build_pattern((45_875, 19_661)).source_of_slot[-12:].tolist() == [1, 0, 0, 1, 0, 0, 0, 1, 0, 0, 1, 0]
