"""What a bake starts from, and whether a store is already what it would give. Found out fast: without Arrow."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from batchwright.baking.instructions import Ingredient
from batchwright.baking.recipe import DatasetRecipe
from batchwright.base.errors import StoreError
from batchwright.base.files import write_whole
from batchwright.base.fingerprint import fingerprint, fingerprint_file
from batchwright.sources import units
from batchwright.sources.formats import Format, format_for
from batchwright.sources.listing import InputFile
from batchwright.store.layout import Manifest, current_version
from batchwright.store.reader import Store

__all__ = ["Inputs", "content_hash", "formats_of", "is_version_of", "mark_as_version_of", "up_to_date"]

_BAKE_VERSION = 1
"""Part of every version's name: changes when the same recipe over the same files gives other bytes."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The files of every ingredient, and what of recipe and files names the result."""

    files: list[list[InputFile]]
    spec: dict[str, Any]
    key: str
    """Changes when a file was added, removed, resized or touched, or the recipe changed."""

    @classmethod
    def of(cls, recipe: DatasetRecipe, shuffle: bool) -> Inputs:
        files = [ingredient.files() for ingredient in recipe.ingredients]
        formats = {
            kind.name: kind.fingerprint
            for ingredient, group in zip(recipe.ingredients, files, strict=True)
            for kind in formats_of(ingredient, group, with_options=False).values()
        }
        spec = {**recipe.spec(), "formats": formats, "shuffle": shuffle, "bake": _BAKE_VERSION}
        listed = [[[f.path, f.num_bytes, f.modified_ns] for f in group] for group in files]
        return cls(files, spec, fingerprint([spec, listed]))

    def spec_as_json(self) -> dict[str, Any]:
        """The spec as it is when a manifest is read: tuples are lists, and so on."""
        spec: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self.spec))
        return spec


def formats_of(ingredient: Ingredient, files: list[InputFile], *, with_options: bool = True) -> dict[str, Format]:
    """The formats that an ingredient's files have, by name. One look for each extension.

    Options are the ingredient's: two of them may read one format in two ways.
    """
    if ingredient.format is not None:
        kinds = [format_for("", ingredient.format)]
    else:
        by_extension: dict[Any, str] = {}
        for file in files:
            by_extension.setdefault(tuple(Path(file.path).suffixes[-2:]), file.path)
        kinds = [format_for(path) for path in by_extension.values()]
    return {kind.name: kind.with_options(ingredient.options if with_options else None) for kind in kinds}


def up_to_date(to: Path, inputs: Inputs, on_error: str) -> Store | None:
    """The current version, if baking again would give the same, and it is all there."""
    if current_version(to) is None:
        return None
    try:
        store = Store(to)
    except StoreError:  # the version is gone or damaged: baking it again mends that
        return None
    if on_error == "raise" and store.report["errors"]:
        return None  # what was skipped then must be said now
    seen = _read_seen(store.folder)
    if seen is None or (seen.num_files, seen.num_bytes) != _size_of(store.folder):
        return None
    if seen.key == inputs.key:
        return store
    # By fingerprint, because to Python 1 == 1.0: a quantity of one row is not a share of all of them.
    if fingerprint(store.manifest.recipe) == fingerprint(inputs.spec) and _same_content(store, inputs):
        # Touched, not changed: need not look again. Where the store cannot be written, it looks again every time.
        with contextlib.suppress(OSError):
            mark_as_version_of(store.folder, inputs)
        return store
    return None


def is_version_of(folder: Path, inputs: Inputs) -> bool:
    """Whether a version was baked from these inputs and is all there."""
    seen = _read_seen(folder)
    if seen is None or seen.key != inputs.key or (seen.num_files, seen.num_bytes) != _size_of(folder):
        return False
    try:
        Manifest.load(folder)
    except StoreError:
        return False
    return True


class _Seen(msgspec.Struct):
    """What a version was baked from, and how much lies in its folder: enough to tell at once that it is up to date."""

    key: str
    num_files: int
    num_bytes: int


def mark_as_version_of(folder: Path, inputs: Inputs) -> None:
    """Keep in a version's folder what it was baked from."""
    write_whole(folder / "inputs.json", msgspec.json.encode(_Seen(inputs.key, *_size_of(folder))))


def _read_seen(folder: Path) -> _Seen | None:
    try:
        return msgspec.json.decode((folder / "inputs.json").read_bytes(), type=_Seen)
    except (OSError, msgspec.DecodeError):
        return None


def _size_of(folder: Path) -> tuple[int, int]:
    """Files and bytes of a version's content: shards, tables and tokenizer."""
    sizes = [
        entry.stat().st_size
        for entry in os.scandir(folder)
        if entry.name.endswith(".arrow") or entry.name == "tokenizer.json"
    ]
    return len(sizes), sum(sizes)


def _same_content(store: Store, inputs: Inputs) -> bool:
    """Whether files that have other times than a store remembers still have the bytes that it was baked from."""
    try:
        known = store.files
    except StoreError:
        return False
    files = [f for group in inputs.files for f in group]
    real = [i for i in range(len(known["num_bytes"])) if known["path"][i].as_py() != "<memory>"]
    if [(f.path, f.num_bytes) for f in files] != [(known["path"][i].as_py(), int(known["num_bytes"][i])) for i in real]:
        return False
    for file, i in zip(files, real, strict=True):
        if int(known["modified_ns"][i]) != file.modified_ns:
            cut = units.cut_files([(0, file.path, file.num_bytes)], known["format"][i].as_py())
            hashes = [fingerprint_file(Path(s.path), s.start, s.stop) for unit in cut for s in unit.spans]
            if content_hash(hashes) != known["content_hash"][i].as_py():
                return False
    return True


def content_hash(span_hashes: Sequence[str]) -> str:
    """The hash of a file, from the hashes of the byte ranges that it was read in."""
    return span_hashes[0] if len(span_hashes) == 1 else fingerprint(list(span_hashes))
