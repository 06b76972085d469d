"""Which rows a step draws: how often each, the same in every process, and the same as in saved runs."""

from __future__ import annotations

import subprocess
import sys
from decimal import Decimal, localcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.base.errors import SpecError
from batchwright.buffer import sample
from batchwright.buffer.sample import Priorities, draw, weights
from refusals import refused

SETTINGS = {"seed": 0, "number": 1, "step": 0}


def chi_square(counts, expected):
    counts, expected = np.asarray(counts, float), np.asarray(expected, float)
    return float(((counts - expected) ** 2 / expected).sum())


def kinds():
    """(by, priorities of 6 rows, the probability of each row)."""
    recent = 2.0 ** (np.arange(6) / 2)
    loss = np.array([1.0, 0.0, 2.0, 3.0, 4.0, 0.0])
    return {
        "uniform": ({}, np.full(6, 1 / 6)),
        "recent": ({"by": "recent", "half_life": 2}, recent / recent.sum()),
        "loss": ({"by": "loss", "priorities": Priorities(loss, column="loss")}, loss / loss.sum()),
    }


KINDS = pytest.mark.parametrize("kind", ["uniform", "recent", "loss"])


@KINDS
def test_rows_come_as_often_as_their_probability_says(kind):
    settings, probability = kinds()[kind]
    drawn = draw(6, 60_000, **SETTINGS, **settings)
    counts = np.bincount(drawn.index, minlength=6)
    possible = probability > 0
    assert not counts[~possible].any()
    assert (
        chi_square(counts[possible], 60_000 * probability[possible]) < 35.9
    )  # 5 degrees of freedom at most: once in 10^6


@KINDS
def test_each_row_comes_with_its_probability(kind):
    settings, probability = kinds()[kind]
    drawn = draw(6, 100, **SETTINGS, **settings)
    np.testing.assert_allclose(drawn.probability, probability[drawn.index], rtol=1e-14)


@KINDS
def test_pairs_without_replacement_come_as_sequential_draws_would(kind):
    settings, p = kinds()[kind]
    times, counts = 4000, np.zeros((6, 6))
    for step in range(times):
        one, two = draw(6, 2, seed=0, number=1, step=step, replace=False, **settings).index
        counts[one, two] += 1
    expected = np.outer(p / (1 - p), p)
    np.fill_diagonal(expected, 0)
    possible = expected > 0
    assert not counts[~possible].any()
    assert chi_square(counts[possible], times * expected[possible]) < 81  # 29 degrees of freedom at most: once in 10^6


@KINDS
def test_all_rows_that_can_be_drawn_are_when_all_are_asked_for_once(kind):
    settings, probability = kinds()[kind]
    available = np.flatnonzero(probability)
    drawn = draw(6, len(available), **SETTINGS, replace=False, **settings)
    assert sorted(drawn.index.tolist()) == available.tolist()
    np.testing.assert_allclose(drawn.probability, probability[drawn.index], rtol=1e-14)


@given(st.integers(1, 2**40), st.integers(0, 300), st.integers(0, 2**63), st.integers(0, 2**63), st.booleans())
def test_uniform_and_recent_rows_are_in_range_and_of_the_count(n, count, seed, step, recent):
    drawn = draw(n, count, seed=seed, number=5, step=step, by="recent" if recent else "uniform")
    assert drawn.index.dtype == np.int64
    assert drawn.probability.dtype == np.float64
    assert len(drawn.index) == len(drawn.probability) == count
    assert ((drawn.index >= 0) & (drawn.index < n)).all()
    assert (drawn.probability > 0).all()


@given(st.data(), st.integers(1, 60), st.sampled_from(["uniform", "recent", "loss"]), st.integers(0, 1000))
def test_without_replacement_no_row_comes_twice(data, n, by, step):
    priorities = None
    if by == "loss":
        values = data.draw(st.lists(st.sampled_from([0.0, 5e-324, 1e-300, 1.0, 1.5, 1e308]), min_size=n, max_size=n))
        values[0] = 1.0
        priorities = Priorities(np.array(values), column="loss")
    available = n if priorities is None else priorities.num_available
    count = data.draw(st.integers(0, available))
    drawn = draw(n, count, seed=0, number=1, step=step, by=by, priorities=priorities, replace=False)
    assert len(set(drawn.index.tolist())) == count
    assert (drawn.probability > 0).all()
    assert np.isfinite(weights(drawn.probability)).all()


