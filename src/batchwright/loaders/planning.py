"""From sources and settings to a plan, and from a kept plan back to its rows. Reads no tokens, and writes nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from batchwright.base.checks import at_least, one_of
from batchwright.base.errors import SpecError
from batchwright.batches.samples import SampleRows
from batchwright.batches.settings import SETTINGS, Asked
from batchwright.batches.window import WindowRows
from batchwright.loaders.members import Member
from batchwright.loaders.packed import plan_entry
from batchwright.loaders.stored import StoreStream, open_stores
from batchwright.loaders.weights import Shares, caps_of, segments_of, shares_of, tempered
from batchwright.order.plan import Plan, PlanSource, Segments
from batchwright.order.windows import blocks_for
from batchwright.store.plans import find_plan, streams_for_plan

__all__ = [
    "end_of_mixture",
    "open_plan",
    "plan_sources",
    "refuse_ends",
    "refuse_other_settings",
    "shuffle_of",
    "source_of",
]

_POOL_BYTES = 1 << 30
"""Bytes of tokens in the windows of all sources together, where shuffle="pool" is not given pool_rows."""


def plan_sources(members: Sequence[Member], asked: Asked, shares: Shares | None = None, pad: int | None = None) -> Plan:
    """The plan of some sources, mixed by the settings. `shares` has every name that weights may use."""
    names = [member.name for member in members]
    split, seed, recut = asked.get("split", "train"), asked.get("seed", 0), asked.get("recut", True)
    shuffle = shuffle_of(asked["shuffle"], split)
    segments = _segments(members, asked, shares or dict.fromkeys(names))
    has_weights = segments[0][1] is not None
    ends = {name: asked[name] for name in ("num_rows", "num_tokens", "stop")}
    refuse_ends(has_weights, "this loader", "weights=, or epochs=", **ends)
    caps, exhausted = caps_of(asked["max_epochs"], names), asked.get("exhausted", "repeat")
    if not has_weights:
        _refuse_caps(caps, exhausted)
    row_tokens = _row_tokens(members, pad)
    rows = [member.open(seed=seed, recut=recut) for member in members]
    _refuse_pairs_beside_others(members)
    plan = Plan(
        row_tokens=row_tokens,
        seed=seed,
        shuffle=shuffle,
        sources=tuple(source_of(each, row_tokens) for each in rows),
        segments=segments,
        recut=recut and split == "train",
        epoch_end=asked.get("epoch_end", {"val": "short"}.get(split, "drop")),
        pool=_pool(shuffle, asked["pool_rows"], [each.stream.dtype.itemsize * each.row_tokens for each in rows]),
        lanes=_lanes(asked, shuffle, is_capped=bool(caps) or exhausted != "repeat"),
        by=asked.get("by", "rows"),
        max_epochs=tuple(caps.items()),
        exhausted=exhausted,
        pad=_pad(members, row_tokens, pad),
    )
    ends_at = end_of_mixture(plan, **ends)
    if ends_at is None:
        return plan
    return replace(plan, num_rows=ends_at)


def open_plan(
    stores: Any, plan: Any, asked: Asked, names: Sequence[str] = (), *, pad_to: str = "max_length", **meant: Any
) -> StoreStream:
    """The stream of a kept plan. Settings that contradict the plan are refused."""
    made = find_plan(stores, plan)
    streams = streams_for_plan(stores, made)
    refuse_other_settings(made, asked, names, **meant)
    return open_stores(streams, made, asked, pad_to)


def source_of(rows: WindowRows | SampleRows, row_tokens: int) -> PlanSource:
    """Rows as a source of a plan whose rows have `row_tokens` tokens."""
    source = PlanSource(
        name=rows.name,
        split=rows.split,
        fingerprint=rows.fingerprint,
        num_rows=rows.num_rows,
        num_tokens=rows.num_tokens,
    )
    if rows.row_tokens != row_tokens:
        source = replace(source, row_tokens=rows.row_tokens)
    if isinstance(rows, SampleRows):
        source = replace(source, rows=plan_entry(rows.spec))
    return source


def refuse_other_settings(plan: Plan, asked: Asked, names: Sequence[str] = (), **meant: Any) -> None:
    """Refuse settings that contradict a plan. `names`: further sources that weights may name; `meant` as in
    `Asked`."""
    sources = [source.name for source in plan.all_sources]
    if asked["weights"] is not None:
        meant["weights"] = segments_of(asked["weights"], list(dict.fromkeys([*sources, *names])), shares_of(plan))
    if asked["max_epochs"] is not None:
        meant["max_epochs"] = caps_of(asked["max_epochs"], sources)
    if asked["pool_rows"] is not None:
        meant["pool_rows"] = math.prod(blocks_for(asked["pool_rows"]))
    meant["shuffle"] = shuffle_of(asked["shuffle"], plan.sources[0].split)
    asked.refuse_other_than(plan, **meant)


def shuffle_of(asked: str | bool | None, split: str) -> str:
    """The scope of the shuffle."""
    match asked:
        case None:
            return {"val": "none"}.get(split, "global")
        case True:
            return "global"
        case False:
            return "none"
    return one_of(("global", "pool", "none"), shuffle=asked)


def end_of_mixture(plan: Plan, *, num_rows: int | None, num_tokens: int | None, stop: str | None) -> int | None:
    """The number of rows after which a mixture ends; None for an endless mixture."""
    if num_rows is not None:
        return at_least(1, num_rows=num_rows)
    if stop is not None:
        first = one_of(("first_exhausted", "all_exhausted"), stop=stop) == "first_exhausted"
        return plan.order.exhausted_at(first=first)
    if num_tokens is None:
        return None
    at_least(plan.row_tokens, num_tokens=num_tokens)
    if plan.pad is None:
        return num_tokens // plan.row_tokens
    widths = [plan.tokens_per_row(source) for source in plan.all_sources]  # padding does not count
    low, high = 0, int(num_tokens // min(widths))
    while low < high:
        middle = (low + high + 1) // 2
        if sum(width * count for width, count in zip(widths, plan.order.given(middle), strict=True)) <= num_tokens:
            low = middle
        else:
            high = middle - 1
    return low


def refuse_ends(has_weights: bool, whose: str, remedy: str, **ends: Any) -> None:
    """Refuse ends without a mixture, and two ends at once."""
    given = [name for name, value in ends.items() if value is not None]
    if given and not has_weights:
        raise SpecError(f"{given[0]}= ends a mixture; {whose} has no weights", parameter=given[0], remedy=remedy)
    if len(given) > 1:
        raise SpecError(f"{' and '.join(given)} both end the stream", parameter=given[1], remedy="give one of them")


def _segments(members: Sequence[Member], asked: Asked, shares: Shares) -> Segments:
    """Requested weights of entries, by single source. Without weights, sizes are flattened by a temperature."""
    weights, temperature = asked["weights"], asked["temperature"]
    if weights is not None or temperature is None:
        return segments_of(weights, list(shares), shares, temperature=temperature)
    rows = {member.name: member.open() for member in members}
    sizes = {name: float(each.num_rows) for name, each in rows.items()}
    if asked["by"] == "tokens":
        sizes = {name: float(each.num_tokens) for name, each in rows.items()}
    return segments_of(tempered(sizes, temperature), list(shares))


def _refuse_caps(caps: Mapping[str, int], exhausted: str) -> None:
    for parameter, is_given in (("max_epochs", caps), ("exhausted", exhausted != "repeat")):
        if is_given:
            raise SpecError(
                "without weights every source is read equally often, so none can be capped",
                parameter=parameter,
                remedy="weights=, or epochs=",
            )


def _refuse_pairs_beside_others(members: Sequence[Member]) -> None:
    pairs = [member for member in members if member.rows is not None and member.rows.pairs]
    other = next((member for member in members if member not in pairs), None)
    if pairs and other is not None:
        raise SpecError(
            f"{pairs[0].name!r} has preference pairs, and {other.name!r} has not: a batch is of one kind",
            parameter="sources",
            source=other.name,
            remedy="mix pairs with pairs alone",
        )


def _row_tokens(members: Sequence[Member], pad: int | None) -> int:
    """Tokens of a row. All sources have the same number, unless shorter rows are padded."""
    longest = max(members, key=lambda member: member.row_tokens)
    if pad is not None:
        at_least(0, pad=pad)
        return longest.row_tokens
    other = next((member for member in members if member.row_tokens != longest.row_tokens), None)
    if other is not None and all(member.rows is None for member in members):  # rows of samples are padded in any case
        raise SpecError(
            f"{longest.name!r} has rows of {longest.row_tokens:,} tokens, {other.name!r} of {other.row_tokens:,}",
            parameter="chunk_size",
            source=other.name,
            remedy="one chunk_size for all, or pad= with the token id that fills up the shorter rows",
        )
    return longest.row_tokens


def _pad(members: Sequence[Member], row_tokens: int, pad: int | None) -> int | None:
    """The token that fills up rows, if some rows are shorter than others."""
    of_samples = next((member.pad or 0 for member in members if member.rows is not None), None)
    if of_samples is None and all(member.row_tokens == row_tokens for member in members):
        return None
    if pad is None:
        return of_samples
    return pad


def _pool(shuffle: str, pool_rows: int | None, row_bytes: list[int]) -> tuple[int, int] | None:
    """(rows of a block, blocks of a window) of each source. `row_bytes` are the sizes of their rows."""
    if shuffle == "pool":
        return blocks_for(pool_rows or max(_POOL_BYTES // sum(row_bytes), 1))
    if pool_rows is not None:
        raise SpecError(
            f"pool_rows= is for shuffle='pool'; this is shuffle={shuffle!r}",
            parameter="pool_rows",
            remedy="shuffle='pool', or leave out pool_rows=",
        )
    return None


def _lanes(asked: Asked, shuffle: str, *, is_capped: bool) -> tuple[int, int] | None:
    """(lanes, rows of each lane in a batch)."""
    lanes, rows = asked["lanes"], asked.get("batch_size", SETTINGS["batch_size"].default)
    if lanes is None:
        return None
    for is_so, what, remedy in (
        (shuffle != "pool", f"shuffle={shuffle!r}", "shuffle='pool'"),
        (is_capped, "capped sources", "leave out lanes=, or the caps"),
    ):
        if is_so:
            raise SpecError(
                f"lanes= is for shuffle='pool' without caps; this has {what}", parameter="lanes", remedy=remedy
            )
    if rows % lanes:
        raise SpecError(
            f"batch_size={rows} does not divide by lanes={lanes}",
            parameter="lanes",
            remedy="as many lanes as there will be machines (or ranks), and a batch_size that is a multiple",
        )
    return lanes, rows // lanes
