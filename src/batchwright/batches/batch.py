"""The fields of a batch from gathered rows: masks, and fields that depend on document borders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.batches.gather import Allocate, fresh
from batchwright.batches.samples import PaddedSamples
from batchwright.batches.settings import Fields

__all__ = ["Block", "Padding", "add_border_fields", "add_sample_fields", "constant_mask", "mask_padding", "seqlens_of"]


@dataclass(frozen=True, slots=True)
class Padding:
    """The width of a batch whose rows differ in length. It depends on the global batch, never on a rank's part."""

    to: str | int | tuple[int, ...] = "longest"
    """"longest", "max_length", a number that divides all widths, or a list of all widths."""
    left: bool = False

    @property
    def as_json(self) -> str | int | list[int]:
        if isinstance(self.to, tuple):
            return list(self.to)
        return self.to

    def widths(self, longest: NDArray[np.int64], most: int) -> NDArray[np.int64]:
        """Widths of batches from the lengths of their longest rows. No row has more than `most` tokens.

        >>> Padding(64).widths(np.array([1, 64, 65, 500]), 512).tolist()
        [64, 64, 128, 512]
        >>> Padding((100, 300)).widths(np.array([1, 101, 400]), 512).tolist()
        [100, 300, 512]
        """
        if self.to == "longest":
            return longest
        if self.to == "max_length":
            return np.full(len(longest), most)
        if isinstance(self.to, int):
            return np.minimum(-(-longest // self.to) * self.to, most)
        buckets = np.array([*(width for width in sorted(self.to) if isinstance(width, int) and width < most), most])
        return buckets[np.searchsorted(buckets, longest)]


@dataclass(slots=True)
class Block:
    """The rows of some steps, gathered at once: tokens [rows, row_tokens + 1], and the fields of each row."""

    tokens: Any
    source: NDArray[np.int32]
    position: NDArray[np.int64]
    weight: NDArray[np.float32] | None
    """None: every row counts."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Fields that are not views of `tokens`, [rows, row_tokens] each."""
    widths: NDArray[np.int64] | None = None
    """For rows of samples, the width of each row's batch in tokens."""
    seams: NDArray[np.bool_] | None = None
    """The first token of each part that attends to no other, [rows, row_tokens], if fields ask for it."""
    shown: dict[str, NDArray[Any]] = field(default_factory=dict)
    """Fields for metadata, [rows, row_tokens + 1] each, aligned with tokens."""


@lru_cache(maxsize=64)
def constant_mask(rows: int, tokens: int, dtype: str) -> NDArray[Any]:
    """A mask of ones, shared and read-only."""
    mask = np.ones((rows, tokens), dtype)
    mask.flags.writeable = False
    return mask


def add_border_fields(block: Block, borders: Sequence[NDArray[np.int64]], fields: Fields) -> None:
    """Fill in the fields that depend on document borders. borders[i] holds their offsets inside row i's window."""
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
        block.extra["targets"] = np.where(begins[:, 1:], -100, block.tokens[:, 1:])


def fill_up(block: Block, widths: NDArray[np.int64], pad: int) -> None:
    """Pad shorter rows with the token `pad` at the end. Padding is not attended to, and nothing is learned there."""
    place = np.arange(block.tokens.shape[1])
    is_real = place[:-1] < widths[:, None]
    block.extra["attention_mask"] = is_real.astype(np.int64)
    _learn_only(block, is_real)
    if "segment_ids" in block.extra:
        block.extra["segment_ids"] = np.where(is_real, block.extra["segment_ids"], 0)
    block.tokens[place >= widths[:, None]] = pad  # last: a row's last token is only a target, and padding as input


def add_sample_fields(block: Block, padded: PaddedSamples, fields: Fields, allocate: Allocate = fresh) -> None:
    """Masks and targets of rows of samples, and the fields that name each token's sample.

    Large arrays go to memory from `allocate`, because fresh memory costs more time than all computations here.
    """
    rows, width = padded.tokens.shape[0], padded.tokens.shape[1] - 1
    place, end = np.arange(width), padded.offset + padded.length
    loss = padded.weight[:, 1:]
    targets, attention = allocate(rows, width), allocate(rows, width)
    targets[:] = padded.tokens[:, 1:]
    targets[loss == 0] = -100
    is_real = place < end[:, None]
    if padded.offset.any():
        is_real &= place >= padded.offset[:, None]
    attention[:] = is_real
    block.extra |= {"loss_mask": loss, "targets": targets, "attention_mask": attention}
    block.widths = padded.widths
    if not (fields.segment_ids or fields.position_ids or fields.cu_seqlens):
        return

    # Samples and padding tile the rows in runs.
    begins = padded.begins[:, :-1]
    seams = begins.copy()
    seams[:, 0] = True
    short = np.flatnonzero(end < width)
    seams[short, end[short]] = True
    if fields.cu_seqlens:
        block.seams = seams
    start = np.flatnonzero(seams)
    is_sample = begins.reshape(rows * width)[start]
    count = np.diff(start, append=rows * width)
    if fields.segment_ids:
        samples = np.cumsum(is_sample)
        above = (samples - is_sample)[np.searchsorted(start, start // width * width)]
        segment = (samples - above) * is_sample  # counted in its row; 0 for padding
        block.extra["segment_ids"] = _fill_runs(segment, count, allocate(rows, width))
    if fields.position_ids:
        block.extra["position_ids"] = _number_runs(is_sample, count, allocate(rows, width))


_TOKENS_AT_ONCE = 1 << 14
"""Tokens of the temporary arrays below. Larger ones are fresh memory each time, and its page faults cost more."""


def _fill_runs(values: NDArray[np.int64], count: NDArray[np.int64], out: NDArray[np.int64]) -> NDArray[np.int64]:
    """Write values[0] count[0] times, then values[1], and so on."""
    flat, values = out.reshape(-1), values.astype(np.int32)
    for first, last, start, stop in _parts_of_runs(count):
        flat[start:stop] = np.repeat(values[first:last], count[first:last])
    return out


def _number_runs(is_sample: NDArray[np.bool_], count: NDArray[np.int64], out: NDArray[np.int64]) -> NDArray[np.int64]:
    """Write 0, 1, ... in each run of a sample, and zeros in the others."""
    flat, begin = out.reshape(-1), (np.cumsum(count) - count).astype(np.int32)
    for first, last, start, stop in _parts_of_runs(count):
        number = np.arange(start, stop, dtype=np.int32)
        number -= np.repeat(begin[first:last], count[first:last])
        flat[start:stop] = number
    for run in np.flatnonzero(~is_sample).tolist():
        flat[begin[run] : begin[run] + count[run]] = 0
    return out


def _parts_of_runs(count: NDArray[np.int64]) -> Iterator[tuple[int, int, int, int]]:
    """(first run, last run, first token, last token) of a few runs at a time."""
    ends = np.cumsum(count)
    first = start = 0
    while first < len(count):
        last = max(int(np.searchsorted(ends, start + _TOKENS_AT_ONCE, side="right")), first + 1)
        stop = int(ends[last - 1])
        yield first, last, start, stop
        first, start = last, stop


def seqlens_of(seams: NDArray[np.bool_]) -> tuple[NDArray[np.int32], int]:
    """(start of each part in the rows of a batch, end to end, and the end of the last; length of the longest part)."""
    borders = np.append(np.flatnonzero(seams), seams.size).astype(np.int32)
    return borders, int(np.diff(borders).max(initial=0))


def mask_padding(block: Block) -> None:
    """Mask rows of weight 0. They only fill the batch up, and nothing is learned from them."""
    if block.weight is None:
        return
    is_real = np.repeat(block.weight > 0, len(block.tokens) // len(block.weight))
    _learn_only(block, is_real[:, None])


def _learn_only(block: Block, where: NDArray[np.bool_]) -> None:
    """Let nothing be learned elsewhere."""
    rows, width = block.tokens.shape
    loss = block.extra.get("loss_mask", constant_mask(rows, width - 1, "float32"))
    targets = block.extra.get("targets", block.tokens[:, 1:])
    block.extra["loss_mask"] = np.where(where, loss, np.float32(0))
    block.extra["targets"] = np.where(where, targets, -100)
