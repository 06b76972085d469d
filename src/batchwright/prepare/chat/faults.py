"""The error for one conversation, raised in every stage of chat. A bake turns it into the error of a row."""

from __future__ import annotations

from typing import Any

__all__ = ["ChatError"]


class ChatError(Exception):
    """A conversation that cannot be used, with the reason.

    `kind` is short and the same for all conversations with this fault. Reports count by it. `reason` has the details.

    >>> print(ChatError("unknown role", "role 'usr'", turn=2, remedy="'user'"))
    unknown role: role 'usr' (message 2)
    """

    remedy: str
    turn: int | None
    reason: str
    kind: str

    def __init__(self, kind: str, reason: str = "", *, turn: int | None = None, remedy: str = "") -> None:
        super().__init__(kind)
        self.kind, self.reason, self.turn, self.remedy = kind, reason, turn, remedy
        """`turn` is the number of the message, from 0; None if the fault is not in a single message."""

    def __str__(self) -> str:
        text = f"{self.kind}: {self.reason}" if self.reason else self.kind
        return text if self.turn is None else f"{text} (message {self.turn})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.kind, self.reason, self.turn, self.remedy)  # it crosses from bake workers


def _rebuild(kind: str, reason: str, turn: int | None, remedy: str) -> ChatError:
    return ChatError(kind, reason, turn=turn, remedy=remedy)
