"""Parquet files as rows: only the columns that are needed, a few megabytes at a time, a bad row group at a time.

A row group belongs to the byte range where its share of the file begins. In a file of F bytes, a row group with b of B
bytes of data before it belongs to the range with byte b*F//B.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchwright.base.words import first_line
from batchwright.columns.arrow import open_parquet
from batchwright.sources.arrow_rows import count_only, faults_in_names, has_map, needed_names, rows_of
from batchwright.sources.formats import Malformed, Row

__all__ = ["read_parquet"]

_BATCH_ROWS = 4096
_BATCH_BYTES = 8 << 20
"""Bytes decoded at once, by the size of rows in the file."""
_DAMAGE = (pa.ArrowException, OSError)


def read_parquet(
    path: Path, *, columns: Sequence[str] | None = None, start: int = 0, stop: int | None = None
) -> Iterator[Row | Malformed]:
    fault = _fault_of_ends(path)
    if fault is not None:
        yield fault
        return
    try:
        opened = open_parquet(path)
    except _DAMAGE as error:
        yield Malformed("damaged Parquet file", first_line(error), rest=True)
        return
    with opened as file:
        if not file.metadata.num_rows:
            if not start:
                yield Malformed("empty file", "a table without rows", rows=0)
            return
        leaves = _needed_leaves(file, columns)
        for group in _row_groups(file.metadata, path.stat().st_size, start, stop):
            yield from _read_row_group(file, group, leaves, columns)


def _fault_of_ends(path: Path) -> Malformed | None:
    """The fault that the first and last bytes show. Parquet begins and ends with its own four letters."""
    with open(path, "rb") as file:
        begins = file.read(4)
        file.seek(max(0, os.fstat(file.fileno()).st_size - 4))
        ends = file.read(4)
    match begins, ends:
        case b"PAR1", b"PAR1":
            return None
        case b"PARE", b"PARE":
            return Malformed("encrypted Parquet file", "its footer is encrypted, and there is no key", rest=True)
        case b"PAR1", _:
            return Malformed("truncated Parquet file", "it has no footer", rest=True)
    return Malformed("not a Parquet file", f"it begins with {begins!r}", rest=True)


def _row_groups(metadata: Any, file_bytes: int, start: int, stop: int | None) -> Iterator[int]:
    """The row groups of a byte range.

    By the sizes of row groups in the footer: pyarrow ends the process if it is asked where a column is, and that is
    damaged.
    """
    sizes = [max(0, metadata.row_group(number).total_byte_size) for number in range(metadata.num_row_groups)]
    before, total = 0, max(1, sum(sizes))
    for number, size in enumerate(sizes):
        at = before * file_bytes // total
        if at >= start and (stop is None or at < stop):
            yield number
        before += size


def _read_row_group(
    file: Any, group: int, leaves: list[str] | None, columns: Sequence[str] | None
) -> Iterator[Row | Malformed]:
    about = file.metadata.row_group(group)
    if count_only(columns):
        yield from ({} for _ in range(about.num_rows))
        return
    row_bytes = max(1, about.total_byte_size // max(about.num_rows, 1))
    at_once = max(1, min(_BATCH_ROWS, _BATCH_BYTES // row_bytes))
    missing = about.num_rows
    try:
        for batch in file.iter_batches(at_once, row_groups=[group], columns=leaves, use_threads=False):
            fault = faults_in_names(batch.schema.names, about.num_rows)
            if fault is not None:
                yield fault
                return
            yield from rows_of(batch)
            missing -= batch.num_rows
    except _DAMAGE as error:
        reason = first_line(error)
        yield Malformed(_kind_of_fault(error, reason), f"row group {group:,}: {reason}", rows=missing)
    else:
        if missing > 0:
            yield Malformed("corrupt row group", f"row group {group:,} ends early", rows=missing)


def _kind_of_fault(error: Exception, reason: str) -> str:
    if "crypt" in reason:
        return "encrypted row group"
    if isinstance(error, pa.ArrowNotImplementedError) or "not supported" in reason or "codec" in reason.lower():
        return "unsupported row group"
    return "corrupt row group"


def _needed_leaves(file: Any, columns: Sequence[str] | None) -> list[str] | None:
    """The leaves of nested columns that must be read, as the file calls them; None means all."""
    names = needed_names(file.schema_arrow.names, columns)
    if names is None or columns is None:
        return None
    longest = [column for column in columns if not any(other.startswith(f"{column}.") for other in columns)]
    leaves = [file.schema.column(number).path for number in range(len(file.schema))]
    needed: list[str] = []
    for field in file.schema_arrow:
        if field.name in names:
            mine = [leaf for leaf in leaves if f"{leaf}.".startswith(f"{field.name}.")]
            paths = [path for path in longest if f"{path}.".startswith(f"{field.name}.")]
            # Keys and values of maps can only be read together.
            needed += _leaves_on_paths(mine, paths, is_whole=has_map(field.type))
    return needed


def _leaves_on_paths(leaves: list[str], paths: list[str], *, is_whole: bool) -> list[str]:
    """The leaves that some paths lead to. All of them if a path leads nowhere: the error that follows names them.

    A path names neither the levels of lists that a file has nor, in a leaf, the numbers of items.

    >>> _leaves_on_paths(["turns.list.element.who", "turns.list.element.text"], ["turns.0.who"], is_whole=False)
    ['turns.list.element.who']
    """
    found: set[str] = set()
    for path in paths:
        keys = [key for key in path.split(".") if not key.isdecimal()]
        on_path = {leaf for leaf in leaves if _is_subsequence(keys, leaf.split("."))}
        if is_whole or not on_path:
            return leaves
        found |= on_path
    return [leaf for leaf in leaves if leaf in found]


def _is_subsequence(keys: list[str], parts: list[str]) -> bool:
    rest = iter(parts)
    return all(key in rest for key in keys)
