"""Check of a saved state. It may continue under its own plan, or under a plan amended after its position."""

from __future__ import annotations

from collections.abc import Callable

from batchwright.base.errors import PlanError
from batchwright.order.plan import Plan

__all__ = ["refuse_state"]


def refuse_state(
    mine: Plan, fingerprint: str, position: int, known_plan: Callable[[str], Plan | None], remedy: str
) -> None:
    """Refuse a state of another plan. A plan that was since amended at the state's position or later is accepted."""
    if fingerprint in mine.lineage:
        _refuse_state_after_an_amendment(mine, fingerprint, position)
        return
    other = known_plan(fingerprint)
    if other is None:
        differs = "that plan is not kept here, so what differs is not known"
    else:
        differs = mine.difference(other) or ""
    seen = {} if other is None or other.row_tokens == mine.row_tokens else {"seen": _share_seen(other, position)}
    raise PlanError(
        f"this state belongs to plan {fingerprint}, and this loader runs plan {mine.fingerprint}",
        differs=differs,
        **seen,
        remedy=remedy,
    )


def _refuse_state_after_an_amendment(mine: Plan, fingerprint: str, position: int) -> None:
    first = mine.lineage.index(fingerprint)
    for number, amendment in enumerate(mine.amendments[first:], first + 1):
        if amendment.at < position:
            raise PlanError(
                f"this state is at position {position:,}, after amendment {number} of this plan began",
                amendment=str(amendment),
                remedy=f"a state from position {amendment.at:,} or before, or the plan that it was saved with: "
                f"plan={fingerprint!r}",
            )


def _share_seen(plan: Plan, position: int) -> str:
    """The part of each source that was read before a position, in words."""
    seen = [
        f"{100 * count * plan.tokens_per_row(source) / source.num_tokens:.1f} % of {source.name}"
        for source, count in zip(plan.all_sources, plan.order.given(position), strict=True)
    ]
    return f"a state cannot be used with rows of another length; that run had read {', '.join(seen)}"
