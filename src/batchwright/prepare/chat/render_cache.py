"""Conversations rendered from an earlier one with the same roles.

For messages with the same roles, most templates write the same words around the contents. These words and their spans
are cached, and the next such conversation is put together from them. If the template does not inspect contents, the
result is its text. Otherwise the text is rendered once, without tags, and must be equal to the result. If anything
differs, the conversation is rendered in full.

A render with opaque texts proves that a template does not inspect contents. It may print them, join them with other
text, strip blanks, keep them in variables and test their type. Everything else raises `LookedInside`: comparing,
splitting, counting, passing them to a filter. If nothing is raised, every conversation with the same roles takes the
same path through the template. Contents are never empty here, and have no blanks around them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import jinja2
import jinja2.utils

from batchwright.prepare.chat.locate import noncharacter_in
from batchwright.prepare.chat.sandbox import TemplateEnvironment, own_values
from batchwright.prepare.chat.spans import Rendered, TextSpan

_MOST_KEPT = 1024


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
        if noncharacter_in(content):
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
    lengths = [0, *accumulate(map(len, contents))]  # of the first n contents
    spans = []
    for span in rendered.spans:
        places = (span.start, span.stop)
        if any(start < at < stop for at in places for start, stop in said):  # inside of a content
            return None
        a, b = (sum(stop <= at for _, stop in said) for at in places)
        spans.append((span.start - lengths[a], a, span.stop - lengths[b], b, span))
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


# Opaque texts

_TYPE_TESTS = {
    *("string", "defined", "undefined", "none", "mapping", "iterable", "sequence", "number", "boolean", "true"),
    *("false", "integer", "float"),
}
_STRIPS = ("strip", "lstrip", "rstrip")
_PASSED_ON = ("default", "d", "string")
_OF_MESSAGES = ("length", "count", "first", "last", "list")
_BY_ROLE = ("selectattr", "rejectattr")


class LookedInside(Exception):
    """The template inspects the content of a message, or may."""


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise LookedInside


class OpaqueText(str):
    """A text that can be joined with others, and nothing else. The operations of Jinja's own code still work."""

    __slots__ = ()

    def __bool__(self) -> bool:
        return True

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> str:
        return OpaqueText(str.__add__(self, other))

    def __radd__(self, other: str) -> str:
        return OpaqueText(str.__add__(other, self))

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = _refuse
    __contains__ = __iter__ = __getitem__ = __mul__ = __rmul__ = __mod__ = __repr__ = __format__ = _refuse


def _holds_opaque(value: Any) -> bool:
    match value:
        case OpaqueText():
            return True
        case dict():
            return any(map(_holds_opaque, value.values()))
        case list() | tuple():
            return any(map(_holds_opaque, value))
        case jinja2.utils.Namespace():
            return _holds_opaque(value._Namespace__attrs)
    return False


def _together(text: str, parts: Iterable[Any]) -> str:
    return OpaqueText(text) if any(isinstance(part, OpaqueText) for part in parts) else text


class OpaqueEnvironment(TemplateEnvironment):
    """The sandbox, in which opaque texts stay opaque. No function written in C gets one, because C could read it."""

    def __init__(self) -> None:
        super().__init__()
        tests: dict[str, Any] = self.tests
        self.tests = {name: self._guarded_test(name, function) for name, function in tests.items()}

    def filter(
        self, name: str, function: Callable[..., Any], value: Any, others: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if isinstance(value, OpaqueText):
            if name == "trim" and not others and not kwargs:
                return OpaqueText(value.strip())
            if name in _PASSED_ON:
                return value
            raise LookedInside
        is_known = name in _OF_MESSAGES or (name in _BY_ROLE and others[:1] == ("role",))
        if _holds_opaque([*others, *kwargs.values()]) or (_holds_opaque(value) and not is_known):
            raise LookedInside
        return super().filter(name, function, value, others, kwargs)

    def _guarded_test(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def guarded(*args: Any) -> Any:
            if name in _TYPE_TESTS:
                return function(*("text" if isinstance(arg, OpaqueText) else arg for arg in args))
            if _holds_opaque(args):
                raise LookedInside
            return function(*args)

        return guarded

    def call(*arguments: Any, **kwargs: Any) -> Any:
        self, context, function, *args = arguments
        given = [*args, *own_values(kwargs)]
        if isinstance(getattr(function, "__self__", None), OpaqueText):
            if function.__name__ in _STRIPS and not given:
                return OpaqueText(function())
            raise LookedInside
        is_ours = isinstance(function, jinja2.runtime.Macro) or function is self.globals["namespace"]
        if not is_ours and _holds_opaque(given):
            raise LookedInside
        return super(OpaqueEnvironment, self).call(context, function, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and _holds_opaque(right):
            raise LookedInside
        return super().call_binop(context, operator, left, right)

    def _concat(self, parts: Iterable[str]) -> str:
        texts = list(parts)
        return _together(super()._concat(texts), texts)

    def _joined(self, parts: list[Any]) -> str:
        return _together(super()._joined(parts), parts)

    def _sized(self, value: Any) -> Any:
        if _holds_opaque(value):
            raise LookedInside
        return super()._sized(value)
