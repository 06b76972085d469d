"""Groups: one prompt, its responses and their rewards, checked once, before they are written.

On disk a group is MessagePack, with token ids as the bytes of int32 and per-token numbers as those of float32.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from batchwright.base.errors import SampleError, StoreError
from batchwright.base.words import shortened
from batchwright.rollouts.ragged import is_arrow, is_tensor, numpy_of

__all__ = ["Group"]

_FORMAT = 1
_PER_TOKEN = ("old_log_probs", "ref_log_probs", "values")
"""Columns with one number per response token."""
_TokenCounts = tuple[int, int]
"""The number of tokens of one response, and of those that the policy wrote."""


class StoredGroup(msgspec.Struct, array_like=True, gc=False):
    """The content of a group on disk. Its place in the stream of prompts is in the ledger."""

    format: int
    prompt: Any
    responses: list[Any]
    rewards: list[Any]
    policy_version: int | None
    old_log_probs: list[Any] | None
    ref_log_probs: list[Any] | None
    values: list[Any] | None
    response_mask: list[Any] | None
    tools: Any = None


@dataclass(frozen=True, slots=True)
class Group:
    """The valid answers to one prompt.

    A response is text, token ids, or turns (dicts with `role` and `content` or `token_ids`); a reward is a number, or
    an array with one per token. Columns that were not given are None.
    """

    ordinal: int
    """The number of the prompt in the stream of prompts."""
    attempt: int
    epoch: int
    row: int
    """The row of the prompt in its file."""
    prompt: Any
    responses: list[Any]
    rewards: list[float | NDArray[np.float32]]
    policy_version: int | None = None
    old_log_probs: list[NDArray[np.float32]] | None = None
    ref_log_probs: list[NDArray[np.float32]] | None = None
    values: list[NDArray[np.float32]] | None = None
    response_mask: list[NDArray[np.uint8]] | None = None
    tools: Any = None
    """For the chat template, if the prompt is messages."""

    def rows(self, name: Any = None) -> list[dict[str, Any]]:
        """One row per response, as `RolloutDataLoader` reads rows. `name` is the group's, by default its ordinal."""
        shared = {"prompt": self.prompt, "group": self.ordinal if name is None else name}
        shared |= self._given("policy_version", "tools")
        columns = {"response": self.responses, "reward": self.rewards, **self._given(*_PER_TOKEN, "response_mask")}
        return [shared | dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def _given(self, *names: str) -> dict[str, Any]:
        """These columns, without those that were not given."""
        columns = {name: getattr(self, name) for name in names}
        return {name: column for name, column in columns.items() if column is not None}


def prompt_group(stored: StoredGroup, ordinal: int, attempt: int, epoch: int, row: int) -> Group:
    """A stored group with its place in the stream of prompts."""
    return Group(ordinal, attempt, epoch, row, *msgspec.structs.astuple(stored)[1:])


def columns_of(group: StoredGroup) -> frozenset[str]:
    """The optional columns of a group. Rows of one batch must have the same."""
    optional = (*_PER_TOKEN, "response_mask", "policy_version")
    found = {name for name in optional if getattr(group, name) is not None}
    if isinstance(group.rewards[0], np.ndarray):
        found.add("rewards for each token")
    return frozenset(found)


# Checks


def checked_group(
    prompt: Any,
    responses: Any,
    rewards: Any,
    *,
    group_size: int,
    ordinal: int,
    vocab_size: int | None = None,
    policy_version: Any = None,
    response_mask: Any = None,
    tools: Any = None,
    **per_token: Any,
) -> StoredGroup:
    """A group in the form that is written. A SampleError names an invalid response and column."""
    check = _GroupCheck(ordinal, group_size, vocab_size)
    found = [check.response(number, each) for number, each in enumerate(check.column("responses", responses))]
    masks, lengths = None, [_token_counts(response) for response in found]
    if response_mask is not None:
        given = check.column("response_mask", response_mask)
        masks = [check.mask(number, each, found[number]) for number, each in enumerate(given)]
        lengths = [(len(mask), int(mask.sum())) for mask in masks]
    columns: dict[str, Any] = dict.fromkeys(_PER_TOKEN)
    for name, values in per_token.items():
        if values is not None:
            given = check.column(name, values)
            columns[name] = [check.per_token(name, number, each, lengths[number]) for number, each in enumerate(given)]
    prompt = checked_prompt(prompt)
    return StoredGroup(
        format=_FORMAT,
        prompt=prompt,
        responses=found,
        rewards=check.rewards(rewards, lengths),
        policy_version=check.version(policy_version),
        response_mask=masks,
        tools=tools if isinstance(prompt, list | tuple) else None,  # only messages go through a template
        **columns,
    )


def checked_prompt(prompt: Any, vocab_size: int | None = None) -> Any:
    """A prompt in the form that is written: text, token ids as an array, or messages. A ValueError names the fault."""
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError("it is empty")
        return prompt
    if not isinstance(prompt, list | tuple) or not prompt or not isinstance(prompt[0], Mapping):
        return _checked_ids(prompt, vocab_size)
    if not all(_has_role(turn) for turn in prompt):
        raise ValueError("a message has no role")
    try:
        _encoder.encode(prompt)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"a message holds something that cannot be written: {error}") from None
    return prompt


