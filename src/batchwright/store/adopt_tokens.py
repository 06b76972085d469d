"""Use tokens that exist where they lie: write a manifest over files of other tools, and copy nothing.

Each file is read once: for its hash, for ids outside the vocabulary, and for the borders of documents. What is written
is where documents begin and end; the tokens are mapped from the user's files whenever the store is used.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import DTypeLike

from batchwright.base.checks import local_path, one_of
from batchwright.base.errors import SpecError, StoreError, TokenizerError
from batchwright.base.files import exclusive, is_part, out_of_space_at, sync_folder, write_whole
from batchwright.base.fingerprint import fingerprint, fingerprint_bytes, fingerprint_file
from batchwright.base.progress import Progress, progress, say
from batchwright.prepare.tokenize import tokenize
from batchwright.prepare.tokenizers import resolve_tokenizer
from batchwright.sources.scan import TokenScan
from batchwright.sources.tokens import TokenFile, list_token_files, open_token_file, token_dtype
from batchwright.store import writer
from batchwright.store.adopted import path_beside
from batchwright.store.layout import (
    ADOPTED_FORMAT,
    Manifest,
    Shard,
    StreamInfo,
    current_version,
    is_adopted,
    is_store,
    mark_as_store,
    point_to,
    version_folder,
)
from batchwright.store.reader import Store
from batchwright.typing import TokenizerLike

__all__ = ["adopt"]

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_SPLITS = ("train", "val")


def adopt(
    path: Paths | Mapping[str, Paths],
    tokenizer: TokenizerLike,
    *,
    to: str | os.PathLike[str] | None = None,
    val: Paths | Mapping[str, Paths] | None = None,
    split: str | None = None,
    name: str | None = None,
    eos: int | str | None = None,
    eos_first: bool = False,
    dtype: DTypeLike | None = None,
    format: str | None = None,
    vocab_size: int | None = None,
    show_progress: bool = True,
) -> Store:
    """Make a store over tokens that exist, without copying them, and open it.

    adopt("data/train.bin", tokenizer="tokenizer.json")                      nanoGPT: raw ids
    adopt("data/", tokenizer="tokenizer.json")                               train.bin and val.bin become two splits
    adopt({"web": "web_text_document", "code": "code.npy"}, tokenizer=...)   two sources, to be mixed by weights
    adopt("a.npy", tokenizer="bytes", val="b.npy", eos="none")               no id ends a document

    - The files are read once and never changed. An id outside the vocabulary is an error that says where.
    - Where the format has no borders of documents, `eos` (an id or a token; else what `bw.tokenize` would take) ends
      each document; with `eos_first` it begins each one. `eos="none"`: a file is one document.
    - `to` is by default a folder beside the data, named as it is with `.store`.
    - The same tokens and borders give the same fingerprints and plans, wherever the files lie.
    - `path`: the files, of one source or of several by name. `name`, `split`: what its one source is called. `val`: the
      files of split "val". `tokenizer`: what made the ids, with `vocab_size` for a function.
    - `dtype` and `format` of the files, if they do not say it. `show_progress=False`: say nothing.
    - A file that is missing, or has another size or time than it had, is refused when the store is opened.
    """
    started = time.monotonic()
    vocabulary = _vocabulary(tokenizer, eos, vocab_size)
    default = np.dtype("uint16" if vocabulary.size <= 1 << 16 else "uint32") if dtype is None else token_dtype(dtype)
    given = _given(path, val, split, name)
    streams = [
        _Stream(source, side, [open_token_file(file, dtype=default, format=format) for file in files])
        for source, side, files in given
    ]
    _check_streams(streams, None if dtype is None else default)
    if vocabulary.unclear is not None and any(file.ends is None for stream in streams for file in stream.files):
        raise vocabulary.unclear
    folder = _default_to(path, given) if to is None else Path(os.path.abspath(local_path(to=to)))
    _refuse_other_folders(folder)
    job = _Job(folder, streams, vocabulary, eos_first)
    with (
        out_of_space_at(folder, then="run the same call again"),
        exclusive(folder / ".lock", doing="adopting into"),
        _whole_or_nothing(folder),
    ):
        mark_as_store(folder, adopted=True)  # under the lock: another process may have finished since we looked
        store = _adopt_version(job, show_progress)
    say(_summary(folder, store, job, time.monotonic() - started), show=show_progress)
    return store


# What is asked for


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """What the ids mean."""

    tokenizer: Any
    size: int
    eos: int | None
    eos_from: str | None
    unclear: TokenizerError | None = None
    """Why it cannot be told which id ends a document: an error only where that must be known."""

    def info(self) -> dict[str, Any]:
        """What a manifest says of the tokenizer."""
        return {
            "name": self.tokenizer.name,
            "kind": self.tokenizer.kind,
            "fingerprint": self.tokenizer.fingerprint,
            "vocab_size": self.size,
            "eos": self.eos,
            "eos_from": self.eos_from,
        }


def _vocabulary(tokenizer: Any, eos: int | str | None, vocab_size: int | None) -> _Vocabulary:
    resolved = resolve_tokenizer(tokenizer, vocab_size=vocab_size)
    if resolved.kind == "chars" and resolved.chars is None:
        raise TokenizerError(
            "'chars' has no vocabulary until a bake has seen the text",
            parameter="tokenizer",
            remedy="the tokenizer.json in the version folder of the store that was baked with it",
        )
    own = getattr(resolved, "eos_id", None)
    size = max(int(resolved.vocab_size), -1 if own is None else int(own) + 1)
    if eos == "none":
        return _Vocabulary(resolved, size, None, None)
    try:
        step = tokenize(resolved, append_eos=True, eos=eos)
    except TokenizerError as error:
        if eos is not None:
            raise
        remedy = f"{error.remedy}; or eos='none': each file is one document"
        return _Vocabulary(resolved, size, None, None, TokenizerError(error.headline, **error.where, remedy=remedy))
    return _Vocabulary(resolved, max(size, step.vocab_size), step.eos_id, step.eos_from)


@dataclass(slots=True)
class _Stream:
    """The files of one source and split, in order."""

    source: str
    split: str
    files: list[TokenFile]

    @property
    def dtype(self) -> str:
        return self.files[0].dtype.name if self.files else ""


def _given(
    path: Paths | Mapping[str, Paths], val: Paths | Mapping[str, Paths] | None, split: str | None, name: str | None
) -> list[tuple[str, str, list[str]]]:
    """(source, split, paths) of every stream, each source's train before its val."""
    if split is not None:
        one_of(_SPLITS, split=split)
        if val is not None:
            raise SpecError("split= and val= both say which split", parameter="split", remedy="one of them")
    if isinstance(path, Mapping):
        if name is not None:
            raise SpecError("these sources have names already", parameter="name", remedy="leave name= out")
        if not path:
            raise SpecError("no sources", parameter="path", remedy="{'web': 'web.bin'}")
        sources = {str(source): list_token_files(paths) for source, paths in path.items()}
    else:
        paths = list_token_files(path)
        sources = {name if name is not None else _name_of(path, paths): paths}
    for source in sources:
        _check_name(source, sources)
    held_out = _held_out(val, sources)
    given: list[tuple[str, str, list[str]]] = []
    for source, paths in sources.items():
        by_split: dict[str, list[str]] = {}
        if split is not None:
            by_split[split] = paths
        elif val is not None:
            by_split = {"train": paths, "val": held_out.get(source, [])}
        else:
            by_split = _split_by_name(paths)
        given += [(source, side, by_split[side]) for side in _SPLITS if by_split.get(side)]
    sides = [side for side in _SPLITS if any(found == side for _, found, _ in given)]
    there = {(source, side): paths for source, side, paths in given}
    # A source without files on one side is there all the same, empty, as in a bake that holds nothing of it out.
    return [(source, side, there.get((source, side), [])) for source in sources for side in sides]


