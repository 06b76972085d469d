"""Each advantage is its formula, by slow loops in float64: with numba or without, in odd groups, in every dialect."""

from __future__ import annotations

import math
import os
import re
import statistics
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import batchwright
from batchwright.base.errors import SampleError, SpecError
from batchwright.base.kernels import numba_or_none
from batchwright.rl import advantage
from batchwright.rl.advantage import (
    discounted,
    gae,
    group_relative,
    leave_one_out,
    reinforce,
    whiten,
    whitening_divisor,
)
from batchwright.rl.dialects import DIALECTS, Dialect, dialect
from refusals import refused

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
needs_numba = pytest.mark.skipif(numba_or_none() is None, reason="numba is not installed, or turned off")
PATHS = ["numpy", pytest.param("numba", marks=needs_numba)]


@pytest.fixture
def _on_path(request, monkeypatch):
    """By NumPy in blocks of a few steps, or compiled, whatever the size."""
    monkeypatch.setattr(advantage, "_WORTH_COMPILING", 0)
    monkeypatch.setattr(advantage, "_BLOCK_STEPS", 3)
    if request.param == "numpy":
        monkeypatch.setenv("BATCHWRIGHT_NUMBA", "0")


on_both_paths = pytest.mark.parametrize("_on_path", PATHS, indirect=True)


# Over time


def slow_gae(rewards, values, *, gamma, lam, bootstrap, mask, dones, gaps):
    """By the sum, step for step: A_t = delta_t + (gamma lam) delta_{t+1} + ... until an episode ends."""
    advantages, returns = np.zeros(rewards.shape), np.zeros(rewards.shape)
    for row in range(rewards.shape[0]):
        steps = []  # (time, reward, value, whether an episode ends before the next one)
        for t in range(rewards.shape[1]):
            if mask[row, t]:
                steps.append((t, float(rewards[row, t]), float(values[row, t]), bool(dones[row, t])))
            elif gaps == "zero":
                steps.append((t, 0.0, 0.0, bool(dones[row, t])))
            elif steps and dones[row, t]:
                steps[-1] = (*steps[-1][:3], True)
        deltas = []
        for i, (_, reward, value, is_last) in enumerate(steps):
            next_value = steps[i + 1][2] if i + 1 < len(steps) else float(bootstrap[row])
            deltas.append(reward + (0.0 if is_last else gamma * next_value) - value)
        for i, (t, _, value, _) in enumerate(steps):
            weight = 1.0
            for j in range(i, len(steps)):
                advantages[row, t] += weight * deltas[j]
                weight *= gamma * lam
                if steps[j][3]:
                    break
            returns[row, t] = advantages[row, t] + value
    return advantages * mask, returns * mask


@st.composite
def rollouts(draw):
    """Numbers by a seed: drawn one by one, they are mostly 0 and gaps are rare."""
    shape = draw(st.tuples(st.integers(1, 3), st.integers(1, 12)))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rewards, values = 3 * random.standard_normal((2, *shape)).astype(np.float32)
    return {
        "rewards": rewards,
        "values": values,
        "gamma": draw(st.sampled_from([0.9, 0.5, 0.0, 1.0])),
        "lam": draw(st.sampled_from([0.95, 0.5, 0.0, 1.0])),
        "bootstrap": random.standard_normal(shape[0]).astype(np.float32),
        "mask": random.random(shape) < draw(st.sampled_from([0.5, 0.9, 0.0])),
        "dones": random.random(shape) < draw(st.sampled_from([0.2, 0.0])),
        "gaps": draw(st.sampled_from(["carry", "zero"])),
    }


