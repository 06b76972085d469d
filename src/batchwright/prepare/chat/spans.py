"""Spans: the role, the turn and the part of each character and token of a rendered conversation.

A chat template renders a conversation to one text. Spans tile that text, and later its tokens. So a role, a turn or a
loss mask is a lookup under any policy.

Template text between two messages belongs to one of them. The end-of-turn marker and the blanks after it belong to the
message before, and the rest to the message after. Text that belongs to no message (BOS, a system message that the
template adds, a generation prompt at the end) has turn -1 and the role "template".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["END", "ROLES", "SPAN_DTYPE", "TEMPLATE", "TEXT", "Encoded", "Rendered", "TextSpan"]

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
