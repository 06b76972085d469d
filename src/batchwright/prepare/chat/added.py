"""The added tokens of a tokenizer: finding their names in a text, and telling the template's from the messages'."""

from __future__ import annotations

import re
from typing import Any

from batchwright.prepare.chat.spans import Rendered
from batchwright.prepare.tiktoken_encoder import any_of

__all__ = ["MOST_KEPT_GAPS", "AddedTokens"]

MOST_KEPT_GAPS = 4096
"""The number of texts between messages to cache. Few occur, unless a template writes dates or counts."""


class AddedTokens:
    """Finds the added tokens of a tokenizer. If names overlap, the first one counts; at one place, the longest one."""

    def __init__(self, added: dict[int, Any]) -> None:
        self.tokens: dict[Any, tuple[int, Any]] = {
            token.content: (number, token) for number, token in added.items() if token.content
        }
        tokens = [token for _, token in self.tokens.values()]
        self.special: frozenset[Any] = frozenset(token.content for token in tokens if token.special)
        self.any_special: re.Pattern[str] = any_of(self.special)
        self._any = any_of(token.content for token in tokens)
        # `tokenizers` searches for the two kinds in turn: the second kind after its normalizer.
        self.others: list[re.Pattern[str]] = [
            any_of(token.content for token in tokens if not token.special and token.normalized == normalized)
            for normalized in (False, True)
        ]
        self._gaps: dict[str, tuple[tuple[int, str], ...]] = {}

    def in_template(self, rendered: Rendered) -> list[tuple[int, str]]:
        """(start, name) of the special tokens that the template itself has written."""
        text, at = rendered.text, 0
        found: list[tuple[int, str]] = []
        for start, stop in (*rendered.said, (len(text), len(text))):
            if at < start:
                found += [(at + mark, name) for mark, name in self.in_gap(text[at:start])]
            at = stop
        return found

    def in_gap(self, gap: str) -> tuple[tuple[int, str], ...]:
        """(start, name) of the special tokens in the template's text between two messages."""
        known = self._gaps.get(gap)
        if known is None:
            known = tuple((match.start(), match[0]) for match in self._any.finditer(gap) if match[0] in self.special)
            if len(self._gaps) < MOST_KEPT_GAPS:
                self._gaps[gap] = known
        return known