@pytest.mark.parametrize("path", PATHS)
def test_gae_is_its_definition_with_masks_ends_and_bootstraps(path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(advantage, "_WORTH_COMPILING", 0)
        patch.setattr(advantage, "_BLOCK_STEPS", 3)
        if path == "numpy":
            patch.setenv("BATCHWRIGHT_NUMBA", "0")

        @settings(max_examples=60)
        @given(rollouts())
        def check(given_arrays):
            found, expected = gae(**given_arrays), slow_gae(**given_arrays)
            for ours, definition in zip(found, expected, strict=True):
                assert ours.dtype == np.float32
                np.testing.assert_allclose(ours, definition, **CLOSE)

        check()


@needs_numba
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("gaps", ["carry", "zero"])
@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize("has_dones", [False, True])
def test_numba_gives_the_same_bits_as_numpy(monkeypatch, dtype, gaps, has_mask, has_dones):
    draw = np.random.default_rng(0)
    shape = (40, 131)
    rewards, values = draw.standard_normal((2, *shape)).astype(dtype)
    options = {"gamma": 0.99, "lam": 0.95, "gaps": gaps, "bootstrap": draw.standard_normal(40)}
    options["mask"] = draw.random(shape) < 0.7 if has_mask else None
    options["dones"] = draw.random(shape) < 0.05 if has_dones else None
    compiled = gae(rewards, values, **options)
    monkeypatch.setenv("BATCHWRIGHT_NUMBA", "0")
    for one, other in zip(compiled, gae(rewards, values, **options), strict=True):
        assert np.array_equal(one, other)


@needs_numba
def test_large_arrays_take_the_compiled_loop_and_small_ones_do_not(monkeypatch):
    taken = []
    monkeypatch.setattr(advantage, "_step_all_rows", lambda *arguments: taken.append("numpy"))
    gae(np.ones((2, 3)), np.ones((2, 3)))
    gae(np.ones((64, 64)), np.ones((64, 64)))
    monkeypatch.setenv("BATCHWRIGHT_NUMBA", "0")
    gae(np.ones((64, 64)), np.ones((64, 64)))
    assert taken == ["numpy", "numpy"]


@on_both_paths
@pytest.mark.usefixtures("_on_path")
def test_a_gap_is_stepped_over_as_if_it_were_cut_out():
    whole = gae([[1.0, 2.0, 3.0]], [[0.5, 0.25, 0.125]], gamma=0.5, lam=0.5, bootstrap=[4.0])
    gapped = gae(
        [[1.0, np.nan, 2.0, 7.0, 3.0, 9.0]],
        [[0.5, 8.0, 0.25, np.inf, 0.125, 9.0]],
        gamma=0.5,
        lam=0.5,
        bootstrap=[4.0],
        mask=[[1, 0, 1, 0, 1, 0]],
    )
    for one, other in zip(whole, gapped, strict=True):
        assert other[0, [0, 2, 4]].tolist() == one[0].tolist()
        assert other[0, [1, 3, 5]].tolist() == [0, 0, 0]


@on_both_paths
@pytest.mark.usefixtures("_on_path")
def test_a_zeroed_gap_costs_a_discount():
    found, _ = gae([[0.0, 5.0, 8.0]], [[0.0, 5.0, 0.0]], gamma=0.5, lam=1.0, mask=[[1, 0, 1]], gaps="zero")
    assert found.tolist() == [[2.0, 0.0, 8.0]]


@on_both_paths
@pytest.mark.usefixtures("_on_path")
def test_nothing_flows_back_over_the_end_of_an_episode():
    found, _ = gae([[0.0, 0.0, 8.0]], [[1.0, 1.0, 1.0]], lam=1.0, dones=[[False, True, False]], bootstrap=[3.0])
    assert found.tolist() == [[-1.0, -1.0, 10.0]]


@on_both_paths
@pytest.mark.usefixtures("_on_path")
def test_an_episode_that_ends_in_a_gap_ends_before_it():
    found, _ = gae([[1.0, 0.0, 8.0]], [[0.5, 9.0, 2.0]], lam=0.5, mask=[[1, 0, 1]], dones=[[0, 1, 0]])
    assert found.tolist() == [[0.5, 0.0, 6.0]]


@on_both_paths
@pytest.mark.usefixtures("_on_path")
def test_arrays_of_any_layout_are_read_and_left_alone():
    draw = np.random.default_rng(1)
    rewards, values = draw.standard_normal((2, 9, 5)).astype(np.float32)
    mask = draw.random((9, 5)) < 0.5
    expected = gae(rewards.T.copy(), values.T.copy(), mask=mask.T.copy())
    before = rewards.copy()
    for array in (rewards, values, mask):
        array.setflags(write=False)
    for one, other in zip(gae(rewards.T, values.T, mask=mask.T), expected, strict=True):
        assert np.array_equal(one, other)
    assert np.array_equal(rewards, before)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
def test_nothing_gives_nothing(shape):
    assert [array.shape for array in gae(np.zeros(shape), np.zeros(shape))] == [shape, shape]
    assert discounted(np.zeros(shape)).shape == shape


@pytest.mark.parametrize(
    ("rewards", "values", "result"),
    [
        ("f4", "f4", "f4"),
        ("i8", "f4", "f4"),
        ("f4", "f8", "f8"),
        ("i8", "i8", "f8"),
        ("?", "i4", "f8"),
        ("f2", "f2", "f4"),
    ],
)
def test_results_have_the_floating_type_of_the_inputs(rewards, values, result):
    found = gae(np.ones((1, 2), rewards), np.ones((1, 2), values))
    assert [array.dtype for array in found] == [np.dtype(result)] * 2


@settings(max_examples=40)
@given(rollouts())
def test_the_reward_to_come_is_its_sum(given_arrays):
    rewards, mask, gamma = given_arrays["rewards"], given_arrays["mask"], given_arrays["gamma"]
    nothing = {"values": np.zeros_like(rewards), "bootstrap": np.zeros(len(rewards)), "lam": 1.0}
    expected, _ = slow_gae(**{**given_arrays, **nothing})
    found = discounted(rewards, mask, gamma, dones=given_arrays["dones"], gaps=given_arrays["gaps"])
    np.testing.assert_allclose(found, expected, **CLOSE)


# Over rows


def slow_group_relative(rewards, group, *, std, unbiased, eps, singles, baseline):
    """By fractions, as `statistics` does inside: rounded once, at the end."""
    out = []
    for i, (reward, name) in enumerate(zip(rewards, group, strict=True)):
        mates = [r for j, (r, n) in enumerate(zip(rewards, group, strict=True)) if n == name]
        others = [r for j, (r, n) in enumerate(zip(rewards, group, strict=True)) if n == name and j != i]
        if not others:
            out.append(0.0 if singles == "zero" else reward / (1 + eps) if std else reward)
            continue
        compared = mates if baseline == "mean" else others
        apart = float(Fraction(reward) - statistics.mean(map(Fraction, compared)))
        if len(compared) > 1:
            spread = statistics.stdev(compared) if unbiased else statistics.pstdev(compared)
        else:
            spread = 0.0
        out.append(apart / (spread + eps) if std and spread > 0 else apart)
    return out


rewards_and_groups = st.lists(
    st.tuples(st.sampled_from([0.0, 1.0, 0.1, 0.5, -2.0, 3.5]), st.sampled_from("abcd")), min_size=1, max_size=14
)


@given(
    rewards_and_groups,
    st.fixed_dictionaries(
        {
            "std": st.booleans(),
            "unbiased": st.booleans(),
            "eps": st.sampled_from([0.0, 1e-6, 1e-4]),
            "singles": st.sampled_from(["zero", "reward"]),
            "baseline": st.sampled_from(["mean", "others"]),
        }
    ),
)
def test_group_relative_is_its_definition(rows, options):
    rewards, group = zip(*rows, strict=True)
    expected = slow_group_relative(rewards, group, **options)
    np.testing.assert_allclose(group_relative(rewards, group, **options), expected, rtol=1e-9, atol=1e-12)


FAR_APART = {
    "high up": [2.0**40, 2.0**40 + 1, 2.0**40 + 3, 2.0**40 + 4],
    "one far off, the first": [1e16, 0.1, 0.25, 0.7, 0.3],
    "one far off, between": [0.1, 0.25, -1e16, 0.7, 0.3],
    "one far off, the last": [0.1, 0.25, 0.7, 1e16],
    "one of three far off": [1e10, 1e-3, 2e-3],
    "two heaps": [1e-3, 2e-3, 5e-3, 1e10, 1e10 + 1e-3],
    "every magnitude": [1e-12, -3e-7, 2e-2, 5.0, -4e5, 7e11],
}


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("rewards", FAR_APART.values(), ids=FAR_APART)
def test_the_others_are_measured_as_well_where_rewards_lie_far_apart(rewards, unbiased):
    options = {"std": True, "unbiased": unbiased, "eps": 0.0, "singles": "zero", "baseline": "others"}
    for count in range(2, len(rewards) + 1):
        some = rewards[:count]
        expected = slow_group_relative(some, ["a"] * count, **options)
        np.testing.assert_allclose(group_relative(some, ["a"] * count, **options), expected, rtol=1e-13)


def test_the_others_are_measured_in_groups_of_every_size():
    group = np.repeat(np.arange(34), np.arange(34))  # of 1 row, of 2, ... of 33
    order = np.random.default_rng(0).permutation(len(group))
    rewards, group = np.random.default_rng(1).standard_normal(len(group)), group[order]
    options = {"std": True, "unbiased": True, "eps": 0.0, "singles": "zero", "baseline": "others"}
    for number in range(1, 34):
        is_mine = group == number
        expected = slow_group_relative(rewards[is_mine], group[is_mine], **options)
        found = group_relative(rewards, group, **options)[is_mine]
        np.testing.assert_allclose(found, expected, rtol=1e-10)


@given(rewards_and_groups, st.sampled_from(["zero", "reward"]))
def test_leave_one_out_is_its_definition(rows, singles):
    rewards, group = zip(*rows, strict=True)
    options = {"std": False, "unbiased": True, "eps": 0.0, "baseline": "others"}
    expected = slow_group_relative(rewards, group, singles=singles, **options)
    np.testing.assert_allclose(leave_one_out(rewards, group, singles=singles), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "ids", [[5, 2, 5, 2, 9], ["b", "a", "b", "a", "c"], np.array(["b", "a", "b", "a", "c"], object)]
)
def test_ids_of_groups_are_numbers_or_text_in_any_order(ids):
    assert leave_one_out([1.0, 5.0, 0.0, 7.0, 3.0], ids).tolist() == [1.0, -2.0, -1.0, 2.0, 0.0]


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, -1e9, 123456.789])
@pytest.mark.parametrize("size", [2, 3, 7])
def test_equal_rewards_get_exactly_0_in_every_dialect(name, reward, size):
    ours = replace(dialect(name), group_eps=0.0)
    for found in (
        ours.group_relative([reward] * size, ["a"] * size),
        ours.leave_one_out([reward] * size, ["a"] * size),
    ):
        assert found.tolist() == [0.0] * size


