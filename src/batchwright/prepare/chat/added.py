"""Where the names of a tokenizer's added tokens are in a text, and which of them a template itself has written."""

from __future__ import annotations

import re
import unicodedata
from typing import Any

from batchwright.prepare.chat.spans import Rendered
from batchwright.prepare.tiktoken_encoder import any_of

__all__ = ["MOST_KEPT_GAPS", "AddedTokens"]

MOST_KEPT_GAPS = 4096
"""Texts between messages that are remembered. A template has few; one that writes a date, or counts, has many."""

_ALSO_OF_WORDS = frozenset(
    map(chr, (0x200C, 0x200D, *range(0x24B6, 0x24EA), *range(0x1F130, 0x1F14A), *range(0x1F150, 0x1F16A)))
) | frozenset(map(chr, range(0x1F170, 0x1F18A)))


class AddedTokens:
    """Finds the added tokens of a tokenizer. Of names that overlap, the first counts, and of these the longest."""

    def __init__(self, added: dict[int, Any]) -> None:
        self.tokens: dict[Any, tuple[int, Any]] = {
            token.content: (number, token) for number, token in added.items() if token.content
        }
        tokens = [token for _, token in self.tokens.values()]
        self.special: frozenset[Any] = frozenset(token.content for token in tokens if token.special)
        self.any_special: re.Pattern[str] | None = any_of(self.special)
        self._any = any_of(token.content for token in tokens)
        # `tokenizers` looks for these one after the other: the second kind after its normalizer.
        self.others: list[re.Pattern[str] | None] = [
            any_of(token.content for token in tokens if not token.special and token.normalized == normalized)
            for normalized in (False, True)
        ]
        self._gaps: dict[str, tuple[tuple[int, str], ...]] = {}

    def in_template(self, rendered: Rendered) -> list[tuple[int, str]]:
        """(start, name) of the special tokens that the template itself has written."""
        text, at, found = rendered.text, 0, []
        for start, stop in (*rendered.said, (len(text), len(text))):
            if at < start:
                found += [(at + mark, name) for mark, name in self.in_gap(text[at:start])]
            at = stop
        return [(mark, name) for mark, name in found if self._stands_alone(text, mark, name)]

    def _stands_alone(self, text: str, start: int, name: str) -> bool:
        beside = text[max(start - 1, 0) : start] + text[start + len(name) : start + len(name) + 1]
        return not self.tokens[name][1].single_word or not any(map(_is_of_a_word, beside))

    def in_gap(self, gap: str) -> tuple[tuple[int, str], ...]:
        """(start, name) of the special tokens in what a template writes between two messages."""
        known = self._gaps.get(gap)
        if known is None:
            matches = self._any.finditer(gap) if self._any else ()
            known = tuple((match.start(), match[0]) for match in matches if match[0] in self.special)
            if len(self._gaps) < MOST_KEPT_GAPS:
                self._gaps[gap] = known
        return known


def _is_of_a_word(character: str) -> bool:
    r"""`\w` as `tokenizers` means it beside a single word: with marks and circled letters, unlike Python's."""
    kind = unicodedata.category(character)
    return kind[0] in "LM" or kind in ("Nd", "Nl", "Pc") or character in _ALSO_OF_WORDS
