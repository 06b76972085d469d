"""The nouns that stages share: the batch a model gets, and the record that says where a row came from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
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
_MASKS = ("attention_mask", "loss_mask")


class TrainingBatch:
    """One batch, ready for `model(batch.input_ids)`.

    `labels[t]` is the token that position t must predict (already shifted); `loss_mask[t]` belongs to `labels[t]`,
    and labels are -100 where it is 0. input_ids, labels and attention_mask are int64 [rows, tokens] (in JAX int32,
    unless x64 is on), loss_mask is float32. A constant mask is one array shared by all batches, and input_ids and
    labels are views of the same tokens: do not write into them. Write into a copy and assign it: `batch.labels = mine`.

    `metadata["source"]` names each row's source, `metadata["weight"]` is 0 for rows that only fill the batch up,
    `metadata["position"]` is each row's position, `metadata["state"]` is the loader's state *after* this batch,
    `metadata["tokenizer"]` is the file of the tokenizer that can decode it, `metadata["alignment"]` is "next", or
    "same" where labels are input_ids and the model shifts them. What a loss needs besides, such as the advantages of
    rollouts, is there too, as arrays of the batch's framework that move with it.

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
    _ones: tuple[str, ...] = ()
    """Masks of ones that are looked up when they are first asked for, so that a batch that waits in a queue does not
    hold a mask into which somebody writes meanwhile."""

    def __init__(
        self,
        input_ids: Any,
        attention_mask: Any,
        labels: Any,
        loss_mask: Any = None,
        metadata: dict[str, Any] | tuple[Any, ...] | None = None,
        **others: Any,
    ) -> None:
        """`input_ids`, `attention_mask`, `labels`, `loss_mask` and `metadata`: see the class.

        `others`: position_ids, segment_ids, cu_seqlens, max_seqlen. Metadata may be (function, *its arguments)."""
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
        if isinstance(self._metadata, tuple):
            function, *arguments = self._metadata
            self._metadata = function(*arguments)
        elif self._metadata is None:
            self._metadata = {}
        made: dict[str, Any] = self._metadata  # type: ignore[assignment]
        return made

    def __getattr__(self, name: str) -> Any:
        """Only for what is not there yet: a mask of ones."""
        if name not in self._ones:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        mask = self._adapter().shared_ones(name, self.input_ids)
        setattr(self, name, mask)
        return mask

    def keys(self) -> list[str]:
        return [name for name in _FIELDS if self._is_unmade(name) or getattr(self, name) is not None]

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
        """This batch on another device (torch, JAX), or laid out by a sharding (JAX).

        In torch the tokens are copied once; input_ids and labels are views of them. With non_blocking, the memory that
        is copied from is not used again before the copy is done, even if this batch is dropped at once.
        """
        adapter = self._adapter()
        return self._moved(lambda array: adapter.copied(array, device, non_blocking))

    def pin_memory(self) -> TrainingBatch:
        """This batch in page-locked memory (torch), from which copies to a GPU can overlap with its work."""
        return self._moved(self._adapter().pinned)

    def parts(self, max_tokens: int) -> list[TrainingBatch]:
        """This batch in smaller ones of at most so many tokens, padding included, for gradient accumulation.

        Every row is in one of them, beside rows of like length, and each is as wide as its longest row. What metadata
        says of the global batch stays as it is: losses that divide by `global_tokens` add up to that of the whole.
        Call it before `to(device)`: lengths are looked at here.
        """
        from batchwright.parts import parts_of

        adapter = _adapter_of(self.input_ids)
        return parts_of(self, max_tokens, (lambda array, rows: array[rows]) if adapter is None else adapter.picked)

    def _adapter(self) -> Any:
        adapter = _adapter_of(self.input_ids)
        if adapter is None:
            raise TypeError(
                f"a batch of {type(self.input_ids).__name__} cannot move: open the loader with framework='torch'"
            )
        return adapter

    def _tokens(self) -> Any:
        """[rows, tokens + 1], of which input_ids and labels are views; None where somebody assigned others."""
        if self._block is None:
            return None
        tokens, first, last = self._block
        tokens = tokens[first:last]
        are_views = _is_same(self.input_ids, tokens[:, :-1]) and _is_same(self.labels, tokens[:, 1:])
        return tokens if are_views else None

    def _is_unmade(self, name: str) -> bool:
        return name in self._ones and name not in self.__dict__

    def _constant_masks(self) -> tuple[str, ...]:
        """The masks that are ones for every batch: made again where they are needed, not moved."""
        adapter = _adapter_of(self.input_ids)
        if adapter is None:
            return ()
        return tuple(name for name in _MASKS if self._is_unmade(name) or adapter.is_shared(getattr(self, name)))

    def _moved(self, move: Callable[[Any], Any]) -> TrainingBatch:
        tokens, ones = self._tokens(), self._constant_masks()
        fields = {name: self[name] for name in self.keys() if name not in ones}
        if tokens is not None:
            tokens = move(tokens)
            moved = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
        else:
            moved = {"input_ids": move(self.input_ids)}
            if self.labels is self.input_ids:
                moved["labels"] = moved["input_ids"]
        for name in fields.keys() - moved.keys():
            moved[name] = move(fields[name]) if _can_move(fields[name]) else fields[name]
        metadata = self.metadata  # made now: it would hold the memory copied from
        if arrays := {name: move(value) for name, value in metadata.items() if _can_move(value)}:
            metadata = {**metadata, **arrays}
        return _make_batch(moved, tokens, ones, metadata)

    def __reduce__(self) -> tuple[Any, ...]:
        tokens, ones = self._tokens(), self._constant_masks()  # whoever writes into a mask must not reach processes
        skipped = ones if tokens is None else ("input_ids", "labels", *ones)
        fields = {name: self[name] for name in self.keys() if name not in skipped}
        return _rebuild_batch, (fields, tokens, ones, self.metadata)

    def _repr_html_(self) -> str:
        """What a notebook shows: the first rows, token by token."""
        from batchwright.looking import look

        return look(self)._repr_html_()

    def __repr__(self) -> str:
        rows, tokens = self.input_ids.shape
        return f"TrainingBatch({rows} rows x {tokens} tokens: {', '.join(self.keys())})"


