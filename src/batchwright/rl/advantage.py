"""Advantages as pure functions of arrays, each with its formula. Batches, ranks and frameworks are unknown here.

| function | advantage |
|---|---|
| `gae` | `A_t = delta_t + gamma lam A_{t+1}`, `delta_t = r_t + gamma V_{t+1} - V_t`; also the returns `A_t + V_t` |
| `group_relative` | `(r - mean of its group) / (std of its group + eps)`, or without the division |
| `leave_one_out` | `r - mean of the others in its group` |
| `reinforce` | `r - baseline` |
| `discounted` | `G_t = r_t + gamma G_{t+1}`, the reward to come |
| `whiten` | `(x - mean) / sqrt(variance + eps)` over the places of a mask |

Arrays (or lists, or tensors in main memory) in, NumPy arrays out: float32 for numbers that are float32 or smaller, else
float64. All arithmetic is in float64. Inputs are not changed. Rewards and values that are NaN or infinite are refused
with their row, except where a mask is 0. Groups of one and groups of equal rewards have a defined result, never NaN.

Other libraries differ in the details: `batchwright.rl.dialects` has their conventions as values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from batchwright.base.checks import one_of
from batchwright.base.errors import SampleError, SpecError
from batchwright.base.kernels import jit, numba_or_none

__all__ = ["discounted", "gae", "group_relative", "leave_one_out", "reinforce", "whiten", "whitening_divisor"]

Floats = NDArray[np.floating[Any]]

BASELINES = ("mean", "others")
EPS_IN = ("variance", "floor", "std")
GAPS = ("carry", "zero")
SINGLES = ("zero", "reward")

_BLOCK_STEPS = 32
"""The number of steps that NumPy transposes at once: few enough to stay in the cache with 1,024 rows."""
_WORTH_COMPILING = 4096
"""The size from which a compiled loop is used. Below it, NumPy is done before numba is imported."""


# Over time


def gae(
    rewards: ArrayLike,
    values: ArrayLike,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    bootstrap: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    dones: ArrayLike | None = None,
    gaps: str = "carry",
) -> tuple[Floats, Floats]:
    """Generalised advantage estimation over [rows, time]: (advantages, returns).

        delta_t = r_t + gamma V_{t+1} - V_t
        A_t     = delta_t + gamma lam A_{t+1}            returns_t = A_t + V_t

    Beyond the last step, `A` is 0 and `V` is `bootstrap` (one number for each row; 0 if None: the row ended there).
    Where `dones[t]` is true an episode ends after step t: there `V_{t+1}` and `A_{t+1}` are 0.

    `mask` is 0 at steps that are not the policy's (tool output, padding). Results there are 0, and

    - `gaps="carry"`: the recursion steps over them, as if they were cut out: `t + 1` is the next step with a mask.
    - `gaps="zero"`: they are steps with `r_t = V_t = 0`, and cost a factor of gamma (and lam) each.

    >>> advantages, returns = gae([[0.0, 0.0, 1.0]], [[0.5, 0.5, 0.5]], gamma=1.0, lam=0.5)
    >>> advantages, returns
    (array([[0.125, 0.25 , 0.5  ]]), array([[0.625, 0.75 , 1.   ]]))
    >>> gae([[0.0, 9.0, 1.0]], [[0.5, 9.0, 0.5]], lam=0.5, mask=[[1, 0, 1]])[0]
    array([[0.25, 0.  , 0.5 ]])

    With numba the rows are walked one by one, else NumPy walks all rows step by step; the bits are the same.
    """
    rewards, values = _rows_by_time("rewards", rewards), _numeric("values", values)
    _same_shape("values", values, rewards.shape, "one value per reward")
    is_mine = _flags("mask", mask, rewards)
    is_done = _flags("dones", dones, rewards)
    gamma, lam = _fraction(gamma=gamma), _fraction(lam=lam)
    one_of(GAPS, gaps=gaps)
    dtype = _result_dtype(rewards, values)
    _refuse_not_finite("rewards", rewards, is_mine)
    _refuse_not_finite("values", values, is_mine)
    after = np.zeros(len(rewards))
    if bootstrap is not None:
        after = _one_per_row("bootstrap", bootstrap, len(rewards))
    rewards, values = rewards.astype(dtype, copy=False), values.astype(dtype, copy=False)
    advantages, returns = np.empty(rewards.shape, dtype), np.empty(rewards.shape, dtype)
    walk: Callable[..., None] = _step_all_rows
    if rewards.size >= _WORTH_COMPILING and numba_or_none() is not None:
        walk = _walk_compiled
    walk(rewards, values, after, is_mine, is_done, gamma, gamma * lam, gaps == "carry", advantages, returns)
    return advantages, returns


def discounted(
    rewards: ArrayLike,
    mask: ArrayLike | None = None,
    gamma: float = 1.0,
    *,
    dones: ArrayLike | None = None,
    gaps: str = "carry",
) -> Floats:
    """The discounted return from each step of [rows, time]: `G_t = r_t + gamma G_{t+1}`; mask and dones as in `gae`.

    >>> discounted([[1.0, 0.0, 4.0]], gamma=0.5)
    array([[2., 2., 4.]])
    """
    rewards = _rows_by_time("rewards", rewards)
    nothing = np.broadcast_to(np.zeros((), _result_dtype(rewards)), rewards.shape)
    return gae(rewards, nothing, gamma=gamma, lam=1.0, mask=mask, dones=dones, gaps=gaps)[0]


# Over rows


def group_relative(
    rewards: ArrayLike,
    group: ArrayLike,
    *,
    std: bool = True,
    unbiased: bool = True,
    eps: float = 1e-6,
    singles: str = "zero",
    baseline: str = "mean",
) -> Floats:
    """Each reward against those of its group (GRPO): `(r - mean) / (std + eps)`; without `std`, `r - mean` (Dr. GRPO).

    `group` has any id for each row, numbers or text. `unbiased` divides squared distances by `k - 1` in a group of k,
    else by k. `baseline="others"`: mean and std are those of the other k - 1 rows of the group. Where the std is 0 or
    undefined (equal rewards; one other row, if unbiased), nothing is divided.

    A group of one gets 0, or with `singles="reward"` what mean 0 and std 1 would give: `r / (1 + eps)`.

    >>> group_relative([1.0, 0.0, 0.0, 1.0], ["a", "a", "a", "a"], unbiased=False, eps=0)
    array([ 1., -1., -1.,  1.])
    >>> group_relative([1.0, 1.0, 3.0], [7, 7, 8])
    array([0., 0., 0.])
    """
    one_of(SINGLES, singles=singles)
    one_of(BASELINES, baseline=baseline)
    eps = _not_negative(eps=eps)
    raw = _row_rewards(rewards)
    shifted, number, size = _by_group(raw, group)
    if baseline == "mean":
        count = size
        apart = shifted - _sums(shifted, number) / size
        squares = _sums(apart * apart, number)
    else:
        count = size - 1
        apart, squares = _against_the_others(raw.astype(np.float64), shifted, number, size)
    if std:
        spread = np.sqrt(squares / np.maximum(count - unbiased, 1))
        apart = apart / np.where(spread > 0, spread + eps, 1.0)
    alone: Any = 0.0
    if singles == "reward":
        alone = raw.astype(np.float64) / (1 + eps * std)
    return np.where(size > 1, apart, alone).astype(_result_dtype(raw))


def leave_one_out(rewards: ArrayLike, group: ArrayLike, *, singles: str = "zero") -> Floats:
    """Each reward less the mean of the others in its group (RLOO): `r - (sum - r) / (k - 1)`.

    A group of one gets 0, or with `singles="reward"` its reward.

    >>> leave_one_out([1.0, 0.0, 0.0, 5.0], ["a", "a", "a", "b"])
    array([ 1. , -0.5, -0.5,  0. ])
    """
    one_of(SINGLES, singles=singles)
    raw = _row_rewards(rewards)
    shifted, number, size = _by_group(raw, group)
    apart = (size * shifted - _sums(shifted, number)) / np.maximum(size - 1, 1)
    alone: Any = 0.0
    if singles == "reward":
        alone = raw
    return np.where(size > 1, apart, alone).astype(_result_dtype(raw))


def reinforce(rewards: ArrayLike, baseline: ArrayLike | str | None = "mean") -> Floats:
    """Each reward less a baseline: the mean of all, a number, one for each row, or None for none.

    >>> reinforce([1.0, 0.0, 2.0])
    array([ 0., -1.,  1.])
    >>> reinforce([1.0, 0.0, 2.0], baseline=[1.0, 1.0, 1.0])
    array([ 0., -1.,  1.])
    """
    raw = _row_rewards(rewards)
    exact = raw.astype(np.float64)
    if isinstance(baseline, str):
        one_of(("mean",), baseline=baseline)
        if len(raw):
            apart = exact - exact[0]  # equal rewards give exactly 0
            exact = apart - apart.mean()
    elif baseline is not None:
        if np.ndim(baseline) == 0:
            baseline = np.full(len(raw), baseline)
        exact = exact - _one_per_row("baseline", baseline, len(raw))
    return exact.astype(_result_dtype(raw))


def whiten(
    values: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    unbiased: bool = False,
    shift_mean: bool = True,
    eps: float = 1e-8,
    eps_in: str = "variance",
) -> Floats:
    """`(x - mean) / divisor` over the places of the mask, for mean 0 and variance 1; 0 elsewhere.

    The divisor is `whitening_divisor` of the numbers in the mask. Without `shift_mean` the mean is added again.
    One number, or equal numbers, give 0 (or with `shift_mean=False` the mean).

    >>> whiten([1.0, 2.0, 3.0, 99.0], mask=[1, 1, 1, 0], unbiased=True, eps=0)
    array([-1.,  0.,  1.,  0.])
    """
    given = _numeric("values", values)
    is_in = _flags("mask", mask, given)
    _refuse_not_finite("values", given, is_in)
    whitened = np.zeros(given.shape, _result_dtype(given))
    places: Any = ...
    if is_in is not None:
        places = is_in
    chosen = given[places].astype(np.float64)
    if not chosen.size:
        return whitened
    first = chosen.flat[0]
    chosen -= first  # equal numbers give exactly 0
    mean = float(chosen.mean())
    chosen -= mean
    squares = float(np.vdot(chosen, chosen))
    chosen /= whitening_divisor(chosen.size, squares, unbiased=unbiased, eps=eps, eps_in=eps_in)
    if not shift_mean:
        chosen += first + mean
    whitened[places] = chosen
    return whitened


def whitening_divisor(
    count: float, squares: float, *, unbiased: bool = False, eps: float = 1e-8, eps_in: str = "variance"
) -> float:
    """The divisor of `whiten`, for `count` numbers whose squared distances from their mean sum to `squares`.

    With `v = squares / (count - 1 if unbiased else count)`, by `eps_in`:

    - `"variance"`: `sqrt(v + eps)`
    - `"floor"`: `sqrt(max(v, eps))`
    - `"std"`: `sqrt(v) + eps`

    and 1 where that would be 0.

    >>> whitening_divisor(3, 2.0, unbiased=True, eps=0)
    1.0
    """
    one_of(EPS_IN, eps_in=eps_in)
    eps = _not_negative(eps=eps)
    variance = squares / max(count - unbiased, 1)
    if eps_in == "variance":
        divisor = math.sqrt(variance + eps)
    elif eps_in == "floor":
        divisor = math.sqrt(max(variance, eps))
    else:
        divisor = math.sqrt(variance) + eps
    return divisor or 1.0


# The recursion, twice


def _step_all_rows(
    rewards: NDArray[Any],
    values: NDArray[Any],
    after: NDArray[np.float64],
    mask: NDArray[np.bool_] | None,
    dones: NDArray[np.bool_] | None,
    gamma: float,
    decay: float,
    carry: bool,
    advantages: Floats,
    returns: Floats,
) -> None:
    """All rows at once, step by step from the end: blocks of steps are turned time-major, so no whole copy is made.

    `after` has the value after the last step of each row; `decay` is gamma * lam; with `carry`, masked steps are
    skipped.
    """
    next_value, running = after.copy(), np.zeros(len(rewards))
    for end in range(rewards.shape[1], 0, -_BLOCK_STEPS):
        steps = slice(max(end - _BLOCK_STEPS, 0), end)
        reward, value = _time_major(rewards, steps), _time_major(values, steps)
        is_gap = carried = None
        live: Any = 1.0  # 0 if no step follows
        if dones is not None:
            live = 1.0 - _time_major(dones, steps)
        factor: Any = decay  # of the advantage after each step
        if mask is not None:
            is_gap = np.ascontiguousarray(~mask[:, steps].T)
            for array in (reward, value):
                np.copyto(array, 0.0, where=is_gap)  # any number there, NaN too
            if carry:
                factor = np.where(is_gap, 1.0, decay)
                carried = np.broadcast_to(is_gap * live, value.shape)
        delta, next_value = _values_after(value, next_value, carried)
        delta *= live
        delta *= gamma
        delta += reward
        delta -= value
        if carried is not None:
            np.copyto(delta, 0.0, where=is_gap)
        factor = np.broadcast_to(factor * live, value.shape)
        scaled = np.empty_like(running)
        for t in range(len(value) - 1, -1, -1):
            np.multiply(running, factor[t], out=scaled)
            running = np.add(delta[t], scaled, out=delta[t])
        running = running.copy()  # it is a row of delta, which is zeroed in gaps below
        if is_gap is not None:
            np.copyto(delta, 0.0, where=is_gap)
        advantages[:, steps] = delta.T
        delta += value
        returns[:, steps] = delta.T


def _time_major(array: NDArray[Any], steps: slice) -> NDArray[np.float64]:
    """Some steps of all rows as [time, rows] of float64. Both at once would take twice as long."""
    return np.ascontiguousarray(array[:, steps].astype(np.float64).T)


def _values_after(
    value: NDArray[np.float64], next_value: NDArray[np.float64], carried: NDArray[Any] | None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(V_{t+1} of each step, V of the first step). If `carried` is 1, a step has the value of the next one."""
    after = np.empty_like(value)
    if carried is None:
        after[:-1], after[-1] = value[1:], next_value
        return after, value[0]
    for t in range(len(value) - 1, -1, -1):
        after[t] = next_value
        next_value = carried[t] * next_value
        next_value += value[t]
    return after, next_value