@given(st.integers(1, 400) | st.just(2**40), st.floats(1e-320, 1e308), st.integers(0, 2**64 - 1))
def test_any_half_life_gives_rows_and_probabilities(n, half_life, step):
    for replace in (True, False) if n <= 400 else (True,):
        drawn = draw(n, min(n, 5), seed=0, number=1, step=step, by="recent", half_life=half_life, replace=replace)
        assert ((drawn.index >= 0) & (drawn.index < n)).all()
        assert ((drawn.probability > 0) & (drawn.probability <= 1 + 1e-12)).all()
        assert np.isfinite(weights(drawn.probability)).all()


@pytest.mark.parametrize("half_life", [0.5, 3, 100, 10_000])
def test_recent_inverts_the_distribution_exactly(half_life):
    # A row of age a owns the part of (0, 1) between F(a) and F(a + 1), computed here with 50 digits.
    n = 40
    with localcontext() as context:
        context.prec = 50
        q = Decimal(2) ** (-1 / Decimal(half_life))
        ends = [(1 - q**age) / (1 - q**n) for age in range(n + 1)]
    for age in range(n):
        near_ends = [ends[age] + (ends[age + 1] - ends[age]) * Decimal(part) for part in ("0.0001", "0.5", "0.9999")]
        unit = np.array([float(end) for end in near_ends if Decimal("1e-12") < end < 1 - Decimal("1e-12")])
        assert (sample._recent(n, float(half_life), unit) == n - 1 - age).all()
        if 1 - ends[age] < Decimal("1e-11"):
            break


