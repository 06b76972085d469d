"""What all peers read: one array of token ids on disk, and JSONL documents with tokenizers. Imports NumPy alone."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["ROWS", "SEED", "BatchedWindows", "Source", "Windows", "bench_home", "cut", "version_of"]

ROWS = 32
SEED = 7


def bench_home() -> Path:
    """$BATCHWRIGHT_BENCH, or a folder in the system's temporary folder."""
    return Path(os.environ.get("BATCHWRIGHT_BENCH") or Path(tempfile.gettempdir()) / "batchwright-bench").absolute()


@dataclass(frozen=True, slots=True)
class Source:
    """The tokens, and the folder where one peer keeps its own copy of them."""

    store: Path
    """batchwright's store."""
    token_file: Path
    """The same tokens as bare uint16 numbers."""
    folder: Path
    """The peer's own copy, in its own format."""
    row_tokens: int

    def tokens(self) -> np.ndarray:
        return np.memmap(self.token_file, np.uint16, mode="r")

    @property
    def num_rows(self) -> int:
        return (self.token_file.stat().st_size // 2 - 1) // self.row_tokens


def cut(tokens: np.ndarray, row_tokens: int) -> np.ndarray:
    """Rows of row_tokens + 1 tokens (one more for the last label), as a view."""
    num_rows = (len(tokens) - 1) // row_tokens
    return np.lib.stride_tricks.as_strided(
        tokens, (num_rows, row_tokens + 1), (row_tokens * tokens.itemsize, tokens.itemsize), writeable=False
    )


class Windows:
    """A map-style dataset over the bare array, for libraries that bring no format of their own."""

    def __init__(self, source: Source) -> None:
        self.rows = cut(source.tokens(), source.row_tokens)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.rows[index].astype(np.int64)


class BatchedWindows(Windows):
    """The same with torch's `__getitems__`: a whole batch in one gather."""

    def __getitems__(self, indices: Any) -> np.ndarray:
        return self.rows[np.asarray(indices)].astype(np.int64)


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
