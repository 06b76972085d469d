"""Spans: the role, the turn and the part of each character and token of a rendered conversation.

A conversation is rendered to one text by a chat template. Spans tile that text, and later its tokens: so a role, a turn
or a loss mask is a lookup, whatever policy asks for it.

Template text around messages belongs to one of them: through the end-of-turn marker and the blanks after it to the
message before, the rest to the message after. What belongs to none (BOS, a system message that the template adds, a
generation prompt at the end) has turn -1 and the role "template".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["END", "ROLES", "SPAN_DTYPE", "TEMPLATE", "TEXT", "Encoded", "Rendered", "TextSpan"]

ROLES = ("template", "system", "developer", "user", "assistant", "tool")
"""What a span's role is a number in. "template" is what belongs to no message."""

TEMPLATE, TEXT, END = 0, 1, 2
"""Parts of a turn: what the template writes around it; what was said (with tool calls and reasoning, also where the
template writes them); the end-of-turn marker after it, which a model must learn to give."""

SPAN_DTYPE = np.dtype(
    [("stop", "<i4"), ("turn", "<i2"), ("role", "u1"), ("part", "u1"), ("side", "u1"), ("weight", "<f4")]
)
"""A span of tokens, as a store keeps it. `stop` counts tokens of the document; a span starts where the one before it
stops. `turn` is the number of the message, -1 for none. `side` is 1 for the rejected answer of a preference pair.
`weight` is what the message itself asked for ("weight", or "train"), NaN where it said nothing."""


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
    """A conversation as its template writes it."""

    text: str
    spans: tuple[TextSpan, ...]
    """Tile the text, in order; none is empty."""
    said: tuple[tuple[int, int], ...]
    """Characters [start, stop) that came out of messages (or tool definitions), in order, apart from each other: the
    names of special tokens mean nothing in there. All other text is the template's own."""


class Encoded(NamedTuple):
    """A conversation as tokens."""

    tokens: NDArray[Any]
    spans: NDArray[Any]
    """Of SPAN_DTYPE; tile the tokens, in order; none is empty."""

    def fields(self) -> dict[str, NDArray[Any]]:
        """The spans, field by field."""
        return {name: self.spans[name] for name in SPAN_DTYPE.names or ()}
