"""From sources and settings to a plan, and from a plan back to rows in an order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any, NamedTuple

from batchwright.base.checks import at_least, one_of, whole_number
from batchwright.base.errors import SpecError
from batchwright.base.words import suggest
from batchwright.batches.batch import Padding
from batchwright.batches.flow import Flow
from batchwright.batches.row_index import RowSpec
from batchwright.batches.samples import SampleRows
from batchwright.batches.settings import SETTINGS, Asked, Fields
from batchwright.batches.window import WindowRows
from batchwright.loaders.packed import open_samples, plan_entry, spec_of_entry
from batchwright.order.plan import Plan, PlanSource, Segments
from batchwright.order.schedule import ORDER_VERSION
from batchwright.order.windows import blocks_for
from batchwright.store.reader import Store
from batchwright.store.stream import TokenStream

__all__ = [
    "Member",
    "check_caps",
    "is_weight",
    "open_flow",
    "plan_members",
    "ramp",
    "refuse_conversations",
    "refuse_other_tokenizer",
    "rows_of_mixture",
    "segments_of",
    "shuffle_of",
    "source_of",
    "used_names",
]

_POOL_BYTES = 1 << 30
"""Bytes of tokens in the windows of all sources together, where shuffle="pool" is not given pool_rows."""
_RAMP_SEGMENTS = 64


class Member(NamedTuple):
    """One source of a mixture: where its tokens are, and how long its rows."""

    name: str
    stream: TokenStream
    row_tokens: int
    rows: RowSpec | None = None
    """How its rows are made of whole documents; None: they are windows over all of its tokens."""
    pad: int | None = None
    """The token that fills up such rows."""

    @property
    def num_rows(self) -> int:
        is_windows = self.rows is None
        return (self.stream.num_tokens - 1) // self.row_tokens if is_windows else self.open().num_rows

    @property
    def num_tokens(self) -> int:
        return self.stream.num_tokens if self.rows is None else self.open().num_tokens

    def open(self, *, seed: int = 0, recut: bool = True) -> WindowRows | SampleRows:
        if self.rows is not None:
            return open_samples(self.stream, self.rows, self.name)
        return WindowRows(self.stream, self.row_tokens, seed=seed, recut=recut, name=self.name)


def plan_members(
    members: Sequence[Member],
    asked: Asked,
    *,
    segments: Segments = ((0, None),),
    max_epochs: Mapping[str, int] | None = None,
    pad: int | None = None,
) -> Plan:
    """The plan of a mixture. Looks at no tokens and keeps nothing."""
    split, seed, recut = asked["split"] or "train", asked["seed"] or 0, asked["recut"] is not False
    exhausted, by = asked["exhausted"] or "repeat", asked["by"] or "rows"
    ends = {name: asked[name] for name in ("num_rows", "num_tokens", "stop")}
    lanes = _lanes(asked)
    shuffle = shuffle_of(asked["shuffle"], split)
    has_weights = segments[0][1] is not None
    _check_ends(has_weights, **ends)
    caps = _caps(max_epochs, exhausted, [m.name for m in members], has_weights)
    if lanes is not None and (shuffle != "pool" or caps or exhausted != "repeat"):
        what = f"shuffle={shuffle!r}" if shuffle != "pool" else "capped sources"
        raise SpecError(
            f"lanes= is for shuffle='pool' without caps; this has {what}",
            parameter="lanes",
            remedy="shuffle='pool'" if shuffle != "pool" else "leave out lanes=, or the caps",
        )
    default_end = "short" if split == "val" else "drop"
    row_tokens = _row_tokens(members, pad)
    rows = [m.open(seed=seed, recut=recut) for m in members]
    _refuse_pairs_beside_others(members)
    plan = Plan(
        row_tokens=row_tokens,
        seed=seed,
        shuffle=shuffle,
        sources=tuple(source_of(r, row_tokens) for r in rows),
        segments=segments,
        recut=recut and split == "train",
        epoch_end=asked["epoch_end"] or default_end,
        order_version=ORDER_VERSION,
        pool=_pool(shuffle, asked["pool_rows"], [r.stream.dtype.itemsize * r.row_tokens for r in rows]),
        lanes=lanes,
        by=by,
        max_epochs=caps,
        exhausted=exhausted,
        pad=_pad(members, row_tokens, pad),
    )
    ends_at = rows_of_mixture(plan, **ends)
    return plan if ends_at is None else replace(plan, num_rows=ends_at)


def _pad(members: Sequence[Member], row_tokens: int, pad: int | None) -> int | None:
    """The token that fills up rows, where some are shorter than others."""
    own = next((m.pad or 0 for m in members if m.rows is not None), None)
    is_padded = own is not None or any(m.row_tokens != row_tokens for m in members)
    return (own if pad is None else pad) if is_padded else None


def _refuse_pairs_beside_others(members: Sequence[Member]) -> None:
    pairs = [m for m in members if m.rows is not None and m.rows.pairs]
    other = next((m for m in members if m not in pairs), None)
    if pairs and other is not None:
        raise SpecError(
            f"{pairs[0].name!r} has preference pairs, and {other.name!r} has not: a batch is of one kind",
            parameter="sources",
            source=other.name,
            remedy="mix pairs with pairs alone",
        )


def source_of(rows: WindowRows | SampleRows, row_tokens: int) -> PlanSource:
    return PlanSource(
        name=rows.name,
        split=rows.split,
        fingerprint=rows.fingerprint,
        num_rows=rows.num_rows,
        num_tokens=rows.num_tokens,
        row_tokens=None if rows.row_tokens == row_tokens else rows.row_tokens,
        rows=plan_entry(rows.spec) if isinstance(rows, SampleRows) else (),
    )


def open_flow(
    streams: Mapping[str, TokenStream], plan: Plan, fields: Fields | None = None, padding: Padding | None = None
) -> Flow:
    """The rows and the order that a plan means, over streams that have its content."""
    first = plan.sources[0].name
    for name, stream in streams.items():
        refuse_other_tokenizer(first, streams[first].store, name, stream.store)
    rows = [
        open_samples(streams[source.name], spec_of_entry(source.rows), source.name)
        if source.rows
        else WindowRows(
            streams[source.name],
            source.row_tokens or plan.row_tokens,
            seed=plan.seed,
            recut=plan.recut,
            name=source.name,
            num_tokens=_growth(plan, number),
        )
        for number, source in enumerate(plan.all_sources)
    ]
    return Flow(rows, plan.order, fields, row_tokens=plan.row_tokens, pad=plan.pad, padding=padding)


def refuse_conversations(store: Store) -> None:
    """A store of conversations, read as text, would be learned whole: what users say, and the template."""
    if "chat" in store.manifest.tokenizer:
        raise SpecError(
            f"{store.path} holds conversations, whose tokens are not all to be learned",
            parameter="path",
            file=store.path,
            remedy="ConversationDataLoader(path, max_length=2048), also as a source of a mixture; "
            "its loss='all' learns everything",
        )


def refuse_other_tokenizer(name: str, store: Store, other_name: str, other: Store) -> None:
    one, two = store.manifest.tokenizer, other.manifest.tokenizer
    if (one["kind"], one["fingerprint"]) != (two["kind"], two["fingerprint"]):
        raise SpecError(
            f"{other_name!r} was tokenized by {two['name']}, {name!r} by {one['name']}: the same id is another word",
            parameter="sources",
            source=other_name,
            file=other.path,
            remedy="bake both with one tokenizer",
        )


def _growth(plan: Plan, number: int) -> tuple[tuple[int, int], ...]:
    """(first epoch, tokens that the source had then): one entry, and one for each time it grew."""
    name = plan.order.names[number] if number < len(plan.order.names) else plan.all_sources[number].name
    versions = [s for s in (*plan.sources, *(s for a in plan.amendments for s in a.add)) if s.name == name]
    tokens = {source.num_rows: source.num_tokens for source in reversed(versions)}
    if number >= len(plan.order.growth):
        return ((0, versions[-1].num_tokens),)
    return tuple((size.first_epoch, tokens[size.num_rows]) for size in plan.order.growth[number])


def ramp(
    begin: Mapping[str, float], end: Mapping[str, float], *, first: int, last: int
) -> list[tuple[int, dict[str, float]]]:
    """Weights that go from `begin` at position `first` to `end` by position `last`, in 64 constant segments.

    >>> steps = ramp({"web": 1.0, "code": 0.0}, {"web": 0.5, "code": 0.5}, first=1000, last=7400)
    >>> len(steps), steps[0], steps[1][0], steps[-1]
    (64, (1000, {'web': 1.0, 'code': 0.0}), 1100, (7300, {'web': 0.5, 'code': 0.5}))
    """
    first, last = at_least(0, first=first), whole_number(last=last)
    if last - first < _RAMP_SEGMENTS:
        raise SpecError(
            f"a ramp from position {first} to {last} is too short for its {_RAMP_SEGMENTS} segments",
            parameter="last",
            remedy=f"last={first + _RAMP_SEGMENTS} or more; positions are rows: steps times batch_size",
        )
    names = list(dict.fromkeys([*begin, *end]))
    parts = _RAMP_SEGMENTS - 1
    return [
        (
            first + part * (last - first) // _RAMP_SEGMENTS,
            {n: (begin.get(n, 0.0) * (parts - part) + end.get(n, 0.0) * part) / parts for n in names},
        )
        for part in range(_RAMP_SEGMENTS)
    ]


def segments_of(weights: Any, names: Sequence[str], *, at: int = 0) -> Segments:
    """Weights as they may be written (one mapping, or (position, mapping) in order), in the order of `names`.

    Sources with weight 0 are left out: however weights are written, the same plan.
    """
    if weights is None:
        return ((0, None),)
    if isinstance(weights, Mapping):
        weights = [(at, weights)]
    found: list[tuple[int, tuple[tuple[str, float], ...]]] = []
    try:
        pairs = [(whole_number(weights=position), dict(mapping)) for position, mapping in weights]
    except (TypeError, ValueError):
        raise SpecError(
            "weights are neither one mapping nor a list of (position, mapping)",
            parameter="weights",
            remedy="weights={'web': 0.7, 'code': 0.3}, or [(0, {...}), (100_000, {...})]",
        ) from None
    for position, mapping in pairs:
        if position < at or (found and position <= found[-1][0]):
            raise SpecError(
                f"weights from position {position} come after those from position {found[-1][0] if found else at}",
                parameter="weights",
                remedy="positions that rise; a ramp from there on needs no entry before it"
                if found
                else f"a first position of {at} or more",
            )
        _check_weights(mapping, names)
        found.append((position, tuple((name, float(mapping[name])) for name in names if mapping.get(name, 0.0))))
    if at == 0 and (not found or found[0][0] != 0):
        raise SpecError(
            "weights do not say what holds from position 0 on",
            parameter="weights",
            remedy="a first entry (0, {...})",
        )
    return tuple(found)


def used_names(weights: Any, names: Sequence[str]) -> list[str]:
    """Those of some names that have a weight at any time; all of them without weights."""
    used = {name for _, pairs in segments_of(weights, names) for name, _ in pairs or ()}
    return [name for name in names if name in used or not used]


def _check_weights(weights: Mapping[str, Any], names: Sequence[str]) -> None:
    _refuse_unknown_sources(names, weights=weights)
    for name, weight in weights.items():
        if not is_weight(weight):
            raise SpecError(
                f"the weight of {name!r} is {weight!r}",
                parameter="weights",
                source=name,
                remedy="a number of 0 or more",
            )
    if not any(weights.values()):
        raise SpecError(
            "all weights are 0", parameter="weights", remedy=f"a weight for one of {', '.join(map(repr, names))}"
        )


def _refuse_unknown_sources(names: Sequence[str], **given: Mapping[str, Any]) -> None:
    ((parameter, mapping),) = given.items()
    for name in mapping:
        if name not in names:
            near = suggest(str(name), names)
            raise SpecError(
                f"{parameter}= names a source {name!r} that is not there",
                parameter=parameter,
                source=name,
                sources=", ".join(names),
                remedy=f"perhaps {near!r}" if near else f"one of {', '.join(map(repr, names))}",
            )


def is_weight(weight: Any) -> bool:
    """Whether it is a number of 0 or more."""
    if isinstance(weight, bool) or not isinstance(weight, Real):
        return False
    try:
        return math.isfinite(weight) and float(weight) >= 0
    except OverflowError:  # a whole number that no float holds
        return False


def rows_of_mixture(plan: Plan, *, num_rows: int | None, num_tokens: int | None, stop: str | None) -> int | None:
    """Rows after which a mixture ends; None for one that does not."""
    if num_tokens is not None:
        at_least(plan.row_tokens, num_tokens=num_tokens)
        if plan.pad is None:
            return num_tokens // plan.row_tokens
        widths = [plan.tokens_per_row(source) for source in plan.all_sources]  # what fills rows up is no token
        low, high = 0, int(num_tokens // min(widths))
        while low < high:
            middle = (low + high + 1) // 2
            tokens = sum(w * count for w, count in zip(widths, plan.order.given(middle), strict=True))
            low, high = (middle, high) if tokens <= num_tokens else (low, middle - 1)
        return low
    if stop is not None:
        first = one_of(("first_exhausted", "all_exhausted"), stop=stop) == "first_exhausted"
        return plan.order.exhausted_at(first=first)
    return None if num_rows is None else at_least(1, num_rows=num_rows)


def _check_ends(has_weights: bool, **ends: Any) -> None:
    given = [name for name, value in ends.items() if value is not None]
    if given and not has_weights:
        raise SpecError(
            f"{given[0]}= ends a mixture; this loader has no weights", parameter=given[0], remedy="weights=, or epochs="
        )
    if len(given) > 1:
        raise SpecError(f"{' and '.join(given)} both end the stream", parameter=given[1], remedy="give one of them")


def _caps(
    max_epochs: Mapping[str, int] | None, exhausted: str, names: Sequence[str], has_weights: bool
) -> tuple[tuple[str, int], ...]:
    if (max_epochs or exhausted != "repeat") and not has_weights:
        raise SpecError(
            "without weights every source is read equally often, so none can be capped",
            parameter="max_epochs" if max_epochs else "exhausted",
            remedy="weights=, or epochs=",
        )
    return check_caps(max_epochs or {}, names)


def check_caps(max_epochs: Mapping[str, int], names: Sequence[str]) -> tuple[tuple[str, int], ...]:
    """Caps in the order of the names."""
    _refuse_unknown_sources(names, max_epochs=max_epochs)
    return tuple((name, at_least(1, max_epochs=max_epochs[name])) for name in names if name in max_epochs)


def _row_tokens(members: Sequence[Member], pad: int | None) -> int:
    """Tokens of a row: the same for all sources, unless shorter ones are padded."""
    windows = [m for m in members if m.rows is None]  # rows of samples are filled up in any case
    longest = max(members, key=lambda m: m.row_tokens)
    other = next((m for m in windows if m.row_tokens != longest.row_tokens), None)
    if other is not None and pad is None and len(windows) == len(members):
        raise SpecError(
            f"{longest.name!r} has rows of {longest.row_tokens:,} tokens, {other.name!r} of {other.row_tokens:,}",
            parameter="chunk_size",
            source=other.name,
            remedy="one chunk_size for all, or pad= with the token id that fills up the shorter rows",
        )
    if pad is not None:
        at_least(0, pad=pad)
    return longest.row_tokens


def shuffle_of(asked: str | bool | None, split: str) -> str:
    if asked is None:
        return "none" if split == "val" else "global"
    if isinstance(asked, bool):
        return "global" if asked else "none"
    return one_of(("global", "pool", "none"), shuffle=asked)


def _pool(shuffle: str, pool_rows: int | None, row_bytes: list[int]) -> tuple[int, int] | None:
    """(rows of a block, blocks of a window) of each source. `row_bytes` are the sizes of their rows."""
    if shuffle != "pool":
        if pool_rows is not None:
            raise SpecError(
                f"pool_rows= is for shuffle='pool'; this is shuffle={shuffle!r}",
                parameter="pool_rows",
                remedy="shuffle='pool', or leave out pool_rows=",
            )
        return None
    if pool_rows is None:
        pool_rows = max(_POOL_BYTES // sum(row_bytes), 1)
    return blocks_for(at_least(1, pool_rows=pool_rows))


def _lanes(asked: Asked) -> tuple[int, int] | None:
    """(lanes, rows that each gets of a batch)."""
    lanes, rows = asked["lanes"], asked["batch_size"] or SETTINGS["batch_size"].default
    if lanes is None:
        return None
    if rows % lanes:
        raise SpecError(
            f"batch_size={rows} does not divide by lanes={lanes}",
            parameter="lanes",
            remedy="as many lanes as there will be machines (or ranks), and a batch_size that is a multiple",
        )
    return lanes, rows // lanes