def _walk_each_row(
    rewards: Any,
    values: Any,
    after: Any,
    mask: Any,
    dones: Any,
    gamma: Any,
    decay: Any,
    carry: Any,
    advantages: Any,
    returns: Any,
) -> None:
    """Row by row from the end, one pass over memory. For numba; the same operations in the same order as above."""
    has_mask, has_dones = mask.size > 0, dones.size > 0
    for row in range(rewards.shape[0]):
        next_value = after[row]
        running = 0.0
        for t in range(rewards.shape[1] - 1, -1, -1):
            if has_dones and dones[row, t]:
                next_value = 0.0
                running = 0.0
            if not has_mask or mask[row, t]:
                value = np.float64(values[row, t])
                running = (gamma * next_value + rewards[row, t] - value) + decay * running
                next_value = value
                advantages[row, t] = running
                returns[row, t] = running + value
            else:
                advantages[row, t] = 0.0
                returns[row, t] = 0.0
                if not carry:
                    running = gamma * next_value + decay * running
                    next_value = 0.0


def _walk_compiled(
    rewards: NDArray[Any],
    values: NDArray[Any],
    after: NDArray[np.float64],
    mask: NDArray[np.bool_] | None,
    dones: NDArray[np.bool_] | None,
    *settings_and_results: Any,
) -> None:
    """`_walk_each_row`, compiled. An empty array stands for no mask, and for no dones."""
    arrays = [np.empty((0, 0), np.bool_) if given is None else given for given in (rewards, values, mask, dones)]
    rewards, values, mask, dones = map(np.ascontiguousarray, arrays)
    _compiled_walk(rewards.dtype.name)(rewards, values, after, mask, dones, *settings_and_results)


