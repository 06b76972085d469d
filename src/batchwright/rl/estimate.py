"""Rewards, advantages and returns of whole rollouts, by the method that the data allows.

They are computed over the data before it is cut into batches, so they do not depend on the cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.base.checks import one_of
from batchwright.base.errors import SpecError
from batchwright.rl.advantage import reinforce
from batchwright.rl.columns import Rollouts
from batchwright.rl.dialects import Dialect, given_or
from batchwright.rl.dialects import dialect as dialect_of

__all__ = ["METHODS", "Advantages", "Estimate", "last_trained", "token_rewards"]

METHODS = ("gae", "group_relative", "leave_one_out", "reinforce")
_ALSO_CALLED = {"ppo": "gae", "grpo": "group_relative", "rloo": "leave_one_out"}
"""The losses that use these methods. An error suggests the method; the names are not accepted."""
_MAX_TOKENS = 1 << 21
"""Tokens, padding included, that are padded at once for a recursion over time."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Each column has one number per token (0 where the policy did not write it), or one per row: then it holds for
    all tokens that the policy wrote; of `rewards`, for the last of them."""

    rewards: NDArray[np.float32] | None
    advantages: NDArray[np.float32] | None = None
    returns: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class Advantages:
    """The settings of advantages: `compute_advantages=Advantages("gae", gamma=0.99)`. Print it, compare it.

    `method` is "gae", "group_relative", "leave_one_out" or "reinforce"; True: the best that the columns of the data
    allow; False: rewards only. `dialect` takes another library's conventions: "verl", "trl", "openrlhf" or "nemo_rl".
    `gamma`, `lam` and `whiten` are the dialect's if they are not given; ours are 1.0, 0.95 and False. `whiten` whitens
    over the global batch. Each token's reward is less `kl_coef` times (old_log_probs - ref_log_probs).
    """

    method: bool | str = True
    _: KW_ONLY
    dialect: Dialect | str | None = None
    gamma: float | None = None
    lam: float | None = None
    whiten: bool | None = None
    kl_coef: float = 0.0

    def __post_init__(self) -> None:
        dialect_of(self.dialect)  # refuses an unknown name
        if not isinstance(self.method, bool):
            _check_method(self.method)
        for name, share in (("gamma", self.gamma), ("lam", self.lam)):
            _check(share is None or (_is_number(share) and 0 <= share <= 1), name, share, "between 0 and 1", 1.0)
        _check(_is_number(self.kl_coef) and math.isfinite(self.kl_coef), "kl_coef", self.kl_coef, "a number", 0)
        _check(self.whiten in (None, True, False), "whiten", self.whiten, "true or false", True)
        if self.whiten and self.method is False:
            what = "whiten=True whitens advantages, and none are computed"
            raise SpecError(what, parameter="whiten", remedy="compute_advantages=True, or leave out whiten=")

    def method_for(self, rollouts: Rollouts) -> str | None:
        """The method for these `rollouts`: one of METHODS, or None."""
        if self.method is False:
            return None
        _refuse_missing("reward", rollouts.reward, "advantages need rewards", "compute_advantages=False")
        if self.method is True:
            if rollouts.values is not None:
                return "gae"
            if self._compares(rollouts):
                return "group_relative"
            return "reinforce"
        if self.method == "gae":
            _refuse_missing("values", rollouts.values, "GAE needs values", "compute_advantages='reinforce'")
        elif self.method != "reinforce":
            what = f"{self.method} advantages compare the rows of a group"
            _refuse_missing("group", rollouts.group, what, "compute_advantages='reinforce'")
        return str(self.method)

    def _compares(self, rollouts: Rollouts) -> bool:
        """Whether any group has two rows. Otherwise all advantages would silently be 0."""
        if rollouts.group is None:
            return False
        return self.conventions.group_singles != "zero" or int(np.bincount(rollouts.group).max()) > 1

    def whitens(self, method: str | None) -> bool:
        """Whether advantages by this `method` are whitened over the global batch."""
        if self.whiten is None:
            return method == "gae" and self.conventions.whitens_gae
        return self.whiten

    def in_words(self, method: str | None) -> str:
        """The line of a loader's repr, for a `method`.

        >>> print(Advantages(gamma=0.99).in_words("gae"))
        advantages by gae (gamma 0.99, lam 0.95)
        """
        if method is None:
            return "no advantages"
        details = {
            f"gamma {self._gamma:g}, lam {self._lam:g}": method == "gae",
            "whitened over the global batch": self.whitens(method),
            f"kl_coef {self.kl_coef:g}": self.kl_coef,
            f"as {self.conventions.name} does": self.conventions.name != "batchwright",
        }
        said = ", ".join(detail for detail, applies in details.items() if applies)
        return f"advantages by {method} ({said})".removesuffix(" ()")

    def __call__(self, rollouts: Rollouts) -> Estimate:
        method = self.method_for(rollouts)
        if rollouts.reward is None:
            return Estimate(None)
        is_per_row = rollouts.token_rewards is None and not self.kl_coef  # one reward per row, at its last token
        if is_per_row:
            rewards = rollouts.reward.astype(np.float32)
        else:
            rewards = token_rewards(rollouts, self.kl_coef)
        if method is None:
            return Estimate(rewards)
        if method != "gae" and is_per_row and self._gamma == 1:
            return Estimate(rewards, self._worth(method, rollouts.reward, rollouts.group), rewards)
        steps = rewards
        if is_per_row:
            steps = token_rewards(rollouts)
        return Estimate(rewards, *self._advantages_and_returns(method, rollouts, steps))

    def _advantages_and_returns(
        self, method: str, rollouts: Rollouts, steps: NDArray[np.float32]
    ) -> tuple[NDArray[np.float32], ...]:
        """By the reward of each token."""
        if method == "gae":
            assert rollouts.values is not None
            gae = partial(self.conventions.gae, gamma=self._gamma, lam=self._lam)
            return _over_time(rollouts, gae, steps, rollouts.values)
        assert rollouts.reward is not None
        total = rollouts.reward
        if self.kl_coef:
            total = np.add.reduceat(steps.astype(np.float64), rollouts.starts[:-1])
        # Row by row: no row sees how large the rewards of others are.
        discounted = partial(self.conventions.discounted, gamma=self._gamma)
        (returns,) = _over_time(rollouts, lambda r, mask: (discounted(r, mask),), steps)
        return self._worth(method, total, rollouts.group), returns

    def _worth(self, method: str, total: NDArray[np.float64], group: NDArray[np.int64] | None) -> NDArray[np.float32]:
        """The advantage of each row."""
        if method == "reinforce":
            return reinforce(total).astype(np.float32)
        assert group is not None
        compare = {"group_relative": self.conventions.group_relative, "leave_one_out": self.conventions.leave_one_out}
        return compare[method](total, group).astype(np.float32)

    @property
    def conventions(self) -> Dialect:
        """The conventions of the dialect."""
        return dialect_of(self.dialect)

    @property
    def _gamma(self) -> float:
        return given_or(self.gamma, self.conventions.gamma)

    @property
    def _lam(self) -> float:
        return given_or(self.lam, self.conventions.lam)


def _check_method(method: str) -> None:
    try:
        one_of(METHODS, compute_advantages=method)
    except SpecError as error:
        meant = _ALSO_CALLED.get(str(method).lower())
        if meant is not None:
            error.remedy = f"compute_advantages={meant!r}"
        raise


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _check(holds: bool, name: str, value: Any, what: str, example: Any) -> None:
    if not holds:
        raise SpecError(f"{name} must be {what}, got {value!r}", parameter=name, remedy=f"{name}={example}")


def _refuse_missing(column: str, values: Any, what: str, otherwise: str) -> None:
    if values is None:
        raise SpecError(
            f"{what}, and these rollouts have no {column!r}",
            parameter="compute_advantages",
            column=column,
            remedy=f"{column!r} in each row, or {otherwise}",
        )


def token_rewards(rollouts: Rollouts, kl_coef: float = 0.0) -> NDArray[np.float32]:
    """The reward of each token. The reward of a whole sequence is at its last learned token."""
    if rollouts.token_rewards is not None:
        rewards = rollouts.token_rewards.astype(np.float32)
    else:
        assert rollouts.reward is not None
        rewards = np.zeros(len(rollouts.tokens), np.float32)
        rewards[last_trained(rollouts)] = rollouts.reward
    if kl_coef:
        if rollouts.old_log_probs is None or rollouts.ref_log_probs is None:
            what = "kl_coef compares old_log_probs with ref_log_probs, and these rollouts have not both"
            raise SpecError(what, parameter="kl_coef", remedy="both in each row, or kl_coef=0")
        rewards = rewards - np.float32(kl_coef) * (rollouts.old_log_probs - rollouts.ref_log_probs) * rollouts.trained
    return rewards


def last_trained(rollouts: Rollouts) -> NDArray[np.int64]:
    """The place of each row's last learned token; its last token if none is learned."""
    ends = rollouts.starts[1:] - 1
    if rollouts.trained[ends].all():  # the usual case, found without a test of every token
        return ends
    places = np.flatnonzero(rollouts.trained)
    last = np.append(places, -1)[np.searchsorted(places, rollouts.starts[1:]) - 1]
    return np.where(last < rollouts.starts[:-1], ends, last)