def _checked_ids(value: Any, vocab_size: int | None = None) -> NDArray[np.int32]:
    """Token ids as an array. A ValueError names the fault."""
    array = _as_array(value)
    if array.ndim != 1:
        raise ValueError(f"token ids are one row of numbers, not an array of shape {array.shape}")
    if not array.size:
        raise ValueError("there are no token ids")
    if array.dtype.kind not in "iu":
        raise ValueError(f"token ids are whole numbers, not {array.dtype}")
    lowest, highest = int(array.min()), int(array.max())
    if lowest < 0:
        raise ValueError(f"token id {lowest} is negative")
    limit = vocab_size or 1 << 31
    if highest >= limit:
        raise ValueError(f"token id {highest:,} is outside the vocabulary of {limit:,}")
    return array.astype(np.int32)


def _has_role(turn: Any) -> bool:
    return isinstance(turn, Mapping) and isinstance(turn.get("role"), str)


_REMEDIES = {
    "responses": "text, token ids with the end of sequence that the policy wrote, or turns such as "
    "{'role': 'assistant', 'token_ids': [...]}",
    "rewards": "a finite number for each response, or one for each of its tokens, alike in all responses",
    "response_mask": "0 or 1 for each response token; of turns, roles say what is learned",
    "policy_version": "the number of the weights that generated this, such as the trainer's step",
}
_NUMBERS = "one finite number for each token, or leave the column out"
_ALL = "one item for each response of the group, in one call; give the prompt back if it cannot be completed"


@dataclass(frozen=True, slots=True)
class _GroupCheck:
    """The checks of one group, and its number for their errors."""

    ordinal: int
    group_size: int
    vocab_size: int | None

    def fault(self, column: str, response: int | None, text: str, remedy: str | None = None) -> SampleError:
        remedy = remedy or _REMEDIES.get(column, _NUMBERS)
        return SampleError(text, ordinal=self.ordinal, response=response, column=column, remedy=remedy)

    def column(self, name: str, given: Any) -> list[Any]:
        """One item per response."""
        is_list = hasattr(given, "__iter__") and not isinstance(given, str | bytes | Mapping)
        if not is_list or getattr(given, "ndim", 1) == 0:
            text = f"{name} must be a list with {self.group_size} items, got {shortened(given, 40)}"
            raise self.fault(name, None, text, _ALL)
        found = given.to_pylist() if is_arrow(given) else list(given)
        if len(found) != self.group_size:
            raise self.fault(name, None, f"{len(found)} {name} for a group of {self.group_size}", _ALL)
        return found

    def response(self, number: int, response: Any) -> Any:
        if response is None or (hasattr(response, "__len__") and not len(response)):
            raise self.fault("responses", number, "an empty response: there is nothing to learn from")
        if isinstance(response, str):
            return response
        if isinstance(response, Sequence) and isinstance(response[0], Mapping):
            return [self._turn(number, turn) for turn in response]
        return self._ids(number, response)

    def _turn(self, number: int, turn: Any) -> dict[str, Any]:
        if not _has_role(turn):
            raise self.fault("responses", number, "a turn of a response has no role")
        found = dict(turn)
        if found.get("token_ids") is not None:
            found["token_ids"] = self._ids(number, found["token_ids"])
        elif "content" not in found:
            raise self.fault("responses", number, "a turn of a response has neither content nor token_ids")
        return found

    def _ids(self, number: int, ids: Any) -> NDArray[np.int32]:
        try:
            return _checked_ids(ids, self.vocab_size)
        except ValueError as error:
            raise self.fault("responses", number, f"a response cannot be used: {error}") from None

    def mask(self, number: int, mask: Any, response: Any) -> NDArray[np.uint8]:
        array, fault = self._numbers("response_mask", number, mask), ""
        if not isinstance(response, np.ndarray):
            fault = "response_mask is for responses of token ids"
        elif len(array) != len(response):
            fault = f"a mask of {len(array)} numbers for a response of {len(response)} tokens"
        elif not np.isin(array, (0, 1)).all():
            fault = "a mask holds 0 and 1"
        if fault:
            raise self.fault("response_mask", number, fault)
        return array.astype(np.uint8)

    def per_token(self, column: str, number: int, given: Any, lengths: _TokenCounts | None) -> NDArray[np.float32]:
        with np.errstate(over="ignore"):
            array = self._numbers(column, number, given).astype(np.float32)
        if not np.isfinite(array).all():
            raise self.fault(column, number, f"{column} has a number that is NaN or infinite")
        if lengths is not None and len(array) not in lengths:
            text = f"{column} has {len(array)} numbers for a response of {lengths[0]} tokens"
            raise self.fault(column, number, f"{text}, {lengths[1]} of them the policy's")
        return array

    def rewards(self, rewards: Any, lengths: list[_TokenCounts | None]) -> list[float | NDArray[np.float32]]:
        given = self.column("rewards", rewards)
        found = [self._reward(number, each, lengths[number]) for number, each in enumerate(given)]
        for number, reward in enumerate(found):
            if isinstance(reward, float) != isinstance(found[0], float):
                raise self.fault("rewards", number, "some rewards are numbers, and some have one for each token")
        return found

    def _reward(self, number: int, reward: Any, lengths: _TokenCounts | None) -> float | NDArray[np.float32]:
        if reward is None:
            raise self.fault("rewards", number, "a response without a reward")
        array = self._numbers("rewards", number, reward, axes=(0, 1))
        if array.ndim:
            return self.per_token("rewards", number, reward, lengths)
        if not np.isfinite(array):
            raise self.fault("rewards", number, f"a reward is a finite number, the reward is {array}")
        return float(array)

    def _numbers(self, column: str, number: int, given: Any, axes: tuple[int, ...] = (1,)) -> NDArray[Any]:
        try:
            array = _as_array(given)
        except ValueError:
            array = np.empty(0, object)
        if array.ndim not in axes or array.dtype.kind not in "iufb":
            raise self.fault(column, number, f"{column} are numbers, got {shortened(given, 40)}")
        return array

    def version(self, version: Any) -> int | None:
        if version is None:
            return None
        try:
            found = operator.index(version)
        except TypeError:
            found = -1
        if not 0 <= found <= 1 << 62:
            text = f"policy_version must be a whole number, 0 or more; got {version!r}"
            raise self.fault("policy_version", None, text)
        return found


