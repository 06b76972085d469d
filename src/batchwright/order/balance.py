"""Balance of work. The rows of a global batch are divided among ranks so that all ranks have about the same work.

    costs = Cost(linear=1, quadratic=0).costs(lengths)     # a * n + b * n * n of each row of n tokens
    balanced = balance(costs, world=8, equal_counts=True)  # equal_counts: for batches that are padded
    balanced.rows(rank)                                    # the rows of a rank, ascending
    imbalance(costs, balanced)                             # max / mean - 1, and its lower bound

Every rank computes the whole division for itself, so the result must be the same everywhere. Costs are integers
internally, ties go by row number, and the only implementation is in NumPy.

Rows are dealt from the largest to the smallest. Each goes to the rank with the least work that has room. If there are
many rows, only the largest and the smallest are dealt one by one; the others go to all ranks in turn, back and forth,
which costs one reshape. Then the rank with the most work exchanges rows with other ranks. This ends when no exchange
reduces the maximum, when the lower bound is reached, or after 8 searches for each rank (512 in all).

Log-normal lengths go to 8 ranks by tokens at the lower bound: 65,536 in less than 10 ms, 1,024 in about 1 ms
(`python -m benchmarks.rl`). With quadratic costs they end under 1e-6 and 1e-5 over an even division.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from batchwright.base.errors import SpecError
from batchwright.base.plugins import Registry, by_value

__all__ = ["Balancing", "balance", "balancing_of", "imbalance", "register_balancing"]

_MOST = 1 << 62
"""Costs times the number of rows stay below: sums, and keys that hold a cost and a row number, fit in 64 bits."""
_ONE_BY_ONE = 1024
"""Rows that are dealt one by one: this number of the largest, and at least this number of the smallest."""
_MOST_SEARCHES = 512
_LARGEST_COEFFICIENT = 1e200
"""The largest coefficient of a cost, so that costs of any row stay finite."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a row of n tokens: linear * n + quadratic * n * n. Only the ratio of the two coefficients matters.

    >>> Cost(linear=2, quadratic=1).costs([3, 10])
    array([ 15, 120])
    """

    linear: float = 1.0
    """The work of each token: matrix products, the vocabulary."""
    quadratic: float = 0.0
    """The work of each pair of tokens: attention."""

    def __post_init__(self) -> None:
        for name, usual in (("linear", 1), ("quadratic", 0)):
            value = getattr(self, name)
            if not isinstance(value, int | float | np.number) or not 0 <= value <= _LARGEST_COEFFICIENT:
                raise SpecError(
                    f"{name} must be a number from 0 to {_LARGEST_COEFFICIENT:g}, got {value!r}",
                    parameter=name,
                    remedy=f"{name}={usual}, or another such number",
                )
        if not self.linear and not self.quadratic:
            raise SpecError(
                "a cost of linear=0 and quadratic=0: no row would cost anything",
                parameter="linear",
                remedy="linear=1 to share tokens evenly",
            )

    def costs(self, lengths: ArrayLike) -> NDArray[np.int64] | NDArray[np.float64]:
        """The cost of each row: int64 where both coefficients are whole numbers and the costs fit, else float64."""
        tokens = np.asarray(lengths)
        longest = int(tokens.max(initial=0))
        if float(self.linear).is_integer() and float(self.quadratic).is_integer() and tokens.dtype.kind in "iub":
            linear, quadratic = int(self.linear), int(self.quadratic)
            if linear * longest + quadratic * longest * longest < _MOST:
                whole = tokens.astype(np.int64)
                return linear * whole + quadratic * whole * whole
        real = tokens.astype(np.float64)
        # Two products and one sum, each rounded separately, give the same bits on every machine.
        return float(self.linear) * real + float(self.quadratic) * real * real


@dataclass(frozen=True, slots=True, eq=False)
class Balanced:
    """The rows of a batch that each rank has, as a reordered batch and its split points."""

    order: NDArray[np.int64]
    """Every row once: those of rank 0, of rank 1, ... Inside a rank ascending, so that its part reads as the stream."""
    borders: NDArray[np.int64]
    """Rank r has order[borders[r]:borders[r + 1]]."""
    equal_counts: bool

    @property
    def world(self) -> int:
        return len(self.borders) - 1

    def rows(self, rank: int) -> NDArray[np.int64]:
        return self.order[self.borders[rank] : self.borders[rank + 1]]


class Imbalance(NamedTuple):
    measured: float
    """The largest work of a rank divided by the mean, minus 1. 0 is perfect; other ranks wait for that share."""
    lower_bound: float
    """No division of these rows can have less. The best division may have more."""


def balance(costs: ArrayLike, world: int, *, equal_counts: bool = False) -> Balanced:
    """Divide rows among ranks so that the largest work of a rank is small.

    - Every row goes to exactly one rank. The same costs give the same division on every machine.
    - With equal_counts the numbers of rows are those of `share`: equal if world divides the rows, else within one.
    - Without equal_counts every rank has at least one row if there are as many rows as ranks.
    - If the contiguous split is as good, it is returned. So the result is never worse than the contiguous split.
    - With fewer rows than ranks, each row has its own rank, as `share` says, and the other ranks have none.

    Costs that are not integers are rounded to 2**-44 of the largest cost or finer (for up to 65,536 rows); the rules
    above hold for the rounded costs. The result is not always the best. With a few rows for each rank it can be some
    percent above the best. The same holds for equal counts of rows of two kinds: in 8 draws of 1,024 rows, a tenth of
    them 80 times as long as the others, the busiest of 8 ranks was 0 to 3.1 % above the mean, and up to 1.1 % above
    the lower bound.

    >>> balanced = balance([7, 1, 1, 1, 1, 3], world=2)
    >>> [balanced.rows(rank).tolist() for rank in range(2)]
    [[0], [1, 2, 3, 4, 5]]
    >>> balanced = balance([7, 1, 1, 1, 1, 3], world=2, equal_counts=True)
    >>> [balanced.rows(rank).tolist() for rank in range(2)]
    [[0, 1, 2], [3, 4, 5]]
    """
    work = _as_integers(np.asarray(costs))
    borders = np.arange(world + 1, dtype=np.int64) * len(work) // world
    contiguous = Balanced(np.arange(len(work), dtype=np.int64), borders, equal_counts)
    most_contiguous = _most(work, borders)
    if most_contiguous <= max(_mean(work, world), int(work.max(initial=0))):
        return contiguous
    ascending, rows = _sorted(work)
    bound = _lower_bound(ascending, world, equal_counts)
    shares = _by_rank(_dealt(ascending, world, equal_counts), world)
    if most_contiguous <= max(_exchanged(ascending, shares, bound, equal_counts)):
        return contiguous
    if equal_counts:
        shares = _with_sizes(np.diff(borders).tolist(), shares)
    return _balanced([np.sort(rows[share]) for share in shares], equal_counts)


def _balanced(shares: list[NDArray[np.int64]], equal_counts: bool) -> Balanced:
    borders = np.cumsum([0, *(len(rows) for rows in shares)], dtype=np.int64)
    return Balanced(np.concatenate(shares), borders, equal_counts)


Divide = Callable[[NDArray[np.int64], int, bool], Sequence[Sequence[int]]]
"""(costs of rows, world size, equal_counts) -> the row numbers of each rank."""
F = TypeVar("F", bound=Divide)


@dataclass(frozen=True, slots=True)
class Balancing:
    """The cost of rows, and the function that divides them among ranks: `balance` or a function of the user."""

    cost: Cost = Cost()
    name: str = ""
    """The name of the user's function."""
    divide: Divide | None = None

    def __call__(self, costs: NDArray[Any], world: int, *, equal_counts: bool) -> Balanced:
        if self.divide is None:
            return balance(costs, world, equal_counts=equal_counts)
        try:
            divided = self.divide(costs, world, equal_counts)
        except Exception as error:
            error.add_note(f"in balancing {self.name!r}, asked for the rows of {world} ranks")
            raise
        return _balanced(self._checked(divided, len(costs), world, equal_counts), equal_counts)

    def _checked(self, divided: Any, num_rows: int, world: int, equal_counts: bool) -> list[NDArray[np.int64]]:
        try:
            shares = [np.sort(np.asarray(rows, np.int64)) for rows in divided]
            everything = np.sort(np.concatenate(shares))
        except (TypeError, ValueError):
            raise self._refusal("gives something else than row numbers", num_rows, world) from None
        if len(shares) != world or not np.array_equal(everything, np.arange(num_rows)):
            raise self._refusal("does not give each of them to exactly one rank", num_rows, world)
        if not equal_counts:
            return shares
        even = np.diff(np.arange(world + 1) * num_rows // world).tolist()
        counts = sorted(len(rows) for rows in shares)
        if sorted(even) != counts:
            raise self._refusal(f"gives ranks {counts} rows, and equal_counts is True", num_rows, world)
        return _with_sizes(even, shares)

    def _refusal(self, what: str, num_rows: int, world: int) -> SpecError:
        return SpecError(
            f"balancing {self.name!r}, given {num_rows} rows and {world} ranks, {what}",
            parameter="balance",
            remedy=f"a list of {world} lists of row numbers, which together are 0 to {num_rows - 1}",
        )

    def __str__(self) -> str:
        return self.name or str(self.cost)

    def __reduce__(self) -> tuple[Any, ...]:
        return by_value(Balancing, self.cost, self.name, function=self.divide)


_balancings: Registry[Balancing] = Registry("balance", group="batchwright.balancing")
_balancings.add("tokens", Balancing())


def register_balancing(name: str) -> Callable[[F], F]:
    """Register a function `f(costs, world_size, equal_counts) -> row numbers of each rank` that balances batches.

    `Batching(balance=name)` then selects it. The cost of a row is its number of tokens.

    >>> @register_balancing("snake")
    ... def in_turn_and_back(costs, world_size, equal_counts):
    ...     turns = [*range(world_size), *reversed(range(world_size))]
    ...     ranks = [[] for _ in range(world_size)]
    ...     for place, row in enumerate(np.argsort(costs)[::-1].tolist()):
    ...         ranks[turns[place % len(turns)]].append(row)
    ...     return ranks
    >>> balancing_of("snake")(np.array([9, 1, 5, 4]), 2, equal_counts=True).rows(0).tolist()
    [0, 1]
    """

    def register(divide: F) -> F:
        _balancings.add(name, Balancing(name=name, divide=divide))
        return divide

    return register


def balancing_of(asked: Any) -> Balancing:
    """The meaning of `balance=`: True or "tokens", (a, b), a Cost, or the name of a registered function."""
    if asked is True:
        asked = "tokens"
    if isinstance(asked, str):
        return _balancings.get(asked)
    if isinstance(asked, Cost):
        return Balancing(asked)
    if isinstance(asked, tuple | list) and len(asked) == 2:
        return Balancing(Cost(*asked))
    raise SpecError(
        f"balance={asked!r} is not a cost",
        parameter="balance",
        remedy="True (tokens), or (a, b): a row of n tokens costs a * n + b * n * n",
    )


def imbalance(costs: ArrayLike, balanced: Balanced) -> Imbalance:
    """The imbalance of a division, and the lower bound of any division (with equal counts, if this one has them).

    >>> imbalance([7, 1, 1, 1, 1, 3], balance([7, 1, 1, 1, 1, 3], world=2))
    Imbalance(measured=0.0, lower_bound=0.0)
    >>> imbalance([7, 1, 1, 1, 1, 3], balance([7, 1, 1, 1, 1, 3], world=2, equal_counts=True))
    Imbalance(measured=0.2857142857142857, lower_bound=0.2857142857142857)
    """
    work = _as_integers(np.asarray(costs))
    total, world = int(work.sum()), balanced.world
    if not total:
        return Imbalance(0.0, 0.0)
    most = _most(work[balanced.order], balanced.borders)
    bound = _lower_bound(np.sort(work), world, balanced.equal_counts)
    return Imbalance((most * world - total) / total, (bound * world - total) / total)


# Costs as integers


def _as_integers(costs: NDArray) -> NDArray[np.int64]:
    """Costs as integers without a common divisor. Other costs are scaled by a power of two and rounded.

    Scaling and rounding are exact or the same everywhere. Sums of floats would depend on the machine.
    """
    if not len(costs):
        return np.empty(0, np.int64)
    room = _MOST // len(costs)
    if costs.dtype.kind in "iub" and int(costs.max()) < room:
        whole = costs.astype(np.int64)
    else:
        real = costs.astype(np.float64)
        _, exponent = math.frexp(float(real.max()))  # the largest is below 2**exponent
        whole = np.rint(np.ldexp(real, room.bit_length() - 2 - exponent)).astype(np.int64)
    # Sums of multiples of 64 are multiples of 64. A number that no sum can reach must not be the lower bound.
    divisor = int(np.gcd.reduce(whole))
    return whole // max(divisor, 1)


def _sorted(work: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(costs ascending, the row of each), ties by row number."""
    if int(work.max()) < 1 << 16:
        rows = np.argsort(work.astype(np.uint16), kind="stable")  # sorted by digits
        return work[rows], rows
    keys = work * len(work) + np.arange(len(work))  # all different: every sort gives the same result
    keys.sort()
    ascending = keys // len(work)
    return ascending, keys - ascending * len(work)


# Bounds


def _mean(work: NDArray[np.int64], world: int) -> int:
    """The mean of the ranks, rounded up: some rank has at least as much."""
    return -(-int(work.sum()) // world)


def _lower_bound(ascending: NDArray[np.int64], world: int, equal_counts: bool) -> int:
    """A lower bound of the largest work of a rank, in every division: the mean, and a bound by counting for each k.

    Some rank has k + 1 or more of the k * world + 1 largest rows. They cost at least as much as the k + 1 smallest of
    these. With equal counts this rank has at least rows // world rows in all, and its other rows cost at least as much
    as the smallest rows.

    Equal counts give a second bound: some rank has k or fewer of the k * world + world - 1 largest rows. Its work is
    at most the largest of these and of the rest, and the other ranks share the remaining work.
    """
    num_rows = len(ascending)
    if not num_rows:
        return 0
    below = np.concatenate(([0], np.cumsum(ascending)))
    k = np.arange((num_rows - 1) // world + 1)
    first = num_rows - k * world - 1  # the smallest of the largest
    counted = below[first + k + 1] - below[first]
    if equal_counts:
        counted += below[np.maximum(num_rows // world - k - 1, 0)]
    bound = max(_mean(ascending, world), int(counted.max()))
    if equal_counts and world > 1:
        rest = np.maximum(num_rows - k * world - world + 1, 0)  # as many are not among these largest
        least_of_rest = np.maximum(rest - (-(-num_rows // world) - k), 0)
        light = below[-1] - below[num_rows - k] + below[rest] - below[least_of_rest]
        bound = max(bound, -((int(light.min()) - int(below[-1])) // (world - 1)))
    return bound


def _most(work: NDArray[np.int64], borders: NDArray[np.int64]) -> int:
    """The work of the rank with the most work. The rows are in the order of ranks."""
    below = np.concatenate(([0], np.cumsum(work)))
    return int(np.diff(below[borders]).max())


# Dealing


class _Deal:
    """The work and rows that each rank has so far, and the number of rows that it may have."""

    def __init__(self, num_rows: int, world: int, equal_counts: bool) -> None:
        self.loads, self.counts = [0] * world, [0] * world
        self.room, self.larger = divmod(num_rows, world) if equal_counts else (num_rows, 0)
        """Rows that a rank may have, and how many ranks may still have one more."""

    def one_by_one(self, costs: NDArray[np.int64]) -> list[int]:
        """The rank of each row: the one that has the least work, then the fewest rows, then the lowest number."""
        heap = list(zip(self.loads, self.counts, range(len(self.loads)), strict=True))
        heapify(heap)
        ranks = []
        for cost in costs.tolist():
            load, count, rank = heap[0]
            while count >= self.room:
                if count == self.room and self.larger:
                    self.larger -= 1
                    break
                self.loads[rank], self.counts[rank], _ = heappop(heap)
                load, count, rank = heap[0]
            ranks.append(rank)
            heapreplace(heap, (load + cost, count + 1, rank))
        for load, count, rank in heap:
            self.loads[rank], self.counts[rank] = load, count
        return ranks

    def in_turn(self, costs: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rank of each row: 0, 1, ..., 1, 0 again and again. Whole turns only."""
        world = len(self.loads)
        turn = np.concatenate((np.arange(world), np.arange(world)[::-1]))
        num_turns = len(costs) // len(turn)
        there_and_back = costs.reshape(num_turns, 2, world).sum(axis=0)
        added = (there_and_back[0] + there_and_back[1, ::-1]).tolist()
        self.loads = [load + more for load, more in zip(self.loads, added, strict=True)]
        self.counts = [count + 2 * num_turns for count in self.counts]
        return np.tile(turn, num_turns)


def _dealt(ascending: NDArray[np.int64], world: int, equal_counts: bool) -> NDArray[np.int64]:
    """The rank of each row: the largest rows are dealt one by one, the middle in turn, the smallest one by one."""
    num_rows, one_by_one = len(ascending), max(_ONE_BY_ONE, 8 * world)
    deal = _Deal(num_rows, world, equal_counts)
    ranks = np.empty(num_rows, np.int64)
    large = max(num_rows - one_by_one, 0)
    ranks[large:] = deal.one_by_one(ascending[large:][::-1])[::-1]
    # The smallest rows must be able to make up twice for the differences in work, and in the number of rows.
    missing = sum(max(deal.loads) - load for load in deal.loads) + world * int(ascending[max(large - 1, 0)])
    small = int(np.searchsorted(np.cumsum(ascending[:large]), 2 * missing)) + 1
    small = max(small, one_by_one, sum(max(deal.counts) - count for count in deal.counts))
    small = min(small + (large - small) % (2 * world), large)
    ranks[small:large] = deal.in_turn(ascending[small:large][::-1])[::-1]
    ranks[:small] = deal.one_by_one(ascending[:small][::-1])[::-1]
    return ranks


def _by_rank(ranks: NDArray[np.int64], world: int) -> list[NDArray[np.int64]]:
    """The positions of each rank, ascending."""
    by_rank = np.argsort(ranks.astype(np.min_scalar_type(world)), kind="stable")  # narrow: sorted by digits
    return np.split(by_rank, np.cumsum(np.bincount(ranks, minlength=world))[:-1])


# Exchanging


def _exchanged(
    ascending: NDArray[np.int64], shares: list[NDArray[np.int64]], bound: int, equal_counts: bool
) -> list[int]:
    """Let the rank with the most work give a row for a smaller one (or for none), until no exchange helps.

    Change `shares`, the positions in `ascending` of each rank, and return the work that each rank then has.
    """
    costs = [ascending[positions] for positions in shares]
    loads = [int(cost.sum()) for cost in costs]
    searches = min(8 * len(shares), _MOST_SEARCHES)
    while True:
        giver = loads.index(max(loads))
        for taker in sorted(range(len(shares)), key=loads.__getitem__):
            gap = loads[giver] - loads[taker]
            if loads[giver] <= bound or gap <= 1 or not searches:  # the gap of a rank to itself is 0: the end
                return loads
            searches -= 1
            may_move = not equal_counts or len(shares[giver]) > len(shares[taker])
            # If such a pair of rows exists, one of the two ranks then has exactly the bound.
            wanted = min(loads[giver] - bound, max(bound - loads[taker], 1))
            found = _exchange(costs[giver], costs[taker], wanted, gap, may_move)
            if found is not None:
                _swap(shares, giver, found[0], taker, found[1])
                for rank in (giver, taker):
                    costs[rank] = ascending[shares[rank]]
                    loads[rank] = int(costs[rank].sum())
                break


def _exchange(
    gives: NDArray[np.int64], takes: NDArray[np.int64], wanted: int, gap: int, may_move: bool
) -> tuple[int, int] | None:
    """The rows to exchange (-1: no row) whose difference is nearest to the wanted one. None if no exchange helps.

    A difference helps if it is more than 0 and less than the gap. Both ranks then have less than the giver had.
    """
    offered = takes
    if may_move:
        offered = np.concatenate(([0], takes))
    if not len(offered):
        return None
    above = np.searchsorted(offered, gives - wanted)
    best: tuple[int, int] | None = None
    nearest = gap
    for partner in (np.minimum(above, len(offered) - 1), np.maximum(above - 1, 0)):
        difference = gives - offered[partner]
        distance = np.abs(difference - wanted)
        distance[(difference <= 0) | (difference >= gap)] = gap
        given = int(distance.argmin())
        if distance[given] < nearest:
            nearest, best = int(distance[given]), (given, int(partner[given]) - may_move)
    return best


def _swap(shares: list[NDArray[np.int64]], giver: int, given: int, taker: int, taken: int) -> None:
    """Exchange row number `given` of one rank for row number `taken` of another; -1: for none."""
    row = shares[giver][given]
    if taken < 0:
        shares[giver] = np.delete(shares[giver], given)
        shares[taker] = np.insert(shares[taker], np.searchsorted(shares[taker], row), row)
    else:
        _replace(shares[giver], given, shares[taker][taken])
        _replace(shares[taker], taken, row)


def _replace(ascending: NDArray[np.int64], index: int, value: np.int64) -> None:
    """Replace a value of an ascending array, which stays ascending."""
    place = int(np.searchsorted(ascending, value))
    if place <= index:
        ascending[place + 1 : index + 1] = ascending[place:index]
    else:
        place -= 1
        ascending[index:place] = ascending[index + 1 : place + 1]
    ascending[place] = value


def _with_sizes(sizes: Sequence[int], shares: list[NDArray[np.int64]]) -> list[NDArray[np.int64]]:
    """The same parts, assigned to ranks so that the numbers of rows are `sizes`."""
    parts: dict[int, list[NDArray[np.int64]]] = {}
    for positions in reversed(shares):
        parts.setdefault(len(positions), []).append(positions)
    return [parts[size].pop() for size in sizes]
