"""Adoption of existing token files: a store over them, without a copy.

Each file is read once: for its hash, for ids outside the vocabulary, and for the borders of documents. The store keeps
the borders. The tokens are mapped from the user's files whenever the store is used.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import DTypeLike

from batchwright.base.checks import local_path, one_of
from batchwright.base.errors import SpecError, StoreError, TokenizerError
from batchwright.base.files import exclusive, out_of_space_at, sync_folder
from batchwright.base.fingerprint import fingerprint
from batchwright.base.progress import Progress, progress, say
from batchwright.base.words import counted
from batchwright.prepare.tokenize import tokenize
from batchwright.prepare.tokenizers import resolve_tokenizer
from batchwright.sources.tokens import Range, TokenFile, TokenScan, list_token_files, open_token_file, token_dtype
from batchwright.store import layout, writer
from batchwright.store.adopted import path_beside
from batchwright.store.layout import Manifest, Shard, StreamInfo, check_source_name
from batchwright.store.reader import Store
from batchwright.store.versions import free_version
from batchwright.typing import TokenizerLike

__all__ = ["adopt"]

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
FileGroups = dict[tuple[str, str], list[str]]
"""The paths of each (source, split). A source without files of some split has an empty list, as in a bake."""

_SPLITS = ("train", "val")
_SPLIT_WORDS = {"train": "train", "val": "val", "valid": "val", "validation": "val"}


@dataclass(frozen=True, slots=True)
class _ReadFile:
    """One file after its pass."""

    file: TokenFile
    modified_ns: int
    content_hash: str
    shards: list[Shard]
    first_bytes: list[int]
    """The byte of the file where each shard begins."""


@dataclass(frozen=True, slots=True)
class _Stream:
    """The files of one source and split, in order."""

    source: str
    split: str
    files: list[TokenFile]
    read: list[_ReadFile] = field(default_factory=list)

    @property
    def shards(self) -> list[Shard]:
        return [shard for read in self.read for shard in read.shards]

    @property
    def dtype(self) -> str:
        """The dtype of all files; empty without files."""
        return next((file.dtype.name for file in self.files), "")


def _group_files(
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


def _check_files(streams: Sequence[_Stream], asked: np.dtype[Any] | None) -> None:
    """Refuse files of two types in one stream, a file in two streams, and a dtype= that no file can have."""
    files = [file for stream in streams for file in stream.files]
    other = next((file for file in files if file.dtype != asked), None)
    if asked is not None and other is not None and all(file.format != "bin" for file in files):
        what = f"dtype={asked.name} was asked for, and the file says {other.dtype.name}"
        remedy = "leave dtype= out: it is for files of raw ids"
        raise SpecError(what, parameter="dtype", file=other.path, remedy=remedy)
    seen: dict[str, _Stream] = {}
    for stream in streams:
        for file in stream.files:
            if file.dtype.name != stream.dtype:
                what = f"files of one source have ids of {stream.dtype} and of {file.dtype.name}"
                remedy = "as sources of their own: {'a': ..., 'b': ...}"
                raise SpecError(what, source=stream.source, file=file.path, remedy=remedy)
            first = seen.setdefault(file.path, stream)
            if first is not stream:
                there = f"{first.source} ({first.split}), {stream.source} ({stream.split})"
                what = "this file is in two places of one store"
                raise SpecError(what, file=file.path, there=there, remedy="one of them")


def _default_folder(path: Any, groups: FileGroups) -> Path:
    """The store's folder, beside the data and named after it."""
    if isinstance(path, str | os.PathLike):
        whole = os.path.abspath(local_path(path=path))
        if os.path.exists(whole) or os.path.exists(f"{whole}.bin"):
            return Path(f"{_stem(whole)}.store")
    folders = [os.path.dirname(path) for paths in groups.values() for path in paths]
    names = "-".join(dict.fromkeys(source for source, _ in groups))
    return Path(os.path.commonpath(folders)) / f"{names}.store"


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
    """Make a store over existing token files, without copying them, and open it.

    adopt("data/train.bin", tokenizer="tokenizer.json")                      nanoGPT: raw ids
    adopt("data/", tokenizer="tokenizer.json")                               train.bin and val.bin become two splits
    adopt({"web": "web_text_document", "code": "code.npy"}, tokenizer=...)   two sources, to be mixed by weights
    adopt("a.npy", tokenizer="bytes", val="b.npy", eos="none")               no id ends a document

    - The files are read once and never changed. An id outside the vocabulary is an error that names its place.
    - In formats without borders of documents, `eos` (an id or a token; else what `bw.tokenize` would take) ends each
      document; with `eos_first` it begins each one. `eos="none"`: a file is one document.
    - `to` is by default a folder beside the data, named after it with `.store`.
    - The same tokens and borders give the same fingerprints and plans, wherever the files are.
    - `path`: the files, of one source or of several by name. `name`, `split`: of its one source. `val`: the files of
      split "val". `tokenizer`: the one that made the ids, with `vocab_size` for a function.
    - `dtype` and `format` of the files, if the files do not say. `show_progress=False` is quiet.
    - A file that is missing, or has another size or time than before, is refused when the store is opened.
    """
    started = time.monotonic()
    vocabulary = _vocabulary(tokenizer, eos, vocab_size)
    asked = None if dtype is None else token_dtype(dtype)
    dtype_of_bin = asked or np.dtype("uint16" if vocabulary.size <= 1 << 16 else "uint32")
    groups = _group_files(path, val, split, name)
    streams = [
        _Stream(source, side, [open_token_file(file, dtype=dtype_of_bin, format=format) for file in files])
        for (source, side), files in groups.items()
    ]
    _check_files(streams, asked)
    if vocabulary.unclear is not None and any(file.ends is None for stream in streams for file in stream.files):
        raise vocabulary.unclear
    if to is None:
        to = _default_folder(path, groups)
    folder = Path(os.path.abspath(local_path(to=to)))
    layout.refuse_other_folders(folder, adopted=True)
    job = _Job(folder, vocabulary, eos_first, streams)
    with (
        out_of_space_at(folder, then="run the same call again"),
        exclusive(folder / ".lock", doing="adopting into"),
        _all_or_nothing(folder),
    ):
        layout.mark_as_store(folder, adopted=True)  # under the lock: another process may have finished since we looked
        store = _adopt_version(job, show_progress)
    say(_summary(job, store, time.monotonic() - started), show=show_progress)
    return store


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The meaning of the ids."""

    tokenizer: Any
    size: int
    eos: int | None = None
    eos_from: str | None = None
    unclear: TokenizerError | None = None
    """The reason why no id ends documents: an error only for files that need one."""

    def info(self) -> dict[str, Any]:
        """The tokenizer's entry in the manifest."""
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
        what = "'chars' has no vocabulary until a bake has seen the text"
        remedy = "the tokenizer.json in the version folder of the store that was baked with it"
        raise TokenizerError(what, parameter="tokenizer", remedy=remedy)
    own_eos = getattr(resolved, "eos_id", None)
    size = int(resolved.vocab_size)
    if own_eos is not None:
        size = max(size, int(own_eos) + 1)
    if eos == "none":
        return _Vocabulary(resolved, size)
    try:
        step = tokenize(resolved, append_eos=True, eos=eos)
    except TokenizerError as error:
        if eos is not None:
            raise
        remedy = f"{error.remedy}; or eos='none': each file is one document"
        return _Vocabulary(resolved, size, unclear=TokenizerError(error.headline, **error.where, remedy=remedy))
    return _Vocabulary(resolved, max(size, step.vocab_size), step.eos_id, step.eos_from)


