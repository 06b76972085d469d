"""JSONL and pickle shards, decoded in full by a child process, so that the trainer's interpreter is free.

Columns come through shared memory. Rows through a pipe took two to ten times as long. The child is a new interpreter
that ends with its work, or with its parent.

Values are numbers, booleans, NumPy arrays, or nested lists of equal shape. A column's dtype is that of its arrays; of
plain numbers it is bool, int64 or float64, float64 if both are in one column.
"""

from __future__ import annotations

import gc
import gzip
import io
import math
import mmap
import os
import pickle
import zlib
from collections.abc import Iterator, Sequence
from typing import IO, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from batchwright.base.errors import SourceError, WorkerError
from batchwright.base.machine import limit_memory, shared_memory
from batchwright.base.processes import Worker
from batchwright.base.words import error_in_words
from batchwright.columns.shard import (
    DAMAGED,
    Column,
    Schema,
    ShardReader,
    Wanted,
    check_dtype,
    check_shape,
    chosen,
    column_error,
    other_shape,
    pieces,
    row_bytes,
    take_rows,
)

_CHILD_BYTES = 64 << 20
"""Bytes for an interpreter with NumPy, and for its reading and sending."""
_GROWTH = {"jsonl": 5, "pickle": 7}
"""Bytes that decoding takes for one of text or pickle, about: "0," becomes eight bytes, a
number in a pickled list an object and a place in a list."""
_GZIP_RATIO = 1032
"""The largest ratio of unpacked to packed size of a gzip file."""
_ZSTD_RATIO = 12
"""The assumed ratio of unpacked to packed size of a zstd file, which need not state its size."""


class RowShard(ShardReader):
    """A shard of Python values."""

    def __init__(self, path: str, kind: str, columns: Sequence[str] | None, budget: int | None) -> None:
        self.path = path
        memory = shared_memory(0)  # as long as the columns are, once that is known
        try:
            with Worker(decode_into, doing=f"decoding {path}", share=(memory,)) as worker:
                worker.send(memory, path, kind, columns, budget)
                self.rows, self.schema = worker.receive()
            self._columns = _columns_in(memory, self.schema, self.rows)
        except WorkerError as error:
            raise SourceError(
                f"{os.path.basename(path)} could not be decoded",
                file=path,
                reason=error.headline,
                remedy="if memory ran out: smaller shards; otherwise write it again",
            ) from error
        finally:
            os.close(memory)
        self.decode_bytes: int = max(expected_bytes(path, kind), _CHILD_BYTES + self.rows * row_bytes(self.schema))

    def chunks(self, wanted: Wanted, rows_per_chunk: int) -> Iterator[dict[str, NDArray[Any]]]:
        for rows in pieces(wanted, self.rows, rows_per_chunk):
            yield {name: take_rows(values, rows, 0) for name, values in self._columns.items()}

    def close(self) -> None:
        self._columns = {}


def _columns_in(memory: int, schema: Schema, rows: int) -> dict[str, NDArray[Any]]:
    offsets, num_bytes = column_offsets(schema, rows)
    if not num_bytes:
        return {name: np.empty((rows, *column.shape), column.dtype) for name, column in schema.items()}
    mapped = mmap.mmap(memory, num_bytes, access=mmap.ACCESS_READ)  # goes with the last array over it
    found = {}
    for name, column in schema.items():
        flat = np.frombuffer(mapped, column.dtype, rows * math.prod(column.shape), offsets[name])
        found[name] = flat.reshape(rows, *column.shape)
    return found


