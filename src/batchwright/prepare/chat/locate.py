"""The places of a conversation's strings in its rendered text, found without changing the template.

First method, one render: every string is wrapped in tags of characters that no text has (Unicode noncharacters). If the
tagged text without its tags equals the text, the tags give the place of each string. Second method, for strings that a
template trims, splits or inspects: the text is rendered once more with that string marked by one such character, or
replaced by it. The difference between the two texts is the string's place.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from batchwright.prepare.chat.messages import ChatError

Region = tuple[int, int]
"""Characters [start, stop) of a text."""

_MARK = "\ufdd9"
_DIGITS = "".join(map(chr, range(0xFDE0, 0xFDF0)))
_TO_DIGITS = str.maketrans("0123456789abcdef", _DIGITS)
_FROM_DIGITS = str.maketrans(_DIGITS, "0123456789abcdef")
_TAGGED = re.compile(f"\ufdd0\ufdd1([{_DIGITS}]{{4}})([^\ufdd0]*)\ufdd0\ufdd2\\1")
"""A text between its opening and its closing tag, which both have its number."""
_MAX_LEAVES = 16**4
_NONCHARACTER = re.compile("[\ufdd0-\ufdef]")

_WORD = re.compile(r"[\w.\-]*", re.ASCII)
"""Names, types and ids. Templates compare these with words of their own, so they are changed only on request. No name
of a special token is made of only such characters."""
_MARKUP = re.compile(r"[<\[{]")


class Leaf(NamedTuple):
    """One string of a conversation that a template may print."""

    turn: int
    """The number of its message; -1 in tool definitions."""
    kind: str
    """content, reasoning, call (the name of a function that is called), argument, name, tools, other (of fields that
    only some templates know)."""
    text: str


class Located(NamedTuple):
    """A rendered text, and where each leaf is in it."""

    text: str
    leaves: list[Leaf]
    regions: list[list[Region]]
    """The regions of each leaf: one, several or none."""
    generation: list[Region] | None
    """The regions inside `{% generation %}` blocks; None if the template has no such blocks."""


Swap = Callable[[int, str, str], str]
"""(turn, kind, text) -> the text that the template gets in its place."""
Render = Callable[[dict[str, Any], bool], str]
"""(conversation, whether `{% generation %}` blocks are marked) -> text."""


def plain_conversation(conversation: Mapping[str, Any]) -> dict[str, Any]:
    """A conversation as templates get it: without weights, and with reasoning under both of its usual names."""
    return _mapped(conversation, lambda turn, kind, text: text)


def _with_texts(conversation: Mapping[str, Any], texts: Iterable[str]) -> dict[str, Any]:
    """A plain conversation with other texts for its leaves."""
    rest = iter(texts)
    return _mapped(conversation, lambda turn, kind, text: next(rest))


def _mapped(conversation: Mapping[str, Any], swap: Swap) -> dict[str, Any]:
    """A copy of a conversation with every leaf swapped, in a fixed order."""
    messages = [_mapped_message(turn, message, swap) for turn, message in enumerate(conversation["messages"])]
    tools = conversation.get("tools") or None
    return {"messages": messages, "tools": _mapped_strings(-1, "tools", tools, swap)}


def _mapped_message(turn: int, message: Mapping[str, Any], swap: Swap) -> dict[str, Any]:
    if len(message) == 2:  # nearly always
        return {**message, "content": swap(turn, "content", message["content"])}
    mapped: dict[str, Any] = {}
    for name, value in message.items():
        match name:
            case "role":
                mapped[name] = value
            case "content":
                mapped[name] = swap(turn, "content", value)
            case "weight":
                continue
            case "reasoning_content" | "thinking" | "reasoning":
                mapped[name] = swap(turn, "reasoning", value) if isinstance(value, str) else value
            case "name" | "tool_call_id":
                mapped[name] = _mapped_strings(turn, "name", value, swap)
            case "tool_calls" if value:
                mapped[name] = [_mapped_call(turn, call, swap) for call in value]
            case _:
                mapped |= _mapped_strings(turn, "other", {name: value}, swap)
    if isinstance(mapped.get("reasoning_content"), str):
        mapped["thinking"] = mapped["reasoning_content"]
    return mapped


def _mapped_call(turn: int, call: Mapping[str, Any], swap: Swap) -> dict[str, Any]:
    function = dict(call["function"])
    function["name"] = swap(turn, "call", function["name"])
    function["arguments"] = _mapped_strings(turn, "argument", function.get("arguments", {}), swap)
    mapped = {**call, "function": function}
    if "id" in call:
        mapped["id"] = _mapped_strings(turn, "name", call["id"], swap)
    return mapped


def _mapped_strings(turn: int, kind: str, value: Any, swap: Swap) -> Any:
    if isinstance(value, str) and (kind == "argument" or _may_be_markup(kind, value)):
        return swap(turn, kind, value)
    if isinstance(value, Mapping):
        return {
            _mapped_key(turn, kind, key, swap): _mapped_strings(turn, kind, item, swap) for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_mapped_strings(turn, kind, item, swap) for item in value]
    return value


def _mapped_key(turn: int, kind: str, key: Any, swap: Swap) -> Any:
    if isinstance(key, str) and _may_be_markup(kind, key):
        return swap(turn, kind, key)
    return key


def _may_be_markup(kind: str, text: str) -> bool:
    """Whether a leaf may hold the name of a special token. Other fields are left alone: templates may compare them."""
    if kind == "other":
        return _MARKUP.search(text) is not None
    return not _WORD.fullmatch(text)


def locate(conversation: Mapping[str, Any], render: Render, *, template: str, marks: bool) -> Located:
    """Render a conversation and locate every leaf.

    Raises `ChatError` if the template changes a message so much that its text cannot be told from the template's own.
    """
    leaves: list[Leaf] = []

    def collect(turn: int, kind: str, text: str) -> str:
        leaves.append(Leaf(turn, kind, text))
        return text

    plain = _mapped(conversation, collect)
    for leaf in leaves:
        if found := noncharacter_in(leaf.text):
            raise ChatError(
                "noncharacters in the text",
                f"U+{ord(found):04X} is no character, and is used here to find messages in their rendered text",
                turn=_turn_of(leaf),
                remedy="remove U+FDD0 to U+FDEF from the data",
            )
    text = render(plain, False)
    # Rendered without tags: tags may lead to another branch, with the same text and other marks.
    generation = _generation_of(plain, text, render, template) if marks else None
    # Templates test if a message with tool calls has content, and a tag is some.
    calling = {turn for turn, message in enumerate(conversation["messages"]) if message.get("tool_calls")}
    untaggable = {
        n for n, leaf in enumerate(leaves) if leaf.kind == "content" and leaf.turn in calling and not leaf.text
    }
    regions, unsure = _by_tags(conversation, text, leaves, untaggable, render)
    for n in unsure - untaggable:
        regions[n] = _by_difference(conversation, text, n, leaves, render, template)
    return Located(text, leaves, regions, generation)


def noncharacter_in(text: str) -> str | None:
    if text.isascii() or b"\xef\xb7" not in text.encode("utf-8", "surrogatepass"):
        return None  # U+FDC0 to U+FDFF start with these bytes: much faster than a test of each character
    found = _NONCHARACTER.search(text)
    return found and found[0]


def _turn_of(leaf: Leaf) -> int | None:
    return None if leaf.turn < 0 else leaf.turn


# Tags


def _by_tags(
    conversation: Mapping[str, Any], text: str, leaves: Sequence[Leaf], untaggable: set[int], render: Render
) -> tuple[list[list[Region]], set[int]]:
    """The first method. Returns regions, and the leaves whose regions remain unknown."""
    # Templates inspect leaves with markup (<think>): a second try leaves these untagged.
    marked_up = {n for n, leaf in enumerate(leaves) if _MARKUP.search(leaf.text)}
    # First around the whole leaf; then inside of its blanks, for templates that strip them.
    places = [False, True] if any(map(_has_blanks, leaves)) else [False]
    for skipped in [untaggable, untaggable | marked_up] if marked_up else [untaggable]:
        for is_inside in places:
            found = _tagged(conversation, text, leaves, skipped, is_inside, render)
            if found is not None:
                unsure = {n for n, leaf in enumerate(leaves) if is_inside and _is_unsure(text, leaf, found[n])}
                return found, unsure | skipped
    return [[] for _ in leaves], set(range(len(leaves)))


def _has_blanks(leaf: Leaf) -> bool:
    return leaf.text[:1].isspace() or leaf.text[-1:].isspace()


def _tagged(
    conversation: Mapping[str, Any],
    text: str,
    leaves: Sequence[Leaf],
    skipped: set[int],
    is_inside: bool,
    render: Render,
) -> list[list[Region]] | None:
    """The regions from one render with tags; None if the tags changed the text."""
    if len(leaves) >= _MAX_LEAVES:
        return None
    texts = [leaf.text for leaf in leaves]
    for number, leaf in enumerate(texts):
        if number not in skipped:
            core = leaf.strip() if is_inside else leaf
            lead, _, trail = leaf.partition(core) if core else (leaf, "", "")
            opening, closing = tags_of(number)
            texts[number] = f"{lead}{opening}{core}{closing}{trail}"
    try:
        untagged, found = _untagged(render(_with_texts(conversation, texts), False))
    except ChatError:
        return None
    if untagged != text:
        return None
    regions: list[list[Region]] = [[] for _ in leaves]
    for number, region in found:
        regions[number].append(region)
    return regions


def _untagged(tagged: str) -> tuple[str, list[tuple[int, Region]]]:
    """A text without its tags, and the number and the region of each tagged text in it."""
    pieces, found, at, size = [], [], 0, 0
    for match in _TAGGED.finditer(tagged):
        pieces += [tagged[at : match.start()], match[2]]
        start = size + match.start() - at
        at, size = match.end(), start + len(match[2])
        found.append((_number(match[1]), (start, size)))
    return "".join([*pieces, tagged[at:]]), found


@lru_cache(maxsize=4096)
def tags_of(number: int) -> tuple[str, str]:
    """The opening and the closing tag of a leaf."""
    digits = f"{number:04x}".translate(_TO_DIGITS)
    return f"\ufdd0\ufdd1{digits}", f"\ufdd0\ufdd2{digits}"


@lru_cache(maxsize=4096)
def _number(digits: str) -> int:
    return int(digits.translate(_FROM_DIGITS), 16)


def _is_unsure(text: str, leaf: Leaf, regions: list[Region]) -> bool:
    """Whether blanks beside a region may be the leaf's own."""
    if not regions or not _has_blanks(leaf):
        return False
    start, stop = regions[0]
    lead, trail = leaf.text[: -len(leaf.text.lstrip()) or None], leaf.text[len(leaf.text.rstrip()) :]
    return bool((lead and text[:start].endswith(lead[-1])) or (trail and text.startswith(trail[0], stop)))