def _held_out(val: Paths | Mapping[str, Paths] | None, sources: dict[str, list[str]]) -> dict[str, list[str]]:
    if val is None:
        return {}
    if not isinstance(val, Mapping):
        if len(sources) > 1:
            raise SpecError(
                "of which source are the files of val=?",
                parameter="val",
                remedy=f"val={{{next(iter(sources))!r}: ...}}",
            )
        val = {next(iter(sources)): val}
    for source in val:
        if source not in sources:
            raise SpecError(
                f"val= names {source!r}, which is not a source", parameter="val", there=", ".join(sources), remedy="one"
            )
    return {source: list_token_files(paths) for source, paths in val.items()}


_SPLIT_WORDS = {"train": "train", "val": "val", "valid": "val", "validation": "val"}


def _split_by_name(paths: list[str]) -> dict[str, list[str]]:
    """Files whose names say train and val, by that word; where they do not say both, all are for training."""
    sides = [
        next((_SPLIT_WORDS[word] for word in re.split(r"[_.-]", os.path.basename(path)) if word in _SPLIT_WORDS), "")
        for path in paths
    ]
    if set(sides) != set(_SPLITS):
        return {"train": paths}
    return {side: [path for path, found in zip(paths, sides, strict=True) if found == side] for side in _SPLITS}


