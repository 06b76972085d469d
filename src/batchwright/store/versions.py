"""Versions of a store: the list of complete ones, names for new ones, verification, and garbage collection."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from batchwright.base.checks import at_least, local_path
from batchwright.base.errors import PlanError, StoreError
from batchwright.base.files import exclusive, unused
from batchwright.base.fingerprint import fingerprint_file
from batchwright.order.plan import Plan
from batchwright.order.plan_file import kept_plans
from batchwright.store.layout import REBAKE, Manifest, current_version, stream_fingerprint, version_folder
from batchwright.store.reader import Store
from batchwright.store.stream import MappedShard

__all__ = ["Removal", "free_version", "list_versions", "open_versions"]

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


def open_versions(places: Iterable[tuple[Path, str]]) -> Iterator[Store]:
    """Versions of stores, as (store, version). A version that is damaged, or was removed since, is left out."""
    for store, version in places:
        with suppress(StoreError, OSError):
            yield Store(store, version=version)


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


# Verification: every byte against the hashes in the manifest


@dataclass(frozen=True, slots=True)
class Damage:
    """One file of a store that differs from the manifest."""

    file: Path
    what: str
    remedy: str = REBAKE

    def error(self) -> StoreError:
        return StoreError(self.what, file=self.file, remedy=self.remedy)


def verify_store(store: Store) -> Iterator[Damage]:
    """Every damaged file of a store: missing, truncated, altered, or with an id outside the vocabulary.

    The user's own files are read too, in a store of adopted tokens.
    """
    for damage in _damages(store):
        yield replace(damage, remedy=store.manifest.repair)


def _damages(store: Store) -> Iterator[Damage]:
    yield from _tokenizer(store)
    for table in ("files", "units", "texts", "shards"):
        try:
            getattr(store, table)
        except StoreError as error:
            yield _damage_of(error)
            if table == "shards":
                return  # without it the shards are not known
    yield from _totals(store)
    damaged = list(_adopted(store))
    yield from damaged
    if not damaged:
        for row in range(len(store.shards["num_bytes"])):
            yield from _shard(store, row)


def _damage_of(error: StoreError) -> Damage:
    what = error.headline
    if "changed" in error.where:
        what += f": {error.where['changed']}"
    return Damage(Path(str(error.where["file"])), what)


def _tokenizer(store: Store) -> Iterator[Damage]:
    path = store.folder / "tokenizer.json"
    try:
        if fingerprint_file(path) != store.manifest.tokenizer_hash:
            yield Damage(path, "the tokenizer of this store was altered: its hash differs")
    except FileNotFoundError:
        yield Damage(path, "the tokenizer of this store is missing")


def _adopted(store: Store) -> Iterator[Damage]:
    for number, file in enumerate(store.adopted):
        try:
            path = file.find()
            if fingerprint_file(path) != store.files["content_hash"][number].as_py():
                yield Damage(path, "a file that this store adopted was altered: its hash differs")
        except StoreError as error:
            yield _damage_of(error)


def _totals(store: Store) -> Iterator[Damage]:
    """Compare the manifest's totals of each stream with the stream's shards."""
    shards, manifest = store.shards, store.manifest
    content = shards["content_hash"].to_pylist()
    facts = list(zip(shards["num_documents"].tolist(), shards["num_tokens"].tolist(), content, strict=True))
    for number, info in enumerate(manifest.streams):
        mine = [list(facts[row]) for row in np.flatnonzero(shards["stream"] == number)]
        said = (info.num_documents, info.num_tokens, info.num_shards, info.fingerprint)
        totals = (sum(documents for documents, _, _ in mine), sum(tokens for _, tokens, _ in mine), len(mine))
        if said != (*totals, stream_fingerprint(manifest.dtype_of(info), mine)):
            yield Damage(store.folder / "manifest.json", f"the manifest was altered: stream {info.source!r} differs")


def _shard(store: Store, row: int) -> Iterator[Damage]:
    path = store.shard_path(row)
    try:
        store.check_shard(row)
        if not store.is_as_written(row):
            yield Damage(path, "a shard of this store was altered: its hash differs")
            return
        mapped = MappedShard(store, row)
    except StoreError as error:
        yield Damage(path, error.headline)
        return
    lowest, highest = 0, 0
    if len(mapped.tokens):
        lowest, highest = int(mapped.tokens.min()), int(mapped.tokens.max())
    if lowest < 0:
        yield Damage(path, f"token id {lowest} is negative")
    if highest >= store.vocab_size:
        yield Damage(path, f"token id {highest} is outside the vocabulary of {store.vocab_size}")
    if mapped.offsets[0] != 0 or mapped.offsets[-1] != len(mapped.tokens) or (np.diff(mapped.offsets) < 0).any():
        yield Damage(path, "the borders between documents are not in order")
