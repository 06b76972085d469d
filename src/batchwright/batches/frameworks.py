"""The adapter of a framework, imported on demand. This is the package's only import of `adapters/`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["adapter", "adapter_of"]


def adapter(framework: str) -> Any:
    """The module `batchwright.adapters.<framework>`. A framework that is not installed raises MissingExtraError."""
    return import_module(f"batchwright.adapters.{framework}")


def adapter_of(array: Any) -> Any:
    """The adapter of the framework that `array` belongs to. ModuleNotFoundError for other objects."""
    top = type(array).__module__.partition(".")[0]
    return adapter(top.removesuffix("lib"))  # JAX's arrays are defined in jaxlib
