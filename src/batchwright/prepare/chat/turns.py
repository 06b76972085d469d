"""Spans that tile a rendered text, made from the places of its messages.

An assistant's TEXT starts at the end of the generation prompt, and stops at the end of its last string, or with tool
calls at the end-of-turn marker. If a template has `{% generation %}` blocks, they decide instead.

Template text between two messages belongs to one of them, so that turns can be cut out whole. The end-of-turn marker
and the blanks after it belong to the message before, and the rest to the message after. Text before the header of the
first message (the start token, a default system message) and after the last turn belongs to no message: its turn is -1
and its role 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from batchwright.prepare.chat.locate import Leaf, Located, Region
from batchwright.prepare.chat.messages import ChatError
from batchwright.prepare.chat.spans import END, ROLES, TEMPLATE, TEXT, Rendered, TextSpan

_ROLE_NUMBERS = {role: number for number, role in enumerate(ROLES) if number} | dict.fromkeys(
    ("function", "ipython", "tool_results", "observation"), ROLES.index("tool")
)
_ASSISTANT = ROLES.index("assistant")
_FOR_TEXT = "a template for such messages, or leave them out"
_FOR_CALLS = "a template that writes tool calls: the tokenizer's own, 'qwen' or 'mistral'; or leave such rows out"


class Markers(NamedTuple):
    """The texts that a template writes around turns."""

    ends: tuple[str, ...]
    """End-of-turn markers."""
    prompt: str
    """The generation prompt, such as "<|im_start|>assistant\\n"; for a template without one, the header of an
    answer."""
    lead: str
    """The text between the prompt and the content of an answer, which must be generated: " " in mistral."""
    bos: str


Prefix = Callable[[int, bool], str | None]
"""(n, add_generation_prompt) -> the text of the first n messages, with or without the prompt; None if refused."""


class _Turn(NamedTuple):
    number: int
    start: int
    stop: int
    end: int
    """The stop of its end-of-turn marker; `stop` without one."""


class _Words(NamedTuple):
    """The template's words around messages."""

    whole: str
    text: str
    """The same, with the words of messages blanked out: a marker in a message does not count."""
    markers: Markers
    prefix: Prefix


def role_number(role: str, turn: int | None = None) -> int:
    """A role's number in `ROLES`.

    >>> role_number("ipython") == role_number("tool") == 5
    True
    """
    try:
        return _ROLE_NUMBERS[role]
    except KeyError:
        raise ChatError("unknown role", f"role {role!r}", turn=turn, remedy=f"one of {', '.join(ROLES[1:])}") from None


def find_turns(located: Located, messages: Sequence[Mapping[str, Any]], markers: Markers, prefix: Prefix) -> Rendered:
    """Spans of a located text."""
    regions = _message_regions(located, messages)
    said = _merged(sorted(region for found in located.regions for region in found if region[0] < region[1]))
    words = _Words(located.text, _without(located.text, said), markers, prefix)
    turns: list[_Turn] = []
    before = 0
    numbers = [number for number in range(len(messages)) if regions[number]]
    for number, following in zip_longest(numbers, numbers[1:]):
        first, stop = regions[number][0][0], max(region[1] for region in regions[number])
        until = len(located.text) if following is None else regions[following][0][0]
        start = first
        if messages[number]["role"] == "assistant":
            start = _answer_start(words, before, first, number)
            if messages[number].get("tool_calls"):
                stop = _calls_stop(words, stop, until, number)
        before = _after_end(words.text, stop, markers.ends)
        turns.append(_Turn(number, start, stop, before))
    spans = _tile(words.text, turns, messages, markers)
    if located.generation is not None:
        spans = _painted(spans, words.text, located.generation, turns, messages, markers)
    return Rendered(located.text, tuple(spans), tuple(said))


def _without(text: str, said: Sequence[Region]) -> str:
    pieces, at = [], 0
    for start, stop in said:
        pieces += [text[at:start], "\0" * (stop - start)]
        at = stop
    return "".join([*pieces, text[at:]])


def _message_regions(located: Located, messages: Sequence[Mapping[str, Any]]) -> list[list[Region]]:
    """The regions of each message, in order. Checks that each message is printed once, in its place."""
    regions: list[list[Region]] = [[] for _ in messages]
    printed = [
        (leaf, found)
        for leaf, found in zip(located.leaves, located.regions, strict=True)
        if leaf.turn >= 0 and leaf.kind not in ("name", "other")
    ]
    for leaf, found in printed:
        if leaf.text or leaf.kind != "content" or not messages[leaf.turn].get("tool_calls"):
            regions[leaf.turn] += found
    for leaf, found in printed:
        _check_leaf(leaf, found, regions[leaf.turn])
    _sort_and_check(regions)
    return regions


def _sort_and_check(regions: list[list[Region]]) -> None:
    """Sort the regions of each message, and check that messages keep their order."""
    before = 0
    for turn, mine in enumerate(regions):
        mine.sort()
        if mine and mine[0][0] < before:
            reason = "its text comes before that of an earlier message"
            remedy = "a template that keeps the order of messages"
            raise ChatError("reordered by the template", reason, turn, remedy)
        before = max([before, *(stop for _, stop in mine)])


