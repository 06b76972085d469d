"""Batches of steps that are planned one by one: by a budget of tokens, or balanced over ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from batchwright.batches.ahead import by_processes, by_threads
from batchwright.batches.batch import Block
from batchwright.batches.flow import Picked
from batchwright.batches.types import TrainingBatch
from batchwright.loaders.interface import Made
from batchwright.loaders.steps import Step, Steps
from batchwright.loaders.stream import BlockMaker, FlowBatches, block_of
from batchwright.order.budget import BLOCK_ROWS

__all__ = ["PlannedBatches"]

_BYTES_PER_TOKEN = 8 * 7
"""Of all arrays of a batch together, as CountedBatches counts them."""


@dataclass(slots=True, kw_only=True)
class PlannedBatches(FlowBatches):
    """One rank's batches of a run whose steps are planned, each gathered by itself."""

    steps: Steps
    most_tokens: int
    """Tokens of a global batch at most, padding included."""

    def batches(self, position: int) -> Made[TrainingBatch]:
        """(batch, position after it) from a position to the end of the run."""
        return self.adapt.hand_over(self._whole(position))

    def _whole(self, position: int) -> Made[TrainingBatch]:
        for step, block in self._gathered(self.steps.planned(position)):
            yield self._batch_of(step, block), step.after

    def turns(self, position: int, skipped: int, every: int, stop: int | None) -> Iterator[TrainingBatch]:
        position = self.steps.cut.after(position, skipped)
        for step, block in map(self._make, self.steps.planned(position, every=every, stop=stop)):
            yield self._batch_of(step, block)

    def _gathered(self, steps: Iterator[Step]) -> Iterator[tuple[Step, Block]]:
        if self.workers:
            return self._gathered_by_processes(steps)
        return by_threads(self._make, steps, self.prefetch) if self.prefetch else map(self._make, steps)

    def _make(self, step: Step) -> tuple[Step, Block]:
        return step, self.flow.make(_picked(step), self.pool.take)

    def _gathered_by_processes(self, steps: Iterator[Step]) -> Iterator[tuple[Step, Block]]:
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

    def _batch_of(self, step: Step, block: Block) -> TrainingBatch:
        self.adapt(block)
        rows = len(step.mine)
        return self._batch(self._fields(block, rows), 0, rows, (self._metadata, block, step))

    def _metadata(self, block: Block, step: Step) -> dict[str, Any]:
        real = step.real_positions
        facts = self._facts(block, 0, len(step.mine)) | {"global_rows": len(real)} | self._totals(real)
        return facts | step.told() | {"state": self.steps.state(step, self.plan, self.record)}


def _picked(step: Step) -> Picked:
    return Picked(step.positions[step.mine], None if step.weight is None else step.weight[step.mine], step.width)
