"""Plans kept with a store: saved when a loader opens, found by fingerprint, file, state or loader."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from batchwright.base.checks import local_path
from batchwright.base.errors import PlanError
from batchwright.order.plan import Plan, PlanSource, with_record
from batchwright.order.plan_file import is_fingerprint, kept_plans, plan_home, state_in
from batchwright.store.reader import Store
from batchwright.store.stream import TokenStream
from batchwright.store.versions import list_versions, open_versions, plans_by_version

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
    """The plan with the paths of its stores, if there are several."""
    paths = {source.name: str(streams[source.name].store.path.absolute()) for source in plan.all_sources}
    if len(set(paths.values())) == 1:
        return plan
    return with_record(plan, places=tuple(paths.items()))


def list_plans(store: Path) -> list[Plan]:
    """The plans kept with a store, newest first."""
    files = sorted((store / "plans").glob("[0-9a-f]*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    return [Plan.load(path) for path in files]


def find_plan(where: Any, plan: Any, *, batch_size: int | None = None) -> Plan:
    """The plan meant by a plan, loader, state, fingerprint (or its beginning) or file.

    `where` is a store or its path, or several: a plan is kept with every store that it uses.
    """
    found = _find([_root(store) for store in _stores(where)], with_state_read(plan))
    if batch_size is None:
        return found
    return found.cut_as([[0, 0, batch_size]])


def _find(stores: list[Path], plan: Any) -> Plan:
    match plan:
        case Plan():
            return plan
        case {"plan": name, "steps": steps}:
            return _find(stores, name).cut_as(steps)
        case Mapping():
            raise PlanError("this is not a loader's state", remedy="what state_dict() returned")
        case str() | os.PathLike():
            if _is_name(plan):
                plan = _kept_files(stores, str(plan))[0]
            return Plan.load(plan)
    of_loader = getattr(plan, "plan", None)
    if isinstance(of_loader, Plan):
        return of_loader
    remedy = "a plan, its fingerprint or file, a state, or a loader"
    raise PlanError(f"a {type(plan).__name__} is not a plan", remedy=remedy)


def with_state_read(plan: Any) -> Any:
    """The state in a state's file; anything else unchanged."""
    if _is_name(plan) or not isinstance(plan, str | os.PathLike):
        return plan
    return state_in(plan) or plan


def _is_name(plan: Any) -> bool:
    return isinstance(plan, str) and is_fingerprint(plan) and not os.path.isfile(plan)


def forget_plan(store: str | os.PathLike[str] | Store, plan: Any) -> list[Path]:
    """Remove a kept plan of a store, so that garbage collection may remove the versions that it needs.

    `plan` is what `find_plan` takes; for a damaged plan, its fingerprint or the beginning of it. Runs of the plan
    cannot resume once a version is gone. Returns the files that were removed.
    """
    root = _root(store)
    name = plan if _is_name(plan) else find_plan(root, plan).fingerprint
    files = _kept_files([root], name)
    if all(file.parent != root / "plans" for file in files):  # in the home folder, which all stores share
        needed = plans_by_version(root, list_versions(root)).values()
        if not any(files[0].stem in plans for plans in needed):
            what = f"plan {files[0].stem} is of another store"
            raise PlanError(what, store=root, file=files[0], remedy="name that store")
    for file in files:
        file.unlink(missing_ok=True)
    return files


def _kept_files(stores: list[Path], beginning: str) -> list[Path]:
    """The files of the one kept plan whose fingerprint has this beginning: beside the stores first."""
    files = kept_plans(*stores, beginning=beginning)
    names = list(dict.fromkeys(file.stem for file in files))
    if len(names) > 1:
        raise PlanError(f"several plans begin with {beginning}", plans=", ".join(names), remedy="more digits")
    if not files:
        known = ", ".join(dict.fromkeys(file.stem for file in kept_plans(*stores))) or "none"
        what = f"no plan {beginning} is kept with {', '.join(map(str, stores))}"
        raise PlanError(what, plans=known, remedy="one of these, or the plan's file")
    return files


def streams_for_plan(where: Any, plan: Plan) -> dict[str, TokenStream]:
    """The token streams with the content of a plan's sources, by the plan's names for them.

    `where` is a store, its path, several of them, or a mapping to them. Older versions of these stores are searched
    too, and then the stores in which the plan's run found its sources.
    """
    given = _stores(where)
    found: dict[str, TokenStream] = {}
    missing = list(plan.all_sources)
    for store in _candidates(given, [Path(path) for _, path in plan.places]):
        found |= {source.name: stream for source in missing if (stream := _with_content(store, source)) is not None}
        missing = [source for source in missing if source.name not in found]
        if not missing:
            return found
    roots = ", ".join(str(_root(store)) for store in given)
    raise PlanError(
        f"no version of {roots} has the content of plan {plan.fingerprint}",
        source=", ".join(f"{s.name} ({s.split})" for s in missing),
        remedy="the stores that the plan was made over; `batchwright gc` may have removed a version",
    )


def _stores(where: Any) -> list[str | os.PathLike[str] | Store]:
    if isinstance(where, Mapping):
        return list(where.values())
    if isinstance(where, str | os.PathLike | Store):
        return [where]
    return list(where)


def _candidates(given: list[str | os.PathLike[str] | Store], places: list[Path]) -> Iterator[Store]:
    """The stores given, their older versions, then the stores of the plan's run."""
    yield from (store if isinstance(store, Store) else Store(_root(store)) for store in given)
    roots = dict.fromkeys([*map(_root, given), *places])
    yield from open_versions((root, version) for root in roots for version in list_versions(root))


def _with_content(store: Store, source: PlanSource) -> TokenStream | None:
    """The stream with a source's content. If several have it, one of the source's name comes first."""
    wanted = (source.split, source.fingerprint)
    names = [info.source for info in store.manifest.streams if (info.split, info.fingerprint) == wanted]
    if not names:
        return None
    return store.stream(source.name if source.name in names else min(names), source.split)


def _root(store: str | os.PathLike[str] | Store) -> Path:
    if isinstance(store, Store):
        return store.path
    return local_path(path=store)