def _check_leaf(leaf: Leaf, found: Sequence[Region], of_message: Sequence[Region]) -> None:
    """Check that a content or a call is printed. Contents are printed once."""
    is_content = leaf.kind == "content" and leaf.text.strip() != ""
    if is_content and len(found) > 1:
        reason, remedy = f"its text is there {len(found)} times", "a template that writes every message once"
        raise ChatError("repeated by the template", reason, leaf.turn, remedy)
    if leaf.kind == "call" and not found:
        reason = f"its call of {leaf.text!r} is not in the text"
        raise ChatError("dropped by the template", reason, leaf.turn, _FOR_CALLS)
    is_said = any(start < stop for start, stop in (*found, *of_message))  # by its reasoning alone, perhaps
    if is_content and not is_said:
        raise ChatError("dropped by the template", "its text is not in the rendered text", leaf.turn, _FOR_TEXT)


def _answer_start(words: _Words, before: int, first: int, number: int) -> int:
    """The end of an answer's generation prompt."""
    if before == first:
        return first
    markers = words.markers
    if markers.prompt and (at := words.text.rfind(markers.prompt, before, first)) >= 0:
        return at + len(markers.prompt)
    # Not the usual prompt (an answer after a tool's): render this one.
    start = words.prefix(number, True)
    if start is not None and before <= len(start) <= first and words.whole.startswith(start):
        return len(start)
    if words.text.endswith(markers.lead, before, first):
        return first - len(markers.lead)
    return first


def _calls_stop(words: _Words, last: int, until: int, number: int) -> int:
    """The end of the template's text after the last string of tool calls: brackets, closing tags."""
    found = [at for end in words.markers.ends if (at := words.text.find(end, last, until)) >= 0]
    if found:
        return min(found)
    # Some write no end after calls. Then a conversation that stops here shows it.
    shorter = words.prefix(number + 1, False)
    if shorter is not None and last <= len(shorter) <= until and words.whole.startswith(shorter):
        return len(shorter)
    return last


def _after_end(text: str, stop: int, ends: Sequence[str]) -> int:
    at = _skip_blanks(text, stop)
    for end in ends:
        for start in (stop, at):
            if text.startswith(end, start):
                return start + len(end)
    return stop


def _skip_blanks(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _tile(text: str, turns: Sequence[_Turn], messages: Sequence[Mapping[str, Any]], markers: Markers) -> list[TextSpan]:
    spans: list[TextSpan] = []
    at = 0

    def put(stop: int, part: int, turn: int) -> None:
        nonlocal at
        if at < stop:
            role, weight = 0, math.nan
            if turn >= 0:
                message = messages[turn]
                role, weight = role_number(message["role"], turn), float(message.get("weight", math.nan))
            spans.append(TextSpan(at, stop, role, part, turn, weight))
            at = stop

    before = -1
    for turn in turns:
        if before < 0:
            start = len(markers.bos) if markers.bos and text.startswith(markers.bos) else 0
            cut = max(start, _last_end(text, 0, turn.start, markers.ends) or 0)
        else:
            cut = _last_end(text, at, turn.start, markers.ends) or min(_skip_blanks(text, at), turn.start)
        put(cut, TEMPLATE, before)
        put(turn.start, TEMPLATE, turn.number)
        put(turn.stop, TEXT, turn.number)
        put(turn.end, END, turn.number)
        before = turn.number
    put(_last_end(text, at, len(text), markers.ends) or _skip_blanks(text, at), TEMPLATE, before)
    put(len(text), TEMPLATE, -1)
    return spans


def _last_end(text: str, start: int, stop: int, ends: Sequence[str]) -> int | None:
    """The place after the last end-of-turn marker in a stretch of text, and the blanks after it."""
    found = max((at + len(end) for end in ends if (at := text.rfind(end, start, stop)) >= 0), default=None)
    return None if found is None else min(_skip_blanks(text, found), stop)


def _painted(
    spans: Sequence[TextSpan],
    text: str,
    generation: Sequence[Region],
    turns: Sequence[_Turn],
    messages: Sequence[Mapping[str, Any]],
    markers: Markers,
) -> list[TextSpan]:
    """Spans in which the text of assistants is exactly the generation blocks."""
    spans = [span._replace(part=TEMPLATE) if span.role == _ASSISTANT else span for span in spans]
    answers = [turn for turn in turns if messages[turn.number]["role"] == "assistant"]
    for start, stop in generation if answers else ():
        turn = min(answers, key=lambda turn: max(0, turn.start - stop + 1, start - turn.end + 1))
        inside = text[start:stop].rstrip()
        end = next((end for end in markers.ends if inside.endswith(end)), "")
        border = start + len(inside) - len(end) if end else stop
        weight = float(messages[turn.number].get("weight", math.nan))
        spans = _over(spans, TextSpan(start, border, _ASSISTANT, TEXT, turn.number, weight))
        spans = _over(spans, TextSpan(border, stop, _ASSISTANT, END, turn.number, weight))
    return spans


def _over(spans: Sequence[TextSpan], new: TextSpan) -> list[TextSpan]:
    if new.start >= new.stop:
        return list(spans)
    left = [span._replace(stop=min(span.stop, new.start)) for span in spans if span.start < new.start]
    right = [span._replace(start=max(span.start, new.stop)) for span in spans if span.stop > new.stop]
    return [*left, new, *right]


def _merged(regions: Sequence[Region]) -> list[Region]:
    """Merge regions that touch or overlap."""
    merged: list[Region] = []
    for start, stop in regions:
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged
