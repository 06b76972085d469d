"""A batch cut into smaller ones for gradient accumulation. Every row occurs once; sums are of the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.base.checks import at_least
from batchwright.base.errors import SpecError
from batchwright.batches.types import TrainingBatch, rebuild

__all__ = ["cut_rows", "parts_of"]

Pick = Callable[[Any, NDArray[np.int64]], Any]
"""Selects rows of an array by number, in its own framework."""


def cut_rows(lengths: NDArray[np.int64], max_tokens: int) -> list[NDArray[np.int64]]:
    """Cut rows into parts of at most `max_tokens` tokens, padding included. The longest come first, so that the first
    part shows if memory suffices. Rows of a part are in ascending order.

    >>> [part.tolist() for part in cut_rows(np.array([5, 2, 9, 2, 4]), 10)]
    [[2], [0, 4], [1, 3]]
    """
    if int(lengths.max(initial=0)) > max_tokens:
        row = int(lengths.argmax())
        raise SpecError(
            f"row {row} of the batch has {int(lengths[row]):,} tokens, and max_tokens is {max_tokens:,}",
            parameter="max_tokens",
            row=row,
            remedy=f"max_tokens={int(lengths[row])} or more",
        )
    order = np.argsort(-lengths, kind="stable")
    parts, first = [], 0
    while first < len(order):
        widest = max(int(lengths[order[first]]), 1)
        last = first + max_tokens // widest
        parts.append(np.sort(order[first:last]))
        first = last
    return parts


def parts_of(batch: TrainingBatch, max_tokens: int, pick: Pick) -> list[TrainingBatch]:
    """The parts of a batch, each as wide as its longest row."""
    at_least(1, max_tokens=max_tokens)
    if batch.cu_seqlens is not None:
        raise SpecError(
            "rows of several samples say by cu_seqlens where each begins, over the whole batch",
            parameter="max_tokens",
            remedy="cu_seqlens=False (position_ids and segment_ids stay), or a smaller batch_size",
        )
    mask = batch.attention_mask
    if hasattr(mask, "cpu"):
        mask = mask.cpu()
    is_real = np.asarray(mask) != 0
    rows, width = is_real.shape
    first = np.where(is_real.any(1), is_real.argmax(1), 0)
    last = np.where(is_real.any(1), width - is_real[:, ::-1].argmax(1), 0)
    metadata, fields = batch.metadata, batch._arrays()
    made = []
    for part in cut_rows(last - first, max_tokens):
        places = slice(int(first[part].min()), max(int(last[part].max()), int(first[part].min()) + 1))

        def cut(value: Any, part: NDArray[np.int64] = part, places: slice = places) -> Any:
            """The rows and columns of a value that belong to the part, if it has these axes."""
            if isinstance(value, list) and len(value) == rows:
                return [value[row] for row in part.tolist()]
            shape: tuple[int, ...] = getattr(value, "shape", ())
            if len(shape) == 0 or shape[0] != rows:
                return value
            picked = value[part] if isinstance(value, np.ndarray) else pick(value, part)
            if len(shape) > 1 and shape[1] == width:
                return picked[:, places]
            return picked

        own = {name: cut(value) for name, value in fields.items()}
        made.append(rebuild(own, None, (), {name: cut(value) for name, value in metadata.items()}))
    return made
