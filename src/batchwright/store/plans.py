"""Plans kept with their store: written when a loader opens, found again by fingerprint, file, state or loader."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from batchwright.base.checks import local_path
from batchwright.base.errors import PlanError, StoreError
from batchwright.order.plan import Plan, PlanSource
from batchwright.order.plan_file import is_fingerprint, kept_plans, plan_home, state_in
from batchwright.store.reader import Store
from batchwright.store.stream import TokenStream
from batchwright.store.versions import list_versions, plans_by_version

__all__ = ["find_plan", "forget_plan", "keep_plan", "list_plans", "streams_for_plan", "with_places", "with_state_read"]

log: logging.Logger = logging.getLogger("batchwright")


def keep_plan(store: Path, plan: Plan) -> None:
    """Write a plan beside its store, or under $BATCHWRIGHT_HOME where the store cannot be written."""
    for folder in (store / "plans", plan_home()):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            plan.save(folder / f"{plan.fingerprint}.json")
            return
        except (OSError, PlanError) as error:  # a damaged file there must not keep a run from starting
            log.warning("plan %s cannot be kept in %s: %s", plan.fingerprint, folder, error)


def with_places(plan: Plan, streams: Mapping[str, TokenStream]) -> Plan:
    """A plan that says where its sources were found, if that is not one store."""
    paths = {source.name: str(streams[source.name].store.path.absolute()) for source in plan.all_sources}
    return replace(plan, places=tuple(paths.items())) if len(set(paths.values())) > 1 else plan


def list_plans(store: Path) -> list[Plan]:
    """The plans kept with a store, newest first."""
    files = sorted((store / "plans").glob("[0-9a-f]*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    return [Plan.load(path) for path in files]


def find_plan(where: Any, plan: Any, *, batch_size: int | None = None) -> Plan:
    """The plan that somebody means by a plan, loader, state, fingerprint (or its beginning) or file.

    `where` is a store or its path, or several: a plan is kept with every store that it uses.
    """
    roots = [_root(store) for store in _listed(where)]
    found = _find(roots, with_state_read(plan))
    return found if batch_size is None else found.cut_as([[0, 0, batch_size]])


def _find(stores: list[Path], plan: Any) -> Plan:
    if isinstance(plan, Plan):
        return plan
    if isinstance(getattr(plan, "plan", None), Plan):
        return plan.plan  # type: ignore[no-any-return]
    if isinstance(plan, Mapping):
        if "plan" not in plan or "steps" not in plan:
            raise PlanError("this is not a loader's state", remedy="what state_dict() returned")
        return _find(stores, plan["plan"]).cut_as(plan["steps"])
    if _is_name(plan):
        return Plan.load(_kept_files(stores, plan)[0])
    if isinstance(plan, str | os.PathLike):
        return Plan.load(plan)
    raise PlanError(
        f"a {type(plan).__name__} is not a plan", remedy="a plan, its fingerprint or file, a state, or a loader"
    )


def with_state_read(plan: Any) -> Any:
    """A state's file as the state; whatever else means a plan as it is."""
    if _is_name(plan) or not isinstance(plan, str | os.PathLike):
        return plan
    return state_in(plan) or plan


def _is_name(plan: Any) -> bool:
    return isinstance(plan, str) and is_fingerprint(plan) and not os.path.isfile(plan)


def forget_plan(store: str | os.PathLike[str] | Store, plan: Any) -> list[Path]:
    """Remove a plan that is kept for a store, so that garbage collection may remove the versions that it needs.

    `plan` is what `find_plan` takes; of a damaged one, its fingerprint or its beginning. Runs of the plan cannot resume
    once a version is gone. Returns the files that were removed.
    """
    root = _root(store)
    name = plan if _is_name(plan) else find_plan(root, plan).fingerprint
    files = _kept_files([root], name)
    if all(file.parent != root / "plans" for file in files):  # in the home folder, which all stores share
        needed = plans_by_version(root, list_versions(root)).values()
        if not any(files[0].stem in plans for plans in needed):
            raise PlanError(
                f"plan {files[0].stem} is of another store", store=root, file=files[0], remedy="name that store"
            )
    for file in files:
        file.unlink(missing_ok=True)
    return files


def _kept_files(stores: list[Path], beginning: str) -> list[Path]:
    """The files of the one kept plan whose fingerprint begins so: beside the stores first."""
    files = kept_plans(*stores, beginning=beginning)
    names = list(dict.fromkeys(file.stem for file in files))
    if len(names) > 1:
        raise PlanError(f"several plans begin with {beginning}", plans=", ".join(names), remedy="more digits")
    if not files:
        known = ", ".join(dict.fromkeys(file.stem for file in kept_plans(*stores))) or "none"
        where = ", ".join(map(str, stores))
        raise PlanError(
            f"no plan {beginning} is kept with {where}", plans=known, remedy="one of these, or the plan's file"
        )
    return files


def streams_for_plan(where: Any, plan: Plan) -> dict[str, TokenStream]:
    """The token streams that have the content of a plan's sources, by the names that the plan gives them.

    `where` is a store, its path, several of them, or a mapping to them. Older versions of these are looked through too,
    and then the stores in which the plan's run found its sources.
    """
    given = _listed(where)
    found: dict[str, TokenStream] = {}
    for store in _candidates(given, [Path(path) for _, path in plan.places]):
        for source in plan.all_sources:
            if source.name not in found and (stream := _with_content(store, source)) is not None:
                found[source.name] = stream
        if len(found) == len(plan.all_sources):
            return found
    missing = [source for source in plan.all_sources if source.name not in found]
    roots = ", ".join(str(_root(store)) for store in given)
    raise PlanError(
        f"no version of {roots} has the content of plan {plan.fingerprint}",
        source=", ".join(f"{s.name} ({s.split})" for s in missing),
        remedy="the stores that the plan was made over; `batchwright gc` may have removed a version",
    )


def _listed(where: Any) -> list[str | os.PathLike[str] | Store]:
    if isinstance(where, Mapping):
        return list(where.values())
    return [where] if isinstance(where, str | os.PathLike | Store) else list(where)


def _candidates(given: list[str | os.PathLike[str] | Store], places: list[Path]) -> Iterator[Store]:
    """Stores that may have it: those that are given, their older versions, then those of the plan's run."""
    yield from (store if isinstance(store, Store) else Store(_root(store)) for store in given)
    for root in dict.fromkeys([*map(_root, given), *places]):
        for version in list_versions(root):
            try:
                yield Store(root, version=version)
            except StoreError:  # damaged, or removed since: another may have the content
                continue


def _with_content(store: Store, source: PlanSource) -> TokenStream | None:
    """The stream that has a source's content: of its name, if there is a choice."""
    named = sorted(
        (s.source != source.name, s.source)
        for s in store.manifest.streams
        if (s.split, s.fingerprint) == (source.split, source.fingerprint)
    )
    return store.stream(named[0][1], source.split) if named else None


def _root(store: str | os.PathLike[str] | Store) -> Path:
    return store.path if isinstance(store, Store) else local_path(path=store)
