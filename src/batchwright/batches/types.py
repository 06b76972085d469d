"""`TrainingBatch`, the input of a model, and `TraceRecord`, the origin of a row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, KeysView, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from batchwright.base.checks import at_least
from batchwright.base.errors import SpecError
from batchwright.batches.frameworks import Movable, adapter_of, on_host
from batchwright.typing import AnyArray, Tensor

__all__ = ["TraceRecord", "TrainingBatch"]

_MASKS = ("attention_mask", "loss_mask")
_OTHERS = ("position_ids", "segment_ids", "cu_seqlens", "max_seqlen")
_BORDERS = {
    "cu_seq_lens_q": "cu_seqlens",
    "cu_seq_lens_k": "cu_seqlens",
    "max_length_q": "max_seqlen",
    "max_length_k": "max_seqlen",
}
"""Hugging Face's names for the borders of packed samples, and the fields that hold them."""
_PLAIN = ("input_ids", "attention_mask", "labels")
_PACKED = ("input_ids", "labels", "position_ids", "use_cache")
_IGNORED = -100


@dataclass(init=False, repr=False, eq=False)
class TrainingBatch(Movable, MutableMapping[str, Any]):
    """One batch: `model(**batch)` for Hugging Face models, `batch.targets` for your own loop.

    The name of an array says what it is aligned with:

    labels[t]      belongs to input_ids[t], and the model shifts it. It is -100 where nothing is learned, and at the
                   first token of a row or packed sample.
    targets[t]     is the token that position t must predict; -100 where nothing is learned.
    loss_mask[t]   is the weight of targets[t]. Arrays per token in metadata (roles, advantages) belong to targets too.

    As a mapping, a batch is the input of a Hugging Face model. Packed rows pass position_ids and use_cache=False,
    and no attention mask: that is how transformers keeps samples apart. Preference pairs are not the input of one
    model, and `**batch` raises.

    input_ids, attention_mask, labels and targets are int64 [rows, tokens] (int32 in JAX, unless x64 is on); loss_mask
    is float32. Labels and targets are computed on first access. Assigning one updates the other, and the loss mask. Do
    not write into the arrays of a batch, which share memory. Assign a changed copy: `batch.labels = mine`.

    `metadata["source"]` names each row's source, `metadata["weight"]` is 0 for rows that only fill the batch up,
    `metadata["position"]` is each row's position, `metadata["state"]` is the loader's state *after* this batch,
    `metadata["tokenizer"]` is the file of the tokenizer that can decode it. Further inputs of a loss, such as the
    advantages of rollouts, are there too, as arrays of the batch's framework that move with it.

    >>> import numpy as np
    >>> batch = TrainingBatch(np.array([[5, 6, 7]]), targets=np.array([[6, 7, 8]]))
    >>> batch.labels.tolist()
    [[-100, 6, 7]]
    >>> batch.labels = np.array([[-100, -100, 7]])
    >>> batch.targets.tolist(), list(batch)
    ([[-100, 7, 8]], ['input_ids', 'attention_mask', 'labels'])
    """

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor
    loss_mask: Tensor
    metadata: dict[str, Any]
    last_targets: Tensor
    """The target of each row's last position, [rows]. Labels have no place for it."""
    if TYPE_CHECKING:
        targets: Tensor  # not a field: labels and last_targets hold the same
    position_ids: Tensor | None = None
    """Positions that start at 0 with every sample."""
    segment_ids: Tensor | None = None
    """Number of the sample inside its row, from 1; 0 for padding."""
    cu_seqlens: Tensor | None = None
    """The starts of samples in the rows of the batch, end to end, and the end of the last one."""
    max_seqlen: int | None = None
    """Tokens of the longest sample."""

    def __init__(
        self,
        input_ids: AnyArray,
        attention_mask: AnyArray | None = None,
        labels: AnyArray | None = None,
        loss_mask: AnyArray | None = None,
        metadata: dict[str, Any] | tuple[Any, ...] | None = None,
        *,
        targets: AnyArray | None = None,
        last_targets: AnyArray | None = None,
        position_ids: AnyArray | None = None,
        segment_ids: AnyArray | None = None,
        cu_seqlens: AnyArray | None = None,
        max_seqlen: int | None = None,
    ) -> None:
        """`input_ids`, `attention_mask`, `labels`, `loss_mask` and `metadata` are the fields of every batch.

        Give `labels` or `targets`; `targets` wins. `last_targets` adds the last target of each row to `labels`.
        `position_ids`, `segment_ids`, `cu_seqlens` and `max_seqlen` locate the samples of packed rows.
        `metadata` may be (function, *its arguments), to be called on first access.
        """
        if type(input_ids) is dict:
            raise TypeError(
                "a TrainingBatch is made of arrays, and a library has rebuilt it as a mapping: give that dict(batch), "
                "for example by collate_fn=dict"
            )
        own = self.__dict__
        own["input_ids"], own["_metadata"] = input_ids, metadata
        if targets is not None:
            own["targets"] = _contiguous(targets)
        elif labels is not None:
            last = _ignored_column(labels)
            if last_targets is not None:
                last = last_targets[:, None]
            own["labels"], own["targets"] = labels, _joined(labels[:, 1:], last)
        if attention_mask is not None:
            own["attention_mask"] = attention_mask
        if loss_mask is not None:
            own["loss_mask"] = loss_mask
        own["position_ids"], own["segment_ids"] = position_ids, segment_ids
        own["cu_seqlens"], own["max_seqlen"] = cu_seqlens, max_seqlen

    # Not fields of the dataclass:
    _loss_mask: ClassVar[Any] = None
    """The loss mask before targets were replaced. It weighs the new targets."""
    _block: ClassVar[Any] = None
    """[rows, tokens + 1]. input_ids is a view of it, and targets are made from it. A device copy moves it once."""
    _ones: ClassVar[tuple[str, ...]] = ()
    """Masks of ones, looked up on first access. A batch in a queue must not hold a mask that is written to."""

    # Computed on first access

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Make an attribute on first access."""
            made = self._make(name)
            if name != "loss_mask" or name in self._ones:  # made from targets, so it changes with them
                self.__dict__[name] = made
            return made

    def _make(self, name: str) -> Any:
        match name:
            case "targets":
                return _contiguous(self._raw_targets())
            case "labels":
                targets = self._raw_targets()
                return _joined(_ignored_column(targets), targets[:, :-1])
            case "last_targets":
                return self._raw_targets()[:, -1]
            case "metadata":
                metadata = self.__dict__["_metadata"] or {}
                if isinstance(metadata, tuple):
                    function, *arguments = metadata
                    metadata = function(*arguments)
                self.__dict__["_metadata"] = None  # it may hold the memory of an unfinished copy
                return metadata
            case "attention_mask" | "loss_mask" if name in self._ones:
                return self._adapter().shared_ones(name, self.input_ids)
            case "attention_mask":
                return self.input_ids * 0 + 1
            case "loss_mask":
                is_learned = self._raw_targets() != _IGNORED
                if self._loss_mask is not None:
                    return self._loss_mask * is_learned
                return _as_floats(is_learned)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    def _raw_targets(self) -> Any:
        """Targets, perhaps as a view with gaps."""
        if self._block is not None:
            return self._block[:, 1:]
        targets = self.__dict__.get("targets")
        if targets is None:
            return self.input_ids * 0 + _IGNORED
        return targets

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__
        match name:
            case "labels":
                targets = _joined(value[:, 1:], self.last_targets[:, None])
            case "last_targets":
                targets = _joined(self._raw_targets()[:, :-1], value[:, None])
            case "targets":
                targets = value
            case "input_ids":
                targets = self.targets
            case _ if name not in self.__dataclass_fields__:
                raise AttributeError(f"a TrainingBatch has no {name!r}; metadata[{name!r}] is yours, and moves with it")
            case _:
                own[name] = value
                return
        own["targets"], own["_block"] = targets, None
        if name != "input_ids":
            own.pop("labels", None)
            own.pop("last_targets", None)
            own["_ones"] = tuple(mask for mask in self._ones if mask != "loss_mask")
            own["_loss_mask"] = own.pop("loss_mask", self._loss_mask)
        own[name] = value

    # As a mapping: the input of a Hugging Face model

    def _names(self) -> tuple[str, ...]:
        """The names of a Hugging Face model's inputs."""
        if self.position_ids is None:
            return _PLAIN
        if self.segment_ids is None and self.cu_seqlens is None:
            return (*_PLAIN, "position_ids")
        if self.cu_seqlens is None:
            return _PACKED
        return (*_PACKED, *_BORDERS)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def keys(self) -> KeysView[str]:
        """Called by `**batch` and `dict(batch)`."""
        if "side" in self.metadata:
            raise SpecError(
                "a batch of preference pairs is not the input of one model: it would learn the rejected answers too",
                parameter="batch",
                remedy="use batch.input_ids, batch.targets and batch.loss_mask: chosen and rejected rows alternate",
            )
        if self.position_ids is None and (self.segment_ids is not None or self.cu_seqlens is not None):
            raise SpecError(
                "a model of Hugging Face would let the samples of a row attend to each other: position_ids are missing",
                parameter="position_ids",
                remedy="open the loader with position_ids=True",
            )
        return dict.fromkeys(self).keys()

    def __getitem__(self, name: str) -> Any:
        if name not in self._names():
            raise KeyError(name)
        if name == "use_cache":
            return False
        return getattr(self, _BORDERS.get(name, name))

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self._names():
            raise KeyError(name)
        if value is not self[name]:
            setattr(self, _BORDERS.get(name, name), value)

    def __delitem__(self, name: str) -> None:
        raise TypeError("cannot delete a field of a batch: make a dict(batch), and delete there")

    def __contains__(self, name: object) -> bool:
        return name in self._names()

    def __len__(self) -> int:
        """The number of rows."""
        return int(self.input_ids.shape[0])

    __eq__ = object.__eq__  # by identity: arrays have no answer that is one bool
    __hash__ = object.__hash__

    # Cutting, moving, sending to another process

    def parts(self, max_tokens: int) -> list[TrainingBatch]:
        """Split this batch into smaller ones of at most `max_tokens` tokens, padding included: gradient accumulation.

        Each row is in exactly one part, beside rows of similar length, and each part is as wide as its longest row.
        Metadata of the global batch is kept, so losses that divide by `global_tokens` add up to that of the whole
        batch. Call it before `to(device)`: it reads lengths on the host.
        """
        at_least(1, max_tokens=max_tokens)
        if self.cu_seqlens is not None:
            raise SpecError(
                "rows of several samples say by cu_seqlens where each begins, over the whole batch",
                parameter="max_tokens",
                remedy="cu_seqlens=False (position_ids and segment_ids stay), or a smaller batch_size",
            )
        is_real = np.asarray(on_host(self.attention_mask)) != 0
        rows, width = is_real.shape
        first = np.where(is_real.any(1), is_real.argmax(1), 0)
        last = np.where(is_real.any(1), width - is_real[:, ::-1].argmax(1), 0)
        metadata, fields = self.metadata, self._arrays()
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
                picked = _picked(value, part)
                if len(shape) > 1 and shape[1] == width:
                    return picked[:, places]
                return picked

            own = {name: cut(value) for name, value in fields.items()}
            made.append(_rebuild(own, None, (), {name: cut(value) for name, value in metadata.items()}))
        return made

    def _adapter(self) -> Any:
        adapter = adapter_of(self.input_ids)
        if adapter is None:
            raise TypeError(
                f"a batch of {type(self.input_ids).__name__} cannot move: open the loader with framework='torch'"
            )
        return adapter

    def _arrays(self) -> dict[str, Any]:
        """The arrays of this batch, by name; labels too, once they were made and may have been written to."""
        own, names = self.__dict__, ("input_ids", "labels", *_MASKS, *_OTHERS)
        arrays = {name: own[name] for name in names if own.get(name) is not None}
        arrays["targets"] = self._raw_targets()
        if self._loss_mask is not None:
            arrays.setdefault("loss_mask", self.loss_mask)
        return arrays

    def _constant_masks(self) -> tuple[str, ...]:
        """The masks that are ones in every batch. They are looked up anew, not moved."""
        adapter = adapter_of(self.input_ids)
        if adapter is None:
            return ()
        made = {name: self.__dict__[name] for name in _MASKS if name in self.__dict__}
        shared = {name for name, mask in made.items() if adapter.is_shared(mask)}
        return tuple(name for name in _MASKS if name in shared or (name in self._ones and name not in made))

    def _moved(self, move: Callable[[Any], Any]) -> Any:
        def moved(value: Any) -> Any:
            if adapter_of(value) is None:
                return value
            return move(value)

        self._adapter()  # refuses a batch of NumPy arrays
        arrays, tokens, ones, metadata = self._parts()
        arrays = {name: moved(value) for name, value in arrays.items()}
        metadata = {name: moved(value) for name, value in metadata.items()}
        return _rebuild(arrays, moved(tokens), ones, metadata)

    def _parts(self) -> tuple[dict[str, Any], Any, tuple[str, ...], dict[str, Any]]:
        """(arrays, the tokens behind input_ids and targets, names of masks of ones, metadata)."""
        tokens, ones = None, self._constant_masks()  # a write to a shared mask must not reach other processes
        arrays = {name: value for name, value in self._arrays().items() if name not in ones}
        if self._block is not None:
            tokens = self._block
            del arrays["input_ids"], arrays["targets"]
            if "targets" in self.__dict__:
                arrays["targets"] = self.targets
        return arrays, tokens, ones, self.metadata

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, self._parts()

    def __copy__(self) -> TrainingBatch:
        dict(self.items())  # computes them now, so that both have the same arrays
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin

    def _repr_html_(self) -> str:
        """The first rows, token by token, for notebooks."""
        from batchwright.batches.looking import look

        return look(self)._repr_html_()

    def __repr__(self) -> str:
        rows, tokens = self.input_ids.shape
        others = [name for name in _OTHERS if getattr(self, name) is not None]
        names = ["input_ids", "attention_mask", "labels", "targets", "loss_mask", *others]
        return f"TrainingBatch({rows} rows x {tokens} tokens: {', '.join(names)})"