@pytest.mark.parametrize("baseline", ["mean", "others"])
def test_advantages_do_not_depend_on_the_height_of_rewards(baseline):
    draw = np.random.default_rng(0)
    rewards, group = draw.integers(0, 9, 64) / 8, draw.integers(0, 8, 64)
    low, high = (group_relative(rewards + height, group, baseline=baseline) for height in (0.0, 2.0**30))
    np.testing.assert_allclose(low, high, rtol=1e-12)


@pytest.mark.parametrize("far", [1e6, -1e16, 0.1 + 2**-50])
@pytest.mark.parametrize("size", [2, 3, 4, 7, 100])
def test_where_the_others_are_equal_nothing_is_divided_and_nothing_is_rounded_twice(size, far):
    for place in (0, size // 2, size - 1):
        rewards = [0.1] * size
        rewards[place] = far
        found = group_relative(rewards, [1] * size, baseline="others", eps=0.0)
        assert found[place] == far - 0.1
        assert np.isfinite(found).all()


def test_no_rows_have_no_advantages():
    for found in (group_relative([], []), leave_one_out([], []), reinforce([]), whiten([])):
        assert found.shape == (0,)


def test_float32_rewards_give_float32_advantages():
    rewards = np.array([1, 0], np.float32)
    for found in (group_relative(rewards, [1, 1]), leave_one_out(rewards, [1, 1]), reinforce(rewards), whiten(rewards)):
        assert found.dtype == np.float32
    assert group_relative([1, 0], [1, 1]).dtype == np.float64


@pytest.mark.parametrize(
    ("baseline", "expected"),
    [("mean", [0.0, -1.0, 1.0]), (None, [2.0, 1.0, 3.0]), (1, [1.0, 0.0, 2.0]), ([2.0, 2.0, 2.0], [0.0, -1.0, 1.0])],
    ids=["mean", "none", "number", "rows"],
)
def test_reinforce_subtracts_a_baseline(baseline, expected):
    assert reinforce([2.0, 1.0, 3.0], baseline).tolist() == expected


def test_equal_rewards_less_their_mean_are_exactly_0():
    assert reinforce([0.1] * 7).tolist() == [0.0] * 7


SPREADS = {
    "variance": lambda v, eps: math.sqrt(v + eps),
    "floor": lambda v, eps: math.sqrt(max(v, eps)),
    "std": lambda v, eps: math.sqrt(v) + eps,
}


@given(
    st.lists(st.tuples(st.floats(-9, 9), st.booleans()), min_size=2, max_size=12),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1e-8, 1e-2]),
    st.sampled_from(list(SPREADS)),
)
def test_whiten_is_its_definition(numbers, unbiased, shift_mean, eps, eps_in):
    values, mask = zip(*numbers, strict=True)
    inside = [value for value, is_in in numbers if is_in]
    expected = [0.0] * len(values)
    if inside:
        mean = statistics.fmean(inside)
        squares = sum((value - mean) ** 2 for value in inside)
        divisor = SPREADS[eps_in](squares / max(len(inside) - unbiased, 1), eps)
        back = 0.0 if shift_mean else mean
        expected = [(value - mean) / divisor + back if is_in else 0.0 for value, is_in in numbers]
    found = whiten(values, mask, unbiased=unbiased, shift_mean=shift_mean, eps=eps, eps_in=eps_in)
    np.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("values", [[0.1], [0.1, 0.1, 0.1]], ids=["one", "equal"])
