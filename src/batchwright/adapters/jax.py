"""The adapter of JAX. Each batch becomes JAX arrays on the default device.

On a CPU, device_put takes over NumPy memory that is aligned to 64 bytes, without a copy. So the tokens are copied once
into new memory, aligned and of JAX's type. Nothing else ever holds that memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from batchwright.adapters.converted import ConvertedBlocks
from batchwright.base.errors import MissingExtraError, SpecError

try:
    import jax
except ImportError:
    raise MissingExtraError(
        "batchwright.adapters.jax needs jax, which is not installed", remedy="pip install 'batchwright[jax]'"
    ) from None

__all__ = ["JaxBlocks", "copied", "handed", "is_shared", "joined", "numbers", "picked", "pinned"]

K = TypeVar("K")

_ALIGNMENT = 64


class JaxBlocks(ConvertedBlocks):
    """Batches of JAX arrays. Integers are int32, or int64 where x64 is on when the batch is taken."""

    def copies(self, arrays: list[NDArray[Any]]) -> list[Any]:
        put: list[Any] = jax.device_put([_own_copy(array) for array in arrays])  # one call: it costs more than a copy
        return put

    def ones(self, mask: NDArray[Any]) -> Any:
        key = (mask.shape, jax.dtypes.canonicalize_dtype(mask.dtype), jax.config.jax_default_device)
        ones = self._ones.get(key)
        if ones is None or ones.is_deleted():  # a program may have donated a batch with it
            (ones,) = self.copies([mask])
            self._ones[key] = ones
        return ones


def _own_copy(array: NDArray[Any]) -> NDArray[Any]:
    dtype = np.dtype(jax.dtypes.canonicalize_dtype(array.dtype))  # converted here: JAX would warn, or copy once more
    num_bytes = array.size * dtype.itemsize
    raw = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    skip = -raw.ctypes.data % _ALIGNMENT
    own: NDArray[Any] = raw[skip : skip + num_bytes].view(dtype).reshape(array.shape)
    np.copyto(own, array, casting="same_kind")
    return own


def numbers(arrays: Mapping[K, NDArray[Any]], device: Any | None = None) -> dict[K, Any]:
    """Arrays as JAX arrays. If x64 is off, 64-bit types become 32-bit. Integers that do not fit are refused."""
    for name, array in arrays.items():
        _check_range(name, array)
    return dict(zip(arrays, jax.device_put([_own_copy(array) for array in arrays.values()], device), strict=True))


def handed(arrays: dict[str, NDArray[Any]], device: Any | None) -> dict[str, Any]:
    """A queue's batch, copied to a device (`jax.devices()[0]`, "cpu", "gpu:1") or laid out by a sharding."""
    return numbers(arrays, _named(device) if isinstance(device, str) else device)


def _named(device: str) -> Any:
    platform, _, number = device.partition(":")
    try:
        return jax.devices(platform)[int(number or 0)]
    except (RuntimeError, ValueError, IndexError):
        known = ", ".join(f"{found.platform}:{place}" for place, found in enumerate(jax.devices()))
        remedy = f"one of {known}, or an object of jax.devices()"
        raise SpecError(f"JAX knows no device {device!r}", parameter="device", remedy=remedy) from None


def _check_range(name: Any, array: NDArray[Any]) -> None:
    dtype = np.dtype(jax.dtypes.canonicalize_dtype(array.dtype))
    if dtype == array.dtype or dtype.kind not in "iu" or not array.size:
        return
    for value in (int(array.min()), int(array.max())):
        if not np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
            what = f"{value} in column {name!r} ({array.dtype}) does not fit into JAX's {dtype}"
            remedy = "jax.config.update('jax_enable_x64', True), or a column of smaller numbers"
            raise SpecError(what, parameter=str(name), remedy=remedy)


def joined(left: Any, right: Any) -> Any:
    """[rows, a] and [rows, b] as [rows, a + b]."""
    return jax.numpy.concatenate((left, right), 1)


def picked(array: Any, rows: NDArray[np.int64]) -> Any:
    """Some rows of an array."""
    return array[rows]


def copied(array: Any, device: Any, non_blocking: bool) -> Any:
    """An array on a device, or laid out by a sharding. JAX itself waits for copies if necessary."""
    return jax.device_put(array, device)


def is_shared(mask: Any) -> bool:
    """Whether a mask must be made anew on its device. JAX arrays are immutable, so they are not."""
    return False


def pinned(array: Any) -> Any:
    raise TypeError("a batch of JAX arrays has no page-locked memory: batch.to(device) copies it")
