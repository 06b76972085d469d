"""Bake a recipe into a store: cut the work, do what is not done yet, join it into shards, move the pointer last."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from penstock.baking.recipe import DatasetRecipe, Ingredient
from penstock.errors import SourceError, SpecError, StoreError
from penstock.files import exclusive, is_part, out_of_space_at, write_whole
from penstock.fingerprint import fingerprint, fingerprint_bytes
from penstock.machine import cpu_count
from penstock.order.permute import permutation
from penstock.prepare.tokenize import Tokenize
from penstock.progress import progress
from penstock.seeds import key_of, mix64
from penstock.sources.formats import Format, format_for
from penstock.sources.listing import InputFile
from penstock.spec import at_least, one_of
from penstock.store.layout import Manifest, current_version, is_store, mark_as_store, point_to, version_folder
from penstock.store.reader import Store

if TYPE_CHECKING:
    from penstock.baking.unit import Job, UnitReport
    from penstock.sources.units import Unit
    from penstock.store.layout import Shard, StreamInfo

__all__ = ["bake"]

_BAKE_VERSION = 1
"""Part of every version's name: changes when the same recipe over the same files gives other bytes."""
_SHARD_BYTES = 1 << 30

log = logging.getLogger("penstock")


def bake(
    recipe: DatasetRecipe,
    to: str | os.PathLike[str],
    *,
    workers: int | None = None,
    on_error: str = "raise",
    shuffle: bool = True,
    show_progress: bool = True,
) -> Store:
    """Make the store that a recipe describes, and open it.

    - Run again over unchanged files it does nothing, at once. Changed files or another recipe make a new version beside
      the old one; jobs that read the old one keep it.
    - The bytes do not depend on `workers` (default: one for each CPU).
    - Killed at any moment, the same call continues; what opens is always a complete version.
    - `on_error="raise"` stops at the first malformed row and names it; `"skip"` leaves such rows out and counts them.
    - Documents are stored in an order that (seed, ingredient) shuffles; `shuffle=False` keeps the order of the files.
    """
    started = time.monotonic()
    to = Path(os.path.expanduser(to))
    _check_arguments(recipe, to, on_error)
    workers = cpu_count() if workers is None else at_least(0, workers=workers)
    inputs = _Inputs.of(recipe, shuffle)
    if is_store(to) and (store := _up_to_date(to, inputs, on_error)):
        _say(show_progress, f"{to}: up to date ({store.num_rows:,} documents, {store.num_tokens:,} tokens)")
        return store
    work = _plan_work(
        recipe, inputs, on_error, shuffle
    )  # before anything is written: it may find fault with the inputs
    with out_of_space_at(to):
        mark_as_store(to)
        with exclusive(to / ".lock", doing="baking into"):
            _sweep_parts(to)
            store = _up_to_date(to, inputs, on_error) or _bake_version(
                recipe, to, inputs, work, workers, on_error, show_progress
            )
    _say(show_progress, _summary(to, store, time.monotonic() - started))
    return store


def _check_arguments(recipe: DatasetRecipe, to: Path, on_error: str) -> None:
    if not isinstance(recipe, DatasetRecipe):
        raise SpecError(
            f"a {type(recipe).__name__} is not a recipe", parameter="recipe", remedy="recipe = ps.DatasetRecipe()"
        )
    one_of(("raise", "skip"), on_error=on_error)
    if not recipe.ingredients:
        raise SpecError(
            "this recipe has no ingredients", parameter="recipe", remedy="recipe.add_ingredient('data/*.jsonl')"
        )
    _ = recipe.tokenize
    _refuse_other_folders(to)


def _sweep_parts(to: Path) -> None:
    """Remove what writers that were killed left in a store's own folder. Nobody else writes there now."""
    for path in to.iterdir():
        if is_part(path.name):
            path.unlink(missing_ok=True)


def _refuse_other_folders(to: Path) -> None:
    if to.exists() and not to.is_dir():
        raise SpecError(f"{to} is a file", parameter="to", remedy="a new folder, such as to='corpus.store'")
    if to.is_dir() and not is_store(to) and not all(is_part(path.name) for path in to.iterdir()):
        raise SpecError(
            f"{to} is a folder that is not a store, and is left as it is",
            parameter="to",
            remedy="a new folder, such as to='corpus.store'",
        )


