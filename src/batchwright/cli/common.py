"""What verbs share: arguments that mean the same everywhere, and numbers and text as a terminal shows them."""

from __future__ import annotations

import argparse
import json
import re
import sys
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from batchwright.base.checks import one_of
from batchwright.base.errors import SpecError
from batchwright.base.words import counted

if TYPE_CHECKING:
    from batchwright.batches.settings import Asked, Setting
    from batchwright.order.plan import Plan
    from batchwright.store import Store

__all__ = [
    "WeightsFrom",
    "add_json",
    "add_renames",
    "add_settings",
    "add_weights",
    "counted",
    "epochs_of_sources",
    "holds_conversations",
    "indented",
    "lines_in_words",
    "named_store",
    "plan_of_settings",
    "position_range",
    "print_json",
    "printable",
    "ramp_to",
    "schedule_of",
    "settings_given",
    "step_range",
    "table",
    "weights",
    "weights_from",
    "whole_number",
]

_MULTIPLES = {"k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}


# Arguments


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout, and nothing else there")


def add_renames(parser: argparse.ArgumentParser) -> None:
    """What the rows of conversations call their columns and roles."""
    parser.add_argument(
        "--columns", type=_renamed, metavar="OURS=THEIRS,...", help="where a row has what, e.g. messages=turns"
    )
    parser.add_argument(
        "--roles", type=_renamed, metavar="THEIRS=OURS,...", help="what roles are called, e.g. bot=assistant"
    )


def _renamed(text: str) -> dict[str, str]:
    """
    >>> _renamed("bot=assistant,me=user")
    {'bot': 'assistant', 'me': 'user'}
    """
    pairs = [part.strip().partition("=") for part in text.split(",")]
    wrong = next((part for part in pairs if not all(part)), None)
    if wrong is not None:
        raise argparse.ArgumentTypeError(f"{''.join(wrong)!r} is not NAME=NAME, as in bot=assistant,me=user")
    return {name: other for name, _, other in pairs}


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
        help = setting.help if setting.default is None else f"{setting.help} [{setting.default}]"
        options: dict[str, Any] = {"help": help}
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


_OF_CONVERSATIONS = ("max_length", "loss", "truncation")
_OF_TEXT = ("chunk_size", "lanes", "recut")


def settings_given(arguments: argparse.Namespace) -> list[str]:
    """The loader settings that fix a plan and were given, as they were written."""
    names = [setting.name for setting in _flagged() if setting.planned] + ["ramp"]
    return [_flag(name, getattr(arguments, name)) for name in names if _is_given(arguments, name)]


def asked_of(arguments: argparse.Namespace) -> Asked:
    """The loader settings that were given."""
    from batchwright.batches.settings import Asked

    given = {setting.name: getattr(arguments, setting.name) for setting in _flagged()}
    pad = given["pad"]
    given["pad"] = int(pad) if pad is not None and pad.isdecimal() else pad
    weights = schedule_of(arguments.weights, arguments.ramp)
    return Asked.by_name(**{**given, "packing": None, "weights": weights})


def _is_given(arguments: argparse.Namespace, name: str) -> bool:
    return getattr(arguments, name) is not None  # 0 is given


def _flag(name: str, value: Any = None) -> str:
    return f"--{'no-' * (value is False)}{name.replace('_', '-')}"


def plan_of_settings(sources: Store | Mapping[str, str], arguments: argparse.Namespace) -> Plan:
    """The plan that a loader with these settings would run, cut into its batches. No plan is written.

    Of one store, that is a PretrainDataLoader, or a ConversationDataLoader; of named ones, a MixedDataLoader over such.
    (How documents are packed is kept with their store: counting needs it.)
    """
    from batchwright.loaders.conversation import members_of
    from batchwright.loaders.mixed import plan_mixture
    from batchwright.loaders.planning import plan_sources
    from batchwright.loaders.pretrain import make_plan
    from batchwright.loaders.run import DEFAULT_BATCH
    from batchwright.order.split import Cut
    from batchwright.store import Store
    from batchwright.store.plans import with_places

    is_one = isinstance(sources, Store)
    stores = {"": sources} if isinstance(sources, Store) else {name: Store(path) for name, path in sources.items()}
    packing = _packing_of(arguments.packing, stores)
    asked = asked_of(arguments)
    _refuse_what_is_of_others(stores, arguments, not is_one)
    if not is_one:
        parts = {
            name: _part_of(store, asked.changed(packing=packing.get(name), weights=None))
            for name, store in stores.items()
        }
        plan, streams = plan_mixture(parts, asked.changed(pad=None))  # its parts have their own
        plan = with_places(plan, streams)
    elif holds_conversations(store := stores[""]):
        asked = asked.changed(packing=packing.get(""))
        plan = plan_sources(members_of(store, asked), asked, dict.fromkeys(store.names))
    else:
        plan = make_plan(store, asked.changed(packing=packing.get("")))
    rows = asked["batch_size"] or DEFAULT_BATCH
    Cut(rows_per_step=rows, **plan.epoch_spec)  # refuses what no loader can do
    return plan.cut_as([[0, 0, rows]])


def _refuse_what_is_of_others(stores: Mapping[str, Store], arguments: argparse.Namespace, is_mixture: bool) -> None:
    """Settings for text where there are only conversations, or the other way round; and what every loader needs."""
    first = next(iter(stores.values()))
    talks = [holds_conversations(store) for store in stores.values()]
    of_text = ("chunk_size",) if is_mixture else _OF_TEXT  # a mixture of conversations has lanes, too
    for unused, names, holds, length in (
        (all(talks), of_text, "conversations", "--max-length 2048"),
        (not any(talks), _OF_CONVERSATIONS, "plain text", "--chunk-size 2048"),
    ):
        given = next((name for name in names if unused and _is_given(arguments, name)), None)
        if given is not None:
            flag = _flag(given, getattr(arguments, given))
            raise SpecError(
                f"{flag} means nothing here: {first.path} holds {holds}",
                parameter=given,
                file=first.path,
                remedy=length if given in ("chunk_size", "max_length") else f"leave out {flag}",
            )
    if any(talks) and arguments.max_length is None:
        raise SpecError("how long may a conversation be?", parameter="max_length", remedy="--max-length 2048")
    if not all(talks) and arguments.chunk_size is None:
        raise SpecError("how long is a row?", parameter="chunk_size", remedy="--chunk-size 2048")


def holds_conversations(store: Store) -> bool:
    return "chat" in store.manifest.tokenizer


def _packing_of(given: list[str] | None, names: Iterable[str]) -> dict[str, str]:
    """How rows of each source are packed: HOW is for all of them, NAME=HOW for one."""
    from batchwright.batches.settings import SETTINGS

    found: dict[str, str] = {}
    for text in given or ():
        name, equals, how = text.rpartition("=")
        if equals and name not in names:
            raise SpecError(
                f"--packing {text}: no source is named {name!r}",
                parameter="packing",
                sources=", ".join(filter(None, names)) or "none has a name",
                remedy=f"--packing {how}",
            )
        one_of(SETTINGS["packing"].choices, packing=how)
        found.update({name: how} if equals else {each: found.get(each, how) for each in names})
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


def named_store(text: str) -> tuple[str, str] | None:
    """(name, path) of NAME=STORE; None for a path. What exists is a path, whatever characters it has.

    >>> named_store("web=data/web.store"), named_store("data/a=b.store"), named_store("web.store")
    (('web', 'data/web.store'), None, None)
    """
    match = re.fullmatch(r"([\w.-]+)=(.+)", text, re.DOTALL)
    return None if match is None or Path(text).exists() else (match[1], match[2])


def whole_number(text: str) -> int:
    """
    >>> whole_number("10e9"), whole_number("2_048"), whole_number("1.5B")
    (10000000000, 2048, 1500000000)
    """
    body, multiple = text.strip().replace("_", "").replace(",", ""), 1
    if body[-1:].lower() in _MULTIPLES:
        body, multiple = body[:-1], _MULTIPLES[body[-1].lower()]
    try:
        number = float(body) * multiple if not body.lstrip("+-").isdigit() else int(body) * multiple
        if number != int(number):
            raise ValueError
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number such as 2048, 10e9 or 10B") from None
    return int(number)


def weights(text: str) -> dict[str, float]:
    """
    >>> weights("web=.7,code=.3")
    {'web': 0.7, 'code': 0.3}
    """
    found: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        try:
            number = float(value)
        except ValueError:
            number = float("nan")
        if not equals or not name or not 0 <= number < float("inf"):
            raise argparse.ArgumentTypeError(f"{part.strip()!r} is not NAME=WEIGHT, as in web=.7,code=.3")
        if name in found:
            raise argparse.ArgumentTypeError(f"{name!r} has two weights")
        found[name] = number
    return found


class WeightsFrom(NamedTuple):
    """Weights from a position on (None: from the beginning of what is planned), or the goal of a ramp up to `last`."""

    first: int | None
    last: int | None
    weights: dict[str, float]


def weights_from(text: str) -> WeightsFrom:
    """
    >>> weights_from("web=1").first, weights_from("100k:web=.5,code=.5")
    (None, WeightsFrom(first=100000, last=None, weights={'web': 0.5, 'code': 0.5}))
    """
    before, colon, after = text.partition(":")
    if not colon or "=" in before:
        return WeightsFrom(None, None, weights(text))
    return WeightsFrom(whole_number(before), None, weights(after))


def ramp_to(text: str) -> WeightsFrom:
    """
    >>> ramp_to("100-900:web=.5,code=.5")
    WeightsFrom(first=100, last=900, weights={'web': 0.5, 'code': 0.5})
    """
    span, colon, after = text.partition(":")
    first, dash, last = span.partition("-")
    if not colon or not dash:
        raise argparse.ArgumentTypeError(f"{text!r} is not FIRST-LAST:NAME=WEIGHT,..., as in 1000-9000:web=.5,code=.5")
    return WeightsFrom(whole_number(first), whole_number(last), weights(after))


def schedule_of(
    given: Sequence[WeightsFrom] | None,
    ramps: Sequence[WeightsFrom] | None,
    *,
    at: int = 0,
    before: Mapping[str, float] | None = None,
) -> Any:
    """What --weights and --ramp ask for, as `weights=` takes it. `before`: the weights that hold where this begins.

    >>> schedule_of([weights_from("web=1")], None)
    {'web': 1.0}
    >>> steps = schedule_of([weights_from("web=1")], [ramp_to("100-740:web=.5,code=.5")])
    >>> len(steps), steps[0], steps[1], steps[-1]
    (65, (0, {'web': 1.0}), (100, {'web': 1.0, 'code': 0.0}), (730, {'web': 0.5, 'code': 0.5}))
    """
    if not ramps:
        if not given:
            return None
        if len(given) == 1 and given[0].first is None:
            return given[0].weights
    from batchwright.loaders.weights import ramp

    segments: list[tuple[int, dict[str, float]]] = []
    entries = [(at if entry.first is None else entry.first, entry) for entry in (*(given or ()), *(ramps or ()))]
    last = None  # of the ramp before
    for first, entry in sorted(entries, key=lambda pair: (pair[0], pair[1].last is not None)):
        if last is not None and first < last:
            raise SpecError(
                f"weights from position {first:,} fall into the ramp that ends at {last:,}",
                parameter="weights" if entry.last is None else "ramp",
                remedy=f"position {last} or more",
            )
        if entry.last is None:
            segments.append((first, entry.weights))
            continue
        begin, last = segments[-1][1] if segments else before, entry.last
        if begin is None:
            raise SpecError(
                f"the ramp from position {first:,} goes to {_weights_in_words(entry.weights)}, and from which weights?",
                parameter="ramp",
                remedy=f"--weights {'' if first else '0:'}NAME=W,... for what holds before",
            )
        if segments and segments[-1][0] == first:
            segments.pop()  # the ramp begins with these
        segments += ramp(begin, entry.weights, first=first, last=last)
    return segments


def _weights_in_words(of: Mapping[str, float]) -> str:
    return ",".join(f"{name}={weight:g}" for name, weight in of.items())


def epochs_of_sources(text: str) -> dict[str, int] | int:
    """
    >>> epochs_of_sources("code=4,web=1"), epochs_of_sources("2")
    ({'code': 4, 'web': 1}, 2)
    """
    if text.isdecimal():
        return int(text)
    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if not name or not re.fullmatch(r"\d+", value):
            raise argparse.ArgumentTypeError(f"{part.strip()!r} is not NAME=EPOCHS, as in code=4,web=1")
        if name in found:
            raise argparse.ArgumentTypeError(f"{name!r} is capped twice")
        found[name] = int(value)
    return found


def step_range(text: str) -> tuple[int, int]:
    """
    >>> step_range("0-99"), step_range("7")
    ((0, 99), (7, 7))
    """
    return _range(text, "steps such as 0-99, or one step")


def position_range(text: str) -> tuple[int, int]:
    """
    >>> position_range("802-803"), position_range("802")
    ((802, 803), (802, 802))
    """
    return _range(text, "positions such as 802-803, or one position")


def _range(text: str, what: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d[\d_]*)(?:-(\d[\d_]*))?", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of {what}")
    first = int(match[1])
    return first, int(match[2] or first)


