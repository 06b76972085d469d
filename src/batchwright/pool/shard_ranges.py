"""Ranges of numbered shard files in a folder: "0-99", "7", "0-9,20-29", "all" or "none".

Ranges are inclusive. The number of a file is the last integer in its name before its extension, compared as a number:
`shard_0012.pkl.gz` is 12, and "12" means it. Missing numbers are an error that lists them, so that
no training runs without a lost shard.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from batchwright.base.errors import SpecError
from batchwright.base.words import listed, truncated
from batchwright.columns.shard import EXTENSIONS

__all__ = ["ShardRange", "are_ids", "choose", "extension_of", "number_of", "parse_range", "range_text"]

_PART = re.compile(r"\s*([0-9]{1,40})\s*(?:-\s*([0-9]{1,40})\s*)?", re.ASCII)
_EXAMPLES = '"0-99" (both are included), "7", "0-9,20-29", "all" or "none"'
_MOST_LISTED = 20
"""Stretches of numbers that an error lists."""
_MOST_TEXT = 1000
"""Characters of a range that an error offers."""
_NOWHERE: dict[str, Any] = {"parameter": "shard_ranges", "index": None, "directory": None}

Stretch = tuple[int, int]
"""First and last of numbers that follow each other."""


# Names


def extension_of(name: str) -> str | None:
    """The extension of a shard's name; None for every other name.

    >>> extension_of("shard_0012.pkl.gz"), extension_of("README.md"), extension_of("shard_1.npz.tmp")
    ('.pkl.gz', None, None)
    """
    lowered = name.lower()
    return next((extension for extension in EXTENSIONS if lowered.endswith(extension)), None)


def number_of(name: str) -> int | None:
    """The last integer in a shard's name before its extension, or None if it has none.

    >>> number_of("shard_0012.pkl.gz"), number_of("run2_shard-007.npz"), number_of("shard.0003.npz")
    (12, 7, 3)
    >>> number_of("positions.npz") is None
    True
    """
    stem = name[: len(name) - len(extension_of(name) or "")]
    digits = re.findall(r"[0-9]+", stem)
    if not digits:
        return None
    return int(digits[-1])


# Ranges


@dataclass(frozen=True, slots=True)
class ShardRange:
    """Numbers that are asked for. `str` gives the text that means them."""

    stretches: tuple[Stretch, ...] | None
    """Stretches in rising order, with gaps between them. None means all existing numbers."""

    @property
    def is_all(self) -> bool:
        return self.stretches is None

    @property
    def is_none(self) -> bool:
        return self.stretches == ()

    def __str__(self) -> str:
        if self.stretches is None:
            return "all"
        return _text_of(self.stretches)


def parse_range(text: Any, **where: Any) -> ShardRange:
    """The range that a text means. Errors name the place `where` it is: `directory`, `index`, `parameter`.

    >>> print(parse_range("0-99"), parse_range(" 20 - 29, 0-9, 5-12 "), parse_range("all"), parse_range("none"))
    0-99 0-12,20-29 all none
    """
    where = _NOWHERE | where | {"range": repr(text)}
    if not isinstance(text, str):
        raise SpecError(f"a range of shards is a text, not {text!r}"[:200], **where, remedy=_EXAMPLES)
    match text.strip().lower():
        case "all":
            return ShardRange(None)
        case "none":
            return ShardRange(())
    stretches = []
    for part in text.split(","):
        match = _PART.fullmatch(part)
        if match is None:
            raise SpecError(f"{part.strip()[:80]!r} is not a range of shards", **where, remedy=_EXAMPLES)
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            what = f"this range of shards is reversed: {first} is after {last}"
            raise SpecError(what, **where, remedy=f'"{last}-{first}"')
        stretches.append((first, last))
    return ShardRange(tuple(_merged(sorted(stretches))))


def choose(wanted: ShardRange, there: Iterable[int], **where: Any) -> list[int]:
    """The numbers of a range among the existing ones, in rising order. An error lists the missing numbers,
    and names the place as in `parse_range`.

    "all" must have no gaps, unless fewer than half of the numbers between the first and the last are there. Such
    numbers are ids, and their gaps are not missing shards.

    >>> choose(parse_range("2-3"), [3, 1, 2]), choose(parse_range("all"), [17, 4011, 90210])
    ([2, 3], [17, 4011, 90210])
    """
    numbers = sorted(set(there))
    asked = wanted.stretches
    if asked is None:
        if not numbers or are_ids(numbers):
            return numbers
        asked = ((numbers[0], numbers[-1]),)
    chosen: list[int] = []
    missing: list[Stretch] = []
    for first, last in asked:
        inside = numbers[bisect_left(numbers, first) : bisect_right(numbers, last)]
        chosen += inside
        missing += [(a + 1, b - 1) for a, b in pairwise([first - 1, *inside, last + 1]) if b - a > 1]
    if not missing:
        return chosen
    fits = "all"
    if chosen:
        fits = range_text(chosen)
    noun, verb = ("shard", "is") if missing[0][0] == missing[-1][1] else ("shards", "are")
    where = _NOWHERE | where | {"range": repr(str(wanted)), "missing": _listed(missing)}
    raise SpecError(
        f"{noun} {_listed(missing)} of range {str(wanted)!r} {verb} not there",
        **where,
        there=_listed(_stretches(numbers)) or "no shard",
        remedy=f'"{truncated(fits, _MOST_TEXT)}", or bring back what is missing',
    )


def are_ids(numbers: Sequence[int]) -> bool:
    """Whether sorted numbers are ids: fewer than half of those between the first and the last are there.

    >>> are_ids([0, 1, 2, 4]), are_ids([17, 4011, 90210])
    (False, True)
    """
    return 2 * len(numbers) < numbers[-1] - numbers[0] + 1


def range_text(numbers: Iterable[int]) -> str:
    """The range that means exactly these numbers.

    >>> range_text([0, 1, 2, 7, 9, 10]), range_text([])
    ('0-2,7,9-10', 'none')
    """
    return _text_of(_stretches(sorted(set(numbers))))


def _stretches(numbers: Sequence[int]) -> list[Stretch]:
    return _merged([(number, number) for number in numbers])


def _merged(stretches: Sequence[Stretch]) -> list[Stretch]:
    """Sorted stretches, with those that touch or overlap as one."""
    found: list[Stretch] = []
    for first, last in stretches:
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        else:
            found.append((first, last))
    return found


def _text_of(stretches: Sequence[Stretch]) -> str:
    return ",".join(map(_shown, stretches)) or "none"


def _listed(stretches: Sequence[Stretch]) -> str:
    return listed(map(_shown, stretches), _MOST_LISTED)


def _shown(stretch: Stretch) -> str:
    first, last = stretch
    if first == last:
        return str(first)
    return f"{first}-{last}"