@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("eps_in", SPREADS)
def test_numbers_without_spread_are_whitened_to_0(values, unbiased, eps_in):
    assert whiten(values, unbiased=unbiased, eps=0, eps_in=eps_in).tolist() == [0.0] * len(values)


def test_what_is_not_in_the_mask_is_0_and_not_looked_at():
    found = whiten([[1.0, np.nan], [3.0, np.inf]], mask=[[1, 0], [1, 0]], eps=0)
    assert found.tolist() == [[-1.0, 0.0], [1.0, 0.0]]


# Dialects: by the formulas on their page

REWARDS = [1.0, 0.0, 0.0, 1.0, 0.5, 0.75, 4.0]
GROUP = ["a", "a", "a", "a", "b", "b", "c"]


def std_of(numbers):
    return statistics.stdev(numbers) if len(numbers) > 1 else 0.0


GRPO = {
    "batchwright": lambda r, all, others: (r - statistics.fmean(all)) / (std_of(all) + 1e-6) if others else 0.0,
    "verl": lambda r, all, others: (r - statistics.fmean(all)) / (std_of(all) + 1e-6) if others else r / (1 + 1e-6),
    "trl": lambda r, all, others: (r - statistics.fmean(all)) / (std_of(all) + 1e-4) if others else 0.0,
    "openrlhf": lambda r, all, others: (r - statistics.fmean(all)) / (std_of(all) + 1e-9) if others else 0.0,
    "nemo_rl": lambda r, all, others: (
        0.0 if not others else (r - statistics.fmean(others)) / (std_of(others) + 1e-6 if std_of(others) > 0 else 1.0)
    ),
}