# What is printed


def print_json(value: dict[str, Any]) -> None:
    json.dump(value, sys.stdout, ensure_ascii=False, indent=1, default=_plain)
    sys.stdout.write("\n")


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):
        return value.tolist()  # NumPy's numbers and arrays
    raise TypeError(f"{type(value).__name__} in a JSON answer")


def printable(text: str) -> str:
    r"""Text as it can safely be shown: control characters, which could move a terminal's cursor, come out as escapes.

    >>> printable("a\tb\x1b[2J")
    'a\tb\\x1b[2J'
    """
    return "".join(map(_shown, text))


def _shown(character: str) -> str:
    if character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cf", "Cs"):
        return character
    return ascii(character)[1:-1]


def indented(text: str, margin: str) -> str:
    return "\n".join(margin + line for line in printable(text).split("\n"))


def table(header: Sequence[str], rows: Iterable[Sequence[Any]], *, left: Sequence[str] = ()) -> str:
    """Plain, aligned columns; those named in `left` to the left, numbers to the right.

    >>> print(table(["name", "rows"], [["web", 12], ["code", 3]], left=["name"]))
    name  rows
    web     12
    code     3
    """
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if name in left else cell.rjust(width)
            for cell, width, name in zip(row, widths, header, strict=True)
        ).rstrip()
        for row in cells
    )


def lines_in_words(lines: tuple[int, int] | None) -> str:
    """Lines of a document, to follow other words.

    >>> lines_in_words((3, 9)), lines_in_words((3, 3)), lines_in_words(None)
    (', lines 3-9', ', line 3', '')
    """
    if lines is None:
        return ""
    return f", line {lines[0]:,}" if lines[0] == lines[1] else f", lines {lines[0]:,}-{lines[1]:,}"


_PARSERS: dict[str, Any] = {
    "max_epochs": epochs_of_sources,
    "temperature": float,
    "loss": str,
    "pad": str,
    "shuffle": str,
}
