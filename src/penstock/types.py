"""The nouns that stages share: the batch a model gets, and the record that says where a row came from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["TraceRecord", "TrainingBatch"]

_FIELDS = (
    "input_ids",
    "attention_mask",
    "labels",
    "loss_mask",
    "position_ids",
    "segment_ids",
    "cu_seqlens",
    "max_seqlen",
)


class TrainingBatch:
    """One batch, ready for `model(batch.input_ids)`.

    `labels[t]` is the token that position t must predict (already shifted); `loss_mask[t]` belongs to `labels[t]`,
    and labels are -100 where it is 0. input_ids, labels and attention_mask are int64 [rows, tokens], loss_mask is
    float32. A constant mask is one array shared by all batches: do not write into it.

    `metadata["source"]` names each row's source, `metadata["weight"]` is 0 for rows that only fill the batch up,
    `metadata["position"]` is each row's position, `metadata["state"]` is the loader's state *after* this batch.

    >>> import numpy as np
    >>> ids = np.array([[5, 6, 7]])
    >>> batch = TrainingBatch(ids[:, :-1], np.ones((1, 2), np.int64), ids[:, 1:])
    >>> batch["labels"].tolist(), "loss_mask" in batch.keys()
    ([[6, 7]], False)
    """

    position_ids: Any = None
    segment_ids: Any = None
    cu_seqlens: Any = None
    max_seqlen: int | None = None
    _block: tuple[Any, int, int] | None = None
    """(tokens, first, last): input_ids and labels are views of tokens[first:last], [rows, tokens + 1], so that a device
    copy moves it once."""

    def __init__(
        self,
        input_ids: Any,
        attention_mask: Any,
        labels: Any,
        loss_mask: Any = None,
        metadata: dict[str, Any] | Callable[[], dict[str, Any]] | None = None,
        **others: Any,
    ) -> None:
        """`others`: position_ids, segment_ids, cu_seqlens, max_seqlen."""
        self.input_ids = input_ids
        self.attention_mask = attention_mask
        self.labels = labels
        self.loss_mask = loss_mask
        self._metadata = metadata
        if others:
            for name, value in others.items():
                if name not in _FIELDS:
                    raise TypeError(f"a TrainingBatch has no field {name!r}; it has {', '.join(_FIELDS)}")
                setattr(self, name, value)

    @property
    def metadata(self) -> dict[str, Any]:
        """Made when first asked for: most steps never look."""
        if not isinstance(self._metadata, dict):
            self._metadata = self._metadata() if self._metadata is not None else {}
        return self._metadata

    def keys(self) -> list[str]:
        return [name for name in _FIELDS if getattr(self, name) is not None]

    def __getitem__(self, name: str) -> Any:
        value = getattr(self, name, None) if name in _FIELDS else None
        if value is None:
            raise KeyError(name)
        return value

    def __contains__(self, name: object) -> bool:
        return name in self.keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        """Rows."""
        return int(self.input_ids.shape[0])

    def to(self, device: Any, non_blocking: bool = False) -> TrainingBatch:
        """This batch on another device (torch). The tokens are copied once; input_ids and labels are views of them."""
        return self._moved(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> TrainingBatch:
        """This batch in page-locked memory (torch), from which copies to a GPU can overlap with its work."""
        return self._moved(lambda tensor: tensor.pin_memory())

    def _moved(self, move: Callable[[Any], Any]) -> TrainingBatch:
        if not hasattr(self.input_ids, "pin_memory"):
            raise TypeError(
                f"a batch of {type(self.input_ids).__name__} cannot move: open the loader with framework='torch'"
            )
        fields = {name: getattr(self, name) for name in _FIELDS}
        block = None
        if self._block is not None:
            tokens, first, last = self._block
            block = move(tokens[first:last])
            fields |= {"input_ids": block[:, :-1], "labels": block[:, 1:]}
        moved = {
            name: move(value)
            if hasattr(value, "pin_memory") and not (block is not None and name in ("input_ids", "labels"))
            else value
            for name, value in fields.items()
        }
        batch = TrainingBatch(metadata=self._metadata, **moved)
        batch._block = None if block is None else (block, 0, len(block))
        return batch

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_batch, ([getattr(self, name) for name in _FIELDS], self.metadata, self._block is not None)

    def __repr__(self) -> str:
        rows, tokens = self.input_ids.shape
        return f"TrainingBatch({rows} rows x {tokens} tokens: {', '.join(self.keys())})"


def _rebuild_batch(values: list[Any], metadata: dict[str, Any], was_block: bool) -> TrainingBatch:
    return TrainingBatch(metadata=metadata, **dict(zip(_FIELDS, values, strict=True)))


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """One piece of one document inside one row of the stream. The pieces of a row tile its window, in reading order."""

    step: int | None
    """The step that uses the row; None where the plan does not say how batches were cut."""
    position: int
    epoch: int
    """Epoch of the row's source."""
    rank: int
    row_in_batch: int
    source: str
    file: str
    """The raw file, as the recipe named it; `<memory>` for rows given from Python."""
    row: int
    """Row inside the file, from 0: a line of JSONL is a row, a text file is row 0."""
    window_span: tuple[int, int]
    """Tokens [start, stop) of the row's window that this piece fills."""
    document_span: tuple[int, int]
    """Tokens [start, stop) of the document that this piece is."""
    text: str | None
    """The piece, decoded; None where the tokenizer cannot decode."""
    lines: tuple[int, int] | None
    """First and last line of the document's text that this piece touches, from 1."""
