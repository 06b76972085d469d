"""Bake a recipe: into a store (cut the work, do what is not done, join it, move the pointer last), or into a buffer."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from batchwright.baking.inputs import Inputs, is_version_of, mark_as_version_of, up_to_date
from batchwright.baking.recipe import DatasetRecipe, check_recipe
from batchwright.base.checks import at_least, local_path, one_of
from batchwright.base.errors import SpecError
from batchwright.base.files import exclusive, is_part, out_of_space_at
from batchwright.base.fingerprint import fingerprint
from batchwright.base.machine import cpu_count
from batchwright.base.progress import say
from batchwright.prepare.tokenize import special_in_words
from batchwright.store.layout import is_adopted, is_store, mark_as_store, point_to, version_folder
from batchwright.store.reader import Store
from batchwright.typing import OnError

if TYPE_CHECKING:
    from batchwright.baking.work import Work
    from batchwright.buffer.buffer import DatasetBuffer

__all__ = ["bake"]

_SHARD_BYTES = 1 << 30


@overload
def bake(
    recipe: DatasetRecipe,
    to: None = None,
    *,
    into: DatasetBuffer | None = None,
    workers: int | None = None,
    on_error: OnError | None = None,
    shuffle: bool = True,
    check: bool = False,
    show_progress: bool = True,
) -> DatasetBuffer: ...


@overload
def bake(
    recipe: DatasetRecipe,
    to: str | os.PathLike[str],
    *,
    workers: int | None = None,
    on_error: OnError | None = None,
    shuffle: bool = True,
    check: bool = False,
    show_progress: bool = True,
) -> Any: ...


def bake(
    recipe: DatasetRecipe,
    to: str | os.PathLike[str] | None = None,
    *,
    into: DatasetBuffer | None = None,
    workers: int | None = None,
    on_error: OnError | None = None,
    shuffle: bool = True,
    check: bool = False,
    show_progress: bool = True,
) -> Any:
    """Make the store that a recipe describes, and open it; without `to`, give its rows as a `DatasetBuffer`.

    - Run again over unchanged files it does nothing, at once. Changed files or another recipe make a new version beside
      the old one, in which only what changed is read and tokenised again; jobs that read the old one keep it.
    - The bytes do not depend on `workers` (default: one for each CPU).
    - Killed at any moment, the same call continues; what opens is always a complete version.
    - Of malformed rows, `on_error="raise"` stops at the first one and names it; "skip" leaves them out and counts them.
      By default it is as the recipe says.
    - `check=True` first runs the recipe's functions on a sample of rows, several times, and refuses by name one that
      is not a function of its row alone: the bytes would depend on `workers`.
    - Documents are stored in an order that (seed, ingredient) shuffles; `shuffle=False` keeps the order of the files.

    Without `to` the rows are appended to `into`, or to a new buffer in memory: the documents of that store, with their
    tokens; or, where the recipe has no tokenize step, the rows as they are after its steps, in the order of the
    sources. Such a recipe with `to` gives a buffer in that folder, opened to read. `show_progress=False`: say nothing.
    """
    check_recipe(recipe)
    on_bad: OnError = recipe.on_error if on_error is None else one_of(("raise", "skip"), on_error=on_error)
    workers = cpu_count() if workers is None else at_least(0, workers=workers)
    folder = None if to is None else local_path(to=to)
    if folder is not None and into is not None:
        raise SpecError("to= and into= are two places", parameter="into", remedy="one of them")
    if check:
        from batchwright.baking.check import check_functions

        check_functions(recipe, on_error=on_bad)
    if folder is not None and recipe.is_tokenized:
        return _bake_store(recipe, folder, workers, on_bad, shuffle, show_progress)
    from batchwright.baking import into as buffers

    if folder is not None:
        baked, said = buffers.bake_folder(recipe, folder, workers=workers, on_error=on_bad, show=show_progress)
    elif recipe.is_tokenized:
        buffers.check_buffer(into)
        with tempfile.TemporaryDirectory(prefix="batchwright-") as scratch:
            store = _bake_store(recipe, Path(scratch) / "store", workers, on_bad, shuffle, show_progress, "a buffer")
            baked, _ = buffers.put(into, buffers.tokens_of(store))
        return baked
    else:
        buffers.check_buffer(into)
        parts = buffers.read_recipe(recipe, workers=workers, on_error=on_bad, show=show_progress)
        baked, said = buffers.put(into, parts)
    say(said, show=show_progress)
    return baked


def _bake_store(
    recipe: DatasetRecipe,
    to: Path,
    workers: int,
    on_error: str,
    shuffle: bool,
    show_progress: bool,
    called: str | None = None,
) -> Store:
    started = time.monotonic()
    _refuse_other_folders(to)
    inputs = Inputs.of(recipe, shuffle)
    if is_store(to) and (store := up_to_date(to, inputs, on_error)):
        say(f"{to}: up to date ({store.num_rows:,} documents, {store.num_tokens:,} tokens)", show=show_progress)
        return store
    from batchwright.baking.work import plan_work  # and Arrow with it: what is up to date needs neither

    work = plan_work(recipe, inputs, on_error, shuffle)
    with out_of_space_at(to), exclusive(to / ".lock", doing="baking into"):
        _sweep_parts(to)
        mark_as_store(to)  # under the lock: another process may have finished a store since we looked
        store, num_encoded = up_to_date(to, inputs, on_error), 0
        if store is None:
            store, num_encoded = _bake_version(recipe, to, inputs, work, workers, on_error, show_progress)
    encoder = recipe.tokenize.encoder if num_encoded else None
    say(_summary(called or str(to), store, num_encoded, encoder, time.monotonic() - started), show=show_progress)
    return store


def _sweep_parts(to: Path) -> None:
    """Remove what writers that were killed left in a store's own folder. Nobody else writes there now."""
    for path in to.iterdir():
        if is_part(path.name):
            path.unlink(missing_ok=True)


