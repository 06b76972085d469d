"""Versions beside each other: which are there, which are in use, and removing the rest."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from batchwright.files import exclusive, unused
from batchwright.spec import at_least
from batchwright.store.layout import current_version, version_folder

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

    A version that some process has open stays. Plans stay: they are small, and say what runs were. How documents were
    packed into rows goes: it is made again where it is needed.
    """
    root = Path(os.path.expanduser(store))
    at_least(0, keep=keep)
    current_version(root)  # says what is wrong, should this not be a store
    removals: list[Removal] = []
    with exclusive(root / ".lock", doing="baking into"):
        current, complete = current_version(root), list_versions(root)
        for version in [version for version in complete if version != current][keep:]:
            folder = version_folder(root, version)
            # A reader that opens the version now waits for this, and then finds it gone or safe: never half there.
            with unused(folder / "manifest.json") as free:
                removals.append(Removal(folder, _bytes_of(folder), not free))
                if free and not dry_run:
                    _remove(folder)
        unfinished = [path for path in (root / "versions").glob("*") if path.is_dir() and path.name not in complete]
        for folder in [*unfinished, root / "work", root / "rows"]:
            if folder.is_dir():
                removals.append(Removal(folder, _bytes_of(folder), False))
                if not dry_run:
                    _remove(folder)
    return removals


def _remove(folder: Path) -> None:
    # The manifest first: a version without it is not a version, so a crash in between leaves nothing that opens.
    (folder / "manifest.json").unlink(missing_ok=True)
    shutil.rmtree(folder)


def _bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