def _token_counts(response: Any) -> _TokenCounts | None:
    """The token counts of a response; None if they are unknown until it is encoded."""
    if isinstance(response, np.ndarray):
        return len(response), len(response)
    if isinstance(response, str) or any(turn.get("token_ids") is None for turn in response):
        return None
    lengths = [(len(turn["token_ids"]), turn["role"] == "assistant") for turn in response]
    return sum(length for length, _ in lengths), sum(length for length, is_trained in lengths if is_trained)


def _as_array(value: Any) -> NDArray[Any]:
    """An array, list or tensor of any library as an array."""
    try:
        if is_tensor(value):
            return numpy_of(value)
        return np.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"a {type(value).__name__} cannot become an array: {error}") from None


# Bytes

_DTYPES: dict[int, Any] = dict(enumerate(map(np.dtype, ("<i4", "<f4", "u1", "<i8", "<f8")), start=1))
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


def encode_group(group: StoredGroup, ordinal: int) -> bytes:
    try:
        return _encoder.encode(group)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        what = f"this group holds something that cannot be written: {error}"
        remedy = "text, numbers, lists, dicts and arrays"
        raise SampleError(what, ordinal=ordinal, column="responses", remedy=remedy) from None


def decode_group(payload: bytes, group_size: int, **where: Any) -> StoredGroup:
    """A group from its bytes, whose checksum was checked before. A StoreError names the place `where` it is."""
    try:
        group = _decoder.decode(payload)
        if group.format != _FORMAT:
            raise ValueError(f"it has format {group.format}, and this batchwright reads format {_FORMAT}")
        if len(group.responses) != group_size:
            raise ValueError(f"{len(group.responses)} responses for a group of {group_size}")
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
        raise StoreError(
            "this group cannot be read", **where, reason=str(error), remedy="restore the folder from a copy"
        ) from None
    return group


def _to_bytes(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if is_tensor(value):
        value = numpy_of(value)
    if isinstance(value, np.ndarray) and value.ndim == 1:
        code = _CODES.get(value.dtype.newbyteorder("<"))
        if code is not None:
            return msgspec.msgpack.Ext(code, value.astype(_DTYPES[code], copy=False).tobytes())
    raise TypeError(f"a {type(value).__name__} of this kind")


def _from_bytes(code: int, data: memoryview) -> NDArray[Any]:
    dtype = _DTYPES.get(code)
    if dtype is None:
        raise ValueError(f"an array of an unknown kind: {code}")
    return np.frombuffer(data, dtype).copy()


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_bytes)
_decoder = msgspec.msgpack.Decoder(StoredGroup, ext_hook=_from_bytes)
