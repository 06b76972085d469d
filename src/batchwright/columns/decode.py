"""Rows of Python values (JSONL, pickle) as columns. Runs in a child process, which keeps what it has decoded.

Values are numbers, booleans, NumPy arrays, or nested lists of equal shape. A column's dtype is that of its arrays; of
plain numbers it is bool, int64 or float64, float64 where both are in one column.
"""

from __future__ import annotations

import gc
import gzip
import math
import mmap
import os
import pickle
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from batchwright.base.errors import SourceError
from batchwright.base.machine import limit_memory
from batchwright.columns.flat import DAMAGED
from batchwright.columns.schema import (
    Column,
    Schema,
    Wanted,
    check_dtype,
    check_shape,
    chosen,
    parts_of,
    sorted_schema,
    without,
)

__all__ = ["BLOCK_ROWS", "Decoded", "answer", "decode", "layout", "views"]

BLOCK_ROWS = 1024
"""Rows that are turned into arrays at once."""
_READ_BYTES = 1 << 20
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"

Row = dict[str, Any]


class Decoded:
    """The columns of a shard, in blocks of rows, as they were met."""

    def __init__(self, file: str, columns: Sequence[str] | None) -> None:
        self.file, self.columns = file, columns
        self.names: list[str] = []
        self.keys: set[str] | None = None
        """Of every row; not looked at where the columns are named."""
        self.blocks: dict[str, list[NDArray[Any]]] = {}
        self.starts: list[int] = [0]
        self.schema: Schema = {}

    def add(self, rows: list[Row]) -> None:
        first_row = self.starts[-1]
        if not first_row:
            _check_is_row(rows[0], 0, self.file)
            _check_names(rows[0], self.file)
            self.names = chosen(rows[0], self.columns, self.file)
            self.keys = set(self.names) if self.columns is None else None
            self.blocks = {name: [] for name in self.names}
        for number, row in enumerate(rows, first_row):
            _check_is_row(row, number, self.file)
            if self.keys is not None and row.keys() != self.keys:
                raise _other_keys(row, self.keys, number, self.file)
        for name in self.names:
            try:
                values = [row[name] for row in rows]
            except KeyError:
                number = next(number for number, row in enumerate(rows, first_row) if name not in row)
                raise _other_keys(rows[number - first_row], {name}, number, self.file) from None
            before = self.blocks[name][0].shape[1:] if self.blocks[name] else None
            self.blocks[name].append(_stacked(values, before, file=self.file, column=name, first_row=first_row))
        self.starts.append(first_row + len(rows))

    def finish(self) -> None:
        """No more rows: what each column is."""
        found = {}
        for name, blocks in self.blocks.items():
            dtype = np.result_type(*{block.dtype for block in blocks})
            if dtype.kind == "f" and not any(block.dtype.kind == "f" for block in blocks):  # int64 and uint64
                if any((block < 0).any() for block in blocks if block.dtype.kind == "i"):
                    raise _too_big(self.file, name)
                dtype = np.dtype(np.uint64)
            elif dtype.kind == "f" and any(_has_big_number(block) for block in blocks):
                raise _too_big(self.file, name)
            dtype = check_dtype(dtype, file=self.file, column=name)
            found[name] = Column(dtype, check_shape(blocks[0].shape[1:], file=self.file, column=name))
        self.schema = sorted_schema(found)

    def put(self, piece: Wanted, into: dict[str, NDArray[Any]]) -> int:
        """Copy rows into columns that have room for them. How many there were."""
        stop = 0
        for block, rows in parts_of(piece, self.starts):
            start = stop
            for name, column in into.items():
                values = self.blocks[name][block][rows]
                stop = start + len(values)
                column[start:stop] = values
        return stop


def decode(file: str, kind: str, columns: Sequence[str] | None) -> Decoded:
    """All of a shard."""
    decoded = Decoded(file, columns)
    for rows in _json_rows(file) if kind == "jsonl" else _pickled_rows(file):
        decoded.add(rows)
        rows.clear()
    decoded.finish()
    return decoded


