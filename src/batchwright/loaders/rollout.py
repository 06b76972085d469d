"""The loader of rollouts, sequences with rewards from a list, a file, a buffer or a log, for policy losses."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from batchwright.base.checks import at_least
from batchwright.base.errors import SpecError
from batchwright.batches.settings import Asked, Batching, Scope, Shuffle
from batchwright.batches.types import TrainingBatch
from batchwright.loaders.loader import Loader
from batchwright.loaders.rollout_data import RolloutStream, open_rollouts
from batchwright.loaders.rollout_logged import LogReader, open_log
from batchwright.prepare.tokenizers import resolve_tokenizer
from batchwright.rl.estimate import Advantages
from batchwright.rollouts import read_rollouts
from batchwright.rollouts.log.log import RolloutLog
from batchwright.typing import Data, Framework, PlanLike, TokenizerLike

__all__ = ["RolloutDataLoader"]


class RolloutDataLoader(Loader[TrainingBatch]):
    """Rollouts as batches: prompts, responses and their rewards, aligned with targets.

    RolloutDataLoader(rollout_samples, tokenizer, compute_advantages=True)         a list of dicts or dataclasses
    RolloutDataLoader("rollouts.jsonl", tokenizer, "leave_one_out", epochs=4)      a file; four passes over it
    RolloutDataLoader(log, tokenizer, True, max_staleness=2, timeout=600)          a RolloutLog that others add to

    `compute_advantages=True` selects a method by the data: values -> "gae", groups -> "group_relative", else
    "reinforce" (the reward less the mean). A name selects a method. `Advantages` has further settings: gamma, lam,
    kl_coef, whitening over the global batch, another library's conventions. Whole groups are normalised before batches
    are cut.

    Batches have `batch_size` rows over all ranks, or with `Batching(tokens=)` a limit of tokens, padding included;
    `Batching(balance=)` gives all ranks about the same work. `batch.metadata` has "rewards", "advantages", "returns",
    "old_log_probs", ... aligned with targets, and "global_tokens", "global_sequences", "global_groups" to divide by.
    """

    def __init__(
        self,
        rollout_data: Data | RolloutLog,
        tokenizer: TokenizerLike | None = None,
        compute_advantages: bool | str | Advantages = False,
        *,
        group_size: int | None = None,
        chat_template: str | None = None,
        columns: Mapping[str, str] | None = None,
        vocab_size: int | None = None,
        batch_size: int | Batching | None = None,
        seed: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        framework: Framework | None = None,
        shuffle: bool | Scope | Shuffle | None = None,
        epochs: int | None = 1,
        plan: PlanLike | None = None,
        max_staleness: int | None = None,
        timeout: float = 0.0,
    ) -> None:
        """Data: `rollout_data`, any source of rollouts. Text is encoded with `tokenizer` and its `chat_template`; ids
        are below `vocab_size`. `columns` renames the columns of rows. Each group has `group_size` rows.

        For a RolloutLog: `max_staleness`, and `timeout`, the seconds to wait for rows. For any other source: `seed`,
        `shuffle` ("global" or "none"), `epochs`, `group_size` and `columns`. `plan` gives exactly the rows of another
        run.

        Batches: `batch_size` rows over all ranks together (8), or a `Batching`; arrays of `framework`. Each epoch
        has every row. Its last batch may be short, unless `Batching(epoch_end=)` says otherwise. `rank` and
        `world_size` are the launcher's by default. docs/settings.md has all settings.
        """
        asked = Asked(batch_size=batch_size, seed=seed, shuffle=shuffle)
        asked.refuse(("pool_rows", "lanes", "recut"), "is for a shuffle in windows, and rollouts have none")
        if not isinstance(compute_advantages, Advantages):
            compute_advantages = Advantages(compute_advantages)
        resolved = None if tokenizer is None else resolve_tokenizer(tokenizer, vocab_size=vocab_size)
        read = partial(read_rollouts, tokenizer=resolved, chat_template=chat_template, vocab_size=vocab_size)
        how: dict[str, Any] = {
            "estimator": compute_advantages,
            "pad": at_least(0, pad=asked.get("pad", getattr(resolved, "eos_id", None) or 0)),
            "tokenizer": tokenizer if isinstance(tokenizer, str) and os.path.isfile(tokenizer) else None,
        }
        stream: RolloutStream
        if isinstance(rollout_data, RolloutLog):
            of_data = {"epochs": epochs, "plan": plan, "group_size": group_size, "columns": columns}
            if max_staleness is not None:
                max_staleness = at_least(0, max_staleness=max_staleness)
            ranks = (rank, world_size)
            stream, asked = open_log(rollout_data, read, max_staleness, timeout, asked, of_data, ranks, how)
            epochs = None
        else:
            of_a_log = {"max_staleness": max_staleness, "timeout": timeout}
            read = partial(read, group_size=group_size, columns=columns)
            stream = open_rollouts(rollout_data, read, plan, asked, of_a_log, how)
        super().__init__(stream, asked, rank=rank, world_size=world_size, epochs=epochs, framework=framework)

    @property
    def policy_version(self) -> int | None:
        """The version of the trainer's weights, from which `max_staleness` counts in a log. It never decreases."""
        return getattr(self._log_reader, "policy_version", None)

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        if self._log_reader is None:
            what = "policy_version decides which groups of a log are too old, and these rollouts are not a log"
            raise SpecError(what, parameter="policy_version", remedy="RolloutDataLoader(log, ...), or leave it out")
        self._log_reader.update(version)

    @property
    def _log_reader(self) -> LogReader | None:
        return getattr(self.stream, "reader", None)

    def get_batch(self, batch_size: int | None = None, *, policy_version: int | None = None) -> TrainingBatch:
        """The next batch, of `batch_size` rows over all ranks together. `policy_version`: the trainer's weights."""
        if policy_version is not None:
            self.policy_version = policy_version
        return super().get_batch(batch_size)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly at the `state` of a loader of the same rollouts (or of the same log).

        The batch size, the ranks and the number of generators may differ. The trainer's version must be set again.
        """
        super().load_state_dict(state)
        self._forget_version()

    def reset(self, epoch: int = 0) -> None:
        """Go back to the first row of an `epoch`. The trainer's version must be set again."""
        super().reset(epoch)
        self._forget_version()

    def _forget_version(self) -> None:
        if self._log_reader is not None:
            self._log_reader.policy_version = None
