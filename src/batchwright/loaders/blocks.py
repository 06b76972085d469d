"""Batches of a flow, by count or as planned. Many steps by count are slices of one block, and located together.

Everything here is a function of (flow, cut, share, position); only the memory of blocks is reused. This thread, a
thread that works ahead, and worker processes make the same batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from batchwright.base.memory import BlockPool
from batchwright.batches.ahead import by_processes, by_threads
from batchwright.batches.batch import Block, constant_mask, seqlens_of
from batchwright.batches.flow import Flow, LocatedRows, Picked, Task
from batchwright.batches.frameworks import adapter
from batchwright.batches.types import TrainingBatch
from batchwright.loaders.interface import Made, Making, Record, Stream, state_at
from batchwright.loaders.run import Run
from batchwright.loaders.steps import Step, Steps
from batchwright.order.budget import BLOCK_ROWS
from batchwright.order.sharding import Share
from batchwright.order.split import Cut

__all__ = ["NumpyBlocks", "tasks_from"]

T = TypeVar("T")

_LOCATED_ROWS = 4096
"""Rows whose places are computed at once: the order then costs a batch about a microsecond."""
_LOCATED_ROWS_OF_MANY = 16_384
"""The same for several sources, whose tables are looked up anew each time: 20 to 40 ns less a row."""
_LOCATED_SPAN = 1 << 20
"""Positions over which those rows may lie."""
_BLOCK_BYTES = 2 << 20
"""Tokens gathered at once: small batches share a gather, and what was gathered is still in a cache when it is used."""
_AHEAD_BYTES = 4 << 20
"""The same for work that a thread or process does ahead: fewer hand-overs."""
_BYTES_PER_TOKEN = 8 * 7
"""The bytes of a token in a block, at most: ids, positions, segments, masks and the columns of samples."""

Borders = list[tuple[int, int]]
"""(position of the first row, position after the step) of some steps."""


class Piece(NamedTuple):
    """Some steps of a task whose rows are gathered into one block."""

    borders: Borders
    located: LocatedRows
    first: int
    last: int
    """Their rows: [first, last) of the located ones."""


class NumpyBlocks:
    """The adapter of NumPy. It leaves arrays unchanged; the adapters of other frameworks turn them into tensors."""

    masks_are_writable = False

    def __call__(self, block: Block) -> None:
        """Turn a block's arrays into tensors, in place."""

    def small(self, array: Any) -> Any:
        """Convert an array that belongs to one batch only."""
        return array

    def hand_over(self, batches: Made[TrainingBatch]) -> Made[TrainingBatch]:
        """Batches in the form for the caller. An adapter may convert each batch here, on the caller's thread."""
        return batches

    def masks(self, rows: int, tokens: int) -> tuple[Any, Any]:
        """(attention_mask, loss_mask) of ones, shared by all batches."""
        return constant_mask(rows, tokens, "int64"), constant_mask(rows, tokens, "float32")


class BlockFields(NamedTuple):
    """The arrays of a block. Batches are slices of them."""

    tokens: Any
    inputs: Any
    attention: Any
    loss: Any
    extra: dict[str, Any]
    widths: Any = None
    """For rows of samples: the width in tokens of each row's batch."""
    seams: Any = None


class BlockStream(Stream[TrainingBatch]):
    """A stream whose batches are slices of blocks."""

    pool: BlockPool
    """The memory of its blocks."""
    tokenizer: str | None = None
    """The file of the tokenizer that decodes the tokens, for tools that show a batch."""


