"""Rollouts: sequences with rewards, from a list, a file, a buffer or a log, with what a policy loss needs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.deliver.ranks import Ranks, find_ranks
from penstock.errors import EndOfRun, PlanError, SpecError
from penstock.loaders.budget import Budget, budget_of
from penstock.loaders.cursor import CursorLoader, Stream
from penstock.loaders.door import padding_of
from penstock.loaders.rollout_batches import Maker
from penstock.loaders.rollout_data import DataStream, plan_of_data
from penstock.loaders.rollout_logged import LogRows, LogStream, Policy, plan_of_log
from penstock.plan import State
from penstock.prepare.tokenizers import resolve_tokenizer
from penstock.rl.dialects import dialect as dialect_of
from penstock.rl.estimate import Estimator
from penstock.rl.rows import RolloutRows
from penstock.rollout_log import RolloutLog
from penstock.rollout_log.folder import LEDGER_NAME
from penstock.rollouts import read_rollouts
from penstock.spec import at_least, one_of, whole_number
from penstock.types import TrainingBatch

__all__ = ["RolloutDataLoader"]

_LOCATED_ROWS = 4096
_WIDEST = 1 << 31
"""Tokens of the longest row of a log, of which nobody knows."""


class RolloutDataLoader(CursorLoader[TrainingBatch]):
    """Rollouts as batches: what was asked and answered, and what it was worth, aligned with labels.

    RolloutDataLoader(rollout_samples, tokenizer, compute_advantages=True)         a list of dicts or dataclasses
    RolloutDataLoader("rollouts.jsonl", tokenizer, "leave_one_out", epochs=4)      a file; four passes over it
    RolloutDataLoader(log, tokenizer, True, max_staleness=2, timeout=600)          a RolloutLog that others add to

    `compute_advantages=True` takes what the data allows: values -> "gae", groups -> "group_relative", else
    "reinforce" (the reward less the mean); a name asks for one. Groups are normalised whole, before batches are cut.
    `dialect` ("verl", "trl", "openrlhf", "nemo_rl") takes another library's conventions; `whiten=True` whitens
    advantages over the global batch.

    Batches have `batch_size` rows over all ranks, or at most `batch_tokens` tokens, padding included. `balance` shares
    them so that all ranks have about the same work. `batch.metadata` has "rewards", "advantages", "returns",
    "old_log_probs", ... aligned with labels, and "global_tokens", "global_sequences", "global_groups" to divide by.
    """

    _located: tuple[int, NDArray[np.int64]] | None = None

    def __init__(
        self,
        rollout_data: Any,
        tokenizer: Any = None,
        compute_advantages: bool | str = False,
        *,
        gamma: float | None = None,
        lam: float | None = None,
        kl_coef: float = 0.0,
        whiten: bool | None = None,
        dialect: Any = None,
        group_size: int | None = None,
        chat_template: str | None = None,
        columns: Mapping[str, str] | None = None,
        vocab_size: int | None = None,
        batch_size: int | None = None,
        batch_tokens: int | None = None,
        row_multiple: int | None = None,
        balance: Any = None,
        equal_counts: bool = True,
        pad_to: Any = "longest",
        padding_side: str = "right",
        pad: int | None = None,
        seed: int = 0,
        shuffle: bool | str | None = None,
        epochs: int | None = 1,
        plan: Any = None,
        epoch_end: str | None = None,
        max_staleness: int | None = None,
        timeout: float = 0.0,
        rank: int | None = None,
        world_size: int | None = None,
        mesh: Any = None,
        framework: str | None = None,
        alignment: str = "next",
        uneven: bool = False,
        sharding: Any = None,
    ) -> None:
        """`gamma`, `lam` and `whiten` are the dialect's, if not given: ours has 1.0, 0.95 and no.

        `max_staleness` and `timeout` (seconds to wait for rows that are not there yet) are for logs; `seed`, `shuffle`,
        `epochs`, `group_size` and `columns` for all else. The last batch of an epoch is filled up with rows of weight
        0; `epoch_end="drop"` leaves it out, "wrap" goes on into the next epoch.
        """
        self.alignment = one_of(("next", "same"), alignment=alignment)
        self._estimator = Estimator(
            asked=compute_advantages,
            dialect=dialect_of(dialect),
            gamma=gamma,
            lam=lam,
            whiten=whiten,
            kl_coef=kl_coef,
        )
        resolved = None if tokenizer is None else resolve_tokenizer(tokenizer, vocab_size=vocab_size)
        read = partial(read_rollouts, tokenizer=resolved, chat_template=chat_template, vocab_size=vocab_size)
        ranks = find_ranks(rank, world_size, mesh)
        sizes = {"batch_size": batch_size, "batch_tokens": batch_tokens, "row_multiple": row_multiple}
        self._log = rollout_data if isinstance(rollout_data, RolloutLog) else None
        self._log_budget: Budget | None = None
        self._policy = Policy(max_staleness=None if max_staleness is None else at_least(0, max_staleness=max_staleness))
        if self._log is not None:
            given = {"seed": seed, "shuffle": shuffle, "epochs": epochs, "plan": plan}
            given |= {"group_size": group_size, "columns": columns}
            _refuse_for_log(given, pad_to)
            self._source = LogRows(self._log, read, self._estimator, self.alignment, self._policy, timeout)
            self._longest = _WIDEST
            made = plan_of_log(self._log, epoch_end)
            self._log_budget = _budget_of_log(sizes, ranks, uneven or not equal_counts)
            if self._log_budget is not None:  # positions count rows: how many of them a batch has is found on the way
                sizes, uneven = {"batch_size": 1}, True
            epochs = None
        else:
            _refuse_path_of_log(rollout_data)
            _refuse_without_log(max_staleness=max_staleness, timeout=timeout)
            rollouts = read(rollout_data, group_size=group_size, columns=columns)
            self._rows = RolloutRows(rollouts, self._estimator, alignment=self.alignment)
            self._longest = int(self._rows.lengths.max())
            made = plan_of_data(rollouts, seed=seed, shuffle=shuffle, epoch_end=epoch_end, plan=plan)
        self._widest = _widest(pad_to, self._longest)
        self._padding = padding_of(pad_to, padding_side, self._widest)
        super().__init__(
            made,
            **sizes,
            balance=balance,
            equal_counts=equal_counts,
            ranks=ranks,
            epochs=epochs,
            framework=framework,
            uneven=uneven,
            sharding=sharding,
        )
        self._maker = Maker(
            self._padding,
            _pad_of(resolved, pad),
            self.alignment,
            self.framework,
            tokenizer if isinstance(tokenizer, str) and os.path.isfile(tokenizer) else None,
        )

    # The trainer's weights

    @property
    def policy_version(self) -> int | None:
        """Which weights the trainer has now: `max_staleness` counts from there. Never lower than it was."""
        return self._policy.version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        version = at_least(0, policy_version=version)
        if self._log is None:
            raise SpecError(
                "policy_version decides which groups of a log are too old, and these rollouts are no log",
                parameter="policy_version",
                remedy="RolloutDataLoader(log, ...), or leave it out",
            )
        if self._policy.version is not None and version < self._policy.version:
            raise SpecError(
                f"policy_version went backwards: {version} after {self._policy.version}",
                parameter="policy_version",
                remedy="the number of updates so far; after going back to a checkpoint, load_state_dict(state) first",
            )
        self._policy.version = version

    def get_batch(self, batch_size: int | None = None, *, policy_version: int | None = None) -> TrainingBatch:
        """The next batch, of `batch_size` rows over all ranks together. `policy_version`: the trainer's weights."""
        if policy_version is not None:
            self.policy_version = policy_version
        if batch_size is not None and self._log_budget is not None:
            raise SpecError(
                f"this loader has batches of {self._log_budget.batch_tokens:,} tokens at most, not of so many rows",
                parameter="batch_size",
                remedy="leave batch_size= out",
            )
        return super().get_batch(batch_size)

    # What batches are made of

    def _batches(self, rows: int) -> Stream[TrainingBatch]:
        if self._log is None:
            steps, plan = self._steps_of(rows), self._plan.fingerprint
            return DataStream(self._rows, self._rows_at, plan, steps, self._maker, self._settings())
        return LogStream(
            source=self._source,
            maker=self._maker,
            steps=self._steps_of(rows),
            state=self._state_at,
            budget=self._log_budget,
            epoch_end=self._plan.epoch_end,
        )

    def _rows_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Which rows lie at some positions. Looked up for thousands at once, of which those of a step are mostly."""
        first = int(positions.min()) // _LOCATED_ROWS * _LOCATED_ROWS
        if int(positions.max()) >= first + 2 * _LOCATED_ROWS:
            return self._plan.order.at(positions).index
        if self._located is None or self._located[0] != first:
            self._located = first, self._plan.order.at(np.arange(first, first + 2 * _LOCATED_ROWS)).index
        rows: NDArray[np.int64] = self._located[1][positions - first]
        return rows

    def _lengths_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        lengths: NDArray[np.int64] = self._rows.lengths[self._rows_at(positions)]
        return lengths

    def _widths_of(self, longest: NDArray[np.int64]) -> NDArray[np.int64]:
        widths = np.maximum(self._padding.widths(longest, self._widest), longest)
        return np.where(widths < _WIDEST, widths, longest)  # of a log: a row over the largest of the widths given

    def _longest_row(self) -> tuple[int, dict[str, Any]] | None:
        if self._log is not None:
            return None
        row = int(self._rows.lengths.argmax())
        return int(self._rows.lengths[row]), {"row": row}

    def _pad_to(self) -> Any:
        return self._padding.to

    def _settings_of_batches(self) -> dict[str, Any]:
        return {"advantages": str(self._estimator), "pad_to": self._padding.to, "alignment": self.alignment}

    # Logs have no epochs, no end that is known, and may have budgets that no position tells

    @property
    def batch_tokens(self) -> int | None:
        return super().batch_tokens if self._log_budget is None else self._log_budget.batch_tokens

    @property
    def row_multiple(self) -> int | None:
        return super().row_multiple if self._log_budget is None else self._log_budget.row_multiple

    def get_num_batches(self) -> int:
        """Batches per epoch: the same on every rank. A log has no such number."""
        if self._log is not None:
            raise SpecError(
                "a log that grows has no number of batches",
                parameter="rollout_data",
                remedy="iterate until it ends, or read rollouts that are there whole",
            )
        return super().get_num_batches()

    def _record(self, rows: int) -> list[list[int]]:
        record = super()._record(rows)
        # The stream of a log notes each step in it: it must be nobody else's.
        return record if self._log is None else [list(entry) for entry in record]

    def seek(self, *, step: int | None = None, position: int | None = None) -> None:
        """Go anywhere, at once."""
        if self._log_budget is not None and step is not None:
            raise SpecError(
                "batches of a log by tokens have no place that follows from their number",
                parameter="step",
                remedy="load_state_dict(state) of that step, or seek(position=...)",
            )
        super().seek(step=step, position=position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where a loader of the same rollouts (or of the same log) was.

        Another batch size, other ranks or another number of generators are fine. The trainer's version is asked anew.
        """
        theirs = state.get("rollouts") if isinstance(state, Mapping) else None
        if isinstance(theirs, Mapping) and state.get("plan") != self._plan.fingerprint:
            self._refuse(theirs)
        self._refuse_beyond_log(state)
        super().load_state_dict(state)
        self._policy.version = None

    def _refuse_beyond_log(self, state: Mapping[str, Any]) -> None:
        """A state that used rows which the log does not have: other rows would come to stand there, never used."""
        position = state.get("position") if isinstance(state, Mapping) else None
        if self._log is None or not isinstance(position, int):
            return
        num_rows = self._log.num_uses * self._log.group_size
        if position > num_rows:
            raise PlanError(
                f"this state has used {position:,} rows, and the log has given out {num_rows:,}: it is an older copy",
                folder=self._log.path,
                remedy="the folder as it was when the state was made, or a state from before the copy",
            )

    def reset(self) -> None:
        """Back to position 0. The trainer's version is asked anew."""
        super().reset()
        self._policy.version = None

    def state_dict(self) -> State:
        """Where this loader is: JSON, for any number of ranks."""
        return {**super().state_dict(), "rollouts": self._settings()}

    def _state_at(self, position: int, steps: list[list[int]]) -> State:
        state = {"position": position, "plan": self._plan.fingerprint, "steps": [list(entry) for entry in steps]}
        return {**state, "rollouts": self._settings()}

    def _settings(self) -> dict[str, Any]:
        """What a state says of what it belongs to: no plan of rollouts is kept."""
        plan = self._plan
        content = plan.sources[0].fingerprint
        if self._log is not None:
            return {"log": content}
        return {"content": content, "seed": plan.seed, "shuffle": plan.shuffle, "epoch_end": plan.epoch_end}

    def _refuse(self, theirs: Mapping[str, Any]) -> None:
        mine = self._settings()
        if mine.keys() != theirs.keys():
            raise PlanError(
                f"this state belongs to a {'log' if 'log' in theirs else 'set of rollouts'}, and this loader reads a "
                f"{'log' if 'log' in mine else 'set of rollouts'}",
                remedy="open the loader with the data of that run",
            )
        name = next((name for name in mine if mine[name] != theirs[name]), None)
        if name in ("log", "content"):
            raise PlanError(
                "this state belongs to another log" if name == "log" else "this state belongs to other rollouts",
                differs=f"{mine[name][:7]} here, {str(theirs[name])[:7]} there",
                remedy="open the loader with the data of that run, or start anew, without the state",
            )
        if name is not None:
            raise PlanError(
                f"this state belongs to a loader with {name}={theirs[name]!r}, and this one has {mine[name]!r}",
                parameter=name,
                remedy="open the loader with the settings of that run",
            )

    def _end_of_run(self) -> EndOfRun:
        if self._log is None:
            return super()._end_of_run()
        return EndOfRun(
            f"the log is over: all its prompts are answered and used, {self._position:,} rows",
            remedy="RolloutLog(..., epochs=2) for another pass over the prompts, in a new folder",
        )

    def __repr__(self) -> str:
        tokens = self.batch_tokens
        size = f"{self.batch_size} rows" if tokens is None else f"at most {tokens:,} tokens"
        rank = f", rank {self.rank} of {self.world_size}" if self.world_size > 1 else ""
        at = f"at step {self.step:,} (position {self._position:,})"
        name = f"{type(self).__name__}: batches of {size} ({self.framework}){rank}"
        if self._log is not None:
            method = self._source.method
            how = self._estimator.in_words(method) if method else "advantages by what the first group has"
            how = how if self._estimator.asked else "no advantages"
            return f"{name}, {at}\n├─ {how}\n└─ " + repr(self._log).replace("\n", "\n ")
        rollouts = self._rows.rollouts
        epochs = "endless" if self.epochs is None else f"{self.epochs} epoch{'s' if self.epochs != 1 else ''}"
        shuffled = f"shuffled by seed {self._plan.seed}" if self._plan.shuffle == "global" else "in order"
        groups = "no groups" if rollouts.group is None else f"{len(rollouts.group_names):,} groups"
        return (
            f"{name}, {epochs}, {self.get_num_batches():,} steps an epoch, {at}\n"
            f"├─ {self._estimator.in_words(self._rows.method)}\n"
            f"└─ {len(rollouts):,} rollouts of {self._longest:,} tokens at most, {groups}, {shuffled}, "
            f"content {self._plan.sources[0].fingerprint[:7]}"
        )


