"""Amendments: changes of a plan from a position on, checked against the rows given before that position."""

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
from batchwright.loaders.planning import Member, end_of_mixture, flatten, refuse_caps, refuse_ends, source_of
from batchwright.loaders.stored import open_flow, refuse_other_tokenizer
from batchwright.loaders.weights import caps_of, segments_of, shares_of
from batchwright.order.plan import Amendment, Plan, PlanSource, Segments
from batchwright.order.schedule import NEVER
from batchwright.store.reader import Store
from batchwright.store.stream import TokenStream

__all__ = ["amend_plan", "members_to_add"]

Spans = tuple[tuple[int, int], ...]
"""(first, last) positions that are skipped."""

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
    """The plan with one more amendment, as `Plan.amend`. `opened` are the sources of `add`, if already opened."""
    skips, ends = _spans(skip), {"num_rows": num_rows, "num_tokens": num_tokens}
    is_given = any(value is not None for value in (weights, num_rows, num_tokens))
    if not (is_given or add or opened or skips or max_epochs):
        raise SpecError(
            "an amendment that changes nothing", parameter="weights", remedy="weights=, add=, skip=, or another change"
        )
    at = _position(plan, at, skips)
    members = opened or members_to_add(add, plan)
    _check_skips(plan, at, skips)
    _check_lanes(plan, add=members, max_epochs=max_epochs, weights=plan.weights is None and weights is not None)
    added = tuple(_added(plan, member) for member in members)
    names = list(dict.fromkeys(source.name for source in (*plan.all_sources, *added)))
    is_mixture = plan.weights is not None or weights is not None
    segments: Segments = ()
    if weights is not None:
        segments = segments_of(weights, names, shares_of(plan, added), at=at)
    caps = caps_of(max_epochs, names)
    _check_caps(plan, at, caps, is_mixture)
    _check_that_new_sources_have_weights(plan, added, segments)
    refuse_ends(is_mixture, "this plan", "weights= too", **ends)
    amendment = Amendment(
        at=at, parent=plan.fingerprint, weights=segments, add=added, skip=skips, max_epochs=tuple(caps.items())
    )
    amended = replace(plan, amendments=(*plan.amendments, amendment))
    _ = amended.order  # refuses impossible weights
    end = end_of_mixture(amended, **ends, stop=None)
    if end is None:
        return amended
    _check_end(end, at, plan, **ends)
    return replace(plan, amendments=(*plan.amendments, replace(amendment, num_rows=end)))


def amend_flow(
    plan: Plan, flow: Flow, cursor: int, epochs: int | None, *, at: int | None, add: Any, **asked: Any
) -> tuple[Plan, Flow]:
    """A plan and its rows, amended from a loader's cursor on, or from a later position."""
    if at is None:
        at = cursor
    if whole_number(at=at) < cursor:
        remedy = f"at={cursor} or more, or load an earlier state first"
        raise SpecError(f"position {at:,} is past: the cursor is at {cursor:,}", parameter="at", remedy=remedy)
    streams = {rows.name: rows.stream for rows in flow.stored if isinstance(rows.stream, TokenStream)}
    members = members_to_add(add, plan, next(iter(streams.values())).store)
    if members and plan.weights is None and not asked.get("weights") and epochs == 1:
        what = "without weights a source joins when the next epoch begins, and this run has only one"
        raise SpecError(what, parameter="add", remedy="epochs=2 or more when opening the loader, or weights= too")
    amended = amend_plan(plan, at=at, add=add, opened=members, **asked)
    streams |= {member.name: member.stream for member in members}
    return amended, open_flow(streams, amended, flow.fields, flow.padding)


# Sources


