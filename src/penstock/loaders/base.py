"""What every loader does: one cursor over a stream of rows, and batches handed over from it.

The cursor is a position. It moves when a batch is handed to the caller, never when one is made ahead of need. All
else follows from the position: what comes next, how much of each source was seen, what a checkpoint must hold.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from penstock.assemble.batch import Block, constant_mask
from penstock.deliver.ahead import by_processes, by_threads
from penstock.deliver.memory import BlockPool
from penstock.deliver.ranks import Ranks
from penstock.errors import EndOfRun, PlanError, SpecError
from penstock.flow import Flow, Located, Task
from penstock.order.split import Cut, position_of_step, share, step_of_position
from penstock.plan import Plan, State
from penstock.spec import at_least, one_of
from penstock.types import TrainingBatch

__all__ = ["DataLoader"]

_LOCATED_ROWS = 4096
"""Rows whose places are computed at once: the order then costs a batch about a microsecond."""
_LOCATED_SPAN = 1 << 20
"""Positions over which those rows may lie."""
_BLOCK_BYTES = 512 << 10
"""Tokens gathered at once: small batches share a gather, and the block still fits a core's second-level cache."""
_AHEAD_BYTES = 4 << 20
"""The same for work that a thread or process does ahead: fewer hand-overs."""

log = logging.getLogger("penstock")

Ready = tuple[TrainingBatch, int]
"""A batch that is ready to be handed over, and the position after it."""
Piece = tuple[int, Located, int, int]
"""(number of steps, where their rows lie, first row, last row): what one block is gathered from."""


class BlockFields(NamedTuple):
    """The arrays of a block: what a batch takes slices of."""

    tokens: Any
    inputs: Any
    labels: Any
    attention: Any
    loss: Any
    extra: dict[str, Any]


