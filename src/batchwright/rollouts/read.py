"""Rollouts from whatever holds them -> columns, checked as a whole: `read_rollouts`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchwright.base.checks import at_least
from batchwright.base.errors import SampleError, SpecError
from batchwright.base.words import suggest
from batchwright.rl.columns import Rollouts
from batchwright.rollouts.ragged import BadValue, Ragged, is_arrow, joined, kind_of_value, scalars, spread
from batchwright.rollouts.sequences import Encoder, NeedsTokenizer, Sequences, interleave, sequences_of
from batchwright.rollouts.table import Table, table_of

__all__ = ["KEYS", "read_rollouts"]

KEYS = (
    *("prompt", "response", "reward", "group", "values", "old_log_probs", "ref_log_probs", "policy_version"),
    *("response_mask", "tools"),
)
_ALSO_CALLED = {
    "prompt": ("prompts", "question", "query", "input", "instruction", "messages"),
    "response": ("responses", "completion", "completions", "answer", "output", "generation", "text"),
    "reward": ("rewards", "score", "scores", "reward_score"),
}
"""What others call these: offered, not taken."""
_MOST = 2**31
"""Ids are kept in 32 bits."""


def read_rollouts(
    rollout_data: Any,
    tokenizer: Any = None,
    *,
    chat_template: Any = None,
    group_size: int | None = None,
    vocab_size: int | None = None,
    columns: Mapping[str, str] | None = None,
) -> Rollouts:
    """Rollouts by column.

    >>> rows = [{"prompt": [5, 6], "response": [7], "reward": 1.0}, {"prompt": [5, 6], "response": [8, 9], "reward": 0}]
    >>> rollouts = read_rollouts(rows)
    >>> rollouts.tokens.tolist(), rollouts.starts.tolist(), rollouts.reward.tolist()
    ([5, 6, 7, 5, 6, 8, 9], [0, 3, 7], [1.0, 0.0])

    `rollout_data` is a list (or other iterable) of dicts or dataclasses; the path of a JSONL, Parquet, Arrow or other
    file, a folder, a glob or a list of them; an Arrow, pandas, polars or Hugging Face table; a DatasetBuffer or a
    version of one. Its keys are `prompt`, `response`, and as far as there are any `reward` (or `rewards`), `group`,
    `values`, `old_log_probs`, `ref_log_probs`, `policy_version`, `response_mask` and `tools`; other keys are ignored,
    and `columns={"response": "completion"}` says where one has another name. A key that any row has, all must have.
    Nothing of the data is changed.

    With `group_size`, every group must have so many rows. Ids must be below `vocab_size` (that of the tokenizer, if it
    is not given). Text needs a tokenizer; each distinct one is encoded once.
    """
    if vocab_size is not None:
        vocab_size = at_least(1, vocab_size=vocab_size)
    if group_size is not None:
        group_size = at_least(1, group_size=group_size)
    encoder = Encoder(tokenizer, chat_template, vocab_size)
    return _Reading(table_of(rollout_data), columns).rollouts(encoder, vocab_size or encoder.limit, group_size)


class _Laid(NamedTuple):
    """The tokens of all rows end to end, and which of them a number may be given for."""

    tokens: NDArray[np.int32]
    starts: NDArray[np.int64]
    is_response: NDArray[np.bool_]
    is_trained: NDArray[np.bool_]
    num_response: NDArray[np.int64]
    """Tokens of each row's response."""
    num_trained: NDArray[np.int64]

    def placed(self, numbers: Ragged) -> NDArray[np.float32]:
        """Numbers of all responses' tokens, or of all trained ones, at these; 0 elsewhere."""
        is_of_all = len(numbers.flat) == int(self.num_response.sum())
        return spread(numbers.flat, self.is_response if is_of_all else self.is_trained, np.float32)


