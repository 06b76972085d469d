r"""Split patterns with the same meaning in tiktoken and `tokenizers`: those of GPT-2, GPT-4 and later.

A pattern is a choice of branches, and every branch must be in the list here. Branches are made of literals, classes and
greedy quantifiers, which both engines combine in the same way. A class may hold other characters in the other engine
(their Unicode versions may differ), so classes are compared elsewhere, character by character. There must be a branch
for each kind of character, because tiktoken drops text that its pattern does not match.
"""

from __future__ import annotations

import re

__all__ = ["Unproved", "check_pattern", "classes_of", "ignores_case"]

_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BRANCHES: dict[str, tuple[str, ...]] = {
    "": (_SUFFIX, r"'(?i:[sdmt]|ll|ve|re)", r"'(?:[sdmt]|ll|ve|re)", *_SUFFIX[4:-1].split("|")),
    "letters": (r" ?\p{L}+", r"[^\r\n\p{L}\p{N}]?\p{L}+"),
    "letters marks": (
        r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
        *(
            rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{end}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{end}"
            for end in (f"{_SUFFIX}?", "")
        ),
    ),
    "numbers": (r" ?\p{N}+", r"\p{N}+", r"\p{N}", r"\p{N}{1,3}"),
    "others marks": tuple(rf" ?[^\s\p{{L}}\p{{N}}]+{after}" for after in ("", r"[\r\n]*", r"[\r\n/]*")),
    "others": tuple(rf" ?[^\s\p{{L}}\p{{M}}\p{{N}}]+{after}" for after in ("", r"[\r\n]*", r"[\r\n/]*")),
    "blanks": (r"\s+", r"\s"),
    " ": (r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+(?!\S)"),
}
"""The kinds of characters that each branch matches, alone and before any text."""
_KINDS = {branch: set(kinds.split()) for kinds, branches in _BRANCHES.items() for branch in branches}
_NEEDED = {"letters", "marks", "numbers", "others", "blanks"}


class Unproved(Exception):
    """The error for a tokenizer that is not proved to give the same ids. The message is the reason."""


def check_pattern(pattern: str) -> None:
    """Raise Unproved unless a pattern is made of known branches that match every character.

    >>> check_pattern(r"'s|'t| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+")
    >>> check_pattern(r"\\w+|\\W+")
    Traceback (most recent call last):
    batchwright.prepare.split_patterns.Unproved: a split pattern of its own, from '\\\\w+|\\\\W+' on
    """
    rest = f"|{pattern}"
    kinds: set[str] = set()
    while rest:
        fitting = (name for name in _KINDS if rest.startswith(f"|{name}") and rest[len(name) + 1 :][:1] in ("", "|"))
        branch = max(fitting, key=len, default=None)
        if branch is None:
            raise Unproved(f"a split pattern of its own, from {rest[1:41]!r} on")
        kinds |= _KINDS[branch]
        rest = rest[len(branch) + 1 :]
    if not kinds >= _NEEDED:
        raise Unproved(f"a split pattern without a branch for {', '.join(sorted(_NEEDED - kinds))}")


def classes_of(pattern: str) -> list[str]:
    """The classes of a known pattern, as written in it.

    >>> classes_of(r" ?\\p{L}+|[^\\s\\p{L}]+|\\s+(?!\\S)|\\s+")
    ['[^\\\\s\\\\p{L}]', '\\\\S', '\\\\p{L}', '\\\\s']
    """
    return sorted(set(re.findall(r"\[[^\]]+\]|\\p\{\w+\}|\\[sS]", pattern)))


def ignores_case(pattern: str) -> bool:
    return "(?i:" in pattern
