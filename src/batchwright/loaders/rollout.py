"""Rollouts: sequences with rewards, from a list, a file, a buffer or a log, with what a policy loss needs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.deliver.ranks import Ranks, find_ranks
from batchwright.errors import PlanError, SpecError
from batchwright.loaders.cursor import CursorLoader, Stream
from batchwright.loaders.door import padding_of
from batchwright.loaders.rollout_batches import Maker
from batchwright.plan import Plan, State
from batchwright.prepare.tokenizers import resolve_tokenizer
from batchwright.rl.columns import Rollouts
from batchwright.rl.dialects import Dialect
from batchwright.rl.dialects import dialect as dialect_of
from batchwright.rl.estimate import Estimator
from batchwright.rollout_log import RolloutLog
from batchwright.rollouts import read_rollouts
from batchwright.spec import at_least, whole_number
from batchwright.types import TrainingBatch
from batchwright.typing import Balance, Data, EpochEnd, Framework, Mesh, PadTo, PlanLike, ShardingLike, TokenizerLike

__all__ = ["Asked", "Read", "RolloutDataLoader"]

Read = Callable[..., Rollouts]
"""(rollout_data, group_size=, columns=) -> columns."""


@dataclass(slots=True, kw_only=True)
class Asked:
    """Settings of which each kind of rollouts takes its own, and refuses the others."""

    seed: int
    shuffle: bool | str | None
    plan: Any
    group_size: int | None
    columns: Mapping[str, str] | None
    max_staleness: int | None
    timeout: float
    pad_to: Any
    epoch_end: str | None
    epochs: int | None
    batch_size: int | None
    batch_tokens: int | None
    row_multiple: int | None
    uneven: bool
    equal_counts: bool
    ranks: Ranks

    def cursor(self) -> dict[str, Any]:
        """What a CursorLoader is told of it."""
        names = ("epochs", "batch_size", "batch_tokens", "row_multiple", "uneven", "equal_counts", "ranks")
        return {name: getattr(self, name) for name in names}


class RolloutDataLoader(CursorLoader[TrainingBatch]):
    """Rollouts as batches: what was asked and answered, and what it was worth, aligned with targets.

    RolloutDataLoader(rollout_samples, tokenizer, compute_advantages=True)         a list of dicts or dataclasses
    RolloutDataLoader("rollouts.jsonl", tokenizer, "leave_one_out", epochs=4)      a file; four passes over it
    RolloutDataLoader(log, tokenizer, True, max_staleness=2, timeout=600)          a RolloutLog that others add to

    `compute_advantages=True` takes what the data allows: values -> "gae", groups -> "group_relative", else
    "reinforce" (the reward less the mean); a name asks for one. Groups are normalised whole, before batches are cut.
    `dialect` ("verl", "trl", "openrlhf", "nemo_rl") takes another library's conventions; `whiten=True` whitens
    advantages over the global batch.

    Batches have `batch_size` rows over all ranks, or at most `batch_tokens` tokens, padding included. `balance` shares
    them so that all ranks have about the same work. `batch.metadata` has "rewards", "advantages", "returns",
    "old_log_probs", ... aligned with targets, and "global_tokens", "global_sequences", "global_groups" to divide by.
    """

    _longest: int
    """Tokens of the longest row."""

    def __new__(cls, rollout_data: Any = None, *args: Any, **settings: Any) -> RolloutDataLoader:
        """One of the two kinds: rollouts that are there whole, or a log that others add to."""
        if cls is not RolloutDataLoader:
            return super().__new__(cls, **settings)
        if isinstance(rollout_data, RolloutLog):
            from batchwright.loaders.rollout_logged import LoggedRollouts

            return super().__new__(LoggedRollouts, **settings)
        from batchwright.loaders.rollout_data import WholeRollouts

        return super().__new__(WholeRollouts, **settings)

    def __init__(
        self,
        rollout_data: Data | RolloutLog,
        tokenizer: TokenizerLike | None = None,
        compute_advantages: bool | str = False,
        *,
        gamma: float | None = None,
        lam: float | None = None,
        kl_coef: float = 0.0,
        whiten: bool | None = None,
        dialect: str | Dialect | None = None,
        group_size: int | None = None,
        chat_template: str | None = None,
        columns: Mapping[str, str] | None = None,
        vocab_size: int | None = None,
        batch_size: int | None = None,
        batch_tokens: int | None = None,
        row_multiple: int | None = None,
        balance: Balance | None = None,
        equal_counts: bool = True,
        pad_to: PadTo = "longest",
        padding_side: str = "right",
        pad: int | None = None,
        seed: int = 0,
        shuffle: bool | str | None = None,
        epochs: int | None = 1,
        plan: PlanLike | None = None,
        epoch_end: EpochEnd | None = None,
        max_staleness: int | None = None,
        timeout: float = 0.0,
        rank: int | None = None,
        world_size: int | None = None,
        mesh: Mesh | None = None,
        framework: Framework | None = None,
        uneven: bool = False,
        sharding: ShardingLike | None = None,
    ) -> None:
        """Data: `rollout_data`, any source of rollouts. Text is encoded with `tokenizer` and its `chat_template`; ids
        are below `vocab_size`. `columns` renames what rows have. Each group has `group_size` rows.

        Advantages: `compute_advantages` is True, or the name of a method. `gamma`, `lam` and `whiten` default to the
        `dialect`'s; ours has 1.0, 0.95 and False. `kl_coef` subtracts the distance to the reference model from the
        rewards.

        For a RolloutLog: `max_staleness`, and `timeout`, the seconds to wait for rows. For any other source: `seed`,
        `shuffle`, `epochs`, `group_size` and `columns`. `plan` gives exactly the rows of another run.
        `epoch_end`: "short" keeps an epoch's last, partial batch as it is, "drop" leaves it out, "pad" fills it up with
        rows of weight 0, "wrap" goes on into the next epoch.

        Batches: `batch_size` rows or `batch_tokens` tokens, in multiples of `row_multiple` rows, as arrays of
        `framework`; padded with the token `pad` on `padding_side` ("right" or "left"), as wide as `pad_to` says.

        Ranks: `rank` and `world_size`, or a torch DeviceMesh as `mesh`; by default what the launcher says. `sharding`
        says which rows of a batch a rank gets: "contiguous", "strided", or a function. `uneven=True` lets
        ranks have different numbers of rows. `balance` gives ranks equal work: a row costs its tokens (True), or
        a * length + b * length ** 2 for (a, b). Ranks get equal numbers of rows unless `equal_counts=False`.
        """
        self._estimator = Estimator(
            asked=compute_advantages,
            dialect=dialect_of(dialect),
            gamma=gamma,
            lam=lam,
            whiten=whiten,
            kl_coef=kl_coef,
        )
        resolved = None if tokenizer is None else resolve_tokenizer(tokenizer, vocab_size=vocab_size)
        asked = Asked(
            seed=seed,
            shuffle=shuffle,
            plan=plan,
            group_size=group_size,
            columns=columns,
            max_staleness=max_staleness,
            timeout=timeout,
            pad_to=pad_to,
            epoch_end=epoch_end,
            epochs=epochs,
            batch_size=batch_size,
            batch_tokens=batch_tokens,
            row_multiple=row_multiple,
            uneven=uneven,
            equal_counts=equal_counts,
            ranks=find_ranks(rank, world_size, mesh),
        )
        read = partial(read_rollouts, tokenizer=resolved, chat_template=chat_template, vocab_size=vocab_size)
        made = self._open(rollout_data, read, asked)
        self._widest = _widest(pad_to, self._longest)
        self._padding = padding_of(pad_to, padding_side, self._widest)
        super().__init__(made, **asked.cursor(), balance=balance, framework=framework, sharding=sharding)
        self._maker = Maker(
            self._padding,
            _pad_of(resolved, pad),
            self.framework,
            tokenizer if isinstance(tokenizer, str) and os.path.isfile(tokenizer) else None,
        )

    __new__.__wrapped__ = __init__  # type: ignore[attr-defined]  # whose signature help() and inspect show

    # What each kind says. Not abstract, for type checkers: this class is the one that is called.

    def _batches(self, rows: int) -> Stream[TrainingBatch]:
        raise NotImplementedError

    def _open(self, rollout_data: Any, read: Read, asked: Asked) -> Plan:
        """Read what is there, set `_longest`, and say what fixes the rows. May change what the cursor is told."""
        raise NotImplementedError

    def _settings(self) -> dict[str, Any]:
        """What a state says of what it belongs to: no plan of rollouts is kept."""
        raise NotImplementedError

    def _refuse(self, theirs: Mapping[str, Any]) -> PlanError | None:
        """Why a state of another plan, with these settings, does not belong here."""
        raise NotImplementedError

    def _in_words(self) -> list[str]:
        """How long it is; how advantages are computed; what it reads."""
        raise NotImplementedError

    @property
    def policy_version(self) -> int | None:
        """Which weights the trainer has now: of a log, `max_staleness` counts from there. Never lower than it was."""
        return None

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        raise SpecError(
            "policy_version decides which groups of a log are too old, and these rollouts are no log",
            parameter="policy_version",
            remedy="RolloutDataLoader(log, ...), or leave it out",
        )

    # What both do

    def get_batch(self, batch_size: int | None = None, *, policy_version: int | None = None) -> TrainingBatch:
        """The next batch, of `batch_size` rows over all ranks together. `policy_version`: the trainer's weights."""
        if policy_version is not None:
            self.policy_version = policy_version
        return super().get_batch(batch_size)

    def _widths_of(self, longest: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.maximum(self._padding.widths(longest, self._widest), longest)

    def _pad_to(self) -> Any:
        return self._padding.to

    def _settings_of_batches(self) -> dict[str, Any]:
        return {"advantages": str(self._estimator), "pad_to": self._padding.to}

    def state_dict(self) -> State:
        """Where this loader is: JSON, for any number of ranks."""
        return {**super().state_dict(), "rollouts": self._settings()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at `state`, exactly where a loader of the same rollouts (or of the same log) was.

        Another batch size, other ranks or another number of generators are fine. The trainer's version is asked anew.
        """
        theirs = state.get("rollouts") if isinstance(state, Mapping) else None
        if isinstance(theirs, Mapping) and state.get("plan") != self._plan.fingerprint:
            refusal = self._refuse(theirs)
            if refusal is not None:
                raise refusal
        super().load_state_dict(state)

    def __repr__(self) -> str:
        tokens = self.batch_tokens
        size = f"{self.batch_size} rows" if tokens is None else f"at most {tokens:,} tokens"
        rank = f", rank {self.rank} of {self.world_size}" if self.world_size > 1 else ""
        length, *facts = self._in_words()
        at = f"at step {self.step:,} (position {self._position:,})"
        lines = [f"RolloutDataLoader: batches of {size} ({self.framework}){rank}{length}, {at}"]
        lines += [f"├─ {fact}" for fact in facts[:-1]]
        return "\n".join([*lines, "└─ " + facts[-1].replace("\n", "\n ")])


def _widest(pad_to: Any, longest: int) -> int:
    """Tokens of the widest batch. No length was set for rollouts: `pad_to` is kept, however short they are."""
    if isinstance(pad_to, int) and pad_to > 0:
        return -(-longest // pad_to) * pad_to
    if isinstance(pad_to, list | tuple):
        return max([longest, *(width for width in pad_to if isinstance(width, int))])
    return longest


def _pad_of(tokenizer: Any, asked: int | None) -> int:
    """The id that fills up rows. Any will do: masks come from lengths."""
    if asked is not None:
        return at_least(0, pad=asked)
    return whole_number(pad=getattr(tokenizer, "eos_id", None) or 0)
