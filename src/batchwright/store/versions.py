"""Versions of a store: the list of complete ones, names for new ones, and garbage collection."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from batchwright.base.checks import at_least, local_path
from batchwright.base.errors import PlanError, StoreError
from batchwright.base.files import exclusive, unused
from batchwright.order.plan import Plan
from batchwright.order.plan_file import kept_plans
from batchwright.store.layout import Manifest, current_version, version_folder

__all__ = ["Removal", "collect_garbage", "free_version", "list_versions", "plans_by_version"]

log: logging.Logger = logging.getLogger("batchwright")


@dataclass(frozen=True, kw_only=True, slots=True)
class Removal:
    """One folder that garbage collection removed or would remove, or that it left, and why."""

    folder: Path
    num_bytes: int
    in_use: bool = False
    """Whether a process has it open."""
    plans: tuple[str, ...] = ()
    """The kept plans that need it."""
    is_link: bool = False
    """Whether it is a symbolic link, or behind one: its target may be part of another store."""

    @property
    def is_kept(self) -> bool:
        return self.in_use or self.is_link or bool(self.plans)


def list_versions(store: Path) -> list[str]:
    """Complete versions, newest first."""
    manifests = (store / "versions").glob("*/manifest.json")
    return [path.parent.name for path in sorted(manifests, key=lambda path: path.stat().st_mtime, reverse=True)]


def free_version(store: Path, wanted: str, is_same: Callable[[str], bool]) -> str:
    """A name for a new version. A complete version is never written again, because jobs may read it.

    The name of a complete version is returned if `is_same` says that it has the content wanted, undamaged.
    """
    for number in itertools.count(1):
        name = wanted if number == 1 else f"{wanted}-{number}"
        if not (version_folder(store, name) / "manifest.json").exists() or is_same(name):
            return name
    raise AssertionError


def collect_garbage(store: str | os.PathLike[str], *, keep: int = 0, dry_run: bool = False) -> list[Removal]:
    """Remove old versions (except the newest `keep`) and the work of unfinished bakes.

    A version stays while a process has it open, and while a kept plan needs its content, so that a stopped run can
    resume. `forget_plan` releases a plan. Symbolic links are not followed, and stay. Row indexes of packed documents
    are removed: they are rebuilt when needed.
    """
    root = local_path(store=store)
    at_least(0, keep=keep)
    current_version(root)  # raises for a folder that is not a store
    removals: list[Removal] = []
    with exclusive(root / ".lock", doing="baking into"), ExitStack() as locks:
        current = current_version(root)
        complete = sorted(list_versions(root), key=lambda version: version != current)  # as `streams_for_plan` looks
        old = [version for version in complete if version != current][keep:]
        # A reader that opens one of them waits until this is done, and finds it gone or complete.
        free = {v: locks.enter_context(unused(version_folder(root, v) / "manifest.json")) for v in old}
        plans = plans_by_version(root, complete)
        for version in old:
            folder = version_folder(root, version)
            removals.append(_remove(root, folder, dry_run, in_use=not free[version], plans=tuple(plans[version])))
        unfinished = [path for path in (root / "versions").glob("*") if path.name not in complete]
        unneeded = [folder for folder in [*unfinished, root / "work", root / "rows"] if folder.is_dir()]
        removals += [_remove(root, folder, dry_run) for folder in unneeded]
    return removals


def plans_by_version(root: Path, versions: list[str]) -> dict[str, list[str]]:
    """The kept plans that need each version. Of several with the same content, a plan needs the first."""
    holds: dict[tuple[str, str], str] = {}
    damaged: set[str | None] = set()
    for version in versions:
        try:
            for stream in Manifest.load(version_folder(root, version)).streams:
                holds.setdefault((stream.split, stream.fingerprint), version)
        except StoreError:
            damaged.add(version)
    plans: dict[str, list[str]] = {version: [] for version in versions}
    for file in kept_plans(root):
        try:
            needed = {holds.get((source.split, source.fingerprint)) for source in Plan.load(file).all_sources}
        except (OSError, PlanError):
            log.warning("all versions stay, because %s cannot be read: `batchwright plan forget` releases it", file)
            needed = {*versions}
        if None in needed:  # in another store, or in a version whose manifest could be restored from a copy
            needed |= damaged
        for version in plans.keys() & needed:
            plans[version].append(file.stem)
    return plans


def _remove(root: Path, folder: Path, dry_run: bool, *, in_use: bool = False, plans: tuple[str, ...] = ()) -> Removal:
    is_link = folder.resolve() != root.resolve() / folder.relative_to(root)
    num_bytes = sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())
    removal = Removal(folder=folder, num_bytes=num_bytes, in_use=in_use, plans=plans, is_link=is_link)
    if not removal.is_kept and not dry_run:
        # The manifest first: a folder without one is not a version, so a crash in between leaves nothing that opens.
        (folder / "manifest.json").unlink(missing_ok=True)
        shutil.rmtree(folder)
    return removal
