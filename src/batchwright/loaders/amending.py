"""Change a plan from a position on: what may be asked, checked against what the plan has given by then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from batchwright.base.checks import at_least, whole_number
from batchwright.base.errors import PlanError, SpecError, StoreError
from batchwright.batches.flow import Flow
from batchwright.loaders.loader import Loader
from batchwright.loaders.planning import (
    Member,
    check_caps,
    open_flow,
    refuse_other_tokenizer,
    rows_of_mixture,
    segments_of,
    source_of,
)
from batchwright.loaders.sources import caps_of_entries, flatten, hand_down, parts_of
from batchwright.order.plan import Amendment, Plan, PlanSource
from batchwright.order.schedule import NEVER
from batchwright.store.reader import Store
from batchwright.store.stream import TokenStream

__all__ = ["amend_flow", "amend_plan", "members_to_add"]

_MOST_SKIPPED_EPOCHS = 1000


def amend_plan(
    plan: Plan,
    *,
    at: int | None = None,
    weights: Any = None,
    add: Mapping[str, Any] | None = None,
    skip: Any = None,
    max_epochs: Any = None,
    num_rows: int | None = None,
    num_tokens: int | None = None,
    opened: list[Member] | None = None,
) -> Plan:
    """The plan with one amendment more. As `Plan.amend`; `opened` is what `add` names, where that is done already."""
    skips = _spans(skip)
    at = _position(plan, at, skips)
    if weights is None and num_rows is None and num_tokens is None and not (add or opened or skips or max_epochs):
        raise SpecError(
            "an amendment that changes nothing", parameter="weights", remedy="weights=, add=, skip=, or another change"
        )
    members = members_to_add(add, plan) if opened is None else opened
    _check_skips(plan, at, skips)
    _check_lanes(plan, add=members, max_epochs=max_epochs, weights=weights if plan.weights is None else None)
    added = tuple(_added(plan, member) for member in members)
    names = list(dict.fromkeys([*(s.name for s in plan.all_sources), *(s.name for s in added)]))
    is_mixture = plan.weights is not None or weights is not None
    segments = () if weights is None else segments_of(hand_down(weights, parts_of(plan, added)), names, at=at)
    asked_caps = {} if max_epochs is None else caps_of_entries(max_epochs, names)
    caps = _check_caps(plan, at, asked_caps, names, is_mixture)
    _check_that_new_sources_have_weights(plan, added, segments)
    amendment = Amendment(at=at, parent=plan.fingerprint, weights=segments, add=added, skip=skips, max_epochs=caps)
    amended = replace(plan, amendments=(*plan.amendments, amendment))
    _ = amended.order  # refuses weights that no mixture can have
    ends_at = _end(amended, at, is_mixture, num_rows, num_tokens)
    if ends_at is None:
        return amended
    return replace(plan, amendments=(*plan.amendments, replace(amendment, num_rows=ends_at)))


def amend_flow(
    plan: Plan, flow: Flow, cursor: int, epochs: int | None, *, at: int | None, add: Any, **asked: Any
) -> tuple[Plan, Flow]:
    """A plan and the rows that it means, amended from a loader's cursor on, or from a later position."""
    at = cursor if at is None else whole_number(at=at)
    if at < cursor:
        raise SpecError(
            f"position {at:,} is past: the cursor is at {cursor:,}",
            parameter="at",
            remedy=f"at={cursor} or more, or load an earlier state first",
        )
    streams = {rows.name: rows.stream for rows in flow.stored if isinstance(rows.stream, TokenStream)}
    members = members_to_add(add, plan, next(iter(streams.values())).store)
    if members and plan.weights is None and not asked.get("weights") and epochs == 1:
        raise SpecError(
            "without weights a source joins when the next epoch begins, and this run has only one",
            parameter="add",
            remedy="epochs=2 or more when opening the loader, or weights= too",
        )
    amended = amend_plan(plan, at=at, add=add, opened=members, **asked)
    streams.update((member.name, member.stream) for member in members)
    return amended, open_flow(streams, amended, flow.fields, flow.padding)