@pytest.mark.parametrize("name", DIALECTS)
def test_a_dialect_compares_in_groups_as_its_page_says(name):
    expected = []
    for i, reward in enumerate(REWARDS):
        mates = [r for r, g in zip(REWARDS, GROUP, strict=True) if g == GROUP[i]]
        others = [r for j, r in enumerate(REWARDS) if GROUP[j] == GROUP[i] and j != i]
        expected.append(GRPO[name](reward, mates, others))
    np.testing.assert_allclose(dialect(name).group_relative(REWARDS, GROUP), expected, rtol=1e-12)


@pytest.mark.parametrize("name", DIALECTS)
def test_a_dialect_leaves_one_out_as_its_page_says(name):
    alone = 4.0 if name == "verl" else 0.0
    expected = [2 / 3, -2 / 3, -2 / 3, 2 / 3, -0.25, 0.25, alone]
    np.testing.assert_allclose(dialect(name).leave_one_out(REWARDS, GROUP), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("name", "gamma", "lam", "gaps"),
    [
        ("batchwright", 1.0, 0.95, "carry"),
        ("verl", 1.0, 1.0, "carry"),
        ("trl", 1.0, 0.95, "zero"),
        ("openrlhf", 1.0, 1.0, "zero"),
        ("nemo_rl", 1.0, 0.95, "carry"),
    ],
)
def test_a_dialect_walks_over_time_as_its_page_says(name, gamma, lam, gaps):
    rewards, values, mask = np.array([[0.0, 3.0, 1.0]]), np.array([[0.5, 3.0, 0.25]]), np.array([[1, 0, 1]])
    expected = slow_gae(
        rewards, values, gamma=gamma, lam=lam, bootstrap=[0.0], mask=mask, dones=np.zeros((1, 3)), gaps=gaps
    )
    for one, other in zip(dialect(name).gae(rewards, values, mask=mask), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)