def expected_bytes(path: str, kind: str) -> int:
    """The approximate memory for decoding a shard, from its size, and the unpacked size stored in a gzip file."""
    with open(path, "rb") as file:
        size, begins = os.fstat(file.fileno()).st_size, file.read(4)
        unpacked = size
        if begins == ZSTD_MAGIC:
            unpacked = size * _ZSTD_RATIO
        elif begins.startswith(GZIP_MAGIC) and size >= 18:
            file.seek(-4, os.SEEK_END)
            said = int.from_bytes(file.read(4), "little")  # of 32 bits: a larger size is given modulo 2**32
            unpacked = said + -(-max(0, size - 64 - said) // 2**32) * 2**32
            unpacked = min(unpacked, size * _GZIP_RATIO)  # of a file that was cut, the last bytes say anything
    return _CHILD_BYTES + _GROWTH[kind] * unpacked


# The work of the child

BLOCK_ROWS = 1024
"""Rows that are turned into arrays at once."""
GZIP_MAGIC, ZSTD_MAGIC = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_READ_BYTES = 1 << 20
_EXACT = 2**53
"""Whole numbers beyond it are rounded by a float."""

Row = dict[str, Any]


class Decoded:
    """The columns of a shard, in blocks of rows."""

    def __init__(self, file: str, columns: Sequence[str] | None) -> None:
        self.file: str = file
        self.columns: Sequence[str] | None = columns
        self.blocks: dict[str, list[NDArray[Any]]] = {}
        self.starts: list[int] = [0]
        self.schema: Schema = {}

    def add(self, rows: list[Row]) -> None:
        first_row = self.starts[-1]
        if not first_row:
            _check_is_row(rows[0], 0, self.file)
            self.blocks = {name: [] for name in chosen(rows[0], self.columns, self.file)}
        names = self.blocks.keys()
        for number, row in enumerate(rows, first_row):
            _check_is_row(row, number, self.file)
            if row.keys() != names and (self.columns is None or not names <= row.keys()):
                raise _other_keys(row, set(names), number, self.file)
        for name, blocks in self.blocks.items():
            before = blocks[0].shape[1:] if blocks else None
            values = [row[name] for row in rows]
            blocks.append(_stacked(values, before, file=self.file, column=name, first_row=first_row))
        self.starts.append(first_row + len(rows))

    def finish(self) -> None:
        """Report the type of each column, after the last row."""
        for name, blocks in self.blocks.items():
            dtype = np.result_type(*{block.dtype for block in blocks})
            if dtype.kind == "f" and not any(block.dtype.kind == "f" for block in blocks):
                dtype = np.dtype(np.uint64)  # of int64 and uint64 NumPy would make float64
            if any(_would_change(block, dtype) for block in blocks):
                raise _too_big(self.file, name)
            dtype = check_dtype(dtype, file=self.file, column=name)
            self.schema[name] = Column(dtype, check_shape(blocks[0].shape[1:], file=self.file, column=name))

    def write(self, descriptor: int) -> None:
        """Write the columns into a file as `column_offsets` says, and free each written block."""
        offsets, num_bytes = column_offsets(self.schema, self.starts[-1])
        os.ftruncate(descriptor, num_bytes)
        for name, column in self.schema.items():
            at, blocks = offsets[name], self.blocks.pop(name)
            for number, block in enumerate(blocks):
                data = np.ascontiguousarray(block, column.dtype).reshape(-1).view(np.uint8).data
                at += _write_all(descriptor, data, at)
                blocks[number] = np.empty(0)


def decode(file: str, kind: str, columns: Sequence[str] | None) -> Decoded:
    """All of a shard."""
    decoded = Decoded(file, columns)
    for rows in _json_rows(file) if kind == "jsonl" else _pickled_rows(file):
        decoded.add(rows)
        rows.clear()
    decoded.finish()
    return decoded


def _write_all(descriptor: int, data: memoryview, offset: int) -> int:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)
    return done