def members_to_add(add: Mapping[str, Any] | None, plan: Plan, store: Store | None = None) -> list[Member]:
    """What `add` names, opened. `store` is one of the plan's: all must have its tokenizer."""
    if not add:
        return []
    if not isinstance(add, Mapping):
        raise SpecError(
            f"add= is a {type(add).__name__}, not sources by name", parameter="add", remedy="add={'math': 'math.store'}"
        )
    known = {source.name: source.row_tokens or plan.row_tokens for source in plan.all_sources}
    members: list[Member] = []
    for name, source in add.items():
        length = None if isinstance(source, Loader) else known.get(name, plan.row_tokens)
        members += flatten({name: source}, chunk_size=length, split=plan.sources[0].split)[0]
    packed = {source.name for source in plan.all_sources if source.rows}
    for member in members:
        _refuse_packed(member, packed, plan)
        asked = known.get(member.name, plan.row_tokens)
        is_shorter = member.name not in known and plan.pad is not None and member.row_tokens <= asked
        if member.row_tokens != asked and not is_shorter:
            raise SpecError(
                f"rows of {member.name!r} have {member.row_tokens:,} tokens, those of the plan {asked:,}",
                parameter="add",
                source=member.name,
                remedy=f"chunk_size={asked}",
            )
    store = store or _store_of(plan)
    if store is not None:
        for member in members:
            refuse_other_tokenizer(plan.sources[0].name, store, member.name, member.stream.store)
    return members


def _refuse_packed(member: Member, packed: set[str], plan: Plan) -> None:
    """Rows of whole documents are planned over all of them at once: another document moves them all."""
    if member.name in packed:
        raise SpecError(
            f"the rows of {member.name!r} are made of whole documents, so it cannot grow under this plan",
            parameter="add",
            source=member.name,
            remedy="add= what is new under another name",
        )
    if member.rows is not None and plan.pad is None:
        raise SpecError(
            f"rows of {member.name!r} must be filled up, and plan {plan.fingerprint} has no token for that",
            parameter="add",
            source=member.name,
            remedy="a new plan that has such a source from the beginning",
        )


def _store_of(plan: Plan) -> Store | None:
    """A store of the plan, where it is still in its place."""
    for _, path in plan.places:
        with suppress(StoreError):
            return Store(path)
    return None


def _check_lanes(plan: Plan, **refused: Any) -> None:
    for name, asked in refused.items():
        if plan.lanes is not None and asked:
            raise SpecError(
                "a plan with lanes can only be amended by skip=, and if it has weights by weights= or another end",
                parameter=name,
                remedy="a new plan without lanes=",
            )


def _position(plan: Plan, at: int | None, skips: tuple[tuple[int, int], ...]) -> int:
    if at is None:
        if not skips:
            raise SpecError("from which position on?", parameter="at", remedy="at=, or loader.amend() at its cursor")
        at = min(first for first, _ in skips)
    at = at_least(0, at=at)
    if at > NEVER:
        raise SpecError(f"position {at} is outside any run", parameter="at", remedy="a position below 2^62")
    last = plan.amendments[-1] if plan.amendments else None
    if last is not None and at == last.at:
        raise SpecError(
            f"position {at:,} has an amendment already ({last})",
            parameter="at",
            remedy=f"both changes in one amend(), on plan {last.parent}; or a later position",
        )
    if last is not None and at < last.at:
        raise SpecError(
            f"position {at:,} lies before the last amendment ({last}), which would change",
            parameter="at",
            remedy=f"at={last.at + 1} or more, or amend plan {last.parent}",
        )
    end = plan.epoch_spec["epochs"].limit
    if end is not None and at > end:
        raise SpecError(
            f"position {at:,} does not exist: the stream ends at {end:,}", parameter="at", remedy=f"at={end} or less"
        )
    return at


def _spans(skip: Any) -> tuple[tuple[int, int], ...]:
    """(first, last) of what is to be skipped: one position, a pair, or a list of these."""
    if skip is None:
        return ()
    parts = list(skip) if isinstance(skip, list | set | range | np.ndarray) else [skip]
    spans = []
    for part in parts:
        pair = part if isinstance(part, tuple | list | np.ndarray) else (part, part)
        if len(pair) != 2:
            raise SpecError(f"skip={part!r} is not (first, last)", parameter="skip", remedy="skip=(first, last)")
        first, last = (whole_number(skip=number) for number in pair)
        if first > last:
            raise SpecError(
                f"skip=({first}, {last}) runs backwards", parameter="skip", remedy=f"skip=({last}, {first})"
            )
        spans.append((first, last))
    return tuple(sorted(spans))