@pytest.mark.parametrize(
    ("name", "divisor"),
    [
        ("batchwright", math.sqrt(2e-8 / 3 + 1e-8)),
        ("verl", math.sqrt(1e-8 + 1e-8)),
        ("trl", math.sqrt(1e-8 + 1e-8)),
        ("openrlhf", math.sqrt(1e-8)),  # of 3 numbers the variance is 2e-8 / 3, below the floor
        ("nemo_rl", math.sqrt(1e-8 + 1e-8)),
    ],
)
def test_a_dialect_whitens_as_its_page_says(name, divisor):
    found = dialect(name).whiten([-1e-4, 0.0, 1e-4])
    np.testing.assert_allclose(found, np.array([-1e-4, 0.0, 1e-4]) / divisor, rtol=1e-9)
    assert dialect(name).whitening_divisor(3, 2e-8) == pytest.approx(divisor)


def test_a_dialect_can_be_given_other_numbers():
    ours = dialect("trl")
    assert ours.group_relative([1.0, 0.0], [1, 1], std=False).tolist() == [0.5, -0.5]
    assert ours.gae([[0.0, 1.0]], [[0.0, 0.0]], gamma=0.5, lam=1.0)[0].tolist() == [[0.5, 1.0]]
    assert ours.discounted([[0.0, 1.0]], gamma=0.5).tolist() == [[0.5, 1.0]]


def test_no_dialect_is_what_the_functions_do_by_themselves():
    ours = dialect(None)
    assert ours is dialect("batchwright")
    assert dialect(ours) is ours
    assert np.array_equal(ours.group_relative(REWARDS, GROUP), group_relative(REWARDS, GROUP))
    assert np.array_equal(ours.whiten(REWARDS), whiten(REWARDS))


# Bad input

ONES = np.ones((2, 3))
BROKEN = np.array([[1.0, 1.0, 1.0], [1.0, np.nan, 1.0]])