def _rebuild(arrays: dict[str, Any], tokens: Any, ones: tuple[str, ...], metadata: dict[str, Any]) -> TrainingBatch:
    """A batch from the values of `_parts`."""
    if tokens is not None:
        arrays = {**arrays, "input_ids": tokens[:, :-1]}
    batch = TrainingBatch(arrays["input_ids"], metadata=metadata)
    batch.__dict__.update(arrays, _block=tokens, _ones=ones)
    return batch


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


def _picked(array: Any, rows: NDArray[np.int64]) -> Any:
    """Some rows of an array, by number."""
    adapter = adapter_of(array)
    if adapter is None:
        return array[rows]
    return adapter.picked(array, rows)


def _contiguous(array: Any) -> Any:
    if isinstance(array, np.ndarray):
        return np.ascontiguousarray(array)
    if hasattr(array, "contiguous"):
        return array.contiguous()
    return array


def _joined(left: Any, right: Any) -> Any:
    """[rows, a] and [rows, b] as [rows, a + b]."""
    adapter = adapter_of(left)
    if adapter is None:
        return np.concatenate([left, right], axis=1)
    return adapter.joined(left, right)


def _ignored_column(like: Any) -> Any:
    return like[:, :1] * 0 + _IGNORED


def _as_floats(mask: Any) -> Any:
    """A mask of bools as float32."""
    if isinstance(mask, np.ndarray):
        return mask.astype(np.float32)
    if hasattr(mask, "float"):
        return mask.float()
    return mask * 1.0


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """One piece of one document inside one row of the stream. The pieces of a row tile its window, in reading order.

    The row is at `position`, used by `step`, as `row_in_batch` of a `rank`, in an `epoch` of its `source`. The piece is
    tokens `window_span` of the window and `document_span` of the document: `row` and `lines` of a `file`, with this
    `text`. `is_skipped`: an amendment passes over the row.
    """

    step: int | None
    """The step that uses the row; None if the plan does not define how batches are cut."""
    position: int
    epoch: int
    """Epoch of the row's source."""
    rank: int
    row_in_batch: int
    source: str
    file: str
    """The raw file, by its name in the recipe; `<memory>` for rows given from Python."""
    row: int
    """The row inside the file, from 0. A line of JSONL is a row, and a text file is row 0."""
    window_span: tuple[int, int]
    """Tokens [start, stop) of the row's window that this piece fills."""
    document_span: tuple[int, int]
    """Tokens [start, stop) of the document that this piece is."""
    text: str | None
    """The decoded piece; None if the tokenizer cannot decode."""
    lines: tuple[int, int] | None
    """First and last line of the document's text that this piece touches, from 1. None for conversations, whose lines
    are the template's, and if the tokenizer cannot decode."""
    is_skipped: bool = False
    """Whether an amendment passes over the row, so that no step uses it."""
