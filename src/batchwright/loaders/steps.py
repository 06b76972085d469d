"""Planned steps: the rows of each global batch, by count or by a token budget, and the rank of each row.

A step is planned from the lengths of its rows alone, so every rank plans the same steps without communication. Memory
does not grow with the data.

A record entry is [from_step, from_position, batch_tokens, row_multiple]. For batches by count, the number of rows takes
the place of the last two. The rest of a budget is arithmetic on positions, in order/budget.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from batchwright.base.errors import PlanError, SpecError
from batchwright.batches.settings import Asked
from batchwright.loaders.interface import Record, state_at
from batchwright.order.balance import Balancing, balancing_of, imbalance
from batchwright.order.budget import BudgetCut
from batchwright.order.plan import State
from batchwright.order.sharding import Sharding, row_numbers
from batchwright.order.split import Cut

if TYPE_CHECKING:
    from batchwright.loaders.run import Run


AnyCut = Cut | BudgetCut
Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Budget:
    """The largest number of tokens of a batch, padding included, and the divisor of its number of rows."""

    batch_tokens: int
    row_multiple: int = 1


def budget_of(asked: Asked, *, epoch_end: str, world: int) -> Budget | None:
    """The requested budget; None: batches by count."""
    tokens, multiple, size = asked["batch_tokens"], asked.get("row_multiple", 1), asked["batch_size"]
    if tokens is None:
        if "row_multiple" in asked:
            raise SpecError(
                "row_multiple= is for batches by tokens", parameter="row_multiple", remedy="tokens=, or no multiple="
            )
        return None
    if size is not None:
        what = f"batch_size={size} and batch_tokens={tokens} both say how large a batch is"
        remedy = "one of them: rows of a batch, or its tokens with padding"
        raise SpecError(what, parameter="batch_tokens", remedy=remedy)
    if epoch_end == "wrap":
        raise end_without_meaning(epoch_end)
    if multiple % world and not asked["uneven"] and asked.get("equal_counts", True):
        up = -(-multiple // world) * world
        raise SpecError(
            f"row_multiple={multiple} does not divide by world_size={world}: ranks would get different numbers of rows",
            parameter="row_multiple",
            remedy=f"Batching(tokens=..., multiple={up}), which counts rows over all ranks, or uneven=True",
        )
    return Budget(tokens, multiple)


def end_without_meaning(epoch_end: str) -> SpecError:
    """The error for an end of epochs that batches by tokens cannot have."""
    what = f"epoch_end={epoch_end!r} has no meaning with batch_tokens: an epoch's last batch has the rows that are left"
    return SpecError(what, parameter="epoch_end", remedy="leave out epoch_end=: nothing is dropped")


def cost_of(asked: Asked, sharding: Sharding) -> Balancing | None:
    """The requested balancing; None: rows go to ranks without balancing."""
    balance = asked.get("balance", False)
    if balance is False:
        if not asked.get("equal_counts", True):
            raise SpecError(
                "equal_counts=False is for balanced batches", parameter="equal_counts", remedy="balance=True"
            )
        return None
    if not sharding.is_contiguous:
        what = f"sharding={sharding.name!r} says which rows a rank gets, and so does balance"
        raise SpecError(what, parameter="balance", remedy="one of them")
    return balancing_of(balance)


# States


def budget_state(batch_in_block: int, pad_to: Any) -> dict[str, Any]:
    """The entries of a state that only batches by tokens have."""
    state = {"batch_in_block": batch_in_block}
    if pad_to is not None:
        state["pad_to"] = pad_to
    return state


def refuse_other_cut(state: Mapping[str, Any], position: int, record: Record, run: Run) -> None:
    """Refuse a state whose run cut its batches by another rule. Rows would be lost or repeated."""
    by_tokens = len(record[-1]) == 4
    if by_tokens != (run.budget is not None):
        theirs, mine = "batch_size", "batch_tokens"
        if by_tokens:
            theirs, mine = mine, theirs
        raise PlanError(
            f"this state belongs to a run with {theirs}={record[-1][2]}, and this loader has {mine}: they hand over "
            "the rows of an epoch in different orders",
            parameter=theirs,
            remedy=f"open the loader with {theirs}= (any number), or start anew, without the state",
        )
    if not by_tokens:
        return
    rule, pad_to = state.get("pad_to"), run.stream.pad_to
    if isinstance(rule, tuple):
        rule = list(rule)
    if rule != pad_to:
        raise PlanError(
            f"this state belongs to a run with pad_to={rule!r}, and this loader has {pad_to!r}: batches by tokens "
            "are cut by widths, and would be others",
            parameter="pad_to",
            remedy=f"pad_to={rule!r}",
        )
    number, given = BudgetCut(record, run.blocks).in_block(position), state.get("batch_in_block")
    if number is None or number != given:
        here = f"before batch {number} of its block"
        if number is None:
            here = "inside a batch"
        what = f"this state says batch_in_block={given!r}, and position {position:,} lies {here}"
        remedy = "what state_dict() returned, unchanged; seek(position=) goes anywhere"
        raise PlanError(what, parameter="batch_in_block", remedy=remedy)


# Steps


@dataclass(frozen=True, slots=True)
class Step:
    """The rows of one global batch, and the rank of each."""

    positions: Numbers
    """Positions of all rows of the global batch, in the order of ranks. Rows that fill it up repeat the last one."""
    weight: NDArray[np.float32] | None
    """0 for rows that fill the batch up, else 1. None: all rows are data."""
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


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of a run with fixed batch settings, for one rank."""

    run: Run
    cut: AnyCut
    record: Record

    def planned(self, position: int, *, every: int = 1, stop: int | None = None) -> Iterator[Step]:
        """Each `every`-th step from a position to the end of the run, or up to `stop`."""
        position, end = self.cut.settle(position), self.run.end
        while not self.cut.is_over(position, end) and (stop is None or position < stop):
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
            after, lengths = cut.settle(cut.after(position, 1)), self.run.stream.lengths_at(positions)
        return self.of(positions, lengths, num_rows, after, after_in_block)

    def of(
        self, positions: Numbers, lengths: Numbers, num_rows: int, after: int, after_in_block: int | None = None
    ) -> Step:
        """The step of these rows, filled up to `num_rows` and shared among ranks."""
        last, rank = len(positions) - 1, self.run.ranks.rank
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
            mine=np.arange(*borders[rank : rank + 2]),
            width=int(self.run.stream.widths_of(lengths.max(keepdims=True))[0]),
            after=after,
            after_in_block=after_in_block,
            imbalance=imbalanced,
        )

    def _shared(self, lengths: Numbers, num_rows: int) -> tuple[Numbers, Numbers, tuple[float, float] | None]:
        """(rows of the batch in the order in which ranks share them, borders of the ranks, imbalance)."""
        cost, world, sharding = self.run.cost, self.run.ranks.world_size, self.run.sharding
        if cost is not None and world == 1:
            return np.arange(num_rows), np.array([0, num_rows]), (0.0, 0.0)
        if cost is not None:
            costs = np.pad(cost.cost.costs(lengths), (0, num_rows - len(lengths)))
            balanced = cost(costs, world, equal_counts=self.run.equal_counts)
            measured, bound = imbalance(costs, balanced)
            return balanced.order, balanced.borders, (measured, bound)
        if sharding.is_contiguous:
            return np.arange(num_rows), np.arange(world + 1) * num_rows // world, None
        shares = [row_numbers(sharding.share(num_rows, rank=rank, world=world)) for rank in range(world)]
        borders = np.concatenate([[0], np.cumsum([len(rows) for rows in shares])])
        return np.concatenate(shares), borders, None

    def state(self, step: Step) -> State:
        """A loader's state after a step."""
        state = state_at(step.after, self.run.plan.fingerprint, self.record)
        if step.after_in_block is not None:
            state |= budget_state(step.after_in_block, self.run.stream.pad_to)
        return state
