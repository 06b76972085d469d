"""The rows that a step draws: uniformly, newer rows more often, or by a column. Draws are functions without state.

    draw(num_rows, 256, seed=0, number=17, step=3)                          uniform
    draw(num_rows, 256, seed=0, number=17, step=3, by="recent")             half as often every half_life rows of age
    draw(num_rows, 256, seed=0, number=17, step=3, by="loss", priorities=Priorities(loss, column="loss"))

The key of a draw is (seed, number, step, by, replace): the same call gives the same rows in any process, and draws
that differ in one of these are independent. Rows are computed with integers and with the operations
that IEEE 754 defines to the last bit, not with the machine's log, so that they are the same on every kind of machine.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Context, Decimal
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.base.checks import at_least, whole_number
from batchwright.base.errors import SpecError
from batchwright.base.seeds import U64, key_of, mix64
from batchwright.buffer.retain import below, choose, is_number, sequence

F64 = NDArray[np.float64]

_BLOCK = 8192
_S12 = np.uint64(12)
_SQRT_HALF = math.sqrt(0.5)
_LN2 = 0.6931471805599453
_TINY = float(np.finfo(np.float64).tiny)
"""The smallest probability that is reported: weights divide by it."""


@dataclass(frozen=True, slots=True)
class SampleDraw:
    """The rows that were drawn, in the order in which they were drawn."""

    index: NDArray[np.int64]
    chance: F64 | float
    """One number if all rows are equally probable."""

    @property
    def probability(self) -> F64:
        """The probabilities in one draw from all rows: the first draw if replace=False; later ones have fewer rows."""
        if isinstance(self.chance, float):
            return np.full(len(self.index), self.chance)
        return self.chance


class Priorities:
    """A column to draw by: a row's probability is proportional to value**power. Built once for each version, O(n).

    A null counts as 0, and rows with 0 are never drawn, at any power. A draw looks rows up in float64 sums, so a
    row with less than 1e-16 of the whole may never come. Powers other than 0.5, 1 and 2 use the machine's pow, which
    may differ in the last bit between kinds of machines.

    >>> p = Priorities(np.array([1.0, 0.0, 3.0]), column="loss")
    >>> p.probability(np.array([0, 2]))
    array([0.25, 0.75])
    """

    __slots__ = ("num_available", "shares", "sums", "total")

    def __init__(
        self,
        values: NDArray[Any],
        valid: NDArray[np.bool_] | None = None,
        power: float = 1.0,
        *,
        column: str = "priority",
    ) -> None:
        power = _not_negative(power=power)
        plain = values.astype(np.float64)
        if valid is not None:
            plain[~valid] = 0.0
        smallest, largest = float(plain.min(initial=0.0)), float(plain.max(initial=0.0))
        what = f"column {column!r} cannot be drawn by"
        if not (smallest >= 0 and largest < math.inf):  # so written that NaN is caught: it is the extreme of all
            row = int((~((plain >= 0) & (plain < math.inf))).argmax())
            what = f"{what}: its value in row {row} is {values[row]}"
            remedy = "priorities are finite and at least 0; null or 0 where a row is not to be drawn"
            raise SpecError(what, parameter="by", column=column, row=row, remedy=remedy)
        if largest == 0.0:
            remedy = "by='uniform', or set priorities first"
            raise SpecError(f"{what}: no row has a priority above 0", parameter="by", column=column, remedy=remedy)
        if power != 1.0:
            shares = np.where(plain > 0, _raised(plain / largest, power), 0.0)
        elif 2.0**-500 < largest < 2.0**500:
            shares = plain
        else:
            shares = np.ldexp(plain, -math.frexp(largest)[1])  # their sum would overflow, or be too small to divide by
        self.shares: F64 = shares
        self.sums: F64 = np.cumsum(shares)
        self.total: float = float(self.sums[-1])
        self.num_available: int = int(np.count_nonzero(shares))

    def __len__(self) -> int:
        return len(self.shares)

    def find(self, unit: F64) -> NDArray[np.int64]:
        """The rows whose parts of [0, 1) hold these numbers."""
        return np.searchsorted(self.sums, unit * self.total, side="right").astype(np.int64, copy=False)

    def probability(self, index: NDArray[np.int64]) -> F64:
        return self.shares[index] / self.total


def draw(
    num_rows: int,
    count: int,
    *,
    seed: int,
    number: int,
    step: int,
    by: str = "uniform",
    priorities: Priorities | None = None,
    half_life: float | None = None,
    replace: bool = True,
) -> SampleDraw:
    """`count` of the rows [0, num_rows), newest last: a pure function of all that is passed.

    | by         | a row's probability                                                       | cost        |
    |------------|---------------------------------------------------------------------------|-------------|
    | "uniform"  | 1 / num_rows, to within num_rows / 2^64 of itself                         | O(count)    |
    | "recent"   | halves every `half_life` rows of age (a quarter of the rows, if not said); | O(count)    |
    |            | rows older than 53 half lives never come                                  |             |
    | a column   | its share of `priorities`, which must be there                            | count log n |

    With replacement, fewer draws at the same step are the first of more. replace=False gives distinct rows, as if
    each draw were from those that are left: O(count) when uniform, up to an eighth of the rows; else O(num_rows).
    Errors call the count `n`, as `sample` does.
    """
    count, step, seed = at_least(0, n=count), whole_number(step=step), whole_number(seed=seed)
    if half_life is not None and by != "recent":
        raise SpecError(f"half_life is of by='recent', not of by={by!r}", parameter="half_life", remedy="by='recent'")
    assert (priorities is None) == (by in ("uniform", "recent"))
    if priorities is None:
        _check_count(count, num_rows, replace)
    else:
        _check_count(count, priorities.num_available, replace, f" with a priority above 0, of {num_rows}")
    key = key_of(seed, "sample", number, step, by, "again" if replace else "once")
    if by == "uniform":
        return _draw_uniformly(num_rows, count, key, replace)
    if priorities is None:
        return _draw_recent(num_rows, count, key, replace, _lives_of(num_rows, half_life))
    assert len(priorities) == num_rows
    return _draw_by_priority(priorities, count, key, replace)


def _check_count(count: int, available: int, replace: bool, which: str = "") -> None:
    if count and not available:
        raise SpecError("there are no rows to draw from", parameter="n", remedy="append rows first")
    if count > available and not replace:
        what = f"{count} distinct rows cannot be drawn: there are {available}{which}"
        raise SpecError(what, parameter="n", remedy=f"n={available} at most, or replace=True")


def _noise(count: int, key: int) -> U64:
    return mix64(sequence(0, count), np.uint64(key))


def _draw_uniformly(num_rows: int, count: int, key: int, replace: bool) -> SampleDraw:
    if replace:
        index = below(_noise(count, key), num_rows)
    else:
        chosen = choose(num_rows, count, key)
        index = chosen[np.argsort(_noise(count, key_of(key, "order")))]
    return SampleDraw(index, 1 / max(num_rows, 1))


def _draw_recent(num_rows: int, count: int, key: int, replace: bool, lives: float) -> SampleDraw:
    if replace:
        index = _recent(num_rows, lives, _unit(_noise(count, key)))
    else:
        age = np.arange(num_rows - 1, -1, -1, dtype=np.float64)
        index = _first_drawn(age * (-_LN2 / lives), count, key)
    return SampleDraw(index, _recent_probability(num_rows, lives, index))


def _draw_by_priority(priorities: Priorities, count: int, key: int, replace: bool) -> SampleDraw:
    if replace:
        index = priorities.find(_unit(_noise(count, key)))
    else:
        there = np.flatnonzero(priorities.shares)
        index = there[_first_drawn(_log(priorities.shares[there]), count, key)]
    return SampleDraw(index, np.maximum(priorities.probability(index), _TINY))


def weights(probability: F64, beta: float = 1.0) -> F64:
    """Importance weights of drawn rows: (num_rows * probability) ** -beta, divided by the largest of them.

    beta=1 undoes the preference in full, beta=0 (all ones) not at all. The number of rows cancels out in the division.

    >>> weights(np.array([0.25, 0.5, 0.25]))
    array([1. , 0.5, 1. ])
    """
    beta = _not_negative(beta=beta)
    smallest = np.float64(probability.min(initial=np.inf))
    return (smallest / probability) ** beta


def _first_drawn(log_shares: F64, count: int, key: int) -> NDArray[np.int64]:
    """The rows of the first `count` draws without replacement, in order (Efraimidis and Spirakis, 2006).

    A row waits for a time that is exponential with its share as the rate; those that come first are drawn. The
    logarithm of the time: shares of any size fit.
    """
    if count == 0:
        return np.empty(0, np.int64)
    time = _log(-_log(_unit(_noise(len(log_shares), key))))
    time -= log_shares
    # By the value of the last one in, not by argpartition, which orders equal times differently on other machines.
    early = np.flatnonzero(time <= np.partition(time, count - 1)[count - 1])
    first = early[np.argsort(time[early], kind="stable")][:count]
    return first.astype(np.int64, copy=False)


def _lives_of(num_rows: int, half_life: Any) -> float:
    """The half life in rows, held to where float64 can tell it from none and from no end."""
    if half_life is None:
        return max(num_rows, 1) / 4
    lives = _not_negative(half_life=half_life)
    if lives == 0.0:
        raise SpecError("half_life must be above 0", parameter="half_life", remedy=f"half_life={max(num_rows // 4, 1)}")
    return min(max(lives, 2.0**-9), max(num_rows, 1) * 2.0**50)


def _recent(num_rows: int, lives: float, unit: F64) -> NDArray[np.int64]:
    """The inverse of the distribution of age: a = floor(log(1 - u * (1 - 2^(-n/h))) / log(2^(-1/h)))."""
    past = unit * -_whole(num_rows, lives)
    left = 1.0 + past
    # log(1 + x) as log(y) * x / (y - 1), which forgives that y = 1 + x was rounded; where y is 1 it is x itself.
    lost = left - 1.0
    is_one = lost == 0.0
    lost[is_one] = 1.0
    log_left = np.where(is_one, past, _log(left) * (past / lost))
    age = (log_left * (-lives / _LN2)).astype(np.int64)
    np.minimum(age, num_rows - 1, out=age)
    np.subtract(num_rows - 1, age, out=age)
    return age


def _recent_probability(num_rows: int, lives: float, index: NDArray[np.int64]) -> F64:
    age = (num_rows - 1 - index).astype(np.float64)
    newest = -math.expm1(-_LN2 / lives) / _whole(num_rows, lives)
    return np.maximum(np.exp2(age / -lives) * newest, _TINY)


@lru_cache(maxsize=64)
def _whole(num_rows: int, lives: float) -> float:
    """1 - 2^(-n/h), the same on every machine: decimal arithmetic, not the machine's expm1."""
    if not num_rows:
        return 1.0
    context = Context(prec=40, rounding=ROUND_HALF_EVEN, traps=[])
    halvings = context.divide(Decimal(num_rows), Decimal(lives))
    return float(context.subtract(Decimal(1), context.power(Decimal(2), -halvings)))