@dataclass(frozen=True, slots=True)
class _Inputs:
    """The files of every ingredient, and what of recipe and files names the result."""

    files: list[list[InputFile]]
    spec: dict[str, Any]
    key: str
    """Changes when a file was added, removed, resized or touched, or the recipe changed."""

    @classmethod
    def of(cls, recipe: DatasetRecipe, shuffle: bool) -> _Inputs:
        files = [ingredient.files() for ingredient in recipe.ingredients]
        formats = {
            kind.name: kind.fingerprint
            for ingredient, group in zip(recipe.ingredients, files, strict=True)
            for kind in _formats_of(ingredient, group).values()
        }
        spec = {**recipe.spec(), "formats": formats, "shuffle": shuffle, "bake": _BAKE_VERSION}
        listed = [[[f.path, f.num_bytes, f.modified_ns] for f in group] for group in files]
        return cls(files, spec, fingerprint([spec, listed]))


def _formats_of(ingredient: Ingredient, files: list[InputFile]) -> dict[str, Format]:
    """The formats that an ingredient's files have, by name. One look for each extension."""
    if ingredient.format is not None:
        return {ingredient.format: format_for("", ingredient.format)}
    by_extension: dict[Any, str] = {}
    for file in files:
        by_extension.setdefault(tuple(Path(file.path).suffixes[-2:]), file.path)
    return {kind.name: kind for kind in map(format_for, by_extension.values())}


def _up_to_date(to: Path, inputs: _Inputs, on_error: str) -> Store | None:
    """The current version, if baking again would give the same, and it is all there."""
    version = current_version(to)
    if version is None:
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
    if store.manifest.recipe == _jsonable(inputs.spec) and _same_content(store, inputs):
        # Touched, not changed: need not look again. Where the store cannot be written, it looks again every time.
        with contextlib.suppress(OSError):
            _write_seen(store.folder, inputs.key)
        return store
    return None


class _Seen(msgspec.Struct):
    """What a version was baked from, and how much lies in its folder: enough to tell at once that it is up to date."""

    key: str
    num_files: int
    num_bytes: int


def _write_seen(folder: Path, key: str) -> None:
    write_whole(folder / "inputs.json", msgspec.json.encode(_Seen(key, *_size_of(folder))))


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


def _jsonable(spec: dict[str, Any]) -> Any:
    return msgspec.json.decode(msgspec.json.encode(spec))


def _same_content(store: Store, inputs: _Inputs) -> bool:
    from penstock.sources.units import cut_files

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
            spans = [
                s for u in cut_files([(0, file.path, file.num_bytes)], known["format"][i].as_py()) for s in u.spans
            ]
            if _content_hash([_hash_span(s) for s in spans]) != known["content_hash"][i].as_py():
                return False
    return True


def _hash_span(span: Any) -> str:
    from penstock.fingerprint import fingerprint_file

    return fingerprint_file(Path(span.path), span.start, span.stop)


def _content_hash(span_hashes: Sequence[str]) -> str:
    return span_hashes[0] if len(span_hashes) == 1 else fingerprint(list(span_hashes))


def _bake_version(
    recipe: DatasetRecipe, to: Path, inputs: _Inputs, plans: list[_Work], workers: int, on_error: str, show: bool
) -> Store:
    version, is_complete = _free_version(to, fingerprint([inputs.key, on_error])[:12], inputs.key)
    if not is_complete:
        work = to / "work"
        work.mkdir(exist_ok=True)
        _scan(recipe, plans, workers, to, show)
        _bake_units(plans, work, workers, to, show)
        folder = version_folder(to, version)
        if folder.exists():
            shutil.rmtree(folder)  # joined by a bake that did not finish; its units are still in work/
        folder.mkdir(parents=True)
        manifest = _join(recipe, inputs, plans, folder, version)
        _write_seen(folder, inputs.key)
        manifest.save(folder)
    point_to(to, version)
    shutil.rmtree(to / "work", ignore_errors=True)
    return Store(to)


