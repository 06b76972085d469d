"""Spans of tokens from spans of text. Every token belongs to one of the spans that it overlaps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.prepare.chat.spans import END, ROLES, SPAN_DTYPE, TEMPLATE, TEXT, TextSpan

__all__ = ["SpanTable", "token_stops"]

_RANK_OF_PART = np.zeros(3, np.int64)
_RANK_OF_PART[[TEMPLATE, END, TEXT]] = 0, 1, 2
_ASSISTANT = ROLES.index("assistant")


def token_stops(
    starts: NDArray[Any], ends: NDArray[Any], borders: NDArray[Any], ranks: NDArray[Any]
) -> NDArray[np.int64]:
    """The number of tokens up to the end of each span.

    Token i covers [starts[i], ends[i]) of the text. Span s ends at borders[s]. All three arrays are ascending. A token
    that covers several spans belongs to the one with the highest rank, or the last of these if ranks are equal.

    >>> starts, ends = np.array([0, 3, 5]), np.array([3, 5, 9])          # "use", "r:", " Hi!"
    >>> token_stops(starts, ends, np.array([6, 9]), np.array([0, 2]))    # "user: " by the template, then "Hi!"
    array([2, 3])
    """
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

    @property
    def ranks(self) -> NDArray[np.int64]:
        """Ranks: messages above the template, content above the end of turn, and the model's words above all others.

        So every token that overlaps an answer is trained, as with transformers' `return_assistant_tokens_mask`.
        """
        ranks: NDArray[np.int64] = _RANK_OF_PART[self.part]
        ranks += 2 * ((self.role == _ASSISTANT) & (ranks > 0))
        return ranks

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