def column_offsets(schema: Schema, rows: int) -> tuple[dict[str, int], int]:
    """Return (the offset of each column in shared memory, by name; the length of all)."""
    offsets, end = {}, 0
    for name, column in schema.items():
        offsets[name] = end
        end += -(-rows * column.num_bytes // 64) * 64
    return offsets, end


def decode_into(
    descriptor: int, file: str, kind: str, columns: Sequence[str] | None, budget: int | None
) -> tuple[int, Schema]:
    """The work of the child process: (rows, schema) of a shard, whose columns are then in the file of a descriptor."""
    gc.disable()  # it would look at millions of objects again and again, and none is garbage
    if budget is not None:
        limit_memory(budget)
    decoded = _within_memory(file, kind, columns)
    if decoded is None:
        room = "memory" if budget is None else f"{budget:,} bytes"
        remedy = "a larger max_memory_gb, smaller shards, or once: batchwright shards convert DIR OUT"
        raise SourceError(f"{os.path.basename(file)} does not fit in {room}", file=file, remedy=remedy)
    decoded.write(descriptor)
    return decoded.starts[-1], decoded.schema


def _within_memory(file: str, kind: str, columns: Sequence[str] | None) -> Decoded | None:
    try:
        return decode(file, kind, columns)
    except MemoryError:
        return None  # the decoded rows are freed here, so that there is room for the message


# Files


def _json_rows(file: str) -> Iterator[list[Row]]:
    """Blocks of rows, one a line. Empty lines do not count."""
    decoder = msgspec.json.Decoder()
    rows: list[Row] = []
    for number, line in enumerate(_lines(file)):
        try:
            rows.append(decoder.decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            remedy = DAMAGED
            if b"NaN" in line or b"Infinity" in line:  # Python's json writes these unasked
                remedy = "numbers in place of NaN and Infinity, which JSON does not have"
            what = f"row {number:,} is not JSON"
            raise SourceError(what, file=file, row=number, reason=error, remedy=remedy) from None
        if len(rows) == BLOCK_ROWS:
            yield rows
            rows = []
    if rows:
        yield rows


def _lines(file: str) -> Iterator[bytes]:
    try:
        with _unpacked(file) as stream:
            for number, line in enumerate(stream):
                text = line if number else line.removeprefix(b"\xef\xbb\xbf")
                if text and not text.isspace():
                    yield text
    except (OSError, EOFError, zlib.error) as error:
        raise SourceError(f"{os.path.basename(file)} is damaged", file=file, reason=error, remedy=DAMAGED) from None


def _unpacked(file: str) -> IO[bytes]:
    """A file's content, unpacked by how it begins and not by its name."""
    with open(file, "rb") as stream:
        begins = stream.read(4)
    if begins.startswith(GZIP_MAGIC):
        return io.BufferedReader(gzip.open(file), _READ_BYTES)
    if begins == ZSTD_MAGIC:
        import pyarrow as pa

        return io.BufferedReader(pa.input_stream(file, compression="zstd"), _READ_BYTES)
    return open(file, "rb", _READ_BYTES)


def _pickled_rows(file: str) -> Iterator[list[Row]]:
    """Blocks of `examples`. Each is freed as it is handed out."""
    try:
        with _unpacked(file) as stream:
            loaded = pickle.load(stream)
    except MemoryError:
        raise
    except Exception as error:  # a pickle can raise anything
        remedy = DAMAGED
        if isinstance(error, ImportError | AttributeError):
            remedy = "put the module of its classes on sys.path, or write it with plain arrays and numbers"
        what = f"{os.path.basename(file)} cannot be unpickled"
        raise SourceError(what, file=file, reason=error_in_words(error), remedy=remedy) from None
    examples = loaded.get("examples") if isinstance(loaded, dict) else loaded
    del loaded
    if not isinstance(examples, list | tuple):
        remedy = 'pickle {"examples": [{"board": ..., "value": ...}, ...]}, or the list alone'
        raise SourceError(f"{os.path.basename(file)} is no pickle of examples", file=file, remedy=remedy)
    left = list(reversed(examples))
    del examples
    while left:
        rows = left[: -BLOCK_ROWS - 1 : -1]
        del left[-BLOCK_ROWS:]
        yield rows


# Values


def _stacked(
    values: list[Any], before: tuple[int, ...] | None, *, file: str, column: str, first_row: int
) -> NDArray[Any]:
    """The values of some rows as one array. `before` is the shape of earlier rows."""
    array = _array_of(values)
    if array is not None and (before is None or array.shape[1:] == before):
        return array
    # A value is wrong: look row by row, to name its place.
    for row, value in enumerate(values, first_row):
        one = _array_of([value])
        if one is None:
            what = f"row {row:,} has {_in_words(value)} in column {column!r}"
            remedy = "write numbers, booleans or lists of equal shape"
            raise column_error(what, file=file, column=column, row=row, remedy=remedy)
        if before is not None and one.shape[1:] != before:
            raise other_shape(file, column, row, one.shape[1:], before)
        before = one.shape[1:]
    raise _too_big(file, column)


def _array_of(values: list[Any]) -> NDArray[Any] | None:
    """Values of one shape as one array of numbers in native byte order; None for everything else."""
    try:
        array = _of_arrays(values) if hasattr(values[0], "__array__") else _of_numbers(values)
    except (ValueError, TypeError, OverflowError):
        return None
    if array.dtype.kind not in "biuf":
        return None
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _of_arrays(values: list[Any]) -> NDArray[Any]:
    """Arrays, or tensors of any library."""
    arrays = [np.asarray(value) for value in values]
    shape = arrays[0].shape
    if any(array.shape != shape for array in arrays):
        raise ValueError("several shapes")
    stacked = np.concatenate(arrays, axis=None).reshape(len(arrays), *shape)
    if stacked.dtype.kind == "f" and any(_would_change(array, stacked.dtype) for array in arrays):
        raise ValueError("whole numbers and fractions")
    return stacked


def _of_numbers(values: list[Any]) -> NDArray[Any]:
    array = np.array(values)
    if array.dtype != np.float64 or (np.abs(array) < _EXACT).all():
        return array
    # NumPy makes floats of a large whole number beside others: uint64 holds them, if all are whole.
    flat = np.array(values, dtype=object).reshape(-1).tolist()
    is_whole = [isinstance(value, int | np.integer) for value in flat]
    if all(is_whole):
        return np.array(flat, dtype=np.uint64).reshape(array.shape)
    if any(whole and abs(int(value)) >= _EXACT for value, whole in zip(flat, is_whole, strict=True)):
        raise ValueError("whole numbers and fractions")
    return array


def _would_change(array: NDArray[Any], dtype: np.dtype[Any]) -> bool:
    """Whether integers of an array would change in this dtype: rounded, or negative in an unsigned dtype."""
    if array.dtype.kind not in "iu" or not array.size:
        return False
    if dtype.kind == "f":
        return bool(array.itemsize == 8 and (array.max() >= _EXACT or array.min() <= -_EXACT))
    return dtype.kind == "u" and array.dtype.kind == "i" and bool(array.min() < 0)


def _check_is_row(row: Any, number: int, file: str) -> None:
    if not isinstance(row, dict):
        what = f"row {number:,} is {_KINDS.get(type(row), type(row).__name__)}, not columns by name"
        raise SourceError(what, file=file, row=number, remedy='write each row as {"board": ..., "value": ...}')


_KINDS = {list: "a list", str: "text", int: "a number", float: "a number", bool: "a boolean", type(None): "no value"}


def _in_words(value: Any) -> str:
    match value:
        case None:
            return "no value"
        case str() | bytes():
            return "text"
        case int():
            return f"{value}, which is too big for 64 bits"
        case list() | tuple():
            return "lists of unequal length, or of something else than numbers"
    return f"an object of type {type(value).__name__}"


def _other_keys(row: Row, keys: set[str], number: int, file: str) -> SourceError:
    missing = keys - row.keys()
    name = min(missing or row.keys() - keys, key=str)
    what = f"no column {name!r}" if missing else f"a column {name!r} that rows before do not have"
    remedy = "give every row the same columns"
    return column_error(f"row {number:,} has {what}", file=file, column=name, row=number, remedy=remedy)


def _too_big(file: str, column: str) -> SourceError:
    what = f"column {column!r} has whole numbers that do not fit in one type of 64 bits"
    return column_error(what, file=file, column=column, remedy="write smaller numbers")