def _free_version(to: Path, wanted: str, key: str) -> tuple[str, bool]:
    """(name, whether it is complete) of the version to bake. A complete one is never written again: jobs may read it.

    One that was baked before from the same inputs is used as it is; if it was damaged since, the next name is taken.
    """
    for version in itertools.chain([wanted], (f"{wanted}-{number}" for number in itertools.count(2))):
        folder = version_folder(to, version)
        if not (folder / "manifest.json").exists():
            return version, False
        seen = _read_seen(folder)
        if seen is not None and seen.key == key and (seen.num_files, seen.num_bytes) == _size_of(folder):
            try:
                Manifest.load(folder)
            except StoreError:
                continue
            return version, True
    raise AssertionError


@dataclass(slots=True)
class _Work:
    """One ingredient's work: its units, what each keeps of its rows, and where its output lies."""

    ingredient: Ingredient
    job: Job
    units: list[Unit]
    first_file: int
    files: list[InputFile]
    identity: list[Any]
    selected: list[Any]
    outputs: list[Path]
    reports: list[UnitReport]


def _plan_work(recipe: DatasetRecipe, inputs: _Inputs, on_error: str, shuffle: bool) -> list[_Work]:
    from penstock.baking.unit import Job
    from penstock.sources.units import cut_files, cut_rows

    plans, first_file = [], 0
    for ingredient, files, spec in zip(recipe.ingredients, inputs.files, inputs.spec["ingredients"], strict=True):
        formats = _formats_of(ingredient, files)
        if ingredient.is_memory:
            units, identity = cut_rows(ingredient.source), [spec["memory"]]
        else:
            units = cut_files([(first_file + n, f.path, f.num_bytes) for n, f in enumerate(files)], ingredient.format)
            identity = [[f.num_bytes, f.modified_ns] for f in files]
        decides = [
            spec,
            [step.fingerprint for step in recipe.steps],
            recipe.holdout_fraction,
            recipe.seed,
            shuffle,
            on_error,
            inputs.spec["formats"],
            _BAKE_VERSION,
        ]
        job = Job(
            ingredient=ingredient.name,
            text=ingredient.text,
            where=ingredient.where,
            steps=recipe.row_steps,
            tokenize=recipe.tokenize,
            holdout=recipe.holdout_fraction,
            seed=recipe.seed,
            shuffle=shuffle,
            on_error=on_error,
            formats=formats,
            fingerprint=fingerprint(decides),
        )
        plans.append(_Work(ingredient, job, units, first_file, files, identity, [None] * len(units), [], []))
        first_file += max(len(files), 1)
    return plans


class _ForUnit:
    """A function of one unit, with the jobs that all units share: they travel to a worker once."""

    def __init__(self, function: Callable[..., Any], jobs: list[Job]) -> None:
        self.function, self.jobs = function, jobs

    def __call__(self, which: int, unit: Unit, *rest: Any) -> Any:
        return self.function(self.jobs[which], unit, *rest)


def _for_units(
    function: Callable[..., Any], plans: list[_Work], tasks: list[tuple[Any, ...]], workers: int
) -> Iterator[tuple[int, Any]]:
    """(task number, result) of tasks (ingredient number, unit, ...), as they finish."""
    from penstock.baking.engine import run_tasks

    return run_tasks(_ForUnit(function, [plan.job for plan in plans]), tasks, workers, about=_about)


def _about(task: tuple[Any, ...]) -> str:
    spans = task[1].spans
    more = f" and {len(spans) - 1} more" if len(spans) > 1 else ""
    return f"{spans[0].path}{more}" if spans else "rows from memory"


