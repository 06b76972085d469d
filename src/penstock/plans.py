"""Plans kept with their store: written when a loader opens, found again by fingerprint, file, state or loader."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.errors import PlanError, StoreError
from penstock.plan import Plan, is_fingerprint, plan_home
from penstock.store.reader import Store
from penstock.store.versions import list_versions

__all__ = ["find_plan", "keep_plan", "list_plans", "store_for_plan"]

log = logging.getLogger("penstock")


def keep_plan(store: Path, plan: Plan) -> None:
    """Write a plan beside its store, or under $PENSTOCK_HOME where the store cannot be written."""
    for folder in (store / "plans", plan_home()):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            plan.save(folder / f"{plan.fingerprint}.json")
            return
        except (OSError, PlanError) as error:  # a damaged file there must not keep a run from starting
            log.warning("plan %s cannot be kept in %s: %s", plan.fingerprint, folder, error)


def list_plans(store: Path) -> list[Plan]:
    """The plans kept with a store, newest first."""
    files = sorted((store / "plans").glob("[0-9a-f]*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    return [Plan.load(path) for path in files]


def find_plan(store: str | os.PathLike[str] | Store, plan: Any, *, batch_size: int | None = None) -> Plan:
    """The plan that somebody means by a plan, loader, state, fingerprint (or its beginning) or file."""
    found = _find(_root(store), plan)
    return found if batch_size is None else found.cut_as([[0, 0, batch_size]])


def _find(store: Path, plan: Any) -> Plan:
    if isinstance(plan, Plan):
        return plan
    if isinstance(getattr(plan, "plan", None), Plan):
        return plan.plan  # type: ignore[no-any-return]
    if isinstance(plan, Mapping):
        if "plan" not in plan or "steps" not in plan:
            raise PlanError("this is not a loader's state", remedy="what state_dict() returned")
        return _find(store, plan["plan"]).cut_as(plan["steps"])
    if isinstance(plan, str) and is_fingerprint(plan):
        for folder in (store / "plans", plan_home()):
            matches = sorted(folder.glob(f"{plan}*.json"))
            if len(matches) == 1:
                return Plan.load(matches[0])
            if matches:
                raise PlanError(
                    f"several plans begin with {plan}", plans=", ".join(m.stem for m in matches), remedy="more digits"
                )
        known = ", ".join(p.fingerprint for p in list_plans(store)) or "none"
        raise PlanError(f"no plan {plan} is kept with {store}", plans=known, remedy="one of these, or the plan's file")
    if isinstance(plan, str | os.PathLike):
        return Plan.load(plan)
    raise PlanError(
        f"a {type(plan).__name__} is not a plan", remedy="a plan, its fingerprint or file, a state, or a loader"
    )


def store_for_plan(path: str | os.PathLike[str] | Store, plan: Plan) -> Store:
    """The version of a store that has a plan's content: the current one, or an older one that is still there."""
    root = _root(path)
    stores = [path] if isinstance(path, Store) else [Store(root)]
    if _has(stores[0], plan):
        return stores[0]
    for version in list_versions(root):
        try:
            store = Store(root, version=version)
        except StoreError:  # damaged, or removed since: another may have the content
            continue
        if _has(store, plan):
            return store
    missing = [s for s in plan.sources if (s.name, s.split, s.fingerprint) not in _contents(stores[0])]
    raise PlanError(
        f"no version of {root} has the content of plan {plan.fingerprint}",
        source=", ".join(f"{s.name} ({s.split})" for s in missing),
        remedy="the store that the plan was made over; `penstock gc` may have removed its version",
    )


def _root(store: str | os.PathLike[str] | Store) -> Path:
    return store.path if isinstance(store, Store) else Path(os.path.expanduser(store))


def _has(store: Store, plan: Plan) -> bool:
    return {(s.name, s.split, s.fingerprint) for s in plan.sources} <= _contents(store)


def _contents(store: Store) -> set[tuple[str, str, str]]:
    return {(s.source, s.split, s.fingerprint) for s in store.manifest.streams}
