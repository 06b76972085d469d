"""The places of a conversation's strings in its rendered text, found without changing the template.

First method, one render: every string is wrapped in tags of characters that no text has (Unicode noncharacters). If the
tagged text without its tags equals the text, the tags give the place of each string. Second method, for strings that a
template trims, splits or inspects: the text is rendered once more with that string marked by one such character, or
replaced by it. The difference between the two texts is the string's place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

from batchwright.prepare.chat.messages import ChatError
from batchwright.prepare.chat.sandbox import GENERATION_CLOSE, GENERATION_OPEN

__all__ = ["Leaf", "Located", "locate", "plain_conversation", "region_between"]

Region = tuple[int, int]
"""Characters [start, stop) of a text."""

_TAG, _TAG_CHARACTERS = "\ufdd0", 5
"""The first character of a tag. One for its kind and four for the number of a leaf follow."""
_OPEN, _CLOSE, _MARK, _ZERO = "\ufdd1", "\ufdd2", "\ufdd9", 0xFDE0
_NONCHARACTER = re.compile("[\ufdd0-\ufdef]")
_MAX_LEAVES = 16**4

_WORD = re.compile(r"[\w.\-]*", re.ASCII)
"""Names, types and ids. Templates compare these with words of their own, so they are changed only on request. No name
of a special token is made of only such characters."""
_MARKUP = re.compile(r"[<\[{]")
_KNOWN_FIELDS = frozenset(
    ("role", "content", "reasoning_content", "thinking", "reasoning", "name", "tool_call_id", "tool_calls")
)


class Leaf(NamedTuple):
    """One string of a conversation that a template may print."""

    turn: int
    """The number of its message; -1 in tool definitions."""
    kind: str
    """content, reasoning, call (the name of a function that is called), argument, name, tools, other (of fields that
    only some templates know)."""
    role: str
    text: str


class Located(NamedTuple):
    """A rendered text, and where each leaf is in it."""

    text: str
    leaves: list[Leaf]
    regions: list[list[Region]]
    """The regions of each leaf: one, several or none."""
    generation: list[Region] | None
    """The regions inside `{% generation %}` blocks; None if the template has no such blocks."""


Swap = Callable[[int, str, str, str], str]
"""(turn, kind, role, text) -> the text that the template gets in its place."""
Render = Callable[[dict[str, Any], bool], str]
"""(conversation, whether `{% generation %}` blocks are marked) -> text."""


def _keep(turn: int, kind: str, role: str, text: str) -> str:
    return text


def plain_conversation(conversation: Mapping[str, Any]) -> dict[str, Any]:
    """A conversation as templates get it: without weights, and with reasoning under both of its usual names."""
    return _mapped(conversation, _keep)


def _mapped(conversation: Mapping[str, Any], swap: Swap) -> dict[str, Any]:
    """A copy of a conversation with every leaf swapped, in a fixed order."""
    messages = [_mapped_message(turn, message, swap) for turn, message in enumerate(conversation["messages"])]
    tools = conversation.get("tools")
    return {"messages": messages, "tools": _mapped_strings(-1, "tools", "", tools, swap) if tools else None}


def _mapped_message(turn: int, message: Mapping[str, Any], swap: Swap) -> dict[str, Any]:
    role = message["role"]
    mapped = dict(message)
    mapped.pop("weight", None)
    if len(mapped) > 2:
        mapped = {
            _mapped_key(turn, "other", role, name, swap): value
            if name in _KNOWN_FIELDS
            else _mapped_strings(turn, "other", role, value, swap)
            for name, value in mapped.items()
        }
        for name in ("reasoning_content", "thinking", "reasoning"):
            if isinstance(message.get(name), str):
                mapped[name] = swap(turn, "reasoning", role, message[name])
        if isinstance(mapped.get("reasoning_content"), str):
            mapped["thinking"] = mapped["reasoning_content"]
    mapped["content"] = swap(turn, "content", role, message["content"])
    if len(mapped) > 2:
        for name in ("name", "tool_call_id"):
            if name in mapped:
                mapped[name] = _mapped_strings(turn, "name", role, message[name], swap)
        if message.get("tool_calls"):
            mapped["tool_calls"] = [_mapped_call(turn, role, call, swap) for call in message["tool_calls"]]
    return mapped


def _mapped_call(turn: int, role: str, call: Mapping[str, Any], swap: Swap) -> dict[str, Any]:
    function = dict(call["function"])
    function["name"] = swap(turn, "call", role, function["name"])
    function["arguments"] = _mapped_strings(turn, "argument", role, function.get("arguments", {}), swap)
    mapped = {**call, "function": function}
    if "id" in call:
        mapped["id"] = _mapped_strings(turn, "name", role, call["id"], swap)
    return mapped


def _mapped_strings(turn: int, kind: str, role: str, value: Any, swap: Swap) -> Any:
    if isinstance(value, str):
        return swap(turn, kind, role, value) if kind == "argument" or _may_be_markup(kind, value) else value
    if isinstance(value, Mapping):
        return {
            _mapped_key(turn, kind, role, key, swap): _mapped_strings(turn, kind, role, item, swap)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_mapped_strings(turn, kind, role, item, swap) for item in value]
    return value


def _mapped_key(turn: int, kind: str, role: str, key: Any, swap: Swap) -> Any:
    return swap(turn, kind, role, key) if isinstance(key, str) and _may_be_markup(kind, key) else key


def _may_be_markup(kind: str, text: str) -> bool:
    """Whether a leaf may hold the name of a special token. Other fields are left alone: templates may compare them."""
    return bool(_MARKUP.search(text)) if kind == "other" else not _WORD.fullmatch(text)


def locate(conversation: Mapping[str, Any], render: Render, *, template: str, marks: bool) -> Located:
    """Render a conversation and locate every leaf.

    Raises `ChatError` if the template changes a message so much that its text cannot be told from the template's own.
    """
    leaves: list[Leaf] = []

    def collect(turn: int, kind: str, role: str, text: str) -> str:
        leaves.append(Leaf(turn, kind, role, text))
        return text

    plain = _mapped(conversation, collect)
    _refuse_noncharacters(leaves)
    text = render(plain, False)
    # Rendered without tags: tags may lead to another branch, with the same text and other marks.
    generation = _generation_of(plain, text, render, template) if marks else None
    untaggable = {n for n, leaf in enumerate(leaves) if _is_untaggable(conversation, leaf)}
    regions, unsure = _by_tags(conversation, text, leaves, untaggable, render)
    for n in unsure - untaggable:
        regions[n] = _by_difference(conversation, text, n, leaves[n], render, template)
    return Located(text, leaves, regions, generation)


def _refuse_noncharacters(leaves: Iterable[Leaf]) -> None:
    for leaf in leaves:
        if leaf.text.isascii() or b"\xef\xb7" not in leaf.text.encode("utf-8", "surrogatepass"):
            continue  # U+FDC0 to U+FDFF start with these bytes: much faster than a test of each character
        if found := _NONCHARACTER.search(leaf.text):
            raise ChatError(
                "noncharacters in the text",
                f"U+{ord(found[0]):04X} is no character, and is used here to find messages in their rendered text",
                turn=leaf.turn if leaf.turn >= 0 else None,
                remedy="remove U+FDD0 to U+FDEF from the data",
            )


def _is_untaggable(conversation: Mapping[str, Any], leaf: Leaf) -> bool:
    """Whether a tag may change the text. Templates test if a message with tool calls has content; a tag is some."""
    return not leaf.text and leaf.kind == "content" and bool(conversation["messages"][leaf.turn].get("tool_calls"))


def _by_tags(
    conversation: Mapping[str, Any], text: str, leaves: Sequence[Leaf], untaggable: set[int], render: Render
) -> tuple[list[list[Region]], set[int]]:
    """The first method. Returns regions, and the leaves whose regions remain unknown."""
    # Templates inspect leaves with markup (<think>): a second try leaves these untagged.
    marked_up = {n for n, leaf in enumerate(leaves) if _MARKUP.search(leaf.text)}
    for skipped in (untaggable, untaggable | marked_up) if marked_up else (untaggable,):
        # First around the whole leaf; then inside of its blanks, for templates that strip them.
        for is_inside in (False, True) if any(map(_has_blanks, leaves)) else (False,):
            found = _tagged(conversation, text, len(leaves), skipped, is_inside, render)
            if found is not None:
                unsure = {n for n, leaf in enumerate(leaves) if is_inside and _is_unsure(text, leaf, found[n])}
                return found, unsure | skipped
    return [[] for _ in leaves], set(range(len(leaves)))


def _has_blanks(leaf: Leaf) -> bool:
    return leaf.text[:1].isspace() or leaf.text[-1:].isspace()


def _tagged(
    conversation: Mapping[str, Any], text: str, num_leaves: int, skipped: set[int], is_inside: bool, render: Render
) -> list[list[Region]] | None:
    """The regions from one render with tags; None if the tags changed the text."""
    if num_leaves >= _MAX_LEAVES:
        return None
    number = -1

    def tag(turn: int, kind: str, role: str, leaf: str) -> str:
        nonlocal number
        number += 1
        if number in skipped:
            return leaf
        core = leaf.strip() if is_inside else leaf
        lead, _, trail = leaf.partition(core) if core else (leaf, "", "")
        opening, closing = _tags(number)
        return f"{lead}{opening}{core}{closing}{trail}"

    try:
        untagged, tags = _untagged(render(_mapped(conversation, tag), False))
    except ChatError:
        return None
    if untagged != text:
        return None
    regions: list[list[Region]] = [[] for _ in range(num_leaves)]
    opened, within = 0, ""
    for found, at in tags:
        if not within:
            opened, within = at, found
            continue
        number = _number(within)
        if number >= num_leaves or (within, found) != _tags(number):  # only its own closing tag may follow
            return None
        regions[number].append((opened, at))
        within = ""
    return None if within else regions


def _untagged(tagged: str) -> tuple[str, list[tuple[str, int]]]:
    """A text without its tags, and the place of each tag in it."""
    first, *others = tagged.split(_TAG)
    texts = [first, *(other[_TAG_CHARACTERS:] for other in others)]
    tags = [_TAG + other[:_TAG_CHARACTERS] for other in others]
    return "".join(texts), list(zip(tags, accumulate(map(len, texts)), strict=False))


@lru_cache(maxsize=4096)
def _tags(number: int) -> tuple[str, str]:
    digits = "".join(chr(_ZERO + (number >> shift & 15)) for shift in (12, 8, 4, 0))
    return _TAG + _OPEN + digits, _TAG + _CLOSE + digits


@lru_cache(maxsize=4096)
def _number(tag: str) -> int:
    """The number of a leaf, from its tag. Other text gives an arbitrary number."""
    number = 0
    for digit in tag[2:]:
        number = number << 4 | (ord(digit) - _ZERO & 15)
    return number


def _is_unsure(text: str, leaf: Leaf, regions: list[Region]) -> bool:
    """Whether blanks beside a region may be the leaf's own."""
    if not regions or not _has_blanks(leaf):
        return False
    start, stop = regions[0]
    lead, trail = leaf.text[: -len(leaf.text.lstrip()) or None], leaf.text[len(leaf.text.rstrip()) :]
    return bool((lead and text[:start].endswith(lead[-1])) or (trail and text.startswith(trail[0], stop)))


