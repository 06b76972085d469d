"""Arrow IPC files (file and stream format, which HF datasets on disk are) as rows, mapped and not copied.

A record batch of the file format belongs to the byte range where its share of the file begins: batch i of n of F bytes
to the one that holds byte i*F//n. One of the stream format belongs to the range where its first byte lies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from batchwright.sources.formats import Malformed, Row, register_format

__all__ = ["count_only", "faults_in_names", "needed_names", "rows_of"]

_PIECE_ROWS = 1024
_PIECE_BYTES = 4 << 20
"""Arrow data that becomes Python objects at once: they take several times as much."""


@register_format("arrow", extensions=(".arrow", ".feather", ".ipc"), by_file=True, version="1")
def read_arrow(
    path: Path, *, columns: Sequence[str] | None = None, start: int = 0, stop: int | None = None
) -> Iterator[Row | Malformed]:
    import pyarrow as pa

    with pa.memory_map(str(path)) as file:
        size = file.size()
        begins = file.read(8)
        file.seek(0)
        if begins.startswith(b"FEA1"):
            yield Malformed("not an Arrow IPC file", "Feather version 1: write it again as version 2", rest=True)
        elif begins.startswith(b"ARROW1"):
            yield from _read_file(file, size, columns, start, stop)
        else:
            yield from _read_stream(file, size, columns, start, stop)


def _read_file(
    file: Any, size: int, columns: Sequence[str] | None, start: int, stop: int | None
) -> Iterator[Row | Malformed]:
    import pyarrow as pa

    try:
        reader = pa.ipc.open_file(file)
    except (pa.ArrowException, OSError) as error:
        yield Malformed("truncated or damaged Arrow file", _first_line(error), rest=True)
        return
    count, num_rows = reader.num_record_batches, 0
    for number in range(count):
        if start <= number * size // count and (stop is None or number * size // count < stop):
            try:
                batch = reader.get_batch(number)
            except (pa.ArrowException, OSError) as error:
                yield Malformed("damaged record batch", f"record batch {number:,}: {_first_line(error)}", rest=True)
                return
            num_rows += batch.num_rows
            yield from _rows_of_batch(batch, columns)
    if start == 0 and stop is None and not num_rows:
        yield Malformed("empty file", "a table without rows", rows=0)


def _read_stream(
    file: Any, size: int, columns: Sequence[str] | None, start: int, stop: int | None
) -> Iterator[Row | Malformed]:
    import pyarrow as pa

    try:
        reader = pa.ipc.open_stream(file)
    except (pa.ArrowException, OSError) as error:
        yield Malformed("not an Arrow IPC file", _first_line(error), rest=True)
        return
    number = num_rows = 0
    while stop is None or file.tell() < stop:
        at = file.tell()
        try:
            batch = reader.read_next_batch()
        except StopIteration:
            if not start and not num_rows:
                yield Malformed("empty file", "a table without rows", rows=0)
            return
        except (pa.ArrowException, OSError) as error:
            if at >= start:  # one range tells it: those after it fail at the same batch, and have no rows
                reason = f"record batch {number:,}, at byte {at:,} of {size:,}: {_first_line(error)}"
                yield Malformed("truncated or damaged Arrow stream", reason, rest=True)
            return
        number, num_rows = number + 1, num_rows + batch.num_rows
        if at >= start:
            yield from _rows_of_batch(batch, columns)


def _rows_of_batch(batch: Any, columns: Sequence[str] | None) -> Iterator[Row | Malformed]:
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


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


# What Parquet files and tables in memory need too


def count_only(columns: Sequence[str] | None) -> bool:
    """Whether no column is needed: only how many rows there are."""
    return columns is not None and not columns


def needed_names(names: Sequence[str], columns: Sequence[str] | None) -> set[str] | None:
    """Those of a table's columns that are needed. All of them (None) where one is missing, so that its error can name
    what there is.

    >>> sorted(needed_names(["id", "text", "meta"], ["meta", "meta.title", "text"]))
    ['meta', 'text']
    >>> needed_names(["id", "text"], ["txet"]) is None
    True
    """
    if columns is None:
        return None
    for column in columns:
        keys = column.split(".")
        if not any(".".join(keys[:n]) in names for n in range(1, len(keys) + 1)) and not any(
            longer.startswith(f"{column}.") for longer in columns
        ):
            return None
    return set(names) & set(columns)


def faults_in_names(names: Sequence[str], num_rows: int) -> Malformed | None:
    """Two columns of one name cannot be one row."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    if not twice:
        return None
    return Malformed("two columns have one name", ", ".join(map(repr, twice)), rest=True, rows=num_rows)


