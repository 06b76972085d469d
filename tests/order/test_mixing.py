"""How well a stream is mixed: numbers that can be checked by hand, and against theory."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.order.mixing_report import Mixing, mixing_report


def report_of(place, directory=None, **options):
    return mixing_report(np.zeros(len(place), int) if directory is None else directory, place, **options)


def slow_intraclass_correlation(values, block):
    """The mean over pairs inside blocks, by its textbook formula, written with loops; blocks of one length."""
    groups = [values[i : i + block] for i in range(0, len(values), block)]
    grand = sum(values) / len(values)
    means = [sum(g) / block for g in groups]
    between = block * sum((m - grand) ** 2 for m in means) / (len(groups) - 1)
    within = sum((x - m) ** 2 for g, m in zip(groups, means, strict=True) for x in g) / (len(groups) * (block - 1))
    return (between - within) / (between + (block - 1) * within)


# By hand


def test_two_blocks_of_two_are_as_computed_by_hand():
    # Blocks (0, 1) and (2, 3): means 0.5 and 2.5, MSB = 2 * (1 + 1) / 1 = 4, MSW = 4 * 0.25 / 2 = 0.5.
    stream = report_of([0, 1, 2, 3], block=2).stream
    assert stream.correlation == pytest.approx((4 - 0.5) / (4 + 0.5))
    # Deviations -1.5, -0.5, 0.5, 1.5: 0.75 - 0.25 + 0.75 over 2.25 + 0.25 + 0.25 + 2.25.
    assert stream.autocorrelation == pytest.approx(1.25 / 5)
    assert stream.spread == pytest.approx(0.9 * 1 / 4)


def test_blocks_of_the_far_and_the_near_correlate_negatively():
    # Both blocks have the mean 1.5: MSB = 0, and the least that blocks of two can have is -1.
    assert report_of([0, 3, 1, 2], block=2).stream.correlation == pytest.approx(-1)


def test_shares_of_directories_and_the_worst_block_are_as_counted_by_hand():
    report = report_of(np.arange(8), [0, 0, 0, 0, 0, 0, 2, 2], block=4)
    assert report.shares == {0: 0.75, 2: 0.25}
    assert report.stream.share_deviation == pytest.approx(0.25)  # (1, 0) and (0.5, 0.5) against (0.75, 0.25)


def test_what_is_left_over_belongs_to_the_last_block():
    report = report_of(np.arange(7), [0, 0, 0, 1, 1, 1, 1], block=3)
    assert report.blocks == 2
    assert report.stream.share_deviation == pytest.approx(4 / 7)  # the second block has 4 draws, all of directory 1


def test_blocks_of_unequal_length_use_a_length_between_theirs():
    # Blocks (0, 1), (2, 3, 4): grand mean 2, SSB = 2 * 1.5^2 + 3 * 1^2 = 7.5, SSW = 0.5 + 2, m = 5 - 13 / 5 = 2.4.
    between, within = 7.5 / 1, 2.5 / 3
    expected = (between - within) / (between + 1.4 * within)
    assert report_of(np.arange(5), block=2).stream.correlation == pytest.approx(expected)


@given(st.lists(st.integers(0, 5), min_size=2, max_size=6), st.integers(2, 5), st.randoms(use_true_random=False))
def test_the_correlation_is_that_of_the_textbook(some, block, random):
    place = list(range(len(some) * block))
    random.shuffle(place)
    assert report_of(place, block=block).stream.correlation == pytest.approx(
        slow_intraclass_correlation(place, block), abs=1e-9
    )


# Against theory


def test_sequential_reading_has_the_correlation_that_theory_gives_it():
    k, b = 50, 20  # blocks, draws in each
    sequential = report_of(np.arange(k * b), block=b).sequential
    assert sequential.correlation == pytest.approx((b * b * k * (k + 1) - (b + 1)) / (b * b * k * (k + 1) + b * b - 1))
    assert sequential.correlation > 0.999
    assert sequential.spread == pytest.approx(0.9 * (b - 1) / (k * b))


def test_a_perfect_shuffle_has_no_correlation_and_covers_everything():
    n, b = 200_000, 1000
    shuffle = report_of(np.arange(n), np.arange(n) // (n // 2), block=b).shuffle
    # With 200 blocks the estimate has a standard deviation of about sqrt(2 / 200) / 1000.
    assert abs(shuffle.correlation) < 5 * np.sqrt(2 / 200) / b
    assert abs(shuffle.autocorrelation) < 5 / np.sqrt(n)
    assert shuffle.spread == pytest.approx(0.9 * (b - 1) / (b + 1), abs=0.002)
    assert shuffle.share_deviation < 5 * np.sqrt(0.25 / b)


def test_the_mean_correlation_of_many_shuffles_is_zero():
    # Not so for the plain ratio of the variance between blocks to all: that is about 1 / 10 here.
    found = [report_of(np.arange(200), block=10, seed=seed).shuffle.correlation for seed in range(300)]
    assert abs(np.mean(found)) < 4 * np.std(found) / np.sqrt(300)


def test_a_pool_lies_between_sequential_reading_and_a_shuffle():
    # A sliding window of a fifth of the rows, drawn blindly.
    rng = np.random.default_rng(0)
    place = np.argsort(np.arange(20_000) + rng.uniform(0, 4000, 20_000))
    report = report_of(place, block=500)
    assert report.shuffle.correlation < 0.1 < report.stream.correlation < report.sequential.correlation
    assert report.sequential.spread < 0.1 < report.stream.spread < 0.3 < report.shuffle.spread


# What it compares with


def test_a_stream_in_sequence_is_its_own_sequential_reading():
    report = report_of(np.arange(100), np.arange(100) // 50, block=10)
    assert report.stream == report.sequential
    assert report.sequential.share_deviation == pytest.approx(0.5)


def test_sequential_reading_and_shuffle_do_not_depend_on_the_order_of_the_stream():
    place, directory = np.arange(100), np.arange(100) % 3
    order = np.random.default_rng(0).permutation(100)
    straight, other = report_of(place, directory, block=10), report_of(place[order], directory[order], block=10)
    assert (straight.sequential, straight.shuffle) == (other.sequential, other.shuffle)
    assert straight.stream != other.stream


def test_the_shuffle_is_keyed_by_the_seed():
    one, again, other = (report_of(np.arange(100), block=10, seed=seed) for seed in (1, 1, 2))
    assert one == again
    assert one.shuffle != other.shuffle
    assert one.stream == other.stream


def test_gaps_between_places_make_no_difference():
    place = np.random.default_rng(0).permutation(60)
    assert report_of(place, block=10) == report_of(7 * place + 3, block=10)


def test_a_row_that_is_drawn_twice_has_one_place():
    # Ranks 0.5, 0.5, 2.5, 2.5: blocks without any difference inside.
    report = report_of([4, 4, 9, 9], block=2)
    assert report.stream.correlation == 1.0
    assert report.stream.spread == 0.0


def test_equal_places_have_the_mean_of_their_ranks():
    # Ranks 0.5, 0.5, 2, 3, mean 1.5: (1 - 0.5 + 0.75) over (1 + 1 + 0.25 + 2.25).
    assert report_of([4, 4, 9, 10], block=2).stream.autocorrelation == pytest.approx(1.25 / 4.5)


# Little data


@pytest.mark.parametrize(
    ("num_draws", "blocks", "shares"), [(0, 0, {}), (1, 1, {0: 1.0}), (2, 1, {0: 1.0}), (9, 1, {0: 1.0})]
)
def test_too_few_draws_give_defined_numbers(num_draws, blocks, shares):
    report = report_of(np.arange(num_draws), block=8)
    assert (report.draws, report.blocks, report.shares) == (num_draws, blocks, shares)
    for mixing in (report.stream, report.sequential, report.shuffle):
        assert all(np.isfinite(list(asdict(mixing).values())))
        assert mixing.correlation == 0.0
        assert mixing.share_deviation == 0.0


def test_rows_of_one_place_have_no_correlation():
    assert report_of([5] * 12, block=4).stream == Mixing(0.0, 0.0, 0.0, 0.0)


# How it is shown


def test_a_report_goes_through_json():
    report = report_of(np.arange(40), np.arange(40) % 2, block=10)
    through = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert through == report.to_dict()
    assert through["shares"] == {"0": 0.5, "1": 0.5}
    assert through["stream"]["correlation"] == report.stream.correlation


def test_a_report_is_readable():
    lines = str(report_of(np.arange(4000), np.arange(4000) % 2, block=1000)).splitlines()
    assert lines[:2] == ["4,000 draws in 4 blocks of 1,000", "directories  0: 50.0%, 1: 50.0%"]
    assert lines[2].split() == ["correlation", "next", "draw", "spread", "share", "off", "by"]
    assert [line.split()[0] for line in lines[3:]] == ["stream", "sequential", "shuffle"]
    assert lines[4].split()[1] == f"{report_of(np.arange(4000), block=1000).sequential.correlation:.4f}"
