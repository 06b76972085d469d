"""Planned steps: the rows of each global batch, by count or by a token budget, and the rank of each row.

A step is planned from the lengths of its rows alone, so every rank plans the same steps without communication. Memory
does not grow with the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.loaders.budget import budget_state
from batchwright.loaders.interface import Record, state_at
from batchwright.order.balance import Balancing, imbalance
from batchwright.order.budget import BudgetCut
from batchwright.order.plan import State
from batchwright.order.sharding import Sharding, row_numbers
from batchwright.order.split import Cut

__all__ = ["AnyCut", "Step", "Steps"]

AnyCut = Cut | BudgetCut
Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Step:
    """The rows of one global batch, and the rank of each."""

    positions: Numbers
    """Positions of all rows of the global batch, in the order of ranks. Rows that fill it up repeat the last one."""
    weight: NDArray[np.float32] | None
    """0 for rows that fill the batch up, else 1. None: all rows are data."""
    borders: Numbers
    """[world + 1]: rank r has rows borders[r]:borders[r + 1]."""
    mine: Numbers
    """This rank's rows: numbers into `positions`."""
    width: int
    """Tokens of each row of the global batch, by its longest row."""
    after: int
    """The position after the step (settled)."""
    after_in_block: int | None = None
    """With a budget: the number of batches before it in its block."""
    imbalance: tuple[float, float] | None = None
    """(measured, lower bound) of a balanced step, each the costliest rank's cost divided by the mean, minus 1."""

    @property
    def real_positions(self) -> Numbers:
        """The positions of all data rows of the global batch."""
        if self.weight is None:
            return self.positions
        return self.positions[self.weight > 0]

    def told(self) -> dict[str, Any]:
        """The metadata of the step about its balance."""
        if self.imbalance is None:
            return {}
        measured, bound = self.imbalance
        return {"imbalance": {"measured": measured, "bound": bound}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The steps of a run with fixed batch settings, for one rank."""

    cut: AnyCut
    end: int | None
    """Positions of the whole run; None for an endless one."""
    rank: int
    world: int
    sharding: Sharding
    """The rank of each row of a batch that is not balanced."""
    lengths_at: Callable[[Numbers], Numbers]
    widths_of: Callable[[Numbers], Numbers]
    cost: Balancing | None = None
    """None: batches are not balanced."""
    equal_counts: bool = True
    pad_to: Any = None
    """The rule from lengths to widths, as in states."""

    def is_over(self, position: int) -> bool:
        return self.cut.is_over(position, self.end)

    def planned(self, position: int, *, every: int = 1, stop: int | None = None) -> Iterator[Step]:
        """Each `every`-th step from a position to the end of the run, or up to `stop`."""
        position = self.cut.settle(position)
        while not self.is_over(position) and (stop is None or position < stop):
            step = self.at(position)
            yield step
            position = step.after
            if every > 1:
                position = self.cut.settle(self.cut.after(position, every - 1))

    def at(self, position: int) -> Step:
        """The step that begins at a (settled) position."""
        cut = self.cut
        after_in_block: int | None = None
        if isinstance(cut, BudgetCut):
            positions, lengths, num_rows, after, after_in_block = cut.batch(position)
        else:
            positions, num_rows = cut.positions(position, cut.real_rows(position)), cut.shared_rows(position)
            after, lengths = cut.settle(cut.after(position, 1)), self.lengths_at(positions)
        return self.of(positions, lengths, num_rows, after, after_in_block)

    def of(
        self, positions: Numbers, lengths: Numbers, num_rows: int, after: int, after_in_block: int | None = None
    ) -> Step:
        """The step of these rows, filled up to `num_rows` and shared among ranks."""
        last = len(positions) - 1
        order, borders, imbalanced = self._shared(lengths, num_rows)
        if not (counts := np.diff(borders)).all():  # a rank without rows gets a filling row
            order = np.insert(order, borders[:-1][counts == 0], num_rows)
            borders = np.concatenate([[0], np.cumsum(np.maximum(counts, 1))])
        weight: NDArray[np.float32] | None = None
        if (order > last).any():
            weight = (order <= last).astype(np.float32)
        return Step(
            positions=positions[np.minimum(order, last)],  # filling rows repeat the last row
            weight=weight,
            borders=borders,
            mine=np.arange(borders[self.rank], borders[self.rank + 1]),
            width=int(self.widths_of(lengths.max(keepdims=True))[0]),
            after=after,
            after_in_block=after_in_block,
            imbalance=imbalanced,
        )

    def _shared(self, lengths: Numbers, num_rows: int) -> tuple[Numbers, Numbers, tuple[float, float] | None]:
        """(rows of the batch in the order in which ranks share them, borders of the ranks, imbalance)."""
        if self.cost is not None and self.world == 1:
            return np.arange(num_rows), np.array([0, num_rows]), (0.0, 0.0)
        if self.cost is not None:
            costs = np.pad(self.cost.cost.costs(lengths), (0, num_rows - len(lengths)))
            balanced = self.cost(costs, self.world, equal_counts=self.equal_counts)
            measured, bound = imbalance(costs, balanced)
            return balanced.order, balanced.borders, (measured, bound)
        world = self.world
        if self.sharding.is_contiguous:
            return np.arange(num_rows), np.arange(world + 1) * num_rows // world, None
        shares = [row_numbers(self.sharding.share(num_rows, rank=rank, world=world)) for rank in range(world)]
        borders = np.concatenate([[0], np.cumsum([len(rows) for rows in shares])])
        return np.concatenate(shares), borders, None

    def state(self, step: Step, plan: str, record: Record) -> State:
        """A loader's state after a step. `plan` is the plan's fingerprint."""
        state = state_at(step.after, plan, record)
        if step.after_in_block is not None:
            state |= budget_state(step.after_in_block, self.pad_to)
        return state