@pytest.mark.parametrize(
    ("call", "kind", "where", "text"),
    [
        (lambda: gae(BROKEN, ONES), SampleError, {"row": 1, "column": "rewards"}, "rewards has nan in row 1, step 1"),
        (lambda: gae(ONES, -np.inf * ONES), SampleError, {"row": 0, "column": "values"}, "values has -inf in row 0"),
        (lambda: gae(ONES, BROKEN, mask=ONES), SampleError, {"row": 1}, "values has nan in row 1, step 1"),
        (lambda: gae(ONES, ONES, bootstrap=[0, np.nan]), SampleError, {"row": 1}, "bootstrap has nan in row 1"),
        (
            lambda: gae(ONES, ONES[:, :2]),
            SpecError,
            {"parameter": "values"},
            r"values has shape \(2, 2\), not \(2, 3\)",
        ),
        (lambda: gae(ONES, ONES, mask=[1, 0, 1]), SpecError, {"parameter": "mask"}, r"mask has shape \(3,\)"),
        (lambda: gae(ONES, ONES, dones=ONES.T), SpecError, {"parameter": "dones"}, r"dones has shape \(3, 2\)"),
        (
            lambda: gae(ONES, ONES, bootstrap=1.0),
            SpecError,
            {"parameter": "bootstrap"},
            r"bootstrap has shape \(\), not \(2,\)",
        ),
        (
            lambda: gae(ONES, ONES, gamma=1.5),
            SpecError,
            {"parameter": "gamma"},
            "gamma must be between 0 and 1, got 1.5",
        ),
        (lambda: gae(ONES, ONES, lam=-1), SpecError, {"parameter": "lam"}, "lam must be between 0 and 1, got -1"),
        (lambda: gae(ONES, ONES, lam=np.nan), SpecError, {"parameter": "lam"}, "lam must be between 0 and 1, got nan"),
        (lambda: gae(ONES, ONES, gamma=None), SpecError, {"parameter": "gamma"}, "gamma must be .*, got None"),
        (lambda: gae(ONES, ONES, gaps="skip"), SpecError, {"parameter": "gaps"}, "gaps='skip' is not one of"),
        (lambda: gae(ONES[0], ONES[0]), SpecError, {"parameter": "rewards"}, r"\[rows, time\], got shape \(3,\)"),
        (lambda: gae([["a"]], [[1.0]]), SpecError, {"parameter": "rewards"}, "rewards must be numbers, got <U1"),
        (lambda: gae([[1.0]], [[None]]), SpecError, {"parameter": "values"}, "values must be numbers, got object"),
        (lambda: discounted(ONES, None, 2), SpecError, {"parameter": "gamma"}, "gamma must be between 0 and 1"),
        (lambda: discounted(BROKEN), SampleError, {"row": 1}, "rewards has nan in row 1, step 1"),
        (lambda: group_relative([0, np.inf], [1, 1]), SampleError, {"row": 1}, "rewards has inf in row 1"),
        (lambda: group_relative([0.0, 1.0], [1]), SpecError, {"parameter": "group"}, r"group has shape \(1,\)"),
        (lambda: group_relative([0.0, 1.0], None), SpecError, {"parameter": "group"}, r"group has shape \(\)"),
        (lambda: group_relative(ONES, ONES), SpecError, {"parameter": "rewards"}, "one number per row"),
        (lambda: group_relative([0.0, 1.0], ["a", None]), SpecError, {"parameter": "group"}, "cannot be compared"),
        (lambda: group_relative([0.0], [1], eps=-1), SpecError, {"parameter": "eps"}, "eps must be 0 or more, got -1"),
        (
            lambda: group_relative([0.0], [1], singles="one"),
            SpecError,
            {"parameter": "singles"},
            "singles='one' is not",
        ),
        (lambda: group_relative([0.0], [1], baseline="max"), SpecError, {"parameter": "baseline"}, "baseline='max'"),
        (
            lambda: leave_one_out([np.nan], [1]),
            SampleError,
            {"row": 0, "column": "rewards"},
            "rewards has nan in row 0",
        ),
        (lambda: leave_one_out([0.0], [1, 2]), SpecError, {"parameter": "group"}, r"group has shape \(2,\)"),
        (lambda: leave_one_out([0.0], [1], singles=1), SpecError, {"parameter": "singles"}, "singles=1 is not one of"),
        (lambda: reinforce([np.nan]), SampleError, {"row": 0}, "rewards has nan in row 0"),
        (lambda: reinforce([1.0], "median"), SpecError, {"parameter": "baseline"}, "baseline='median' is not one of"),
        (lambda: reinforce([1.0], [1.0, 2.0]), SpecError, {"parameter": "baseline"}, r"baseline has shape \(2,\)"),
        (lambda: whiten(BROKEN), SampleError, {"row": 1, "column": "values"}, "values has nan in row 1, step 1"),
        (lambda: whiten(ONES, mask=[1]), SpecError, {"parameter": "mask"}, r"mask has shape \(1,\), not \(2, 3\)"),
        (lambda: whiten(ONES, eps_in="both"), SpecError, {"parameter": "eps_in"}, "eps_in='both' is not one of"),
        (lambda: whitening_divisor(1, 0.0, eps=np.nan), SpecError, {"parameter": "eps"}, "eps must be 0 or more"),
        (
            lambda: dialect("verI"),
            SpecError,
            {"parameter": "dialect"},
            "dialect='verI' is not one of .*'verl'.*'nemo_rl'",
        ),
        (lambda: Dialect(gaps="skip"), SpecError, {"parameter": "gaps"}, "gaps='skip' is not one of"),
    ],
)
def test_bad_input_is_named_with_a_remedy(call, kind, where, text):
    with refused(kind, **where) as caught:
        call()
    assert re.search(text, caught.value.headline)


def test_a_dialect_in_capitals_is_recognised_in_the_remedy():
    with refused(SpecError, "dialect='TRL'", parameter="dialect", remedy="dialect='trl'"):
        dialect("TRL")


def test_numba_is_not_imported_before_it_is_needed():
    code = "import numpy as np, sys; from batchwright.rl.advantage import gae; gae(np.ones((2, 3)), np.ones((2, 3)))"
    script = f"{code}; print('numba' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(Path(batchwright.__file__).parent.parent)}
    ran = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"
