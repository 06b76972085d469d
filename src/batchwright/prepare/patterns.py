r"""Split patterns whose meaning is the same in every regex engine: a small grammar, and what can be known from it.

Allowed are literal characters, classes (`\s`, `\p{L}`, `[^\r\n]`), alternation, greedy quantifiers, `(?:...)`,
`(?!...)`, and `(?i:...)` around words that follow an apostrophe. Engines agree on how these are put together. What a
class holds they may still see differently: classes are listed here and compared elsewhere, character by character.
Refused are, for example, anchors, `.`, lazy quantifiers, and `{1,3}+`: possessive in some engines, a repeat in others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Unproved",
    "classes_of",
    "matched_alone",
    "most_folded_letters",
    "parse_pattern",
]

_ESCAPED_CLASSES = "sSdDwW"
_ESCAPED_CONTROLS = {"r": "\r", "n": "\n", "t": "\t"}
_ESCAPED_LITERALS = r"\.+*?()|[]{}^$-/"
_SPECIAL = r"\.+*?()|[]{}^$"
_QUANTIFIER = re.compile(r"[?*+]|\{(\d{1,3})(,(\d{1,3})?)?\}")
_FOLDED = re.compile(r"\(\?i:([a-z'\[\]|]+)\)")
_WORD = re.compile(r"('?)([a-z]+|\[[a-z]+\])")


class Unproved(Exception):
    """What is not known to give the same ids. The message is the reason, in words."""


@dataclass(frozen=True, slots=True)
class One:
    """Exactly one character: a literal, or any of a class."""

    source: str
    literal: str | None = None


@dataclass(frozen=True, slots=True)
class Repeat:
    node: Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Series:
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Not:
    """`(?!...)`: what follows is not this."""

    node: Node


@dataclass(frozen=True, slots=True)
class Folded:
    """`(?i:...)`: words of ASCII letters in any case. An apostrophe stands before their letters."""

    most_letters: int


Node = One | Repeat | Series | Choice | Not | Folded


def parse_pattern(pattern: str) -> Node:
    """The pattern as a tree. Raises Unproved, with the reason, for what the grammar does not have.

    >>> sorted(classes_of(parse_pattern(r" ?\\p{L}+|[^\\s\\p{L}]+|\\s+(?!\\S)|\\s+")))
    ['[^\\\\s\\\\p{L}]', '\\\\S', '\\\\p{L}', '\\\\s']
    >>> parse_pattern(r"\\p{N}{1,3}+")
    Traceback (most recent call last):
    batchwright.prepare.patterns.Unproved: two quantifiers in a row in the split pattern, at character 10
    """
    node, end = _choice(pattern, 0)
    if end != len(pattern):
        raise _refused("a ')' too many", end)
    for branch in node.nodes if isinstance(node, Choice) else (node,):
        if can_be_empty(branch):
            raise Unproved("the split pattern can match nothing")
    return node


def _refused(what: str, at: int) -> Unproved:
    return Unproved(f"{what} in the split pattern, at character {at}")


def _choice(pattern: str, at: int) -> tuple[Node, int]:
    branches = []
    while True:
        branch, at = _series(pattern, at)
        branches.append(branch)
        if pattern[at : at + 1] != "|":
            return (branches[0] if len(branches) == 1 else Choice(tuple(branches))), at
        at += 1


def _series(pattern: str, at: int) -> tuple[Node, int]:
    nodes: list[Node] = []
    while at < len(pattern) and pattern[at] not in "|)":
        node, after = _atom(pattern, at, after_apostrophe=bool(nodes) and nodes[-1] == One("'", "'"))
        if found := _QUANTIFIER.match(pattern, after):
            node, at = _repeated(node, found, at)
            if _QUANTIFIER.match(pattern, at):
                raise _refused("two quantifiers in a row", at)
        else:
            at = after
        nodes.append(node)
    return (nodes[0] if len(nodes) == 1 else Series(tuple(nodes))), at


def _repeated(node: Node, found: re.Match[str], at: int) -> tuple[Node, int]:
    if can_be_empty(node):
        raise _refused("a quantifier over what can match nothing", at)
    simple = {"?": (0, 1), "*": (0, None), "+": (1, None)}
    if found[0] in simple:
        least, most = simple[found[0]]
    else:
        least = int(found[1])
        most = least if found[2] is None else None if found[3] is None else int(found[3])
    if most is not None and (most < least or most == 0):
        raise _refused("a quantifier that means different things", found.start())
    return Repeat(node, least, most), found.end()


def _atom(pattern: str, at: int, *, after_apostrophe: bool) -> tuple[Node, int]:
    if pattern.startswith(("(?:", "(?!"), at):
        node, end = _choice(pattern, at + 3)
        if pattern[end : end + 1] != ")":
            raise _refused("a group without its end", at)
        return (Not(node) if pattern[at + 2] == "!" else node), end + 1
    if pattern.startswith("(?i:", at):
        return _folded(pattern, at, after_apostrophe=after_apostrophe)
    if pattern[at] == "[":
        return _class(pattern, at)
    if pattern[at] == "\\":
        return _escape(pattern, at)
    if pattern[at] in _SPECIAL:
        raise _refused(f"{pattern[at : at + 3]!r}, which is not one of the plain elements", at)
    return One(pattern[at], pattern[at]), at + 1


def _escape(pattern: str, at: int) -> tuple[One, int]:
    name = pattern[at + 1 : at + 2]
    if name and name in _ESCAPED_CLASSES:
        return One(pattern[at : at + 2]), at + 2
    if name in _ESCAPED_CONTROLS:
        return One(pattern[at : at + 2], _ESCAPED_CONTROLS[name]), at + 2
    if name and name in _ESCAPED_LITERALS:
        return One(pattern[at : at + 2], name), at + 2
    if found := re.compile(r"\\[pP]\{[A-Za-z]+\}").match(pattern, at):
        return One(found[0]), found.end()
    raise _refused(f"{pattern[at : at + 2]!r}, which is not one of the plain elements", at)


def _class(pattern: str, at: int) -> tuple[One, int]:
    start, at = at, at + 1
    at += pattern[at : at + 1] == "^"
    first = at
    while pattern[at : at + 1] != "]" or at == first:
        low, at = _member(pattern, at, start)
        if pattern[at : at + 1] == "-":
            high, at = _member(pattern, at + 1, start)
            if low.literal is None or high.literal is None or low.literal > high.literal:
                raise _refused("a range that is none", start)
    return One(pattern[start : at + 1]), at + 1


def _member(pattern: str, at: int, start: int) -> tuple[One, int]:
    if at >= len(pattern) or pattern[at] == "]":
        raise _refused("a class without its end", start)
    if pattern[at] == "\\":
        return _escape(pattern, at)
    if pattern[at] in "[&~^-":  # set operations, in some engines
        raise _refused(f"{pattern[at]!r} inside a class", at)
    return One(pattern[at], pattern[at]), at + 1


def _folded(pattern: str, at: int, *, after_apostrophe: bool) -> tuple[Folded, int]:
    found = _FOLDED.match(pattern, at)
    words = [_WORD.fullmatch(word) for word in found[1].split("|")] if found else []
    # What folds to a letter is rare right after an apostrophe, and common elsewhere: only there it can be looked for.
    if not found or not all(word and bool(word[1]) != after_apostrophe for word in words):
        raise _refused("'(?i:' around something else than words with an apostrophe", at)
    letters = [1 if word[2].startswith("[") else len(word[2]) for word in words if word]
    return Folded(max(letters)), found.end()


def _children(node: Node) -> tuple[Node, ...]:
    if isinstance(node, Series | Choice):
        return node.nodes
    return (node.node,) if isinstance(node, Repeat | Not) else ()


def walk(node: Node) -> Iterator[Node]:
    yield node
    for child in _children(node):
        yield from walk(child)


def can_be_empty(node: Node) -> bool:
    if isinstance(node, Series):
        return all(map(can_be_empty, node.nodes))
    if isinstance(node, Choice):
        return any(map(can_be_empty, node.nodes))
    if isinstance(node, Repeat):
        return node.least == 0 or can_be_empty(node.node)
    return isinstance(node, Not)


def classes_of(node: Node) -> set[str]:
    """The classes of a pattern, as they are written: what engines may see differently."""
    return {part.source for part in walk(node) if isinstance(part, One) and part.literal is None}


def most_folded_letters(node: Node) -> int:
    """Letters of the longest word that is matched in any case; 0 where there is none."""
    return max((part.most_letters for part in walk(node) if isinstance(part, Folded)), default=0)


def matched_alone(node: Node, members: Callable[[str], NDArray[np.bool_]]) -> NDArray[np.bool_]:
    """Which characters the pattern matches wherever they stand: by a branch that takes one and looks no further."""
    found = np.zeros(0x110000, bool)
    if isinstance(node, One):
        if node.literal is None:
            return members(node.source)
        found[ord(node.literal)] = True
        return found
    if isinstance(node, Repeat):
        return matched_alone(node.node, members) if node.least <= 1 else found
    if isinstance(node, Choice):
        for part in node.nodes:
            found |= matched_alone(part, members)
    if isinstance(node, Series) and not any(isinstance(part, Not) for part in walk(node)):
        for number, part in enumerate(node.nodes):
            if all(can_be_empty(other) for other in (*node.nodes[:number], *node.nodes[number + 1 :])):
                found |= matched_alone(part, members)
    return found
