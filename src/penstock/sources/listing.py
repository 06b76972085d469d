"""Which files a source means: a path, a folder, a glob, or a list of them, in the order of their path bytes."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import SourceError

__all__ = ["InputFile", "list_files"]


@dataclass(frozen=True, slots=True)
class InputFile:
    """One raw file, and what of it tells cheaply that it changed."""

    path: str
    """As the user named it."""
    name: str
    """Relative to what all files of the source share, so that choices by name do not depend on where a corpus lies."""
    num_bytes: int
    modified_ns: int


def list_files(source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[InputFile]:
    """Every file of a source, each once. A folder means all files below it, hidden ones left out."""
    parts = [source] if isinstance(source, str | os.PathLike) else list(source)
    paths: set[str] = set()
    for part in parts:
        paths.update(_expand(os.fspath(part)))
    ordered = sorted(paths, key=os.fsencode)
    base = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in ordered])
    files = []
    for path in ordered:
        status = os.stat(path)
        name = os.path.relpath(os.path.abspath(path), base)
        files.append(InputFile(path, name, status.st_size, status.st_mtime_ns))
    return files


def _expand(path: str) -> list[str]:
    expanded = os.path.expanduser(path)
    if os.path.isfile(expanded):
        return [expanded]
    if os.path.isdir(expanded):
        if (Path(expanded) / "penstock.json").exists():
            raise SourceError(
                f"{path} is a store, not raw files", file=path, remedy="open it with a loader, or name the raw files"
            )
        found = []
        for folder, folders, names in os.walk(expanded):
            folders[:] = [name for name in folders if not name.startswith(".")]
            found += [os.path.join(folder, name) for name in names if not name.startswith(".")]
    else:
        found = [match for match in glob.glob(expanded, recursive=True) if os.path.isfile(match)]
    if not found:
        kind = (
            "folder is empty"
            if os.path.isdir(expanded)
            else "pattern matches no file"
            if glob.has_magic(path)
            else "file does not exist"
        )
        raise SourceError(
            f"no input: this {kind}", file=path, remedy="a file, a folder, or a glob such as 'data/**/*.jsonl'"
        )
    return found
