"""The settings that fix a log's stream of prompts: chosen once, written as the first event, then compared."""

from __future__ import annotations

from pathlib import Path
from types import EllipsisType
from typing import Any

from batchwright.base.checks import at_least, whole_number
from batchwright.base.errors import PlanError, SpecError
from batchwright.rollouts.log.ledger import Begin
from batchwright.rollouts.log.prompts import Prompts

__all__ = ["first_event", "given_settings", "refuse_other_stream"]

_DEFAULTS = {"seed": 0, "shuffle": True, "epochs": 1, "samples_per_insert": 1, "round_groups": None}


def given_settings(
    *, seed: Any, shuffle: bool | None, epochs: int | EllipsisType | None, **counts: Any
) -> dict[str, Any]:
    """The settings that were given, checked. `epochs` is ... if it was not given, because None never ends."""
    given = {name: at_least(1, **{name: count}) for name, count in counts.items() if count is not None}
    if seed is not None:
        given["seed"] = whole_number(seed=seed)
    if shuffle is not None:
        given["shuffle"] = bool(shuffle)
    if epochs is None:
        return {**given, "epochs": None}
    if epochs is not ...:
        given["epochs"] = at_least(1, epochs=epochs)
    return given


def first_event(prompts: Prompts, given: dict[str, Any]) -> Begin:
    """The first event of a new log."""
    settings = _DEFAULTS | given
    if "group_size" not in settings:
        raise SpecError(
            "a new log needs the number of responses to each prompt", parameter="group_size", remedy="group_size=8"
        )
    if settings["samples_per_insert"] > 1 and settings["round_groups"] is None:
        raise SpecError(
            "groups that are used several times are used in rounds",
            parameter="round_groups",
            remedy="round_groups=64: the trainer passes samples_per_insert times over each 64 groups",
        )
    return Begin(prompts=prompts.fingerprint, num_prompts=len(prompts), **settings)


def refuse_other_stream(begin: Begin, given: dict[str, Any], prompts: Prompts | None, path: Path) -> None:
    """Raise a PlanError that names the differences between a log and the given prompts and settings."""
    if prompts is not None and prompts.fingerprint != begin.prompts:
        raise PlanError(
            "this log is of other prompts",
            folder=path,
            prompts=f"{prompts.fingerprint[:16]} ({len(prompts):,} rows)",
            expected=f"{begin.prompts[:16]} ({begin.num_prompts:,} rows)",
            remedy="the prompts that it was made with, unchanged; or another folder for these",
        )
    for name, value in given.items():
        recorded = getattr(begin, name)
        if value != recorded:
            raise PlanError(
                f"this log was made with {name}={recorded}, not {value}",
                folder=path,
                parameter=name,
                remedy=f"{name}={recorded}, or leave it out; or another folder",
            )