def _generation_of(plain: dict[str, Any], text: str, render: Render, template: str) -> list[Region]:
    untagged, found = _untagged(render(plain, True))
    if untagged != text:
        raise ChatError(
            "generation marks cannot be followed",
            f"template {template!r} changes what its {{% generation %}} blocks give",
            remedy="a template that prints these blocks as they are",
        )
    return [(start, stop) for _, (start, stop) in found if start < stop]


# Differences


def _by_difference(
    conversation: Mapping[str, Any], text: str, number: int, leaves: Sequence[Leaf], render: Render, template: str
) -> list[Region]:
    """The second method: the region of the text that changes with this leaf."""
    leaf = leaves[number]

    def render_with(new: str) -> str:
        texts = [other.text for other in leaves]
        texts[number] = new
        return render(_with_texts(conversation, texts), False)

    # A template that only tests how a message starts, or its content, prints all of it: a mark at one end suffices.
    # A template that strips blanks at the other end may print its own blanks there: then a mark does not suffice.
    for new, edge, other_end in (
        (leaf.text + _MARK, len(leaf.text), leaf.text[:1]),
        (_MARK + leaf.text, 0, leaf.text[-1:]),
    ):
        if other_end.isspace():
            continue
        try:
            before, mark, after = render_with(new).partition(_MARK)
        except ChatError:
            continue
        start = len(before) - edge
        if mark and before + after == text and text.startswith(leaf.text, max(0, start)):
            return [(start, start + len(leaf.text))]
    try:
        marked = render_with(_MARK)
    except ChatError as error:
        raise _changed(leaf, template, error.reason) from None
    if marked == text:
        return []
    start, stop = region_between(text, marked)
    if not _came_from(text[start:stop], leaf.text):
        raise _changed(leaf, template)
    return [(start, stop)]


