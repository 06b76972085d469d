"""The files of a call of `adopt`, grouped by source and split."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from batchwright.base.checks import local_path, one_of
from batchwright.base.errors import SpecError
from batchwright.sources.tokens import TokenFile, list_token_files
from batchwright.store.layout import check_source_name

__all__ = ["FileGroups", "Paths", "StreamFiles", "check_files", "default_folder", "group_files"]

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
FileGroups = dict[tuple[str, str], list[str]]
"""The paths of each (source, split). A source without files of some split has an empty list, as in a bake."""

_SPLITS = ("train", "val")
_SPLIT_WORDS = {"train": "train", "val": "val", "valid": "val", "validation": "val"}


@dataclass(frozen=True, slots=True)
class StreamFiles:
    """The files of one source and split, in order."""

    source: str
    split: str
    files: list[TokenFile]

    @property
    def dtype(self) -> str:
        """The dtype of all files; empty without files."""
        return next((file.dtype.name for file in self.files), "")


def group_files(
    path: Paths | Mapping[str, Paths], val: Paths | Mapping[str, Paths] | None, split: str | None, name: str | None
) -> FileGroups:
    """The files of each source and split. The splits of a source are next to each other, train first."""
    if split is not None:
        one_of(_SPLITS, split=split)
        if val is not None:
            raise SpecError("split= and val= both say which split", parameter="split", remedy="one of them")
    sources = _sources(path, name)
    held_out = _held_out(val or {}, list(sources))
    splits: dict[str, dict[str, list[str]]] = {}
    for source, paths in sources.items():
        if split is not None:
            splits[source] = {split: paths}
        elif val is not None:
            splits[source] = {"train": paths, "val": held_out.get(source, [])}
        else:
            splits[source] = _split_by_name(paths)
    there = [side for side in _SPLITS if any(of_source.get(side) for of_source in splits.values())]
    return {(source, side): of_source.get(side, []) for source, of_source in splits.items() for side in there}


def _sources(path: Paths | Mapping[str, Paths], name: str | None) -> dict[str, list[str]]:
    if not isinstance(path, Mapping):
        paths = list_token_files(path)
        if name is None:
            name = _name_of(path, paths)
        return {check_source_name(name): paths}
    if name is not None:
        raise SpecError("these sources have names already", parameter="name", remedy="leave name= out")
    if not path:
        raise SpecError("no sources", parameter="path", remedy="{'web': 'web.bin'}")
    sources: dict[str, list[str]] = {}
    for source, of_source in path.items():
        sources[check_source_name(str(source), sources)] = list_token_files(of_source)
    return sources


def _held_out(val: Paths | Mapping[str, Paths], sources: list[str]) -> dict[str, list[str]]:
    if not isinstance(val, Mapping):
        if len(sources) > 1:
            what = "val= does not say which source its files are of"
            raise SpecError(what, parameter="val", remedy=f"val={{{sources[0]!r}: ...}}")
        return {sources[0]: list_token_files(val)}
    for source in val:
        if source not in sources:
            what = f"val= names {source!r}, which is not a source"
            raise SpecError(what, parameter="val", there=", ".join(sources), remedy="one of these")
    return {source: list_token_files(paths) for source, paths in val.items()}


def _split_by_name(paths: list[str]) -> dict[str, list[str]]:
    """Files by the word train or val in their names. All are for training unless both words occur."""
    sides: dict[str, list[str]] = {}
    for path in paths:
        words = re.split(r"[_.-]", os.path.basename(path))
        side = next((_SPLIT_WORDS[word] for word in words if word in _SPLIT_WORDS), "")
        sides.setdefault(side, []).append(path)
    if sides.keys() == set(_SPLITS):
        return sides
    return {"train": paths}


def _name_of(path: Any, paths: list[str]) -> str:
    """The name of a source without one: from the names of its files, never from their folder's path.

    >>> _name_of("*.bin", ["/a/web_train_01.bin", "/a/web_train_02.bin"]), _name_of("o/train.bin", ["/o/train.bin"])
    ('web', 'tokens')
    """
    if isinstance(path, str | os.PathLike) and os.path.isdir(local_path(path=path)):
        return os.path.basename(os.path.abspath(local_path(path=path))).lstrip(".") or "tokens"
    words = "|".join([*_SPLIT_WORDS, r"\d+"])
    stems = {_stem(os.path.basename(path)) for path in paths}
    names = {re.sub(rf"(^|[_.-])({words})(?=[_.-]|$)", "", stem).strip("_.-") for stem in stems}
    return (len(names) == 1 and names.pop()) or "tokens"


def _stem(path: str) -> str:
    return re.sub(r"\.(bin|idx|npy|ds)$", "", path)


def check_files(streams: Sequence[StreamFiles], asked: np.dtype[Any] | None) -> None:
    """Refuse files of two types in one stream, a file in two streams, and a dtype= that no file can have."""
    files = [file for stream in streams for file in stream.files]
    other = next((file for file in files if file.dtype != asked), None)
    if asked is not None and other is not None and all(file.format != "bin" for file in files):
        raise SpecError(
            f"dtype={asked.name} was asked for, and the file says {other.dtype.name}",
            parameter="dtype",
            file=other.path,
            remedy="leave dtype= out: it is for files of raw ids",
        )
    seen: dict[str, StreamFiles] = {}
    for stream in streams:
        for file in stream.files:
            if file.dtype.name != stream.dtype:
                raise SpecError(
                    f"files of one source have ids of {stream.dtype} and of {file.dtype.name}",
                    source=stream.source,
                    file=file.path,
                    remedy="as sources of their own: {'a': ..., 'b': ...}",
                )
            first = seen.setdefault(file.path, stream)
            if first is not stream:
                there = f"{first.source} ({first.split}), {stream.source} ({stream.split})"
                what = "this file is in two places of one store"
                raise SpecError(what, file=file.path, there=there, remedy="one of them")


def default_folder(path: Any, groups: FileGroups) -> Path:
    """The store's folder, beside the data and named after it."""
    if isinstance(path, str | os.PathLike):
        whole = os.path.abspath(local_path(path=path))
        if os.path.exists(whole) or os.path.exists(f"{whole}.bin"):
            return Path(f"{_stem(whole)}.store")
    folders = [os.path.dirname(path) for paths in groups.values() for path in paths]
    names = "-".join(dict.fromkeys(source for source, _ in groups))
    return Path(os.path.commonpath(folders)) / f"{names}.store"
