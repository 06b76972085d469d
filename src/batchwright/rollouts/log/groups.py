"""A group: one prompt, its responses and what they are worth; checked before it is written, and when it is read.

In a file, a group is MessagePack, with token ids as the bytes of int32 and numbers of tokens as those of float32.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from batchwright.base.errors import SampleError, StoreError

__all__ = ["Content", "Group", "checked_content", "checked_prompt", "columns_of", "decode_content", "encode_content"]

_FORMAT = 1
_MOST_IDS = 1 << 31
PER_TOKEN = ("old_log_probs", "ref_log_probs", "values")
"""Columns with a number for each response token."""


class Content(msgspec.Struct, array_like=True, gc=False):
    """What of a group lies in a file: its place in the stream of prompts is in the ledger."""

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
    """The answers to one prompt that count.

    A response is text, token ids, or turns (dicts with `role` and `content` or `token_ids`); a reward is a number, or
    an array with one for each token. Columns that were not given are None.
    """

    ordinal: int
    """Number of the prompt in the stream of prompts."""
    attempt: int
    epoch: int
    row: int
    """Row of the prompt in its file."""
    prompt: Any
    responses: list[Any]
    rewards: list[float | NDArray[np.float32]]
    policy_version: int | None = None
    old_log_probs: list[NDArray[np.float32]] | None = None
    ref_log_probs: list[NDArray[np.float32]] | None = None
    values: list[NDArray[np.float32]] | None = None
    response_mask: list[NDArray[np.uint8]] | None = None
    tools: Any = None
    """For the chat template, where the prompt is messages."""

    def rows(self, name: Any = None) -> list[dict[str, Any]]:
        """One row for each response, as `RolloutDataLoader` reads rows; `name` is that of the group."""
        columns = {"response": self.responses, "reward": self.rewards}
        columns |= {each: getattr(self, each) for each in (*PER_TOKEN, "response_mask")}
        columns = {each: column for each, column in columns.items() if column is not None}
        shared = {"prompt": self.prompt, "group": self.ordinal if name is None else name}
        shared |= {} if self.policy_version is None else {"policy_version": self.policy_version}
        shared |= {} if self.tools is None else {"tools": self.tools}
        return [
            shared | {each: column[number] for each, column in columns.items()} for number in range(len(self.responses))
        ]


def columns_of(group: Group | Content) -> frozenset[str]:
    """What a group has beside prompt, responses and rewards: rows of one batch must have the same."""
    found = {each for each in (*PER_TOKEN, "response_mask", "policy_version") if getattr(group, each) is not None}
    return frozenset(found | {"rewards for each token"} if isinstance(group.rewards[0], np.ndarray) else found)


# Checking


def checked_content(
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
) -> Content:
    """A group as it is written; a SampleError names the response and the column that cannot be."""
    check = _Check(ordinal, group_size, vocab_size)
    found = [check.response(number, each) for number, each in enumerate(check.rows("responses", responses))]
    masks = None
    if response_mask is not None:
        masks = [check.mask(n, m, found[n]) for n, m in enumerate(check.rows("response_mask", response_mask))]
    lengths = [_token_counts(response, masks[n] if masks is not None else None) for n, response in enumerate(found)]
    columns = {
        name: None
        if column is None
        else [check.per_token(name, n, each, lengths[n]) for n, each in enumerate(check.rows(name, column))]
        for name, column in per_token.items()
    }
    prompt = checked_prompt(prompt)
    return Content(
        _FORMAT,
        prompt,
        found,
        check.rewards(rewards, lengths),
        check.version(policy_version),
        columns.get("old_log_probs"),
        columns.get("ref_log_probs"),
        columns.get("values"),
        masks,
        tools if isinstance(prompt, list | tuple) else None,  # messages: else there is no template to write them
    )


def checked_prompt(prompt: Any, vocab_size: int | None = None) -> Any:
    """A prompt as it is written: text, token ids as an array, or messages. A ValueError says why it is none."""
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError("it is empty")
        return prompt
    if not isinstance(prompt, list | tuple) or not prompt or not isinstance(prompt[0], Mapping):
        return _checked_ids(prompt, vocab_size)
    if not all(isinstance(turn, Mapping) and isinstance(turn.get("role"), str) for turn in prompt):
        raise ValueError("a message has no role")
    try:
        _encoder.encode(prompt)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"a message holds something that cannot be written: {error}") from None
    return prompt


def _checked_ids(value: Any, vocab_size: int | None = None) -> NDArray[np.int32]:
    """Token ids as an array. A ValueError says why they are none."""
    array = _as_array(value)
    if array.ndim != 1:
        raise ValueError(f"token ids are one row of numbers, not an array of shape {array.shape}")
    if not array.size:
        raise ValueError("there are none")
    if array.dtype.kind not in "iu":
        raise ValueError(f"token ids are whole numbers, not {array.dtype}")
    limit = _MOST_IDS if vocab_size is None else vocab_size
    lowest, highest = int(array.min()), int(array.max())
    if lowest < 0:
        raise ValueError(f"token id {lowest} is negative")
    if highest >= limit:
        what = f"outside the vocabulary of {limit:,}" if vocab_size is not None else "larger than any"
        raise ValueError(f"token id {highest:,} is {what}")
    return array.astype(np.int32)


class _Check:
    """Where a fault is, for all that is checked of one group."""

    def __init__(self, ordinal: int, group_size: int, vocab_size: int | None) -> None:
        self.ordinal, self.group_size, self.vocab_size = ordinal, group_size, vocab_size

    def fault(self, text: str, column: str, response: int | None, remedy: str) -> SampleError:
        return SampleError(text, ordinal=self.ordinal, response=response, column=column, remedy=remedy)

    def rows(self, column: str, rows: Any) -> list[Any]:
        """One thing for each response of the group."""
        if isinstance(rows, str | bytes | Mapping) or not hasattr(rows, "__iter__") or getattr(rows, "ndim", 1) == 0:
            raise self.fault(
                f"{column} must be a list with {self.group_size} items, got {_kind(rows)}",
                column,
                None,
                f"{column}=[...], with one item for each response of the group",
            )
        found = list(rows)
        if len(found) != self.group_size:
            raise self.fault(
                f"{len(found)} {column} for a group of {self.group_size}",
                column,
                None,
                "the whole group in one call: as many as group_size; give the prompt back if it cannot be completed",
            )
        return found

    def response(self, number: int, response: Any) -> Any:
        if isinstance(response, str):
            if not response:
                raise self._empty(number)
            return response
        if isinstance(response, Sequence) and len(response) and isinstance(response[0], Mapping):
            return [self._turn(number, turn) for turn in response]
        if response is None or (hasattr(response, "__len__") and not len(response)):
            raise self._empty(number)
        return self._ids(number, response)

    def _turn(self, number: int, turn: Any) -> dict[str, Any]:
        remedy = "turns such as {'role': 'assistant', 'token_ids': [...]}, or with 'content' in place of ids"
        if not isinstance(turn, Mapping) or not isinstance(turn.get("role"), str):
            raise self.fault("a turn of a response has no role", "responses", number, remedy)
        found = dict(turn)
        if found.get("token_ids") is not None:
            found["token_ids"] = self._ids(number, found["token_ids"])
        elif "content" not in found:
            raise self.fault("a turn of a response has neither content nor token_ids", "responses", number, remedy)
        return found

    def _ids(self, number: int, ids: Any) -> NDArray[np.int32]:
        try:
            return _checked_ids(ids, self.vocab_size)
        except ValueError as error:
            raise self.fault(
                f"a response that cannot be: {error}", "responses", number, "text, token ids of the policy, or turns"
            ) from None

    def _empty(self, number: int) -> SampleError:
        return self.fault(
            "an empty response: there is nothing to learn from",
            "responses",
            number,
            "token ids with the end of sequence that the policy wrote, or generate it again",
        )

    def mask(self, number: int, mask: Any, response: Any) -> NDArray[np.uint8]:
        array = self._numbers("response_mask", number, mask)
        if not isinstance(response, np.ndarray):
            raise self.fault(
                "response_mask belongs to token ids",
                "response_mask",
                number,
                "responses as token ids; of turns, roles say what is learned",
            )
        if len(array) != len(response) or not np.isin(array, (0, 1)).all():
            raise self.fault(
                f"a mask of {len(array)} numbers for a response of {len(response)} tokens"
                if len(array) != len(response)
                else "a mask holds 0 and 1",
                "response_mask",
                number,
                "0 or 1 for each response token",
            )
        return array.astype(np.uint8)

    def per_token(self, column: str, number: int, given: Any, lengths: tuple[int, int] | None) -> NDArray[np.float32]:
        with np.errstate(over="ignore"):
            array = self._numbers(column, number, given).astype(np.float32)
        if not np.isfinite(array).all():
            raise self.fault(
                f"{column} has a number that is NaN or infinite",
                column,
                number,
                "mend what computes it, or leave it out",
            )
        if lengths is not None and len(array) not in lengths:
            all_tokens, trained = lengths
            of = f"{all_tokens} tokens" + (f", {trained} of them the policy's" if trained != all_tokens else "")
            raise self.fault(
                f"{column} has {len(array)} numbers for a response of {of}", column, number, "one for each token"
            )
        return array

    def rewards(self, rewards: Any, lengths: list[tuple[int, int] | None]) -> list[float | NDArray[np.float32]]:
        found = [self.reward(n, each, lengths[n]) for n, each in enumerate(self.rows("rewards", rewards))]
        for number, reward in enumerate(found):
            if isinstance(reward, float) != isinstance(found[0], float):
                raise self.fault(
                    "some rewards are numbers, and some have one for each token", "rewards", number, "all of one kind"
                )
        return found

    def reward(self, number: int, reward: Any, lengths: tuple[int, int] | None) -> float | NDArray[np.float32]:
        if reward is None:
            raise self.fault("a response without a reward", "rewards", number, "a number for each response")
        if isinstance(reward, float | int | str) or not hasattr(reward, "__len__") or getattr(reward, "ndim", 1) == 0:
            try:
                value = float("text" if isinstance(reward, str) else reward)
            except (TypeError, ValueError, OverflowError):
                raise self.fault(
                    f"a reward is a number, or one for each token; got {_kind(reward)}", "rewards", number, "a number"
                ) from None
            if not math.isfinite(value):
                raise self.fault(
                    f"the reward is {value}",
                    "rewards",
                    number,
                    "mend the reward function: it must give a finite number",
                )
            return value
        return self.per_token("rewards", number, reward, lengths)

    def _numbers(self, column: str, number: int, given: Any) -> NDArray[Any]:
        try:
            array = _as_array(given)
        except ValueError:
            array = np.empty(0, object)
        if array.ndim != 1 or array.dtype.kind not in "iufb":
            raise self.fault(f"{column} are numbers, got {_kind(given)}", column, number, "one number for each token")
        return array

    def version(self, version: Any) -> int | None:
        if version is None:
            return None
        try:
            found = operator.index(version)
        except TypeError:
            found = -1
        if found < 0 or found > 1 << 62:
            raise self.fault(
                f"policy_version must be a whole number, 0 or more; got {version!r}",
                "policy_version",
                None,
                "the number of the weights that generated this, such as the trainer's step",
            )
        return found


def _token_counts(response: Any, mask: NDArray[np.uint8] | None) -> tuple[int, int] | None:
    """(tokens, those that the policy wrote) of a response; None where they are not known before it is encoded."""
    if isinstance(response, np.ndarray):
        return len(response), len(response) if mask is None else int(mask.sum())
    if isinstance(response, str):
        return None
    counts = [(len(turn["token_ids"]), turn["role"]) for turn in response if turn.get("token_ids") is not None]
    if len(counts) < len(response):
        return None
    return sum(count for count, _ in counts), sum(count for count, role in counts if role == "assistant")


def _as_array(value: Any) -> NDArray[Any]:
    """An array, list or tensor of any library as an array."""
    if hasattr(value, "detach"):  # a tensor of torch's, which may need gradients or lie on a device
        value = value.detach().cpu()
        if "bfloat16" in str(value.dtype):
            value = value.float()
    try:
        return np.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"a {type(value).__name__} is no row of numbers: {error}") from None


def _kind(value: Any) -> str:
    return (
        repr(value) if isinstance(value, int | float | str | None) and len(repr(value)) < 40 else type(value).__name__
    )


# Files

_DTYPES: dict[int, Any] = {
    1: np.dtype("<i4"),
    2: np.dtype("<f4"),
    3: np.dtype("u1"),
    4: np.dtype("<i8"),
    5: np.dtype("<f8"),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


def encode_content(content: Content, ordinal: int) -> bytes:
    try:
        return _encoder.encode(content)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise SampleError(
            f"this group holds something that cannot be written: {error}",
            ordinal=ordinal,
            column="responses",
            remedy="text, numbers, lists, dicts and arrays",
        ) from None


def decode_content(payload: bytes, group_size: int, **where: Any) -> Content:
    """The content of a group, with everything in it checked; a StoreError says `where` it is not."""
    try:
        content = _decoder.decode(payload)
        _check_read(content, group_size)
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
        raise StoreError(
            "this group cannot be read", **where, reason=str(error), remedy="restore the folder from a copy"
        ) from None
    return content


def _to_bytes(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if hasattr(value, "detach"):
        value = _as_array(value)
    if isinstance(value, np.ndarray) and value.ndim == 1:
        code = _CODES.get(value.dtype.newbyteorder("<"))
        if code is not None:
            return msgspec.msgpack.Ext(code, value.astype(_DTYPES[code], copy=False).tobytes())
    raise TypeError(f"a {type(value).__name__} of this kind")


def _from_bytes(code: int, data: memoryview) -> NDArray[Any]:
    dtype = _DTYPES.get(code)
    if dtype is None or len(data) % dtype.itemsize:
        raise ValueError(f"an array of an unknown kind ({code}) or size ({len(data)} bytes)")
    return np.frombuffer(data, dtype).copy()


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_bytes)
_decoder = msgspec.msgpack.Decoder(Content, ext_hook=_from_bytes)


def _check_read(content: Content, group_size: int) -> None:
    if content.format != _FORMAT:
        raise ValueError(f"it has format {content.format}, and this batchwright reads format {_FORMAT}")
    for name in ("responses", "rewards", "response_mask", *PER_TOKEN):
        column = getattr(content, name)
        if column is None:
            continue
        if len(column) != group_size:
            raise ValueError(f"{len(column)} {name} for a group of {group_size}")
        for value in column:
            if not _can_be(name, value):
                raise ValueError(f"{name} holds a {type(value).__name__} that cannot be there")


def _can_be(name: str, value: Any) -> bool:
    dtype = value.dtype if isinstance(value, np.ndarray) else None
    if name == "responses":
        return isinstance(value, str) or dtype == np.int32 or (isinstance(value, list) and all(map(_is_turn, value)))
    if name == "response_mask":
        return dtype == np.uint8
    return dtype == np.float32 or (name == "rewards" and isinstance(value, float) and math.isfinite(value))


def _is_turn(turn: Any) -> bool:
    if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
        return False
    ids = turn.get("token_ids")
    return ids is None or (isinstance(ids, np.ndarray) and ids.dtype == np.int32)
