"""Retention of rows. The rows that stay are a function of their number, a column, the seed and the journal number.

The functions keep no state. The same arguments give the same rows in every process, so replaying a journal makes the
same choices again. Tests pin the choices, since saved buffers depend on them.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchwright.base.errors import SpecError
from batchwright.base.seeds import U64, key_of, mix64
from batchwright.base.words import suggest
from batchwright.buffer.schema import Numbers

_STRATEGIES = {
    "retain_prior_by": ("latest", "oldest", "random"),
    "drop_strategy": ("oldest", "random"),
    "by": ("uniform", "recent"),
}
"""The named strategies of each parameter. Other names are columns."""
_NAMED = _STRATEGIES["retain_prior_by"]

_SPARSE = 8
"""At most 1/8 of the rows are chosen by drawing until enough are distinct; more of them by a number for each row."""

_ALL = 2**64 - 1
_LOW, _S32 = np.uint64(2**32 - 1), np.uint64(32)
_COUNTED = np.arange(4096, dtype=np.uint64)
_COUNTED.flags.writeable = False


class BufferSettings(NamedTuple):
    """The settings by which a buffer chooses the rows to drop and to draw."""

    max_size: int | None = None
    drop_strategy: str = "oldest"
    seed: int = 0


def kept_count(n: int, fraction: Any) -> int:
    """The number of n rows that `retain_prior=fraction` keeps: floor(n * fraction + 1e-9), and 0 from zero down.

    The 1e-9 is for fractions such as 0.29: 100 rows times 0.29 would be 28.999999999999996.

    >>> kept_count(100, 0.29), kept_count(3, 0.5), kept_count(3, -1)
    (29, 1, 0)
    """
    if not is_number(fraction) or fraction != fraction:
        what = f"retain_prior must be a number from 0 to 1 (not NaN), got {fraction!r}"
        remedy = "retain_prior=1.0 keeps all rows, 0.5 half of them, 0 none"
        raise SpecError(what, parameter="retain_prior", remedy=remedy)
    if fraction > 1:
        remedy = "retain_prior=1.0 for all rows"
        if fraction <= 100:
            remedy = f"retain_prior={float(fraction) / 100:g} if percent are meant, 1.0 for all rows"
        what = f"retain_prior={fraction} is over 1: rows can be kept once at most"
        raise SpecError(what, parameter="retain_prior", remedy=remedy)
    return min(n, math.floor(n * max(float(fraction), 0.0) + 1e-9))


def is_number(value: Any) -> bool:
    """Whether something is a real number of Python or NumPy. True and False are not."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_by(by: Any, numeric: Collection[str], others: Collection[str], *, parameter: str) -> None:
    """Refuse a value that is neither a strategy of this parameter nor a `numeric` column, with or without "-" in front.

    A strategy wins over a column of its name; "-latest" can only be a column. `others` are the columns that hold no
    single number in each row. `parameter` is "retain_prior_by", "drop_strategy" or "by" (of `sample`, which knows
    no "-": a row's value is its share of the draws).
    """
    named = _STRATEGIES[parameter]
    column, use_named = by, f"{parameter}={named[0]!r}"
    if isinstance(by, str) and parameter != "by":
        column = by.removeprefix("-")
    if by in named:
        return
    is_elsewhere = parameter == "drop_strategy" and by in _NAMED
    if isinstance(by, str) and column in numeric and not is_elsewhere:
        return
    if not isinstance(by, str):
        what, remedy = f"{parameter} must be the name of a strategy or a column, got {by!r}", use_named
    elif by in _NAMED:
        what, remedy = f"{parameter}={by!r} is a strategy of retain_prior_by only", use_named
    elif column in others:
        what = f"{parameter}={by!r}: column {column!r} does not hold one number in each row"
        remedy = f"a column of numbers (NaN where one is not known yet), or {use_named}"
    else:
        what = f"{parameter}={by!r} is neither a strategy nor a column that rows have"
        near = _nearest(by, column, named, numeric)
        remedy = f"{use_named}; or add the column: buffer.set(buffer.ids, {column}=values)"
        if near is not None:
            remedy = f"{parameter}={near!r}"
    strategies, columns = ", ".join(map(repr, named)), ", ".join(map(repr, numeric)) or "none of numbers"
    raise SpecError(what, parameter=parameter, strategies=strategies, columns=columns, remedy=remedy)


def _nearest(by: str, column: str, named: Collection[str], numeric: Collection[str]) -> str | None:
    near = suggest(by, [*named, *numeric]) or suggest(column, numeric)
    if near in numeric and by != column:
        return f"-{near}"
    return near


def column_of(by: str) -> str | None:
    """The column of a `retain_prior_by` or `drop_strategy`; None of a named strategy.

    >>> column_of("loss"), column_of("-loss"), column_of("latest"), column_of("-latest")
    ('loss', 'loss', None, 'latest')
    """
    if by in _NAMED:
        return None
    return by.removeprefix("-")


def keep(
    n: int, count: int, by: str, values: Numbers | None = None, *, seed: int, number: int
) -> slice | NDArray[np.int64]:
    """The `count` of n rows that stay, ascending: a slice for "latest" and "oldest".

    | by         | kept                                     |
    |------------|------------------------------------------|
    | "latest"   | the last ones                            |
    | "oldest"   | the first ones                           |
    | "random"   | any, by (seed, number)                   |
    | "x"        | those with the smallest value            |
    | "-x"       | those with the largest value             |

    By a column: of equal values the newer row is kept. Rows whose value is null or NaN are kept last, the newer ones
    of them first. Numbers are compared in their own type: 2**63 + 1 is more than 2**63.
    """
    if by == "latest":
        return slice(n - count, n)
    if by == "oldest" or count == n:
        return slice(0, count)
    if by == "random":
        return choose(n, count, key_of(seed, "retain", number))
    assert values is not None
    return _all_but(_first_to_go(values, n - count, largest=not by.startswith("-")), n)