def _unit(noise: U64) -> F64:
    """64-bit noise as numbers between 0 and 1, both excluded."""
    noise >>= _S12
    unit = noise.astype(np.float64)
    unit += 0.5
    unit *= 2.0**-52
    return unit


def _log(x: F64) -> F64:
    """The natural logarithm to within 2e-15 of itself, the same on every machine.

    Of x = m * 2^e with m near 1: e * log 2 + 2 * atanh((m - 1) / (m + 1)), the latter as a series in its square.
    """
    if len(x) > 2 * _BLOCK:  # in parts that stay in the cache
        return np.concatenate([_log(x[start : start + _BLOCK]) for start in range(0, len(x), _BLOCK)])
    m, e = np.frexp(x)
    is_low = m < _SQRT_HALF
    m = np.where(is_low, m * 2.0, m)
    s = (m - 1.0) / (m + 1.0)
    square = s * s
    series = np.full_like(square, 1 / 19)
    for odd in range(17, 0, -2):
        series *= square
        series += 1 / odd
    series *= s
    series *= 2.0
    series += (e - is_low) * _LN2
    return series


def _raised(x: F64, power: float) -> F64:
    if power == 0.5:
        return np.sqrt(x)
    return x * x if power == 2.0 else x**power


def _not_negative(**parameter: Any) -> float:
    """The one named parameter as a finite float from 0 up."""
    ((name, value),) = parameter.items()
    if not is_number(value) or not 0 <= value <= sys.float_info.max:
        what = f"{name} must be a finite number of at least 0, got {value!r}"
        raise SpecError(what, parameter=name, remedy=f"{name}=1.0")
    return float(value)