class DataLoader:
    """Batches from one cursor. `get_batch`, `get_iterator`, `get_num_batches`, `reset`; `state_dict` and back.

    `batch_size` is global: each rank gets its contiguous share of every batch. Loaders are opened through a door such
    as `PretrainDataLoader`; all doors share this interface.
    """

    _position: int
    _steps: list[list[int]]
    _stream: Generator[Ready, None, None] | None = None
    _stream_position: int
    _stream_rows: int
    _stream_steps: list[list[int]]

    def __init__(
        self,
        flow: Flow,
        plan: Plan,
        *,
        batch_size: int = 8,
        ranks: Ranks | None = None,
        epochs: int | None = 1,
        framework: str | None = None,
        uneven: bool = False,
        alignment: str = "next",
        prefetch: int = 0,
        workers: int = 0,
    ) -> None:
        self._flow, self._plan = flow, plan
        self._ranks = ranks or Ranks(0, 1, "nothing says otherwise")
        self.batch_size = at_least(1, batch_size=batch_size)
        self.epochs = None if epochs is None else at_least(1, epochs=epochs)
        self.framework = one_of(
            ("numpy", "torch"), framework=framework or ("torch" if "torch" in sys.modules else "numpy")
        )
        self.alignment = one_of(("next", "same"), alignment=alignment)
        self.uneven = uneven
        self.prefetch = at_least(0, prefetch=prefetch)
        self.workers = at_least(0, workers=workers)
        if self._is_over(0, self._cut(self.batch_size)):
            raise SpecError(
                f"batch_size={self.batch_size} is more than the whole run, which has {self._end} rows",
                parameter="batch_size",
                remedy=f"batch_size={self._end} or less, or more epochs",
            )
        self._share(self.batch_size)
        self._pool = BlockPool()
        self._generation = 0
        self._handed_any = False
        self._go_to(0, [[0, 0, self.batch_size]])
        self._started_seconds: float | None = None
        self._wait_seconds = 0.0
        self._adapt = _adapter(self.framework)
        log.info("%s: rank %d of %d (%s)", type(self).__name__, self.rank, self.world_size, self._ranks.found_in)

    # What this loader is

    @property
    def rank(self) -> int:
        return self._ranks.rank

    @property
    def world_size(self) -> int:
        return self._ranks.world_size

    @property
    def plan(self) -> Plan:
        """What fixes every row of the stream, with how this loader cut it into batches."""
        return self._plan.cut_as(self._steps, self.world_size)

    @property
    def position(self) -> int:
        """Rows of the global stream that were handed over, on all ranks together."""
        return self._position

    @property
    def step(self) -> int:
        """Batches that were handed over."""
        return step_of_position(self._steps, self._position, **self._epoch_spec)

    @property
    def epoch(self) -> int:
        rows = self._plan.epoch_rows
        return 0 if rows is None else self._position // rows

    @property
    def _epoch_spec(self) -> dict[str, Any]:
        return {"epoch_rows": self._plan.epoch_rows, "epoch_end": self._plan.epoch_end}

    def get_num_batches(self) -> int:
        """Batches per epoch: the same on every rank."""
        rows = self._plan.epoch_rows
        if rows is None:
            raise SpecError(
                "a mixture by weights has no end, so no number of batches",
                remedy="num_rows=, num_tokens=, or stop='first_exhausted' or 'all_exhausted' gives it one",
            )
        return self._cut(self.batch_size).steps_per_epoch

    def __len__(self) -> int:
        return self.get_num_batches()

    # Batches

    def get_batch(self, batch_size: int | None = None) -> TrainingBatch:
        """The next batch, of `batch_size` rows over all ranks together. Goes on into the next epoch, if one is left."""
        rows = self.batch_size if batch_size is None else at_least(1, batch_size=batch_size)
        began = time.perf_counter()
        self._generation += 1
        if rows != self._steps[-1][2]:
            self._share(rows)
        batch = self._hand_over(rows)
        if batch is None:
            raise self._end_of_run()
        self._waited(began)
        return batch

    def get_iterator(self) -> Iterator[TrainingBatch]:
        """Batches from the cursor to the end of the current epoch; the next call starts the next epoch.

        A loader has one cursor: opening a second iterator ends the first one with an error.
        """
        rows = self.batch_size
        cut = self._cut(rows)
        position = cut.settle(self._position)
        if self._is_over(position, cut):
            if self._handed_any:
                raise self._end_of_run()
            return iter(())  # a finished run, restored: there is nothing left to do, and that is no fault
        self._generation += 1
        epoch_rows = self._plan.epoch_rows
        return self._iterate(
            self._generation, None if epoch_rows is None else (position // epoch_rows + 1) * epoch_rows
        )

    def __iter__(self) -> Iterator[TrainingBatch]:
        return self.get_iterator()

    def _iterate(self, generation: int, end: int | None) -> Iterator[TrainingBatch]:
        rows = self.batch_size
        clock = time.perf_counter
        if self._started_seconds is None:
            self._started_seconds = clock()
        while end is None or self._position < end:
            began = clock()
            if generation != self._generation:
                raise PlanError(
                    "this iterator was ended by a newer one (or by get_batch): a loader has one cursor",
                    remedy="open a second loader to read twice at once",
                )
            batch = self._hand_over(rows)
            if batch is None:
                return
            self._wait_seconds += clock() - began
            yield batch

    def _hand_over(self, rows: int) -> TrainingBatch | None:
        """The batch at the cursor, and the cursor moved past it; None at the end of the run."""
        if self._stream is None or self._position != self._stream_position or rows != self._stream_rows:
            self._open_stream(rows)
        assert self._stream is not None
        ready = next(self._stream, None)
        if ready is None:
            self._close_stream()
            return None
        batch, self._stream_position = ready
        self._position = self._stream_position
        self._steps = self._stream_steps
        self._handed_any = True
        return batch

    def _open_stream(self, rows: int) -> None:
        self._close_stream()
        record = self._steps
        if rows != record[-1][2]:
            record = _with_cut(record, self._position, rows, **self._epoch_spec)
        self._stream = self._ready(self._position, rows, record)
        self._stream_position, self._stream_rows, self._stream_steps = self._position, rows, record

    def _close_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _ready(self, position: int, rows: int, record: list[list[int]]) -> Generator[Ready, None, None]:
        """(batch, position after it) from a position to the end of the run. Several batches share a gathered block."""
        cut, mine = self._cut(rows), self._share(rows)
        width = len(mine)
        if self.workers:
            made = self._made_by_processes(position, cut, mine)
        else:
            steps = self._steps_per_block(width, _AHEAD_BYTES if self.prefetch else _BLOCK_BYTES)
            pieces = self._pieces(self._tasks(position, cut, mine), width, steps)
            made = by_threads(self._make, pieces, self.prefetch) if self.prefetch else map(self._make, pieces)
        position = cut.settle(position)
        last_simple = cut.last_simple(position)
        plain = self.alignment == "next"
        for num_steps, block in made:
            fields = self._fields(self._adapt(block), width)
            for first in range(0, num_steps * width, width) if width else [0] * num_steps:
                last = first + width
                if position <= last_simple:
                    position += rows
                else:
                    position = cut.settle(cut.after(position, 1))
                    last_simple = cut.last_simple(position)
                metadata = partial(self._metadata, block, first, last, rows, position, record)
                if plain and not block.extra:  # nothing but tokens: the common case, kept short because it is hot
                    tokens, inputs, labels, attention, loss, _ = fields
                    batch = TrainingBatch(inputs[first:last], attention, labels[first:last], loss, metadata)
                    batch._block = (tokens, first, last)
                else:
                    batch = self._batch(fields, first, last, metadata)
                yield batch, position

    def _tasks(self, position: int, cut: Cut, mine: range, largest: int | None = None) -> Iterator[Task]:
        """All steps from a position to the end of the run, many at a time, never over the end of an epoch."""
        rows = cut.rows_per_step
        most = max(1, min(_LOCATED_ROWS // max(len(mine), 1), _LOCATED_SPAN // rows))
        most = most if largest is None else min(most, largest)
        end = self._end
        while True:
            position = cut.settle(position)
            if self._is_over(position, cut):
                return
            real = cut.real_rows(position)
            if real < rows:
                steps = 1
            elif cut.is_linear:
                steps = most if end is None else min(most, (end - position) // rows)
            else:
                assert cut.epoch_rows is not None
                steps = min(most, (cut.epoch_rows - position % cut.epoch_rows) // rows)
            yield Task(position, steps, rows, mine.start, mine.stop, real)
            position = cut.after(position, steps)

    def _pieces(self, tasks: Iterator[Task], width: int, steps: int) -> Iterator[Piece]:
        for task in tasks:
            located = self._flow.locate(task)
            for step in range(0, task.num_steps, steps):
                some = min(steps, task.num_steps - step)
                yield some, located, step * width, (step + some) * width

    def _make(self, piece: Piece) -> tuple[int, Block]:
        num_steps, located, first, last = piece
        return num_steps, located.make(first, last, self._pool.take)

    def _made_by_processes(self, position: int, cut: Cut, mine: range) -> Iterator[tuple[int, Block]]:
        steps = self._steps_per_block(len(mine), _AHEAD_BYTES)
        tasks = self._tasks(position, cut, mine, largest=steps)
        slot_bytes = steps * len(mine) * ((self._flow.row_tokens + 1) * 8 * 6 + 64) + 4096
        for arrays in by_processes(_Maker(self._flow), tasks, self.workers, slot_bytes):
            tokens = self._pool.take(*arrays["tokens"].shape)
            tokens[:] = arrays.pop("tokens")  # out of the slot, which the worker will use again
            own = {name: array.copy() for name, array in arrays.items()}
            num_steps, weight = int(own.pop("num_steps")[0]), own.pop("weight", None)
            yield num_steps, Block(tokens, own.pop("source"), own.pop("position"), weight, own)

    def _steps_per_block(self, width: int, num_bytes: int) -> int:
        return max(1, num_bytes // (max(width, 1) * (self._flow.row_tokens + 1) * 8))

    def _fields(self, block: Block, width: int) -> BlockFields:
        """A block's fields as whole arrays, from which every batch of it is one slice each."""
        attention, loss = self._adapt.masks(width, self._flow.row_tokens)
        return BlockFields(block.tokens, block.tokens[:, :-1], block.tokens[:, 1:], attention, loss, block.extra)

    def _batch(
        self, fields: BlockFields, first: int, last: int, metadata: Callable[[], dict[str, Any]]
    ) -> TrainingBatch:
        inputs = fields.inputs[first:last]
        own = {name: array[first:last] for name, array in fields.extra.items()}
        labels, loss = own.pop("labels", None), own.pop("loss_mask", fields.loss)
        if self.alignment == "same":
            labels, loss = self._adapt.same_alignment(inputs, None if labels is None else loss)
            return TrainingBatch(inputs, fields.attention, labels, loss, metadata, **own)
        if labels is not None:
            return TrainingBatch(inputs, fields.attention, labels, loss, metadata, **own)
        batch = TrainingBatch(inputs, fields.attention, fields.labels[first:last], loss, metadata, **own)
        batch._block = (fields.tokens, first, last)
        return batch

    def _metadata(
        self, block: Block, first: int, last: int, rows: int, after: int, steps: list[list[int]]
    ) -> dict[str, Any]:
        names = self._flow.order.names
        weight = np.ones(last - first, np.float32) if block.weight is None else block.weight[first:last]
        return {
            "source": [names[s] for s in block.source[first:last].tolist()],
            "position": block.position[first:last],
            "weight": weight,
            "global_rows": rows,
            "state": {"position": after, "plan": self._plan.fingerprint, "steps": steps},
        }

    # The cursor

    def state_dict(self) -> State:
        """Where this loader is: JSON, tens of bytes, for any number of ranks and workers."""
        return {"position": self._position, "plan": self._plan.fingerprint, "steps": [list(t) for t in self._steps]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where a loader of the same plan was. Another batch size, other ranks or workers are fine."""
        try:
            position, plan, steps = int(state["position"]), state["plan"], [[int(x) for x in t] for t in state["steps"]]
            if position < 0 or any(len(t) != 3 or t[2] < 1 for t in steps):
                raise ValueError
            if steps[:1] != [[0, 0, *steps[0][2:]]] or steps != sorted(steps):
                raise ValueError
        except (KeyError, IndexError, TypeError, ValueError):
            raise PlanError(
                "this is not a loader's state", got=_shortened(state), remedy="what state_dict() returned"
            ) from None
        if plan != self._plan.fingerprint:
            other = self._known_plan(plan)
            raise PlanError(
                f"this state belongs to plan {plan}, and this loader runs plan {self._plan.fingerprint}",
                differs=self._plan.difference(other)
                if other
                else "that plan is not kept here, so what differs is not known",
                remedy="open the loader with the settings of that run, or with plan= (its fingerprint or file)",
            )
        if steps[-1][2] != self.batch_size:
            steps = _with_cut(steps, position, self.batch_size, **self._epoch_spec)
        self._go_to(position, steps)
        self._handed_any = False

    def _known_plan(self, fingerprint: str) -> Plan | None:
        """A plan by its name, where plans are kept; doors that keep them know."""
        return None

    def seek(self, *, step: int | None = None, position: int | None = None) -> None:
        """Go anywhere, at once."""
        if (step is None) == (position is None):
            raise SpecError("seek takes step= or position=", parameter="step", remedy="seek(step=1000)")
        if step is not None:
            position, _ = position_of_step(self._steps, step, **self._epoch_spec)
        assert position is not None
        if position < 0 or (self._end is not None and position > self._end):
            raise PlanError(f"position {position} is outside this run", remedy=f"a position from 0 to {self._end}")
        kept = (
            [t for t in self._steps if t[1] <= position] if step is None else [t for t in self._steps if t[0] <= step]
        )
        if step is None or kept[-1][2] != self.batch_size:
            kept = _with_cut(kept, position, self.batch_size, **self._epoch_spec)
        self._go_to(position, kept)
        self._handed_any = False

    def reset(self) -> None:
        """Back to position 0."""
        self._go_to(0, [[0, 0, self.batch_size]])
        self._handed_any = False

    def _go_to(self, position: int, steps: list[list[int]]) -> None:
        self._close_stream()
        self._position, self._steps = position, steps
        self._generation += 1

    # Ends and shares

    @property
    def _end(self) -> int | None:
        """Positions of the whole run; None for an endless one."""
        rows = self._plan.epoch_rows
        return None if rows is None or self.epochs is None else rows * self.epochs

    def _is_over(self, position: int, cut: Cut) -> bool:
        end = self._end
        return end is not None and (position >= end or (cut.is_linear and position + cut.rows_per_step > end))

    def _end_of_run(self) -> EndOfRun:
        return EndOfRun(
            f"the run is over: {self.epochs} epoch{'s' if self.epochs != 1 else ''}, {self._position:,} rows",
            remedy=f"epochs={(self.epochs or 0) + 1} for more, epochs=None for no end, or reset() to start again",
        )

    def _cut(self, rows: int) -> Cut:
        return Cut(rows_per_step=rows, **self._epoch_spec)

    def _share(self, rows: int) -> range:
        """This rank's rows of a batch."""
        world = self.world_size
        if rows % world and not self.uneven:
            up = -(-rows // world) * world
            down = f"{up - world} or " if up > world else ""
            raise SpecError(
                f"batch_size={rows} does not divide by world_size={world}",
                parameter="batch_size",
                remedy=f"batch_size={down}{up} (it is global: each rank gets its share), or uneven=True",
            )
        return share(rows, rank=self.rank, world=world)

    # What was seen

    def stats(self) -> dict[str, Any]:
        """Where the run is, from the position alone (so also right after a resume), and how long the caller waited."""
        counts = self._flow.order.counts(self._position)
        tokens = self._flow.row_tokens
        elapsed = 0.0 if self._started_seconds is None else time.perf_counter() - self._started_seconds
        return {
            "step": self.step,
            "position": self._position,
            "epoch": self.epoch,
            "tokens": self._position * tokens,
            "tokens_per_source": {n: c * tokens for n, c in zip(self._flow.order.names, counts, strict=True)},
            "data_wait_percent": 100 * self._wait_seconds / elapsed if elapsed else 0.0,
        }

    def _waited(self, began: float) -> None:
        now = time.perf_counter()
        if self._started_seconds is None:
            self._started_seconds = began
        self._wait_seconds += now - began

    def torch(self) -> Any:
        """This loader as a torch IterableDataset of whole batches: `DataLoader(loader.torch(), batch_size=None)`."""
        from penstock.adapters.torch import TorchBatches

        return TorchBatches(self)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()  # without threads, maps or memory: another process makes its own
        for name in ("_stream", "_pool", "_adapt"):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._pool, self._adapt = BlockPool(), _adapter(self.framework)

    def __repr__(self) -> str:
        mine = len(self._share(self.batch_size))
        rank = f", rank {self.rank} of {self.world_size} gets {mine}" if self.world_size > 1 else ""
        rows = self._plan.epoch_rows
        epochs = (
            "endless"
            if rows is None or self.epochs is None
            else f"{self.epochs} epoch{'s' if self.epochs != 1 else ''}"
        )
        steps = "" if rows is None else f", {self.get_num_batches():,} steps an epoch"
        return (
            f"{type(self).__name__}: batches of {self.batch_size} x {self._flow.row_tokens} ({self.framework}){rank}, "
            f"{epochs}{steps}, at step {self.step:,} (position {self._position:,})\n{self._plan!r}"
        )


class _Maker:
    """What a worker process does: a task in, arrays out."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow

    def __call__(self, task: Task) -> dict[str, Any]:
        block = self.flow.make(task, lambda rows, width: np.empty((rows, width), np.int64))
        steps = np.array([task.num_steps])
        arrays = {"tokens": block.tokens, "source": block.source, "position": block.position, "num_steps": steps}
        arrays |= block.extra
        return arrays if block.weight is None else {**arrays, "weight": block.weight}


def _with_cut(
    steps: list[list[int]], position: int, rows: int, *, epoch_rows: int | None, epoch_end: str
) -> list[list[int]]:
    """A record of steps that goes on from `position` with `rows` a step."""
    spec: dict[str, Any] = {"epoch_rows": epoch_rows, "epoch_end": epoch_end}
    step = step_of_position(steps, position, **spec)
    at, _ = position_of_step(steps, step, **spec)
    if at == position and steps[-1][2] == rows:
        return steps
    step += at < position  # inside a step: what was used of it counts as a step
    return [*(t for t in steps if t[0] < step), [step, position, rows]]


class NumpyBatches:
    """Blocks as they are: NumPy arrays."""

    def __call__(self, block: Block) -> Block:
        return block

    def masks(self, rows: int, tokens: int) -> tuple[Any, Any]:
        return constant_mask(rows, tokens, "int64"), constant_mask(rows, tokens, "float32")

    def same_alignment(self, inputs: Any, loss: Any) -> tuple[Any, Any]:
        """(labels, loss_mask) where labels are the inputs and the model shifts them: each mask moves with its token."""
        if loss is None:
            shifted = np.ones(inputs.shape, np.float32)
        else:
            shifted = np.concatenate([np.ones_like(loss[:, :1]), loss[:, :-1]], axis=1)
        shifted[:, 0] = 0  # the first token is never predicted
        return np.where(shifted > 0, inputs, -100) if loss is not None else inputs, shifted


def _adapter(framework: str) -> Any:
    if framework == "torch":
        from penstock.adapters.torch import TorchBlocks

        return TorchBlocks()
    return NumpyBatches()


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
