"""Planned steps: the rows of each global batch, by count or by a token budget, and the rank of each row.

A step is planned from the lengths of its rows alone, so every rank plans the same steps without communication. Memory
does not grow with the data.

A record entry is [from_step, from_position, batch_tokens, row_multiple]. For batches by count, the number of rows takes
the place of the last two. The rest of a budget is arithmetic on positions, in order/budget.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from batchwright.base.errors import PlanError, SpecError
from batchwright.loaders.interface import Record, state_at
from batchwright.order.balance import Balancing, balancing_of, imbalance
from batchwright.order.budget import Blocks, BudgetCut
from batchwright.order.plan import State
from batchwright.order.sharding import Sharding, row_numbers
from batchwright.order.split import Cut

if TYPE_CHECKING:
    from batchwright.loaders.interface import Record

__all__ = [
    "AnyCut",
    "Budget",
    "Step",
    "Steps",
    "budget_of",
    "budget_state",
    "check_budget_state",
    "cost_of",
    "refuse_other_kind",
]


@dataclass(frozen=True, slots=True)
class Budget:
    """The largest number of tokens of a batch, padding included, and the divisor of its number of rows."""

    batch_tokens: int
    row_multiple: int = 1


def budget_of(
    batch_tokens: Any,
    row_multiple: Any,
    *,
    batch_size: int | None,
    epoch_end: str,
    world: int,
    uneven: bool,
) -> Budget | None:
    """The requested budget; None: batches by count."""
    if batch_tokens is None:
        if row_multiple is not None:
            raise SpecError(
                "row_multiple= belongs to batches by tokens",
                parameter="row_multiple",
                remedy="Batching(tokens=..., multiple=...), or leave multiple= out",
            )
        return None
    if batch_size is not None:
        raise SpecError(
            f"batch_size={batch_size} and batch_tokens={batch_tokens} both say how large a batch is",
            parameter="batch_tokens",
            remedy="one of them: rows of a batch, or its tokens with padding",
        )
    if epoch_end == "wrap":
        raise SpecError(
            "epoch_end='wrap' has no meaning with batch_tokens: an epoch's last batch has the rows that are left",
            parameter="epoch_end",
            remedy="leave out epoch_end=: nothing is dropped",
        )
    multiple = row_multiple or 1
    if multiple % world and not uneven:
        up = -(-multiple // world) * world
        raise SpecError(
            f"row_multiple={multiple} does not divide by world_size={world}: ranks would get different numbers of rows",
            parameter="row_multiple",
            remedy=f"Batching(tokens=..., multiple={up}), which counts rows over all ranks, or uneven=True",
        )
    return Budget(batch_tokens, multiple)


def cost_of(balance: Any, *, equal_counts: bool, sharding: Sharding) -> Balancing | None:
    """The requested balancing; None: rows go to ranks without balancing."""
    if balance is None or balance is False:
        if not equal_counts:
            raise SpecError(
                "equal_counts=False belongs to balanced batches",
                parameter="equal_counts",
                remedy="balance=True, or leave out equal_counts=",
            )
        return None
    if not sharding.is_contiguous:
        raise SpecError(
            f"sharding={sharding.name!r} says which rows a rank gets, and so does balance",
            parameter="balance",
            remedy="one of them",
        )
    return balancing_of(balance)


# States


def budget_state(batch_in_block: int, pad_to: Any) -> dict[str, Any]:
    """The entries of a state that only batches by tokens have."""
    state = {"batch_in_block": batch_in_block}
    if pad_to is not None:
        state["pad_to"] = pad_to
    return state


def refuse_other_kind(record: Record, budget: Budget | None) -> None:
    """Refuse to continue by tokens a run that cut by count, or the other way round."""
    by_tokens = len(record[-1]) == 4
    if by_tokens == (budget is not None):
        return
    theirs, mine = "batch_size", "batch_tokens"
    if by_tokens:
        theirs, mine = mine, theirs
    raise PlanError(
        f"this state belongs to a run with {theirs}={record[-1][2]}, and this loader has {mine}: they hand over the "
        "rows of an epoch in different orders",
        parameter=theirs,
        remedy=f"open the loader with {theirs}= (any number), or start anew, without the state",
    )


def check_budget_state(state: Mapping[str, Any], position: int, record: Record, blocks: Blocks, pad_to: Any) -> None:
    """Refuse a state whose run cut its blocks differently. Rows would be lost or repeated."""
    unchanged = "what state_dict() returned, unchanged"
    if record[-1][1] > position:
        raise PlanError(
            f"this state is at position {position:,}, before the last of its steps began",
            parameter="steps",
            remedy=unchanged,
        )
    theirs = state.get("pad_to")
    if isinstance(theirs, tuple):
        theirs = list(theirs)
    if theirs != pad_to:
        raise PlanError(
            f"this state belongs to a run with pad_to={theirs!r}, and this loader has {pad_to!r}: batches by tokens "
            "are cut by widths, and would be others",
            parameter="pad_to",
            remedy=f"pad_to={theirs!r}",
        )
    number, given = BudgetCut(record, blocks).in_block(position), state.get("batch_in_block")
    if number is None or number != given:
        here = f"before batch {number} of its block"
        if number is None:
            here = "inside a batch"
        raise PlanError(
            f"this state says batch_in_block={given!r}, and position {position:,} lies {here}",
            parameter="batch_in_block",
            remedy=f"{unchanged}; seek(position=) goes anywhere",
        )


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
