"""Keys for every random decision: a named decision gets a 64-bit key, and a keyed mixer turns numbers into noise.

Nothing here remembers anything. The same names give the same key on every machine and in every process, so no
decision depends on what was decided before it.
"""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray

__all__ = ["U64", "key_of", "mix64", "scale_to"]

U64 = NDArray[np.uint64]

_MULTIPLY_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31, _S32 = (np.uint64(s) for s in (27, 30, 31, 32))


def key_of(*names: str | int) -> int:
    """A 64-bit key for the decision that these names name.

    >>> key_of(7, "web", 0) == key_of(7, "web", 0), key_of(7, "web", 0) == key_of(7, "web", 1)
    (True, False)
    >>> key_of("a", "bc") == key_of("ab", "c")         # borders count
    False
    """
    data = ""
    for name in names:
        text = str(name)
        num_bytes = len(text) if text.isascii() else len(text.encode())
        data += f"{type(name).__name__[0]}{num_bytes}:{text}"
    return xxhash.xxh3_64_intdigest(data.encode())


def mix64(x: U64, key: np.uint64 | U64) -> U64:
    """Scramble numbers under a key: a bijection of 64-bit numbers in which every input bit reaches every output bit.

    The finaliser of splitmix64 (Stafford's variant 13) over `x + key`. Allocates two arrays, whatever the length.
    """
    z = x + key
    t = z >> _S30
    z ^= t
    z *= _MULTIPLY_1
    np.right_shift(z, _S27, out=t)
    z ^= t
    z *= _MULTIPLY_2
    np.right_shift(z, _S31, out=t)
    z ^= t
    return z


def scale_to(noise: U64, limit: np.uint64 | U64) -> U64:
    """Map 64-bit noise onto [0, limit) for limits below 2^32, in place: one multiplication, no division."""
    noise >>= _S32
    noise *= limit
    noise >>= _S32
    return noise
