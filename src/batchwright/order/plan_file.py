"""Files of plans and states, as JSON: beside a store, in the home folder, or at a path that the user gives."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import msgspec

from batchwright.base.checks import local_path
from batchwright.base.errors import PlanError
from batchwright.base.files import home, one_at_a_time, write_whole

__all__ = ["is_fingerprint", "kept_plans", "plan_home", "state_in"]

PLAN_FORMAT = 1
REMEDY = (
    "a plan's fingerprint or file, or the JSON of state_dict(); a damaged plan that is kept with a store: "
    "`batchwright plan forget STORE PLAN`, and a loader with the settings of its run"
)


def record_run(path: str | os.PathLike[str], plan: dict[str, Any], runs: list[Any], places: dict[str, str]) -> None:
    """Write a plan and its runs to a file. Runs that the file already records are kept."""
    path = local_path(plan=path)
    with one_at_a_time(path.parent):  # two runs that open at once are both recorded
        before = {}
        if path.exists():
            before = read_plan(path)
        known = before.get("runs", [])
        body = {"batchwright_plan": PLAN_FORMAT, **plan, "runs": [*known, *(run for run in runs if run not in known)]}
        places = places or before.get("places", {})  # stores may have moved since
        if places:
            body["places"] = places
        encoded = msgspec.json.encode(body)
        if msgspec.json.decode(encoded) != before:
            write_whole(path, msgspec.json.format(encoded, indent=1))


def read_plan(path: str | os.PathLike[str]) -> dict[str, Any]:
    body = _json(local_path(plan=path))
    if not isinstance(body, dict) or body.get("batchwright_plan") != PLAN_FORMAT:
        raise PlanError("this is not a plan that this batchwright can read", file=path, remedy=REMEDY)
    return body


def state_in(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The state of a loader in a JSON file; None if the file holds something else."""
    body = _json(local_path(plan=path))
    if not isinstance(body, dict) or not body.keys() >= {"position", "plan", "steps"}:
        return None
    return body


def _json(path: Path) -> Any:
    try:
        return msgspec.json.decode(path.read_bytes())
    except OSError as error:
        remedy = "a plan's fingerprint or file, or a state's file: `batchwright plan STORE` lists the plans of a store"
        raise PlanError(f"no plan at {path}", file=path, reason=error.strerror, remedy=remedy) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PlanError("this is not a plan", file=path, reason=error, remedy=REMEDY) from None


def is_fingerprint(text: str) -> bool:
    """Whether a text can be a plan's fingerprint, or the beginning of one.

    >>> is_fingerprint("3f2a"), is_fingerprint("corpus.json")
    (True, False)
    """
    return re.fullmatch(r"[0-9a-f]{4,16}", text) is not None


def plan_home() -> Path:
    """The folder of plans that cannot be kept with their store."""
    return home() / "plans"


def kept_plans(*stores: Path, beginning: str = "[0-9a-f]") -> list[Path]:
    """The files of plans that are kept for stores and whose fingerprints match `beginning`."""
    folders = [*(store / "plans" for store in stores), plan_home()]
    return [path for folder in folders for path in sorted(folder.glob(f"{beginning}*.json"))]
