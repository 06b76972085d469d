"""From a position to batches: tasks of many steps, blocks gathered for several of them, batches as slices of blocks.

Everything here is a function of (flow, cut, share, position); only the memory of blocks is reused. What is done in this
thread, ahead in another thread, or in worker processes gives the same batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from batchwright.base.memory import BlockPool
from batchwright.batches.ahead import by_processes, by_threads
from batchwright.batches.batch import Block, constant_mask, seqlens_of
from batchwright.batches.flow import Flow, LocatedRows, Picked, Task
from batchwright.batches.types import TrainingBatch
from batchwright.loaders.interface import Made, Record, state_at
from batchwright.order.sharding import Share
from batchwright.order.split import Cut

__all__ = [
    "Adapter",
    "BlockBatches",
    "BlockMaker",
    "CountedBatches",
    "FlowBatches",
    "NumpyBlocks",
    "block_of",
    "tasks_from",
]

_LOCATED_ROWS = 4096
"""Rows whose places are computed at once: the order then costs a batch about a microsecond."""
_LOCATED_ROWS_OF_MANY = 16_384
"""The same where there are several sources, whose tables are looked up anew each time: 20 to 40 ns less a row."""
_LOCATED_SPAN = 1 << 20
"""Positions over which those rows may lie."""
_BLOCK_BYTES = 2 << 20
"""Tokens gathered at once: small batches share a gather, and what was gathered is still in a cache when it is used."""
_AHEAD_BYTES = 4 << 20
"""The same for work that a thread or process does ahead: fewer hand-overs."""

Gathered = tuple[int, Block]
"""(number of steps, their rows)."""
Piece = tuple[int, LocatedRows, int, int]
"""(number of steps, where their rows lie, first row, last row): what one block is gathered from."""


class Adapter(Protocol):
    """Turns a block's arrays into a framework's tensors, in place, and has the masks of its batches."""

    masks_are_writable: bool

    def __call__(self, block: Block) -> None: ...

    def small(self, array: Any) -> Any: ...

    def masks(self, rows: int, tokens: int) -> tuple[Any, Any]: ...

    def hand_over(self, batches: Made[TrainingBatch]) -> Made[TrainingBatch]: ...


class BlockFields(NamedTuple):
    """The arrays of a block: what a batch takes slices of."""

    tokens: Any
    inputs: Any
    attention: Any
    loss: Any
    extra: dict[str, Any]
    widths: Any = None
    """Of rows of samples: tokens of the batch that each one is in."""
    seams: Any = None


@dataclass(slots=True, kw_only=True)
class BlockBatches:
    """What makes batches of blocks: slices of their arrays, and what metadata says of them."""

    names: Sequence[str]
    """Names of the sources."""
    row_tokens: int
    sequences: int = 1
    """Rows of a batch that one row of the order is: two for preference pairs."""
    plan: str
    """Fingerprint, for the states in batches' metadata."""
    adapt: Adapter
    pool: BlockPool = field(default_factory=BlockPool)
    prefetch: int = 0
    workers: int = 0
    record: Record
    tokenizer: str | None = None
    """The file of the tokenizer that can decode its tokens, for whoever looks at a batch."""

    def _fields(self, block: Block, width: int) -> BlockFields:
        """A block's fields as whole arrays, from which every batch of it is one slice each."""
        # Rows of samples have masks of their own, and may be much shorter than the longest that is allowed.
        attention, loss = self.adapt.masks(width, self.row_tokens if block.widths is None else 0)
        inputs = block.tokens[:, :-1]
        return BlockFields(block.tokens, inputs, attention, loss, block.extra, block.widths, block.seams)

    def _batch(self, fields: BlockFields, first: int, last: int, metadata: tuple[Any, ...]) -> TrainingBatch:
        if fields.widths is not None:
            return self._batch_of_samples(fields, first, last, metadata)
        inputs = fields.inputs[first:last]
        own = {name: array[first:last] for name, array in fields.extra.items()}
        loss, attention = own.pop("loss_mask", fields.loss), own.pop("attention_mask", fields.attention)
        batch = TrainingBatch(inputs, attention, None, loss, metadata, **own)
        if "targets" not in own:
            batch.__dict__["_block"] = fields.tokens[first:last]
        return batch

    def _batch_of_samples(self, fields: BlockFields, first: int, last: int, metadata: tuple[Any, ...]) -> TrainingBatch:
        """Rows as wide as their batch is, which other batches of the block may not be."""
        per = self.sequences
        rows = slice(first * per, last * per)
        width = int(fields.widths[first * per])
        inputs = fields.inputs[rows, :width]
        own = {name: array[rows, :width] for name, array in fields.extra.items()}
        if fields.seams is not None:
            borders, own["max_seqlen"] = seqlens_of(fields.seams[rows, :width])
            own["cu_seqlens"] = self.adapt.small(borders)
        return TrainingBatch(inputs, metadata=metadata, **own)

    def _facts(self, block: Block, first: int, last: int) -> dict[str, Any]:
        """What metadata says of a batch's own rows."""
        names, per = self.names, self.sequences
        weight = np.ones(last - first, np.float32) if block.weight is None else block.weight[first:last]
        shown: dict[str, Any] = {}
        if block.shown and block.widths is not None:
            width = int(block.widths[first * per])
            shown = {n: a[first * per : last * per, 1 : width + 1] for n, a in block.shown.items()}  # as targets are
        return {
            "source": [names[s] for s in _each(block.source[first:last], per).tolist()],
            "position": _each(block.position[first:last], per),
            "weight": _each(weight, per),
            **({"side": ["chosen", "rejected"] * (last - first)} if per > 1 else {}),
            **shown,
            **({"tokenizer": self.tokenizer} if self.tokenizer else {}),
        }


