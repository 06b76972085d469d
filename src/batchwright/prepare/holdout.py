"""Hold documents out by a hash of their text. Duplicates stay together, and new files move no other document."""

from __future__ import annotations

import xxhash

__all__ = ["side_of"]

_SALT = 0x70656E73746F636B


def side_of(text: str, fraction: float) -> str:
    """The side of a text, `train` or `val`, is the same in every recipe. A larger fraction only adds to `val`.

    >>> side_of("a document", 0.0), side_of("a document", 1.0)
    ('train', 'val')
    """
    digest = xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"), seed=_SALT)
    return "val" if digest < fraction * 2**64 else "train"
