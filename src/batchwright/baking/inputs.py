"""The inputs of a bake, and the check whether a store is up to date with them, without importing Arrow."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from batchwright.baking.recipe import DatasetRecipe, Ingredient
from batchwright.base.errors import StoreError
from batchwright.base.files import write_whole
from batchwright.base.fingerprint import fingerprint, fingerprint_file
from batchwright.sources import units
from batchwright.sources.formats import Format, format_for
from batchwright.sources.listing import InputFile
from batchwright.store.layout import Manifest, current_version
from batchwright.store.reader import Store

__all__ = ["Inputs"]

_BAKE_VERSION = 1
"""Part of every version's name. Changes when the same recipe over the same files gives other bytes."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The files of every ingredient, and the identity of the result."""

    files: list[list[InputFile]]
    spec: dict[str, Any]
    key: str
    """Changes when a file was added, removed, resized or touched, or the recipe changed."""

    @classmethod
    def of(cls, recipe: DatasetRecipe, shuffle: bool) -> Inputs:
        files = [ingredient.files() for ingredient in recipe.ingredients]
        formats: dict[str, str] = {}
        for ingredient, group in zip(recipe.ingredients, files, strict=True):
            formats |= {kind.name: kind.fingerprint for kind in _formats_of(ingredient, group)}
        spec = {**recipe.spec(), "formats": formats, "shuffle": shuffle, "bake": _BAKE_VERSION}
        listed = [[[f.path, f.num_bytes, f.modified_ns] for f in group] for group in files]
        return cls(files, spec, fingerprint([spec, listed]))


def formats_of(ingredient: Ingredient, files: list[InputFile]) -> dict[str, Format]:
    """The formats of an ingredient's files, by name, with the ingredient's options."""
    return {kind.name: kind.with_options(ingredient.options) for kind in _formats_of(ingredient, files)}


def _formats_of(ingredient: Ingredient, files: list[InputFile]) -> list[Format]:
    if ingredient.format is not None:
        return [format_for("", ingredient.format)]
    by_extension: dict[Any, str] = {}
    for file in files:
        by_extension.setdefault(tuple(Path(file.path).suffixes[-2:]), file.path)
    return [format_for(path) for path in by_extension.values()]


def up_to_date(to: Path, inputs: Inputs, on_error: str) -> Store | None:
    """The current version, if it is complete and baking again would give the same."""
    if current_version(to) is None:
        return None
    try:
        store = Store(to)
    except StoreError:  # missing or damaged: baking again repairs it
        return None
    if on_error == "raise" and store.report["errors"]:
        return None  # rows that were skipped then must raise now
    key = _key_of(store.folder)
    if key is None:
        return None
    if key == inputs.key:
        return store
    # By fingerprint, because to Python 1 == 1.0: a quantity of one row is not a share of all of them.
    if fingerprint(store.manifest.recipe) == fingerprint(inputs.spec) and _same_content(store, inputs):
        # Touched, not changed. The new times are kept, unless the store is read-only.
        with contextlib.suppress(OSError):
            mark_as_version_of(store.folder, inputs)
        return store
    return None


def is_version_of(folder: Path, inputs: Inputs) -> bool:
    """Whether a version was baked from these inputs and is complete."""
    try:
        Manifest.load(folder)
    except StoreError:
        return False
    return _key_of(folder) == inputs.key


class _Seen(msgspec.Struct):
    """The key of a version's inputs, and the size of its content."""

    key: str
    num_files: int
    num_bytes: int


def mark_as_version_of(folder: Path, inputs: Inputs) -> None:
    """Keep the key of the inputs in a version's folder."""
    write_whole(folder / "inputs.json", msgspec.json.encode(_Seen(inputs.key, *_size_of(folder))))


def _key_of(folder: Path) -> str | None:
    """The key of a version's inputs; None if its files are not all there."""
    try:
        seen = msgspec.json.decode((folder / "inputs.json").read_bytes(), type=_Seen)
    except (OSError, msgspec.DecodeError):
        return None
    if (seen.num_files, seen.num_bytes) != _size_of(folder):
        return None
    return seen.key


def _size_of(folder: Path) -> tuple[int, int]:
    """Number and bytes of a version's shards, tables and tokenizer."""
    sizes = [
        entry.stat().st_size
        for entry in os.scandir(folder)
        if entry.name.endswith(".arrow") or entry.name == "tokenizer.json"
    ]
    return len(sizes), sum(sizes)


def _same_content(store: Store, inputs: Inputs) -> bool:
    """Whether files with new times have the bytes that the store was baked from."""
    try:
        table = store.files
    except StoreError:
        return False
    columns = [table[name].tolist() for name in ("path", "num_bytes", "modified_ns", "format", "content_hash")]
    old = [facts for facts in zip(*columns, strict=True) if facts[0] != "<memory>"]
    new = [file for group in inputs.files for file in group]
    if [(file.path, file.num_bytes) for file in new] != [facts[:2] for facts in old]:
        return False
    for file, (*_, modified_ns, format, content) in zip(new, old, strict=True):
        if file.modified_ns == modified_ns:
            continue
        cut = units.cut_files([(0, file.path, file.num_bytes)], format)
        spans = [span for unit in cut for span in unit.spans]
        if content_hash([fingerprint_file(Path(span.path), span.start, span.stop) for span in spans]) != content:
            return False
    return True


def content_hash(span_hashes: Sequence[str]) -> str:
    """The hash of a file, from the hashes of the byte ranges in which it was read."""
    return span_hashes[0] if len(span_hashes) == 1 else fingerprint(list(span_hashes))
