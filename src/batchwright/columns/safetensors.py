"""safetensors shards. A JSON header has the place of each column; the columns follow. All sizes are checked first."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence

import msgspec
import numpy as np

from batchwright.base.errors import SourceError
from batchwright.columns.flat import FlatColumn, FlatShard, closed_on_error, read_at
from batchwright.columns.schema import DAMAGED, chosen, column_error, row_shape

__all__ = ["open_safetensors"]

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


def open_safetensors(path: str, columns: Sequence[str] | None) -> FlatShard:
    """One tensor a column, its first axis rows."""
    with closed_on_error() as opened:
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise SourceError(f"the file cannot be read: {error.strerror}", file=path, remedy=DAMAGED) from None
        opened.callback(os.close, descriptor)
        data_offset, tensors = _read_header(descriptor, path)

        def column_of(name: str) -> FlatColumn:
            tensor = tensors[name]
            dtype = _dtype_of(tensor, name, path)
            fill = functools.partial(_fill, descriptor, path, data_offset + tensor.data_offsets[0])
            shape = row_shape(tuple(tensor.shape), file=path, column=name)
            return FlatColumn(dtype, tensor.shape[0], shape, lambda: fill)

        return FlatShard(path, {name: column_of(name) for name in chosen(tensors, columns, path)}, opened)


def _read_header(descriptor: int, path: str) -> tuple[int, dict[str, _Tensor]]:
    """Return (the offset of the data, tensors). Tensors must follow one another to the end of the file."""
    size = os.fstat(descriptor).st_size
    length_field = bytearray(min(8, size))
    read_at(descriptor, memoryview(length_field), 0, file=path)
    length = int.from_bytes(length_field, "little")
    if size < 8 or length > min(_MOST_HEADER_BYTES, size - 8):
        raise _damaged(path, f"a header of {length:,} bytes in a file of {size:,}")
    header = bytearray(length)
    read_at(descriptor, memoryview(header), 8, file=path)
    try:
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        tensors = {name: msgspec.json.decode(entry, type=_Tensor) for name, entry in entries.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged(path, str(error)) from None
    at = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        begin, end = tensor.data_offsets
        if begin != at or end < begin or min(tensor.shape, default=0) < 0:
            raise _damaged(path, f"bytes {begin:,} to {end:,} of shape {tensor.shape}, after byte {at:,}", name)
        at = end
    if at != size - 8 - length:
        raise _damaged(path, f"{size - 8 - length:,} bytes of data, the header says {at:,}")
    return 8 + length, tensors


def _dtype_of(tensor: _Tensor, name: str, path: str) -> np.dtype[np.generic]:
    dtype, (begin, end) = _DTYPES.get(tensor.dtype), tensor.data_offsets
    if dtype is None:
        what = f"column {name!r} is {tensor.dtype}, which NumPy does not have"
        raise column_error(what, file=path, column=name, remedy="save it as F32 or F16")
    if math.prod(tensor.shape) * dtype.itemsize != end - begin:
        raise _damaged(path, f"shape {tensor.shape} of {tensor.dtype} in {end - begin:,} bytes", name)
    return dtype


def _fill(descriptor: int, path: str, begin: int, buffer: memoryview, offset: int) -> None:
    read_at(descriptor, buffer, begin + offset, file=path)


def _damaged(path: str, reason: str, column: str | None = None) -> SourceError:
    return SourceError("not a safetensors file, or damaged", file=path, column=column, reason=reason, remedy=DAMAGED)
