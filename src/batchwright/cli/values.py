"""Command-line values: numbers, weights, ramps, ranges and NAME=STORE, each from the text that a user types."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from batchwright.base.checks import at_least
from batchwright.base.errors import SpecError

__all__ = [
    "WeightsFrom",
    "check_positive",
    "epochs_of_sources",
    "flag_of",
    "named_store",
    "paths_by_name",
    "position_range",
    "ramp_to",
    "renames",
    "schedule_of",
    "step_range",
    "weights",
    "weights_from",
    "whole_number",
]

_MULTIPLES = {"k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}

T = TypeVar("T")

Segment = tuple[int, Mapping[str, float]]
"""A position, and the weights from there on."""


def whole_number(text: str) -> int:
    """
    >>> whole_number("10e9"), whole_number("2_048"), whole_number("1.5B")
    (10000000000, 2048, 1500000000)
    """
    body, multiple = text.strip().replace("_", "").replace(",", ""), 1
    if body[-1:].lower() in _MULTIPLES:
        body, multiple = body[:-1], _MULTIPLES[body[-1].lower()]
    try:
        if body.lstrip("+-").isdigit():
            return int(body) * multiple
        number = float(body) * multiple
        if number.is_integer():
            return int(number)
    except (ValueError, OverflowError):
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number such as 2048, 10e9 or 10B")


def check_positive(arguments: argparse.Namespace, *names: str) -> None:
    """Refuse numbers below 1 among the options that were given."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None:
            at_least(1, **{name: value})


def flag_of(name: str) -> str:
    """
    >>> flag_of("chunk_size")
    '--chunk-size'
    """
    return f"--{name.replace('_', '-')}"


def _pairs(text: str, value_of: Callable[[str], T], example: str) -> dict[str, T]:
    """NAME=VALUE,... as a dict. `value_of` raises ValueError for a wrong value."""
    found: dict[str, T] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name in found:
            raise argparse.ArgumentTypeError(f"{name!r} is given twice")
        try:
            found[name] = value_of(value)
        except ValueError:
            name = ""
        if not name:
            raise argparse.ArgumentTypeError(f"{part.strip()!r} is not NAME=VALUE, as in {example}")
    return found


def _weight(text: str) -> float:
    number = float(text)
    if not 0 <= number < float("inf"):
        raise ValueError
    return number


def _epochs(text: str) -> int:
    if not text.isdecimal():
        raise ValueError
    return int(text)


def _name(text: str) -> str:
    if not text:
        raise ValueError
    return text


def renames(text: str) -> dict[str, str]:
    """
    >>> renames("bot=assistant,me=user")
    {'bot': 'assistant', 'me': 'user'}
    """
    return _pairs(text, _name, "bot=assistant,me=user")


def weights(text: str) -> dict[str, float]:
    """
    >>> weights("web=.7,code=.3")
    {'web': 0.7, 'code': 0.3}
    """
    return _pairs(text, _weight, "web=.7,code=.3")


def epochs_of_sources(text: str) -> dict[str, int] | int:
    """
    >>> epochs_of_sources("code=4,web=1"), epochs_of_sources("2")
    ({'code': 4, 'web': 1}, 2)
    """
    if text.isdecimal():
        return int(text)
    return _pairs(text, _epochs, "code=4,web=1")


class WeightsFrom(NamedTuple):
    """Weights from a position on (None: from the beginning of what is planned), or the goal of a ramp up to `last`."""

    first: int | None
    last: int | None
    weights: dict[str, float]

    @property
    def parameter(self) -> str:
        return "weights" if self.last is None else "ramp"


def weights_from(text: str) -> WeightsFrom:
    """
    >>> weights_from("web=1").first, weights_from("100k:web=.5,code=.5")
    (None, WeightsFrom(first=100000, last=None, weights={'web': 0.5, 'code': 0.5}))
    """
    before, colon, after = text.partition(":")
    if not colon or "=" in before:
        return WeightsFrom(None, None, weights(text))
    return WeightsFrom(whole_number(before), None, weights(after))


def ramp_to(text: str) -> WeightsFrom:
    """
    >>> ramp_to("100-900:web=.5,code=.5")
    WeightsFrom(first=100, last=900, weights={'web': 0.5, 'code': 0.5})
    """
    span, colon, after = text.partition(":")
    first, dash, last = span.partition("-")
    if not colon or not dash:
        raise argparse.ArgumentTypeError(f"{text!r} is not FIRST-LAST:NAME=WEIGHT,..., as in 1000-9000:web=.5,code=.5")
    return WeightsFrom(whole_number(first), whole_number(last), weights(after))