class BlockBatches:
    """The maker of a block's batches: slices of its arrays, and their metadata."""

    def __init__(self, stream: BlockStream, run: Run, record: Record, making: Making) -> None:
        self.stream: BlockStream = stream
        self.names: list[str] = [source.name for source in stream.plan.all_sources]
        self.row_tokens: int = stream.plan.row_tokens
        self.sequences: int = stream.sequences
        self.adapt: NumpyBlocks = _adapter_of(making.framework)
        self.prefetch: int = making.prefetch
        self.workers: int = making.workers
        self.end: int | None = run.end
        self.record: Record = record

    def _fields(self, block: Block, width: int) -> BlockFields:
        """A block's fields as whole arrays. A batch takes one slice of each."""
        mask_tokens = self.row_tokens
        if block.widths is not None:  # rows of samples have their own masks, and may be much shorter
            mask_tokens = 0
        attention, loss = self.adapt.masks(width, mask_tokens)
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
        """A batch of rows cut to its own width. The batches of a block differ in width."""
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
        """The metadata of a batch's own rows."""
        per = self.sequences
        weight = np.ones(last - first, np.float32)
        if block.weight is not None:
            weight = block.weight[first:last]
        facts: dict[str, Any] = {
            "source": [self.names[source] for source in _each(block.source[first:last], per).tolist()],
            "position": _each(block.position[first:last], per),
            "weight": _each(weight, per),
        }
        if per > 1:
            facts["side"] = ["chosen", "rejected"] * (last - first)
        if block.shown and block.widths is not None:  # aligned with targets
            rows, columns = slice(first * per, last * per), slice(1, int(block.widths[first * per]) + 1)
            facts |= {name: array[rows, columns] for name, array in block.shown.items()}
        if self.stream.tokenizer:
            facts["tokenizer"] = self.stream.tokenizer
        return facts


class FlowBatches(BlockBatches):
    """Batches of blocks that a flow assembles."""

    def __init__(self, stream: BlockStream, run: Run, record: Record, making: Making, flow: Flow) -> None:
        super().__init__(stream, run, record, making)
        self.flow: Flow = flow

    def _totals(self, positions: NDArray[np.int64]) -> dict[str, Any]:
        """Sums over the samples at some positions, on all ranks. They come from the index, without reading tokens."""
        totals = self.flow.totals(positions)
        if totals is None:
            return {}
        tokens, sequences = totals
        if tokens.is_integer():  # messages may have weights
            tokens = int(tokens)
        return {"global_tokens": tokens, "global_sequences": sequences}

    def _facts(self, block: Block, first: int, last: int) -> dict[str, Any]:
        facts = super()._facts(block, first, last)
        if self.flow.fields.rows:
            documents = self.flow.documents(block.position[first:last])
            rows = [list(dict.fromkeys((str(d.file), d.row) for d in row)) for row in documents]
            facts["rows"] = [row for row in rows for _ in range(self.sequences)]
        return facts

    def _by_processes(
        self, steps: Iterator[T], task_of: Callable[[T], Task | Picked], slot_bytes: int
    ) -> Iterator[tuple[T, Block]]:
        """(step or steps, their block), gathered by worker processes."""
        steps, begun = itertools.tee(steps)
        results = by_processes(_BlockMaker(self.flow), map(task_of, begun), self.workers, slot_bytes)
        return zip(steps, (_block_of(arrays, self.stream.pool) for arrays in results), strict=True)