def _refuse_other_folders(to: Path) -> None:
    if to.exists() and not to.is_dir():
        raise SpecError(f"{to} is a file", parameter="to", remedy="a new folder, such as to='corpus.store'")
    if is_adopted(to):
        raise SpecError(
            f"{to} is a store of adopted tokens, and is left as it is", parameter="to", remedy="a folder of its own"
        )
    # In this order: another process may be making the store right now, and it marks it before it writes anything else.
    if to.is_dir() and any(p.name != ".lock" and not is_part(p.name) for p in to.iterdir()) and not is_store(to):
        raise SpecError(
            f"{to} is a folder that is not a store, and is left as it is",
            parameter="to",
            remedy="a new folder, such as to='corpus.store'",
        )


def _bake_version(
    recipe: DatasetRecipe, to: Path, inputs: Inputs, work: list[Work], workers: int, on_error: str, show: bool
) -> tuple[Store, int]:
    """(the new version, how many of its documents had to be tokenised)."""
    from batchwright.baking.join import join
    from batchwright.baking.known import remember
    from batchwright.baking.work import bake_units, scan

    version = _free_version(to, fingerprint([inputs.key, on_error])[:12], inputs)
    folder = version_folder(to, version)
    num_encoded = 0
    if not (folder / "manifest.json").exists():
        scan(recipe, work, workers, to, show)
        _ = recipe.tokenize.encoder  # chosen here, once: workers are told
        num_encoded = bake_units(work, to, workers, show)
        if folder.exists():
            shutil.rmtree(folder)  # joined by a bake that did not finish; its units are still in work/
        folder.mkdir(parents=True)
        manifest = join(work, inputs, folder, version, shard_bytes=_SHARD_BYTES)
        mark_as_version_of(folder, inputs)
        manifest.save(folder)
    point_to(to, version)
    shutil.rmtree(to / "work", ignore_errors=True)
    store = Store(to)
    remember(work[0].job.tokenize, store)
    return store, num_encoded


def _free_version(to: Path, wanted: str, inputs: Inputs) -> str:
    """The name of the version to bake. A complete one is never written again, because jobs may read it.

    One that was baked before from the same inputs is used as it is; if it was damaged since, the next name is taken.
    """
    names = itertools.chain([wanted], (f"{wanted}-{number}" for number in itertools.count(2)))
    return next(
        name
        for name in names
        if not (version_folder(to, name) / "manifest.json").exists() or is_version_of(version_folder(to, name), inputs)
    )


def _summary(to: str, store: Store, num_encoded: int, encoder: str | None, seconds: float) -> str:
    """What a bake did, in a few lines."""
    tokenizer = store.manifest.tokenizer
    lines = [f"{to}: {store.num_rows:,} documents, {store.num_tokens:,} tokens in {seconds:.1f} s"]
    if num_encoded < store.num_rows:
        lines.append(f"  {store.num_rows - num_encoded:,} of {store.num_rows:,} documents were tokenised before")
    if encoder is not None:
        lines.append(f"  encoder: {encoder}")
    if "chat" in tokenizer:
        lines.append(f"  template: {tokenizer['chat']['template']}")
        lines += [f"  {name}: {layout}" for name, layout in store.report["layouts"].items()]
    elif tokenizer["eos"] is not None:
        lines.append(f"  end of document: id {tokenizer['eos']} ({tokenizer['eos_from']})")
    lines += [f"  special tokens: {line}" for line in special_in_words(store.report)]
    for name, part in store.report["ingredients"].items():
        if part["dropped"]:
            dropped = ", ".join(f"{count:,} {reason}" for reason, count in part["dropped"].items())
            lines.append(f"  {name}: {part['documents']:,} of {part['rows_read']:,} rows kept; dropped: {dropped}")
    lines += [f"  for example {file}, row {row}: {reason}" for file, row, reason in store.report["examples"][:3]]
    return "\n".join(lines)
