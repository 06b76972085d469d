"""Protocols of plug-ins: the methods and their duties. Nothing here needs to be inherited."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

__all__ = ["Rows", "Tokenizer"]


@runtime_checkable
class Rows(Protocol):
    """Rows of equal length that one source offers, by number. Called from several threads; same number, same row.

    >>> class Counting:
    ...     name, num_rows, row_tokens, fingerprint = "counting", 10**12, 4, "counting-v1"
    ...     def gather(self, index, epoch, out):
    ...         out[:] = index[:, None] + range(out.shape[1])
    >>> isinstance(Counting(), Rows)
    True
    """

    @property
    def name(self) -> str: ...

    @property
    def num_rows(self) -> int: ...

    @property
    def row_tokens(self) -> int:
        """Tokens that a row trains on. `gather` gives one more: the last target."""
        ...

    @property
    def fingerprint(self) -> str:
        """Names the content: other content, another fingerprint."""
        ...

    def gather(self, index: NDArray[np.int64], epoch: NDArray[np.int64], out: NDArray[np.int64]) -> None:
        """Write row index[i] of the source's epoch epoch[i] to out[i], which has row_tokens + 1 places."""
        ...


@runtime_checkable
class Tokenizer(Protocol):
    """Text to ids. Called in several processes; same text, same ids."""

    @property
    def vocab_size(self) -> int:
        """Every id is below this."""
        ...

    @property
    def fingerprint(self) -> str: ...

    def encode_batch(self, texts: Sequence[str]) -> list[Any]:
        """The ids of each text, as anything NumPy takes."""
        ...

    def decode(self, ids: Sequence[int]) -> str | None:
        """The text of some ids, or None where that cannot be known."""
        ...
