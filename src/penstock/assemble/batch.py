"""From gathered rows to the fields of a batch: masks, and on request what document borders mean for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Block", "Fields", "add_border_fields", "constant_mask", "fill_up", "mask_padding"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fields:
    """Which fields a batch has besides tokens."""

    position_ids: bool = False
    """Positions that start again at 0 with every document."""
    segment_ids: bool = False
    """Number of the document inside its row, from 1."""
    border_loss: bool = True
    """False: the first token of a document is not predicted from the document before it (loss 0, label -100)."""

    @property
    def need_borders(self) -> bool:
        return self.position_ids or self.segment_ids or not self.border_loss


@dataclass(slots=True)
class Block:
    """Some steps' rows, gathered at once: tokens [rows, row_tokens + 1], and what belongs to each row."""

    tokens: Any
    source: NDArray[np.int32]
    position: NDArray[np.int64]
    weight: NDArray[np.float32] | None
    """None: every row counts."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Fields that are not views of `tokens`, [rows, row_tokens] each."""


@lru_cache(maxsize=64)
def constant_mask(rows: int, tokens: int, dtype: str) -> NDArray[Any]:
    """A mask of ones, shared and read-only."""
    mask = np.ones((rows, tokens), dtype)
    mask.flags.writeable = False
    return mask


def add_border_fields(block: Block, borders: Sequence[NDArray[np.int64]], fields: Fields) -> None:
    """Fill in what depends on where documents begin; borders[i] are their offsets inside row i's window."""
    rows, width = block.tokens.shape
    begins = np.zeros((rows, width), bool)
    for row, offsets in enumerate(borders):
        begins[row, offsets] = True
    if fields.segment_ids:
        block.extra["segment_ids"] = np.cumsum(begins[:, :-1], axis=1, dtype=np.int64) + 1
    if fields.position_ids:
        places = np.broadcast_to(np.arange(width - 1, dtype=np.int64), (rows, width - 1))
        latest = np.maximum.accumulate(np.where(begins[:, :-1], places, 0), axis=1)
        block.extra["position_ids"] = places - latest
    if not fields.border_loss:
        block.extra["loss_mask"] = (~begins[:, 1:]).astype(np.float32)
        block.extra["labels"] = np.where(begins[:, 1:], -100, block.tokens[:, 1:])


def fill_up(block: Block, widths: NDArray[np.int64], pad: int) -> None:
    """Give rows that have fewer tokens the token `pad` after them: not attended to, and nothing is learned there."""
    rows, width = block.tokens.shape
    place = np.arange(width)
    is_real = place[:-1] < widths[:, None]
    loss = block.extra.get("loss_mask", constant_mask(rows, width - 1, "float32"))
    labels = block.extra.get("labels", block.tokens[:, 1:])
    block.extra["attention_mask"] = is_real.astype(np.int64)
    block.extra["loss_mask"] = np.where(is_real, loss, np.float32(0))
    block.extra["labels"] = np.where(is_real, labels, -100)
    if "segment_ids" in block.extra:
        block.extra["segment_ids"] = np.where(is_real, block.extra["segment_ids"], 0)
    block.tokens[place >= widths[:, None]] = pad  # last: a row's last token is only a label, where input begins to pad


def mask_padding(block: Block) -> None:
    """Rows of weight 0 only fill the batch up: nothing is learned from them."""
    if block.weight is None:
        return
    real = block.weight[:, None]
    width = block.tokens.shape[1] - 1
    loss = block.extra.get("loss_mask", constant_mask(len(block.source), width, "float32"))
    labels = block.extra.get("labels", block.tokens[:, 1:])
    block.extra["loss_mask"] = (loss * real).astype(np.float32)
    block.extra["labels"] = np.where(real > 0, labels, -100)