def _scan(recipe: DatasetRecipe, plans: list[_Work], workers: int, to: Path, show: bool) -> None:
    """Find out what must be known of everything before anything is baked: quantities, a vocabulary of characters."""
    from penstock.baking.unit import find_characters, find_passing

    tasks = [(p, unit) for p, plan in enumerate(plans) if plan.ingredient.quantity is not None for unit in plan.units]
    passing: dict[int, list[Any]] = {p: [None] * len(plans[p].units) for p, _ in tasks}
    with progress(f"choosing rows for {to}", _bytes_of(tasks), show=show and bool(tasks)) as done:
        numbers = [n for p in passing for n in range(len(plans[p].units))]
        for task, found in _for_units(find_passing, plans, tasks, workers):
            passing[tasks[task][0]][numbers[task]] = found
            done.advance(tasks[task][1].num_bytes)
    for p, found in passing.items():
        plans[p].selected = _choose(plans[p], [rows for rows, _ in found], [counts for _, counts in found])
    if not recipe.tokenize.needs_fit:
        return
    points: set[int] = set()
    all_tasks = [
        (p, unit, chosen)
        for p, plan in enumerate(plans)
        for unit, chosen in zip(plan.units, plan.selected, strict=True)
    ]
    with progress(f"finding the characters of {to}", _bytes_of(all_tasks), show=show) as done:
        for task, characters in _for_units(find_characters, plans, all_tasks, workers):
            points.update(characters)
            done.advance(all_tasks[task][1].num_bytes)
    fitted: Tokenize = recipe.tokenize.fitted(points)
    for plan in plans:
        decides = fingerprint([plan.job.fingerprint, fitted.fingerprint])
        plan.job = replace(plan.job, tokenize=fitted, fingerprint=decides)


def _bytes_of(tasks: Sequence[tuple[Any, ...]]) -> int:
    return sum(task[1].num_bytes for task in tasks)


def _first_rows(plan: _Work, span_rows: list[list[int]]) -> list[list[int]]:
    """For each span of each unit, the number of its first row inside its file."""
    rows_so_far: Counter[int] = Counter()
    first = []
    for unit, counts in zip(plan.units, span_rows, strict=True):
        if unit.rows is not None:
            first.append([unit.first_row])
            continue
        first.append([rows_so_far[span.file] for span in unit.spans])
        for span, count in zip(unit.spans, counts, strict=True):
            rows_so_far[span.file] += count
    return first


def _choose(plan: _Work, passing: list[Any], span_rows: list[list[int]]) -> list[Any]:
    """The rows with the smallest hash of (seed, ingredient, file, row), as numbers among each unit's passing rows."""
    noise = []
    for unit, rows, first in zip(plan.units, passing, _first_rows(plan, span_rows), strict=True):
        numbers = (rows[:, 1] + np.array(first, np.int64)[rows[:, 0]]).astype(np.uint64)
        hashes = np.empty(len(rows), np.uint64)
        for span in range(max(len(unit.spans), 1)):
            name = plan.files[unit.spans[span].file - plan.first_file].name if unit.spans else "<memory>"
            mine = rows[:, 0] == span
            key = key_of("quantity", plan.job.seed, plan.job.ingredient, name)
            hashes[mine] = mix64(numbers[mine], np.uint64(key))
        noise.append(hashes)
    everything = np.concatenate(noise) if noise else np.empty(0, np.uint64)
    quantity = plan.ingredient.quantity
    wanted = (
        int(len(everything) * quantity + 1e-9)
        if isinstance(quantity, float)
        else min(int(quantity or 0), len(everything))
    )
    kept = np.zeros(len(everything), bool)
    kept[np.argsort(everything, kind="stable")[:wanted]] = True
    return [np.flatnonzero(part) for part in np.split(kept, np.cumsum([len(n) for n in noise])[:-1])]


def _bake_units(plans: list[_Work], work: Path, workers: int, to: Path, show: bool) -> None:
    """Bake every unit that no earlier bake has left in work/."""
    from penstock.baking.unit import bake_unit, read_unit_report, unit_key

    total = sum(unit.num_bytes for plan in plans for unit in plan.units)
    with progress(f"baking {to}", total, show=show) as done:
        tasks: list[tuple[Any, ...]] = []
        for which, plan in enumerate(plans):
            plan.reports = [None] * len(plan.units)  # type: ignore[list-item]
            for number, unit in enumerate(plan.units):
                of_files = [plan.identity[s.file - plan.first_file] for s in unit.spans]
                chosen = None if plan.selected[number] is None else fingerprint(plan.selected[number].tolist())
                key = unit_key(plan.job, unit, number, [of_files or plan.identity, chosen])
                path = work / f"{which:03d}-{number:06d}-{key[:16]}.arrow"
                plan.outputs.append(path)
                report = read_unit_report(path)
                if report is not None and report.key == key:
                    plan.reports[number] = report
                    done.advance(unit.num_bytes, "found from before")
                else:
                    tasks.append((which, unit, number, key, plan.selected[number], path))
        documents = 0
        for task, report in _for_units(bake_unit, plans, tasks, workers):
            which, unit, number = tasks[task][:3]
            plans[which].reports[number] = report
            documents += report.documents
            done.advance(unit.num_bytes, f"{documents:,} documents")