def _name_of(path: Any, paths: list[str]) -> str:
    """What a source is called if nobody says: by the names of its files, never by where they lie.

    >>> _name_of("*.bin", ["/a/web_train_01.bin", "/a/web_train_02.bin"]), _name_of("o/train.bin", ["/o/train.bin"])
    ('web', 'tokens')
    """
    if isinstance(path, str | os.PathLike) and os.path.isdir(local_path(path=path)):
        return os.path.basename(os.path.abspath(local_path(path=path))).lstrip(".") or "tokens"
    words = "|".join([*_SPLIT_WORDS, r"\d+"])
    stems = {_stem(os.path.basename(path)) for path in paths}
    names = {re.sub(rf"(^|[_.-])({words})(?=[_.-]|$)", "", stem).strip("_.-") for stem in stems}
    return (names.pop() or "tokens") if len(names) == 1 else "tokens"


def _stem(path: str) -> str:
    return re.sub(r"\.(bin|idx|npy|ds)$", "", path)


def _check_name(name: str, taken: Mapping[str, Any]) -> None:
    is_name = name and len(name.encode("utf-8", "replace")) <= 100 and name.isprintable()
    if not is_name or name.startswith(".") or "/" in name:
        raise SpecError(f"a source cannot be named {name!r}", parameter="name", remedy="a short name such as 'web'")
    if sum(other.casefold() == name.casefold() for other in taken) > 1:
        raise SpecError(f"two sources are named {name!r}", parameter="name", remedy="names that differ")


def _check_streams(streams: list[_Stream], asked: np.dtype[Any] | None) -> None:
    every = [file for stream in streams for file in stream.files]
    other = next((file for file in every if file.dtype != asked), None)
    if asked is not None and other is not None and all(file.format != "bin" for file in every):
        raise SpecError(
            f"dtype={asked.name} was asked for, and the file says {other.dtype.name}",
            parameter="dtype",
            file=other.path,
            remedy="leave dtype= out: it is for files of raw ids",
        )
    seen: dict[str, _Stream] = {}
    for stream in streams:
        for file in stream.files:
            if file.dtype.name != stream.dtype:
                raise SpecError(
                    f"files of one source have ids of {stream.dtype} and of {file.dtype.name}",
                    source=stream.source,
                    file=file.path,
                    remedy="as sources of their own: {'a': ..., 'b': ...}",
                )
            if file.path in seen:
                raise SpecError(
                    "this file is in two places of one store",
                    file=file.path,
                    there=", ".join(f"{s.source} ({s.split})" for s in (seen[file.path], stream)),
                    remedy="one of them",
                )
            seen[file.path] = stream


def _default_to(path: Any, given: list[tuple[str, str, list[str]]]) -> Path:
    if isinstance(path, str | os.PathLike):
        whole = os.path.abspath(local_path(path=path))
        if os.path.exists(whole) or os.path.exists(f"{whole}.bin"):
            return Path(f"{_stem(whole)}.store")
    paths = [path for _, _, paths in given for path in paths]
    names = list(dict.fromkeys(source for source, _, _ in given))
    return Path(os.path.commonpath([os.path.dirname(path) for path in paths])) / f"{'-'.join(names)}.store"


def _refuse_other_folders(to: Path) -> None:
    if to.exists() and not to.is_dir():
        raise SpecError(f"{to} is a file", parameter="to", remedy="a new folder, such as to='corpus.store'")
    if is_store(to) and not is_adopted(to):
        raise SpecError(
            f"{to} is a store that was baked, and is left as it is", parameter="to", remedy="a folder of its own"
        )
    # In this order: another process may be making the store right now, and it marks it before it writes anything else.
    if to.is_dir() and any(p.name != ".lock" and not is_part(p.name) for p in to.iterdir()) and not is_store(to):
        raise SpecError(
            f"{to} is a folder that is not a store, and is left as it is",
            parameter="to",
            remedy="a new folder, such as to='corpus.store'",
        )