def members_to_add(add: Mapping[str, Any] | None, plan: Plan, store: Store | None = None) -> list[Member]:
    """The opened sources of `add`. `store` is a store of the plan; all sources must have its tokenizer."""
    if not add:
        return []
    if not isinstance(add, Mapping):
        raise SpecError(
            f"add= is a {type(add).__name__}, not sources by name", parameter="add", remedy="add={'math': 'math.store'}"
        )
    known = {source.name: source for source in plan.all_sources}
    store = store or _store_of(plan)
    members: list[Member] = []
    for name, source in add.items():
        length = None
        if not isinstance(source, Loader):
            length = _row_tokens(plan, known.get(name))
        members += flatten({name: source}, chunk_size=length, split=plan.sources[0].split)[0]
    for member in members:
        _check_member(member, known.get(member.name), plan)
        if store is not None:
            refuse_other_tokenizer(plan.sources[0].name, store, member.name, member.stream.store)
    return members


def _store_of(plan: Plan) -> Store | None:
    """A store of the plan, if it is still at its recorded path."""
    for _, path in plan.places:
        with suppress(StoreError):
            return Store(path)
    return None


def _row_tokens(plan: Plan, source: PlanSource | None) -> int:
    if source is None:
        return plan.row_tokens
    return source.row_tokens or plan.row_tokens


def _check_member(member: Member, known: PlanSource | None, plan: Plan) -> None:
    """Refuse rows that do not fit into the plan. `known` is the source that grows."""
    if known is not None and known.rows:  # rows of whole documents are planned over all documents together
        what = f"the rows of {member.name!r} are made of whole documents, so it cannot grow under this plan"
        raise SpecError(what, parameter="add", source=member.name, remedy="add= what is new under another name")
    if member.rows is not None and plan.pad is None:
        what = f"rows of {member.name!r} must be filled up, and plan {plan.fingerprint} has no token for that"
        remedy = "a new plan that has such a source from the beginning"
        raise SpecError(what, parameter="add", source=member.name, remedy=remedy)
    expected = _row_tokens(plan, known)
    is_padded = known is None and plan.pad is not None and member.row_tokens < expected
    if member.row_tokens != expected and not is_padded:
        what = f"rows of {member.name!r} have {member.row_tokens:,} tokens, those of the plan {expected:,}"
        raise SpecError(what, parameter="add", source=member.name, remedy=f"chunk_size={expected}")


def _added(plan: Plan, member: Member) -> PlanSource:
    source = source_of(member.open(seed=plan.seed, recut=plan.recut), plan.row_tokens)
    known = next((known for known in plan.all_sources if known.name == member.name), None)
    if known is None:
        return source
    if source.fingerprint == known.fingerprint:
        raise SpecError(
            f"source {source.name!r} is in the plan already, with this content", parameter="add", source=source.name
        )
    if not member.stream.begins_with(known.fingerprint, known.num_tokens):
        what = f"source {source.name!r} was replaced: its first {known.num_tokens:,} tokens are not those of the plan"
        remedy = "a store that has them and more after them (baked with shuffle=False, or adopted), or another name"
        raise PlanError(what, source=source.name, file=member.stream.store.path, remedy=remedy)
    return source


def _check_that_new_sources_have_weights(plan: Plan, added: Sequence[PlanSource], segments: Segments) -> None:
    if plan.weights is None and not segments:
        return  # they join when the next epoch begins
    with_weights = {name for _, weights in segments or plan.schedule for name, _ in weights or ()}
    for source in added:
        if source.name not in with_weights | {known.name for known in plan.all_sources}:
            what = f"source {source.name!r} joins a mixture without a weight"
            remedy = f"weights= with one for {source.name!r}"
            raise SpecError(what, parameter="weights", source=source.name, remedy=remedy)


# Positions


def _position(plan: Plan, at: int | None, skips: Spans) -> int:
    """The position from which the plan is amended."""
    if at is None and not skips:
        raise SpecError("from which position on?", parameter="at", remedy="at=, or loader.amend() at its cursor")
    if at is None:
        at = min(first for first, _ in skips)
    at = at_least(0, at=at)
    if plan.amendments:
        _check_order(plan.amendments[-1], at)
    end = plan.epochs.limit or NEVER
    if at > end:
        raise SpecError(
            f"position {at:,} does not exist: the stream ends at {end:,}", parameter="at", remedy=f"at={end} or less"
        )
    return at