@dataclass(slots=True)
class _Job:
    """One call of `adopt`, and its results so far."""

    to: Path
    vocabulary: _Vocabulary
    eos_first: bool
    streams: list[_Stream]
    notes: list[str] = field(default_factory=list)

    @property
    def files(self) -> list[_ReadFile]:
        return [read for stream in self.streams for read in stream.read]


def _adopt_version(job: _Job, show: bool) -> Store:
    work = job.to / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    total = sum(file.num_bytes for stream in job.streams for file in stream.files)
    with progress(f"adopting into {job.to}", total, show=show) as done:
        for stream in job.streams:
            names = (f"{stream.source}-{stream.split}-{number:05d}.arrow" for number in itertools.count())
            for file in stream.files:
                stream.read.append(_read_file(job, stream, file, map(work.joinpath, names), done))
    spec = _spec(job)
    version = free_version(job.to, fingerprint(spec)[:12], lambda name: _is_undamaged(job.to, name, spec))
    folder = layout.version_folder(job.to, version)
    if not (folder / "manifest.json").exists():
        shutil.rmtree(folder, ignore_errors=True)  # of a call that was killed
        folder.parent.mkdir(exist_ok=True)
        os.rename(work, folder)
        sync_folder(folder.parent)
        _write_tables(job, folder, spec).save(folder)
    layout.point_to(job.to, version, adopted=True)
    shutil.rmtree(work, ignore_errors=True)
    store = Store(job.to)
    store.check()
    return store


def _read_file(job: _Job, stream: _Stream, file: TokenFile, paths: Iterator[Path], done: Progress) -> _ReadFile:
    eos, vocab_size = job.vocabulary.eos, job.vocabulary.size
    scan = TokenScan(file, vocab_size=vocab_size, eos=eos, eos_first=job.eos_first, advance=done.advance)
    number, shards, first_bytes = len(job.files), [], []
    for documents in scan.ranges(max_tokens=writer.MAX_SHARD_TOKENS):
        shards.append(_write_borders(next(paths), stream, documents, number))
        first_bytes.append(file.offset + documents.start * file.dtype.itemsize)
    if file.note:
        job.notes.append(file.note)
    if file.ends is None and scan.begins_with_eos and not job.eos_first:
        hint = "if documents begin with it, eos_first=True (--eos-first)"
        job.notes.append(f"{os.path.basename(file.path)} begins with id {eos}: {hint}")
    return _ReadFile(file, scan.modified_ns, scan.content_hash, shards, first_bytes)


