"""Spans: the role, turn and part of each character and token of a rendered conversation, and loss policies over them.

A chat template renders a conversation to one text. Spans tile that text, and later its tokens. So a role, a turn or a
loss mask is a lookup under any policy.

Template text between two messages belongs to one of them. The end-of-turn marker and the blanks after it belong to the
message before, and the rest to the message after. Text that belongs to no message (BOS, a system message that the
template adds, a generation prompt at the end) has turn -1 and the role "template".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchwright.base.errors import SpecError
from batchwright.base.words import suggest

__all__ = ["END", "ROLES", "SPAN_DTYPE", "TEMPLATE", "TEXT", "Encoded", "LossPolicy", "Rendered", "TextSpan"]

ROLES = ("template", "system", "developer", "user", "assistant", "tool")
"""The roles, by a span's role number. Text with the role "template" belongs to no message."""

TEMPLATE, TEXT, END = 0, 1, 2
"""Parts of a turn: the template's text around it; the words of the message, with tool calls and reasoning, even if the
template writes them; and the end-of-turn marker after it, which a model must learn to write."""

SPAN_DTYPE = np.dtype(
    [("stop", "<i4"), ("turn", "<i2"), ("role", "u1"), ("part", "u1"), ("side", "u1"), ("weight", "<f4")]
)
"""A span of tokens, as a store keeps it. `stop` counts tokens of the document; a span starts where the one before it
stops. `turn` is the number of the message, -1 for none. `side` is 1 for the rejected answer of a preference pair.
`weight` is the message's own "weight" or "train", NaN if it has neither."""


class TextSpan(NamedTuple):
    """Characters [start, stop) of a rendered text."""

    start: int
    stop: int
    role: int
    part: int
    turn: int
    weight: float = float("nan")


@dataclass(frozen=True, slots=True)
class Rendered:
    """The text of a conversation, with its spans."""

    text: str
    spans: tuple[TextSpan, ...]
    """Spans that tile the text, in order; none is empty."""
    said: tuple[tuple[int, int], ...]
    """Characters [start, stop) that come from messages or tool definitions, in order and disjoint. The names of special
    tokens mean nothing there. All other text is the template's own."""


class Encoded(NamedTuple):
    """A conversation as tokens."""

    tokens: NDArray[Any]
    spans: NDArray[Any]
    """Spans of SPAN_DTYPE. They tile the tokens, in order; none is empty."""

    def fields(self) -> dict[str, NDArray[Any]]:
        """The fields of the spans, as columns."""
        return {name: self.spans[name] for name in SPAN_DTYPE.names or ()}


# Spans of tokens. Every token belongs to one of the spans that it overlaps.

_RANK_OF_PART = np.zeros(3, np.int64)
_RANK_OF_PART[[TEMPLATE, END, TEXT]] = 0, 1, 2
_ASSISTANT = ROLES.index("assistant")


class SpanTable:
    """The spans of many conversations as columns. One NumPy call for all is faster than one for each conversation."""

    def __init__(self, spans: Sequence[Sequence[TextSpan]]) -> None:
        self.num_spans: NDArray[np.int64] = np.array([len(some) for some in spans], np.int64)
        every = list(chain.from_iterable(spans))
        self.borders: NDArray[np.int64] = np.array([span[1] for span in every], np.int64)
        """Where each ends, in characters of its conversation."""
        self.role: NDArray[np.uint8] = np.array([span[2] for span in every], np.uint8)
        self.part: NDArray[np.uint8] = np.array([span[3] for span in every], np.uint8)
        self.turn: NDArray[np.int16] = np.array([span[4] for span in every], np.int16)
        self.weight: NDArray[np.float32] = np.array([span[5] for span in every], np.float32)

    def token_stops(self, starts: NDArray[Any], ends: NDArray[Any], borders: NDArray[Any]) -> NDArray[np.int64]:
        """The number of tokens up to the end of each span.

        Token i covers [starts[i], ends[i]) of the text. Span s ends at borders[s]. All three arrays are ascending. Of
        several spans, a token belongs to the last of the highest rank: messages above the template, content above the
        end of turn, and the model's words above all others. So every token that overlaps an answer is trained, as with
        transformers' `return_assistant_tokens_mask`.

        >>> spans = [TextSpan(0, 6, ROLES.index("user"), TEMPLATE, 0), TextSpan(6, 9, ROLES.index("user"), TEXT, 0)]
        >>> starts, ends = np.array([0, 3, 5]), np.array([3, 5, 9])          # "use", "r:", " Hi!"
        >>> SpanTable([spans]).token_stops(starts, ends, np.array([6, 9]))   # "user: " by the template, then "Hi!"
        array([2, 3])
        """
        ranks = _RANK_OF_PART[self.part]
        ranks += 2 * ((self.role == _ASSISTANT) & (ranks > 0))
        stops = np.searchsorted(ends, borders, "right")
        begins = np.append(starts, np.iinfo(np.int64).max)[stops]  # the first token that ends after the border
        crossed = np.flatnonzero(begins < borders).tolist()
        at = 0
        while at < len(crossed):
            first, token = crossed[at], stops[crossed[at]]
            while at < len(crossed) and stops[crossed[at]] == token:
                at += 1
            last = crossed[at - 1] + 1  # the token covers spans first to last
            owner = max(range(first, last + 1), key=lambda span: (ranks[span], span))
            stops[owner:last] = token + 1
        return stops.astype(np.int64, copy=False)

    def of_tokens(self, stops: NDArray[np.int64], num_tokens: NDArray[np.int64]) -> list[NDArray[Any]]:
        """The spans of each conversation as a store keeps them, without spans that have no token.

        `stops` count tokens of all conversations; `num_tokens` is how many each has.
        """
        sizes = np.diff(stops, prepend=0)
        begins = np.cumsum(num_tokens) - num_tokens
        table = np.zeros(len(stops), SPAN_DTYPE)
        table["stop"] = stops - np.repeat(begins, self.num_spans)
        table["turn"], table["role"], table["part"], table["weight"] = self.turn, self.role, self.part, self.weight
        kept = np.cumsum(np.append(0, sizes > 0))[np.append(0, np.cumsum(self.num_spans))].tolist()
        table = table[sizes > 0]
        return [table[kept[number] : kept[number + 1]] for number in range(len(num_tokens))]


