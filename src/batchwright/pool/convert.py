"""Conversion of shards to a format that reads fast, one file per shard, with a measure of the gain.

    convert("games", "games_npz", allow_pickle=True)        # games/shard_0007.pkl.gz -> games_npz/shard_0007.npz

A shard appears whole or not at all, and only after it was read back and found equal. A second call continues: shards
made from the same input stay unchanged. Memory: the columns of one shard, and the memory for reading its input.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from batchwright.base.checks import local_path, one_of
from batchwright.base.errors import SourceError, SpecError
from batchwright.base.files import exclusive, out_of_space_at, publish, write_whole
from batchwright.base.machine import available_bytes
from batchwright.base.progress import progress
from batchwright.columns.arrow import numpy_to_arrow
from batchwright.columns.shard import Column, Schema, ShardReader, content_mark, open_shard, peek
from batchwright.pool.shard_files import ShardFile, extension_of, number_of, shards_in

__all__ = ["Conversion", "convert"]

FORMATS = ("npz", "safetensors", "arrow", "parquet")

_MANIFEST, _LOCK, _UNFINISHED = ".batchwright-convert.json", ".batchwright-convert.lock", ".batchwright-convert"
_ROWS_AT_ONCE = 8192
_ROWS_PER_GROUP = 65_536
"""Rows per group in Arrow and Parquet. A group is found without reading the rows before it."""
_MEASURE_SECONDS = 3.0

Columns = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class ConvertedShard:
    """One shard before and after conversion."""

    number: int
    input: str
    output: str
    rows: int
    schema: Schema
    bytes_before: int
    bytes_after: int
    was_there: bool
    """Made by an earlier call from the same input."""


@dataclass(frozen=True, slots=True)
class ReadingSpeed:
    """Rows a second, read through `open_shard`, inputs and outputs alike out of the page cache, one after another."""

    before: float
    after: float
    num_shards: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class Conversion:
    """The result of `convert`."""

    directory: str
    out: str
    to: str
    shards: tuple[ConvertedShard, ...]
    seconds: float
    speed: ReadingSpeed | None
    """None if no shard has a row."""


def convert(
    directory: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    to: str = "npz",
    columns: Sequence[str] | None = None,
    allow_pickle: bool = False,
    shard_range: str = "all",
    force: bool = False,
    show_progress: bool = True,
) -> Conversion:
    """Write every shard of a range into the folder `out`, under the same name with another extension.

    `npz` and `arrow` are not compressed; `parquet` is (zstd). What is in `out` and was not made by this function is
    written over with `force` only.
    """
    one_of(FORMATS, to=to)
    began = time.perf_counter()
    source, target = str(local_path(directory=directory)), local_path(out=out)
    _check_folders(source, target)
    found = shards_in(source, shard_range, parameter="shard_range")
    for shard in found:  # faults that headers show are reported before anything is written
        peek(shard.path, allow_pickle=allow_pickle, columns=columns)
    names = {shard.number: _name_for(shard.path, to) for shard in found}
    with out_of_space_at(target):
        target.mkdir(parents=True, exist_ok=True)
    with out_of_space_at(target), exclusive(target / _LOCK, doing="converting shards into"):
        made = _Manifest(target, columns)
        _check_outputs(target, names, made, force)
        done = []
        total = sum(os.path.getsize(shard.path) for shard in found)
        try:
            with progress("converting", total, show=show_progress) as ahead:
                for shard in found:
                    done.append(_convert_one(shard, target, names[shard.number], made, allow_pickle))
                    ahead.advance(done[-1].bytes_before, f"shard {shard.number}")
        finally:
            shutil.rmtree(target / _UNFINISHED, ignore_errors=True)
    seconds = time.perf_counter() - began
    speed = _measure([(one.input, one.output) for one in done if one.rows], columns, allow_pickle)
    return Conversion(source, os.fspath(out), to, tuple(done), seconds, speed)


def _convert_one(shard: ShardFile, target: Path, name: str, made: _Manifest, allow_pickle: bool) -> ConvertedShard:
    # A cheap mark of content and age. Only parts of the file are hashed, so other parts may have changed.
    path, mark = target / name, f"{content_mark(shard.path)}-{os.stat(shard.path).st_mtime_ns}"
    was_there = made.is_from(name, mark) and made.is_ours(name)
    if not was_there:
        part = target / _UNFINISHED / name  # the same extension: it is read back before it gets its place
        part.parent.mkdir(exist_ok=True)
        # A shard that does not fit in memory is an error with its name, before the machine ends a process for it.
        budget = available_bytes()
        with open_shard(shard.path, allow_pickle=allow_pickle, columns=made.columns, budget=budget) as opened:
            columns = _read(opened)
        if not columns:  # of JSON and pickles, where only rows define the columns
            what = f"{os.path.basename(shard.path)} has no rows, and so no columns"
            raise SourceError(what, file=shard.path, remedy="leave its number out of --range (shard_range=)")
        with open(part, "wb") as file:
            _WRITERS[path.suffix](file, columns)
            file.flush()
            os.fsync(file.fileno())
        _check_written(part, columns, shard.path, path)
        path.unlink(missing_ok=True)  # before the manifest is written: a kill leaves no file that looks right
        made.add(name, shard.path, mark, content_mark(part))
        publish(part, path)
    header = peek(path)
    assert header.rows is not None
    assert header.schema is not None
    return ConvertedShard(
        number=shard.number,
        input=shard.path,
        output=str(path),
        rows=header.rows,
        schema=header.schema,
        bytes_before=os.path.getsize(shard.path),
        bytes_after=os.path.getsize(path),
        was_there=was_there,
    )


def _numbered_chunks(shard: ShardReader) -> Iterator[tuple[slice, Columns]]:
    """(numbers of its rows, columns) of each chunk of a shard."""
    first = 0
    for chunk in shard.chunks(slice(0, None), _ROWS_AT_ONCE):
        stop = first + len(next(iter(chunk.values())))
        yield slice(first, stop), chunk
        first = stop


def _read(shard: ShardReader) -> Columns:
    """All columns of a shard, in full."""
    columns = {name: np.empty((shard.rows, *column.shape), column.dtype) for name, column in shard.schema.items()}
    for rows, chunk in _numbered_chunks(shard):
        for name, values in chunk.items():
            columns[name][rows] = values
    return columns


# Folders


class _Manifest:
    """The manifest: the files of the folder and the content behind each. It is written before a file appears."""

    def __init__(self, folder: Path, columns: Sequence[str] | None) -> None:
        self.folder = folder
        self.columns = None if columns is None else sorted(columns)
        try:
            said = json.loads((folder / _MANIFEST).read_text())
            self._files: dict[str, dict[str, Any]] = dict(said["files"])
        except (OSError, ValueError, KeyError, TypeError):
            self._files = {}  # the files there are unknown, so none is skipped or written over

    def is_ours(self, name: str) -> bool:
        """Whether a file exists, unchanged since it was made."""
        path = self.folder / name
        said = self._files.get(name)
        return said is not None and path.is_file() and content_mark(path) == said.get("mark")

    def is_from(self, name: str, mark: str) -> bool:
        said = self._files.get(name, {})
        return said.get("input_mark") == mark and said.get("columns") == self.columns

    def add(self, name: str, source: str, source_mark: str, mark: str) -> None:
        self._files[name] = {
            "input": os.path.basename(source),
            "input_mark": source_mark,
            "columns": self.columns,
            "mark": mark,
        }
        text = json.dumps({"version": 1, "files": self._files}, indent=0)
        write_whole(self.folder / _MANIFEST, text.encode())


def _check_folders(source: str, target: Path) -> None:
    if os.path.realpath(source) == os.path.realpath(target):
        what = "shards are not converted into the folder that they are in: numbers would be there twice"
        _refuse(what, f"another folder, such as {os.path.normpath(source)}_converted", directory=source)
    if target.exists() and not target.is_dir():
        what = "shards are written into a folder, and this is a file"
        _refuse(what, f"another name, such as {target}_shards", file=target)


def _refuse(what: str, remedy: str, **where: Any) -> NoReturn:
    raise SpecError(what, parameter="out", **where, remedy=remedy)


def _name_for(path: str, to: str) -> str:
    name = os.path.basename(path)
    return name[: len(name) - len(extension_of(name) or "")] + f".{to}"


def _check_outputs(target: Path, names: dict[int, str], made: _Manifest, force: bool) -> None:
    """Refuse to write over files of others, and to end with a number twice."""
    with os.scandir(target) as entries:
        there = sorted(entry.name for entry in entries if not entry.name.startswith(".") and extension_of(entry.name))
    for name in there:
        number = number_of(name)
        wanted = None if number is None else names.get(number)
        if wanted not in (None, name):
            remedy = f"move {name} away, or convert into another folder"
            _refuse(f"shard {number} is in this folder already, as {name}", remedy, folder=target, file=name)
        if wanted == name and not force and not made.is_ours(name):
            what = f"{name} is in this folder already, and was not made by converting, or was changed since"
            _refuse(what, "another folder, or --force (force=True) to write over it", folder=target, file=name)


def _check_written(part: Path, columns: Columns, source: str, path: Path) -> None:
    """Refuse a file whose content differs, byte for byte, from the columns to write."""
    reason = "it reads as something else"
    try:
        with open_shard(part) as shard:
            if _is_same(shard, columns):
                return
    except SourceError as error:
        reason = error.headline
    others = ", ".join(kind for kind in FORMATS if kind != path.suffix[1:])
    what = f"{os.path.basename(source)} cannot be written as {path.suffix[1:]}"
    remedy = f"another format ({others}), or only columns that it can hold"
    raise SourceError(what, file=source, columns=", ".join(columns), reason=reason, remedy=remedy)


def _is_same(shard: ShardReader, columns: Columns) -> bool:
    expected = {name: Column(values.dtype, values.shape[1:]) for name, values in columns.items()}
    if shard.schema != expected or shard.rows != len(next(iter(columns.values()))):
        return False
    for rows, chunk in _numbered_chunks(shard):
        for name, values in chunk.items():
            if np.ascontiguousarray(values).tobytes() != columns[name][rows].tobytes():  # a NaN is not equal to itself
                return False
    return True


# Formats


def _write_npz(file: Any, columns: Columns) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, values in columns.items():
            member = zipfile.ZipInfo(f"{name}.npy")  # of 1980: the same columns are the same bytes
            with archive.open(member, "w", force_zip64=True) as stream:
                npy.write_array(stream, values, allow_pickle=False)


def _write_safetensors(file: Any, columns: Columns) -> None:
    kinds = {"f": "F", "i": "I", "u": "U"}
    header, at = {}, 0
    for name, values in columns.items():
        kind = "BOOL" if values.dtype.kind == "b" else f"{kinds[values.dtype.kind]}{8 * values.dtype.itemsize}"
        header[name] = {"dtype": kind, "shape": values.shape, "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that every library can map the numbers
    file.write(len(text).to_bytes(8, "little") + text)
    for values in columns.values():
        file.write(np.ascontiguousarray(values.astype(values.dtype.newbyteorder("<"), copy=False)).data)


def _write_arrow(file: Any, columns: Columns) -> None:
    import pyarrow as pa

    table = _table(columns)
    with pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=_ROWS_PER_GROUP)


def _write_parquet(file: Any, columns: Columns) -> None:
    import pyarrow.parquet as pq

    pq.write_table(_table(columns), file, row_group_size=_ROWS_PER_GROUP, compression="zstd")


def _table(columns: Columns) -> Any:
    """Arrays of more than one axis as lists of fixed size, inside each other: every reader of Arrow has those."""
    import pyarrow as pa

    return pa.table({name: numpy_to_arrow(values) for name, values in columns.items()})


_WRITERS: dict[str, Callable[[Any, Columns], None]] = {
    ".npz": _write_npz,
    ".safetensors": _write_safetensors,
    ".arrow": _write_arrow,
    ".parquet": _write_parquet,
}


# Speed


def _measure(
    pairs: Sequence[tuple[str, str]], columns: Sequence[str] | None, allow_pickle: bool
) -> ReadingSpeed | None:
    """The speed of reading some inputs and their outputs: as many as take a few seconds, at least one.

    Every file is read once before, as bytes, so that neither side waits for a disk that the other one did not.
    """
    rows = count = 0
    before = after = 1e-9
    for source, output in pairs:
        before += _seconds_of_reading(source, columns=columns, allow_pickle=allow_pickle)
        after += _seconds_of_reading(output)
        rows, count = rows + (peek(output).rows or 0), count + 1
        if before + after > _MEASURE_SECONDS:
            break
    if not count:
        return None
    return ReadingSpeed(rows / before, rows / after, count, rows)


def _seconds_of_reading(path: str, **options: Any) -> float:
    """The seconds to copy each row once, as a pool does. Some formats hand out rows that were not read yet."""
    with open(path, "rb", buffering=0) as file:
        buffer = bytearray(1 << 20)
        while file.readinto(buffer):
            pass
    began = time.perf_counter()
    with open_shard(path, **options) as shard:
        room = {name: np.empty((_ROWS_AT_ONCE, *column.shape), column.dtype) for name, column in shard.schema.items()}
        for chunk in shard.chunks(slice(0, None), _ROWS_AT_ONCE):
            for name, values in chunk.items():
                room[name][: len(values)] = values
    return time.perf_counter() - began
