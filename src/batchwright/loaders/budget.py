"""Settings and states of batches by tokens, and the setting of balanced batches.

A record entry is [from_step, from_position, batch_tokens, row_multiple]. For batches by count, the number of rows takes
the place of the last two. The rest of a budget is arithmetic on positions, in order/budget.py.
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

__all__ = ["Budget", "budget_of", "budget_state", "check_budget_state", "cost_of", "refuse_other_kind"]


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
