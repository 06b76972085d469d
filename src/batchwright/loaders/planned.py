"""Batches of planned steps: cut by a budget of tokens, or balanced over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from batchwright.batches.ahead import by_threads
from batchwright.batches.batch import Block
from batchwright.batches.flow import Flow, Picked
from batchwright.batches.types import TrainingBatch
from batchwright.loaders.blocks import BlockStream, FlowBatches
from batchwright.loaders.interface import Made, Making, Record
from batchwright.loaders.run import Run
from batchwright.loaders.steps import Step, Steps
from batchwright.order.budget import BLOCK_ROWS

__all__ = ["PlannedBatches"]

_BYTES_PER_TOKEN = 8 * 7
"""The bytes of all arrays of a batch together, as CountedBatches counts them."""


class PlannedBatches(FlowBatches):
    """One rank's batches of a run with planned steps. Each batch is gathered separately."""

    def __init__(self, stream: BlockStream, run: Run, rows: int, record: Record, making: Making, flow: Flow) -> None:
        super().__init__(stream, run, record, making, flow)
        self.steps: Steps = run.steps(rows, record)
        self.most_tokens: int = rows * self.sequences * self.row_tokens
        """Tokens of a global batch at most, padding included."""
        if run.budget is not None:
            self.most_tokens = run.budget.batch_tokens

    def batches(self, position: int) -> Made[TrainingBatch]:
        """(batch, position after it) from a position to the end of the run."""
        return self.adapt.hand_over(self._made(self.steps.planned(position)))

    def turns(self, position: int, skipped: int, every: int, stop: int | None) -> Iterator[TrainingBatch]:
        start = self.steps.cut.after(position, skipped)
        return (batch for batch, _ in self._made(self.steps.planned(start, every=every, stop=stop)))

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
        return step, self.flow.make(_picked(step), self.pool.take)

    def _metadata(self, block: Block, step: Step) -> dict[str, Any]:
        real = step.real_positions
        facts = self._facts(block, 0, len(step.mine)) | {"global_rows": len(real)} | self._totals(real)
        return facts | step.told() | {"state": self.steps.state(step, self.plan, self.record)}


def _picked(step: Step) -> Picked:
    """This rank's rows of a step."""
    weight = step.weight
    if weight is not None:
        weight = weight[step.mine]
    return Picked(step.positions[step.mine], weight, step.width)