def _write_borders(path: Path, stream: _Stream, documents: Range, file: int) -> Shard:
    """A shard without tokens. Its content hash is that of a baked shard with the same documents."""
    count = len(documents.ends)
    offsets = np.concatenate([[0], documents.ends - documents.start]).astype(np.int32)
    documents.content.update(offsets.view(np.uint8).data)  # which has hashed the tokens
    return writer.write_shard(
        path,
        stream.source,
        stream.split,
        tokens=None,
        offsets=offsets,
        file=np.full(count, file, np.int32),
        row=np.arange(documents.first_row, documents.first_row + count, dtype=np.int64),
        content_hash=documents.content.hexdigest(),
    )


def _spec(job: _Job) -> dict[str, Any]:
    """The identity of the version: another path, time, byte, name or tokenizer gives another one."""
    streams = []
    for each in job.streams:
        first_bytes = [first for read in each.read for first in read.first_bytes]
        content = [[shard.content_hash, first] for shard, first in zip(each.shards, first_bytes, strict=True)]
        streams.append({"source": each.source, "split": each.split, "dtype": each.dtype, "content": content})
    return {
        "adopted": streams,
        "files": [[read.file.path, read.file.format, read.modified_ns, read.content_hash] for read in job.files],
        "tokenizer": job.vocabulary.info(),
        "eos_first": job.eos_first,
    }


def _is_undamaged(to: Path, version: str, spec: dict[str, Any]) -> bool:
    """Whether a version has the content that was read, and all its own bytes."""
    with contextlib.suppress(StoreError):
        store = Store(to, version=version)
        is_same = fingerprint(store.manifest.recipe) == fingerprint(spec)
        return is_same and all(store.undamaged_shard(row) for row in range(len(store.shards["num_bytes"])))
    return False


def _write_tables(job: _Job, folder: Path, spec: dict[str, Any]) -> Manifest:
    dtype = next(stream.dtype for stream in job.streams if stream.files)
    streams = [
        writer.stream_info(each.source, each.split, each.shards, each.dtype or dtype, default=dtype)
        for each in job.streams
    ]
    files = [
        {
            "path": read.file.path,
            "name": os.path.basename(read.file.path),
            "beside": path_beside(read.file.path, job.to),
            "source": stream.source,
            "format": read.file.format,
            "num_bytes": read.file.num_bytes,
            "modified_ns": read.modified_ns,
            "content_hash": read.content_hash,
        }
        for stream in job.streams
        for read in stream.read
    ]
    return writer.write_version_tables(
        folder,
        shards=[stream.shards for stream in job.streams],
        shard_columns={
            "data_file": np.repeat(np.arange(len(files), dtype=np.int32), [len(read.shards) for read in job.files]),
            "data_offset": np.array([first for read in job.files for first in read.first_bytes], np.int64),
        },
        files=files,
        units={"key": pa.array([], pa.string())},
        tokenizer=job.vocabulary.tokenizer,
        info=job.vocabulary.info(),
        version=folder.name,
        streams=streams,
        token_dtype=dtype,
        recipe=spec,
        report=_report(streams, job.notes),
        format=layout.ADOPTED_FORMAT,
        adopted=True,
    )


def _report(streams: list[StreamInfo], notes: list[str]) -> dict[str, Any]:
    """The report, in the form of a bake's. Nothing is ever dropped."""
    ingredients: dict[str, Any] = {}
    for stream in streams:
        part = ingredients.setdefault(stream.source, {"rows_read": 0, "documents": 0, "tokens": 0, "dropped": {}})
        part["rows_read"] += stream.num_documents
        part["documents"] += stream.num_documents
        part["tokens"] += stream.num_tokens
    return {"ingredients": ingredients, "errors": 0, "examples": [], "notes": notes}


@contextlib.contextmanager
def _all_or_nothing(folder: Path) -> Iterator[None]:
    """Restore a store if the block fails; remove the folder if it has no complete version."""
    try:
        yield
    except BaseException:
        shutil.rmtree(folder / "work", ignore_errors=True)
        if layout.current_version(folder) is None:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _summary(job: _Job, store: Store, seconds: float) -> str:
    files = counted(len(job.files), "file")
    documents, tokens = f"{store.num_rows:,} documents", f"{store.num_tokens:,} tokens"
    lines = [f"{job.to}: adopted {documents}, {tokens} in {files} in place, in {seconds:.1f} s"]
    if any(read.file.ends is None for read in job.files):
        place = "begin" if job.eos_first else "end"
        line = f"  documents {place} with id {job.vocabulary.eos} ({job.vocabulary.eos_from})"
        if job.vocabulary.eos is None:
            line = "  no id ends a document: each file is one"
        lines.append(line)
    return "\n".join(lines + [f"  note: {note}" for note in job.notes])
