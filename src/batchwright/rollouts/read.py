"""`read_rollouts`: rows, tables and files of rollouts as columns, checked column by column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchwright.base.checks import at_least
from batchwright.base.errors import SampleError, SpecError
from batchwright.base.words import listed, suggest
from batchwright.rl.columns import Rollouts
from batchwright.rollouts.ragged import BadValue, Ragged, is_arrow, joined, kind_of_value, scalars, spread
from batchwright.rollouts.sequences import Encoder, NeedsTokenizer, Sequences, interleave, sequences_of
from batchwright.rollouts.table import RolloutTable, table_of

KEYS = (
    *("prompt", "response", "reward", "group", "values", "old_log_probs", "ref_log_probs", "policy_version"),
    *("response_mask", "tools"),
)
_ALSO_CALLED = {
    "prompt": ("prompts", "question", "query", "input", "instruction", "messages"),
    "response": ("responses", "completion", "completions", "answer", "output", "generation", "text"),
    "reward": ("rewards", "score", "scores", "reward_score"),
}
"""Other names of these keys. An error suggests them; they are not accepted."""
_MAX_IDS = 2**31
"""Ids have 32 bits."""


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
    version of one. Its keys are `prompt` and `response`, and optionally `reward` (or `rewards`), `group`, `values`,
    `old_log_probs`, `ref_log_probs`, `policy_version`, `response_mask` and `tools`; other keys are ignored.
    `columns={"response": "completion"}` renames. A key that any row has, all must have. The data is not changed.

    With `group_size`, every group must have that many rows. Ids must be below `vocab_size`, by default that of the
    tokenizer. Text needs a tokenizer; each distinct text is encoded once.
    """
    if vocab_size is not None:
        vocab_size = at_least(1, vocab_size=vocab_size)
    if group_size is not None:
        group_size = at_least(1, group_size=group_size)
    encoder = Encoder(tokenizer, chat_template, vocab_size)
    return _Reading(table_of(rollout_data), columns).rollouts(encoder, vocab_size or encoder.limit, group_size)


class _Tokens(NamedTuple):
    """The tokens of all rows end to end, and the tokens that have per-token values."""

    tokens: NDArray[np.int32]
    starts: NDArray[np.int64]
    is_response: NDArray[np.bool_]
    is_trained: NDArray[np.bool_]
    num_response: NDArray[np.int64]
    """The number of tokens of each row's response."""
    num_trained: NDArray[np.int64]

    def placed(self, numbers: Ragged) -> NDArray[np.float32]:
        """Numbers of all response tokens, or of all trained ones, at their tokens; 0 elsewhere."""
        places = self.is_trained
        if len(numbers.flat) == int(self.num_response.sum()):
            places = self.is_response
        return spread(numbers.flat, places, np.float32)


def _end_to_end(prompt: Ragged, response: Ragged, trained: NDArray[np.bool_] | None) -> _Tokens:
    tokens, starts, is_response = interleave(prompt, response)
    if trained is None:
        return _Tokens(tokens, starts, is_response, is_response, response.lengths, response.lengths)
    is_trained = spread(trained, is_response, bool)
    num_trained = np.diff(np.append(0, np.cumsum(trained, dtype=np.int64))[response.starts])
    return _Tokens(tokens, starts, is_response, is_trained, response.lengths, num_trained)