def _join(recipe: DatasetRecipe, inputs: _Inputs, plans: list[_Work], folder: Path, version: str) -> Manifest:
    """Units, in their shuffled order, as shards; then the tables, and the manifest that names everything."""
    from penstock.baking.unit import SPLITS
    from penstock.store.writer import stream_info, write_table

    tokenize = plans[0].job.tokenize
    report = _report(plans)
    if not sum(part["documents"] for part in report["ingredients"].values()):
        raise SourceError(
            "no documents: every row was dropped",
            dropped="\n".join(
                f"{name}: " + (", ".join(f"{n:,} {why}" for why, n in part["dropped"].items()) or "nothing was read")
                for name, part in report["ingredients"].items()
            ),
            remedy="look at where=, quantity= and the steps; text= names the column that holds the text",
        )
    streams: list[StreamInfo] = []
    table: list[tuple[int, Shard]] = []
    for plan in plans:
        for split in SPLITS if recipe.holdout_fraction else SPLITS[:1]:
            shards = _write_stream(plan, split, folder)
            table += [(len(streams), shard) for shard in shards]
            streams.append(stream_info(plan.ingredient.name, split, shards, tokenize.dtype.name))
    shards_hash = write_table(
        folder / "shards.arrow",
        {
            "stream": np.array([stream for stream, _ in table], np.int32),
            **{
                name: [getattr(shard, name) for _, shard in table]
                for name in ("file", "num_documents", "num_tokens", "num_bytes", "file_hash", "content_hash")
            },
        },
    )
    files_hash = write_table(folder / "files.arrow", _files_table(plans))
    tokenizer_json = tokenize.tokenizer.to_json()
    write_whole(folder / "tokenizer.json", tokenizer_json)
    return Manifest(
        version=version,
        streams=streams,
        token_dtype=tokenize.dtype.name,
        tokenizer=tokenize.info(),
        recipe=_jsonable(inputs.spec),
        report=report,
        shards_hash=shards_hash,
        files_hash=files_hash,
        tokenizer_hash=fingerprint_bytes(tokenizer_json),
    )


def _write_stream(plan: _Work, split: str, folder: Path) -> list[Shard]:
    from penstock.baking.unit import SPLITS, read_unit_file
    from penstock.store.writer import MAX_SHARD_TOKENS, write_shard

    first_rows = _first_rows(plan, [report.span_rows for report in plan.reports])
    count = len(plan.units)
    order = permutation(count, plan.job.seed, plan.job.ingredient, "units").at(range(count)).tolist()
    shards: list[Shard] = []
    waiting: list[tuple[Any, Any, Any, Any]] = []
    itemsize = plan.job.tokenize.dtype.itemsize

    def flush() -> None:
        if waiting:
            tokens, lengths, file, row = (np.concatenate(parts) for parts in zip(*waiting, strict=True))
            shards.append(
                write_shard(
                    folder,
                    f"{plan.ingredient.name}-{split}-{len(shards):05d}.arrow",
                    source=plan.ingredient.name,
                    split=split,
                    tokens=tokens,
                    offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
                    file=file,
                    row=row,
                )
            )
            waiting.clear()

    for number in order if plan.job.shuffle else range(count):
        documents = _documents_of(
            plan, number, SPLITS.index(split), read_unit_file(plan.outputs[number]), first_rows[number]
        )
        for part in _split_documents(*documents, limit=MAX_SHARD_TOKENS):
            together = sum(len(w[0]) for w in waiting) + len(part[0])
            if together * itemsize > _SHARD_BYTES or together > MAX_SHARD_TOKENS:
                flush()
            waiting.append(part)
    flush()
    return shards


def _split_documents(tokens: Any, lengths: Any, file: Any, row: Any, *, limit: int) -> Iterator[tuple[Any, ...]]:
    """A unit's documents in as few parts as hold at most `limit` tokens each: nearly always one, or none."""
    ends = np.cumsum(lengths)
    first = 0
    while first < len(lengths):
        begin = int(ends[first] - lengths[first])
        last = int(np.searchsorted(ends, begin + limit, side="right"))
        yield tokens[begin : int(ends[last - 1])], lengths[first:last], file[first:last], row[first:last]
        first = last


