"""Keep what was costly to compute on disk, by content: a pattern of a mixture is built once on a machine.

A file is believed only if its size, its hash and its counts are right. Anything else about it, or about the disk, means
that the pattern is built: what is drawn never depends on a file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from batchwright.base.files import home, write_whole

__all__ = ["kept_pattern"]

_HASH_BYTES = 16
_MOST_FILES = 256
"""Files in the folder, at most: the oldest one goes when another comes."""


def kept_pattern(
    counts: tuple[int, ...], dtype: np.dtype[Any], build: Callable[[tuple[int, ...]], NDArray[Any]]
) -> NDArray[Any]:
    """What `build(counts)` gives: sum(counts) numbers of `dtype`, of which counts[i] are i."""
    dtype = dtype.newbyteorder("<")
    with contextlib.suppress(OSError, RuntimeError):  # no home, or none that can be read
        path = _path(counts)
        pattern = _read(path.read_bytes(), counts, dtype)
        if pattern is not None:
            return pattern
    pattern = build(counts).astype(dtype, copy=False)
    with contextlib.suppress(OSError, RuntimeError):  # a full or read-only disk is no reason to stop
        _keep(_path(counts), pattern)
    return pattern


def _path(counts: tuple[int, ...]) -> Path:
    name = xxhash.xxh3_128_hexdigest(b"pattern 1:" + np.array(counts, "<i8").tobytes())
    return home() / "patterns" / f"{name}.bin"


def _read(data: bytes, counts: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any] | None:
    body = memoryview(data)[_HASH_BYTES:]
    if len(body) != sum(counts) * dtype.itemsize or xxhash.xxh3_128_digest(body) != data[:_HASH_BYTES]:
        return None
    pattern: NDArray[Any] = np.frombuffer(body, dtype)
    found = np.bincount(pattern, minlength=len(counts))
    return pattern if found.tolist() == list(counts) else None


def _keep(path: Path, pattern: NDArray[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    files = sorted((file.stat().st_mtime_ns, file) for file in path.parent.glob("*.bin"))
    for _, file in files[: max(len(files) + 1 - _MOST_FILES, 0)]:
        file.unlink(missing_ok=True)
    body = pattern.tobytes()
    write_whole(path, xxhash.xxh3_128_digest(body) + body)