def _changed(leaf: Leaf, template: str, why: str = "") -> ChatError:
    where = "the tools" if leaf.turn < 0 else f"message {leaf.turn}"
    reason = f"template {template!r} changes {where} ({leaf.kind})"
    if why:
        reason = f"{reason}: {why}"
    remedy = "a template that prints messages as they are; report this one if it is a model's own"
    return ChatError("changed by the template", reason, turn=_turn_of(leaf), remedy=remedy)


def region_between(text: str, other: str) -> Region:
    """The region of `text` between its longest common start and end with `other`.

    >>> region_between("<a>hello</a>", "<a>?</a>")
    (3, 8)
    """
    limit = min(len(text), len(other))
    start = bisect_left(range(1, limit + 1), True, key=lambda size: text[:size] != other[:size])
    end = bisect_left(range(1, limit - start + 1), True, key=lambda size: text[-size:] != other[-size:])
    return start, len(text) - end


def _came_from(region: str, leaf: str) -> bool:
    """Whether a region is a part of the leaf, as plain text or as JSON. Blanks may differ."""
    if region in leaf:
        return True
    squeezed = "".join(region.split())
    forms = (leaf, json.dumps(leaf, ensure_ascii=False)[1:-1], json.dumps(leaf)[1:-1])
    return any(squeezed in "".join(form.split()) for form in forms)
