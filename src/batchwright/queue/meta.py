"""What build_meta() may hold: a dict that JSON keeps as it is, so that the trainer reads what the provider meant."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from batchwright.base.errors import SpecError

__all__ = ["check_meta"]

_RESERVED = "batchwright"
_SHOWN = 8
"""Problems that are listed; with thousands of them (an array in every entry) the first ones tell."""


def check_meta(meta: Any) -> dict[str, Any]:
    """The meta in plain Python values. NumPy's numbers become numbers, tuples lists; what JSON would change is refused.

    >>> check_meta({"vocab_size": 65, "itos": ("a", "b")})
    {'vocab_size': 65, 'itos': ['a', 'b']}
    """
    if not isinstance(meta, Mapping):
        what = "nothing" if meta is None else f"a {type(meta).__name__}"
        raise SpecError(
            f"build_meta() returned {what}; it has to return a dict",
            parameter="build_meta()",
            remedy='return {"batch_schema": [{"name": "x", "dtype": "int64", "shape": [self.block_size]}, ...]}',
        )
    problems: list[tuple[str, str]] = []
    if _RESERVED in meta:
        problems.append((f"meta[{_RESERVED!r}] is a name that batchwright needs for itself", "give it another name"))
    plain = _plain(meta, "meta", (), lambda what, remedy: problems.append((what, remedy)))
    if problems:
        (headline, remedy), *others = problems
        also = [what for what, _ in others[: _SHOWN - 1]]
        if len(others) >= _SHOWN:
            also.append(f"and {len(others) - len(also):,} more")
        raise SpecError(headline, parameter="build_meta()", also="\n".join(also) or None, remedy=remedy)
    return dict(plain)


def _plain(value: Any, path: str, within: tuple[int, ...], refuse: Callable[[str, str], None]) -> Any:
    """A value as JSON gives it back. `within`: what it lies in, to find what holds itself."""
    if id(value) in within:
        refuse(f"{path} holds itself", "a value without itself in it")
        return None
    if value is None or isinstance(value, bool):
        return value
    if _is_numpy_scalar(value):
        return _plain(value.item(), path, within, refuse)
    if isinstance(value, str):
        if not _is_text(value):
            refuse(f"{path} has half a character (a lone surrogate), which no file can keep", "open(..., encoding=...)")
        return str.__str__(value)  # the text alone, also of an enum or of NumPy's own kind
    if isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            refuse(f"{path} is a whole number of more than 64 bits", "write it as a string")
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            refuse(f"{path} is {float(value)}, which JSON does not have", "None, or leave it out")
        return float(value)
    within = (*within, id(value))
    if isinstance(value, list | tuple):
        return [_plain(item, f"{path}[{i}]", within, refuse) for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        wrong = [key for key in value if not isinstance(key, str)]
        if wrong:
            remedy = "a list" if all(isinstance(key, int) for key in wrong) else "strings as keys"
            refuse(f"{path} has keys that are not strings ({wrong[0]!r}); use {remedy}", f"use {remedy}")
            return None
        return {str.__str__(key): _plain(item, f"{path}[{key!r}]", within, refuse) for key, item in value.items()}
    refuse(*_refused(value, path))
    return None


def _refused(value: Any, path: str) -> tuple[str, str]:
    if isinstance(value, bytes | bytearray | memoryview):
        return f"{path} is bytes, which JSON does not have", "a string, or a list of numbers"
    if isinstance(value, set | frozenset):
        return f"{path} is a set, which JSON does not have", "sorted(...) makes a list of it"
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    if hasattr(value, "tolist"):
        return f"{path} is a {kind}, which JSON does not have", ".tolist(), or a file of its own where it is large"
    return f"{path} is a {kind}, which JSON does not have", "text, numbers, lists and dicts of them"


def _is_numpy_scalar(value: Any) -> bool:
    """Of any library's kind: something with a dtype and no dimensions."""
    is_plain = isinstance(value, bytes | str)  # NumPy's own text is both
    return not is_plain and hasattr(value, "dtype") and getattr(value, "shape", None) == () and hasattr(value, "item")


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