def _check_order(last: Amendment, at: int) -> None:
    """Check that the positions of amendments rise."""
    if at == last.at:
        remedy = f"both changes in one amend(), on plan {last.parent}; or a later position"
        raise SpecError(f"position {at:,} has an amendment already ({last})", parameter="at", remedy=remedy)
    if at < last.at:
        what = f"position {at:,} lies before the last amendment ({last}), which would change"
        raise SpecError(what, parameter="at", remedy=f"at={last.at + 1} or more, or amend plan {last.parent}")


def _spans(skip: Any) -> Spans:
    """The positions to skip, from one position, a pair, or a list of these."""
    if skip is None:
        return ()
    if not isinstance(skip, list | set | range | np.ndarray):
        skip = [skip]
    spans = []
    for part in skip:
        pair = part
        if not isinstance(part, tuple | list | np.ndarray):
            pair = part, part
        if len(pair) != 2:
            raise SpecError(f"skip={part!r} is not (first, last)", parameter="skip", remedy="skip=(first, last)")
        first, last = (whole_number(skip=number) for number in pair)
        if first > last:
            raise SpecError(
                f"skip=({first}, {last}) runs backwards", parameter="skip", remedy=f"skip=({last}, {first})"
            )
        spans.append((first, last))
    return tuple(sorted(spans))


def _check_skips(plan: Plan, at: int, skips: Spans) -> None:
    end = plan.epochs.limit or NEVER
    most = (plan.epoch_rows or NEVER) * _MOST_SKIPPED_EPOCHS
    for first, last in skips:
        if last - first > most:
            what = f"skip=({first}, {last}) passes over more than {_MOST_SKIPPED_EPOCHS:,} epochs"
            raise SpecError(what, parameter="skip", remedy="loader.seek(position=...)")
        if first < at:
            what = f"position {first:,} cannot be skipped: it lies before {at:,}, from which on the plan is amended"
            remedy = f"load a state from position {first:,} or before, and amend there"
            raise SpecError(what, parameter="skip", remedy=remedy)
        if last >= end:
            what = f"position {last:,} cannot be skipped: the stream ends at {end:,}"
            raise SpecError(what, parameter="skip", remedy=f"positions below {end:,}")


# Lanes, caps and ends


def _check_lanes(plan: Plan, **asked: Any) -> None:
    for name, value in asked.items():
        if plan.lanes is not None and value:
            what = "a plan with lanes can only be amended by skip=, and if it has weights by weights= or another end"
            raise SpecError(what, parameter=name, remedy="a new plan without lanes=")


def _check_caps(plan: Plan, at: int, caps: Mapping[str, int], is_mixture: bool) -> None:
    if not is_mixture:
        refuse_caps("weights= too", max_epochs=caps)
    given = plan.order.counts(at)
    for source, name in enumerate(plan.order.names):
        if name not in caps or not given[source]:
            continue
        used = 1 + int(plan.order.epoch_of(source, np.array([given[source] - 1]))[0][0])
        if used > caps[name]:
            what = f"source {name!r} is in epoch {used} at position {at:,}, so it cannot be capped at {caps[name]}"
            remedy = f"max_epochs={{{name!r}: {used}}} or more, or a weight of 0"
            raise SpecError(what, parameter="max_epochs", source=name, remedy=remedy)


def _check_end(end: int, at: int, plan: Plan, **asked: Any) -> None:
    if end <= at:
        name = next(name for name, value in asked.items() if value is not None)
        least = (at + 1) * {"num_rows": 1, "num_tokens": plan.row_tokens}[name]
        what = f"the stream cannot end at row {end:,}: {at:,} were given by then"
        raise SpecError(what, parameter=name, remedy=f"{name}={least} or more")
