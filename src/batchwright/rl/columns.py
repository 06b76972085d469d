"""Rollouts by column: the tokens of all rows end to end, and one number per token or per row."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from batchwright.base.fingerprint import fingerprint

__all__ = ["Rollouts", "cut_rows", "offsets"]

_LONG_ROW = 48
"""The length in tokens from which a row is copied as a slice. Shorter rows are gathered by index, all at once."""

OF_TOKENS = ("tokens", "trained", "token_rewards", "values", "old_log_probs", "ref_log_probs")
OF_ROWS = ("reward", "policy_version")


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Sequences by column: the tokens of all rows end to end, and one number per token or per row.

    Columns per token are as long as `tokens`, and aligned with them: nothing is shifted here. A column that the data
    does not have is None.
    """

    tokens: NDArray[np.int32]
    """Prompt and response of row i are tokens[starts[i]:starts[i + 1]]."""
    starts: NDArray[np.int64]
    """[rows + 1]"""
    trained: NDArray[np.bool_]
    """Per token: whether the policy wrote it. False for prompts and tool output."""
    reward: NDArray[np.float64] | None
    """Per row: its reward, or the sum of those of its tokens."""
    token_rewards: NDArray[np.float32] | None = None
    """Per token, if rewards are per token."""
    group: NDArray[np.int64] | None = None
    """Number of each row's group, from 0 in order of first appearance; None: there are no groups."""
    group_names: tuple[Any, ...] = ()
    """The data's names for groups 0, 1, ..."""
    values: NDArray[np.float32] | None = None
    """Per token, 0 for tokens without one; the same for the next two."""
    old_log_probs: NDArray[np.float32] | None = None
    ref_log_probs: NDArray[np.float32] | None = None
    policy_version: NDArray[np.int64] | None = None
    """Per row."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def lengths(self) -> NDArray[np.int64]:
        """The number of tokens of each row."""
        return np.diff(self.starts)

    def fingerprint(self) -> str:
        """A name for the content. The same rollouts have the same name, from a list, a file or a table."""
        digest = xxhash.xxh3_128()
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                digest.update(f"{field.name} {value.dtype.str} {len(value)};".encode())
                digest.update(np.ascontiguousarray(value).data)
        digest.update(fingerprint([_as_json(name) for name in self.group_names]).encode())
        return digest.hexdigest()

    def take(self, rows: Any) -> Rollouts:
        """Some rows, by number in that order, or by a mask. Groups are numbered anew, from 0."""
        chosen = np.asarray(rows)
        index = np.flatnonzero(chosen) if chosen.dtype == bool else chosen.astype(np.int64).reshape(-1)
        begins, lengths = self.starts[:-1][index], self.lengths()[index]
        found: dict[str, Any] = {"starts": offsets(lengths)}
        for name in OF_TOKENS:
            if getattr(self, name) is not None:
                found[name] = cut_rows(getattr(self, name), begins, lengths)
        for name in OF_ROWS:
            if getattr(self, name) is not None:
                found[name] = getattr(self, name)[index]
        if self.group is not None:
            found["group"], old = _numbered(self.group[index])
            found["group_names"] = tuple(self.group_names[number] for number in old)
        return replace(self, **found)


def offsets(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """The start of each row, and the end of the last one.

    >>> offsets(np.array([2, 0, 3])).tolist()
    [0, 2, 2, 5]
    """
    starts = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts


def cut_rows(flat: NDArray[Any], begins: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[Any]:
    """The pieces flat[begin : begin + length], one after the other.

    >>> cut_rows(np.arange(10), np.array([7, 0]), np.array([2, 3])).tolist()
    [7, 8, 0, 1, 2]
    """
    total = int(lengths.sum())
    if not total:
        return flat[:0].copy()
    if total >= _LONG_ROW * len(lengths):
        ends = (begins + lengths).tolist()
        return np.concatenate([flat[begin:end] for begin, end in zip(begins.tolist(), ends, strict=True)])
    shift = np.repeat(begins - offsets(lengths)[:-1], lengths)
    return flat[shift + np.arange(total)]


def _numbered(group: NDArray[np.int64]) -> tuple[NDArray[np.int64], list[int]]:
    """(numbers from 0 in order of first appearance, the old number of each)."""
    numbers: dict[int, int] = {}
    new = [numbers.setdefault(number, len(numbers)) for number in group.tolist()]
    return np.array(new, np.int64), list(numbers)


def _as_json(name: Any) -> Any:
    if isinstance(name, str | int | float | bool):
        return name
    return repr(name)
