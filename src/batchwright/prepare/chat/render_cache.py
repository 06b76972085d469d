"""Conversations rendered from an earlier one with the same roles.

For messages with the same roles, most templates write the same words around the contents. These words and their spans
are cached, and the next such conversation is put together from them. If the template does not inspect contents
(opaque.py), the result is its text. Otherwise the text is rendered once, without tags, and must be equal to the result.
If anything differs, the conversation is rendered in full.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from batchwright.prepare.chat.spans import Rendered, TextSpan

__all__ = ["RenderCache"]

_MOST_KEPT = 1024
_NONCHARACTER = re.compile("[\ufdd0-\ufdef]")


@dataclass(slots=True)
class _Frame:
    """The words that a template writes around contents."""

    words: tuple[str, ...]
    """Before, between and after the contents."""
    spans: tuple[tuple[int, int, int, int, TextSpan], ...]
    """(start, contents before start, stop, contents before stop, original span). Places count these words alone."""
    fits_all: bool | None = None
    """Whether the template writes these words around any contents; None before it is known."""


class RenderCache:
    """Frames by the roles of a conversation.

    `render_in_full` gives text and spans, `render_text` the text alone; `prints_only` tells whether the template prints
    the contents of a conversation without inspecting them.
    """

    def __init__(
        self,
        render_in_full: Callable[[Mapping[str, Any]], Rendered],
        render_text: Callable[[Mapping[str, Any]], str],
        prints_only: Callable[[Mapping[str, Any]], bool],
    ) -> None:
        self._in_full, self._text, self._prints_only = render_in_full, render_text, prints_only
        self._frames: dict[Any, _Frame | None] = {}

    def rendered(self, conversation: Mapping[str, Any]) -> Rendered:
        roles = _roles(conversation)
        if roles is None:
            return self._in_full(conversation)
        contents = [message["content"] for message in conversation["messages"]]
        if roles not in self._frames:
            found = self._in_full(conversation)
            if len(self._frames) < _MOST_KEPT:
                self._frames[roles] = _frame_of(found, contents)
            return found
        frame = self._frames[roles]
        if frame is None:
            return self._in_full(conversation)
        filled = _fill(frame, contents)
        if frame.fits_all is None:
            frame.fits_all = self._prints_only(conversation)
        if frame.fits_all or filled.text == self._text(conversation):
            return filled
        return self._in_full(conversation)


def _roles(conversation: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """The key of a conversation's frame; None if contents (blanks around them, other fields) may change the frame."""
    roles: list[Any] = []
    for name, value in conversation.items():
        if name != "messages":
            if value:
                return None
            roles.append((name, repr(value)))
    for message in conversation["messages"]:
        role, content, weight = message.get("role"), message.get("content"), message.get("weight")
        if len(message) != 2 + ("weight" in message) or not isinstance(role, str) or not isinstance(content, str):
            return None
        if not content or content[0].isspace() or content[-1].isspace():
            return None
        if not content.isascii() and _NONCHARACTER.search(content):
            return None
        roles.append((role, weight))
    return tuple(roles)


def _frame_of(rendered: Rendered, contents: Sequence[str]) -> _Frame | None:
    """The frame of a rendered conversation; None unless each content occurs once, separate and unchanged."""
    text, said = rendered.text, rendered.said
    if [text[start:stop] for start, stop in said] != list(contents):
        return None
    starts, stops = [0, *(stop for _, stop in said)], [*(start for start, _ in said), len(text)]
    words = tuple(text[start:stop] for start, stop in zip(starts, stops, strict=True))
    spans = []
    for span in rendered.spans:
        places = []
        for at in (span.start, span.stop):
            before = [start for start, _ in said if start < at]
            number = sum(stop <= at for _, stop in said)
            if number < len(before):  # inside of a content
                return None
            places += [at - sum(map(len, contents[:number])), number]
        spans.append((places[0], places[1], places[2], places[3], span))
    return _Frame(words, tuple(spans))


def _fill(frame: _Frame, contents: Sequence[str]) -> Rendered:
    words = frame.words
    parts = [words[0]]
    for content, word in zip(contents, words[1:], strict=True):
        parts += (content, word)
    lengths = [0, *accumulate(map(len, contents))]  # of the first n contents
    spans = tuple(
        [
            TextSpan(start + lengths[a], stop + lengths[b], span.role, span.part, span.turn, span.weight)
            for start, a, stop, b, span in frame.spans
        ]
    )
    said, at = [], 0
    for content, word in zip(contents, words, strict=False):
        at += len(word)
        said.append((at, at + len(content)))
        at += len(content)
    return Rendered("".join(parts), spans, tuple(said))