def drop(
    n: int, count: int, by: str, values: Numbers | None = None, *, seed: int, number: int
) -> slice | NDArray[np.int64]:
    """The `count` of n rows that go, ascending: a slice for "oldest".

    By a column they are those that `keep` by the other sign leaves.

    | by         | dropped                                  |
    |------------|------------------------------------------|
    | "oldest"   | the first ones                           |
    | "random"   | any, by (seed, number)                   |
    | "x"        | those with the smallest value            |
    | "-x"       | those with the largest value             |
    """
    if by == "oldest" or count == n:
        return slice(0, count)
    if by == "random":
        return choose(n, count, key_of(seed, "drop", number))
    assert values is not None
    return _first_to_go(values, count, largest=by.startswith("-"))


def _first_to_go(column: Numbers, count: int, *, largest: bool) -> NDArray[np.int64]:
    """The `count` rows, ascending, that go: null and NaN, then by value, and the older one first of equals."""
    values, valid = column
    if count == 1 and valid is None:
        # Both of these take a NaN for the extreme, and the first of equals: the very row. And they are the fastest.
        return np.array([values.argmax() if largest else values.argmin()], np.int64)
    if values.dtype == np.bool_:
        values = values.view(np.uint8)
    missing = ~column.has_value
    if values.dtype.kind == "f":
        missing |= np.isnan(values)
    lost = np.flatnonzero(missing)
    if not len(lost):
        return _extreme(values, count, largest=largest)
    if len(lost) >= count:
        return lost[:count].astype(np.int64, copy=False)
    there = np.flatnonzero(~missing)
    rest = there[_extreme(values[there], count - len(lost), largest=largest)]
    return np.sort(np.concatenate([lost, rest])).astype(np.int64, copy=False)


def _extreme(values: NDArray[Any], count: int, *, largest: bool) -> NDArray[np.int64]:
    """The `count` rows with the smallest (largest) values, ascending, the first ones of equals. No nulls, no NaN."""
    if count == 0:
        return np.empty(0, np.int64)
    kth = count - 1
    is_beyond: np.ufunc = np.less
    if largest:
        kth, is_beyond = len(values) - count, np.greater
    limit = np.partition(values, kth)[kth]
    goes = is_beyond(values, limit)
    equal = np.flatnonzero(values == limit)
    goes[equal[: count - np.count_nonzero(goes)]] = True
    return np.flatnonzero(goes).astype(np.int64, copy=False)


def choose(n: int, count: int, key: int) -> NDArray[np.int64]:
    """`count` distinct numbers of [0, n), ascending, every such set as likely as any other.

    The first `count` distinct numbers of a keyed series, or, if that would draw too many twice, the rows with the
    smallest of n keyed numbers. The cost is O(count) and a sort of that up to an eighth of n, and O(n) above it.

    >>> choose(1_000_000, 3, key=7)
    array([ 72970, 509466, 833665])
    """
    assert 0 <= count <= n
    if count == 1:
        return np.array([_mix_zero(key) * n >> 64], np.int64)
    if 2 * count > n:
        return _all_but(choose(n, n - count, key), n)
    if _SPARSE * count > n:
        noise = mix64(sequence(0, n), np.uint64(key))  # all different: mix64 is a bijection
        limit = np.partition(noise, count - 1)[count - 1]
        return np.flatnonzero(noise <= limit).astype(np.int64, copy=False)
    chosen, num_drawn = np.empty(0, np.int64), 0
    while len(chosen) < count:
        # Never more than are missing, so that the set does not depend on how many are drawn at once.
        more = count - len(chosen)
        noise = mix64(sequence(num_drawn, more), np.uint64(key))
        chosen = _distinct(np.concatenate([chosen, below(noise, n)]))
        num_drawn += more
    return chosen


def _mix_zero(key: int) -> int:
    """mix64(0, key) without an array: one row goes with every append to a full buffer that drops at random."""
    z = key
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _ALL
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _ALL
    return z ^ z >> 31


def _distinct(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """The result of np.unique, in a tenth of the time."""
    numbers.sort()
    is_new = numbers[1:] != numbers[:-1]
    if not is_new.all():
        numbers = numbers[np.concatenate([[True], is_new])]
    return numbers


def _all_but(gone: NDArray[np.int64], n: int) -> NDArray[np.int64]:
    stays = np.ones(n, np.bool_)
    stays[gone] = False
    return np.flatnonzero(stays).astype(np.int64, copy=False)


def sequence(start: int, count: int) -> U64:
    """`count` numbers from `start` on, to be mixed; not to be written to."""
    stop = start + count
    return _COUNTED[start:stop] if stop <= len(_COUNTED) else np.arange(start, stop, dtype=np.uint64)


def below(noise: U64, n: int) -> NDArray[np.int64]:
    """Map 64-bit noise onto [0, n): exactly floor(noise * n / 2^64), for n up to 2^63.

    Each number comes from floor or ceil(2^64 / n) of the 2^64 noises, so its probability is off by less than
    n / 2^64 of itself: 6e-14 for 10^6 rows, 6e-8 for 2^40.

    >>> below(np.array([0, 2**63, 2**64 - 1], np.uint64), 10)
    array([0, 5, 9])
    """
    if n >> 32:  # exact, and slow: no buffer has that many rows
        return np.array([number * n >> 64 for number in noise.tolist()], np.int64)
    high, low, limit = noise >> _S32, noise & _LOW, np.uint64(n)
    low *= limit
    low >>= _S32
    high *= limit
    high += low
    high >>= _S32
    return high.view(np.int64)
