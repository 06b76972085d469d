"""What a loader says about batches by tokens and about balance: its settings, and the record of its steps.

A record entry is [from_step, from_position, batch_tokens, row_multiple], where one of batches by count has the number
of their rows. Everything else about a budget is arithmetic on positions: order/budget.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batchwright.base.errors import PlanError, SpecError
from batchwright.order.balance import Balancing, balancing_of
from batchwright.order.budget import Blocks, BudgetCut
from batchwright.order.sharding import Sharding

if TYPE_CHECKING:
    from batchwright.loaders.interface import Record

__all__ = [
    "Budget",
    "budget_of",
    "budget_state",
    "check_budget_state",
    "cost_of",
    "position_of_budget_step",
    "refuse_other_kind",
    "step_of_budget_position",
]


@dataclass(frozen=True, slots=True)
class Budget:
    """How many tokens a batch may have, padding included, and what its number of rows is a multiple of."""

    batch_tokens: int
    row_multiple: int = 1

    def entry(self, step: int, position: int) -> list[int]:
        return [step, position, self.batch_tokens, self.row_multiple]


def budget_of(
    batch_tokens: Any,
    row_multiple: Any,
    *,
    batch_size: int | None,
    epoch_end: str,
    world: int,
    uneven: bool,
) -> Budget | None:
    """What `batch_tokens` and `row_multiple` ask for; None: batches by count."""
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
    """What `balance` asks for; None: rows go to ranks as they come."""
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


# The record of steps


def position_of_budget_step(record: Record, step: int, blocks: Blocks, end: int | None = None) -> int:
    """The position of a step, looked up in how the run cut batches. A run that ends has no step after its end."""
    if step < 0:
        raise PlanError(f"step {step} does not exist", step=step, remedy="a step of 0 or more")
    from_step, from_position = max((entry[0], entry[1]) for entry in record if entry[0] <= step)
    cut = BudgetCut(record, blocks)
    position = cut.after(from_position, step - from_step, end)
    if end is not None and position >= end:
        last = from_step + cut.steps_until(from_position, position)
        if step > last:
            raise PlanError(f"step {step} is outside this run", step=step, remedy=f"a step from 0 to {last}")
    return position


def step_of_budget_position(record: Record, position: int, blocks: Blocks) -> int:
    """The step that uses (or would use next) a position."""
    from_step, from_position = max((entry[0], entry[1]) for entry in record if entry[1] <= position)
    return from_step + BudgetCut(record, blocks).steps_until(from_position, position)


# States


def budget_state(batch_in_block: int, pad_to: Any) -> dict[str, Any]:
    """What a state says besides, where batches are cut by tokens."""
    return {"batch_in_block": batch_in_block} | ({} if pad_to is None else {"pad_to": pad_to})


def refuse_other_kind(record: Record, budget: Budget | None) -> None:
    """Refuse to go on by tokens where a run cut by count, or the other way round."""
    by_tokens = len(record[-1]) == 4
    if by_tokens == (budget is not None):
        return
    theirs, mine = ("batch_tokens", "batch_size") if by_tokens else ("batch_size", "batch_tokens")
    raise PlanError(
        f"this state belongs to a run with {theirs}={record[-1][2]}, and this loader has {mine}: they hand over the "
        "rows of an epoch in different orders",
        parameter=theirs,
        remedy=f"open the loader with {theirs}= (any number), or start anew, without the state",
    )


def check_budget_state(state: Mapping[str, Any], position: int, record: Record, blocks: Blocks, pad_to: Any) -> None:
    """Refuse a state whose run cut its blocks otherwise: its rows would be lost or repeated."""
    if record[-1][1] > position:
        raise PlanError(
            f"this state is at position {position:,}, before the last of its steps began",
            parameter="steps",
            remedy="what state_dict() returned, unchanged",
        )
    given = state.get("pad_to")
    if (list(given) if isinstance(given, tuple) else given) != pad_to:
        raise PlanError(
            f"this state belongs to a run with pad_to={state.get('pad_to')!r}, and this loader has {pad_to!r}: batches "
            "by tokens are cut by widths, and would be others",
            parameter="pad_to",
            remedy=f"pad_to={state.get('pad_to')!r}",
        )
    number = BudgetCut(record, blocks).in_block(position)
    if number is None or number != state.get("batch_in_block"):
        here = "inside a batch" if number is None else f"before batch {number} of its block"
        raise PlanError(
            f"this state says batch_in_block={state.get('batch_in_block')!r}, and position {position:,} lies {here}",
            parameter="batch_in_block",
            remedy="what state_dict() returned, unchanged; seek(position=) goes anywhere",
        )
