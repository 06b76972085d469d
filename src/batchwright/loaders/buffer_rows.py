"""The loader over one version of a buffer: rows by column, shuffled, in epochs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.base.checks import one_of
from batchwright.base.errors import PlanError, SpecError
from batchwright.batches.settings import Asked, Batching, Scope, Shuffle
from batchwright.buffer.batch import RowBatch
from batchwright.buffer.view import View
from batchwright.loaders.blocks import borders_of, tasks_from
from batchwright.loaders.interface import Made, Making, Record, UnkeptStream, state_at
from batchwright.loaders.loader import Loader
from batchwright.loaders.planning import shuffle_of
from batchwright.loaders.run import Run
from batchwright.order.plan import Plan, PlanSource
from batchwright.order.sharding import Share
from batchwright.order.split import Cut
from batchwright.typing import Framework

__all__ = ["RowDataLoader"]

_LOCATED_ROWS = 4096
"""Rows whose places are computed at once: the order then costs a batch next to nothing."""


class RowDataLoader(Loader[RowBatch]):
    """The loader that `buffer.loader(...)` opens. The order of its rows is fixed by (rows, seed, epoch).

    It reads the version at which it was opened; later changes of the buffer have no effect. `batch_size` is global, and
    each rank gets its share. The cursor moves when a batch is handed over. A run continues exactly at `state_dict()`,
    also with other ranks, another batch size, or in another process over the same rows.

    `batch.metadata` has each row's "position", its "weight" (0 for a row that only fills a batch up), "global_rows"
    (the rows with data, on all ranks) and the "state" after the batch.
    """

    def __init__(
        self,
        version: View,
        *,
        batch_size: int | Batching | None = None,
        seed: int | None = None,
        shuffle: bool | Scope | Shuffle = True,
        epochs: int | None = 1,
        rank: int | None = None,
        world_size: int | None = None,
        framework: Framework = "numpy",
    ) -> None:
        """`shuffle` is "global" or "none". `epochs=None` never ends. Each epoch has every row. Its last batch may be
        short, unless `Batching(epoch_end=)` says otherwise."""
        if not len(version):
            raise SpecError("a buffer without rows has no batches", parameter="buffer", remedy="append rows first")
        asked = Asked(batch_size=batch_size, seed=seed, shuffle=shuffle)
        asked.refuse(("pad_to", "padding_side", "pad"), "is for rows of tokens, and these are rows of a buffer")
        asked.refuse(("pool_rows", "lanes", "recut"), "is for a shuffle in windows, and a buffer has none")
        stream = RowStream(version, _plan_of(version, asked))
        super().__init__(stream, asked, rank=rank, world_size=world_size, epochs=epochs, framework=framework)

    @property
    def version(self) -> int:
        """The journal number of the version that is read."""
        assert isinstance(self.stream, RowStream)
        return self.stream.version.number


def _plan_of(version: View, asked: Asked) -> Plan:
    source = PlanSource(
        name="buffer",
        split="train",
        fingerprint=version.content_fingerprint(),
        num_rows=len(version),
        num_tokens=len(version),
        row_tokens=1,
    )
    return Plan(
        row_tokens=1,
        seed=asked["seed"] or 0,
        shuffle=one_of(("global", "none"), shuffle=shuffle_of(asked["shuffle"], "train")),
        epoch_end=asked["epoch_end"] or "short",
        sources=(source,),
    )


class RowStream(UnkeptStream[RowBatch]):
    """Rows of one version of a buffer."""

    mark = "buffer"

    def __init__(self, version: View, plan: Plan) -> None:
        self.version: View = version
        self.plan: Plan = plan

    def open(self, run: Run, rows: int, record: Record, making: Making) -> _RowBatches:
        return _RowBatches(self, run, rows, record, making.framework)

    def settings(self) -> dict[str, Any]:
        return {"version": self.version.number, **super().settings()}

    def of_other_content(self, theirs: Mapping[str, Any]) -> PlanError:
        mine = self.settings()
        return PlanError(
            f"this state belongs to version {theirs.get('version')} of a buffer, and this loader reads version "
            f"{mine['version']}, which has other rows",
            differs=f"content {mine['content'][:7]} here, {str(theirs.get('content'))[:7]} there",
            remedy=f"buffer.at({theirs.get('version')}).loader(...), if that version was committed; "
            "or start anew, without the state",
        )

    def part_to_compare(self, batch: RowBatch) -> Any:
        return {"ids": batch.ids}  # equal plans mean equal rows

    def in_words(self, plan: Plan) -> str:
        return (
            f"└─ version {self.version.number} of a buffer: {len(self.version):,} rows, {self.order_in_words}, "
            f"content {plan.sources[0].fingerprint[:7]}"
        )


class _RowBatches:
    """One rank's batches of a run with fixed batch settings. Each batch is one gather, on the calling thread."""

    def __init__(self, stream: RowStream, run: Run, rows: int, record: Record, framework: str) -> None:
        self.stream, self.framework = stream, framework
        self.cut: Cut = run.cut_by_count(rows)
        self.share: Callable[[int], Share] = run.share
        self.end: int | None = run.end
        self.record: Record = record

    def batches(self, position: int, skipped: int = 0, every: int = 1, stop: int | None = None) -> Made[RowBatch]:
        start = self.cut.after(position, skipped)
        at_once = max(1, _LOCATED_ROWS // len(self.share(self.cut.rows_per_step)))
        for task in tasks_from(start, self.cut, self.share, self.end, at_once, every=every, stop=stop):
            width = len(task.rows)
            positions = self.cut.epochs.skips.positions(task.live_rows())
            index, weights = self.stream.plan.order.at(positions).index, task.weights()
            if weights is None:
                weights = np.ones(len(index), np.float32)
            last = 0
            for _, after in borders_of(task, self.cut):
                first, last = last, last + width
                facts = positions[first:last], weights[first:last], task.real_rows, after
                yield self._batch(index[first:last], facts), after

    def _batch(self, index: NDArray[np.int64], facts: tuple[Any, ...]) -> RowBatch:
        version, metadata = self.stream.version, partial(self._metadata, *facts)
        columns = version.columns_at(index)
        batch = RowBatch(version.schema, columns, version.ids[index], index, metadata=metadata)
        if self.framework == "numpy":
            return batch
        converted: RowBatch = getattr(batch, self.framework)()
        return converted

    def _metadata(
        self, positions: NDArray[np.int64], weights: NDArray[np.float32], real: int, after: int
    ) -> dict[str, Any]:
        state = state_at(after, self.stream.plan.fingerprint, self.record) | self.stream.extra_state(after)
        return {"position": positions, "weight": weights, "global_rows": real, "state": state}
