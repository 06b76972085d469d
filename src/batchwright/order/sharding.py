"""Sharding of a global batch: the rows of each rank, contiguous by default, by any other rule as a plug-in.

A strategy is a function of three numbers: `f(num_rows, rank, world_size) -> row numbers of the batch`. All ranks'
rows together must be exactly the batch, which is checked once for each batch size. The order of rows, states and plans
do not depend on it.

>>> @register_sharding("pairs")
... def in_pairs(num_rows, rank, world_size):
...     return [row for row in range(num_rows) if row // 2 % world_size == rank]
>>> sharding_of("pairs").share(8, rank=1, world=2, uneven=False)
(2, 3, 6, 7)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from batchwright.base.errors import SpecError
from batchwright.base.fingerprint import fingerprint
from batchwright.base.plugins import Registry, by_value
from batchwright.base.words import shortened
from batchwright.order.split import share as contiguous_share

__all__ = ["Sharding", "Share", "Strategy", "last_row", "register_sharding", "row_numbers", "sharding_of"]

Share = range | tuple[int, ...]
"""One rank's rows of a batch, in the order in which it gets them: plain and picklable."""
Strategy = Callable[[int, int, int], Sequence[int]]
F = TypeVar("F", bound=Strategy)

_MOST_REMEMBERED = 16


class Sharding:
    """A strategy with its name, and the shares of the batch sizes that were checked."""

    def __init__(self, name: str, strategy: Strategy) -> None:
        self.name: str = name
        self.strategy: Strategy = strategy
        self._checked: dict[tuple[int, int], list[Share]] = {}
        """(rows, world size): the share of each rank."""

    @property
    def is_contiguous(self) -> bool:
        return self.strategy is _contiguous

    def share(self, num_rows: int, *, rank: int, world: int, uneven: bool = True) -> Share:
        """Rows of a batch of `num_rows` that rank `rank` of `world` gets; equally many for all, unless `uneven`."""
        if self.strategy is _contiguous:  # nothing to check: its ranges tile the batch
            return contiguous_share(num_rows, rank=rank, world=world)
        shares = self._shares(num_rows, world)
        if not uneven:
            self._refuse_uneven(shares, num_rows)
        return shares[rank]

    def rank_of(self, row: int, num_rows: int, world: int) -> int:
        """The rank that gets a row of a batch."""
        return next(rank for rank in range(world) if row in self.share(num_rows, rank=rank, world=world))

    def describe(self, num_rows: int, world: int) -> str:
        """The name; and for a strategy of the user's own what it does with a batch, which another of that name may not.

        >>> sharding_of("contiguous").describe(8, 2)
        'contiguous'
        """
        if self.strategy in (_contiguous, _strided):
            return self.name
        return f"{self.name} ({fingerprint([list(rows) for rows in self._shares(num_rows, world)])[:8]})"

    def _shares(self, num_rows: int, world: int) -> list[Share]:
        known = self._checked.get((num_rows, world))
        if known is None:
            known = [self._asked(num_rows, rank, world) for rank in range(world)]
            self._refuse_other_than_once(known, num_rows)
            if len(self._checked) >= _MOST_REMEMBERED:
                self._checked = {}
            self._checked[num_rows, world] = known
        return known

    def _asked(self, num_rows: int, rank: int, world: int) -> Share:
        try:
            rows = self.strategy(num_rows, rank, world)
        except Exception as error:
            error.add_note(f"in sharding {self.name!r}, asked for the rows of rank {rank} of {world}")
            raise
        if isinstance(rows, range):
            return rows
        try:
            return tuple(index(row) for row in rows)
        except TypeError:
            raise SpecError(
                f"sharding {self.name!r} gave rank {rank} of {world} something else than row numbers",
                parameter="sharding",
                rank=rank,
                got=shortened(rows),
                remedy=f"a sequence of whole numbers from 0 to {num_rows - 1}",
            ) from None

    def _refuse_other_than_once(self, shares: list[Share], num_rows: int) -> None:
        """Every row of the batch must have exactly one rank."""
        owners: dict[int, list[int]] = {row: [] for row in range(num_rows)}
        for rank, rows in enumerate(shares):
            for row in rows:
                owners.setdefault(row, []).append(rank)
        for row, ranks in owners.items():
            if len(ranks) != 1 or not 0 <= row < num_rows:
                raise SpecError(
                    f"sharding {self.name!r} gives row {row} of a batch of {num_rows} to the ranks {ranks}",
                    parameter="sharding",
                    row=row,
                    remedy=f"each row from 0 to {num_rows - 1} must go to exactly one rank",
                )

    def _refuse_uneven(self, shares: list[Share], num_rows: int) -> None:
        for rank, rows in enumerate(shares):
            if len(rows) != len(shares[0]):
                raise SpecError(
                    f"sharding {self.name!r} gives rank 0 {len(shares[0])} rows of a batch of {num_rows}, "
                    f"and rank {rank} {len(rows)}",
                    parameter="sharding",
                    rank=rank,
                    remedy="equally many for all ranks, or uneven=True",
                )

    def __reduce__(self) -> tuple[Any, ...]:
        return by_value(Sharding, self.name, function=self.strategy)

    def __repr__(self) -> str:
        return f"Sharding({self.name!r})"


_shardings: Registry[Sharding] = Registry("sharding", group="batchwright.sharding")


def register_sharding(name: str) -> Callable[[F], F]:
    """Make a function `f(num_rows, rank, world_size) -> row numbers` a strategy: `sharding=name` then means it."""

    def register(strategy: F) -> F:
        _shardings.add(name, Sharding(name, strategy))
        return strategy

    return register


@register_sharding("contiguous")
def _contiguous(num_rows: int, rank: int, world_size: int) -> range:
    return contiguous_share(num_rows, rank=rank, world=world_size)


@register_sharding("strided")
def _strided(num_rows: int, rank: int, world_size: int) -> range:
    return range(rank, num_rows, world_size)


def sharding_of(asked: Any) -> Sharding:
    """What `sharding=` means: a name, a function, or one that was found before. None is contiguous.

    >>> sharding_of("strided").share(10, rank=1, world=3)
    range(1, 10, 3)
    """
    if isinstance(asked, Sharding):
        return asked
    if asked is None:
        asked = "contiguous"
    if isinstance(asked, str):
        return _shardings.get(asked)
    if not callable(asked):
        raise SpecError(
            f"sharding={shortened(asked)} is neither a name nor a function",
            parameter="sharding",
            remedy="'contiguous', 'strided', or a function of (num_rows, rank, world_size)",
        )
    return Sharding(getattr(asked, "__qualname__", type(asked).__qualname__), asked)


def row_numbers(share: Share) -> NDArray[np.int64]:
    """A share as an array.

    >>> row_numbers(range(4, 6)).tolist(), row_numbers((2, 3, 6)).tolist()
    ([4, 5], [2, 3, 6])
    """
    if isinstance(share, range):
        return np.arange(share.start, share.stop, share.step)
    return np.array(share, np.int64)


def last_row(share: Share) -> int:
    """The largest row number of a share; -1 where it has none.

    >>> last_row(range(4, 6)), last_row((6, 2)), last_row(())
    (5, 6, -1)
    """
    if isinstance(share, range) and share:
        return max(share[0], share[-1])
    return max(share, default=-1)