def schedule_of(
    given: Sequence[WeightsFrom] | None,
    ramps: Sequence[WeightsFrom] | None,
    *,
    at: int = 0,
    before: Mapping[str, float] | None = None,
) -> Any:
    """--weights and --ramp as `weights=` takes them. `before`: the weights at the position where they begin.

    >>> schedule_of([weights_from("web=1")], None)
    {'web': 1.0}
    >>> steps = schedule_of([weights_from("web=1")], [ramp_to("100-740:web=.5,code=.5")])
    >>> len(steps), steps[0], steps[1], steps[-1]
    (65, (0, {'web': 1.0}), (100, {'web': 1.0, 'code': 0.0}), (730, {'web': 0.5, 'code': 0.5}))
    """
    entries = [*(given or ()), *(ramps or ())]
    if not entries:
        return None
    if len(entries) == 1 and entries[0].first is None:
        return entries[0].weights
    segments: list[Segment] = []
    end_of_ramp = 0
    for first, entry in _in_order(entries, at):
        if first < end_of_ramp:
            raise SpecError(
                f"weights from position {first:,} fall into the ramp that ends at {end_of_ramp:,}",
                parameter=entry.parameter,
                remedy=f"position {end_of_ramp} or more",
            )
        if entry.last is None:
            segments.append((first, entry.weights))
        else:
            end_of_ramp = entry.last
            segments = _with_ramp(segments, before, first, end_of_ramp, entry.weights)
    return segments


def _with_ramp(
    segments: list[Segment], before: Mapping[str, float] | None, first: int, last: int, goal: Mapping[str, float]
) -> list[Segment]:
    """The segments, then a ramp that begins with the weights of the last segment."""
    from batchwright.loaders.weights import ramp

    if segments:
        start, before = segments[-1]
        if start == first:  # the ramp begins with these
            segments = segments[:-1]
    if before is None:
        raise SpecError(
            f"the ramp from position {first:,} has no weights to begin with",
            parameter="ramp",
            remedy=f"--weights {'' if first else '0:'}NAME=W,... for what holds before",
        )
    return [*segments, *ramp(before, goal, first=first, last=last)]


def _in_order(entries: Sequence[WeightsFrom], at: int) -> list[tuple[int, WeightsFrom]]:
    """Entries by position. Those without one begin at `at`; a ramp comes after weights at the same position."""
    placed = [(at if entry.first is None else entry.first, entry) for entry in entries]
    return sorted(placed, key=lambda pair: (pair[0], pair[1].parameter == "ramp"))


def step_range(text: str) -> tuple[int, int]:
    """
    >>> step_range("0-99"), step_range("7")
    ((0, 99), (7, 7))
    """
    return _range(text, "steps such as 0-99, or one step")


def position_range(text: str) -> tuple[int, int]:
    """
    >>> position_range("802-803"), position_range("802")
    ((802, 803), (802, 802))
    """
    return _range(text, "positions such as 802-803, or one position")


def _range(text: str, what: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d[\d_]*)(?:-(\d[\d_]*))?", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of {what}")
    first = int(match[1])
    return first, int(match[2] or first)


def named_store(text: str) -> tuple[str, str] | None:
    """(name, path) of NAME=STORE; None for a path. What exists is a path, whatever characters it has.

    >>> named_store("web=data/web.store"), named_store("data/a=b.store"), named_store("web.store")
    (('web', 'data/web.store'), None, None)
    """
    match = re.fullmatch(r"([\w.-]+)=(.+)", text, re.DOTALL)
    if match is None or os.path.exists(text):
        return None
    return match[1], match[2]


def paths_by_name(given: Iterable[str], default: str | None = None) -> dict[str | None, list[str]]:
    """Paths of one name together, in order.

    >>> paths_by_name(["web=a.jsonl", "b.jsonl", "web=c.jsonl"])
    {'web': ['a.jsonl', 'c.jsonl'], None: ['b.jsonl']}
    """
    named: dict[str | None, list[str]] = {}
    for text in given:
        name, path = named_store(text) or (default, text)
        named.setdefault(name, []).append(path)
    return named
