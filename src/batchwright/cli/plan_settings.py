"""The plan of a loader with the settings that were given as flags. Loaded when a plan is asked for."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from batchwright.base.checks import one_of
from batchwright.base.errors import SpecError
from batchwright.batches.settings import SETTINGS, Asked
from batchwright.cli.values import FLAGGED, flag_of, per_source, schedule_of
from batchwright.loaders.conversation import members_of
from batchwright.loaders.mixed import plan_mixture
from batchwright.loaders.planning import plan_sources
from batchwright.loaders.pretrain import make_plan, packed_members
from batchwright.loaders.run import DEFAULT_BATCH
from batchwright.order.plan import Plan
from batchwright.order.split import Cut
from batchwright.store import Store
from batchwright.store.plans import with_places

_OF_CONVERSATIONS = ("max_length", "loss", "truncation")
_OF_TEXT = ("chunk_size", "lanes", "recut")
_INSTEAD = {"chunk_size": "--max-length 2048", "max_length": "--chunk-size 2048"}


def _asked_of(arguments: argparse.Namespace) -> Asked:
    """The loader settings that were given."""
    given = {setting.name: getattr(arguments, setting.name) for setting in FLAGGED}
    if given["pad"] is not None and given["pad"].isdecimal():
        given["pad"] = int(given["pad"])
    weights = schedule_of(arguments.weights, arguments.ramp)
    return Asked.by_name(**{**given, "packing": None, "weights": weights})


def plan_of_settings(sources: Store | Mapping[str, str], arguments: argparse.Namespace) -> Plan:
    """The plan of a loader with these settings, cut into its batches. No plan is written.

    One store makes a PretrainDataLoader or a ConversationDataLoader; named stores make a MixedDataLoader.
    (The row index of packed documents is kept with their store: counting needs it.)
    """
    asked = _asked_of(arguments)
    if isinstance(sources, Store):
        stores = {"": sources}
    else:
        stores = {name: Store(path) for name, path in sources.items()}
    packing = per_source("packing", arguments.packing, stores)
    for how in filter(None, packing.values()):
        one_of(SETTINGS["packing"].choices, packing=how)
    _refuse_unused(stores, arguments, is_mixture=stores.keys() != {""})
    if isinstance(sources, Store):
        plan = _plan_of_store(sources, asked.changed(packing=packing.get("")))
    else:
        plan = _plan_of_mixture(stores, asked, packing)
    rows = asked["batch_size"] or DEFAULT_BATCH
    Cut(rows_per_step=rows, **plan.epoch_spec)  # refuses what no loader can do
    return plan.cut_as([[0, 0, rows]])


def _plan_of_store(store: Store, asked: Asked) -> Plan:
    if holds_conversations(store):
        return plan_sources(members_of(store, asked), asked, dict.fromkeys(store.names))
    return make_plan(store, asked)


def _plan_of_mixture(stores: Mapping[str, Store], asked: Asked, packing: Mapping[str | None, str | None]) -> Plan:
    parts = {
        name: _part_of(store, asked.changed(packing=packing.get(name), weights=None)) for name, store in stores.items()
    }
    plan, streams = plan_mixture(parts, asked.changed(pad=None))  # its parts have their own
    return with_places(plan, streams)


def _refuse_unused(stores: Mapping[str, Store], arguments: argparse.Namespace, *, is_mixture: bool) -> None:
    """Refuse settings of text where all stores hold conversations, and the reverse; ask for a missing row length."""
    kinds = {holds_conversations(store) for store in stores.values()}
    unused: tuple[str, ...] = ()
    if kinds == {True}:
        unused = _OF_TEXT
        if is_mixture:
            unused = _OF_TEXT[:1]  # a mixture of conversations has lanes, too
    elif kinds == {False}:
        unused = _OF_CONVERSATIONS
    first = next(iter(stores.values()))
    for name in unused:
        value = getattr(arguments, name)
        if value is not None:
            flag, content = flag_of(name, value), "conversations" if True in kinds else "plain text"
            what = f"{flag} does not apply: {first.path} holds {content}"
            raise SpecError(what, parameter=name, remedy=_INSTEAD.get(name, f"leave out {flag}"))
    if True in kinds and arguments.max_length is None:
        raise SpecError("how long may a conversation be?", parameter="max_length", remedy="--max-length 2048")
    if False in kinds and arguments.chunk_size is None:
        raise SpecError("how long is a row?", parameter="chunk_size", remedy="--chunk-size 2048")


def holds_conversations(store: Store) -> bool:
    return "chat" in store.manifest.tokenizer


def _part_of(store: Store, asked: Asked) -> Any:
    """A source of a mixture, as `flatten` takes it."""
    if holds_conversations(store):
        return members_of(store, asked)
    if asked["packing"] is None:
        return store
    return packed_members([store.stream(name, asked["split"] or "train") for name in store.names], asked)
