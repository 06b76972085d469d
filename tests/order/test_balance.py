"""Rows of a batch are shared so that ranks have about the same work: all of them, once, the same way everywhere."""

from __future__ import annotations

import subprocess
import sys
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.base.errors import SpecError
from batchwright.order import balance as module
from batchwright.order.balance import Balanced, Cost, balance, imbalance
from batchwright.order.split import share
from refusals import refused

WAYS = pytest.mark.parametrize("equal_counts", [False, True])


def lengths_of(kind: str, num_rows: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if kind == "bimodal":
        return np.where(rng.random(num_rows) < 0.1, rng.integers(7992, 8192, num_rows), rng.integers(64, 128, num_rows))
    if kind == "uniform":
        return rng.integers(1, 4097, num_rows)
    if kind == "equal":
        return np.full(num_rows, 512)
    return np.clip(np.exp(rng.normal(6, 1, num_rows)), 1, 32_768).astype(np.int64)


few_costs = st.lists(st.one_of(st.integers(0, 9), st.integers(0, 2000)), max_size=40)
real_costs = st.lists(st.floats(0, 1e300), max_size=40)
worlds = st.integers(1, 9)


@st.composite
def many_costs(draw):
    """Enough rows that those between the largest and the smallest go to ranks in turn."""
    kind, num_rows = draw(st.sampled_from(["lognormal", "uniform", "bimodal"])), draw(st.integers(2000, 6000))
    costs = lengths_of(kind, num_rows, draw(st.integers(0, 99)))
    if draw(st.booleans()):
        costs[draw(st.integers(0, num_rows - 1))] = costs.sum()
    return costs


def loads(costs, balanced: Balanced) -> list[int]:
    return [sum(int(costs[row]) for row in balanced.rows(rank).tolist()) for rank in range(balanced.world)]


def least_possible(costs: list[int], world: int, equal_counts: bool) -> int:
    """What the rank with the most work has in the best of all divisions, by trying them all."""
    ranks = np.indices((world,) * len(costs)).reshape(len(costs), -1)
    counts = np.array([(ranks == rank).sum(axis=0) for rank in range(world)])
    work = np.array([((ranks == rank) * np.array(costs, np.int64)[:, None]).sum(axis=0) for rank in range(world)])
    if equal_counts:
        allowed = counts.max(axis=0) - counts.min(axis=0) <= 1
    else:
        allowed = counts.min(axis=0) >= (len(costs) >= world)
    return int(work.max(axis=0)[allowed].min())


# Which rows


@WAYS
@given(costs=st.one_of(few_costs, real_costs, many_costs()), world=worlds)
def test_every_row_goes_to_one_rank(equal_counts, costs, world):
    balanced = balance(costs, world, equal_counts=equal_counts)
    assert sorted(balanced.order.tolist()) == list(range(len(costs)))
    assert balanced.borders[0] == 0
    assert balanced.borders[-1] == len(costs)
    assert np.all(np.diff(balanced.borders) >= 0)
    assert balanced.world == world


@WAYS
@given(costs=st.one_of(few_costs, many_costs()), world=worlds)
def test_inside_a_rank_rows_keep_the_order_of_the_stream(equal_counts, costs, world):
    balanced = balance(costs, world, equal_counts=equal_counts)
    for rank in range(world):
        assert np.all(np.diff(balanced.rows(rank)) > 0)


@given(costs=st.one_of(few_costs, real_costs, many_costs()), world=worlds)
def test_equal_counts_are_those_of_the_contiguous_split(costs, world):
    balanced = balance(costs, world, equal_counts=True)
    assert np.diff(balanced.borders).tolist() == [len(share(len(costs), rank=r, world=world)) for r in range(world)]


@given(costs=st.one_of(few_costs, real_costs, many_costs()), world=worlds)
def test_no_rank_is_without_a_row_where_there_are_enough(costs, world):
    balanced = balance(costs, world)
    assert np.diff(balanced.borders).min() >= (len(costs) >= world)


@WAYS
@given(costs=st.lists(st.integers(0, 100), max_size=7), more=st.integers(1, 5))
def test_fewer_rows_than_ranks_have_a_rank_each_and_the_others_none(equal_counts, costs, more):
    world = len(costs) + more
    balanced = balance(costs, world, equal_counts=equal_counts)
    assert balanced.order.tolist() == list(range(len(costs)))
    assert np.diff(balanced.borders).tolist() == [len(share(len(costs), rank=r, world=world)) for r in range(world)]


def test_a_large_row_has_a_rank_for_itself_unless_counts_are_equal():
    costs = [1, 1, 1, 90, 2, 3, 1, 1]
    assert balance(costs, 2).rows(0).tolist() == [3]
    assert [len(balance(costs, 2, equal_counts=True).rows(rank)) for rank in range(2)] == [4, 4]


def test_ranks_that_have_few_large_rows_get_their_number_in_small_ones():
    costs = [1017] * 7 + [1] * 9001  # after the largest 1,024 all ranks have the same work, and one has most rows
    assert np.diff(balance(costs, 8, equal_counts=True).borders).tolist() == [1126] * 8


@WAYS
@pytest.mark.parametrize(
    ("costs", "world", "borders"),
    [
        ([5, 1, 2, 4, 3, 3], 3, [0, 2, 4, 6]),
        ([9, 9, 7], 2, [0, 1, 3]),
        ([49, 576, 676, 256, 289, 625, 196], 2, [0, 3, 7]),  # better than what dealing and exchanging come to
        ([3, 3, 2, 2, 2], 2, [0, 2, 5]),  # from the largest on, one rank would get 3, 2, 2
    ],
)
def test_where_the_contiguous_split_is_as_good_it_stays(equal_counts, costs, world, borders):
    balanced = balance(costs, world, equal_counts=equal_counts)
    assert balanced.order.tolist() == list(range(len(costs)))
    assert balanced.borders.tolist() == borders


# The same everywhere


def test_the_division_is_pinned():
    """Ranks of one run may have other versions of NumPy, or numba: they must agree on who has which row."""
    lengths = [457, 353, 765, 448, 236, 579, 1487, 1040, 199, 113, 215, 420, 39, 323, 115, 194, 234, 294, 610, 1143]
    apart = balance(lengths, 3)
    assert [apart.rows(rank).tolist() for rank in range(3)] == [
        [5, 6, 11, 14, 15, 17],
        [0, 4, 8, 9, 13, 18, 19],
        [1, 2, 3, 7, 10, 12, 16],
    ]
    equal = balance(lengths, 3, equal_counts=True)
    assert [equal.rows(rank).tolist() for rank in range(3)] == [
        [5, 6, 11, 14, 15, 17],
        [0, 4, 8, 9, 13, 18, 19],
        [1, 2, 3, 7, 10, 12, 16],
    ]
    many = np.arange(5000) ** 2 * 7919 % 4099 + 1
    assert [crc32(balance(many, 8, equal_counts=ways).order.astype("<i8").tobytes()) for ways in (False, True)] == [
        1249631607,
        479858770,
    ]


@WAYS
@given(costs=few_costs, world=worlds, unit=st.sampled_from([2, 64, 1.0, 0.5, 2.0**-30, 2.0**500]))
def test_the_unit_of_costs_does_not_matter(equal_counts, costs, world, unit):
    once = balance(costs, world, equal_counts=equal_counts)
    again = balance(np.array(costs) * unit, world, equal_counts=equal_counts)
    assert once.order.tolist() == again.order.tolist()
    assert once.borders.tolist() == again.borders.tolist()


@pytest.mark.parametrize("kind", [list, tuple, np.uint8, np.int32, np.uint64, np.float32, np.float64])
def test_costs_come_as_any_numbers(kind):
    costs = [9, 1, 8, 2, 7, 3]
    given_costs = kind(costs) if kind in (list, tuple) else np.array(costs, kind)
    assert balance(given_costs, 2).order.tolist() == balance(np.array(costs), 2).order.tolist()


def test_costs_are_not_changed():
    costs = np.array([9, 1, 8, 2, 7, 3])
    costs.flags.writeable = False
    balance(costs, 2)
    assert costs.tolist() == [9, 1, 8, 2, 7, 3]


def test_costs_too_large_for_a_sum_of_64_bits_are_rounded():
    costs = np.array([2**62, 2**62, 2**62, 2**62 - 1, 5, 5], np.uint64)
    balanced = balance(costs, 2)
    assert sorted(len(set(balanced.rows(rank).tolist()) & {0, 1, 2, 3}) for rank in range(2)) == [2, 2]
    assert imbalance(costs, balanced).measured < 1e-15


@pytest.mark.parametrize("largest", [255, 2**16 - 1, 2**16, 2**17, 2**40])
def test_costs_are_sorted_with_ties_by_row_number(largest):
    costs = np.array([largest, 3, 1, largest, 3, 0, largest - 1])
    ascending, rows = module._sorted(costs)
    assert rows.tolist() == [5, 2, 1, 4, 6, 0, 3]
    assert ascending.tolist() == [0, 1, 3, 3, largest - 1, largest, largest]


@pytest.mark.parametrize(("taken", "after"), [(0, [[2, 3, 8], [4, 5, 9]]), (2, [[3, 8, 9], [2, 4, 5]])])
def test_rows_of_a_rank_stay_sorted_when_two_change_places(taken, after):
    held = [np.array([3, 5, 8]), np.array([2, 4, 9])]
    module._swap(held, 0, 1, 1, taken)
    assert [positions.tolist() for positions in held] == after
    module._swap(held, 1, 2, 0, -1)
    assert [positions.tolist() for positions in held] == [sorted([*after[0], after[1][2]]), after[1][:2]]


def test_costs_that_are_not_whole_numbers_keep_their_small_differences():
    costs = [1.0, 1.0, 3e-9, 1e-9, 1e-9, 1e-9]
    balanced = balance(costs, 2)
    assert sorted(balanced.rows(rank)[1:].tolist() for rank in range(2)) == [[2], [3, 4, 5]]


def test_no_kernel_is_compiled_for_it():
    """One way to compute it: what is installed cannot change the division."""
    code = (
        "import sys; from batchwright.order.balance import *; balance([3, 1, 2, 9], 2); print('numba' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


# How even


@WAYS
@given(costs=st.one_of(few_costs, many_costs()), world=worlds)
def test_the_contiguous_split_is_never_better(equal_counts, costs, world):
    contiguous = [sum(int(costs[row]) for row in share(len(costs), rank=rank, world=world)) for rank in range(world)]
    assert max(loads(costs, balance(costs, world, equal_counts=equal_counts))) <= max(contiguous)


@WAYS
@given(costs=st.one_of(few_costs, many_costs()), world=worlds)
def test_the_imbalance_is_the_most_over_the_mean_and_not_below_its_bound(equal_counts, costs, world):
    balanced = balance(costs, world, equal_counts=equal_counts)
    found, work = imbalance(costs, balanced), loads(costs, balanced)
    assert found.measured == pytest.approx(max(work) * world / sum(work) - 1 if sum(work) else 0, abs=1e-12)
    assert 0 <= found.lower_bound <= found.measured


@WAYS
@given(costs=st.lists(st.integers(0, 30), min_size=1, max_size=7), world=st.integers(1, 3))
def test_no_division_goes_below_the_bound(equal_counts, costs, world):
    best = least_possible(costs, world, equal_counts)
    bound = imbalance(costs, balance(costs, world, equal_counts=equal_counts)).lower_bound
    assert bound <= (best * world / sum(costs) - 1 if sum(costs) else 0) + 1e-12


@WAYS
@given(costs=st.lists(st.integers(1, 30), min_size=1, max_size=7), world=st.integers(1, 3))
def test_a_few_rows_are_divided_nearly_as_well_as_can_be(equal_counts, costs, world):
    best = least_possible(costs, world, equal_counts)
    assert max(loads(costs, balance(costs, world, equal_counts=equal_counts))) <= best * 7 / 6


@WAYS
@given(costs=st.lists(st.integers(1, 50), min_size=6, max_size=20), world=st.integers(2, 4))
def test_no_exchange_of_two_rows_makes_the_most_less(equal_counts, costs, world):
    balanced = balance(costs, world, equal_counts=equal_counts)
    if balanced.order.tolist() == sorted(balanced.order.tolist()):
        return  # as it came: as good as what exchanges lead to
    work = loads(costs, balanced)
    if work.count(max(work)) > 1:
        return
    most = work.index(max(work))
    for rank in set(range(world)) - {most}:
        for mine in balanced.rows(most).tolist():
            for theirs in balanced.rows(rank).tolist():
                assert not 0 < costs[mine] - costs[theirs] < work[most] - work[rank]


@pytest.mark.parametrize(
    ("costs", "world", "equal_counts"),
    [
        ([256, 64, 676, 625, 225, 1], 2, False),  # a row moves, for none
        ([576, 529, 784, 9, 324, 576, 81], 2, True),  # the same, to a rank that may have one more
        ([51, 19, 50, 39, 40, 35, 46], 2, True),  # a rank that gave rows takes some
    ],
)
def test_exchanges_find_the_best_division_of_these_rows(costs, world, equal_counts):
    found = max(loads(costs, balance(costs, world, equal_counts=equal_counts)))
    assert found == least_possible(costs, world, equal_counts)


@pytest.mark.parametrize(
    ("costs", "world", "equal_counts", "bound"),
    [
        ([4, 4, 4, 4], 2, False, 0),
        ([90, 5, 5], 2, False, 90 / 50 - 1),  # the largest row
        ([6, 6, 6], 2, False, 12 / 9 - 1),  # two of three must share a rank
        ([64, 64, 64, 64, 64], 4, False, 128 / 80 - 1),
        ([30, 10, 10, 10, 10], 2, False, 40 / 35 - 1),  # sums are multiples of 10
        ([90, 5, 5, 4], 2, True, 94 / 52 - 1),  # the largest row has company
        ([100] * 5 + [1, 1] + [20] * 5, 3, True, 221 / (602 / 3) - 1),  # a rank with one large row cannot have enough
        ([], 3, True, 0),
        ([0, 0], 3, False, 0),
    ],
)
def test_the_bound_knows_what_cannot_be_reached(costs, world, equal_counts, bound):
    found = imbalance(costs, balance(costs, world, equal_counts=equal_counts))
    assert found.lower_bound == pytest.approx(bound)
    assert found.measured == pytest.approx(bound)


@WAYS
@pytest.mark.parametrize("cost", [Cost(), Cost(4096, 1), Cost(1.0, 0.00031)], ids=str)
@pytest.mark.parametrize("kind", ["lognormal", "uniform", "bimodal", "equal"])
def test_65536_rows_are_within_a_millionth_of_even(equal_counts, cost, kind):
    costs = cost.costs(lengths_of(kind, 65_536))
    assert imbalance(costs, balance(costs, 8, equal_counts=equal_counts)).measured < 1e-6


@WAYS
@pytest.mark.parametrize("cost", [Cost(), Cost(4096, 1)], ids=str)
@pytest.mark.parametrize("kind", ["lognormal", "uniform", "equal"])
def test_1024_rows_are_within_a_thousandth_of_even(equal_counts, cost, kind):
    costs = cost.costs(lengths_of(kind, 1024))
    assert imbalance(costs, balance(costs, 8, equal_counts=equal_counts)).measured < 1e-3


@WAYS
def test_a_row_larger_than_all_others_has_the_smallest_with_it_or_none(equal_counts):
    costs = lengths_of("lognormal", 4096)
    costs[7] = costs.sum()
    balanced = balance(costs, 8, equal_counts=equal_counts)
    assert max(loads(costs, balanced)) == costs[7] + (np.sort(costs)[:511].sum() if equal_counts else 0)
    assert imbalance(costs, balanced).measured == imbalance(costs, balanced).lower_bound


def test_many_ranks_do_not_make_it_search_for_ever(monkeypatch):
    asked = []
    exchange = module._exchange
    monkeypatch.setattr(module, "_exchange", lambda *given: asked.append(given) or exchange(*given))
    balance(Cost(4096, 1).costs(lengths_of("bimodal", 4096)), 64, equal_counts=True)
    assert len(asked) == 512


# Costs


@given(
    lengths=st.lists(st.integers(0, 2**20), max_size=20),
    linear=st.integers(1, 2**20),
    quadratic=st.integers(0, 1000),
    kind=st.sampled_from([int, float]),
)
def test_whole_coefficients_give_exact_costs(lengths, linear, quadratic, kind):
    costs = Cost(kind(linear), kind(quadratic)).costs(np.array(lengths, np.int64))
    assert costs.dtype == np.int64
    assert costs.tolist() == [linear * n + quadratic * n * n for n in lengths]


def test_other_coefficients_give_floats():
    assert Cost(0.5, 0.25).costs([2, 4]).tolist() == [2.0, 6.0]
    assert Cost(0, 2**40).costs([2**20]).tolist() == [2.0**80]


def test_a_cost_is_a_value():
    assert Cost() == Cost(1.0, 0.0)
    assert hash(Cost(2, 1)) == hash(Cost(2, 1))
    assert Cost(linear=2, quadratic=0.5) != Cost(2, 0)


# Bad input


@pytest.mark.parametrize(
    ("call", "named", "where", "remedy"),
    [
        (lambda: Cost(-1), -1, {"parameter": "linear"}, "linear=1"),
        (lambda: Cost(np.nan), "nan", {"parameter": "linear"}, "linear=1"),
        (lambda: Cost("2"), "'2'", {"parameter": "linear"}, "linear=1"),
        (lambda: Cost(1, np.inf), "inf", {"parameter": "quadratic"}, "quadratic=0"),
        (lambda: Cost(1, 10**400), "quadratic", {"parameter": "quadratic"}, "quadratic=0"),
        (lambda: Cost(0, 0), "linear", {"parameter": "linear"}, "linear=1"),
        (lambda: Cost(1e308), 1e308, {"parameter": "linear"}, "linear=1"),
    ],
)
def test_bad_input_is_refused_by_name(call, named, where, remedy):
    with refused(SpecError, named, remedy=remedy, **where):
        call()
