"""The conventions of other RL libraries as values: the same call, with their numbers.

>>> verl = dialect("verl")
>>> verl.group_relative([1.0, 0.0, 5.0], ["a", "a", "b"]).round(3)      # a group of one keeps its reward
array([ 0.707, -0.707,  5.   ])
>>> dialect("trl").group_eps, dialect("openrlhf").group_eps
(0.0001, 1e-09)

As read in their public sources; they change. Of a group of k rewards r, `s` is the standard deviation with k - 1; `v1`
is a variance with n - 1, `vn` one with n.

| | verl | TRL | OpenRLHF | NeMo-RL | batchwright |
|---|---|---|---|---|---|
| group relative | `(r - mean) / (s + 1e-6)` | `(r - mean) / (s + 1e-4)` | `(r - mean) / (s + 1e-9)` | (1) | as verl |
| a group of one | `r / (1 + 1e-6)` | 0 | NaN (here 0) | 0 | 0 |
| leave one out | `r - mean of the others` | the same | the same | the same | the same |
| a group of one | `r` | 0 | NaN (here 0) | 0 | 0 |
| GAE, gamma, lam | 1, 1 | 1, 0.95 | 1, 1 | 1, 0.95 | 1, 0.95 |
| GAE over gaps | carried | zeroed | zeroed | carried | carried |
| whitened after GAE | yes | yes | yes | yes | if asked |
| whitened by | `sqrt(v1 + 1e-8)` | as verl | `sqrt(max(vn, 1e-8))` | as verl | `sqrt(vn + 1e-8)` |

(1) `(r - m) / (s' + 1e-6)`, where m and s' are mean and standard deviation of the other k - 1 rewards, s' with k - 2;
`r - m` where s' is 0 (also in groups of two).

Where they are from:

- verl: `compute_grpo_outcome_advantage`, `compute_rloo_outcome_advantage` and `compute_gae_advantage_return` of
  `trainer/ppo/core_algos.py`, `masked_whiten` of `utils/torch_functional.py`, `AlgoConfig`. Its vectorised
  leave-one-out gives a group of one 0 instead.
- TRL: `GRPOTrainer` with `scale_rewards="group"` and `RLOOTrainer` (1.16); for GAE and whitening the `PPOTrainer` of
  `trl.experimental.ppo`, which 1.16 no longer has. `RLOOConfig(normalize_advantages=True)` is
  `whiten(..., unbiased=True, eps=1e-4, eps_in="std")`.
- OpenRLHF: `RemoteExperienceMaker.compute_advantages_and_returns` (`group_norm`, `rloo`) and
  `get_advantages_and_returns`.
- NeMo-RL: `GRPOAdvantageEstimator` over `calculate_baseline_and_std_per_prompt`, and `GeneralizedAdvantageEstimator`.
  Its Reinforce++ whitens like OpenRLHF.

At masked places some of them leave numbers that their losses then mask; here these are 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from numpy.typing import ArrayLike

from batchwright.base.checks import one_of
from batchwright.rl import advantage
from batchwright.rl.advantage import BASELINES, EPS_IN, GAPS, SINGLES, Floats

__all__ = ["DIALECTS", "Dialect", "dialect", "given_or"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialect:
    """The conventions of one library. A value: print it, compare it, `dataclasses.replace` a part of it."""

    name: str = "batchwright"
    group_baseline: str = "mean"
    """Rewards are compared with the mean (and std) of their group, or of the "others" in it."""
    group_std: bool = True
    group_unbiased: bool = True
    group_eps: float = 1e-6
    group_singles: str = "zero"
    """The advantage of a group of one: "zero", or its "reward" as if the mean were 0 and the std 1."""
    leave_one_out_singles: str = "zero"
    gamma: float = 1.0
    lam: float = 0.95
    gaps: str = "carry"
    """Masked steps in a recursion over time: "carry" or "zero"."""
    whitens_gae: bool = False
    """Whether the library whitens the advantages of GAE unless told not to. `gae` itself never does."""
    whiten_unbiased: bool = False
    whiten_eps: float = 1e-8
    whiten_eps_in: str = "variance"

    def __post_init__(self) -> None:
        one_of(BASELINES, group_baseline=self.group_baseline)
        one_of(SINGLES, group_singles=self.group_singles)
        one_of(SINGLES, leave_one_out_singles=self.leave_one_out_singles)
        one_of(GAPS, gaps=self.gaps)
        one_of(EPS_IN, whiten_eps_in=self.whiten_eps_in)

    def group_relative(self, rewards: ArrayLike, group: ArrayLike, *, std: bool | None = None) -> Floats:
        """`advantage.group_relative` with these conventions; `std=False` leaves the division out."""
        return advantage.group_relative(
            rewards,
            group,
            std=given_or(std, self.group_std),
            unbiased=self.group_unbiased,
            eps=self.group_eps,
            singles=self.group_singles,
            baseline=self.group_baseline,
        )

    def leave_one_out(self, rewards: ArrayLike, group: ArrayLike) -> Floats:
        """`advantage.leave_one_out` with these conventions."""
        return advantage.leave_one_out(rewards, group, singles=self.leave_one_out_singles)

    def gae(
        self,
        rewards: ArrayLike,
        values: ArrayLike,
        *,
        gamma: float | None = None,
        lam: float | None = None,
        bootstrap: ArrayLike | None = None,
        mask: ArrayLike | None = None,
        dones: ArrayLike | None = None,
    ) -> tuple[Floats, Floats]:
        """`advantage.gae` with these conventions: (advantages, returns), not whitened."""
        return advantage.gae(
            rewards,
            values,
            gamma=given_or(gamma, self.gamma),
            lam=given_or(lam, self.lam),
            bootstrap=bootstrap,
            mask=mask,
            dones=dones,
            gaps=self.gaps,
        )

    def discounted(self, rewards: ArrayLike, mask: ArrayLike | None = None, gamma: float | None = None) -> Floats:
        """`advantage.discounted` with these conventions."""
        return advantage.discounted(rewards, mask, given_or(gamma, self.gamma), gaps=self.gaps)

    def whiten(self, values: ArrayLike, mask: ArrayLike | None = None, *, shift_mean: bool = True) -> Floats:
        """`advantage.whiten` with these conventions."""
        return advantage.whiten(
            values,
            mask,
            shift_mean=shift_mean,
            unbiased=self.whiten_unbiased,
            eps=self.whiten_eps,
            eps_in=self.whiten_eps_in,
        )

    def whitening_divisor(self, count: float, squares: float) -> float:
        """`advantage.whitening_divisor` with these conventions."""
        return advantage.whitening_divisor(
            count, squares, unbiased=self.whiten_unbiased, eps=self.whiten_eps, eps_in=self.whiten_eps_in
        )


def given_or(value: T | None, default: T) -> T:
    """A setting, or its default where it is None."""
    if value is None:
        return default
    return value


DIALECTS = {
    preset.name: preset
    for preset in (
        Dialect(),
        Dialect(
            name="verl",
            group_singles="reward",
            leave_one_out_singles="reward",
            lam=1.0,
            whitens_gae=True,
            whiten_unbiased=True,
        ),
        Dialect(name="trl", group_eps=1e-4, gaps="zero", whitens_gae=True, whiten_unbiased=True),
        Dialect(name="openrlhf", group_eps=1e-9, lam=1.0, gaps="zero", whitens_gae=True, whiten_eps_in="floor"),
        Dialect(name="nemo_rl", group_baseline="others", whitens_gae=True, whiten_unbiased=True),
    )
}
"""The dialects by name. "batchwright" has the defaults of the functions."""


def dialect(name: str | Dialect | None) -> Dialect:
    """The conventions of a library by its name; None for ours. A `Dialect` of your own is returned unchanged.

    >>> dialect("nemo_rl").group_baseline
    'others'
    """
    if isinstance(name, Dialect):
        return name
    return DIALECTS[one_of(DIALECTS, dialect=name or "batchwright")]
