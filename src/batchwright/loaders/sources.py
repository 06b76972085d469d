"""What a mixture may be made of: stores and loaders of this package, opened and flattened into single sources."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from batchwright.base.checks import at_least
from batchwright.base.errors import SpecError
from batchwright.batches.samples import SampleRows
from batchwright.batches.settings import Asked
from batchwright.loaders.loader import Loader
from batchwright.loaders.planning import (
    Member,
    is_weight,
    plan_members,
    refuse_conversations,
    refuse_other_tokenizer,
    segments_of,
    shuffle_of,
)
from batchwright.loaders.stored import StoreStream
from batchwright.order.plan import Plan, PlanSource, Segments
from batchwright.order.windows import blocks_for
from batchwright.store.reader import Store
from batchwright.store.stream import TokenStream

__all__ = ["Parts", "caps_of_entries", "flatten", "hand_down", "parts_of", "plan_sources", "refuse_other_settings"]

log: logging.Logger = logging.getLogger("batchwright")

Parts = dict[str, float | None]
"""The share that each source has in the one it came from; None where it is that one."""


def flatten(
    sources: Any, *, chunk_size: int | None, split: str, has_weights: bool = True
) -> tuple[list[Member], Parts]:
    """Every single source in what is given, and what share it has in its entry if that is a mixture itself.

    A store or a loader with several sources becomes name/source for each of them; a loader's own order, cursor and seed
    are not used. One store alone, without a name, keeps the names of its own sources. Without weights, a mixture by
    weights inside is refused: what it asks for would be lost.
    """
    if not isinstance(sources, Mapping):
        members, _ = _of(None, sources, chunk_size, split, has_weights)
        return members, dict.fromkeys(m.name for m in members)
    if not sources:
        raise SpecError("a mixture of no sources", parameter="sources", remedy="sources={'web': 'web.store', ...}")
    asked = chunk_size
    if chunk_size is None:  # stores beside loaders have rows as long as theirs
        chunk_size = next((s.plan.row_tokens for s in sources.values() if _has_windows(s)), None)
    found: list[Member] = []
    parts: Parts = {}
    for name, source in sources.items():
        length = asked if isinstance(source, Loader) else chunk_size
        members, shares = _of(str(name), source, length, split, has_weights)
        found += members
        parts.update(shares)
    if repeated := next((m.name for m in found if sum(n.name == m.name for n in found) > 1), None):
        raise SpecError(
            f"two sources are called {repeated!r}", parameter="sources", source=repeated, remedy="rename one"
        )
    first = found[0]
    for member in found[1:]:
        refuse_other_tokenizer(first.name, first.stream.store, member.name, member.stream.store)
    return found, parts


def _has_windows(source: Any) -> bool:
    return isinstance(source, Loader) and not source.stream.has_lengths


def hand_down(weights: Any, parts: Parts) -> Any:
    """Weights in which entries with several sources stand for them: each of these has its share of the weight.

    >>> hand_down({"web": 1.0, "code": 2.0}, {"web": None, "code/py": 0.75, "code/js": 0.25})
    {'web': 1.0, 'code/py': 1.5, 'code/js': 0.5}
    """
    if not isinstance(weights, Mapping):
        try:
            return [(at, hand_down(dict(mapping), parts)) for at, mapping in weights]
        except (TypeError, ValueError):
            return weights  # not weights at all, which `segments_of` says
    handed: dict[str, Any] = {}
    for name, weight in weights.items():
        inner = {n: share or 0.0 for n, share in parts.items() if n.startswith(f"{name}/") and name not in parts}
        if inner and is_weight(weight):
            handed.update((n, weight * share) for n, share in inner.items())
        else:
            handed[name] = weight
    return handed


def parts_of(plan: Plan, added: Sequence[PlanSource] = ()) -> Parts:
    """The share that each source of a plan has in its entry: as its weights are now, else by its rows."""
    sources, weights = (*plan.all_sources, *added), plan.weights or {}
    parts: Parts = {}
    for source in sources:
        entry, slash, _ = source.name.partition("/")
        mine = [s for s in sources if s.name.startswith(f"{entry}/")]
        weighted = {s.name: weights.get(s.name, 0.0) for s in mine}
        sizes = weighted if any(weighted.values()) else {s.name: float(s.num_rows) for s in mine}
        parts[source.name] = sizes[source.name] / sum(sizes.values()) if slash else None
    return parts


def caps_of_entries(max_epochs: Any, names: Sequence[str]) -> dict[str, int]:
    """Caps by single source: an entry with several stands for them, and one number for all."""
    if not isinstance(max_epochs, Mapping):
        return dict.fromkeys(names, at_least(1, max_epochs=max_epochs))
    caps: dict[str, int] = {}
    for name, epochs in max_epochs.items():
        inner = [n for n in names if n.startswith(f"{name}/")] if name not in names else [name]
        caps.update(dict.fromkeys(inner or [name], epochs))
    return caps


def _of(
    name: str | None, source: Any, chunk_size: int | None, split: str, has_weights: bool
) -> tuple[list[Member], Parts]:
    if isinstance(source, Loader):
        return _of_loader(name, source, chunk_size, has_weights)
    if isinstance(source, list) and source and all(isinstance(member, Member) for member in source):
        return _named(name, source, None)  # opened already, as `batchwright plan` does
    if not isinstance(source, str | os.PathLike | Store):
        raise SpecError(
            f"a {type(source).__name__} cannot be a source of a mixture",
            parameter="sources",
            source=name,
            remedy="sources={'web': 'web.store', ...}: stores, paths, or loaders over them, by name",
        )
    if chunk_size is None:
        raise SpecError("how long is a row?", parameter="chunk_size", source=name, remedy="chunk_size=2048")
    store = source if isinstance(source, Store) else Store(source)
    refuse_conversations(store)
    streams = [store.stream(stream, split) for stream in store.names]
    long_enough = [s for s in streams if s.num_tokens > chunk_size] or streams[:1]
    for short in [s for s in streams if s not in long_enough]:
        log.warning(
            "source %r (%s) is left out: its %d tokens are too few for one row of %d",
            *(short.name, split, short.num_tokens, chunk_size),
        )
    return _named(name, [Member(s.name, s, chunk_size) for s in long_enough], None)


def _of_loader(
    name: str | None, loader: Loader[Any], chunk_size: int | None, has_weights: bool
) -> tuple[list[Member], Parts]:
    plan, stream = loader.plan, loader.stream
    if not isinstance(stream, StoreStream):
        raise SpecError(
            f"{name!r} does not read stores, so it has no row numbers to mix by",
            parameter="sources",
            source=name,
            remedy="bake its data, and give the store",
        )
    members = [
        Member(
            r.name,
            r.stream,
            r.row_tokens,
            rows=r.spec if isinstance(r, SampleRows) else None,
            pad=stream.flow.pad if isinstance(r, SampleRows) else None,
        )
        for r in stream.flow.stored
        if isinstance(r.stream, TokenStream)
    ]
    if chunk_size is not None and any(m.row_tokens != chunk_size for m in members if m.rows is None):
        raise SpecError(
            f"chunk_size={chunk_size} was asked for, and the loader of {name!r} has rows of {plan.row_tokens} tokens",
            parameter="chunk_size",
            source=name,
            remedy=f"chunk_size={plan.row_tokens}, or leave it out",
        )
    _refuse_what_does_not_flatten(name, plan, has_weights)
    return _named(name, members, plan.weights)


def _refuse_what_does_not_flatten(name: str | None, plan: Plan, has_weights: bool) -> None:
    for what, is_there in (
        ("weights, and this mixture has none", plan.weights is not None and not has_weights),
        ("weights that change", len(plan.schedule) > 1),
        ("amendments", bool(plan.amendments)),
        ("capped sources", bool(plan.max_epochs) or plan.exhausted != "repeat"),
    ):
        if is_there:
            raise SpecError(
                f"the loader of {name!r} has {what}, which cannot be a part of another mixture",
                parameter="sources",
                source=name,
                remedy="say it in the outer mixture, over the single sources",
            )


def _named(name: str | None, members: list[Member], weights: dict[str, float] | None) -> tuple[list[Member], Parts]:
    """Members under the name of their entry, and the share that each has in it."""
    if name is None:
        return members, dict.fromkeys(m.name for m in members)
    if len(members) == 1:
        return [members[0]._replace(name=name)], {name: None}
    sizes = {m.name: float(m.num_rows) for m in members}
    shares = sizes if weights is None else weights
    total = sum(shares.values())
    named = [m._replace(name=f"{name}/{m.name}") for m in members]
    return named, {f"{name}/{m.name}": shares.get(m.name, 0.0) / total for m in members}


def plan_sources(members: Sequence[Member], asked: Asked, parts: Parts | None = None, pad: int | None = None) -> Plan:
    """The plan of some sources, mixed as asked. `parts` are all that weights may name."""
    names = [member.name for member in members]
    parts = dict.fromkeys(names) if parts is None else parts
    caps = None if asked["max_epochs"] is None else caps_of_entries(asked["max_epochs"], names)
    return plan_members(members, asked, segments=_segments(members, parts, asked), max_epochs=caps, pad=pad)


def refuse_other_settings(plan: Plan, asked: Asked, names: Sequence[str], **meant: Any) -> None:
    """Refuse settings that a plan has otherwise. `names` are those of its sources; `meant` as in `Asked`."""
    if asked["weights"] is not None:
        meant["weights"] = segments_of(hand_down(asked["weights"], parts_of(plan)), names)
    if asked["max_epochs"] is not None:
        meant["max_epochs"] = caps_of_entries(asked["max_epochs"], [source.name for source in plan.all_sources])
    if asked["pool_rows"] is not None:
        meant["pool_rows"] = math.prod(blocks_for(asked["pool_rows"]))
    meant["shuffle"] = shuffle_of(asked["shuffle"], plan.sources[0].split)
    asked.refuse_other_than(plan, **meant)


def _segments(members: Sequence[Member], parts: Parts, asked: Asked) -> Segments:
    """Weights as asked for entries, handed down to their single sources; flattened by a temperature."""
    names, weights, temperature = list(parts), asked["weights"], asked["temperature"]
    if weights is None and temperature is None:
        return ((0, None),)
    if weights is None:
        sizes = {m.name: float(m.num_tokens) for m in members}
        if asked["by"] != "tokens":
            sizes = {m.name: float(m.num_rows) for m in members}
        return segments_of(_tempered(sizes, temperature), names)
    handed = hand_down(weights, parts)
    if temperature is not None and isinstance(handed, Mapping):
        handed = _tempered(handed, temperature)
    elif temperature is not None:
        handed = [(at, _tempered(mapping, temperature)) for at, mapping in handed]
    return segments_of(handed, names)


def _tempered(weights: Mapping[str, Any], temperature: Any) -> dict[str, Any]:
    """Weights to the power 1 / temperature: above 1 they come nearer to each other."""
    if not is_weight(temperature) or not temperature:
        raise SpecError(
            f"temperature is {temperature!r}", parameter="temperature", remedy="a number above 0; 1 changes nothing"
        )
    total = sum(w for w in weights.values() if is_weight(w)) or 1.0
    return {n: (w / total) ** (1 / temperature) if is_weight(w) and w else w for n, w in weights.items()}
