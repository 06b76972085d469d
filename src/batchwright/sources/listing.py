"""Which files a source means: a path, a folder, a glob, or a list of them, in the order of their path bytes.

A folder that `datasets.Dataset.save_to_disk` wrote means the files that it lists, in its order.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from batchwright.base.checks import local_path
from batchwright.base.errors import SourceError

__all__ = ["InputFile", "list_files", "looks_like_paths"]

_STORE_POINTER = "batchwright.json"


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
    """Every file of a source, each once.

    A folder means all files below it, links followed; hidden ones and stores are left out. A file that is named, or
    that a glob with a leading dot matches, may be hidden.
    """
    parts = [source] if isinstance(source, str | os.PathLike) else list(source)
    by_place: dict[str, tuple[bytes, str]] = {}
    for part in parts:
        for path, rank in _expand(part):
            by_place.setdefault(os.path.abspath(path), (rank, path))
    ordered = [(place, path) for place, (_, path) in sorted(by_place.items(), key=lambda item: item[1])]
    base = os.path.commonpath([os.path.dirname(place) for place, _ in ordered])
    return [_input_file(path, os.path.relpath(place, base)) for place, path in ordered]


def _input_file(path: str, name: str) -> InputFile:
    try:
        path.encode("utf-8")
    except UnicodeEncodeError:
        raise SourceError(
            "the name of this file is not UTF-8", file=ascii(path), remedy="rename it: a store keeps file names as text"
        ) from None
    try:
        status = os.stat(path)
    except OSError as error:
        what = "this link leads nowhere" if os.path.islink(path) else "this file cannot be read"
        raise SourceError(
            what, file=path, reason=os.strerror(error.errno or 0), remedy="mend it, or leave it out of the source"
        ) from None
    return InputFile(path, name, status.st_size, status.st_mtime_ns)


def looks_like_paths(parts: Sequence[object], extensions: Sequence[str]) -> bool:
    """Whether a list means files, and not rows of text: paths that exist, or strings that could only be paths.

    >>> looks_like_paths(["data/*.jsonl", "more/a.txt"], [".jsonl", ".txt"])
    True
    >>> looks_like_paths(["one", "two words", "A sentence. And/or another."], [".txt"])
    False
    """
    if not parts or not all(isinstance(part, str | os.PathLike) for part in parts):
        return False
    if any(isinstance(part, os.PathLike) for part in parts):
        return True
    names = [str(part) for part in parts]
    if any(len(name) > 4096 or "\n" in name or "\0" in name for name in names):
        return False
    unclear = [name for name in names if not _could_only_be_path(name, extensions)]
    if not unclear:
        return True
    if len(unclear) > 10_000:  # nobody lists so many paths by hand, and looking for each takes time
        return False
    there = [name for name in unclear if os.path.exists(os.path.expanduser(name))]
    if there and (len(there) < len(unclear)):
        missing = next(name for name in unclear if name not in there)
        raise SourceError(
            f"is this a list of files or of texts? {there[0]!r} exists, {missing!r} does not",
            parameter="source",
            remedy="pathlib.Path objects for files, {'text': ...} for texts",
        )
    return bool(there)


def _could_only_be_path(name: str, extensions: Sequence[str]) -> bool:
    return " " not in name and (os.sep in name or name.lower().endswith(tuple(extensions)))


_Ranked = tuple[str, bytes]
"""(path, what it is ordered by): its bytes, or those of its number in a dataset."""


def _expand(path: str | os.PathLike[str]) -> list[_Ranked]:
    expanded = str(local_path(source=path))
    if os.path.isfile(expanded):
        return [_by_name(expanded)]
    if os.path.isdir(expanded):
        if _is_store(expanded):
            raise SourceError(
                f"{path} is a store, not raw files", file=path, remedy="open it with a loader, or name the raw files"
            )
        found = list(_walk(expanded, set()))
        nothing = "this folder is empty"
    elif glob.has_magic(expanded):
        found = [_by_name(match) for match in glob.glob(expanded, recursive=True) if os.path.isfile(match)]
        nothing = "this pattern matches no file"
    else:
        found = []
        nothing = "this is no regular file" if os.path.exists(expanded) else "this file does not exist"
    if not found:
        raise SourceError(
            f"no input: {nothing}", file=path, remedy="a file, a folder, or a glob such as 'data/**/*.jsonl'"
        )
    return found


def _by_name(path: str) -> _Ranked:
    return path, os.fsencode(path)


def _walk(folder: str, above: set[str]) -> Iterator[_Ranked]:
    """Files below a folder. Links to folders are followed, unless they lead back to a folder that holds them."""
    real = os.path.realpath(folder)
    if real in above:
        return
    listed = _dataset_files(folder)
    if listed is not None:
        yield from listed
        return
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise SourceError(
            "this folder cannot be read", file=folder, reason=error.strerror, remedy="mend it, or leave it out"
        ) from None
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            if not _is_store(entry.path):
                yield from _walk(entry.path, above | {real})
        # A link that leads nowhere is given too, and refused later: leaving it out would lose data in silence.
        # Pipes and sockets are left out: reading one could wait for ever.
        elif entry.is_file() or (entry.is_symlink() and not os.path.exists(entry.path)):
            yield _by_name(entry.path)


def _dataset_files(folder: str) -> list[_Ranked] | None:
    """The files of a dataset that Hugging Face's library saved to disk; None where a folder is no such dataset."""
    if os.path.isfile(os.path.join(folder, "dataset_dict.json")):
        splits = _read_json(folder, "dataset_dict.json").get("splits")
        names = [split for split in splits if isinstance(split, str)] if isinstance(splits, list) else []
        raise SourceError(
            "this dataset has several splits",
            file=folder,
            splits=", ".join(map(repr, names)) or None,
            remedy=f"{os.path.join(folder, names[0] if names else 'train')}, or one ingredient for each",
        )
    if not all(os.path.isfile(os.path.join(folder, name)) for name in ("state.json", "dataset_info.json")):
        return None
    state = _read_json(folder, "state.json")
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise SourceError(
            "this dataset keeps the order of its rows in a file of its own",
            file=folder,
            remedy="dataset.flatten_indices().save_to_disk(...)",
        )
    files = state.get("_data_files")
    listed: list[Any] = (
        [file.get("filename") for file in files if isinstance(file, dict)] if isinstance(files, list) else []
    )
    for name in listed:
        if not isinstance(name, str) or os.path.basename(name) != name:
            raise SourceError(
                f"this dataset lists a file that is not its own: {name!r}",
                file=os.path.join(folder, "state.json"),
                remedy="save the dataset again",
            )
    start = os.fsencode(os.path.join(folder, ""))
    return [(os.path.join(folder, name), start + b"%08d" % number) for number, name in enumerate(listed)]


def _read_json(folder: str, name: str) -> dict[str, Any]:
    path = os.path.join(folder, name)
    try:
        with open(path, "rb") as file:
            found = msgspec.json.decode(file.read())
    except (OSError, msgspec.DecodeError) as error:
        raise SourceError(
            "this dataset cannot be read", file=path, reason=str(error), remedy="save the dataset again"
        ) from None
    return found if isinstance(found, dict) else {}


def _is_store(folder: str) -> bool:
    return os.path.isfile(os.path.join(folder, _STORE_POINTER))