@dataclass(slots=True, kw_only=True)
class FlowBatches(BlockBatches):
    """Batches of blocks that a flow assembles."""

    flow: Flow

    def _totals(self, positions: NDArray[np.int64]) -> dict[str, Any]:
        """What all ranks together have at some positions, for rows of samples: from the index, without their tokens."""
        totals = self.flow.totals(positions)
        if totals is None:
            return {}
        tokens = int(totals[0]) if totals[0].is_integer() else totals[0]  # messages may have weights of their own
        return {"global_tokens": tokens, "global_sequences": totals[1]}

    def _facts(self, block: Block, first: int, last: int) -> dict[str, Any]:
        facts = BlockBatches._facts(self, block, first, last)
        if self.flow.fields.rows:
            documents = self.flow.documents(block.position[first:last])
            rows = [list(dict.fromkeys((str(d.file), d.row) for d in row)) for row in documents]
            facts["rows"] = [row for row in rows for _ in range(self.sequences)]
        return facts


@dataclass(slots=True, kw_only=True)
class CountedBatches(FlowBatches):
    """One rank's batches of a run that is cut one way."""

    cut: Cut
    share: Callable[[int], Share]
    """This rank's rows of a global batch of n rows."""
    end: int | None
    """Positions of the whole run; None for an endless one."""

    @property
    def width(self) -> int:
        """This rank's rows of a full batch."""
        return len(self.share(self.cut.rows_per_step))

    def batches(self, position: int) -> Made[TrainingBatch]:
        """(batch, position after it) from a position to the end of the run."""
        return self.adapt.hand_over(self._sliced(position))

    def _sliced(self, position: int) -> Made[TrainingBatch]:
        cut, adapt = self.cut, self.adapt
        rows = cut.rows_per_step
        position = cut.settle(position)
        last_simple = cut.last_simple(position)
        for num_steps, block in self._gathered(position):
            adapt(block)
            width = len(block.source) // num_steps
            fields = self._fields(block, width)
            tokens, inputs, attention, loss, extra, *_ = fields
            for first in range(0, num_steps * width, width):
                last = first + width
                if adapt.masks_are_writable and (attention._version or loss._version):
                    # Somebody wrote into a mask: no later batch may see it.
                    tokens, inputs, attention, loss, extra, *_ = fields = self._fields(block, width)
                begin = position
                if position <= last_simple:
                    position += rows
                else:
                    position = cut.settle(cut.after(position, 1))
                    last_simple = cut.last_simple(position)
                metadata = (self._metadata, block, first, last, position, begin)
                if not extra:  # nothing but tokens: the common case, kept short because it is hot
                    batch = TrainingBatch(inputs[first:last], attention, None, loss, metadata)
                    batch.__dict__["_block"] = tokens[first:last]
                else:
                    batch = self._batch(fields, first, last, metadata)
                yield batch, position

    def turns(self, position: int, skipped: int, every: int, stop: int | None) -> Iterator[TrainingBatch]:
        cut = self.cut
        position = cut.after(position, skipped)
        tasks = self._tasks(position, every=every, stop=stop)
        for num_steps, block in map(self._make, self._pieces(tasks, _BLOCK_BYTES)):
            self.adapt(block)
            width = len(block.source) // num_steps
            for first in range(0, num_steps * width, width):
                after, last = cut.settle(cut.after(position, 1)), first + width
                metadata = (self._metadata, block, first, last, after, position)
                yield self._batch(self._fields(block, width), first, last, metadata)
                position = cut.after(position, every)

    def _gathered(self, position: int) -> Iterator[Gathered]:
        if self.workers:
            return self._gathered_by_processes(position)
        tasks = self._tasks(position)
        if self.prefetch:
            return by_threads(self._make, self._pieces(tasks, _AHEAD_BYTES), self.prefetch)
        return map(self._make, self._pieces(tasks, _BLOCK_BYTES))

    def _tasks(
        self, position: int, largest: int | None = None, every: int = 1, stop: int | None = None
    ) -> Iterator[Task]:
        """All steps from a position to the end of the run (or `stop`), many at a time, never over the end of an epoch.

        `every`: only every `every`-th step.
        """
        at_once = _LOCATED_ROWS if len(self.flow.rows) == 1 else _LOCATED_ROWS_OF_MANY
        looked_up = self.cut.rows_per_step if self.flow.asks_all_ranks else self.width
        steps = max(1, at_once // looked_up)
        steps = steps if largest is None else min(steps, largest)
        return tasks_from(position, self.cut, self.share, self.end, steps, every=every, stop=stop)

    def _pieces(self, tasks: Iterator[Task], num_bytes: int) -> Iterator[Piece]:
        """Tasks cut into what is gathered at once."""
        steps = self._steps_in(num_bytes)
        for task in tasks:
            located, width = self.flow.locate(task), len(task.rows)
            for step in range(0, task.num_steps, steps):
                some = min(steps, task.num_steps - step)
                yield some, located, step * width, (step + some) * width

    def _steps_in(self, num_bytes: int) -> int:
        return max(1, num_bytes // (self.width * self.sequences * (self.row_tokens + 1) * 8))

    def _make(self, piece: Piece) -> Gathered:
        num_steps, located, first, last = piece
        return num_steps, located.make(first, last, self.pool.take)

    def _gathered_by_processes(self, position: int) -> Iterator[Gathered]:
        steps = self._steps_in(_AHEAD_BYTES)
        row_bytes = (self.row_tokens + 1) * 8 * 7 * self.sequences + 64
        # Of a short batch an uneven strategy may give this rank more rows than of a full one. Unused memory is free.
        slot_bytes = max(steps * self.width, self.cut.rows_per_step) * row_bytes + 4096
        tasks = self._tasks(position, largest=steps)
        for arrays in by_processes(BlockMaker(self.flow), tasks, self.workers, slot_bytes):
            num_steps = int(arrays.pop("num_steps")[0])
            yield num_steps, block_of(arrays, self.pool)

    def _metadata(self, block: Block, first: int, last: int, after: int, begin: int) -> dict[str, Any]:
        real = self.cut.real_rows(begin)
        totals = {} if block.widths is None else self._totals(self.cut.positions(begin, real))
        return self._facts(block, first, last) | {
            "global_rows": real,
            **totals,
            "state": state_at(after, self.plan, self.record),
        }


def tasks_from(
    position: int,
    cut: Cut,
    share: Callable[[int], Share],
    end: int | None,
    most: int,
    *,
    every: int = 1,
    stop: int | None = None,
) -> Iterator[Task]:
    """All steps from a position to the end of the run (or `stop`): tasks of `most` steps at most, each in one epoch.

    `every`: only every `every`-th step.
    """
    rows, live = cut.rows_per_step, cut.epochs.skips.live
    most = max(1, min(most, _LOCATED_SPAN // (rows * every)))
    while True:
        position = cut.settle(position)
        if cut.is_over(position, end) or (stop is not None and position >= stop):
            return
        real = cut.real_rows(position)
        if real < rows:
            steps = 1
        else:
            left = cut.whole_steps_left(position)
            if left is None:  # no epoch ends before the run does
                left = most * every if end is None else (live(end) - live(position)) // rows
                left = left if stop is None else min(left, -(-(live(stop) - live(position)) // rows))
            steps = min(most, -(-left // every))
        yield Task(live(position), steps, rows * every, share(cut.shared_rows(position)), real)
        position = cut.after(position, steps * every)


def _each(values: Any, times: int) -> Any:
    return values if times == 1 else np.repeat(values, times)


class NumpyBlocks:
    """Blocks as they are: NumPy arrays."""

    masks_are_writable = False

    def __call__(self, block: Block) -> None:
        pass

    def small(self, array: Any) -> Any:
        """An array that is of one batch alone."""
        return array

    def hand_over(self, batches: Made[TrainingBatch]) -> Made[TrainingBatch]:
        """Batches as the caller gets it: an adapter may convert each one here, on the caller's thread."""
        return batches

    def masks(self, rows: int, tokens: int) -> tuple[Any, Any]:
        return constant_mask(rows, tokens, "int64"), constant_mask(rows, tokens, "float32")


def block_of(arrays: dict[str, NDArray[Any]], pool: BlockPool) -> Block:
    """The block that a worker process made, out of the slot, which the worker will use again."""
    tokens = pool.take(*arrays["tokens"].shape)
    tokens[:] = arrays.pop("tokens")
    own = {name: array.copy() for name, array in arrays.items()}
    weight = own.pop("weight", None)
    block = Block(tokens, own.pop("source"), own.pop("position"), weight)
    block.widths, block.seams = own.pop("widths", None), own.pop("seams", None)
    block.shown = {name[6:]: own.pop(name) for name in list(own) if name.startswith("shown_")}
    block.extra = own
    return block


class BlockMaker:
    """What a worker process does: a task in, arrays out."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow

    def __call__(self, task: Task | Picked) -> dict[str, Any]:
        block = self.flow.make(task, lambda rows, width: np.empty((rows, width), np.int64))
        steps = np.array([task.num_steps])
        arrays = {"tokens": block.tokens, "source": block.source, "position": block.position, "num_steps": steps}
        arrays |= block.extra | {f"shown_{name}": array for name, array in block.shown.items()}
        arrays |= {name: value for name in ("widths", "seams") if (value := getattr(block, name)) is not None}
        return arrays if block.weight is None else {**arrays, "weight": block.weight}
