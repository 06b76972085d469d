"""safetensors: a JSON header that says where each column lies, then the columns. Every size is checked before use."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from batchwright.base.errors import SourceError
from batchwright.columns.flat import DAMAGED, SCRATCH_BYTES, RowReader, read_at
from batchwright.columns.schema import (
    Column,
    Schema,
    Wanted,
    check_shape,
    chosen,
    pieces,
    rows_of,
    sorted_schema,
    without,
)

__all__ = ["SafetensorsShard"]

_MOST_HEADER_BYTES = 100 << 20
"""The format's own limit."""
_DTYPES = {
    **{f"F{8 * size}": np.dtype(f"<f{size}") for size in (2, 4, 8)},
    **{f"I{8 * size}": np.dtype(f"<i{size}") for size in (1, 2, 4, 8)},
    **{f"U{8 * size}": np.dtype(f"<u{size}") for size in (1, 2, 4, 8)},
    "BOOL": np.dtype(np.bool_),
}


class _Tensor(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class SafetensorsShard:
    """One tensor a column, the first axis positions."""

    def __init__(self, path: str, columns: Sequence[str] | None) -> None:
        self.path = path
        self._descriptor = -1
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
            data_offset, tensors = self._read_header()
            self._open_columns(data_offset, tensors, columns)
        except OSError as error:
            raise SourceError(f"the file cannot be read: {error.strerror}", file=path, remedy=DAMAGED) from None
        except BaseException:
            self.close()
            raise

    def _read_header(self) -> tuple[int, dict[str, _Tensor]]:
        """Where the data begin, and what the header says of each tensor, which must follow one another to the end."""
        size = os.fstat(self._descriptor).st_size
        length_field = bytearray(min(8, size))
        read_at(self._descriptor, memoryview(length_field), 0, file=self.path)
        length = int.from_bytes(length_field, "little")
        if size < 8 or length > min(_MOST_HEADER_BYTES, size - 8):
            raise self._damaged(f"a header of {length:,} bytes in a file of {size:,}")
        header = bytearray(length)
        read_at(self._descriptor, memoryview(header), 8, file=self.path)
        try:
            raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
            raw.pop("__metadata__", None)
            tensors = {name: msgspec.json.decode(said, type=_Tensor) for name, said in raw.items()}
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise self._damaged(str(error)) from None
        at = 0
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
            begin, end = tensor.data_offsets
            if begin != at or end < begin or any(length < 0 for length in tensor.shape):
                raise self._damaged(f"bytes {begin:,} to {end:,} of shape {tensor.shape}, after byte {at:,}", name)
            at = end
        if at != size - 8 - length:
            raise self._damaged(f"{size - 8 - length:,} bytes of data, the header says {at:,}")
        return 8 + length, tensors

    def _open_columns(self, data_offset: int, tensors: dict[str, _Tensor], columns: Sequence[str] | None) -> None:
        self._places: dict[str, tuple[int, np.dtype[Any]]] = {}
        found: dict[str, Column] = {}
        rows: dict[str, int] = {}
        for name in chosen(tensors, columns, self.path):
            tensor = tensors[name]
            dtype, shape, (begin, end) = _DTYPES.get(tensor.dtype), tuple(tensor.shape), tensor.data_offsets
            if dtype is None:
                raise SourceError(
                    f"column {name!r} is {tensor.dtype}, which NumPy does not have",
                    file=self.path,
                    column=name,
                    remedy=f"save it as F32 or F16, or {without(name)}",
                )
            if math.prod(shape) * dtype.itemsize != end - begin:
                raise self._damaged(f"shape {shape} of {tensor.dtype} in {end - begin:,} bytes", name)
            if not shape:
                raise SourceError(
                    f"column {name!r} is a single value, not one for each row",
                    file=self.path,
                    column=name,
                    remedy=f"save an array of one value a row, or {without(name)}",
                )
            found[name] = Column(dtype.newbyteorder("="), check_shape(shape[1:], file=self.path, column=name))
            rows[name] = shape[0]
            self._places[name] = (data_offset + begin, dtype)
        self.rows: int = rows_of(rows, file=self.path)
        self.schema: Schema = sorted_schema(found)
        self.decode_bytes: int = 2 * SCRATCH_BYTES * len(found)

    def _damaged(self, reason: str, column: str | None = None) -> SourceError:
        return SourceError(
            "not a safetensors file, or damaged", file=self.path, column=column, reason=reason, remedy=DAMAGED
        )

    def chunks(self, wanted: Wanted, rows_per_chunk: int) -> Iterator[dict[str, NDArray[Any]]]:
        readers = {
            name: RowReader(
                functools.partial(self._fill, offset), dtype, self.schema[name].shape, self.rows, rows_per_chunk
            )
            for name, (offset, dtype) in self._places.items()
        }
        for piece in pieces(wanted, self.rows, rows_per_chunk):
            yield {name: reader.take(piece) for name, reader in readers.items()}

    def _fill(self, column_offset: int, buffer: memoryview, offset: int) -> None:
        read_at(self._descriptor, buffer, column_offset + offset, file=self.path)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> SafetensorsShard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
