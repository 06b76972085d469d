"""Batches of steps that are planned one by one: by a budget of tokens, or balanced over ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from batchwright.assemble.batch import Block
from batchwright.deliver.ahead import by_processes, by_threads
from batchwright.flow import Picked
from batchwright.loaders.interface import Made, Record
from batchwright.loaders.steps import AnyCut, Step, Steps
from batchwright.loaders.stream import BlockMaker, FlowBatches, block_of
from batchwright.order.budget import BLOCK_ROWS
from batchwright.types import TrainingBatch

__all__ = ["PlannedBatches"]

Gathered = Iterator[tuple[Step, Block]]

_BYTES_PER_TOKEN = 8 * 7
"""Of all arrays of a batch together, as CountedBatches counts them."""


@dataclass(slots=True, kw_only=True)
class PlannedBatches(FlowBatches):
    """One rank's batches of a run whose steps are planned, each gathered by itself."""

    steps: Steps
    most_tokens: int
    """Of a batch on all ranks together, padding included."""

    @property
    def cut(self) -> AnyCut:
        return self.steps.cut

    def is_over(self, position: int) -> bool:
        return self.steps.is_over(position)

    def batches(self, position: int, record: Record) -> Made[TrainingBatch]:
        """(batch, position after it) from a position to the end of the run."""
        return self.adapt.hand_over(self._whole(position, record))  # type: ignore[no-any-return]

    def _whole(self, position: int, record: Record) -> Made[TrainingBatch]:
        for step, block in self._gathered(self.steps.planned(position)):
            yield self._batch_of(step, block, record), step.after

    def turns(
        self, position: int, skipped: int, every: int, stop: int | None, record: Record
    ) -> Iterator[TrainingBatch]:
        """Each `every`-th batch from a position up to `stop`, after so many: for processes that take turns."""
        position = self.cut.after(position, skipped)
        for step, block in map(self._make, self.steps.planned(position, every=every, stop=stop)):
            yield self._batch_of(step, block, record)

    def _gathered(self, steps: Iterator[Step]) -> Gathered:
        if self.workers:
            return self._gathered_by_processes(steps)
        return by_threads(self._make, steps, self.prefetch) if self.prefetch else map(self._make, steps)

    def _make(self, step: Step) -> tuple[Step, Block]:
        return step, self.flow.make(_picked(step), self.pool.take)

    def _gathered_by_processes(self, steps: Iterator[Step]) -> Gathered:
        begun: deque[Step] = deque()

        def tasks() -> Iterator[Picked]:
            for step in steps:
                begun.append(step)
                yield _picked(step)

        rows = self.sequences * (self.most_tokens if self.most_tokens < BLOCK_ROWS else 2 * BLOCK_ROWS)
        slot_bytes = (self.most_tokens + rows) * _BYTES_PER_TOKEN + rows * 64 + 4096
        for arrays in by_processes(BlockMaker(self.flow), tasks(), self.workers, slot_bytes):
            del arrays["num_steps"]
            yield begun.popleft(), block_of(arrays, self.pool)

    def _batch_of(self, step: Step, block: Block, record: Record) -> TrainingBatch:
        self.adapt(block)
        rows = len(step.mine)
        return self._batch(self._fields(block, rows), 0, rows, (self._metadata, block, step, record))

    def _metadata(self, block: Block, step: Step, record: Record) -> dict[str, Any]:
        real = step.real_positions
        facts = self._facts(block, 0, len(step.mine)) | {"global_rows": len(real)} | self._totals(real)
        return facts | step.told() | {"state": self.steps.state(step, self.plan, record)}


def _picked(step: Step) -> Picked:
    return Picked(step.positions[step.mine], None if step.weight is None else step.weight[step.mine], step.width)
