"""Checks of parameters. Each returns the value, or raises an error that names the parameter."""

from __future__ import annotations

import contextlib
import operator
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from batchwright.base.errors import SpecError
from batchwright.base.words import shortened, suggest

__all__ = ["at_least", "local_path", "one_of", "whole_number"]

T = TypeVar("T")


def at_least(smallest: int, **parameter: Any) -> int:
    """The one named parameter as an int that is `smallest` or more.

    >>> at_least(1, batch_size=8)
    8
    """
    number = whole_number(**parameter)
    ((name, value),) = parameter.items()
    if number < smallest:
        raise SpecError(
            f"{name} must be at least {smallest}, got {value}", parameter=name, remedy=f"{name}={max(smallest, 1)}"
        )
    return number


def whole_number(**parameter: Any) -> int:
    """The one named parameter as an int: 1.5 is not cut to 1, and True is refused.

    >>> whole_number(seed=-7)
    -7
    """
    ((name, value),) = parameter.items()
    with contextlib.suppress(TypeError):
        if not isinstance(value, bool):
            return operator.index(value)
    remedy = f"{name}=1, or another int"
    if isinstance(value, float) and value.is_integer():
        remedy = f"{name}={int(value)}"
    raise SpecError(f"{name} must be a whole number, got {shortened(value)}", parameter=name, remedy=remedy)


def local_path(**parameter: Any) -> Path:
    """The one named parameter as a path on this machine, with `~` as the home folder. Addresses are refused.

    >>> local_path(to="run:3/corpus.store")
    PosixPath('run:3/corpus.store')
    """
    ((name, value),) = parameter.items()
    if not isinstance(value, str | os.PathLike):
        raise SpecError(
            f"{name} must be a path, got {repr(value)[:200]}", parameter=name, remedy=f"{name}='...', or a Path"
        )
    text = os.fsdecode(value)
    slashes = "//" if isinstance(value, str) else "/"  # a Path has dropped the second
    address = re.match(rf"\s*([A-Za-z][\w+.-]+):{slashes}", text)
    if address is None:
        return Path(os.path.expanduser(text))
    from urllib.parse import unquote

    path = re.sub(r"^/*(localhost(?=/))?/*", "/", unquote(text[address.end() :]))
    raise SpecError(
        f"{text} is an address, and batchwright reads and writes files of this machine",
        parameter=name,
        remedy=f"{name}={path!r}" if address[1] == "file" else "copy it here first, or mount it as a folder",
    )


def one_of(choices: Iterable[T], **parameter: T) -> T:
    """The one named parameter, which must be one of the choices."""
    ((name, value),) = parameter.items()
    choices = list(choices)
    if value not in choices:
        listed = ", ".join(repr(c) for c in choices)
        raise SpecError(
            f"{name}={value!r} is not one of {listed}",
            parameter=name,
            remedy=f"{name}={suggest(str(value), map(str, choices)) or choices[0]!r}",
        )
    return value
