"""A plan as `batchwright plan` prints it: its summary in words, or as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from batchwright.base.errors import BatchwrightError
from batchwright.base.words import counted, listed
from batchwright.cli.output import number, percent, print_facts, printable, table
from batchwright.cli.plan_summary import CapSummary, PlanSummary, SourceSummary, summarize
from batchwright.order.plan import Plan, PlanSource
from batchwright.order.plan_text import MANY_EPOCHS, after_cap, place_in_words
from batchwright.store import TokenStream
from batchwright.store.plans import streams_for_plan

_SOURCES_SHOWN = 6
_MIXES_SHOWN = 8


def describe(
    plan: Plan, where: Any = None, *, epochs: int | None = None, more: Mapping[str, Any] | None = None, as_json: bool
) -> None:
    """Print a plan. `where` is what `streams_for_plan` takes; `more` is for the JSON alone."""
    summary = summarize(plan, epochs=epochs, streams=_streams(where, plan))
    facts = {**asdict(summary), "plan": plan.spec(), "runs": plan.runs, **(more or {})}
    print_facts(facts, [render(plan, summary)], as_json=as_json)


def _streams(where: Any, plan: Plan) -> dict[str, TokenStream] | None:
    """The streams of rows of whole documents, if they are still in their place: they tell what was left out."""
    if where is not None and _has_documents(plan):
        with suppress(BatchwrightError):
            return streams_for_plan(where, plan)
    return None


def render(plan: Plan, summary: PlanSummary) -> str:
    parts = [_head(plan, summary), _sources(plan, summary)]
    if _has_documents(plan):
        parts.append("\n".join(_documents(plan, summary)))
    if len(summary.stretches) > 1:
        parts.append(_stretches(plan, summary))
    if summary.caps:
        parts.append("\n".join(["caps", *map(_cap, summary.caps)]))
    if summary.amendments:
        parts.append(_history(summary))
    often = [source.name for source in summary.sources if source.is_read_often]
    if often:
        few = (
            "Measurements show little gain from more repeats:\n      use a smaller weight, a shorter run, or more text."
        )
        parts.append(f"note: {printable(', '.join(often))}: read more than {MANY_EPOCHS} times. {few}")
    return "\n\n".join(parts)


def _has_documents(plan: Plan) -> bool:
    """Whether rows are made of whole documents: they differ in length then."""
    return any(source.rows for source in plan.all_sources)


def _head(plan: Plan, summary: PlanSummary) -> str:
    most, shuffle = "at most" if _has_documents(plan) else "each", plan.shuffle
    if plan.pool_rows is not None:
        windows = f"windows of {plan.pool_rows:,} rows"
        if plan.lanes is not None:
            windows += f" in {counted(plan.lanes[0], 'lane')}"
        shuffle += f" ({windows})"
    return (
        f"plan {summary.fingerprint}\n"
        f"  rows    {plan.row_tokens:,} tokens {most}, shuffle {shuffle}, seed {plan.seed}\n"
        f"  batch   {_batch(plan, summary)}\n"
        f"  run     {_run(plan, summary)}"
    )


def _batch(plan: Plan, summary: PlanSummary) -> str:
    if summary.batch_rows is None:
        return "unknown: runs have different batch sizes, or none has started (--batch-size)"
    tokens = f"{summary.batch_rows * summary.row_tokens:,}"
    if _has_documents(plan):
        tokens = f"about {round(summary.batch_rows * summary.mean_row_tokens):,}"
    earlier = [f", {rows:,} before step {step:,}" for (_, _, rows), (step, _, _) in pairwise(plan.steps)]
    return f"{counted(summary.batch_rows, 'row')}, {tokens} tokens a step" + "".join(reversed(earlier))


def _run(plan: Plan, summary: PlanSummary) -> str:
    if summary.rows is None:
        return "endless: --num-tokens, --num-rows or --stop ends it"
    said = f"{summary.tokens:,} tokens"
    if summary.steps is not None:
        said = f"{counted(summary.steps, 'step')}, {said}"
    if summary.padding_tokens:
        said += f" and {summary.padding_tokens:,} of padding"
    said += _run_rows(plan, summary, summary.rows)
    for rows, what in ((summary.skipped_rows, "skipped"), (summary.dropped_rows, "dropped")):
        if rows:
            said += f", {counted(rows, 'row')} {what}"
    return said


def _run_rows(plan: Plan, summary: PlanSummary, rows: int) -> str:
    if plan.weights is not None:
        return f", {counted(rows, 'row')}"
    epochs = summary.epochs or 1
    if summary.epoch_rows == rows / epochs:
        return f" in {counted(epochs, 'epoch')}, {counted(summary.epoch_rows, 'row')} each"
    return f" in {counted(epochs, 'epoch')}, {counted(rows, 'row')}"


def _sources(plan: Plan, summary: PlanSummary) -> str:
    both = _tells_both(plan, summary)
    rows = [_cells(plan, source, both=both) for source in summary.sources]
    return table(rows, left=["source", "split", ""], optional=["once by step", ""])


def _cells(plan: Plan, source: SourceSummary, *, both: bool) -> dict[str, str]:
    cells = {"source": printable(source.name), "split": source.split}
    asked, effective = percent(source.asked_share), percent(source.effective_share, 3)
    if both:
        cells |= {f"asked ({plan.by})": asked, "effective (rows)": effective}
        cells["effective (tokens)"] = percent(source.effective_token_share, 3)
    else:
        cells |= {"asked": asked, "effective": effective}
    in_all = "tokens in rows" if _has_documents(plan) else "tokens in store"
    return cells | {
        in_all: number(source.num_tokens),
        "tokens read": number(source.tokens_read, "no end"),
        "epochs": _epochs(source),
        "once by step": number(source.first_epoch_ends_at_step),
        "": f"over {MANY_EPOCHS} epochs" * source.is_read_often,
    }


def _epochs(source: SourceSummary) -> str:
    if source.epochs is None:
        return ""
    return f"{source.epochs:.2f}"


def _documents(plan: Plan, summary: PlanSummary) -> Iterator[str]:
    by_name = {source.name: source for source in summary.sources}
    yield "rows of whole documents"
    for source in plan.all_sources:
        if source.rows:
            yield from _documents_of(source, by_name[source.name])


def _documents_of(of: PlanSource, source: SourceSummary) -> Iterator[str]:
    """The rows of a source, and its documents that are cut or left out."""
    rows, documents = dict(of.rows), source.documents
    noun, how = "row", "a document each"
    if rows.get("pairs"):
        noun, how = "pair", "two rows of a batch each"
    if source.fill is not None:
        how = f"packed {rows['packing']}, {percent(source.fill)} full"
    line = f"  {printable(source.name)}: {counted(source.num_rows, noun)}, {how}, "
    line += f"{source.mean_row_tokens:,.1f} tokens on average"
    if "loss" in rows:
        line += f", loss on {rows['loss']}"
    if documents is None:
        yield line
        return
    if documents.learned_share is not None:
        line += f" ({percent(documents.learned_share, 1)} of the tokens)"
    yield line
    over = f"over {rows['row_tokens']:,} tokens"
    reasons = {"over length": over, "empty mask": "nothing to learn"}
    for reason, count in documents.left_out.items():
        yield f"    left out: {_of_all(count, documents.num_documents)}: {reasons.get(reason, reason)}"
    if documents.num_cut:
        yield f"    cut ({rows['truncation']}): {_of_all(documents.num_cut, documents.num_documents)}: {over}"


def _of_all(count: int, total: int) -> str:
    """
    >>> _of_all(312, 40_000)
    '312 of 40,000 documents (0.8 %)'
    """
    return f"{count:,} of {counted(total, 'document')} ({percent(count / max(total, 1), 1)})"


def _stretches(plan: Plan, summary: PlanSummary) -> str:
    """A line for each mix; of many, the first and the last few."""
    both, shown = _tells_both(plan, summary), summary.stretches
    if len(shown) > _MIXES_SHOWN:
        shown = (*shown[: _MIXES_SHOWN // 2], *shown[-_MIXES_SHOWN // 2 :])
    rows = []
    for stretch in shown:
        row = {"from step": number(stretch.from_step), "position": number(stretch.from_position)}
        row["asked"] = _shares_in_words(stretch.asked)
        row["effective (rows)" if both else "effective"] = _shares_in_words(stretch.effective)
        if both:
            row["effective (tokens)"] = _shares_in_words(stretch.effective_tokens)
        rows.append(row)
    text = table(rows, left=list(rows[0])[2:])
    hidden = len(summary.stretches) - len(shown)
    if hidden:
        text += f"\nand {hidden:,} more in between: --json has them"
    return text


def _tells_both(plan: Plan, summary: PlanSummary) -> bool:
    """Whether shares of rows and of tokens differ."""
    return plan.by == "tokens" or len({source.mean_row_tokens for source in summary.sources}) > 1


def _shares_in_words(shares: Mapping[str, float]) -> str:
    """
    >>> _shares_in_words({"web": 0.75, "code": 0.25})
    'web 75.00 %, code 25.00 %'
    """
    return listed((f"{printable(name)} {percent(share)}" for name, share in shares.items()), _SOURCES_SHOWN)


def _cap(cap: CapSummary) -> str:
    most = f"  {printable(cap.source)}: at most {counted(cap.epochs, 'epoch')}, "
    if cap.position is None:
        return f"{most}not reached"
    then = after_cap(ends_the_stream=cap.ends_the_stream)
    return f"{most}reached at {place_in_words(cap.step, cap.position)}: {then}"


def _history(summary: PlanSummary) -> str:
    lines = ["history", f"  {summary.amendments[0].parent}  the original"]
    for a in summary.amendments:
        place = place_in_words(a.from_step, a.from_position)
        lines.append(f"  {a.fingerprint}  amends {a.parent[:8]} from {place}: {printable(a.change)}")
    return "\n".join(lines)
