"""Parquet files as rows: only the columns that are needed, a few megabytes at a time, a bad row group at a time.

A row group belongs to the byte range where its share of the file begins: one that has b of B bytes of data before it,
in a file of F bytes, to the one that holds byte b*F//B.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from batchwright.sources.arrow import count_only, faults_in_names, needed_names, rows_of
from batchwright.sources.formats import Malformed, Row, register_format

__all__: list[str] = []

_BATCH_ROWS = 4096
_BATCH_BYTES = 8 << 20
"""Decoded at once, as far as the file says how large rows are."""
_BUFFER_BYTES = 1 << 20
"""Read at once of each column, so that a huge row group need not be in memory."""


@register_format("parquet", extensions=(".parquet", ".pq"), by_file=True, version="1")
def read_parquet(
    path: Path, *, columns: Sequence[str] | None = None, start: int = 0, stop: int | None = None
) -> Iterator[Row | Malformed]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    fault = _fault_of_ends(path)
    if fault is not None:
        yield fault
        return
    try:
        opened = pq.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        yield Malformed("damaged Parquet file", _first_line(error), rest=True)
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
    """What the first and last bytes say. Parquet begins and ends with its own four letters."""
    with open(path, "rb") as file:
        begins = file.read(4)
        file.seek(max(0, os.fstat(file.fileno()).st_size - 4))
        ends = file.read(4)
    if begins == ends == b"PAR1":
        return None
    if begins == ends == b"PARE":
        return Malformed("encrypted Parquet file", "its footer is encrypted, and there is no key", rest=True)
    if begins == b"PAR1":
        return Malformed("truncated Parquet file", "it has no footer", rest=True)
    return Malformed("not a Parquet file", f"it begins with {begins!r}", rest=True)


def _row_groups(metadata: Any, file_bytes: int, start: int, stop: int | None) -> Iterator[int]:
    """The row groups of a byte range.

    By what the footer says of whole groups: asking pyarrow where a column lies ends the process if that is damaged.
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
    import pyarrow as pa

    about = file.metadata.row_group(group)
    if count_only(columns):
        yield from ({} for _ in range(about.num_rows))
        return
    row_bytes = max(1, about.total_byte_size // max(about.num_rows, 1))
    at_once = max(1, min(_BATCH_ROWS, _BATCH_BYTES // row_bytes))
    given = 0
    try:
        for batch in file.iter_batches(at_once, row_groups=[group], columns=leaves, use_threads=False):
            fault = faults_in_names(batch.schema.names, about.num_rows)
            if fault is not None:
                yield fault
                return
            yield from rows_of(batch)
            given += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        yield _fault_of_group(error, group, about.num_rows - given)
    else:
        if given < about.num_rows:
            yield Malformed("corrupt row group", f"row group {group:,} ends early", rows=about.num_rows - given)


def _fault_of_group(error: Exception, group: int, rows: int) -> Malformed:
    import pyarrow as pa

    reason = _first_line(error)
    kind = (
        "encrypted row group"
        if "crypt" in reason
        else "unsupported row group"
        if isinstance(error, pa.ArrowNotImplementedError) or "not supported" in reason or "codec" in reason.lower()
        else "corrupt row group"
    )
    return Malformed(kind, f"row group {group:,}: {reason}", rows=rows)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


# Which leaves of nested columns are needed


def _needed_leaves(file: Any, columns: Sequence[str] | None) -> list[str] | None:
    """The leaves that must be read, as the file calls them; None means all."""
    schema = file.schema_arrow
    names = needed_names(schema.names, columns)
    if names is None or columns is None:
        return None
    chosen: list[bool] = []
    whole = [column for column in columns if not any(other.startswith(f"{column}.") for other in columns)]
    for field in schema:
        inner = [path[len(field.name) + 1 :] for path in whole if path.startswith(f"{field.name}.")]
        chosen += _choose(field.type, inner) if field.name in names else [False] * len(_choose(field.type, []))
    if len(chosen) != len(file.schema):  # a type whose leaves are counted in another way
        return None
    return [file.schema.column(number).path for number, is_needed in enumerate(chosen) if is_needed]


def _choose(kind: Any, paths: Sequence[str]) -> list[bool]:
    """For each leaf of a type, whether some paths need it. All of them where a path leads nowhere: the error that
    follows names what there is."""
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if pa.types.is_map(kind):
        return [True] * (len(_choose(kind.key_type, [])) + len(_choose(kind.item_type, [])))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        after = [_without_number(path) for path in paths]
        return _choose(kind.value_type, [] if "" in after else after)
    if not pa.types.is_struct(kind):
        return [True]
    fields = [kind.field(number) for number in range(kind.num_fields)]
    inner = {field.name: [_inside(path, field.name) for path in paths] for field in fields}
    leads = all(any(found[n] is not None for found in inner.values()) for n in range(len(paths)))
    chosen: list[bool] = []
    for field in fields:
        rest = [path for path in inner[field.name] if path is not None]
        is_needed = not paths or not leads or bool(rest)
        below = _choose(field.type, [] if not leads or "" in rest else rest)
        chosen += below if is_needed else [False] * len(below)
    return chosen


def _without_number(path: str) -> str:
    """
    >>> _without_number("0.text"), _without_number("text"), _without_number("7")
    ('text', 'text', '')
    """
    first, _, rest = path.partition(".")
    return rest if first.isdecimal() else path


def _inside(path: str, name: str) -> str | None:
    """What is left of a path inside a column; None where it does not lead into it."""
    return "" if path == name else path[len(name) + 1 :] if path.startswith(f"{name}.") else None