class _Reading:
    """A table that is being read, and the names of its columns, which errors need."""

    def __init__(self, table: RolloutTable, columns: Mapping[str, str] | None) -> None:
        self.table, self.names = table, _checked_names(columns, table)
        self.names["reward"] = self._reward_name()

    def rollouts(self, encoder: Encoder, limit: int | None, group_size: int | None) -> Rollouts:
        # Required columns first: encoding may take long.
        prompts, responses, rewards = self._required("prompt"), self._required("response"), self._column("reward")
        prompt, response, trained = self._sequences(prompts, responses, encoder)
        self._refuse_empty("prompt", prompt, "nothing could predict the first token", "begin it with a BOS token")
        self._refuse_empty("response", response, "it has no token", "leave the row out, or end it with an EOS token")
        self._check_ids("prompt", prompt, limit)
        self._check_ids("response", response, limit)
        tokens = _end_to_end(prompt, response, self._mask(response, trained))
        values, old, ref = (self._token_column(key, tokens) for key in ("values", "old_log_probs", "ref_log_probs"))
        reward, token_rewards = self._rewards(rewards, tokens)
        if values is not None and reward is None:
            name, missing = self.names["values"], self.names["reward"]
            remedy = self._offered("reward") or f"{missing!r} in every row, or no {name!r}"
            raise self._error("reward", 0, f"{name!r} are there, and no {missing!r}: a value predicts rewards", remedy)
        group, group_names = self._groups(group_size)
        versions = self._column("policy_version")
        if versions is not None:
            versions = self._scalars("policy_version", versions, "whole")
        return Rollouts(
            tokens=tokens.tokens,
            starts=tokens.starts,
            trained=tokens.is_trained,
            reward=reward,
            token_rewards=token_rewards,
            group=group,
            group_names=group_names,
            values=values,
            old_log_probs=old,
            ref_log_probs=ref,
            policy_version=versions,
        )

    # Columns

    def _column(self, key: str, name: str | None = None) -> Any:
        """A column that every row has; None if no row has it."""
        name = name or self.names[key]
        column = self.table.column(name)
        if column is None:
            return None
        missing = _missing(column)
        if not len(missing):
            return column
        if len(missing) == len(self.table):
            return None
        what = f"this row has no {name!r}, and {len(self.table) - len(missing):,} of {len(self.table):,} have one"
        remedy = f"{name!r} in every row"
        if key not in ("prompt", "response", "reward"):
            remedy += ", or in none"
        raise self._error(key, int(missing[0]), what, remedy, column=name)

    def _required(self, key: str) -> Any:
        column = self._column(key)
        if column is None:
            what = f"no row has a {self.names[key]!r}: these are not rollouts"
            remedy = self._offered(key) or f"a {key!r} in every row, or columns={{{key!r}: 'COLUMN'}}"
            raise self._error(key, 0, what, remedy, has=listed(map(repr, self.table.names), 12) or "nothing")
        return column

    def _reward_name(self) -> str:
        """The name of the rewards: "reward" or "rewards", unless columns= says it."""
        name = self.names["reward"]
        if name != "reward" or self._column("reward", "rewards") is None:
            return name
        if self._column("reward") is not None:
            remedy = "columns={'reward': 'rewards'}, or 'reward'"
            raise self._error("reward", 0, "rows have both 'reward' and 'rewards'", remedy)
        return "rewards"

    def _offered(self, key: str) -> str | None:
        """A suggestion for a column that no row has."""
        others = [name for name in self.table.names if name not in self.names.values()]
        near = next((name for name in _ALSO_CALLED.get(key, ()) if name in others), None) or suggest(key, others)
        return near and f"columns={{{key!r}: {near!r}}}, if that is what {near!r} is"

    # Numbers

    def _rewards(self, column: Any, tokens: _Tokens) -> tuple[NDArray[np.float64] | None, NDArray[np.float32] | None]:
        """(the reward of each row, the reward of each token if rewards are per token)."""
        if column is None:
            return None, None
        if not _is_per_token(column):
            reward = self._scalars("reward", column, "numbers")
            self._check_finite("reward", reward)
            return reward, None
        numbers = self._per_token("reward", column, tokens)
        rewards = tokens.placed(numbers)
        unearned = np.flatnonzero((rewards != 0) & ~tokens.is_trained)
        if len(unearned):  # it would have no effect
            row = int(np.searchsorted(tokens.starts, unearned[0], side="right")) - 1
            what = f"a reward of {rewards[unearned[0]]:g} at a token that the policy did not write"
            raise self._error("reward", row, what, "give it to the last token that the policy wrote before")
        rows = np.repeat(np.arange(len(self.table)), numbers.lengths)
        reward = np.bincount(rows, numbers.flat, len(self.table)).astype(np.float64)
        self._check_finite("reward", reward)
        return reward, rewards

    def _token_column(self, key: str, tokens: _Tokens) -> NDArray[np.float32] | None:
        """A column of one number per token, aligned with the tokens; None if no row has it."""
        column = self._column(key)
        if column is None:
            return None
        return tokens.placed(self._per_token(key, column, tokens))

    def _per_token(self, key: str, column: Any, tokens: _Tokens) -> Ragged:
        """A number for each token of a response, or for each that is trained."""
        name, of_response, of_trained = self.names[key], tokens.num_response, tokens.num_trained
        numbers = self._joined(key, column, "numbers" if key == "reward" else "floats")  # rewards are added up
        is_wrong = numbers.lengths != of_response
        if is_wrong.any() and (numbers.lengths != of_trained).any():
            fits_neither = is_wrong & (numbers.lengths != of_trained)
            row = int(np.argmax(fits_neither if fits_neither.any() else is_wrong))
            trained = f", of which {of_trained[row]:,} are trained"
            remedy = f"one of {name!r} for each token of the response, or for each that is trained, in all rows alike"
            raise self._mismatched(key, row, numbers, of_response, trained, remedy)
        self._check_finite(key, numbers.flat, numbers)
        return numbers

    def _mismatched(
        self, key: str, row: int, numbers: Ragged, wanted: NDArray[np.int64], more: str, remedy: str
    ) -> SampleError:
        got = f"{numbers.lengths[row]:,} of {self.names[key]!r}"
        what = f"mismatched lengths: {got} for a response of {wanted[row]:,} tokens{more}"
        return self._error(key, row, what, remedy)

    def _joined(self, key: str, column: Any, kind: str) -> Ragged:
        try:
            return joined(column, kind)
        except BadValue as bad:
            raise self._unusable(key, bad) from None

    def _scalars(self, key: str, column: Any, kind: str) -> NDArray[Any]:
        try:
            return scalars(column, kind)
        except BadValue as bad:
            bad.remedy = "a number, or a list of one for each token" if key == "reward" else "a whole number"
            raise self._unusable(key, bad) from None

    def _check_finite(self, key: str, flat: NDArray[Any], ragged: Ragged | None = None) -> None:
        with np.errstate(over="ignore"):
            numbers = flat.astype(np.float32, copy=False)  # as in a batch, where larger ones would be infinite
        is_finite = np.isfinite(numbers)
        if is_finite.all():
            return
        row = place = int(np.argmin(is_finite))
        token = ""
        if ragged is not None:
            row = ragged.row_of(place)
            token = f" of token {place - int(ragged.starts[row]):,}"
        remedy = "a finite number of 32 bits; leave the row out if there is none"
        raise self._error(key, row, f"{self.names[key]!r}{token} is {numbers[place]}", remedy)

    # Tokens

    def _sequences(self, prompts: Any, responses: Any, encoder: Encoder) -> Sequences:
        """Prompts and responses as tokens, and which of them the policy wrote."""
        tools = self.table.column(self.names["tools"])  # optional in each row
        try:
            found = sequences_of(prompts, responses, tools, encoder)
        except NeedsTokenizer as bad:
            where = self.table.where(bad.row) | {"column": self.names[bad.key or "response"]}
            raise SpecError(bad.what, parameter="tokenizer", **where, remedy=bad.remedy) from None
        except BadValue as bad:
            raise self._unusable(bad.key or "response", bad) from None
        if encoder.unused_template:
            what = "chat_template= is for prompts that are messages, and none is"
            remedy = "[{'role': 'user', 'content': prompt}] as the prompt, or no chat_template"
            raise SpecError(what, parameter="chat_template", remedy=remedy)
        return found

    def _refuse_empty(self, key: str, ids: Ragged, why: str, remedy: str) -> None:
        if not ids.lengths.all():
            raise self._error(key, int(np.argmin(ids.lengths)), f"an empty {key}: {why}", remedy)

    def _check_ids(self, key: str, ids: Ragged, limit: int | None) -> None:
        limit = min(limit or _MAX_IDS, _MAX_IDS)
        if int(ids.flat.min()) >= 0 and int(ids.flat.max()) < limit:
            return
        place = int(np.argmax((ids.flat < 0) | (ids.flat >= limit)))
        row = ids.row_of(place)
        token = f"token {place - int(ids.starts[row]):,} of {self.names[key]!r} is {ids.flat[place]}"
        remedy = f"ids from 0 to {limit - 1:,}, without padding, or vocab_size=, if the model has more"
        raise self._error(key, row, f"{token}, outside a vocabulary of {limit:,}", remedy)

    def _mask(self, response: Ragged, trained: NDArray[np.bool_] | None) -> NDArray[np.bool_] | None:
        """A mask of the trained tokens of the responses; None: all."""
        key = "response_mask"
        column, name = self._column(key), self.names[key]
        if column is None:
            return trained
        if trained is not None:
            raise self._error(key, 0, f"{name!r} beside turns, whose roles say who speaks", "'train' in a turn")
        mask, remedy = self._joined(key, column, "flags"), "0 or 1 for each token of the response"
        if not np.array_equal(mask.lengths, response.lengths):
            row = int(np.argmax(mask.lengths != response.lengths))
            raise self._mismatched(key, row, mask, response.lengths, "", remedy)
        flags = mask.flat.astype(bool)
        if not np.array_equal(flags, mask.flat):
            row = mask.row_of(int(np.argmax(flags != mask.flat)))
            what = f"{name!r} has a number that is neither 0 nor 1"
            raise self._error(key, row, what, f"{remedy}, 1 for what the policy wrote")
        return flags

    # Groups

    def _groups(self, group_size: int | None) -> tuple[NDArray[np.int64] | None, tuple[Any, ...]]:
        column = self._column("group")
        if column is None:
            self._refuse_no_groups(group_size)
            return None, ()
        if is_arrow(column):
            values = column.to_pylist()
        else:
            values = list(map(_as_python, column))
        numbers: dict[Any, int] = {}
        try:
            group = np.array([numbers.setdefault(value, len(numbers)) for value in values], np.int64)
            are_names = all(map(_is_name, numbers))
        except TypeError:
            are_names = False
        if not are_names:
            row = next(row for row, value in enumerate(values) if not _is_name(value))
            what = "NaN" if isinstance(values[row], float) else f"a {type(values[row]).__name__}"
            raise self._error("group", row, f"{self.names['group']!r} is {what}", "a number or a name")
        if group_size is not None:
            self._check_sizes(group, tuple(numbers), group_size)
        return group, tuple(numbers)

    def _refuse_no_groups(self, group_size: int | None) -> None:
        if group_size is not None:
            name = self.names["group"]
            remedy = self._offered("group") or f"{name!r} in every row: a number or a name"
            raise SpecError(
                f"group_size={group_size}, and no row has a {name!r}", parameter="group_size", remedy=remedy
            )

    def _check_sizes(self, group: NDArray[np.int64], names: tuple[Any, ...], group_size: int) -> None:
        wrong = np.flatnonzero(np.bincount(group) != group_size)
        if not len(wrong):
            return
        rows = np.flatnonzero(group == wrong[0])
        what = f"group {names[wrong[0]]!r} has {len(rows):,} of {group_size:,} rows"
        if len(wrong) > 1:
            what += f", and {len(wrong) - 1:,} other groups are incomplete or too large"
        remedy = f"all {group_size:,} rows of every group, or leave the group out"
        if len(rows) > group_size:
            remedy = f"another name for each group of {group_size:,}"
        raise self._error("group", int(rows[0]), what, remedy, group=names[wrong[0]], rows=listed(rows.tolist(), 12))

    # Errors

    def _unusable(self, key: str, bad: BadValue) -> SampleError:
        return self._error(key, bad.row, f"{self.names[key]!r} cannot be used: {bad.what}", bad.remedy)

    def _error(
        self, key: str, row: int, what: str, remedy: str = "", *, column: str | None = None, **more: Any
    ) -> SampleError:
        groups = self.table.column(self.names["group"])
        if key not in ("group", "prompt", "response") and groups is not None:
            more["group"] = _as_python(groups[row])
        column = column or self.names[key]
        remedy = remedy or f"another {column!r} for this row"
        return SampleError(what, **self.table.where(row), column=column, **more, remedy=remedy)


