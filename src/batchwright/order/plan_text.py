"""Plans in words: a plan, an amendment, the difference of two plans, the refusal of a state of another plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from batchwright.base.errors import PlanError
from batchwright.base.words import counted
from batchwright.order.split import step_of_position

if TYPE_CHECKING:
    from batchwright.order.plan import Amendment, Plan, PlanSource

__all__ = ["MANY_EPOCHS", "after_cap", "place_in_words", "refuse_state"]

MANY_EPOCHS = 4
"""Text that is read more often than about four times was measured to teach little more (Muennighoff et al. 2023)."""
_MOST_SKIPS = 4
"""Skipped ranges that are listed one by one."""


def plan_in_words(plan: Plan) -> str:
    """Describe a plan: a line for the plan, each source, each cap and each amendment."""
    sources, end = plan.all_sources, None
    if plan.weights is not None:
        end = plan.epochs.end_of(1)
    given = None
    if end is not None:
        given = plan.order.given(plan.order.skips.position(end))
    lines = [f"Plan {plan.fingerprint}: rows of {plan.row_tokens} tokens, {_length(plan, end)}, {_shuffle(plan)}"]
    for number, source in enumerate(sources):
        branch = "└─" if source is sources[-1] else "├─"
        share, epochs = _share(plan, number, given)
        lines.append(
            f"{branch} {source.name} ({source.split})  {share}  {source.num_rows:,} rows, "
            f"{source.num_tokens:,} tokens{_filling(source)}{epochs}  content {source.fingerprint[:7]}"
        )
    if plan.weights is not None:
        lines += [f"cap: {line}" for line in _bindings(plan)]
    lines += [f"amendment {number}: {amendment}" for number, amendment in enumerate(plan.amendments, 1)]
    return "\n".join(lines)


def _length(plan: Plan, end: int | None) -> str:
    rows = end or plan.epoch_rows
    if rows is None:
        return "endless"
    if any(source.rows for source in plan.all_sources):
        return f"{rows:,} rows an epoch"
    return f"{rows:,} rows, {rows * plan.row_tokens:,} tokens an epoch"


def _shuffle(plan: Plan) -> str:
    words = f"seed {plan.seed}, shuffle {plan.shuffle}"
    if plan.pool:
        words += f" in windows of {plan.pool_rows:,} rows"
    if plan.lanes:
        words += f" in {plan.lanes[0]} lanes"
    return words


def _share(plan: Plan, number: int, given: list[int] | None) -> tuple[str, str]:
    """(requested and effective share of a source; its number of epochs if `given` has its rows in the run)."""
    source, weights = plan.all_sources[number], plan.weights
    if weights is None:
        rows = sum(each.num_rows for each in plan.all_sources)
        return f"{100 * source.num_rows / max(rows, 1):.1f} %", ""
    asked = f"{100 * weights.get(source.name, 0.0) / sum(weights.values()):.1f} % of {plan.by} asked"
    if len(plan.schedule) > 1:
        asked += " at the end"
    if given is None:
        return f"{asked}, {100 * plan.order.shares[number]:.2f} % of rows", ""
    epochs = f", {given[number] / source.num_rows:.2f} epochs"
    if given[number] > MANY_EPOCHS * source.num_rows:
        epochs += f" (over {MANY_EPOCHS})"
    return f"{asked}, {100 * given[number] / max(sum(given), 1):.2f} % of rows of the run", epochs


def _filling(source: PlanSource) -> str:
    rows = dict(source.rows)
    if "row_tokens" not in rows:  # of text, of rollouts
        return ""
    if not rows.get("packing"):
        return ", one sample a row"
    fill = 100 * source.num_tokens / (source.num_rows * rows["row_tokens"] * (1 + bool(rows.get("pairs"))))
    return f", packed {rows['packing']}, {fill:.2f} % full"


def _bindings(plan: Plan) -> Iterator[str]:
    """The positions at which caps bind. They follow from weights and sizes, so they are known before the run starts."""
    end = plan.epochs.end_of(1)
    for binding in plan.order.bindings:
        epochs = counted(binding.epochs, "epoch")
        if end is not None and binding.position > plan.order.skips.position(end):
            yield (f"{binding.source} would have given {epochs} by position {binding.position:,}, which is not reached")
            continue
        step = None
        if len(plan.runs) == 1:
            step = step_of_position(plan.steps, binding.position, **plan.epoch_spec)
        then = after_cap(ends_the_stream=binding.position == plan.order.epochs.limit)
        yield f"{binding.source} has given {epochs} by {place_in_words(step, binding.position)}, {then}"


def after_cap(*, ends_the_stream: bool) -> str:
    if ends_the_stream:
        return "the stream ends there"
    return "the others share its place"


def place_in_words(step: int | None, position: int) -> str:
    if step is None:
        return f"position {position:,}"
    return f"step {step:,} (position {position:,})"


def amendment_in_words(amendment: Amendment) -> str:
    words = []
    if amendment.weights:
        words.append(_weights(amendment.weights, amendment.at))
    words += [f"add {source.name} ({source.num_rows:,} rows)" for source in amendment.add]
    words += _skips(amendment.skip)
    words += [f"at most {counted(epochs, 'epoch')} of {name}" for name, epochs in amendment.max_epochs]
    if amendment.num_rows is not None:
        words.append(f"end at row {amendment.num_rows:,}")
    return f"from position {amendment.at:,}: {', '.join(words)}"


def _skips(spans: tuple[tuple[int, int], ...]) -> list[str]:
    if len(spans) > _MOST_SKIPS:
        count = sum(last - first + 1 for first, last in spans)
        return [f"skip {count:,} positions between {spans[0][0]:,} and {spans[-1][1]:,}"]
    return [f"skip {first:,}-{last:,}" if first < last else f"skip {first:,}" for first, last in spans]


def _weights(segments: Any, at: int) -> str:
    """The weights requested at a position; the first and the last if there are many."""
    words = []
    for _, weights in segments[:1] + segments[-1:]:
        words.append("natural proportion")
        if weights is not None:
            words[-1] = "weights " + ", ".join(f"{name}={weight:.3g}" for name, weight in weights)
    first = words[0]
    if segments[0][0] > at:
        first = f"from position {segments[0][0]:,} on {first}"
    if len(segments) == 1:
        return first
    return f"{first} ... {words[-1]} in {len(segments)} segments up to position {segments[-1][0]:,}"


def difference(one: Plan, two: Plan) -> str | None:
    """The first difference of two plans."""
    here, there = one.spec(), two.spec()
    key = next((key for key in here | there if here.get(key) != there.get(key)), None)
    match key:
        case None:
            return None
        case "sources":
            return _source_difference(one, two)
        case "segments" | "amendments":
            pairs = zip_longest(getattr(one, key), getattr(two, key))
            number, (first, second) = next((n, pair) for n, pair in enumerate(pairs, 1) if pair[0] != pair[1])
            return f"{key[:-1]} {number}: {_part(first)} here, {_part(second)} there"
        case "row_tokens":
            has_loss = any("loss" in dict(source.rows) for source in one.sources)
            name = "max_length" if has_loss else "chunk_size"
            return f"{name}: {one.row_tokens} here, {two.row_tokens} there"
    return f"{key}: {here.get(key)} here, {there.get(key)} there"


def _part(part: Any) -> str:
    """A segment or an amendment, in words."""
    if isinstance(part, tuple):
        return f"from position {part[0]:,}: {_weights((part,), part[0])}"
    return str(part or "none")


def _source_difference(one: Plan, two: Plan) -> str:
    for mine, theirs in zip(one.sources, two.sources, strict=False):
        first, second = mine.spec(), theirs.spec()
        first |= dict(mine.rows)
        second |= dict(theirs.rows)
        # The settings of rows come before the number of rows, which follows from them.
        for part in ("name", "split", "fingerprint", *dict(mine.rows), *dict(theirs.rows), *first):
            if part != "rows" and first.get(part) != second.get(part):
                return f"source {mine.name!r}: {part} {first.get(part)} here, {second.get(part)} there"
    return f"sources: {len(one.sources)} here, {len(two.sources)} there"


def refuse_state(
    mine: Plan, fingerprint: str, position: int, known_plan: Callable[[str], Plan | None], remedy: str
) -> None:
    """Refuse a state of another plan. A plan that was since amended at the state's position or later is accepted."""
    if fingerprint in mine.lineage:
        _refuse_state_after_an_amendment(mine, fingerprint, position)
        return
    other = known_plan(fingerprint)
    differs, seen = "that plan is not kept here, so what differs is not known", None
    if other is not None:
        differs = mine.difference(other) or ""
        if other.row_tokens != mine.row_tokens:
            seen = _share_seen(other, position)
    raise PlanError(
        f"this state belongs to plan {fingerprint}, and this loader runs plan {mine.fingerprint}",
        differs=differs,
        seen=seen,
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
