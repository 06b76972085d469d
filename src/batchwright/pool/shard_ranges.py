"""Which numbered files of a folder are meant: "0-99", "7", "0-9,20-29", "all" or "none".

Ranges are inclusive. The number of a file is the last integer in its name before its extension, compared as a number:
`shard_0012.pkl.gz` is 12, and "12" means it. A number that is asked for and not there is an error that lists it: a
shard that was lost on the way is not trained without.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from batchwright.base.errors import SpecError
from batchwright.columns.shard import EXTENSIONS

__all__ = ["ShardRange", "are_ids", "choose", "extension_of", "number_of", "parse_range", "range_text"]

_PART = re.compile(r"([0-9]+)(?:\s*-\s*([0-9]+))?", re.ASCII)
_WITH_SIGN = re.compile(r"-\s*[0-9]+(\s*-.*)?|[0-9]+\s*-\s*-\s*[0-9]+", re.ASCII)
_MOST_DIGITS = 40
_MOST_LISTED = 20
"""Stretches of numbers that an error lists."""
_MOST_TEXT = 1000
"""Characters of a range that an error offers: a longer one is not for reading."""

Stretch = tuple[int, int]
"""First and last of numbers that follow each other."""


# Names


def extension_of(name: str) -> str | None:
    """What makes a name that of a shard, or None.

    >>> extension_of("shard_0012.pkl.gz"), extension_of("README.md"), extension_of("shard_1.npz.tmp")
    ('.pkl.gz', None, None)
    """
    lowered = name.lower()
    return next((extension for extension in EXTENSIONS if lowered.endswith(extension)), None)


def number_of(name: str) -> int | None:
    """The last integer in a shard's name before its extension, or None where it has none.

    >>> number_of("shard_0012.pkl.gz"), number_of("run2_shard-007.npz"), number_of("shard.0003.npz")
    (12, 7, 3)
    >>> number_of("positions.npz") is None
    True
    """
    stem = name[: len(name) - len(extension_of(name) or "")]
    digits = re.findall(r"[0-9]+", stem)
    return int(digits[-1]) if digits else None


# Ranges


@dataclass(frozen=True, slots=True)
class ShardRange:
    """Numbers that are asked for, as stretches in rising order. `str` gives it as one would write it."""

    stretches: tuple[Stretch, ...] | None
    """None means all that there are."""

    @property
    def is_all(self) -> bool:
        return self.stretches is None

    @property
    def is_none(self) -> bool:
        return self.stretches == ()

    def __contains__(self, number: object) -> bool:
        """
        >>> 25 in parse_range("0-9,20-29"), 12 in parse_range("0-9,20-29")
        (True, False)
        """
        if self.stretches is None:
            return True
        if not isinstance(number, int):
            return False
        after = bisect_right(self.stretches, number, key=_first)
        return after > 0 and number <= self.stretches[after - 1][1]

    def __str__(self) -> str:
        return "all" if self.stretches is None else _joined(self.stretches, ",") or "none"


def parse_range(
    text: Any, *, directory: str | None = None, index: int | None = None, parameter: str = "shard_ranges"
) -> ShardRange:
    """The range that a text means. `directory` and `index` say in an error which of several it is.

    >>> print(parse_range("0-99"), parse_range(" 20 - 29, 0-9 "), parse_range("all"), parse_range("none"))
    0-99 0-9,20-29 all none
    """
    where = {"parameter": parameter, "index": index, "directory": directory, "range": repr(text)}
    if not isinstance(text, str):
        raise SpecError(
            f"a range of shards is a text, and this is {_a(type(text).__name__)}",
            **where,
            remedy=f'"{_meant_by(text)}"',
        )
    lowered = text.strip().lower()
    if lowered in ("all", "none"):
        return ShardRange(None if lowered == "all" else ())
    if not lowered:
        raise SpecError("this range of shards is empty", **where, remedy='"all" for every shard, "none" for no shard')
    stretches = []
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None or any(len(digits or "") > _MOST_DIGITS for digits in match.groups()):
            raise _not_a_range(text, part.strip(), where)
        first = int(match[1])
        last = first if match[2] is None else int(match[2])
        if last < first:
            raise SpecError(
                f"this range of shards is reversed: {first} is after {last}",
                **where,
                remedy=f'"{_replaced(text, part, f"{last}-{first}")}"',
            )
        stretches.append((first, last))
    stretches.sort()
    merged = _merged(stretches)
    for (first, last), (following, end) in pairwise(stretches):
        if following <= last:
            raise SpecError(
                "parts of this range of shards overlap: "
                f"{_shown((first, last))} and {_shown((following, end))} share {_shown((following, min(last, end)))}",
                **where,
                remedy=f'"{_joined(merged, ",")}"',
            )
    return ShardRange(tuple(merged))


def choose(
    wanted: ShardRange,
    there: Iterable[int],
    *,
    directory: str | None = None,
    index: int | None = None,
    parameter: str = "shard_ranges",
) -> list[int]:
    """The numbers of a range out of those that are there, in rising order; an error lists those that are missing.

    "all" must have no gaps, unless fewer than half of the numbers between the first and the last are there: such
    numbers are ids, and say nothing of what is missing.

    >>> choose(parse_range("2-3"), [3, 1, 2]), choose(parse_range("all"), [17, 4011, 90210])
    ([2, 3], [17, 4011, 90210])
    """
    numbers = sorted(set(there))
    if wanted.stretches is None:
        asked = [(numbers[0], numbers[-1])] if numbers and not are_ids(numbers) else []
        chosen = numbers
    else:
        asked = list(wanted.stretches)
        chosen = [number for number in numbers if number in wanted]
    missing = _without(asked, _stretches(numbers))
    if missing:
        fits = range_text(chosen) if chosen else "all"
        raise SpecError(
            f"shards {_listed(missing)} of range {str(wanted)!r} are not there"
            if _count(missing) > 1
            else f"shard {_listed(missing)} of range {str(wanted)!r} is not there",
            parameter=parameter,
            index=index,
            directory=directory,
            range=repr(str(wanted)),
            missing=_listed(missing),
            there=_listed(_stretches(numbers)) or "no shard",
            remedy=(f'"{fits}"' if len(fits) <= _MOST_TEXT else "a range of those that are there")
            + ", or bring back what is missing",
        )
    return chosen


def are_ids(numbers: Sequence[int]) -> bool:
    """Whether sorted numbers are no sequence: fewer than half of those between the first and the last are there.

    >>> are_ids([0, 1, 2, 4]), are_ids([17, 4011, 90210])
    (False, True)
    """
    return 2 * len(numbers) < numbers[-1] - numbers[0] + 1


def range_text(numbers: Iterable[int]) -> str:
    """The range that means exactly these numbers.

    >>> range_text([0, 1, 2, 7, 9, 10]), range_text([])
    ('0-2,7,9-10', 'none')
    """
    return _joined(_stretches(sorted(set(numbers))), ",") or "none"


# Stretches


def _stretches(numbers: Sequence[int]) -> list[Stretch]:
    found: list[Stretch] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found


def _merged(stretches: Sequence[Stretch]) -> list[Stretch]:
    """Sorted stretches, with those that touch or overlap as one."""
    found: list[Stretch] = []
    for first, last in stretches:
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        else:
            found.append((first, last))
    return found


def _without(asked: Sequence[Stretch], there: Sequence[Stretch]) -> list[Stretch]:
    """What of `asked` is not in `there`. By stretches, so that "0-999999999" costs nothing."""
    missing: list[Stretch] = []
    for first, last in asked:
        at = first
        for place in range(bisect_left(there, first, key=_last), len(there)):
            begin, end = there[place]
            if begin > last:
                break
            if begin > at:
                missing.append((at, begin - 1))
            at = end + 1
        if at <= last:
            missing.append((at, last))
    return missing


def _first(stretch: Stretch) -> int:
    return stretch[0]


def _last(stretch: Stretch) -> int:
    return stretch[1]


def _count(stretches: Sequence[Stretch]) -> int:
    return sum(last - first + 1 for first, last in stretches)


# Words


def _shown(stretch: Stretch) -> str:
    first, last = stretch
    return str(first) if first == last else f"{first}-{last}"


def _joined(stretches: Sequence[Stretch], between: str) -> str:
    return between.join(map(_shown, stretches))


def _listed(stretches: Sequence[Stretch]) -> str:
    rest = stretches[_MOST_LISTED:]
    return _joined(stretches[:_MOST_LISTED], ", ") + (f" and {_count(rest):,} more" if rest else "")


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _meant_by(value: Any) -> str:
    """The text that someone may have meant who gave something else: 7, (0, 99), range(100), None."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return str(value)
    if isinstance(value, range) and value.step == 1 and len(value):
        return _shown((value[0], value[-1]))
    if (
        isinstance(value, list | tuple)
        and len(value) == 2
        and all(isinstance(number, int) and number >= 0 for number in value)
        and value[0] <= value[1]
    ):
        return _shown((value[0], value[1]))
    return "none" if value is None else "all"


def _replaced(text: str, part: str, by: str) -> str:
    parts = [by if each == part else each.strip() for each in text.split(",")]
    return ",".join(parts)


def _not_a_range(text: str, part: str, where: dict[str, Any]) -> SpecError:
    if part.lower() in ("all", "none"):
        return SpecError(
            f"{part!r} stands alone, not beside other parts of a range", **where, remedy=f'"{part.lower()}"'
        )
    if _WITH_SIGN.fullmatch(part):
        unsigned = re.findall(r"[0-9]+", part)
        bounds = sorted({int(digits[:_MOST_DIGITS]) for digits in unsigned[:2]})
        return SpecError(
            f"{part!r} has a negative number, and shards are numbered from 0 on",
            **where,
            remedy=f'"0-{bounds[-1]}"',
        )
    of = "" if part == text.strip() else f" (a part of {text.strip()!r})"
    return SpecError(
        f"{part!r}{of} is not a range of shards",
        **where,
        remedy='"0-99" (both are included), "7", "0-9,20-29", "all" or "none"',
    )
