"""Batches that are converted one by one, on the thread that takes them.

Until then they are NumPy arrays over memory that will be reused. A framework gets copies, never that memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import closing
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.batches.batch import Block
from batchwright.batches.types import TrainingBatch
from batchwright.loaders.blocks import NumpyBlocks
from batchwright.loaders.interface import Made

__all__ = ["ConvertedBlocks"]

_MOST_MASKS = 64


class ConvertedBlocks(NumpyBlocks, ABC):
    """Blocks stay NumPy arrays; the rows of a batch are copied into a framework's arrays."""

    def __init__(self) -> None:
        self._constant: dict[int, NDArray[Any]] = {}
        self._ones: dict[tuple[Any, ...], Any] = {}

    def masks(self, rows: int, tokens: int) -> tuple[Any, Any]:
        if len(self._constant) >= _MOST_MASKS:
            self._constant.clear()
            self._ones.clear()
        masks = super().masks(rows, tokens)
        self._constant |= {id(mask): mask for mask in masks}
        return masks

    def hand_over(self, batches: Made[TrainingBatch]) -> Made[TrainingBatch]:
        """(batch, position after it), with the batch's fields as the framework's arrays."""
        with closing(batches):
            for batch, position in batches:
                yield self._converted(batch), position

    @abstractmethod
    def copies(self, arrays: list[NDArray[Any]]) -> list[Any]:
        """Copies of arrays as the framework's arrays. They share no memory with the originals."""

    @abstractmethod
    def ones(self, mask: NDArray[Any]) -> Any:
        """The framework's array for a constant mask. Its memory may be shared by batches, if no batch can change it."""

    def _converted(self, batch: TrainingBatch) -> TrainingBatch:
        fields = batch._arrays()
        own = {
            id(value): value  # each array once, even if two fields have it
            for value in fields.values()
            if isinstance(value, np.ndarray) and id(value) not in self._constant
        }
        made = dict(zip(own, self.copies(list(own.values())), strict=True))
        made |= {key: self.ones(self._constant[key]) for key in map(id, fields.values()) if key in self._constant}
        fields = {name: made.get(id(value), value) for name, value in fields.items()}
        return TrainingBatch(metadata=_without_tokens(batch.__dict__["_metadata"]), **fields)


def _without_tokens(metadata: Any) -> Any:
    """The parts of metadata without the block's tokens, so that their memory is free after the copy."""
    if not isinstance(metadata, tuple):
        return metadata
    return tuple(
        Block(None, part.source, part.position, part.weight, widths=part.widths, shown=part.shown)
        if isinstance(part, Block)
        else part
        for part in metadata
    )
