"""Versions beside each other: which are there, which are in use, and removing the rest."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from penstock.files import exclusive, is_in_use
from penstock.store.layout import current_version, version_folder

__all__ = ["Removal", "collect_garbage", "list_versions"]


@dataclass(frozen=True, slots=True)
class Removal:
    """One folder that garbage collection removed, would remove, or left because a process reads it."""

    folder: Path
    num_bytes: int
    in_use: bool


def list_versions(store: Path) -> list[str]:
    """Complete versions, newest first."""
    manifests = (store / "versions").glob("*/manifest.json")
    return [path.parent.name for path in sorted(manifests, key=lambda path: path.stat().st_mtime, reverse=True)]


def collect_garbage(store: str | os.PathLike[str], *, keep: int = 0, dry_run: bool = False) -> list[Removal]:
    """Remove what no pointer names: old versions (except the newest `keep`) and the work of unfinished bakes.

    A version that some process has open stays. Plans stay: they are small, and say what runs were.
    """
    root = Path(store)
    current = current_version(root)
    removals: list[Removal] = []
    with exclusive(root / ".lock", doing="baking into"):
        old = [version for version in list_versions(root) if version != current][keep:]
        complete = set(list_versions(root))
        unfinished = [p.name for p in (root / "versions").glob("*") if p.name not in complete]
        for version in [*old, *unfinished]:
            folder = version_folder(root, version)
            in_use = version in complete and is_in_use(folder / "manifest.json")
            removals.append(Removal(folder, _bytes_of(folder), in_use))
            if not in_use and not dry_run:
                _remove(folder)
        work = root / "work"
        if work.exists():
            removals.append(Removal(work, _bytes_of(work), False))
            if not dry_run:
                shutil.rmtree(work)
    return removals


def _remove(folder: Path) -> None:
    # The manifest first: a version without it is not a version, so a crash in between leaves nothing that opens.
    (folder / "manifest.json").unlink(missing_ok=True)
    shutil.rmtree(folder)


def _bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