def layout(schema: Schema, rows: int) -> tuple[dict[str, int], int]:
    """Where in shared memory the column of each name begins, with room for so many rows, and how long all is."""
    offsets, end = {}, 0
    for name, column in schema.items():
        offsets[name] = end
        end += -(-rows * column.num_bytes // 64) * 64
    return offsets, end


def views(memory: mmap.mmap, schema: Schema, rows: int) -> dict[str, NDArray[Any]]:
    """The columns in shared memory."""
    offsets, _ = layout(schema, rows)
    return {
        name: np.frombuffer(memory, column.dtype, rows * math.prod(column.shape), offsets[name]).reshape(
            rows, *column.shape
        )
        for name, column in schema.items()
    }


class Child:
    """What the child process remembers: the shard that it decoded, and the memory through which rows go."""

    def __init__(self) -> None:
        self.decoded: Decoded | None = None
        self.room: dict[str, NDArray[Any]] = {}

    def open(self, file: str, kind: str, columns: Sequence[str] | None, budget: int | None) -> tuple[int, Schema]:
        gc.disable()  # it would look at millions of objects again and again, of which none is garbage
        if budget is not None:
            limit_memory(budget)
        self.decoded = _within_memory(file, kind, columns)
        if self.decoded is None:
            raise SourceError(
                f"{os.path.basename(file)} does not fit in {'memory' if budget is None else f'{budget:,} bytes'}",
                file=file,
                remedy="a larger max_memory_gb, smaller shards, or once: batchwright shards convert DIR OUT",
            )
        return self.decoded.starts[-1], self.decoded.schema

    def share(self, descriptor: int, rows: int) -> None:
        assert self.decoded is not None
        memory = mmap.mmap(descriptor, layout(self.decoded.schema, rows)[1])
        self.room = views(memory, self.decoded.schema, rows)

    def put(self, piece: Wanted) -> int:
        assert self.decoded is not None
        return self.decoded.put(piece, self.room)


_child = Child()


def answer(what: str, *given: Any) -> Any:
    """What the child is asked: `open` a shard, `share` memory, then `put` rows there."""
    return getattr(_child, what)(*given)


def _within_memory(file: str, kind: str, columns: Sequence[str] | None) -> Decoded | None:
    try:
        return decode(file, kind, columns)
    except MemoryError:
        return None  # what was decoded is let go of here, so that there is room for saying it


def _json_rows(file: str) -> Iterator[list[Row]]:
    """Blocks of rows, one a line. Empty lines are none."""
    decoder = msgspec.json.Decoder()
    rows: list[Row] = []
    for number, line in enumerate(_lines(file)):
        try:
            rows.append(decoder.decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            # Python's json writes these unasked
            has_nan = any(word in line for word in (b"NaN", b"Infinity"))
            remedy = "numbers in place of NaN and Infinity, which JSON does not have" if has_nan else DAMAGED
            raise SourceError(
                f"row {number:,} is not JSON", file=file, row=number, reason=error, remedy=remedy
            ) from None
        if len(rows) == BLOCK_ROWS:
            yield rows
            rows = []
    if rows:
        yield rows


def _lines(file: str) -> Iterator[bytes]:
    rest: list[bytes] = []  # of a line that is longer than what is read at once
    is_first = True
    try:
        with _unpacked(file) as stream:
            while part := stream.read(_READ_BYTES):
                if is_first:
                    part, is_first = part.removeprefix(b"\xef\xbb\xbf"), False
                *lines, last = part.split(b"\n")
                if lines:
                    lines[0], rest = b"".join((*rest, lines[0])), []
                    yield from (line for line in lines if line and not line.isspace())
                rest.append(last)
    except (OSError, EOFError, zlib.error) as error:
        raise _damaged(file, error) from None
    last = b"".join(rest)
    if last and not last.isspace():
        yield last


def _unpacked(file: str) -> Any:
    """A file's content, unpacked by how it begins and not by its name."""
    with open(file, "rb") as stream:
        begins = stream.read(4)
    if begins.startswith(_GZIP):
        return gzip.open(file)
    if begins == _ZSTD:
        import pyarrow as pa

        return pa.input_stream(file, compression="zstd")
    return open(file, "rb")


def _pickled_rows(file: str) -> Iterator[list[Row]]:
    """Blocks of `examples`, which are let go of as they are handed out."""
    try:
        with _unpacked(file) as stream:
            held = pickle.load(stream)
    except MemoryError:
        raise
    except Exception as error:  # a pickle raises what it likes
        remedy = DAMAGED
        if isinstance(error, ImportError | AttributeError):
            remedy = "put the module of its classes on sys.path, or write it with plain arrays and numbers"
        reason = f"{type(error).__name__}: {error}"
        raise SourceError(
            f"{os.path.basename(file)} cannot be unpickled", file=file, reason=reason, remedy=remedy
        ) from None
    examples = held.get("examples") if isinstance(held, dict) else held
    held = None
    if not isinstance(examples, list | tuple):
        raise SourceError(
            f"{os.path.basename(file)} is no pickle of examples",
            file=file,
            remedy='pickle {"examples": [{"board": ..., "value": ...}, ...]}, or the list alone',
        )
    left = list(reversed(examples))
    examples = None
    while left:
        rows = left[: -BLOCK_ROWS - 1 : -1]
        del left[-BLOCK_ROWS:]
        yield rows


def _stacked(
    values: list[Any], before: tuple[int, ...] | None, *, file: str, column: str, first_row: int
) -> NDArray[Any]:
    """The values of some rows as one array. `before`: the shape that rows before these have."""
    array = _at_once(values)
    if array is not None and (before is None or array.shape[1:] == before):
        return array
    # Something is wrong: row by row, to say where.
    for row, value in enumerate(values, first_row):
        one = _at_once([value])
        if one is None:
            raise SourceError(
                f"row {row:,} has {_in_words(value)} in column {column!r}",
                file=file,
                row=row,
                column=column,
                remedy=f"write numbers, booleans or lists of equal shape, or {without(column)}",
            )
        if before is not None and one.shape[1:] != before:
            raise SourceError(
                f"row {row:,} of column {column!r} has shape {one.shape[1:]}, the rows before have {before}",
                file=file,
                row=row,
                column=column,
                remedy=f"pad it to one shape, or {without(column)}",
            )
        before = one.shape[1:]
    raise _too_big(file, column)


def _at_once(values: list[Any]) -> NDArray[Any] | None:
    """Values of one shape as one array of numbers in native byte order; None where they are something else."""
    try:
        if not isinstance(values[0], np.ndarray | np.generic) and hasattr(values[0], "__array__"):  # tensors
            values = [np.asarray(value) for value in values]
        if all(isinstance(value, np.ndarray) and value.ndim for value in values):
            if any(value.shape != values[0].shape for value in values):
                return None
            array = np.concatenate(values).reshape(len(values), *values[0].shape)
            is_exact = array.dtype.kind != "f" or not any(map(_has_big_number, values))
        else:
            array = np.array(values)
            is_exact = array.dtype != np.float64 or bool((np.abs(array) < 2**53).all())
            if not is_exact:
                array, is_exact = _without_loss(array, np.array(values, dtype=object).reshape(-1).tolist())
    except (ValueError, TypeError, OverflowError):
        return None
    if array.dtype.kind not in "biuf" or not is_exact:
        return None
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _has_big_number(array: NDArray[Any]) -> bool:
    """Whether an array has whole numbers that a float cannot surely hold."""
    if array.dtype.kind not in "iu" or array.dtype.itemsize < 8 or not array.size:
        return False
    return bool(array.max() >= 2**53 or array.min() <= -(2**53))


def _without_loss(array: NDArray[Any], flat: list[Any]) -> tuple[NDArray[Any], bool]:
    """Large numbers that became floats, and whether they are what they were: whole ones become uint64 if they can."""
    big = [abs(int(value)) >= 2**53 for value in flat if isinstance(value, int | np.integer)]
    if any(big) and len(big) == len(flat):
        return np.array(flat, dtype=np.uint64).reshape(array.shape), True
    return array, not any(big)


def _check_is_row(row: Any, number: int, file: str) -> None:
    if not isinstance(row, dict):
        raise SourceError(
            f"row {number:,} is {_KINDS.get(type(row), type(row).__name__)}, not columns by name",
            file=file,
            row=number,
            remedy='write each row as {"board": ..., "value": ...}',
        )


_KINDS = {list: "a list", str: "text", int: "a number", float: "a number", bool: "a boolean", type(None): "no value"}


def _check_names(row: Row, file: str) -> None:
    for name in row:
        if not isinstance(name, str):
            raise SourceError(f"a column is called {name!r}", file=file, row=0, remedy="names are text")


def _in_words(value: Any) -> str:
    if value is None:
        return "no value"
    if isinstance(value, str | bytes):
        return "text"
    if isinstance(value, int):
        return f"{value}, which is too big for 64 bits"
    if isinstance(value, list | tuple):
        return "lists of unequal length, or of something else than numbers"
    return f"an object of type {type(value).__name__}"


def _other_keys(row: Row, keys: set[str], number: int, file: str) -> SourceError:
    missing = keys - row.keys()
    name = min(missing or row.keys() - keys, key=str)
    what = f"no column {name!r}" if missing else f"a column {name!r} that rows before do not have"
    return SourceError(
        f"row {number:,} has {what}",
        file=file,
        row=number,
        column=name,
        remedy=f"give every row the same columns, or {without(name)}",
    )


def _too_big(file: str, column: str) -> SourceError:
    return SourceError(
        f"column {column!r} has whole numbers that do not fit in one type of 64 bits",
        file=file,
        column=column,
        remedy=f"write smaller numbers, or {without(column)}",
    )


def _damaged(file: str, error: Exception) -> SourceError:
    return SourceError(f"{os.path.basename(file)} is damaged", file=file, reason=error, remedy=DAMAGED)