def _over_time(
    rollouts: Rollouts, function: Callable[..., Any], *columns: NDArray[np.float32]
) -> tuple[NDArray[np.float32], ...]:
    """A recursion over the tokens of each row, for similar rows at once: [rows, time] in, flat columns out."""
    out: list[NDArray[np.float32]] = []
    for index, is_token in _padded_places(rollouts):
        mask = rollouts.trained[index] & is_token
        results = function(*(np.where(mask, column[index], 0) for column in columns), mask=mask)
        if not out:
            out = [np.zeros(len(rollouts.tokens), np.float32) for _ in results]
        for flat, result in zip(out, results, strict=True):
            flat[index[mask]] = result[mask]
    return tuple(out)


def _padded_places(rollouts: Rollouts) -> Iterator[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
    """(place of the token at each [row, time], whether there is one), from each row's first learned token on."""
    places = np.where(rollouts.trained, np.arange(len(rollouts.tokens)), len(rollouts.tokens))
    ends = last_trained(rollouts) + 1
    begins = np.minimum(np.minimum.reduceat(places, rollouts.starts[:-1]), ends - 1)
    spans = ends - begins
    order = np.argsort(spans, kind="stable")
    first = 0
    while first < len(order):
        last = len(order)
        while (last - first) * spans[order[last - 1]] > _MAX_TOKENS and last > first + 1:
            last = first + max((last - first) // 2, 1)
        rows = order[first:last]
        time = np.arange(int(spans[rows[-1]]))
        is_token = time < spans[rows][:, None]
        yield np.where(is_token, begins[rows][:, None] + time, 0), is_token
        first = last
