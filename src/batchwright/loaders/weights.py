"""Conversion of the user's weights and caps into those of a plan, by single source and in the order of its sources."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from batchwright.base.checks import at_least, whole_number
from batchwright.base.errors import SpecError
from batchwright.base.words import suggest
from batchwright.order.plan import Plan, PlanSource, Segments

Shares = Mapping[str, float | None]
"""The share of each single source in the entry that it belongs to; None where it is an entry itself."""

_RAMP_SEGMENTS = 64


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
        what = f"a ramp from position {first} to {last} is too short for its {_RAMP_SEGMENTS} segments"
        remedy = f"last={first + _RAMP_SEGMENTS} or more; positions are rows: steps times batch_size"
        raise SpecError(what, parameter="last", remedy=remedy)
    names = list(dict.fromkeys([*begin, *end]))
    parts = _RAMP_SEGMENTS - 1
    return [
        (
            first + part * (last - first) // _RAMP_SEGMENTS,
            {n: (begin.get(n, 0.0) * (parts - part) + end.get(n, 0.0) * part) / parts for n in names},
        )
        for part in range(_RAMP_SEGMENTS)
    ]


def segments_of(
    weights: Any, names: Sequence[str], shares: Shares | None = None, *, temperature: Any = None, at: int = 0
) -> Segments:
    """The segments of the user's weights (one mapping, or (position, mapping) in order), in the order of `names`.

    An entry of `shares` with several sources stands for them. Sources with weight 0 are left out, so that equal weights
    always give the same plan. `at` is the first position at which they may begin.
    """
    if weights is None:
        return ((0, None),)
    found: list[tuple[int, tuple[tuple[str, float], ...]]] = []
    for position, mapping in _pairs(weights, at):
        if shares is not None:
            mapping = _of_single_sources(mapping, shares)
        if temperature is not None:
            mapping = tempered(mapping, temperature)
        _check_weights(mapping, names)
        found.append((position, tuple((name, float(mapping[name])) for name in names if mapping.get(name, 0.0))))
    return tuple(found)


def used_names(weights: Any, names: Sequence[str]) -> list[str]:
    """The names that have a weight at any time; all names without weights."""
    used = {name for _, pairs in segments_of(weights, names) for name, _ in pairs or ()}
    return [name for name in names if name in used or not used]


def _pairs(weights: Any, at: int) -> list[tuple[int, dict[str, Any]]]:
    """(position, weights from this position on), with positions that rise from `at`."""
    if isinstance(weights, Mapping):
        return [(at, dict(weights))]
    try:
        pairs = [(whole_number(weights=position), dict(mapping)) for position, mapping in weights]
    except (TypeError, ValueError):
        raise SpecError(
            "weights are neither one mapping nor a list of (position, mapping)",
            parameter="weights",
            remedy="weights={'web': 0.7, 'code': 0.3}, or [(0, {...}), (100_000, {...})]",
        ) from None
    least, remedy = at, f"a first position of {at} or more"
    for position, _ in pairs:
        if position < least:
            what = f"weights from position {position} come after those from position {max(at, least - 1)}"
            raise SpecError(what, parameter="weights", remedy=remedy)
        least, remedy = position + 1, "positions that rise; a ramp from there on needs no entry before it"
    if at == 0 and (not pairs or pairs[0][0] > 0):
        what = "weights do not say what holds from position 0 on"
        raise SpecError(what, parameter="weights", remedy="a first entry (0, {...})")
    return pairs


def _of_single_sources(weights: Mapping[str, Any], shares: Shares) -> dict[str, Any]:
    """Weights by single source. Each source of an entry has its share of the entry's weight.

    >>> _of_single_sources({"web": 1.0, "code": 2.0}, {"web": None, "code/py": 0.75, "code/js": 0.25})
    {'web': 1.0, 'code/py': 1.5, 'code/js': 0.5}
    """
    found: dict[str, Any] = {}
    for name, weight in weights.items():
        inner = _sources_of(name, list(shares))
        if inner == [name] or not _is_weight(weight):
            found[name] = weight
        else:
            found |= {source: weight * (shares[source] or 0.0) for source in inner}
    return found


def _sources_of(entry: str, names: Sequence[str]) -> list[str]:
    """The single sources that an entry stands for: those called entry/..., or else itself."""
    if entry in names:
        return [entry]
    return [name for name in names if name.startswith(f"{entry}/")] or [entry]


def shares_of(plan: Plan, added: Sequence[PlanSource] = ()) -> Shares:
    """The share of each source of a plan in its entry: by current weights, else by rows."""
    sources, weights = (*plan.all_sources, *added), plan.weights or {}
    shares: dict[str, float | None] = {}
    for source in sources:
        entry, slash, _ = source.name.partition("/")
        if not slash:
            shares[source.name] = None
            continue
        mine = [other for other in sources if other.name.startswith(f"{entry}/")]
        sizes = {other.name: weights.get(other.name, 0.0) for other in mine}
        if not any(sizes.values()):
            sizes = {other.name: float(other.num_rows) for other in mine}
        shares[source.name] = sizes[source.name] / sum(sizes.values())
    return shares


def tempered(weights: Mapping[str, Any], temperature: Any) -> dict[str, Any]:
    """Weights to the power 1 / temperature. A temperature above 1 makes them more equal."""
    if not _is_weight(temperature) or not temperature:
        raise SpecError(
            f"temperature is {temperature!r}", parameter="temperature", remedy="a number above 0; 1 changes nothing"
        )
    valid = {name: weight for name, weight in weights.items() if weight and _is_weight(weight)}
    total = sum(valid.values())
    return dict(weights) | {name: (weight / total) ** (1 / temperature) for name, weight in valid.items()}


def caps_of(max_epochs: Any, names: Sequence[str]) -> dict[str, int]:
    """Caps by single source, in the order of `names`, from caps by entry or from one number for all."""
    if max_epochs is None:
        return {}
    if not isinstance(max_epochs, Mapping):
        return dict.fromkeys(names, at_least(1, max_epochs=max_epochs))
    asked = {source: cap for entry, cap in max_epochs.items() for source in _sources_of(entry, names)}
    _refuse_unknown_sources(names, max_epochs=asked)
    return {name: at_least(1, max_epochs=asked[name]) for name in names if name in asked}


def _check_weights(weights: Mapping[str, Any], names: Sequence[str]) -> None:
    _refuse_unknown_sources(names, weights=weights)
    for name, weight in weights.items():
        if not _is_weight(weight):
            remedy = "a number of 0 or more"
            raise SpecError(f"the weight of {name!r} is {weight!r}", parameter="weights", source=name, remedy=remedy)
    if not any(weights.values()):
        raise SpecError(
            "all weights are 0", parameter="weights", remedy=f"a weight for one of {', '.join(map(repr, names))}"
        )


def _refuse_unknown_sources(names: Sequence[str], **given: Mapping[str, Any]) -> None:
    ((parameter, mapping),) = given.items()
    for name in mapping:
        if name in names:
            continue
        remedy = f"one of {', '.join(map(repr, names))}"
        if near := suggest(str(name), names):
            remedy = f"perhaps {near!r}"
        what = f"{parameter}= names a source {name!r} that is not there"
        raise SpecError(what, parameter=parameter, source=name, sources=", ".join(names), remedy=remedy)


def _is_weight(weight: Any) -> bool:
    """Whether a weight is a number of 0 or more."""
    if isinstance(weight, bool) or not isinstance(weight, Real):
        return False
    try:
        return math.isfinite(weight) and float(weight) >= 0
    except OverflowError:  # an int too large for a float
        return False
