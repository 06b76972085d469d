"""The files of a source: a path, a folder, a glob, or a list of them, in the order of their path bytes.

A folder written by `datasets.Dataset.save_to_disk` stands for the files that it lists, in its order.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from batchwright.base.checks import local_path
from batchwright.base.errors import SourceError

__all__ = ["InputFile", "list_files", "looks_like_paths"]

T = TypeVar("T")

_STORE_POINTER = "batchwright.json"


@dataclass(frozen=True, slots=True)
class InputFile:
    """One raw file, with the size and time that show cheaply whether it changed."""

    path: str
    """The path as the user named it."""
    name: str
    """Relative to what all files of the source share, so that choices by name do not depend on where a corpus is."""
    num_bytes: int
    modified_ns: int


def list_files(source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[InputFile]:
    """Every file of a source, each once.

    A folder means all files below it, links followed; hidden ones and stores are left out. A file that is named, or
    that a glob with a leading dot matches, may be hidden.
    """
    if isinstance(source, str | os.PathLike):
        source = [source]
    by_place: dict[str, tuple[bytes, str]] = {}
    for part in source:
        for path, rank in _expand(part):
            by_place.setdefault(os.path.abspath(path), (rank, path))
    ordered = [(place, path) for place, (_, path) in sorted(by_place.items(), key=lambda item: item[1])]
    base = os.path.commonpath([os.path.dirname(place) for place, _ in ordered])
    return [_input_file(path, os.path.relpath(place, base)) for place, path in ordered]


def check_name(path: str) -> None:
    """Refuse a file whose name a store cannot keep."""
    try:
        path.encode("utf-8")
    except UnicodeEncodeError:
        what, remedy = "the name of this file is not UTF-8", "rename it: a store keeps file names as text"
        raise SourceError(what, file=ascii(path), remedy=remedy) from None


def _input_file(path: str, name: str) -> InputFile:
    check_name(path)
    try:
        status = os.stat(path)
    except OSError as error:
        what = "this link leads nowhere" if os.path.islink(path) else "this file cannot be read"
        reason, remedy = os.strerror(error.errno or 0), "mend it, or leave it out of the source"
        raise SourceError(what, file=path, reason=reason, remedy=remedy) from None
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
    unclear = [name for name in names if not _could_only_be_path(name, extensions)]
    if len(unclear) > 10_000:  # such a list was not written by hand, and looking for each path takes time
        return False
    by_existence = {_exists(name): name for name in unclear}
    if len(by_existence) == 2:
        there, gone = by_existence[True], by_existence[False]
        what = f"is this a list of files or of texts? {there!r} exists, {gone!r} does not"
        remedy = "pathlib.Path objects for files, {'text': ...} for texts"
        raise SourceError(what, parameter="source", remedy=remedy)
    return False not in by_existence


def _could_only_be_path(name: str, extensions: Sequence[str]) -> bool:
    is_text = " " in name or "\n" in name or len(name) > 4096
    return not is_text and (os.sep in name or name.lower().endswith(tuple(extensions)))


def _exists(name: str) -> bool:
    return len(name) <= 4096 and "\0" not in name and os.path.exists(os.path.expanduser(name))


_Ranked = tuple[str, bytes]
"""(path, sort key). The key is the bytes of the path, or of its number in a dataset."""


def _expand(path: str | os.PathLike[str]) -> list[_Ranked]:
    expanded = str(local_path(source=path))
    if os.path.isfile(expanded):
        return [_by_name(expanded)]
    if os.path.isdir(expanded):
        if _is_store(expanded):
            remedy = "open it with a loader, or name the raw files"
            raise SourceError(f"{path} is a store, not raw files", file=path, remedy=remedy)
        found = list(_walk(expanded, set()))
        nothing = "this folder is empty"
    elif glob.has_magic(expanded):
        found = [_by_name(match) for match in glob.glob(expanded, recursive=True) if os.path.isfile(match)]
        nothing = "this pattern matches no file"
    else:
        found = []
        nothing = "this is no regular file" if os.path.exists(expanded) else "this file does not exist"
    if not found:
        remedy = "a file, a folder, or a glob such as 'data/**/*.jsonl'"
        raise SourceError(f"no input: {nothing}", file=path, remedy=remedy)
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
        remedy = "mend it, or leave it out"
        raise SourceError("this folder cannot be read", file=folder, reason=error.strerror, remedy=remedy) from None
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


class _DatasetDict(msgspec.Struct):
    """A folder with several splits, as `DatasetDict.save_to_disk` describes it."""

    splits: list[str] = []


class _DataFile(msgspec.Struct):
    filename: str


class _DatasetState(msgspec.Struct):
    """A folder with one split, as `Dataset.save_to_disk` describes it."""

    data_files: list[_DataFile] = msgspec.field(name="_data_files", default_factory=list)
    indices_data_files: Any = msgspec.field(name="_indices_data_files", default=None)
    indices_files: Any = msgspec.field(name="_indices_files", default=None)


def _dataset_files(folder: str) -> list[_Ranked] | None:
    """The files of a dataset that Hugging Face's library saved to disk; None for every other folder."""
    if os.path.isfile(os.path.join(folder, "dataset_dict.json")):
        splits = _read_json(folder, "dataset_dict.json", _DatasetDict).splits
        raise SourceError(
            "this dataset has several splits",
            file=folder,
            splits=", ".join(map(repr, splits)) or None,
            remedy=f"{os.path.join(folder, *splits[:1] or ['train'])}, or one ingredient for each",
        )
    if not all(os.path.isfile(os.path.join(folder, name)) for name in ("state.json", "dataset_info.json")):
        return None
    state = _read_json(folder, "state.json", _DatasetState)
    if state.indices_data_files or state.indices_files:
        what = "this dataset keeps the order of its rows in a file of its own"
        raise SourceError(what, file=folder, remedy="dataset.flatten_indices().save_to_disk(...)")
    found: list[_Ranked] = []
    for number, file in enumerate(state.data_files):
        if os.path.basename(file.filename) != file.filename:
            what, state_file = (
                f"this dataset lists a file that is not its own: {file.filename!r}",
                f"{folder}/state.json",
            )
            raise SourceError(what, file=state_file, remedy="save the dataset again")
        found.append((os.path.join(folder, file.filename), os.fsencode(os.path.join(folder, "")) + b"%08d" % number))
    return found


def _read_json(folder: str, name: str, kind: type[T]) -> T:
    path = os.path.join(folder, name)
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        remedy = "save the dataset again"
        raise SourceError("this dataset cannot be read", file=path, reason=str(error), remedy=remedy) from None


def _is_store(folder: str) -> bool:
    return os.path.isfile(os.path.join(folder, _STORE_POINTER))