def _check_skips(plan: Plan, at: int, skips: tuple[tuple[int, int], ...]) -> None:
    end = plan.epoch_spec["epochs"].limit
    epoch_rows = plan.epoch_rows
    for first, last in skips:
        if last > NEVER or (epoch_rows and (last - first) // epoch_rows > _MOST_SKIPPED_EPOCHS):
            raise SpecError(
                f"skip=({first}, {last}) passes over more than {_MOST_SKIPPED_EPOCHS:,} epochs",
                parameter="skip",
                remedy="loader.seek(position=...)",
            )
        if first < at:
            raise SpecError(
                f"position {first:,} cannot be skipped: it lies before {at:,}, from which on the plan is amended",
                parameter="skip",
                remedy=f"load a state from position {first:,} or before, and amend there",
            )
        if end is not None and last >= end:
            raise SpecError(
                f"position {last:,} cannot be skipped: the stream ends at {end:,}",
                parameter="skip",
                remedy=f"positions below {end:,}",
            )


def _added(plan: Plan, member: Member) -> PlanSource:
    source = source_of(member.open(seed=plan.seed, recut=plan.recut), plan.row_tokens)
    known = next((s for s in plan.all_sources if s.name == member.name), None)
    if known is None:
        return source
    if source.fingerprint == known.fingerprint:
        raise SpecError(
            f"source {source.name!r} is in the plan already, with this content", parameter="add", source=source.name
        )
    if not member.stream.begins_with(known.fingerprint, known.num_tokens):
        raise PlanError(
            f"source {source.name!r} was replaced: its first {known.num_tokens:,} tokens are not those of the plan",
            source=source.name,
            file=member.stream.store.path,
            remedy="a store that has them and more after them (baked with shuffle=False, or adopted), or another name",
        )
    return source


def _check_that_new_sources_have_weights(plan: Plan, added: tuple[PlanSource, ...], segments: Any) -> None:
    if plan.weights is None and not segments:
        return  # they join when the next epoch begins
    asked = {name for _, weights in segments or plan.schedule for name, _ in weights or ()}
    known = {source.name for source in plan.all_sources}
    for source in added:
        if source.name not in asked and source.name not in known:
            raise SpecError(
                f"source {source.name!r} joins a mixture without a weight",
                parameter="weights",
                source=source.name,
                remedy=f"weights= with one for {source.name!r}",
            )


def _check_caps(
    plan: Plan, at: int, max_epochs: Mapping[str, int], names: Sequence[str], is_mixture: bool
) -> tuple[tuple[str, int], ...]:
    if max_epochs and not is_mixture:
        raise SpecError(
            "without weights every source is read equally often, so none can be capped",
            parameter="max_epochs",
            remedy="weights= too",
        )
    caps = check_caps(max_epochs, names)
    given = dict(zip(plan.order.names, plan.order.counts(at), strict=True))
    for name, cap in caps:
        source = plan.order.names.index(name) if name in given else None
        if source is None or not given[name]:
            continue
        used = 1 + int(plan.order.epoch_of(source, np.array([given[name] - 1]))[0][0])
        if used > cap:
            raise SpecError(
                f"source {name!r} is in epoch {used} at position {at:,}, so it cannot be capped at {cap}",
                parameter="max_epochs",
                source=name,
                remedy=f"max_epochs={{{name!r}: {used}}} or more, or a weight of 0",
            )
    return caps


def _end(plan: Plan, at: int, is_mixture: bool, num_rows: int | None, num_tokens: int | None) -> int | None:
    if num_rows is not None and num_tokens is not None:
        raise SpecError("num_rows and num_tokens both end the stream", parameter="num_tokens", remedy="one of them")
    if num_rows is None and num_tokens is None:
        return None
    name = "num_rows" if num_rows is not None else "num_tokens"
    if not is_mixture:
        raise SpecError(f"{name}= ends a mixture; this plan has no weights", parameter=name, remedy="weights= too")
    end = rows_of_mixture(plan, num_rows=num_rows, num_tokens=num_tokens, stop=None)
    assert end is not None
    if end <= at:
        unit = 1 if num_rows is not None else plan.row_tokens
        raise SpecError(
            f"the stream cannot end at row {end:,}: {at:,} were given by then",
            parameter=name,
            remedy=f"{name}={(at + 1) * unit} or more",
        )
    return end
