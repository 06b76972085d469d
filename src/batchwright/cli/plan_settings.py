"""The loader settings as flags, and the plan of a loader with the settings that were given."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from batchwright.base.checks import one_of
from batchwright.base.errors import SpecError
from batchwright.base.words import listed
from batchwright.cli.values import epochs_of_sources, flag_of, ramp_to, renames, schedule_of, weights_from, whole_number

if TYPE_CHECKING:
    from batchwright.batches.settings import Asked, Setting
    from batchwright.order.plan import Plan
    from batchwright.store import Store

__all__ = [
    "add_renames",
    "add_settings",
    "add_weights",
    "holds_conversations",
    "plan_of_settings",
    "refuse_settings",
    "settings_given",
]

_PARSERS: dict[str, Any] = {
    "max_epochs": epochs_of_sources,
    "temperature": float,
    "loss": str,
    "pad": str,
    "shuffle": str,
}
_OF_CONVERSATIONS = ("max_length", "loss", "truncation")
_OF_TEXT = ("chunk_size", "lanes", "recut")


def add_renames(parser: argparse.ArgumentParser) -> None:
    """The names that rows of conversations use for columns and roles."""
    add = parser.add_argument
    add("--columns", type=renames, metavar="OURS=THEIRS,...", help="the columns of a row, e.g. messages=turns")
    add("--roles", type=renames, metavar="THEIRS=OURS,...", help="the names of roles, e.g. bot=assistant")


def add_settings(parser: argparse.ArgumentParser) -> None:
    """The settings of a loader over stores that make a plan, as they are declared."""
    group = parser.add_argument_group(
        "loader settings",
        "as in PretrainDataLoader, ConversationDataLoader (over a store of conversations) and MixedDataLoader, with "
        "the same defaults",
    )
    for setting in _flagged():
        if setting.name == "weights":
            add_weights(group)
            continue
        options: dict[str, Any] = {"help": setting.help}
        if setting.default is not None:
            options["help"] += f" [{setting.default}]"
        if not setting.metavar:
            options |= {"action": argparse.BooleanOptionalAction, "default": None}
        elif setting.name == "packing":
            options |= {"action": "append", "metavar": setting.metavar}
        elif setting.choices:
            options["choices"] = setting.choices
        else:
            options |= {"type": _PARSERS.get(setting.name, whole_number), "metavar": setting.metavar}
        group.add_argument(_flag(setting.name), **options)


def _flagged() -> list[Setting]:
    """The settings that have a flag: those that make a plan, and the batch size."""
    from batchwright.batches.settings import SETTINGS

    return [each for each in SETTINGS.values() if each.metavar is not None]


def add_weights(group: Any) -> None:
    """--weights and --ramp, as many as there are changes: `schedule_of` joins them."""
    group.add_argument(
        "--weights",
        type=weights_from,
        action="append",
        metavar="[POSITION:]NAME=W,...",
        help="mix sources, e.g. web=.7,code=.3; again with a position for weights from there on",
    )
    group.add_argument(
        "--ramp",
        type=ramp_to,
        action="append",
        metavar="FIRST-LAST:NAME=W,...",
        help="go to these weights in 64 small steps, from position FIRST to LAST",
    )


def settings_given(arguments: argparse.Namespace) -> list[str]:
    """The flags of the loader settings that fix a plan and were given."""
    names = [setting.name for setting in _flagged() if setting.planned] + ["ramp"]
    return [_flag(name, getattr(arguments, name)) for name in names if getattr(arguments, name) is not None]


def refuse_settings(arguments: argparse.Namespace, plan: str) -> None:
    """Refuse settings that fix a plan beside a plan."""
    given = settings_given(arguments)
    if given:
        raise SpecError(f"{given[0]} makes a new plan, and {plan} is one", remedy="give one of the two")


def _asked_of(arguments: argparse.Namespace) -> Asked:
    """The loader settings that were given."""
    from batchwright.batches.settings import Asked

    given = {setting.name: getattr(arguments, setting.name) for setting in _flagged()}
    if given["pad"] is not None and given["pad"].isdecimal():
        given["pad"] = int(given["pad"])
    weights = schedule_of(arguments.weights, arguments.ramp)
    return Asked.by_name(**{**given, "packing": None, "weights": weights})


def _flag(name: str, value: Any = None) -> str:
    if value is False:
        name = f"no_{name}"
    return flag_of(name)


def plan_of_settings(sources: Store | Mapping[str, str], arguments: argparse.Namespace) -> Plan:
    """The plan of a loader with these settings, cut into its batches. No plan is written.

    One store makes a PretrainDataLoader or a ConversationDataLoader; named stores make a MixedDataLoader.
    (The row index of packed documents is kept with their store: counting needs it.)
    """
    from batchwright.loaders.run import DEFAULT_BATCH
    from batchwright.order.split import Cut
    from batchwright.store import Store

    asked = _asked_of(arguments)
    if isinstance(sources, Store):
        stores = {"": sources}
    else:
        stores = {name: Store(path) for name, path in sources.items()}
    packing = _packing_of(arguments.packing, stores)
    _refuse_unused(stores, arguments, is_mixture=stores.keys() != {""})
    if isinstance(sources, Store):
        plan = _plan_of_store(sources, asked.changed(packing=packing.get("")))
    else:
        plan = _plan_of_mixture(stores, asked, packing)
    rows = asked["batch_size"] or DEFAULT_BATCH
    Cut(rows_per_step=rows, **plan.epoch_spec)  # refuses what no loader can do
    return plan.cut_as([[0, 0, rows]])


def _plan_of_store(store: Store, asked: Asked) -> Plan:
    from batchwright.loaders.conversation import members_of
    from batchwright.loaders.planning import plan_sources
    from batchwright.loaders.pretrain import make_plan

    if holds_conversations(store):
        return plan_sources(members_of(store, asked), asked, dict.fromkeys(store.names))
    return make_plan(store, asked)


def _plan_of_mixture(stores: Mapping[str, Store], asked: Asked, packing: Mapping[str, str]) -> Plan:
    from batchwright.loaders.mixed import plan_mixture
    from batchwright.store.plans import with_places

    parts = {
        name: _part_of(store, asked.changed(packing=packing.get(name), weights=None)) for name, store in stores.items()
    }
    plan, streams = plan_mixture(parts, asked.changed(pad=None))  # its parts have their own
    return with_places(plan, streams)


def _refuse_unused(stores: Mapping[str, Store], arguments: argparse.Namespace, *, is_mixture: bool) -> None:
    """Refuse settings of text where all stores hold conversations, and the reverse; ask for a missing row length."""
    first = next(iter(stores.values()))
    of_talk = [holds_conversations(store) for store in stores.values()]
    of_text = _OF_TEXT[:1] if is_mixture else _OF_TEXT  # a mixture of conversations has lanes, too
    if all(of_talk):
        _refuse_given(of_text, arguments, f"{first.path} holds conversations", "--max-length 2048")
    if not any(of_talk):
        _refuse_given(_OF_CONVERSATIONS, arguments, f"{first.path} holds plain text", "--chunk-size 2048")
    if any(of_talk) and arguments.max_length is None:
        raise SpecError("how long may a conversation be?", parameter="max_length", remedy="--max-length 2048")
    if not all(of_talk) and arguments.chunk_size is None:
        raise SpecError("how long is a row?", parameter="chunk_size", remedy="--chunk-size 2048")


def _refuse_given(names: Iterable[str], arguments: argparse.Namespace, why: str, length: str) -> None:
    for name in names:
        value = getattr(arguments, name)
        if value is not None:
            remedy = f"leave out {_flag(name, value)}"
            if name in ("chunk_size", "max_length"):
                remedy = length
            raise SpecError(f"{_flag(name, value)} means nothing here: {why}", parameter=name, remedy=remedy)


def holds_conversations(store: Store) -> bool:
    return "chat" in store.manifest.tokenizer


def _packing_of(given: list[str] | None, names: Iterable[str]) -> dict[str, str]:
    """The packing of each source: HOW is for all of them, NAME=HOW for one."""
    from batchwright.batches.settings import SETTINGS

    found: dict[str, str] = {}
    for text in given or ():
        name, equals, how = text.rpartition("=")
        if equals and name not in names:
            raise SpecError(
                f"--packing {text}: no source is named {name!r}",
                parameter="packing",
                sources=listed(filter(None, names)) or "none has a name",
                remedy=f"--packing {how}",
            )
        one_of(SETTINGS["packing"].choices, packing=how)
        if equals:
            found[name] = how
        else:
            found = {each: found.get(each, how) for each in names}
    return found


def _part_of(store: Store, asked: Asked) -> Any:
    """A source of a mixture, as `flatten` takes it."""
    from batchwright.loaders.conversation import members_of
    from batchwright.loaders.pretrain import packed_members

    if holds_conversations(store):
        return members_of(store, asked)
    if asked["packing"] is None:
        return store
    return packed_members([store.stream(name, asked["split"] or "train") for name in store.names], asked)
