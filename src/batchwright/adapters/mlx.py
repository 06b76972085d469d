"""The adapter of MLX. Batches become mx.arrays on the thread that takes them. (Lazy ones fail on another thread.)"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any, TypeVar

from numpy.typing import NDArray

from batchwright.adapters.converted import ConvertedBlocks
from batchwright.base.errors import MissingExtraError, SpecError

try:
    import mlx.core as mx
except ImportError:
    raise MissingExtraError(
        "batchwright.adapters.mlx needs mlx, which is not installed", remedy="pip install 'batchwright[mlx]'"
    ) from None

__all__ = ["MlxBlocks", "copied", "handed", "is_shared", "joined", "numbers", "picked", "pinned"]

K = TypeVar("K")


class MlxBlocks(ConvertedBlocks):
    """Batches of mx.arrays."""

    def copies(self, arrays: list[NDArray[Any]]) -> list[Any]:
        return [mx.array(array) for array in arrays]  # always an immediate copy; asarray and from_dlpack may share

    def ones(self, mask: NDArray[Any]) -> Any:
        key = (mask.shape, mask.dtype)
        if key not in self._ones:
            self._ones[key] = mx.array(mask)
        return copy(self._ones[key])  # the same memory until it is written to, then separate


def numbers(arrays: Mapping[K, NDArray[Any]]) -> dict[K, Any]:
    """Copies of arrays as MLX arrays. float64 becomes float32; other types are kept."""
    return {name: mx.array(array) for name, array in arrays.items()}


def handed(arrays: dict[str, NDArray[Any]], device: Any | None) -> dict[str, Any]:
    """Copy a queue's batch. MLX has no device argument."""
    if device is not None:
        raise SpecError(
            f"device={device!r}: MLX arrays are on every device already", parameter="device", remedy="device=None"
        )
    return numbers(arrays)


def joined(left: Any, right: Any) -> Any:
    """[rows, a] and [rows, b] as [rows, a + b]."""
    return mx.concatenate([left, right], 1)


def picked(array: Any, rows: NDArray[Any]) -> Any:
    """Some rows of an array."""
    return array[mx.array(rows)]


def copied(array: Any, device: Any, non_blocking: bool) -> Any:
    raise TypeError("a batch of MLX arrays is on every device already: MLX says where to compute, not where data lies")


def is_shared(mask: Any) -> bool:
    """Whether a mask must be made anew on its device. Each batch has its own masks, so they are not."""
    return False


def pinned(array: Any) -> Any:
    raise TypeError("a batch of MLX arrays has no page-locked memory, and needs none")
