"""Which rows stay and which go: the counts, the ties, the nulls, and the choices that saved buffers depend on."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.base.errors import SpecError
from batchwright.base.seeds import mix64
from batchwright.buffer.retain import below, check_by, choose, column_of, drop, keep, kept_count
from batchwright.buffer.schema import Numbers
from refusals import refused

KEYS = st.integers(0, 2**64 - 1)
CHI_SQUARE_1E6 = {5: 35.9, 9: 44.8, 19: 63.7, 69: 139.8, 189: 296.2}
"""By degrees of freedom: what a fair draw exceeds once in a million. The seeds are fixed: no run is left to luck."""


def chi_square(counts, expected):
    counts, expected = np.asarray(counts, float), np.asarray(expected, float)
    return float(((counts - expected) ** 2 / expected).sum())


def rows(chosen, n):
    """A slice or an array of rows as a list."""
    return list(range(n))[chosen] if isinstance(chosen, slice) else chosen.tolist()


@pytest.mark.parametrize(
    ("n", "fraction", "kept"),
    [
        (10, 0.5, 5),
        (3, 0.5, 1),
        (100, 0.29, 29),  # 28.999999999999996 in floats
        (10, 1, 10),
        (10, 1.0, 10),
        (10, 0, 0),
        (10, -0.5, 0),
        (10, float("-inf"), 0),
        (0, 0.5, 0),
        (7, np.float64(0.999), 6),
        (9, Fraction(1, 3), 3),
        (10, np.int64(1), 10),
    ],
)
def test_the_kept_share_is_rounded_down(n, fraction, kept):
    assert kept_count(n, fraction) == kept


@pytest.mark.parametrize(
    ("fraction", "named", "remedy"),
    [
        (float("nan"), "NaN", "retain_prior=1.0"),
        (np.float32("nan"), "NaN", "retain_prior=1.0"),
        (1.0001, "1.0001", "retain_prior=0.010001"),
        (50, "=50", "retain_prior=0.5"),
        (10**400, 10**400, "retain_prior=1.0"),
        (float("inf"), "=inf", "retain_prior=1.0"),
        (True, "True", "retain_prior=1.0"),
        (np.True_, "True", "retain_prior=1.0"),
        ("0.5", "'0.5'", "retain_prior=1.0"),
        (None, "None", "retain_prior=1.0"),
        (0.5j, "0.5j", "retain_prior=1.0"),
    ],
)
def test_a_share_that_is_none_is_refused(fraction, named, remedy):
    with refused(SpecError, named, parameter="retain_prior", remedy=remedy):
        kept_count(10, fraction)


@pytest.mark.parametrize("by", ["latest", "oldest", "random", "loss", "-loss", "-latest"])
def test_strategies_and_columns_of_numbers_are_taken_for_retention(by):
    check_by(by, ["loss", "latest"], ["text"], parameter="retain_prior_by")


@pytest.mark.parametrize("by", ["oldest", "random", "loss", "-loss", "-latest"])
def test_strategies_and_columns_of_numbers_are_taken_for_dropping(by):
    check_by(by, ["loss", "latest"], ["text"], parameter="drop_strategy")


@pytest.mark.parametrize("by", ["uniform", "recent", "loss", "latest"])
def test_strategies_and_columns_of_numbers_are_taken_for_sampling(by):
    check_by(by, ["loss", "latest"], ["text"], parameter="by")


@pytest.mark.parametrize(
    ("by", "parameter", "named", "remedy"),
    [
        ("lates", "retain_prior_by", "'lates'", "retain_prior_by='latest'"),
        ("los", "retain_prior_by", "'los'", "retain_prior_by='loss'"),
        ("-los", "retain_prior_by", "'-los'", "retain_prior_by='-loss'"),
        ("--loss", "retain_prior_by", "'--loss'", "retain_prior_by='-loss'"),
        ("", "retain_prior_by", "''", "retain_prior_by='latest'"),
        ("-", "retain_prior_by", "'-'", "retain_prior_by='latest'"),
        ("-random", "retain_prior_by", "'-random'", "retain_prior_by='random'"),
        ("text", "retain_prior_by", "'text'", "retain_prior_by="),
        ("-text", "drop_strategy", "'text'", "drop_strategy='oldest'"),
        ("latest", "drop_strategy", "retain_prior_by", "drop_strategy='oldest'"),
        ("newest", "drop_strategy", "'newest'", "drop_strategy="),
        (None, "retain_prior_by", "None", "retain_prior_by='latest'"),
        (3, "drop_strategy", " 3", "drop_strategy='oldest'"),
        ("-loss", "by", "by='-loss'", "by='loss'"),
        ("text", "by", "'text'", "by='uniform'"),
        ("unifrom", "by", "'unifrom'", "by='uniform'"),
    ],
)
def test_what_is_neither_strategy_nor_column_is_refused(by, parameter, named, remedy):
    with refused(SpecError, named, parameter=parameter, remedy=remedy) as error:
        check_by(by, ["loss", "latest"], ["text"], parameter=parameter)
    assert "'loss'" in error.value.where["columns"]


def test_a_buffer_without_columns_of_numbers_says_so():
    with refused(SpecError, "'loss'", columns="none of numbers", parameter="drop_strategy"):
        check_by("loss", [], [], parameter="drop_strategy")


def test_a_column_may_have_a_sign_and_a_strategy_may_not():
    assert [column_of(by) for by in ("latest", "oldest", "random")] == [None, None, None]
    assert [column_of(by) for by in ("x", "-x", "-latest")] == ["x", "x", "latest"]


@given(st.data(), st.integers(0, 300), KEYS)
def test_chosen_numbers_are_distinct_ascending_in_range_and_of_the_count(data, n, key):
    count = data.draw(st.integers(0, n))
    chosen = choose(n, count, key)
    assert chosen.dtype == np.int64
    assert len(chosen) == count
    assert (np.diff(chosen) > 0).all()
    assert count == 0 or (chosen[0] >= 0 and chosen[-1] < n)


@given(st.data(), st.integers(1, 2**62), KEYS)
def test_few_are_chosen_of_any_number_of_rows(data, n, key):
    count = data.draw(st.integers(0, min(n, 20)))
    chosen = choose(n, count, key).tolist()
    assert len(set(chosen)) == count
    assert all(0 <= row < n for row in chosen)


@given(st.data(), st.integers(1, 200), KEYS)
def test_few_are_the_first_distinct_numbers_of_the_keyed_series(data, n, key):
    count = data.draw(st.integers(0, n // 8))
    series = below(mix64(np.arange(50 * n, dtype=np.uint64), np.uint64(key)), n).tolist()
    assert choose(n, count, key).tolist() == sorted(list(dict.fromkeys(series))[:count])


@given(KEYS)
def test_a_single_one_is_the_first_of_the_keyed_series(key):
    first = int(mix64(np.zeros(1, np.uint64), np.uint64(key))[0])
    assert choose(2**62, 1, key).tolist() == [first >> 2]


@pytest.mark.parametrize(("n", "count"), [(20, 1), (20, 2), (20, 7), (20, 15), (20, 19), (10, 5)])
def test_every_number_is_chosen_equally_often(n, count):
    times = 4000
    counts = np.zeros(n)
    for key in range(times):
        counts[choose(n, count, mix_of(key))] += 1
    assert chi_square(counts, times * count / n) < CHI_SQUARE_1E6[n - 1]


@pytest.mark.parametrize(("n", "count", "sets"), [(4, 2, 6), (8, 4, 70), (20, 1, 20)])
def test_every_set_is_chosen_equally_often(n, count, sets):
    times = 7000
    counts = Counter(tuple(choose(n, count, mix_of(key)).tolist()) for key in range(times))
    seen = [counts[chosen] for chosen in combinations(range(n), count)]
    assert chi_square(seen, times / sets) < CHI_SQUARE_1E6[sets - 1]


def test_every_pair_of_few_is_chosen_equally_often():
    # 2 of 20 goes by drawing again, where 2 of 4 goes by a number for each.
    times = 9500
    counts = Counter(tuple(choose(20, 2, mix_of(key)).tolist()) for key in range(times))
    seen = [counts[pair] for pair in combinations(range(20), 2)]
    assert chi_square(seen, times / 190) < CHI_SQUARE_1E6[189]


def mix_of(number):
    return int(mix64(np.array([number], np.uint64), np.uint64(1))[0])


@given(st.integers(1, 2**63), st.lists(KEYS, min_size=1, max_size=8))
def test_noise_is_mapped_as_the_exact_product_would_be(n, noise):
    assert below(np.array(noise, np.uint64), n).tolist() == [number * n >> 64 for number in noise]


def test_mapping_noise_leaves_it_as_it_was():
    noise = np.array([2**63, 2**64 - 1], np.uint64)
    below(noise, 10), below(noise, 2**40)
    assert noise.tolist() == [2**63, 2**64 - 1]


def test_the_latest_and_the_oldest_are_slices():
    assert keep(10, 4, "latest", seed=0, number=1) == slice(6, 10)
    assert keep(10, 4, "oldest", seed=0, number=1) == slice(0, 4)
    assert drop(10, 4, "oldest", seed=0, number=1) == slice(0, 4)


@pytest.mark.parametrize("by", ["latest", "oldest", "random", "x", "-x"])
def test_all_and_none_can_be_kept(by):
    values = np.array([3.0, np.nan, 1.0])
    assert rows(keep(3, 3, by, Numbers(values), seed=0, number=1), 3) == [0, 1, 2]
    assert rows(keep(3, 0, by, Numbers(values), seed=0, number=1), 3) == []


@pytest.mark.parametrize("by", ["oldest", "random", "x", "-x"])
def test_all_and_none_can_be_dropped(by):
    values = np.array([3.0, np.nan, 1.0])
    assert rows(drop(3, 3, by, Numbers(values), seed=0, number=1), 3) == [0, 1, 2]
    assert rows(drop(3, 0, by, Numbers(values), seed=0, number=1), 3) == []


def test_a_column_keeps_the_smallest_and_with_a_minus_the_largest():
    loss = np.array([0.5, 0.1, 0.9, 0.3])
    assert rows(keep(4, 2, "loss", Numbers(loss), seed=0, number=1), 4) == [1, 3]
    assert rows(keep(4, 2, "-loss", Numbers(loss), seed=0, number=1), 4) == [0, 2]


def test_a_column_drops_the_smallest_and_with_a_minus_the_largest():
    loss = np.array([0.5, 0.1, 0.9, 0.3])
    assert rows(drop(4, 2, "loss", Numbers(loss), seed=0, number=1), 4) == [1, 3]
    assert rows(drop(4, 2, "-loss", Numbers(loss), seed=0, number=1), 4) == [0, 2]


def test_of_equal_values_the_newer_stay():
    same = np.array([1, 1, 1, 1])
    assert rows(keep(4, 3, "x", Numbers(same), seed=0, number=1), 4) == [1, 2, 3]
    assert rows(keep(4, 2, "-x", Numbers(same), seed=0, number=1), 4) == [2, 3]
    assert rows(drop(4, 1, "x", Numbers(same), seed=0, number=1), 4) == [0]
    assert rows(drop(4, 2, "-x", Numbers(same), seed=0, number=1), 4) == [0, 1]


def test_null_and_nan_go_first_and_the_older_of_them_before_the_newer():
    values, valid = np.array([5.0, np.nan, 1.0, 7.0]), np.array([True, True, True, False])
    assert rows(keep(4, 2, "x", Numbers(values, valid), seed=0, number=1), 4) == [0, 2]
    assert rows(keep(4, 3, "-x", Numbers(values, valid), seed=0, number=1), 4) == [0, 2, 3]
    assert rows(drop(4, 1, "x", Numbers(values, valid), seed=0, number=1), 4) == [1]
    assert rows(drop(4, 3, "-x", Numbers(values, valid), seed=0, number=1), 4) == [0, 1, 3]


@pytest.mark.parametrize("by", ["x", "-x"])
def test_one_row_to_go_is_the_first_nan_if_there_is_one(by):
    assert rows(drop(4, 1, by, Numbers(np.array([5.0, np.nan, 1.0, np.nan])), seed=0, number=1), 4) == [1]


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_large_integers_are_compared_exactly(dtype):
    near = np.array([2**62 + 1, 2**62, 2**62 + 2, 2**62 + 3], dtype)  # all equal as floats
    assert rows(keep(4, 2, "x", Numbers(near), seed=0, number=1), 4) == [0, 1]
    assert rows(drop(4, 2, "-x", Numbers(near), seed=0, number=1), 4) == [2, 3]


COLUMNS = st.sampled_from(["f2", "f4", "f8", "i1", "i8", "u1", "u8", "?"])


@st.composite
def columns(draw):
    """(values with many ties, valid or None, count)."""
    dtype = np.dtype(draw(COLUMNS))
    n = draw(st.integers(0, 12))
    small = st.sampled_from([0, 1, 2, *([float("nan"), float("-inf"), -0.0] if dtype.kind == "f" else [])])
    values = np.array(draw(st.lists(small, min_size=n, max_size=n)), dtype)
    valid = np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n)), bool) if draw(st.booleans()) else None
    return values, valid, draw(st.integers(0, n))


@given(columns(), st.booleans())
def test_rows_go_in_the_order_of_the_rule(column, largest):
    values, valid, count = column

    def rank(row):
        missing = (valid is not None and not valid[row]) or values[row] != values[row]
        return (0, 0, row) if missing else (1, -float(values[row]) if largest else float(values[row]), row)

    by_rule = sorted(sorted(range(len(values)), key=rank)[:count])
    gone = drop(len(values), count, "-x" if largest else "x", Numbers(values, valid), seed=0, number=1)
    assert rows(gone, len(values)) == by_rule


@given(columns())
def test_what_is_kept_by_one_sign_is_what_dropping_by_the_other_leaves(column):
    values, valid, count = column
    n = len(values)
    for kept_by, dropped_by in (("x", "-x"), ("-x", "x")):
        kept = rows(keep(n, count, kept_by, Numbers(values, valid), seed=0, number=1), n)
        gone = rows(drop(n, n - count, dropped_by, Numbers(values, valid), seed=0, number=1), n)
        assert sorted(kept + gone) == list(range(n))
        assert kept == sorted(kept)


@given(columns())
def test_values_are_left_as_they_were(column):
    values, valid, count = column
    before = values.tobytes(), None if valid is None else valid.tobytes()
    drop(len(values), count, "x", Numbers(values, valid), seed=0, number=1)
    keep(len(values), count, "x", Numbers(values, valid), seed=0, number=1)
    assert before == (values.tobytes(), None if valid is None else valid.tobytes())


def test_random_choices_differ_by_seed_by_number_and_between_keeping_and_dropping():
    chosen = [
        tuple(function(1000, 100, "random", seed=seed, number=number).tolist())
        for function in (keep, drop)
        for seed in (0, 1)
        for number in (1, 2)
    ]
    assert len(set(chosen)) == 8


def test_choices_are_pinned():
    # Journals are replayed through these: if they change, a buffer that is opened has other rows than it had.
    assert choose(100, 1, 7).tolist() == [7]
    assert choose(100, 5, 7).tolist() == [2, 7, 20, 50, 83]
    assert choose(20, 5, 7).tolist() == [0, 3, 7, 8, 13]
    assert choose(10, 8, 7).tolist() == [0, 1, 2, 4, 5, 6, 7, 9]
    assert choose(2**40, 2, 7).tolist() == [80231801723, 916625275804]
    assert keep(10, 4, "random", seed=3, number=2).tolist() == [4, 5, 6, 7]
    assert drop(100, 4, "random", seed=3, number=2).tolist() == [5, 31, 37, 68]