# Reading what is there


@dataclass(slots=True)
class _Read:
    """What one file turned out to be."""

    file: TokenFile
    source: str
    modified_ns: int
    content_hash: str


@dataclass(slots=True)
class _Job:
    """One call of `adopt`, and what it has found so far."""

    to: Path
    streams: list[_Stream]
    vocabulary: _Vocabulary
    eos_first: bool
    read: list[_Read] = field(default_factory=list)
    shards: list[list[tuple[Shard, int, int]]] = field(default_factory=list)
    """For each stream: (shard, number of its file, byte in there)."""
    notes: list[str] = field(default_factory=list)


def _adopt_version(job: _Job, show: bool) -> Store:
    work = job.to / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    total = sum(file.num_bytes for stream in job.streams for file in stream.files)
    with progress(f"adopting into {job.to}", total, show=show) as done:
        for stream in job.streams:
            _read_stream(job, stream, work, done)
    spec = _spec(job)
    version, folder = _free_version(job.to, fingerprint(spec)[:12], spec)
    if not (folder / "manifest.json").exists():
        shutil.rmtree(folder, ignore_errors=True)  # of a call that was killed
        folder.parent.mkdir(exist_ok=True)
        os.rename(work, folder)
        sync_folder(folder.parent)
        _write_tables(job, folder, version, spec).save(folder)
    point_to(job.to, version, adopted=True)
    shutil.rmtree(work, ignore_errors=True)
    store = Store(job.to)
    store.check()
    return store


def _read_stream(job: _Job, stream: _Stream, work: Path, done: Progress) -> None:
    shards: list[tuple[Shard, int, int]] = []
    for file in stream.files:
        number = len(job.read)
        scan = TokenScan(
            file,
            vocab_size=job.vocabulary.size,
            eos=job.vocabulary.eos,
            eos_first=job.eos_first,
            advance=done.advance,
        )
        for documents in scan.ranges(max_tokens=writer.MAX_SHARD_TOKENS):
            count = len(documents.ends)
            shard = writer.write_borders(
                work,
                f"{stream.source}-{stream.split}-{len(shards):05d}.arrow",
                source=stream.source,
                split=stream.split,
                offsets=np.concatenate([[0], documents.ends - documents.start]).astype(np.int32),
                file=np.full(count, number, np.int32),
                row=np.arange(documents.first_row, documents.first_row + count, dtype=np.int64),
                content=documents.content,
            )
            shards.append((shard, number, file.offset + documents.start * file.dtype.itemsize))
        job.read.append(_Read(file, stream.source, scan.modified_ns, scan.content_hash))
        job.notes += [file.note] if file.note else []
        if file.ends is None and scan.begins_with_eos and not job.eos_first:
            job.notes.append(
                f"{os.path.basename(file.path)} begins with id {job.vocabulary.eos}: if documents begin with it, "
                "eos_first=True (--eos-first)"
            )
    job.shards.append(shards)


# What is written


def _spec(job: _Job) -> dict[str, Any]:
    """All that the version is: another path, time, byte, name or tokenizer gives another one."""
    return {
        "adopted": [
            {
                "source": stream.source,
                "split": stream.split,
                "dtype": stream.dtype,
                "content": [[shard.content_hash, offset] for shard, _, offset in shards],
            }
            for stream, shards in zip(job.streams, job.shards, strict=True)
        ],
        "files": [[read.file.path, read.file.format, read.modified_ns, read.content_hash] for read in job.read],
        "tokenizer": job.vocabulary.info(),
        "eos_first": job.eos_first,
    }