def _make_batch(fields: dict[str, Any], tokens: Any, ones: tuple[str, ...], metadata: Any) -> TrainingBatch:
    others = {name: value for name, value in fields.items() if name not in ("input_ids", "labels", *_MASKS)}
    batch = TrainingBatch(
        fields["input_ids"],
        fields.get("attention_mask"),
        fields.get("labels"),
        fields.get("loss_mask"),
        metadata,
        **others,
    )
    batch._block = None if tokens is None else (tokens, 0, len(tokens))
    batch._ones = ones
    for name in ones:
        delattr(batch, name)
    return batch


def _rebuild_batch(
    fields: dict[str, Any], tokens: Any, ones: tuple[str, ...], metadata: dict[str, Any]
) -> TrainingBatch:
    if tokens is not None:
        fields |= {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
    return _make_batch(fields, tokens, ones, metadata)


def _adapter_of(array: Any) -> Any:
    """batchwright.adapters.<framework>, for the framework that an array is of; None where it is NumPy's."""
    top = type(array).__module__.partition(".")[0]
    framework = "jax" if top == "jaxlib" else top
    try:
        return None if framework == "numpy" else import_module(f"batchwright.adapters.{framework}")
    except ModuleNotFoundError:
        return None


def _can_move(value: Any) -> bool:
    """Whether a field is a framework's array: one of torch's (or of a subclass, defined wherever), or another's."""
    return hasattr(value, "pin_memory") or (hasattr(value, "shape") and _adapter_of(value) is not None)


def _is_same(one: Any, other: Any) -> bool:
    """Whether two arrays are the same memory, seen in the same way."""
    if type(one) is not type(other) or one.shape != other.shape or one.dtype != other.dtype:
        return False
    if hasattr(one, "data_ptr"):
        return bool(one.data_ptr() == other.data_ptr() and one.stride() == other.stride())
    return bool(one.ctypes.data == other.ctypes.data and one.strides == other.strides)


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """One piece of one document inside one row of the stream. The pieces of a row tile its window, in reading order.

    The row is at `position`, used by `step`, as `row_in_batch` of a `rank`, in an `epoch` of its `source`. The piece is
    tokens `window_span` of the window and `document_span` of the document: `row` and `lines` of a `file`, with this
    `text`. `is_skipped`: an amendment passes over the row.
    """

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
    """First and last line of the document's text that this piece touches, from 1. None of a conversation, whose lines
    are the template's and in no file, and where the tokenizer cannot decode."""
    is_skipped: bool = False
    """Whether an amendment lets the run pass over the row: then no step uses it."""