@cache
def _compiled_walk(dtype_name: str) -> Any:
    """For one floating type. Types are explicit, so that read-only arrays do not compile it again."""
    numba = numba_or_none()
    types = numba.types
    number = types.float32 if dtype_name == "float32" else types.float64
    table = types.Array(number, 2, "C", readonly=True)
    flags = types.Array(types.boolean, 2, "C", readonly=True)
    results = types.Array(number, 2, "C")
    after = types.Array(types.float64, 1, "C", readonly=True)
    scalars = (types.float64, types.float64, types.boolean)
    return jit(_walk_each_row, types.void(table, table, after, flags, flags, *scalars, results, results))


# Groups


def _by_group(
    rewards: NDArray[Any], group: ArrayLike
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """(rewards less the first one of their group, number of each row's group, size of each row's group).

    Results do not depend on the height of rewards. Equal rewards of a group give exactly 0.
    """
    ids = np.asarray(group)
    _same_shape("group", ids, rewards.shape, "one id per reward, the same for rows of one prompt")
    try:
        _, first, number, sizes = np.unique(ids, return_index=True, return_inverse=True, return_counts=True)
    except TypeError:
        what = "group has ids that cannot be compared with each other"
        raise SpecError(what, parameter="group", remedy="all numbers or all text") from None
    exact = rewards.astype(np.float64)
    return exact - exact[first][number], number, sizes[number]


def _sums(numbers: NDArray[np.float64], number: NDArray[np.int64]) -> NDArray[np.float64]:
    """For each row the sum over its group."""
    totals: NDArray[Any] = np.bincount(number, weights=numbers)
    return totals[number]


def _against_the_others(
    rewards: NDArray[np.float64], shifted: NDArray[np.float64], number: NDArray[np.int64], size: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """For each row, (reward less the mean of the others in its group, the others' sum of squared distances from it).

    What a row adds to the squares of its group is subtracted. For the lowest and the highest reward of a group that may
    cancel, so without these the squares are summed anew.
    """
    num_others = np.maximum(size - 1, 1)
    from_mean = shifted - _sums(shifted, number) / size
    apart = from_mean * (size / num_others)
    squares = np.fmax(_sums(from_mean * from_mean, number) - from_mean * apart, 0)
    lowest, highest = _row_with(np.minimum, rewards, number), _row_with(np.maximum, rewards, number)
    for left_out, other in ((lowest, highest), (highest, lowest)):
        distances = rewards - rewards[other][number]  # from one of the others: if they are equal, exactly 0
        own = distances[left_out]
        distances[left_out] = 0
        means = _sums(distances, number) / num_others
        distances -= means
        distances[left_out] = 0
        apart[left_out] = own - means[left_out]
        squares[left_out] = _sums(distances * distances, number)[left_out]
    return apart, squares


def _row_with(extreme: np.ufunc, rewards: NDArray[np.float64], number: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each group a row with its lowest (`np.minimum`) or highest reward."""
    found = np.empty(int(number.max(initial=-1)) + 1)
    found[number] = rewards
    extreme.at(found, number, rewards)
    rows = np.flatnonzero(rewards == found[number])
    row_of = np.empty(len(found), np.int64)
    row_of[number[rows]] = rows
    return row_of


# Checks


def _result_dtype(*arrays: NDArray[Any]) -> np.dtype[Any]:
    """The floating type of the inputs; float64 for whole numbers, and float32 for halves, which hold no sums."""
    floating = [array.dtype for array in arrays if array.dtype.kind == "f"]
    if not floating:
        return np.dtype(np.float64)
    return np.dtype(np.float32 if np.result_type(*floating).itemsize <= 4 else np.float64)


def _numeric(name: str, given: ArrayLike) -> NDArray[Any]:
    array = np.asarray(given)
    if array.dtype.kind not in "fiub":
        remedy = "an array of one floating type"
        raise SpecError(f"{name} must be numbers, got {array.dtype}", parameter=name, remedy=remedy)
    return array


def _rows_by_time(name: str, given: ArrayLike) -> NDArray[Any]:
    array = _numeric(name, given)
    if array.ndim != 2:
        remedy = f"{name}[None, :] for one row; pad rows of several lengths, with mask=0 there"
        raise SpecError(f"{name} must be [rows, time], got shape {array.shape}", parameter=name, remedy=remedy)
    return array


def _row_rewards(given: ArrayLike) -> NDArray[Any]:
    array = _numeric("rewards", given)
    if array.ndim != 1:
        what = f"rewards must be one number per row, got shape {array.shape}"
        raise SpecError(what, parameter="rewards", remedy="(rewards * mask).sum(1) of token rewards")
    _refuse_not_finite("rewards", array, None)
    return array


def _one_per_row(name: str, given: ArrayLike, num_rows: int) -> NDArray[np.float64]:
    array = _numeric(name, given)
    _same_shape(name, array, (num_rows,), "one number per row")
    _refuse_not_finite(name, array, None)
    return np.ascontiguousarray(array, np.float64)


def _same_shape(name: str, array: NDArray[Any], shape: tuple[int, ...], what: str) -> None:
    if array.shape != shape:
        remedy = f"{what}: shape {shape}"
        raise SpecError(f"{name} has shape {array.shape}, not {shape}", parameter=name, remedy=remedy)


def _flags(name: str, given: ArrayLike | None, like: NDArray[Any]) -> NDArray[np.bool_] | None:
    """True for numbers that are not 0."""
    if given is None:
        return None
    array = _numeric(name, given)
    _same_shape(name, array, like.shape, "true or false for each number")
    return array.astype(np.bool_, copy=False)


def _fraction(**parameter: float) -> float:
    ((name, value),) = parameter.items()
    if not isinstance(value, int | float | np.number) or not 0 <= value <= 1:
        raise SpecError(f"{name} must be between 0 and 1, got {value!r}", parameter=name, remedy=f"{name}=0.99")
    return float(value)


def _not_negative(**parameter: float) -> float:
    ((name, value),) = parameter.items()
    if not 0 <= value < math.inf:
        raise SpecError(f"{name} must be 0 or more, got {value!r}", parameter=name, remedy=f"{name}=1e-6")
    return float(value)


def _refuse_not_finite(name: str, array: NDArray[Any], mask: NDArray[np.bool_] | None) -> None:
    """Refuse numbers that are not finite. One pass if all are: a finite sum has finite terms."""
    if array.dtype.kind != "f":
        return
    with np.errstate(all="ignore"):
        if math.isfinite(array.sum()):
            return
    is_bad = ~np.isfinite(array)
    if mask is not None:
        is_bad &= mask
    if is_bad.any():
        row, *steps = (int(index) for index in np.argwhere(is_bad)[0])
        place = "".join(f", step {step}" for step in steps)
        remedy = "leave the row out, give it a number, or set mask=0 where it does not count"
        raise SampleError(f"{name} has {array[row, *steps]} in row {row}{place}", row=row, column=name, remedy=remedy)
