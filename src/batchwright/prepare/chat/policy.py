"""Loss policies: the trained tokens of a conversation, as a lookup over its spans. Any store takes any policy.

"assistant"                 the words of assistants, and their end of turn (default)
"last"                      the last assistant turn alone
"all"                       every token, the template's too
"user+assistant"            the words of these roles, and their end of turn

A message's own "weight" or "train" counts under every policy but "all".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.base.errors import SpecError
from batchwright.base.words import suggest
from batchwright.prepare.chat.spans import END, ROLES, TEXT

__all__ = ["LossPolicy"]

_ASSISTANT = ROLES.index("assistant")


@dataclass(frozen=True, slots=True)
class LossPolicy:
    """A loss policy. A plan keeps its `str`, which `parse` reads."""

    what: str = "assistant"
    """"all", "last", or roles joined by +."""
    end_of_turn: bool = True

    @classmethod
    def of(cls, loss: str | Sequence[str], end_of_turn: bool = True) -> LossPolicy:
        """The policy of a user's setting."""
        if loss == "all":
            return cls("all")
        if loss == "last":
            return cls("last", end_of_turn)
        asked = loss.split("+") if isinstance(loss, str) else loss
        if not isinstance(asked, Sequence) or not asked:
            raise _unknown(loss)
        for role in asked:
            if role not in ROLES[1:]:
                raise _unknown(role)
        return cls("+".join(role for role in ROLES if role in asked), end_of_turn)

    @classmethod
    def parse(cls, text: str) -> LossPolicy:
        """
        >>> LossPolicy.parse("user+assistant, without end of turn")
        LossPolicy(what='user+assistant', end_of_turn=False)
        """
        loss, _, ends = text.partition(", ")
        return cls.of(loss, not ends)

    def __str__(self) -> str:
        return self.what if self.end_of_turn else f"{self.what}, without end of turn"

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


def _unknown(loss: Any) -> SpecError:
    names = ("assistant", "last", "all", *ROLES[1:])
    remedy = f"'assistant', 'last', 'all', or roles such as 'user+assistant', of {', '.join(ROLES[1:])}"
    if near := suggest(str(loss), names):
        remedy = f"perhaps {near!r}"
    return SpecError(f"loss={loss!r} is no policy", parameter="loss", remedy=remedy)