def _generation_of(plain: dict[str, Any], text: str, render: Render, template: str) -> list[Region]:
    untagged = _untagged(render(plain, True))
    if untagged[0] != text:
        raise ChatError(
            "generation marks cannot be followed",
            f"template {template!r} changes what its {{% generation %}} blocks give",
            remedy="a template that prints these blocks as they are",
        )
    starts = [at for tag, at in untagged[1] if tag == GENERATION_OPEN]
    stops = [at for tag, at in untagged[1] if tag == GENERATION_CLOSE]
    return [(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop]


def _by_difference(
    conversation: Mapping[str, Any], text: str, number: int, leaf: Leaf, render: Render, template: str
) -> list[Region]:
    """The second method: the region of the text that changes with this leaf."""

    def render_with(new: str) -> str:
        at = -1

        def put(turn: int, kind: str, role: str, other: str) -> str:
            nonlocal at
            at += 1
            return new if at == number else other

        return render(_mapped(conversation, put), False)

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
    where = f"message {leaf.turn}" if leaf.turn >= 0 else "the tools"
    what = f"template {template!r} changes {where} ({leaf.kind})"
    turn = leaf.turn if leaf.turn >= 0 else None
    remedy = "a template that prints messages as they are; report this one if it is a model's own"
    try:
        marked = render_with(_MARK)
    except ChatError as error:
        raise ChatError("changed by the template", f"{what}: {error.reason}", turn=turn, remedy=remedy) from None
    if marked == text:
        return []
    start, stop = region_between(text, marked)
    if not _came_from(text[start:stop], leaf.text):
        raise ChatError("changed by the template", what, turn=turn, remedy=remedy)
    return [(start, stop)]


def region_between(text: str, other: str) -> Region:
    """The region of `text` between its longest common start and end with `other`.

    >>> region_between("<a>hello</a>", "<a>?</a>")
    (3, 8)
    """
    limit = min(len(text), len(other))
    start = _longest(limit, lambda size: text[:size] == other[:size])
    end = _longest(limit - start, lambda size: size == 0 or text[-size:] == other[-size:])
    return start, len(text) - end


def _longest(limit: int, holds: Callable[[int], bool]) -> int:
    """The largest size up to `limit` for which the test holds. It must hold for all smaller sizes too."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _came_from(region: str, leaf: str) -> bool:
    """Whether a region is a part of the leaf, as plain text or as JSON. Blanks may differ."""
    if region in leaf:
        return True
    squeezed = "".join(region.split())
    forms = (leaf, json.dumps(leaf, ensure_ascii=False)[1:-1], json.dumps(leaf)[1:-1])
    return any(squeezed in "".join(form.split()) for form in forms)
