"""Arrow IPC files (file and stream format, which HF datasets on disk are) as rows, mapped and not copied.

A record batch of the file format belongs to the byte range where its share of the file begins. In a file of F bytes,
batch i of n belongs to the range with byte i*F//n. A batch of the stream format belongs to the range of its first byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchwright.base.words import first_line
from batchwright.columns.arrow import open_ipc
from batchwright.sources.arrow_rows import count_only, faults_in_names, needed_names, rows_of
from batchwright.sources.formats import Malformed, Row

__all__ = ["read_arrow"]

_DAMAGE = (pa.ArrowException, OSError)


def read_arrow(
    path: Path, *, columns: Sequence[str] | None = None, start: int = 0, stop: int | None = None
) -> Iterator[Row | Malformed]:
    num_rows = 0
    with pa.memory_map(str(path)) as file:
        for batch in _batches(file, start, stop):
            if isinstance(batch, Malformed):
                yield batch
                return
            num_rows += batch.num_rows
            yield from _rows_of_batch(batch, columns)
    if start == 0 and stop is None and not num_rows:
        yield Malformed("empty file", "a table without rows", rows=0)


def _batches(file: Any, start: int, stop: int | None) -> Iterator[pa.RecordBatch | Malformed]:
    is_file = file.read(6) == b"ARROW1"
    file.seek(0)
    try:
        reader = open_ipc(file)
    except _DAMAGE as error:
        kind = "truncated or damaged Arrow file" if is_file else "not an Arrow IPC file"
        yield Malformed(kind, first_line(error), rest=True)
        return
    if is_file:
        yield from _batches_of_file(reader, file.size(), start, stop)
    else:
        yield from _batches_of_stream(reader, file, start, stop)


def _batches_of_file(reader: Any, size: int, start: int, stop: int | None) -> Iterator[pa.RecordBatch | Malformed]:
    for number in range(reader.num_record_batches):
        at = number * size // reader.num_record_batches
        if start <= at and (stop is None or at < stop):
            try:
                batch = reader.get_batch(number)
            except _DAMAGE as error:
                yield Malformed("damaged record batch", f"record batch {number:,}: {first_line(error)}", rest=True)
                return
            yield batch


def _batches_of_stream(reader: Any, file: Any, start: int, stop: int | None) -> Iterator[pa.RecordBatch | Malformed]:
    number = 0
    while stop is None or file.tell() < stop:
        at = file.tell()
        try:
            batch = reader.read_next_batch()
        except StopIteration:
            return
        except _DAMAGE as error:
            if at >= start:  # one range tells it: those after it fail at the same batch, and have no rows
                reason = f"record batch {number:,}, at byte {at:,} of {file.size():,}: {first_line(error)}"
                yield Malformed("truncated or damaged Arrow stream", reason, rest=True)
            return
        number += 1
        if at >= start:
            yield batch


def _rows_of_batch(batch: pa.RecordBatch, columns: Sequence[str] | None) -> Iterator[Row | Malformed]:
    try:
        names = needed_names(batch.schema.names, columns)
    except UnicodeDecodeError:
        yield Malformed("truncated or damaged Arrow file", "the name of a column is not UTF-8", rest=True)
        return
    if count_only(columns):
        yield from ({} for _ in range(batch.num_rows))
        return
    if names is not None:
        batch = batch.select([i for i, name in enumerate(batch.schema.names) if name in names])
    fault = faults_in_names(batch.schema.names, batch.num_rows)
    if fault is not None:
        yield fault
    else:
        yield from rows_of(batch, check=True)
