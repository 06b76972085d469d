"""JAX at the edge: each batch as JAX arrays on the default device.

On a CPU, device_put takes over NumPy memory that is aligned to 64 bytes, without a copy. So it gets memory of its own,
aligned and of JAX's type, into which the tokens are copied once; nothing else ever holds it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.adapters.converted import ConvertedBlocks
from penstock.errors import MissingExtraError

try:
    import jax
except ImportError:
    raise MissingExtraError(
        "penstock.adapters.jax needs jax, which is not installed", remedy="pip install 'penstock[jax]'"
    ) from None

__all__ = ["JaxBlocks", "copied", "is_shared", "pinned"]

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


def copied(array: Any, device: Any, non_blocking: bool) -> Any:
    """An array on a device, or laid out by a sharding. JAX itself waits for copies where it must."""
    return jax.device_put(array, device)


def is_shared(mask: Any) -> bool:
    """Whether a mask is made anew where it goes. JAX arrays cannot be written into: they go as they are."""
    return False


def pinned(array: Any) -> Any:
    raise TypeError("a batch of JAX arrays has no page-locked memory: batch.to(device) copies it")