def _checked_names(columns: Mapping[str, str] | None, table: RolloutTable) -> dict[str, str]:
    """The column of each key."""
    for key, name in (columns or {}).items():
        if key not in KEYS:
            raise _unknown(f"columns= has no key {key!r}", key, KEYS)
        if name not in table.names:
            raise _unknown(f"columns= takes {key!r} from {name!r}, which no row has", name, table.names)
    return {key: key for key in KEYS} | dict(columns or {})


def _unknown(what: str, name: object, known: Sequence[str]) -> SpecError:
    near = suggest(str(name), known)
    remedy = f"{near!r}" if near else "one of those that are known"
    return SpecError(what, parameter="columns", known=listed(map(repr, known), 12), remedy=remedy)


def _missing(column: Any) -> NDArray[np.int64]:
    """The rows that do not have the column."""
    if is_arrow(column):
        return np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))
    if type(None) not in set(map(type, column)):
        return np.empty(0, np.int64)
    return np.flatnonzero([value is None for value in column])


def _is_per_token(column: Any) -> bool:
    """Whether a column of rewards has lists. The first row decides; the others are checked accordingly."""
    if is_arrow(column):
        return hasattr(column.type, "value_type") or hasattr(column.type, "storage_type")
    return kind_of_value(column[0]) in ("list", "other")


def _is_name(value: Any) -> bool:
    """Whether a value can name a group: it has a hash, and is neither NaN nor a tensor."""
    try:
        hash(value)
    except TypeError:
        return False
    return not hasattr(value, "ndim") and bool(value == value)


def _as_python(value: Any) -> Any:
    """A number of Arrow, NumPy or a framework as Python's."""
    if hasattr(value, "as_py"):
        return value.as_py()
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        return value.item()
    return value
