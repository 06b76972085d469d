"""Baking of a recipe: into a store (cut the work, bake the units, join them, move the pointer last), or a buffer."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, overload

from batchwright.baking.inputs import Inputs, is_version_of, mark_as_version_of, up_to_date
from batchwright.baking.recipe import DatasetRecipe, check_recipe
from batchwright.baking.unit_rows import dropped_in_words, examples_in_words
from batchwright.base.checks import at_least, local_path, one_of
from batchwright.base.errors import SpecError
from batchwright.base.files import exclusive, is_part, out_of_space_at
from batchwright.base.fingerprint import fingerprint
from batchwright.base.machine import cpu_count
from batchwright.base.progress import say
from batchwright.prepare.tokenize import special_in_words
from batchwright.store.layout import is_store, mark_as_store, point_to, refuse_other_folders, version_folder
from batchwright.store.reader import Store
from batchwright.store.versions import free_version
from batchwright.typing import OnError

if TYPE_CHECKING:
    from batchwright.baking.work import Work
    from batchwright.buffer.buffer import DatasetBuffer

_SHARD_BYTES = 1 << 30


class _Settings(TypedDict, total=False):
    """The settings of `bake` that both overloads have."""

    workers: int | None
    on_error: OnError | None
    shuffle: bool
    check: bool
    show_progress: bool


@overload
def bake(
    recipe: DatasetRecipe, to: None = None, *, into: DatasetBuffer | None = None, **settings: Unpack[_Settings]
) -> DatasetBuffer: ...


@overload
def bake(recipe: DatasetRecipe, to: str | os.PathLike[str], **settings: Unpack[_Settings]) -> Any: ...


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

    - Run again over unchanged files it does nothing. Changed files or another recipe make a new version beside the old
      one, in which only changed parts are read and tokenised again. Jobs that read the old version keep it.
    - The bytes do not depend on `workers` (default: one for each CPU).
    - Killed at any moment, the same call continues. Only a complete version can be opened.
    - `on_error="raise"` stops at the first malformed row and names it; "skip" leaves such rows out and counts them. The
      default is the recipe's.
    - `check=True` first runs the recipe's functions on a sample of rows, several times. It refuses a function that
      depends on more than its row, because the bytes would depend on `workers`.
    - Documents are stored in an order shuffled by (seed, ingredient); `shuffle=False` keeps the order of the files.

    Without `to` the rows are appended to `into`, or to a new buffer in memory: the documents of that store, with their
    tokens; or, for a recipe without a tokenize step, the rows after its steps, in the order of the sources. Such a
    recipe with `to` gives a buffer in that folder, opened to read. `show_progress=False` is quiet.
    """
    check_recipe(recipe)
    if on_error is None:
        on_error = recipe.on_error
    if workers is None:
        workers = cpu_count()
    one_of(("raise", "skip"), on_error=on_error)
    workers = at_least(0, workers=workers)
    folder = None if to is None else local_path(to=to)
    if folder is not None and into is not None:
        raise SpecError("to= and into= are two places", parameter="into", remedy="one of them")
    if check:
        from batchwright.baking.check import check_functions

        check_functions(recipe, on_error=on_error)
    if folder is not None and recipe.is_tokenized:
        return _bake_store(recipe, folder, workers, on_error, shuffle, show_progress)
    from batchwright.baking import into_buffer

    if folder is not None:
        return into_buffer.bake_folder(recipe, folder, workers=workers, on_error=on_error, show=show_progress)
    into_buffer.check_buffer(into)
    if not recipe.is_tokenized:
        return into_buffer.bake_rows(recipe, into, workers=workers, on_error=on_error, show=show_progress)
    with tempfile.TemporaryDirectory(prefix="batchwright-") as scratch:
        store = _bake_store(recipe, Path(scratch) / "store", workers, on_error, shuffle, show_progress, "a buffer")
        return into_buffer.put_tokens(into, store)


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
    refuse_other_folders(to, adopted=False)
    inputs = Inputs.of(recipe, shuffle)
    if is_store(to) and (store := up_to_date(to, inputs, on_error)):
        say(f"{to}: up to date ({store.num_rows:,} documents, {store.num_tokens:,} tokens)", show=show_progress)
        return store
    from batchwright.baking.work import plan_work  # imports Arrow, which the check above does not need

    work = plan_work(recipe, inputs, on_error, shuffle)
    with out_of_space_at(to), exclusive(to / ".lock", doing="baking into"):
        for path in to.iterdir():
            if is_part(path.name):  # of a writer that was killed
                path.unlink(missing_ok=True)
        mark_as_store(to)  # under the lock: another process may have finished a store since we looked
        num_encoded = 0
        store = up_to_date(to, inputs, on_error)
        if store is None:
            store, num_encoded = _bake_version(recipe, to, inputs, work, workers, on_error, show_progress)
    seconds = time.monotonic() - started
    say(_summary(called or str(to), store, num_encoded, recipe.tokenize, seconds), show=show_progress)
    return store


def _bake_version(
    recipe: DatasetRecipe, to: Path, inputs: Inputs, work: list[Work], workers: int, on_error: str, show: bool
) -> tuple[Store, int]:
    """(the new version, the number of its documents that had to be tokenised)."""
    from batchwright.baking.join import join
    from batchwright.baking.reuse import remember
    from batchwright.baking.work import bake_units, scan

    wanted = fingerprint([inputs.key, on_error])[:12]
    version = free_version(to, wanted, lambda name: is_version_of(version_folder(to, name), inputs))
    folder = version_folder(to, version)
    num_encoded = 0
    if not (folder / "manifest.json").exists():
        scan(recipe, work, workers, to, show)
        _ = recipe.tokenize.encoder  # chosen here, once, for all workers
        num_encoded = bake_units(work, to, workers, show)
        if folder.exists():
            shutil.rmtree(folder)  # joined by a bake that did not finish; its units are still in work/
        folder.mkdir(parents=True)
        manifest = join(work, inputs, folder, shard_bytes=_SHARD_BYTES)
        mark_as_version_of(folder, inputs)
        manifest.save(folder)
    point_to(to, version)
    shutil.rmtree(to / "work", ignore_errors=True)
    store = Store(to)
    remember(work[0].job.tokenize, store)
    return store, num_encoded


def _summary(to: str, store: Store, num_encoded: int, tokenize: Any, seconds: float) -> str:
    """The result of a bake, in a few lines."""
    tokenizer, report = store.manifest.tokenizer, store.report
    lines = [f"{to}: {store.num_rows:,} documents, {store.num_tokens:,} tokens in {seconds:.1f} s"]
    if num_encoded < store.num_rows:
        lines.append(f"  {store.num_rows - num_encoded:,} of {store.num_rows:,} documents were tokenised before")
    if num_encoded and tokenize.encoder is not None:
        lines.append(f"  encoder: {tokenize.encoder}")
    if "chat" in tokenizer:
        lines.append(f"  template: {tokenizer['chat']['template']}")
        lines += [f"  {name}: {layout}" for name, layout in report["layouts"].items()]
    elif tokenizer["eos"] is not None:
        lines.append(f"  end of document: id {tokenizer['eos']} ({tokenizer['eos_from']})")
    lines += [f"  special tokens: {line}" for line in special_in_words(report)]
    for name, part in report["ingredients"].items():
        if part["dropped"]:
            kept = f"{part['documents']:,} of {part['rows_read']:,} rows kept"
            lines.append(f"  {name}: {kept}; dropped: {dropped_in_words(part['dropped'])}")
    return "\n".join([*lines, *examples_in_words(report["examples"])])
