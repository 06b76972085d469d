"""Texts that a template may print but not inspect. A render with them proves that its words do not depend on contents.

A template is rendered once with such texts as contents. It may print them, join them with other text, strip blanks,
keep them in variables and test their type. Everything else raises `LookedInside`: comparing, splitting, counting,
passing them to a filter. If nothing is raised, every conversation with the same roles takes the same path through the
template. Contents are never empty here, and have no blanks around them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable
from typing import Any

import jinja2
import jinja2.utils

from batchwright.prepare.chat.sandbox import CompiledTemplate, TemplateEnvironment, own_values

__all__ = ["LookedInside", "OpaqueText", "compile_for_opaque"]

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


class _OpaqueEnvironment(TemplateEnvironment):
    """The sandbox, in which opaque texts stay opaque. No function written in C gets one, because C could read it."""

    def __init__(self) -> None:
        super().__init__()
        self.filters = {name: self._guarded_filter(name, function) for name, function in self.filters.items()}
        tests: dict[str, Any] = self.tests
        self.tests = {name: self._guarded_test(name, function) for name, function in tests.items()}

    def _guarded_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        if name.startswith("\0"):  # the sandbox's own
            return function
        num_passed = int(jinja2.utils._PassArg.from_obj(function) is not None)

        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            passed, value, others = args[:num_passed], args[num_passed], args[num_passed + 1 :]
            if isinstance(value, Generator | map | filter):
                value = list(value)
            if isinstance(value, OpaqueText):
                if name == "trim" and not others and not kwargs:
                    return OpaqueText(value.strip())
                if name in _PASSED_ON:
                    return value
                raise LookedInside
            is_known = name in _OF_MESSAGES or (name in _BY_ROLE and others[:1] == ("role",))
            if _holds_opaque([*others, *kwargs.values()]) or (_holds_opaque(value) and not is_known):
                raise LookedInside
            return function(*passed, value, *others, **kwargs)

        return guarded

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
        return super(_OpaqueEnvironment, self).call(context, function, *args, **kwargs)

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


def compile_for_opaque(source: str, name: str) -> CompiledTemplate:
    """Compile the template for renders with opaque texts."""
    return CompiledTemplate(source, name, _OpaqueEnvironment())