def _documents_of(plan: _Work, number: int, split: int, batch: Any, first_rows: list[int]) -> tuple[Any, Any, Any, Any]:
    """(tokens, lengths, file, row) of a unit's documents that are on one side of the holdout."""
    unit = plan.units[number]
    lists = batch.column("tokens")
    tokens, offsets = lists.values.to_numpy(), lists.offsets.to_numpy()
    lengths = np.diff(offsets).astype(np.int64)
    span, row = batch.column("span").to_numpy(), batch.column("row").to_numpy()
    mine = batch.column("split").to_numpy() == split
    if not mine.all():
        tokens = tokens[np.repeat(mine, lengths)]
    files = np.array([s.file for s in unit.spans] or [plan.first_file], np.int32)
    first = np.array(first_rows, np.int64)
    return tokens, lengths[mine], files[span[mine]], row[mine] + first[span[mine]]


def _files_table(plans: list[_Work]) -> dict[str, Any]:
    columns: dict[str, list[Any]] = {
        name: [] for name in ("path", "name", "source", "format", "num_bytes", "modified_ns", "content_hash")
    }
    for plan in plans:
        hashes: dict[int, list[str]] = {}
        for unit, report in zip(plan.units, plan.reports, strict=True):
            for span, digest in zip(unit.spans, report.span_hashes, strict=True):
                hashes.setdefault(span.file, []).append(digest)
        formats = {span.file: span.format for unit in plan.units for span in unit.spans}
        for number, file in enumerate(plan.files or [InputFile("<memory>", "<memory>", 0, 0)]):
            whole = hashes.get(plan.first_file + number)
            values = (
                file.path,
                file.name,
                plan.ingredient.name,
                formats.get(plan.first_file + number, "memory"),
                file.num_bytes,
                file.modified_ns,
                _content_hash(whole) if whole else "",
            )
            for column, value in zip(columns.values(), values, strict=True):
                column.append(value)
    return columns


def _report(plans: list[_Work]) -> dict[str, Any]:
    ingredients: dict[str, Any] = {}
    examples: list[list[Any]] = []
    for plan in plans:
        dropped: Counter[str] = Counter()
        first_rows = _first_rows(plan, [report.span_rows for report in plan.reports])
        for unit, report, first in zip(plan.units, plan.reports, first_rows, strict=True):
            dropped.update(report.dropped)
            by_path = {span.path: row for span, row in zip(unit.spans, first, strict=False)}
            examples += [[file, row + by_path.get(file, first[0]), reason] for file, row, reason in report.examples]
        ingredients[plan.ingredient.name] = {
            "rows_read": sum(report.rows_read for report in plan.reports),
            "documents": sum(report.documents for report in plan.reports),
            "tokens": sum(report.tokens for report in plan.reports),
            "dropped": dict(sorted(dropped.items())),
        }
    return {
        "ingredients": ingredients,
        "errors": sum(report.errors for plan in plans for report in plan.reports),
        "examples": examples[:20],
    }


def _summary(to: Path, store: Store, seconds: float) -> str:
    """What a bake did, in a few lines."""
    tokenizer = store.manifest.tokenizer
    lines = [f"{to}: {store.num_rows:,} documents, {store.num_tokens:,} tokens in {seconds:.1f} s"]
    if tokenizer["eos"] is not None:
        lines.append(f"  end of document: id {tokenizer['eos']} ({tokenizer['eos_from']})")
    for name, part in store.report["ingredients"].items():
        if part["dropped"]:
            dropped = ", ".join(f"{count:,} {reason}" for reason, count in part["dropped"].items())
            lines.append(f"  {name}: {part['documents']:,} of {part['rows_read']:,} rows kept; dropped: {dropped}")
    lines += [f"  for example {file}, row {row}: {reason}" for file, row, reason in store.report["examples"][:3]]
    return "\n".join(lines)


def _say(show: bool, text: str) -> None:
    log.info(text)
    if show:
        print(text, file=sys.stderr, flush=True)
