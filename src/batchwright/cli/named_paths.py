"""Paths on a command line, each with an optional name: PATH or NAME=PATH."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

__all__ = ["paths_by_name"]


def paths_by_name(given: Iterable[str], default: str | None = None) -> dict[str | None, list[str]]:
    """Paths of one name together, in order. An existing path with a "=" in it has no name.

    >>> paths_by_name(["web=a.jsonl", "b.jsonl", "web=c.jsonl"])
    {'web': ['a.jsonl', 'c.jsonl'], None: ['b.jsonl']}
    """
    named: dict[str | None, list[str]] = {}
    for text in given:
        match = re.fullmatch(r"([\w.-]+)=(.+)", text, re.DOTALL)
        if match is None or os.path.exists(text):
            named.setdefault(default, []).append(text)
        else:
            named.setdefault(match[1], []).append(match[2])
    return named