class CountedBatches(FlowBatches):
    """One rank's batches of a run that is cut by count."""

    def __init__(self, stream: BlockStream, run: Run, rows: int, record: Record, making: Making, flow: Flow) -> None:
        super().__init__(stream, run, record, making, flow)
        self.cut: Cut = run.cut_by_count(rows)
        self.share: Callable[[int], Share] = run.share

    @property
    def width(self) -> int:
        """This rank's rows of a full batch."""
        return len(self.share(self.cut.rows_per_step))

    def batches(self, position: int, skipped: int = 0, every: int = 1, stop: int | None = None) -> Made[TrainingBatch]:
        start = self.cut.after(position, skipped)
        return self.adapt.hand_over(self._sliced(start, every, stop))

    def _sliced(self, position: int, every: int = 1, stop: int | None = None) -> Made[TrainingBatch]:
        adapt = self.adapt
        for borders, block in self._gathered(position, every, stop):
            adapt(block)
            width = len(block.source) // len(borders)
            fields = self._fields(block, width)
            tokens, inputs, attention, loss, extra, *_ = fields
            last = 0
            for begin, after in borders:
                first, last = last, last + width
                if adapt.masks_are_writable and (attention._version or loss._version):
                    # The trainer wrote into a mask. Later batches get a new one.
                    tokens, inputs, attention, loss, extra, *_ = fields = self._fields(block, width)
                metadata = (self._metadata, block, first, last, after, begin)
                if not extra:  # tokens only: the common case, kept short for speed
                    batch = TrainingBatch(inputs[first:last], attention, None, loss, metadata)
                    batch.__dict__["_block"] = tokens[first:last]
                else:
                    batch = self._batch(fields, first, last, metadata)
                yield batch, after

    def _gathered(self, position: int, every: int, stop: int | None) -> Iterator[tuple[Borders, Block]]:
        if self.workers:
            return self._gathered_by_processes(position, every, stop)
        tasks = self.tasks(position, every=every, stop=stop)
        if self.prefetch:
            return by_threads(self._make, self._pieces(tasks, _AHEAD_BYTES), self.prefetch)
        return map(self._make, self._pieces(tasks, _BLOCK_BYTES))

    def tasks(
        self, position: int, *, most: int | None = None, every: int = 1, stop: int | None = None
    ) -> Iterator[Task]:
        """The steps from a position on, in tasks. The steps of a task are located together."""
        at_once = _LOCATED_ROWS
        if len(self.flow.rows) > 1:
            at_once = _LOCATED_ROWS_OF_MANY
        looked_up = self.width
        if self.flow.asks_all_ranks:
            looked_up = self.cut.rows_per_step
        steps = max(1, at_once // looked_up)
        return tasks_from(position, self.cut, self.share, self.end, min(steps, most or steps), every=every, stop=stop)

    def _pieces(self, tasks: Iterator[Task], num_bytes: int) -> Iterator[Piece]:
        """Tasks, cut into pieces. A piece is gathered at once."""
        steps = self._steps_in(num_bytes)
        for task in tasks:
            located, borders, width = self.flow.locate(task), borders_of(task, self.cut), len(task.rows)
            for step in range(0, task.num_steps, steps):
                some = borders[step : step + steps]
                yield Piece(some, located, step * width, (step + len(some)) * width)

    def _steps_in(self, num_bytes: int) -> int:
        return max(1, num_bytes // (self.width * self.sequences * (self.row_tokens + 1) * 8))

    def _make(self, piece: Piece) -> tuple[Borders, Block]:
        return piece.borders, piece.located.make(piece.first, piece.last, self.stream.pool.take)

    def _gathered_by_processes(self, position: int, every: int, stop: int | None) -> Iterator[tuple[Borders, Block]]:
        steps = self._steps_in(_AHEAD_BYTES)
        row_bytes = (self.row_tokens + 1) * _BYTES_PER_TOKEN * self.sequences + 64
        # An uneven sharding may give this rank more rows of a short batch than of a full one. Unused memory is free.
        slot_bytes = max(steps * self.width, self.cut.rows_per_step) * row_bytes + 4096
        tasks = self.tasks(position, most=steps, every=every, stop=stop)
        for task, block in self._by_processes(tasks, lambda task: task, slot_bytes):
            yield borders_of(task, self.cut), block

    def _metadata(self, block: Block, first: int, last: int, after: int, begin: int) -> dict[str, Any]:
        real = self.cut.real_rows(begin)
        facts = self._facts(block, first, last) | {"global_rows": real}
        if block.widths is not None:
            facts |= self._totals(self.cut.positions(begin, real))
        return facts | {"state": state_at(after, self.stream.plan.fingerprint, self.record)}


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
    """All steps from a position to the end of the run (or `stop`), in tasks of at most `most` steps of one epoch.

    `every`: only every `every`-th step.
    """
    rows, live = cut.rows_per_step, cut.epochs.skips.live
    most = max(1, min(most, _LOCATED_SPAN // (rows * every)))
    while True:
        position = cut.settle(position)
        if cut.is_over(position, end) or (stop is not None and position >= stop):
            return
        begin, real = live(position), cut.real_rows(position)
        left = cut.whole_steps_left(position)
        if left is None:  # no epoch ends before the run does
            left = most * every
            if end is not None:
                left = (live(end) - begin) // rows
            if stop is not None:
                left = min(left, -(-(live(stop) - begin) // rows))
        steps = min(most, max(1, -(-left // every)))  # the last, short step is a separate task
        yield Task(begin, steps, rows * every, share(cut.shared_rows(position)), real)
        position = cut.after(position, steps * every)


def borders_of(task: Task, cut: Cut) -> Borders:
    """(position of the first row, position after the step) of the steps of a task.

    >>> from batchwright.order.epochs import Epochs
    >>> cut = Cut(rows_per_step=4, epochs=Epochs.of(10), epoch_end="short")
    >>> [borders_of(task, cut) for task in tasks_from(0, cut, range, end=10, most=8)]
    [[(0, 4), (4, 8)], [(8, 10)]]
    """
    skips = cut.epochs.skips
    live = task.live + task.stride * np.arange(task.num_steps)
    begins = skips.positions(live).tolist()
    afters = skips.positions(live + cut.rows_per_step).tolist()
    afters[-1] = cut.settle(cut.after(begins[-1], 1))  # where an epoch may end
    return list(zip(begins, afters, strict=True))


def _each(values: Any, times: int) -> Any:
    if times == 1:
        return values
    return np.repeat(values, times)


def _adapter_of(framework: str) -> NumpyBlocks:
    if framework == "numpy":
        return NumpyBlocks()
    made: NumpyBlocks = getattr(adapter(framework), f"{framework.title()}Blocks")()
    return made


def _block_of(arrays: dict[str, NDArray[Any]], pool: BlockPool) -> Block:
    """The block of a worker process, copied out of its slot, which the worker will use again."""
    tokens = pool.take(*arrays["tokens"].shape)
    tokens[:] = arrays.pop("tokens")
    own = {name: array.copy() for name, array in arrays.items()}
    block = Block(tokens, own.pop("source"), own.pop("position"), own.pop("weight", None))
    block.widths, block.seams = own.pop("widths", None), own.pop("seams", None)
    block.shown = {name[6:]: own.pop(name) for name in list(own) if name.startswith("shown_")}
    block.extra = own
    return block


class _BlockMaker:
    """The function of a worker process. It turns a task into arrays."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow

    def __call__(self, task: Task | Picked) -> dict[str, Any]:
        block = self.flow.make(task, lambda rows, width: np.empty((rows, width), np.int64))
        arrays = {"tokens": block.tokens, "source": block.source, "position": block.position}
        arrays |= {"weight": block.weight, "widths": block.widths, "seams": block.seams}
        arrays |= block.extra | {f"shown_{name}": array for name, array in block.shown.items()}
        return {name: array for name, array in arrays.items() if array is not None}


# Planned steps


class PlannedBatches(FlowBatches):
    """One rank's batches of a run with planned steps. Each batch is gathered separately."""

    def __init__(self, stream: BlockStream, run: Run, rows: int, record: Record, making: Making, flow: Flow) -> None:
        super().__init__(stream, run, record, making, flow)
        self.steps: Steps = run.steps(rows, record)
        self.most_tokens: int = rows * self.sequences * self.row_tokens
        """Tokens of a global batch at most, padding included."""
        if run.budget is not None:
            self.most_tokens = run.budget.batch_tokens

    def batches(self, position: int, skipped: int = 0, every: int = 1, stop: int | None = None) -> Made[TrainingBatch]:
        start = self.steps.cut.after(position, skipped)
        return self.adapt.hand_over(self._made(self.steps.planned(start, every=every, stop=stop)))

    def _made(self, steps: Iterator[Step]) -> Made[TrainingBatch]:
        for step, block in self._gathered(steps):
            self.adapt(block)
            rows = len(step.mine)
            yield self._batch(self._fields(block, rows), 0, rows, (self._metadata, block, step)), step.after

    def _gathered(self, steps: Iterator[Step]) -> Iterator[tuple[Step, Block]]:
        if self.workers:
            rows = self.sequences * min(self.most_tokens, 2 * BLOCK_ROWS)
            slot_bytes = (self.most_tokens + rows) * _BYTES_PER_TOKEN + rows * 64 + 4096
            return self._by_processes(steps, _picked, slot_bytes)
        if self.prefetch:
            return by_threads(self._gather, steps, self.prefetch)
        return map(self._gather, steps)

    def _gather(self, step: Step) -> tuple[Step, Block]:
        return step, self.flow.make(_picked(step), self.stream.pool.take)

    def _metadata(self, block: Block, step: Step) -> dict[str, Any]:
        real = step.real_positions
        facts = self._facts(block, 0, len(step.mine)) | {"global_rows": len(real)} | self._totals(real)
        return facts | step.told() | {"state": self.steps.state(step)}


def _picked(step: Step) -> Picked:
    """This rank's rows of a step."""
    weight = step.weight
    if weight is not None:
        weight = weight[step.mine]
    return Picked(step.positions[step.mine], weight, step.width)