# Loss policies

_WITHOUT_END = "without end of turn"


@dataclass(frozen=True, slots=True)
class LossPolicy:
    """The trained tokens of a conversation, as a lookup over its spans. A plan keeps the policy's `str`.

    "assistant"                 the words of assistants, and their end of turn (default)
    "last"                      the last assistant turn alone
    "all"                       every token, the template's too
    "user+assistant"            the words of these roles, and their end of turn
    "last, without end of turn" the words alone

    A message's own "weight" or "train" counts under every policy but "all".
    """

    what: str = "assistant"
    """"all", "last", or roles joined by +."""
    end_of_turn: bool = True

    @classmethod
    def of(cls, loss: str | Sequence[str]) -> LossPolicy:
        """The policy of a user's setting, which may be the `str` of another policy.

        >>> LossPolicy.of("user+assistant, without end of turn")
        LossPolicy(what='user+assistant', end_of_turn=False)
        """
        what, asked, ends = loss, loss, ""
        if isinstance(loss, str):
            what, _, ends = loss.partition(", ")
            asked = what.split("+")
        if not isinstance(asked, Sequence) or not asked or ends not in ("", _WITHOUT_END):
            raise _unknown_policy(loss)
        if what == "all":
            return cls("all")
        if what == "last":
            return cls("last", not ends)
        for role in asked:
            if role not in ROLES[1:]:
                raise _unknown_policy(role)
        return cls("+".join(role for role in ROLES if role in asked), not ends)

    def __str__(self) -> str:
        return self.what if self.end_of_turn else f"{self.what}, {_WITHOUT_END}"

    @property
    def trains_answers(self) -> bool:
        return self.what in ("all", "last") or "assistant" in self.what.split("+")

    def weights(self, starts: NDArray[np.integer], spans: dict[str, NDArray[Any]]) -> NDArray[np.float32]:
        """The weight of each span's tokens. Document d has the spans [starts[d], starts[d + 1])."""
        if self.what == "all":
            return np.ones(len(spans["stop"]), np.float32)
        role, part = spans["role"], spans["part"]
        if self.what == "last":
            learned = _is_last_turn(starts, spans)
        else:
            learned = np.isin(role, [ROLES.index(name) for name in self.what.split("+")])
        asked = spans["weight"]
        weight = np.where(np.isnan(asked), learned.astype(np.float32), asked)
        is_said = part == TEXT
        if self.end_of_turn:
            is_said |= part == END
        return np.where(is_said, weight, 0).astype(np.float32)


def _is_last_turn(starts: NDArray[np.integer], spans: dict[str, NDArray[Any]]) -> NDArray[np.bool_]:
    """Whether a span belongs to the last assistant turn of its document, or of its side in a pair."""
    number = np.repeat(np.arange(len(starts) - 1), np.diff(starts)) * 2 + spans["side"]
    is_mine = spans["role"] == _ASSISTANT
    last = np.full(2 * (len(starts) - 1), -1, np.int64)
    np.maximum.at(last, number[is_mine], spans["turn"][is_mine].astype(np.int64))
    result: NDArray[np.bool_] = is_mine & (spans["turn"] == last[number])
    return result


def _unknown_policy(loss: Any) -> SpecError:
    names = ("assistant", "last", "all", *ROLES[1:])
    remedy = f"'assistant', 'last', 'all', or roles such as 'user+assistant', of {', '.join(ROLES[1:])}"
    if near := suggest(str(loss), names):
        remedy = f"perhaps {near!r}"
    return SpecError(f"loss={loss!r} is no policy", parameter="loss", remedy=remedy)
