"""What a plan will do, in numbers: steps, tokens, and for each source its share and how often it is read.

From the plan alone, by the order's own arithmetic: no data is touched, and the counts are exact.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from penstock.cli.common import counted, table

if TYPE_CHECKING:
    from penstock.plan import Plan

__all__ = ["MANY_EPOCHS", "PlanSummary", "SourceSummary", "render", "summarize"]

MANY_EPOCHS = 4
"""Text that is read more often than about four times was measured to teach little more (Muennighoff et al. 2023)."""


@dataclass(frozen=True, slots=True)
class SourceSummary:
    name: str
    split: str
    asked_share: float
    effective_share: float
    num_rows: int
    num_tokens: int
    rows_read: int | None
    """None where the stream has no end."""
    tokens_read: int | None
    epochs: float | None
    first_epoch_ends_at_step: int | None
    """With weights: the step in which the source's last row is read for the first time."""

    @property
    def is_read_often(self) -> bool:
        return self.epochs is not None and self.epochs > MANY_EPOCHS


@dataclass(frozen=True, slots=True)
class PlanSummary:
    fingerprint: str
    row_tokens: int
    batch_rows: int | None
    """None: the plan does not say, because its runs cut it differently."""
    epochs: int | None
    """How often the run goes through the plan's rows; None where they have no end."""
    epoch_rows: int | None
    steps: int | None
    tokens: int | None
    sources: tuple[SourceSummary, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def summarize(plan: Plan, *, batch_rows: int | None, epochs: int = 1) -> PlanSummary:
    from penstock.order.split import Cut

    rows = plan.epoch_rows
    steps = read = None
    if rows is not None and batch_rows is not None:
        cut = Cut(rows_per_step=batch_rows, **plan.epoch_spec)
        steps = epochs * rows // batch_rows if cut.is_linear else epochs * cut.steps_per_epoch
        if cut.is_linear:
            read = _rows_read(plan, [(0, steps * batch_rows)])
        else:
            of_epoch = min(rows, cut.steps_per_epoch * batch_rows)
            read = _rows_read(plan, [(epoch * rows, epoch * rows + of_epoch) for epoch in range(epochs)])
    elif rows is not None:
        read = _rows_read(plan, [(0, epochs * rows)])
    return PlanSummary(
        fingerprint=plan.fingerprint,
        row_tokens=plan.row_tokens,
        batch_rows=batch_rows,
        epochs=None if rows is None else epochs,
        epoch_rows=rows,
        steps=steps,
        tokens=None if read is None else sum(read) * plan.row_tokens,
        sources=_sources(plan, read, batch_rows),
    )


def _rows_read(plan: Plan, spans: list[tuple[int, int]]) -> list[int]:
    """Rows of each source that lie in some spans of positions."""
    order = plan.order
    read = [0] * len(plan.sources)
    for start, stop in spans:
        pairs = zip(order.counts(start), order.counts(stop), strict=True)
        read = [count + after - before for count, (before, after) in zip(read, pairs, strict=True)]
    return read


def _sources(plan: Plan, read: list[int] | None, batch_rows: int | None) -> tuple[SourceSummary, ...]:
    import numpy as np

    order = plan.order
    total_rows = sum(source.num_rows for source in plan.sources)
    found = []
    for number, source in enumerate(plan.sources):
        asked = source.num_rows / total_rows
        last_step = None
        if plan.weights is not None:
            asked = plan.weights.get(source.name, 0.0) / sum(plan.weights.values())
            last = int(order.position_of(number, np.array([source.num_rows - 1]))[0])
            last_step = None if batch_rows is None else last // batch_rows
        rows = None if read is None else read[number]
        found.append(
            SourceSummary(
                name=source.name,
                split=source.split,
                asked_share=asked,
                effective_share=float(order.shares[number]),
                num_rows=source.num_rows,
                num_tokens=source.num_tokens,
                rows_read=rows,
                tokens_read=None if rows is None else rows * plan.row_tokens,
                epochs=None if rows is None else rows / source.num_rows,
                first_epoch_ends_at_step=last_step,
            )
        )
    return tuple(found)


def _windows(plan: Plan) -> str:
    return "" if plan.pool_rows is None else f" (windows of {plan.pool_rows:,} rows)"


def render(plan: Plan, summary: PlanSummary) -> str:
    lines = [
        f"plan {summary.fingerprint}",
        f"  rows    {plan.row_tokens:,} tokens each, shuffle {plan.shuffle}{_windows(plan)}, seed {plan.seed}",
        f"  batch   {_batch(summary)}",
        f"  run     {_run(plan, summary)}",
    ]
    rows = [
        [
            source.name,
            source.split,
            f"{100 * source.asked_share:.2f} %",
            f"{100 * source.effective_share:.3f} %",
            f"{source.num_tokens:,}",
            "no end" if source.tokens_read is None else f"{source.tokens_read:,}",
            "" if source.epochs is None else f"{source.epochs:.2f}",
            "" if source.first_epoch_ends_at_step is None else f"{source.first_epoch_ends_at_step:,}",
            f"over {MANY_EPOCHS} epochs" if source.is_read_often else "",
        ]
        for source in summary.sources
    ]
    header = ["source", "split", "asked", "effective", "tokens in store", "tokens read", "epochs", "once by step", ""]
    unused = [i for i, name in enumerate(header) if all(not row[i] for row in rows) and name in ("once by step", "")]
    keep = [i for i in range(len(header)) if i not in unused]
    body = table([header[i] for i in keep], [[row[i] for i in keep] for row in rows], left=["source", "split", ""])
    lines += ["", *body.split("\n")]
    if often := [source.name for source in summary.sources if source.is_read_often]:
        lines += [
            "",
            f"note: {', '.join(often)}: read more than {MANY_EPOCHS} times. Repeats beyond that were measured to teach "
            "little more;",
            "      a smaller weight, a shorter run, or more text.",
        ]
    return "\n".join(lines)


def _batch(summary: PlanSummary) -> str:
    if summary.batch_rows is None:
        return "not said: runs cut this plan differently, or none did yet (--batch-size)"
    return f"{counted(summary.batch_rows, 'row')}, {summary.batch_rows * summary.row_tokens:,} tokens a step"


def _run(plan: Plan, summary: PlanSummary) -> str:
    if summary.epoch_rows is None:
        return "no end: --num-tokens, --num-rows or --stop gives it one"
    steps = "" if summary.steps is None else f"{counted(summary.steps, 'step')}, "
    epochs = "" if plan.weights is not None else f" in {counted(summary.epochs or 1, 'epoch')}"
    return f"{steps}{summary.tokens:,} tokens{epochs}, {summary.epoch_rows:,} rows{' each' if epochs else ''}"
