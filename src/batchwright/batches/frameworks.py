"""The adapter of a framework, imported on demand, and the moves of a batch's arrays between devices.

This is the package's only import of `adapters/`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib import import_module
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from batchwright.typing import Device

__all__ = ["Movable", "adapter", "adapter_of"]

_FRAMEWORKS = {"torch": "torch", "jax": "jax", "jaxlib": "jax", "mlx": "mlx"}
"""The top module of a class of arrays, and its framework."""


def adapter(framework: str) -> Any:
    """The module `batchwright.adapters.<framework>`. A framework that is not installed raises MissingExtraError."""
    return import_module(f"batchwright.adapters.{framework}")


def adapter_of(array: Any) -> Any:
    """The adapter of the framework that `array` belongs to; None for NumPy's arrays and for other objects."""
    if not hasattr(array, "shape"):
        return None
    for base in type(array).__mro__:  # a subclass of tensors may be defined elsewhere
        framework = _FRAMEWORKS.get(base.__module__.partition(".")[0])
        if framework is not None:
            return adapter(framework)
    return None


def on_host(array: Any) -> NDArray[Any] | None:
    """An array of any framework as a NumPy array."""
    if array is None:
        return None
    if hasattr(array, "detach"):  # torch's: it may be on a device, or of a type that NumPy does not have
        array = array.detach().cpu()
        if array.is_floating_point():
            array = array.float()
    return np.asarray(array)


class Movable(ABC):
    """A batch whose arrays move together."""

    def to(self, device: Device, non_blocking: bool = False) -> Self:
        """This batch on another device (torch, JAX), or laid out by a sharding (JAX). Lists are not moved.

        In torch the tokens are copied once. With non_blocking, the source memory is not reused before the copy is done,
        even if this batch is dropped at once.
        """
        return self._moved(lambda array: adapter_of(array).copied(array, device, non_blocking))

    def pin_memory(self) -> Self:
        """This batch in page-locked memory (torch), from which copies to a GPU can overlap with its work."""
        return self._moved(lambda array: adapter_of(array).pinned(array))

    @abstractmethod
    def _moved(self, move: Callable[[Any], Any]) -> Self:
        """This batch with its arrays moved. `move` takes an array of a framework."""