def _refuse_for_log(given: dict[str, Any], pad_to: Any) -> None:
    plain = {"seed": 0, "epochs": 1}
    for name, value in given.items():
        if value not in (plain.get(name), None) and not (name == "shuffle" and value in (False, "none")):
            raise SpecError(
                f"{name}={value!r} is not for a log: what comes when is in its journal",
                parameter=name,
                remedy=f"leave out {name}="
                + (
                    f", or say it to the log: RolloutLog({name}=...)"
                    * (name in ("seed", "shuffle", "epochs", "group_size"))
                ),
            )
    if pad_to == "max_length":
        raise SpecError(
            "nobody knows the longest row of a log that grows",
            parameter="pad_to",
            remedy="pad_to='longest', a number that widths are multiples of, or a list of widths",
        )


def _refuse_path_of_log(rollout_data: Any) -> None:
    if isinstance(rollout_data, str | os.PathLike) and os.path.isfile(os.path.join(rollout_data, LEDGER_NAME)):
        raise SpecError(
            f"{os.fspath(rollout_data)!r} is the folder of a rollout log, which must be opened",
            parameter="rollout_data",
            remedy=f"RolloutDataLoader(RolloutLog({os.fspath(rollout_data)!r}), ...)",
        )


def _refuse_without_log(**given: Any) -> None:
    for name, value in given.items():
        if value:
            raise SpecError(
                f"{name}={value!r} is for a RolloutLog, and these rollouts are there whole",
                parameter=name,
                remedy=f"leave out {name}=, or RolloutDataLoader(log, ...)",
            )


def _budget_of_log(sizes: dict[str, Any], ranks: Ranks, is_uneven: bool) -> Budget | None:
    return budget_of(
        sizes["batch_tokens"],
        sizes["row_multiple"],
        batch_size=sizes["batch_size"],
        epoch_end="pad",
        world=ranks.world_size,
        uneven=is_uneven,
    )


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