def rows_of(batch: Any, *, check: bool = False) -> Iterator[Row | Malformed]:
    """The rows of a record batch as dicts of Python values, a piece at a time; a row that has no such value is a fault.

    `check` looks at every offset and character first: what is mapped from a file was never looked at.
    """
    batch = _as_python_has_it(batch)
    # `nbytes` follows the offsets inside a batch, which may lead anywhere before they were looked at.
    num_bytes = batch.get_total_buffer_size() if check else batch.nbytes
    at_once = max(1, min(_PIECE_ROWS, _PIECE_BYTES * batch.num_rows // max(num_bytes, 1)))
    for first in range(0, batch.num_rows, at_once):
        yield from _values(batch.slice(first, at_once), check)


def _values(piece: Any, check: bool) -> list[Row | Malformed]:
    import pyarrow as pa

    try:
        if check:
            piece.validate(full=True)
        return _to_pylist(piece)
    except (
        ValueError,
        OverflowError,
        pa.ArrowException,
    ) as error:  # UnicodeDecodeError and ArrowInvalid are ValueErrors
        if piece.num_rows == 1:
            return [_fault_of(piece, error)]
        return [row for number in range(piece.num_rows) for row in _values(piece.slice(number, 1), check)]


def _to_pylist(piece: Any) -> list[Any]:
    import pyarrow as pa

    if any(_has(field.type, pa.types.is_map) for field in piece.schema):
        rows: list[Any] = piece.to_pylist(maps_as_pydicts="lossy")
        return rows
    columns = [_python_values(column) for column in piece.columns]
    names = piece.schema.names
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)] or [
        {} for _ in range(piece.num_rows)
    ]


def _python_values(column: Any) -> list[Any]:
    import pyarrow as pa

    return _arrays_of(column) if isinstance(column.type, pa.FixedShapeTensorType) else column.to_pylist()


def _arrays_of(column: Any) -> list[Any]:
    """The values of a column of tensors: each an array of its shape, where Arrow would give a flat list."""
    import pyarrow as pa

    kind, storage = column.type, column.storage
    size = storage.type.list_size
    flat = storage.values.slice(storage.offset * size, len(column) * size)
    if flat.null_count:  # those of rows that are null; otherwise NumPy would be given floats
        flat = flat.fill_null(False if pa.types.is_boolean(flat.type) else 0)
    arrays = flat.to_numpy(zero_copy_only=False).reshape(len(column), *kind.shape)
    if kind.permutation is not None:
        arrays = arrays.transpose(0, *(axis + 1 for axis in kind.permutation))
    is_null = column.is_null().to_pylist() if column.null_count else [False] * len(column)
    # Copies: each row is its reader's own, and may be changed.
    return [None if null else array.copy() for null, array in zip(is_null, arrays, strict=True)]


def _fault_of(row: Any, error: Exception) -> Malformed:
    """Which column of a row has no Python value, and why."""
    import pyarrow as pa

    for name, column in zip(row.schema.names, row.columns, strict=True):
        try:
            column.validate(full=True)
            column.to_pylist()
        except (ValueError, OverflowError, pa.ArrowException) as found:
            if isinstance(found, UnicodeDecodeError) or "UTF8" in str(found):
                return Malformed("not UTF-8", f"column {name!r}{_bad_byte(column)}")
            return Malformed("malformed row", f"column {name!r}: {_first_line(found)}")
    return Malformed("malformed row", _first_line(error))


def _bad_byte(column: Any) -> str:
    import pyarrow as pa

    try:
        data = column.cast(pa.large_binary())[0].as_py()
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        return f", byte 0x{data[error.start]:02x} at {error.start:,}"
    except (pa.ArrowException, AttributeError):  # text inside a list or a struct
        pass
    return ""


def _has(kind: Any, is_wanted: Any) -> bool:
    if is_wanted(kind):
        return True
    return any(_has(kind.field(n).type, is_wanted) for n in range(kind.num_fields))


def _as_python_has_it(batch: Any) -> Any:
    """Nanoseconds as microseconds: otherwise it would depend on an installed pandas what a time is."""
    import pyarrow as pa

    for number, field in enumerate(batch.schema):
        kind = field.type
        if pa.types.is_timestamp(kind) and kind.unit == "ns":
            to = pa.timestamp("us", kind.tz)
        elif pa.types.is_duration(kind) and kind.unit == "ns":
            to = pa.duration("us")
        else:
            continue
        batch = batch.set_column(number, pa.field(field.name, to), batch.column(number).cast(to, safe=False))
    return batch
