"""Arguments that several verbs have: the text of a value, and the flags of loader settings. Nothing heavy is loaded."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import batchwright as bw
from batchwright.base.errors import SpecError
from batchwright.base.words import listed, suggest
from batchwright.batches.settings import SETTINGS, Setting

_MULTIPLES = {"k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}

T = TypeVar("T")


def whole_number(text: str) -> int:
    """
    >>> whole_number("10e9"), whole_number("2_048"), whole_number("1.5B")
    (10000000000, 2048, 1500000000)
    """
    body, multiple = text.strip().replace("_", "").replace(",", ""), 1
    if body[-1:].lower() in _MULTIPLES:
        body, multiple = body[:-1], _MULTIPLES[body[-1].lower()]
    try:
        if body.lstrip("+-").isdigit():
            return int(body) * multiple
        number = float(body) * multiple
        if number.is_integer():
            return int(number)
    except (ValueError, OverflowError):
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number such as 2048, 10e9 or 10B")


def count(text: str) -> int:
    """A whole number of at least 1."""
    number = whole_number(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is less than 1")
    return number


def flag_of(name: str, value: Any = None) -> str:
    """
    >>> flag_of("chunk_size"), flag_of("recut", False)
    ('--chunk-size', '--no-recut')
    """
    if value is False:
        name = f"no_{name}"
    return f"--{name.replace('_', '-')}"


def _pairs(text: str, value_of: Callable[[str], T], example: str) -> dict[str, T]:
    """NAME=VALUE,... as a dict. `value_of` raises ValueError for a wrong value."""
    found: dict[str, T] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name in found:
            raise argparse.ArgumentTypeError(f"{name!r} is given twice")
        try:
            found[name] = value_of(value)
        except ValueError:
            name = ""
        if not name:
            raise argparse.ArgumentTypeError(f"{part.strip()!r} is not NAME=VALUE, as in {example}")
    return found


def _weight(text: str) -> float:
    number = float(text)
    if not 0 <= number < float("inf"):
        raise ValueError
    return number


def _epochs(text: str) -> int:
    if not text.isdecimal():
        raise ValueError
    return int(text)


def _name(text: str) -> str:
    if not text:
        raise ValueError
    return text


def renames(text: str) -> dict[str, str]:
    """
    >>> renames("bot=assistant,me=user")
    {'bot': 'assistant', 'me': 'user'}
    """
    return _pairs(text, _name, "bot=assistant,me=user")


def weights(text: str) -> dict[str, float]:
    """
    >>> weights("web=.7,code=.3")
    {'web': 0.7, 'code': 0.3}
    """
    return _pairs(text, _weight, "web=.7,code=.3")


def epochs_of_sources(text: str) -> dict[str, int] | int:
    """
    >>> epochs_of_sources("code=4,web=1"), epochs_of_sources("2")
    ({'code': 4, 'web': 1}, 2)
    """
    if text.isdecimal():
        return int(text)
    return _pairs(text, _epochs, "code=4,web=1")


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
    """--weights and --ramp as `weights=` takes them. `before`: the weights at the position where they begin.

    >>> schedule_of([weights_from("web=1")], None)
    {'web': 1.0}
    >>> steps = schedule_of([weights_from("web=1")], [ramp_to("100-740:web=.5,code=.5")])
    >>> len(steps), steps[0], steps[1], steps[-1]
    (65, (0, {'web': 1.0}), (100, {'web': 1.0, 'code': 0.0}), (730, {'web': 0.5, 'code': 0.5}))
    """
    entries = [*(given or ()), *(ramps or ())]
    if not entries:
        return None
    if len(entries) == 1 and entries[0].first is None:
        return entries[0].weights
    placed = [(at if entry.first is None else entry.first, entry) for entry in entries]
    segments: list[tuple[int, Mapping[str, float]]] = []
    end_of_ramp = 0
    for first, entry in sorted(placed, key=lambda pair: (pair[0], pair[1].last is not None)):
        if first < end_of_ramp:
            raise SpecError(
                f"weights from position {first:,} fall into the ramp that ends at {end_of_ramp:,}",
                parameter="weights",
                remedy=f"position {end_of_ramp} or more",
            )
        if entry.last is None:
            segments.append((first, entry.weights))
            continue
        if segments:
            start, before = segments[-1]
            if start == first:  # the ramp begins with these
                segments.pop()
        if before is None:
            raise SpecError(
                f"the ramp from position {first:,} has no weights to begin with",
                parameter="ramp",
                remedy=f"--weights {'' if first else '0:'}NAME=W,... for what holds before",
            )
        segments += bw.ramp(before, entry.weights, first=first, last=entry.last)
        end_of_ramp = entry.last
    return segments


def number_range(text: str) -> tuple[int, int]:
    """
    >>> number_range("0-99"), number_range("7")
    ((0, 99), (7, 7))
    """
    match = re.fullmatch(r"(\d[\d_]*)(?:-(\d[\d_]*))?", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a range such as 0-99, or one number")
    first = int(match[1])
    return first, int(match[2] or first)


def named_store(text: str) -> tuple[str, str] | None:
    """(name, path) of NAME=STORE; None for a path. What exists is a path, whatever characters it has.

    >>> named_store("web=data/web.store"), named_store("data/a=b.store"), named_store("web.store")
    (('web', 'data/web.store'), None, None)
    """
    match = re.fullmatch(r"([\w.-]+)=(.+)", text, re.DOTALL)
    if match is None or os.path.exists(text):
        return None
    return match[1], match[2]


def is_buffer(path: str) -> bool:
    from batchwright.buffer.folder import POINTER

    return os.path.isfile(os.path.join(path, POINTER))  # False also for what cannot be a path


def paths_by_name(given: Iterable[str], default: str | None = None) -> dict[str | None, list[str]]:
    """Paths of one name together, in order.

    >>> paths_by_name(["web=a.jsonl", "b.jsonl", "web=c.jsonl"])
    {'web': ['a.jsonl', 'c.jsonl'], None: ['b.jsonl']}
    """
    named: dict[str | None, list[str]] = {}
    for text in given:
        name, path = named_store(text) or (default, text)
        named.setdefault(name, []).append(path)
    return named


def per_source(flag: str, given: Iterable[str] | None, names: Iterable[str | None]) -> dict[str | None, str | None]:
    """The value for each source of a flag that was given as VALUE or NAME=VALUE.

    >>> per_source("format", ["jsonl", "code=text"], ["web", "code"])
    {'web': 'jsonl', 'code': 'text'}
    """
    for_all: str | None = None
    for_one: dict[str | None, str] = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"[\w.-]+", name):  # '{a} = {b}' names no source
            for_all = text
        elif name in names:
            for_one[name] = value
        else:
            known = list(filter(None, names))
            raise SpecError(
                f"--{flag} {text}: no source is named {name!r}",
                parameter=flag,
                sources=listed(known) or "none has a name",
                remedy=f"--{flag} {suggest(name, known) or 'NAME'}={value}, or --{flag} {value} for all",
            )
    return {name: for_one.get(name, for_all) for name in names}


# Flags


FLAGGED = [setting for setting in SETTINGS.values() if setting.metavar is not None]
"""The settings that have a flag: those that make a plan, and the batch size."""
_TYPES = {"N": whole_number, "ROWS": whole_number, "TOKENS": whole_number, "T": float, "NAME=N,...": epochs_of_sources}


def add_plan(parser: argparse.ArgumentParser, nargs: str | None = None) -> None:
    """STORE, PLAN and --batch-size: a plan, cut into batches."""
    parser.add_argument("store", metavar="STORE", help="any one store of the plan")
    parser.add_argument("plan", metavar="PLAN", nargs=nargs, help="fingerprint, plan file or state file")
    parser.add_argument("--batch-size", type=count, metavar="ROWS", help="rows of a batch, if the plan does not say")


def add_renames(parser: argparse.ArgumentParser) -> None:
    """The names that rows of conversations use for columns and roles."""
    add = parser.add_argument
    add("--columns", type=renames, metavar="OURS=THEIRS,...", help="the columns of a row, e.g. messages=turns")
    add("--roles", type=renames, metavar="THEIRS=OURS,...", help="the names of roles, e.g. bot=assistant")


def add_settings(parser: argparse.ArgumentParser) -> None:
    """The settings of a loader over stores that make a plan, as they are declared."""
    group = parser.add_argument_group(
        "loader settings",
        "those of PretrainDataLoader, ConversationDataLoader (over a store of conversations) and MixedDataLoader, with "
        "the same defaults",
    )
    for setting in FLAGGED:
        if setting.name == "weights":
            add_weights(group)
        else:
            add_setting(group, setting)


def add_setting(parser: Any, setting: Setting) -> None:
    """The flag of one setting, as it is declared."""
    options: dict[str, Any] = {"help": setting.help}
    if setting.default is not None:
        options["help"] += f" [{setting.default}]"
    if not setting.metavar:
        options |= {"action": argparse.BooleanOptionalAction, "default": None}
    elif setting.name == "packing":  # one for each source
        options |= {"action": "append", "metavar": setting.metavar}
    elif setting.choices:
        options["choices"] = setting.choices
    else:
        options |= {"type": _TYPES.get(setting.metavar, str), "metavar": setting.metavar}
    parser.add_argument(flag_of(setting.name), **options)


def add_weights(parser: Any) -> None:
    """--weights and --ramp, each once for every change: `schedule_of` joins them."""
    parser.add_argument(
        "--weights",
        type=weights_from,
        action="append",
        metavar="[POSITION:]NAME=W,...",
        help="shares of the sources, e.g. web=.7,code=.3; repeat it with a position for a later change",
    )
    parser.add_argument(
        "--ramp",
        type=ramp_to,
        action="append",
        metavar="FIRST-LAST:NAME=W,...",
        help="move to these weights in 64 steps, from position FIRST to LAST",
    )


def settings_given(arguments: argparse.Namespace) -> list[str]:
    """The flags that were given of settings that fix a plan."""
    names = [setting.name for setting in FLAGGED if setting.planned] + ["ramp"]
    return [flag_of(name, getattr(arguments, name)) for name in names if getattr(arguments, name) is not None]


def refuse_settings(arguments: argparse.Namespace, plan: str) -> None:
    """Refuse settings that fix a plan beside a plan."""
    given = settings_given(arguments)
    if given:
        raise SpecError(f"{given[0]} makes a new plan, and {plan} is one", remedy="give one of the two")