def test_the_share_of_recent_rows_halves_every_half_life():
    drawn = draw(10**6, 200_000, **SETTINGS, by="recent", half_life=1000)
    lives = np.bincount((10**6 - 1 - drawn.index) // 1000)
    expected = 200_000 * 0.5 ** np.arange(1, 11)
    assert chi_square(lives[:10], expected) < 45.1  # 10 degrees of freedom: once in 10^6


def test_the_half_life_is_a_quarter_of_the_rows_if_not_said():
    said, unsaid = (draw(1000, 64, **SETTINGS, by="recent", half_life=h) for h in (250, None))
    assert said.index.tolist() == unsaid.index.tolist()


def test_a_half_life_without_end_draws_uniformly():
    drawn = draw(6, 60_000, **SETTINGS, by="recent", half_life=1e300)
    assert chi_square(np.bincount(drawn.index, minlength=6), 10_000) < 35.9  # 5 degrees of freedom: once in 10^6


def test_the_last_of_all_numbers_draws_a_row():
    last = np.array([1 - 2.0**-53])
    for num_rows in range(1, 200):
        for lives in (num_rows / 4, num_rows, num_rows * 1e3, num_rows * 2.0**50):
            assert 0 <= sample._recent(num_rows, float(lives), last)[0] < num_rows


def test_the_logarithm_is_that_of_numpy_to_the_last_bits():
    x = np.concatenate(
        [np.geomspace(5e-324, 1e308, 10_000), np.linspace(0.5, 2, 10_001), 1 + np.arange(-50, 50) * 2e-16]
    )
    np.testing.assert_allclose(sample._log(x), np.log(x), rtol=2e-15, atol=1e-300)


@KINDS
@pytest.mark.parametrize("replace", [True, False])
def test_the_same_call_gives_the_same_rows(kind, replace):
    one, two = (draw(6, 4, **SETTINGS, replace=replace, **kinds()[kind][0]) for _ in range(2))
    assert one.index.tolist() == two.index.tolist()
    assert one.probability.tolist() == two.probability.tolist()


def test_a_whole_number_of_numpy_is_the_same_key():
    plain, numpy = (draw(1000, 9, seed=kind(7), number=1, step=kind(3)) for kind in (int, np.uint64))
    assert plain.index.tolist() == numpy.index.tolist()


@KINDS
def test_fewer_draws_are_the_first_of_more(kind):
    settings = kinds()[kind][0]
    few, many = (draw(6, count, **SETTINGS, **settings) for count in (10, 5000))
    assert few.index.tolist() == many.index[:10].tolist()


def test_another_process_draws_the_same_rows():
    code = (
        "from batchwright.buffer.sample import draw\n"
        "print([draw(10**6, 5, seed=7, number=3, step=9, by=by, replace=once).index.tolist()"
        " for by in ('uniform', 'recent') for once in (True, False)])"
    )
    here = [
        draw(10**6, 5, seed=7, number=3, step=9, by=by, replace=once).index.tolist()
        for by in ("uniform", "recent")
        for once in (True, False)
    ]
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert there.strip() == str(here)


@KINDS
def test_steps_numbers_and_seeds_draw_apart_from_each_other(kind):
    settings = kinds()[kind][0]
    keys = [{**SETTINGS, name: 5} for name in SETTINGS] + [SETTINGS]
    assert len({tuple(draw(6, 40, **key, **settings).index.tolist()) for key in keys}) == 4


def test_a_step_has_nothing_to_do_with_the_next():
    one, two = (draw(10, 20_000, seed=0, number=1, step=step).index for step in (0, 1))
    counts = np.bincount(one * 10 + two, minlength=100)
    assert chi_square(counts, 200) < 180.8  # 99 degrees of freedom: once in 10^6


def test_a_uniform_draw_has_nothing_to_do_with_one_by_another_rule_at_the_same_step():
    flat = Priorities(np.ones(10), column="loss")
    one = draw(10, 20_000, **SETTINGS).index
    for two in (
        draw(10, 20_000, **SETTINGS, by="loss", priorities=flat).index,
        draw(10, 20_000, **SETTINGS, by="recent", half_life=1e12).index,
    ):
        counts = np.bincount(one * 10 + two, minlength=100)
        assert chi_square(counts, 200) < 180.8  # 99 degrees of freedom: once in 10^6


@given(
    st.lists(st.sampled_from([0, 1, 2, 7]), min_size=1, max_size=30).filter(any),
    st.sampled_from(["f4", "f8", "i8", "u8", "i2"]),
    st.sampled_from([0.5, 1.0, 2.0, 0.6]),
)
def test_priorities_are_proportional_to_the_power_of_the_values(values, dtype, power):
    priorities = Priorities(np.array(values, dtype), power=power, column="loss")
    raised = np.array([value**power if value else 0.0 for value in values])
    assert len(priorities) == len(values)
    assert priorities.num_available == np.count_nonzero(values)
    got = priorities.probability(np.arange(len(values)))
    np.testing.assert_allclose(got, raised / raised.sum(), rtol=1e-13)


def test_a_row_owns_the_start_of_its_part_and_rows_at_zero_own_none():
    priorities = Priorities(np.array([0.0, 1.0, 0.0, 1.0, 0.0]), column="loss")
    assert priorities.find(np.array([0.0, 0.5, 1 - 2.0**-53])).tolist() == [1, 3, 3]


def test_a_probability_that_underflows_is_not_zero():
    priorities = Priorities(np.array([5e-324, 1.0, 1.0, 1.0]), column="loss")
    drawn = draw(4, 4, **SETTINGS, by="loss", priorities=priorities, replace=False)
    assert (drawn.probability > 0).all()
    assert np.isfinite(weights(drawn.probability)).all()


def test_a_null_is_never_drawn_whatever_its_value():
    priorities = Priorities(np.array([1.0, np.nan, -5.0]), np.array([True, False, False]), column="loss")
    assert set(draw(3, 100, **SETTINGS, by="loss", priorities=priorities).index.tolist()) == {0}


def test_power_zero_makes_all_rows_with_a_priority_equal():
    priorities = Priorities(np.array([1, 0, 9]), power=0, column="loss")
    assert priorities.probability(np.arange(3)).tolist() == [0.5, 0.0, 0.5]


@pytest.mark.parametrize("values", [[1e308] * 50, [5e-324, 5e-324], [1e-310, 1e308], [2**63] * 4])
@pytest.mark.parametrize("power", [1.0, 0.5, 3000.0])
def test_values_at_the_ends_of_their_type_can_be_drawn_by(values, power):
    priorities = Priorities(np.array(values), power=power, column="loss")
    drawn = draw(len(values), 50, **SETTINGS, by="loss", priorities=priorities)
    assert drawn.index.max() < len(values)
    assert (drawn.probability > 0).all()


def test_priorities_leave_the_column_as_it_was():
    values = np.array([1.0, np.nan, 3.0])
    Priorities(values, np.array([True, False, True]), column="loss")
    np.testing.assert_array_equal(values, [1.0, np.nan, 3.0])


@pytest.mark.parametrize(
    ("values", "valid", "row", "value"),
    [
        ([1.0, -2.0, -3.0], None, 1, -2.0),
        ([1.0, 0.0, np.nan], None, 2, "nan"),
        ([np.inf, 0.0, np.nan], None, 0, "inf"),
        ([-1, 5, -1], [False, True, True], 2, -1),
        ([0.0, 0.0, 0.0], None, None, 0),
        ([4.0, 4.0, 4.0], [False, False, False], None, 0),
        ([], None, None, 0),
    ],
)
def test_a_column_that_holds_no_priorities_is_refused(values, valid, row, value):
    with refused(SpecError, value, parameter="by", column="loss", row=row):
        Priorities(np.array(values), None if valid is None else np.array(valid), column="loss")


ONE_OF_THREE = Priorities(np.array([0.0, 1.0, 0.0]), column="loss")


@pytest.mark.parametrize(
    ("num_rows", "count", "settings", "parameter", "named"),
    [
        (0, 1, {}, "n", "no rows"),
        (3, -1, {}, "n", -1),
        (3, 1.5, {}, "n", 1.5),
        (3, 1, {"seed": 0.5}, "seed", 0.5),
        (3, 1, {"step": 0.5}, "step", 0.5),
        (3, 4, {"replace": False}, "n", "n=3"),
        (3, 4, {"replace": False, "by": "recent"}, "n", "n=3"),
        (
            3,
            2,
            {"replace": False, "by": "loss", "priorities": ONE_OF_THREE},
            "n",
            "n=1",
        ),
        (3, 1, {"half_life": 2.0}, "half_life", "by='uniform'"),
        (3, 1, {"by": "recent", "half_life": 0}, "half_life", "half_life=1"),
        (3, 1, {"by": "recent", "half_life": -1.0}, "half_life", -1.0),
        (3, 1, {"by": "recent", "half_life": float("nan")}, "half_life", "nan"),
        (3, 1, {"by": "recent", "half_life": float("inf")}, "half_life", "inf"),
        (3, 1, {"by": "recent", "half_life": 10**400}, "half_life", 10**400),
        (3, 1, {"by": "recent", "half_life": True}, "half_life", True),
        (3, 1, {"by": "recent", "half_life": "3"}, "half_life", "'3'"),
    ],
)
def test_a_draw_that_cannot_be_made_is_refused(num_rows, count, settings, parameter, named):
    with refused(SpecError, named, parameter=parameter):
        draw(num_rows, count, **{**SETTINGS, **settings})


@pytest.mark.parametrize("power", [-1.0, float("nan"), float("inf"), "1", True, None])
def test_a_power_that_is_none_is_refused(power):
    with refused(SpecError, repr(power), parameter="power"):
        Priorities(np.ones(3), power=power, column="loss")


@pytest.mark.parametrize("num_rows", [0, 3])
@pytest.mark.parametrize("by", ["uniform", "recent"])
@pytest.mark.parametrize("replace", [True, False])
def test_no_rows_can_be_drawn_from_any_number(num_rows, by, replace):
    drawn = draw(num_rows, 0, **SETTINGS, by=by, replace=replace)
    assert len(drawn.index) == len(drawn.probability) == 0
    assert len(weights(drawn.probability)) == 0


def test_weights_are_inverse_to_the_probability_and_one_at_most():
    p = np.array([0.1, 0.4, 0.1, 0.2])
    by_definition = (10 * p) ** -0.5
    np.testing.assert_allclose(weights(p, beta=0.5), by_definition / by_definition.max(), rtol=1e-15)
    assert weights(p).tolist() == [1.0, 0.25, 1.0, 0.5]
    assert weights(p, beta=0).tolist() == [1.0] * 4


def test_weights_make_the_mean_over_drawn_rows_that_over_all_rows():
    loss = np.arange(1.0, 101.0)
    drawn = draw(100, 200_000, **SETTINGS, by="loss", priorities=Priorities(loss, column="loss"))
    weight = weights(drawn.probability)
    assert np.average(loss[drawn.index], weights=weight) == pytest.approx(loss.mean(), rel=0.02)


@pytest.mark.parametrize("beta", [-0.1, float("nan"), "1", True])
def test_a_beta_that_is_none_is_refused(beta):
    with refused(SpecError, repr(beta), parameter="beta"):
        weights(np.array([0.5, 0.5]), beta=beta)


def test_draws_are_pinned():
    # Runs draw by these: if they change, a run that is resumed sees other rows than it would have seen.
    key = {"seed": 7, "number": 3, "step": 9}
    loss = Priorities(np.arange(1000.0), column="loss")
    assert draw(1000, 5, **key).index.tolist() == [367, 121, 32, 653, 475]
    assert draw(2**40, 2, **key).index.tolist() == [403623646973, 133881994233]
    assert draw(1000, 5, **key, replace=False).index.tolist() == [317, 972, 257, 519, 893]
    assert draw(1000, 5, **key, by="recent").index.tolist() == [964, 638, 562, 516, 742]
    assert draw(1000, 5, **key, by="recent", half_life=3, replace=False).index.tolist() == [999, 997, 992, 998, 995]
    assert draw(1000, 5, **key, by="loss", priorities=loss).index.tolist() == [653, 896, 212, 904, 933]
    assert draw(1000, 5, **key, by="loss", priorities=loss, replace=False).index.tolist() == [981, 725, 280, 662, 479]