def _write_tables(job: _Job, folder: Path, version: str, spec: dict[str, Any]) -> Manifest:
    dtype = next(stream.dtype for stream in job.streams if stream.files)
    streams = [_stream_info(stream, job.shards[n], dtype) for n, stream in enumerate(job.streams)]
    every = [(n, *entry) for n, shards in enumerate(job.shards) for entry in shards]
    tokenizer_json = job.vocabulary.tokenizer.to_json()
    write_whole(folder / "tokenizer.json", tokenizer_json)
    return Manifest(
        version=version,
        streams=streams,
        token_dtype=dtype,
        tokenizer=job.vocabulary.info(),
        recipe=spec,
        report=_report(job),
        shards_hash=writer.write_table(
            folder / "shards.arrow",
            {
                "stream": np.array([stream for stream, *_ in every], np.int32),
                **{name: [getattr(shard, name) for _, shard, _, _ in every] for name in _SHARD_COLUMNS},
                "data_file": np.array([file for *_, file, _ in every], np.int32),
                "data_offset": np.array([offset for *_, offset in every], np.int64),
            },
        ),
        files_hash=writer.write_table(
            folder / "files.arrow",
            {
                "path": [read.file.path for read in job.read],
                "name": [os.path.basename(read.file.path) for read in job.read],
                "beside": [path_beside(read.file.path, job.to) for read in job.read],
                "source": [read.source for read in job.read],
                "format": [read.file.format for read in job.read],
                "num_bytes": [read.file.num_bytes for read in job.read],
                "modified_ns": [read.modified_ns for read in job.read],
                "content_hash": [read.content_hash for read in job.read],
            },
        ),
        units_hash=writer.write_table(folder / "units.arrow", {"key": pa.array([], pa.string())}),
        tokenizer_hash=fingerprint_bytes(tokenizer_json),
        format=ADOPTED_FORMAT,
        adopted=True,
    )


_SHARD_COLUMNS = ("file", "num_documents", "num_tokens", "num_bytes", "file_hash", "content_hash")


def _stream_info(stream: _Stream, shards: list[tuple[Shard, int, int]], dtype: str) -> StreamInfo:
    own = stream.dtype or dtype
    info = writer.stream_info(stream.source, stream.split, [shard for shard, _, _ in shards], own)
    return info if own == dtype else replace(info, dtype=own)


def _report(job: _Job) -> dict[str, Any]:
    """As a bake's: what each source has. Nothing is ever dropped."""
    ingredients: dict[str, Any] = {}
    for stream, shards in zip(job.streams, job.shards, strict=True):
        part = ingredients.setdefault(stream.source, {"rows_read": 0, "documents": 0, "tokens": 0, "dropped": {}})
        part["documents"] += sum(shard.num_documents for shard, _, _ in shards)
        part["tokens"] += sum(shard.num_tokens for shard, _, _ in shards)
        part["rows_read"] = part["documents"]
    return {"ingredients": ingredients, "errors": 0, "examples": [], "notes": job.notes}


def _free_version(to: Path, wanted: str, spec: dict[str, Any]) -> tuple[str, Path]:
    """The version to write, or that is there already. A complete one is never written again: jobs may read it.

    One that was damaged since is left where it is, and the next name is taken.
    """
    for number in itertools.count(1):
        version = wanted if number == 1 else f"{wanted}-{number}"
        folder = version_folder(to, version)
        if not (folder / "manifest.json").exists():
            break
        with contextlib.suppress(StoreError):
            if _is_as_written(Store(to, version=version), spec):
                break
    return version, folder


def _is_as_written(store: Store, spec: dict[str, Any]) -> bool:
    """Whether a version is what was asked for and whole: the files that it adopted were just read."""
    hashes = store.shards["file_hash"].to_pylist()
    return fingerprint(store.manifest.recipe) == fingerprint(spec) and all(
        fingerprint_file(store.shard_path(row)) == written for row, written in enumerate(hashes)
    )


@contextlib.contextmanager
def _whole_or_nothing(folder: Path) -> Iterator[None]:
    """Leave a store as it was, should the block fail; and nothing at all, where none was complete."""
    try:
        yield
    except BaseException:
        shutil.rmtree(folder if current_version(folder) is None else folder / "work", ignore_errors=True)
        raise


def _summary(to: Path, store: Store, job: _Job, seconds: float) -> str:
    """What was adopted, in a few lines."""
    lines = [
        f"{to}: adopted {store.num_rows:,} documents, {store.num_tokens:,} tokens in {len(job.read):,} "
        f"file{'s' if len(job.read) != 1 else ''}, where they lie, in {seconds:.1f} s"
    ]
    by_eos = [read for read in job.read if read.file.ends is None]
    if by_eos and job.vocabulary.eos is None:
        lines.append("  no id ends a document: each file is one")
    elif by_eos:
        place = "begin" if job.eos_first else "end"
        lines.append(f"  documents {place} with id {job.vocabulary.eos} ({job.vocabulary.eos_from})")
    return "\n".join(lines + [f"  note: {note}" for note in job.notes])