def _laid_out(prompt: Ragged, response: Ragged, trained: NDArray[np.bool_] | None) -> _Laid:
    tokens, starts, is_response = interleave(prompt, response)
    if trained is None:
        return _Laid(tokens, starts, is_response, is_response, response.lengths, response.lengths)
    is_trained = spread(trained, is_response, bool)
    num_trained = np.diff(np.append(0, np.cumsum(trained, dtype=np.int64))[response.starts])
    return _Laid(tokens, starts, is_response, is_trained, response.lengths, num_trained)


class _Reading:
    """One table that is being read. Remembers it, and how it calls its columns, for what an error says."""

    def __init__(self, table: Table, columns: Mapping[str, str] | None) -> None:
        self.table, self.names = table, _checked_names(columns, table)
        self.names["reward"] = self._reward_name()

    def rollouts(self, encoder: Encoder, limit: int | None, group_size: int | None) -> Rollouts:
        # What must be there, before anything is encoded, which may take long.
        prompts, responses, rewards = self._needed("prompt"), self._needed("response"), self._column("reward")
        prompt, response, trained = self._sequences(prompts, responses, encoder)
        self._check_sequences(prompt, response, limit)
        laid = _laid_out(prompt, response, self._mask(response, trained))
        values, old, ref = (self._of_tokens(key, laid) for key in ("values", "old_log_probs", "ref_log_probs"))
        reward, token_rewards = self._rewards(rewards, laid)
        if values is not None and reward is None:
            raise self._values_alone()
        group, group_names = self._groups(group_size)
        return Rollouts(
            tokens=laid.tokens,
            starts=laid.starts,
            trained=laid.is_trained,
            reward=reward,
            token_rewards=token_rewards,
            group=group,
            group_names=group_names,
            values=values,
            old_log_probs=old,
            ref_log_probs=ref,
            policy_version=self._versions(),
        )

    # Columns

    def _column(self, key: str, name: str | None = None) -> Any:
        """A column without gaps; None where no row has it."""
        name = name or self.names[key]
        column = self.table.column(name)
        if column is None:
            return None
        if is_arrow(column):
            missing = column.null_count
            first = 0 if not missing else int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
        else:
            missing = sum(value is None for value in column) if type(None) in set(map(type, column)) else 0
            first = 0 if not missing else next(n for n, value in enumerate(column) if value is None)
        if missing == len(self.table):
            return None
        if missing:
            raise self._error(
                key,
                first,
                f"this row has no {name!r}, and {len(self.table) - missing:,} of {len(self.table):,} have one",
                f"{name!r} in every row" + ("" if key in ("prompt", "response", "reward") else ", or in none"),
                column=name,
            )
        return column

    def _needed(self, key: str) -> Any:
        column = self._column(key)
        if column is None:
            has = ", ".join(map(repr, self.table.names[:12]))
            raise self._error(
                key,
                0,
                f"no row has a {self.names[key]!r}: these are no rollouts",
                self._offered(key) or f"a {key!r} in every row, or columns={{{key!r}: 'COLUMN'}}",
                has=has or "nothing",
            )
        return column

    def _reward_name(self) -> str:
        """What rewards are called: "reward" or "rewards", unless columns= says it."""
        name = self.names["reward"]
        if name != "reward" or "rewards" not in self.table.names:
            return name
        one, many = self._column("reward"), self._column("reward", "rewards")
        if one is not None and many is not None:
            raise self._error(
                "reward", 0, "rows have both 'reward' and 'rewards'", "columns={'reward': 'rewards'}, or 'reward'"
            )
        return "reward" if many is None else "rewards"

    def _offered(self, key: str) -> str | None:
        """What may have been meant by a column that no row has."""
        taken = set(self.names.values())
        others = [name for name in self.table.names if name not in taken]
        near = next((name for name in _ALSO_CALLED.get(key, ()) if name in others), None) or suggest(key, others)
        return None if near is None else f"columns={{{key!r}: {near!r}}}, if that is what {near!r} is"

    # Numbers

    def _of_tokens(self, key: str, laid: _Laid) -> NDArray[np.float32] | None:
        """A column of one number for each token, beside the tokens; None where no row has it."""
        column = self._column(key)
        return None if column is None else laid.placed(self._for_each_token(key, column, laid))

    def _rewards(self, column: Any, laid: _Laid) -> tuple[NDArray[np.float64] | None, NDArray[np.float32] | None]:
        """(the reward of each row, that of each token where rewards came so)."""
        if column is None:
            return None, None
        token_rewards = None
        if _is_per_token(column):
            numbers = self._for_each_token("reward", column, laid)
            token_rewards = laid.placed(numbers)
            self._refuse_unearned(token_rewards, laid)
            rows = np.repeat(np.arange(len(self.table)), numbers.lengths)
            reward = np.bincount(rows, numbers.flat, len(self.table)).astype(np.float64)
        else:
            reward = self._scalars("reward", column, "numbers")
            self._check_finite("reward", reward)
        self._refuse_huge(reward)
        return reward, token_rewards

    def _values_alone(self) -> SampleError:
        values, reward = self.names["values"], self.names["reward"]
        return self._error(
            "reward",
            0,
            f"{values!r} are there, and no {reward!r}: a value predicts rewards",
            self._offered("reward") or f"{reward!r} in every row, or no {values!r}",
        )

    def _versions(self) -> NDArray[np.int64] | None:
        column = self._column("policy_version")
        return None if column is None else self._scalars("policy_version", column, "whole")

    def _for_each_token(self, key: str, column: Any, laid: _Laid) -> Ragged:
        """A number for each token of a response, or for each that is trained."""
        name, of_response, of_trained = self.names[key], laid.num_response, laid.num_trained
        try:
            numbers = joined(column, "numbers" if key == "reward" else "floats")  # rewards are added up
        except BadValue as bad:
            raise self._unusable(key, bad) from None
        if not np.array_equal(numbers.lengths, of_response) and not np.array_equal(numbers.lengths, of_trained):
            is_wrong = (numbers.lengths != of_response) & (numbers.lengths != of_trained)
            if not is_wrong.any():  # some rows have the one, some the other
                is_wrong = numbers.lengths != of_response
            row = int(np.argmax(is_wrong))
            trained = f", of which {of_trained[row]:,} are trained" if of_trained[row] != of_response[row] else ""
            raise self._error(
                key,
                row,
                f"mismatched lengths: {numbers.lengths[row]:,} of {name!r} for a response of "
                f"{of_response[row]:,} tokens{trained}",
                f"one of {name!r} for each token of the response"
                + (", or for each that is trained, in all rows alike" if trained else ""),
            )
        with np.errstate(over="ignore"):
            self._check_finite(key, numbers.flat.astype(np.float32, copy=False), numbers)
        return numbers

    def _scalars(self, key: str, column: Any, kind: str) -> NDArray[Any]:
        try:
            return scalars(column, kind)
        except BadValue as bad:
            bad.remedy = "a number, or a list of one for each token" if key == "reward" else "a whole number"
            raise self._unusable(key, bad) from None

    def _check_finite(self, key: str, flat: NDArray[Any], ragged: Ragged | None = None) -> None:
        is_finite = np.isfinite(flat)
        if is_finite.all():
            return
        place = int(np.argmin(is_finite))
        row = place if ragged is None else ragged.row_of(place)
        token = "" if ragged is None else f" of token {place - int(ragged.starts[row]):,}"
        raise self._error(
            key,
            row,
            f"{self.names[key]!r}{token} is {flat[place]}",
            "a finite number: 0 where there is nothing to reward"
            if key == "reward"
            else "finite numbers; leave the row out if the policy had none",
        )

    def _refuse_huge(self, reward: NDArray[np.float64]) -> None:
        """Rewards are 32-bit numbers in a batch: what is larger would be infinite there."""
        is_huge = np.abs(reward) > np.finfo(np.float32).max
        if is_huge.any():
            row = int(np.argmax(is_huge))
            raise self._error(
                "reward", row, f"a reward of {reward[row]:g} is too large for 32 bits", "rewards of a smaller scale"
            )

    # Tokens

    def _sequences(self, prompts: Any, responses: Any, encoder: Encoder) -> Sequences:
        """Prompts and responses as tokens, and which of these the policy wrote."""
        tools = self.table.column(self.names["tools"])  # a row may do without
        try:
            found = sequences_of(prompts, responses, tools, encoder)
        except NeedsTokenizer as bad:
            where = self.table.where(bad.row) | {"column": self.names[bad.key or "response"]}
            raise SpecError(bad.what, parameter="tokenizer", **where, remedy=bad.remedy) from None
        except BadValue as bad:
            raise self._unusable(bad.key or "response", bad) from None
        if encoder.unused_template:
            raise SpecError(
                "chat_template= is for prompts that are messages, and none is",
                parameter="chat_template",
                remedy="[{'role': 'user', 'content': prompt}] as the prompt, or no chat_template",
            )
        return found

    def _check_sequences(self, prompt: Ragged, response: Ragged, limit: int | None) -> None:
        self._check_ids("prompt", prompt, limit)
        self._check_ids("response", response, limit)
        self._refuse_empty(
            "prompt", prompt, "nothing could predict the first token of the response", "begin it with a BOS token"
        )
        self._refuse_empty("response", response, "it has no token", "leave the row out, or end it with an EOS token")

    def _check_ids(self, key: str, ids: Ragged, limit: int | None) -> None:
        limit = _MOST if limit is None else min(limit, _MOST)
        flat = ids.flat
        if not len(flat) or (int(flat.min()) >= 0 and int(flat.max()) < limit):
            return
        place = int(np.argmax((flat < 0) | (flat >= limit)))
        row = ids.row_of(place)
        raise self._error(
            key,
            row,
            f"token {place - int(ids.starts[row]):,} of {self.names[key]!r} is {flat[place]}, outside a vocabulary of "
            f"{limit:,}",
            f"ids from 0 to {limit - 1:,}, or vocab_size=, if the model has more"
            if flat[place] >= 0
            else "ids from 0 on, without padding",
        )

    def _refuse_empty(self, key: str, ids: Ragged, why: str, remedy: str) -> None:
        if not ids.lengths.all():
            raise self._error(key, int(np.argmin(ids.lengths)), f"an empty {key}: {why}", remedy)

    def _refuse_unearned(self, rewards: NDArray[np.float32], laid: _Laid) -> None:
        """A reward at a token that the policy did not write would be of no use to anybody, in silence."""
        places = np.flatnonzero((rewards != 0) & ~laid.is_trained)
        if len(places):
            row = int(np.searchsorted(laid.starts, places[0], side="right")) - 1
            raise self._error(
                "reward",
                row,
                f"a reward of {rewards[places[0]]:g} at a token that the policy did not write",
                "it belongs to the last token that the policy wrote before",
            )

    def _mask(self, response: Ragged, trained: NDArray[np.bool_] | None) -> NDArray[np.bool_] | None:
        """Which tokens of the responses are trained; None: all."""
        column, name = self._column("response_mask"), self.names["response_mask"]
        if column is None:
            return trained
        if trained is not None:
            raise self._error(
                "response_mask", 0, f"{name!r} beside turns, which say themselves who speaks", "'train' in a turn"
            )
        try:
            mask = joined(column, "flags")
        except BadValue as bad:
            raise self._unusable("response_mask", bad) from None
        if not np.array_equal(mask.lengths, response.lengths):
            row = int(np.argmax(mask.lengths != response.lengths))
            raise self._error(
                "response_mask",
                row,
                f"mismatched lengths: {mask.lengths[row]:,} of {name!r} for a response of "
                f"{response.lengths[row]:,} tokens",
                "0 or 1 for each token of the response",
            )
        flags = mask.flat.astype(bool)
        if mask.flat.dtype != bool and not np.array_equal(flags, mask.flat):
            row = mask.row_of(int(np.argmax(flags != mask.flat)))
            raise self._error(
                "response_mask", row, f"{name!r} has a number that is neither 0 nor 1", "1 for what the policy wrote"
            )
        return flags

    # Groups

    def _groups(self, group_size: int | None) -> tuple[NDArray[np.int64] | None, tuple[Any, ...]]:
        column = self._column("group")
        name = self.names["group"]
        if column is None:
            if group_size is not None:
                raise SpecError(
                    f"group_size={group_size}, and no row has a {name!r}",
                    parameter="group_size",
                    remedy=self._offered("group") or f"{name!r} in every row: a number or a name",
                )
            return None, ()
        values = column.to_pylist() if is_arrow(column) else list(map(_plain, column))
        numbers: dict[Any, int] = {}
        try:
            group = [numbers.setdefault(value, len(numbers)) for value in values]
        except TypeError:
            row = next(n for n, value in enumerate(values) if _unhashable(value))
            what = type(values[row]).__name__
            raise self._error("group", row, f"{name!r} is a {what}", "a number or a name") from None
        for value, number in numbers.items():
            if hasattr(value, "ndim") or value != value:  # a tensor is its own hash, and NaN is not itself
                what = "NaN" if not hasattr(value, "ndim") else f"a {type(value).__name__}"
                raise self._error("group", group.index(number), f"{name!r} is {what}", "a number or a name")
        found = np.array(group, np.int64)
        if group_size is not None:
            self._check_sizes(found, tuple(numbers), group_size)
        return found, tuple(numbers)

    def _check_sizes(self, group: NDArray[np.int64], names: tuple[Any, ...], group_size: int) -> None:
        sizes = np.bincount(group, minlength=len(names))
        if (sizes == group_size).all():
            return
        number = int(np.argmax(sizes != group_size))
        rows = np.flatnonzero(group == number)
        others = int((sizes != group_size).sum()) - 1
        raise self._error(
            "group",
            int(rows[0]),
            f"group {names[number]!r} has {len(rows):,} of {group_size:,} rows"
            + (f", and {others:,} other groups are not whole" if others else ""),
            f"all {group_size:,} rows of every group, or leave the group out"
            if len(rows) < group_size
            else f"another name for each group of {group_size:,}",
            group=names[number],
            rows=", ".join(map(str, rows[:12].tolist())) + (", ..." if len(rows) > 12 else ""),
        )

    # Errors

    def _unusable(self, key: str, bad: BadValue) -> SampleError:
        return self._error(key, bad.row, f"{self.names[key]!r} cannot be used: {bad.what}", bad.remedy)

    def _error(
        self, key: str, row: int, what: str, remedy: str = "", *, column: str | None = None, **more: Any
    ) -> SampleError:
        where = self.table.where(row)
        if "group" not in more and key not in ("group", "prompt", "response"):
            more["group"] = self._group_of(row)
        column = column or self.names[key]
        return SampleError(what, **where, column=column, **more, remedy=remedy or f"another {column!r} for this row")

    def _group_of(self, row: int) -> Any:
        column = self.table.column(self.names["group"])
        if column is None:
            return None
        value = column[row]
        return value.as_py() if hasattr(value, "as_py") else _plain(value)


def _checked_names(columns: Mapping[str, str] | None, table: Table) -> dict[str, str]:
    """What the data calls each key."""
    for key, name in (columns or {}).items():
        if key not in KEYS:
            near = suggest(str(key), KEYS)
            raise SpecError(
                f"columns= has no key {key!r}",
                parameter="columns",
                known=", ".join(KEYS),
                remedy=f"{near!r}" if near else "columns={'response': 'completion'}",
            )
        if name not in table.names:
            near = suggest(str(name), table.names)
            raise SpecError(
                f"columns= takes {key!r} from {name!r}, which no row has",
                parameter="columns",
                has=", ".join(map(repr, table.names[:12])),
                remedy=f"{near!r}" if near else "a column that the rows have",
            )
    return {key: key for key in KEYS} | dict(columns or {})


def _is_per_token(column: Any) -> bool:
    """Whether a column of rewards has lists. The first row tells, and the others are checked as what it is."""
    if is_arrow(column):
        return hasattr(column.type, "value_type") or hasattr(column.type, "storage_type")
    return kind_of_value(column[0]) in ("list", "other")


def _plain(value: Any) -> Any:
    """A number of NumPy or of a framework as Python's."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value


def _unhashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return True
    return False
