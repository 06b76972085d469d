"""The header of an array in NumPy's format, read without unpickling anything and with a limit on its length."""

from __future__ import annotations

import io
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

__all__ = ["read_npy_header"]

_MOST_BYTES = 10_000
"""NumPy's own limit."""
_READERS = {
    (1, 0): npy.read_array_header_1_0,
    (2, 0): npy.read_array_header_2_0,
    (3, 0): npy.read_array_header_2_0,  # differs only in the names of fields, which are refused later
}


def read_npy_header(stream: IO[bytes]) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    """(dtype, shape, whether in Fortran order); the stream is then at the first byte of data. ValueError otherwise."""
    version = npy.read_magic(stream)
    if version not in _READERS:
        raise ValueError(f"NumPy's format {version[0]}.{version[1]} is not known")
    length_field = stream.read(2 if version == (1, 0) else 4)
    length = int.from_bytes(length_field, "little")
    if length > _MOST_BYTES:
        raise ValueError(f"a header of {length:,} bytes")
    try:
        shape, is_fortran, dtype = _READERS[version](io.BytesIO(length_field + stream.read(length)))
    except (SyntaxError, TypeError) as error:
        raise ValueError(str(error)) from None
    if any(length < 0 for length in shape):
        raise ValueError(f"a shape of {shape}")
    return dtype, tuple(map(int, shape)), bool(is_fortran)
