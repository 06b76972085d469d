"""Digests: one number for the rows of some steps of a run, the same on any machine, ranks, workers and framework.

Each row of the global batch is hashed separately (xxh3, 64 bits, over its input ids as little-endian int64). The number
is the hash of these hashes in the order of positions. So ranks can hash their own rows and join the hashes. A range
that is cut into other batches has the same number, and options that only change targets or masks do not matter. Rows
that only fill up the last batch of an epoch are left out.

For rows of whole documents (packed text, conversations), the hash is over input ids, targets and loss mask, without
padding. The mask is part of such a row; the width of its batch is not.

Store, plan and steps are enough to compute it, before or after the run:

    hashes = [row_hashes(batch.input_ids) for batch in ...]     in a training loop, on one rank
    hashes = [sample_hashes(batch) for batch in ...]            the same, for rows of whole documents
    combine(hashes) == digest("corpus.store", plan, 0, 99)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from batchwright.base.errors import PlanError
from batchwright.batches.flow import Flow, Task
from batchwright.batches.types import TrainingBatch
from batchwright.loaders.blocks import tasks_from
from batchwright.loaders.stored import open_flow
from batchwright.order.plan import Plan
from batchwright.order.split import Cut, position_of_step, step_of_position
from batchwright.store.plans import find_plan, streams_for_plan
from batchwright.typing import PlanLike, StoreLike

__all__ = ["StepDigest", "check_steps", "combine", "digest", "digest_steps", "row_hashes", "sample_hashes"]

_TOKENS_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class StepDigest:
    """The rows of one step, as hashes."""

    step: int
    position: int
    """The position of its first row."""
    row_hashes: NDArray[np.uint64]
    """A hash for each row of the global batch, two for a preference pair."""
    num_tokens: int
    """The tokens of all rows, without padding."""

    @property
    def number(self) -> str:
        return combine([self.row_hashes])


def digest(store: StoreLike, plan: PlanLike, first_step: int, last_step: int, *, batch_size: int | None = None) -> str:
    """One number for the rows of these steps, the same on any machine, for any ranks, workers and framework.

    digest("corpus.store", plan, 0, 99)   as printed by `batchwright digest --steps 0-99`

    The steps go from `first_step` to `last_step`, both included. `store` is any store that the plan reads.
    `plan` is a plan, its fingerprint or file, a state, or a loader. `batch_size` is needed if the plan has none.
    """
    return combine(step.row_hashes for step in digest_steps(store, plan, first_step, last_step, batch_size=batch_size))


def digest_steps(
    store: StoreLike, plan: PlanLike, first_step: int, last_step: int, *, batch_size: int | None = None
) -> Iterator[StepDigest]:
    """The steps of a `digest`, one after another, each with the hashes of its rows."""
    found = find_plan(store, plan, batch_size=batch_size)
    check_steps(found, first_step, last_step)
    flow = open_flow(streams_for_plan(store, found), found)
    return _hash_tasks(flow, _tasks(found, first_step, last_step), first_step)


def row_hashes(input_ids: Any) -> NDArray[np.uint64]:
    """A hash for each row of [rows, tokens] ids: NumPy arrays, torch tensors in main memory, lists.

    >>> [hex(int(h)) for h in row_hashes([[5, 6, 7], [5, 6, 8]])]
    ['0x406dae4f9e20af6', '0x51677eb10e5157da']
    """
    rows = np.ascontiguousarray(np.asarray(input_ids), dtype="<i8")
    return np.array([xxhash.xxh3_64_intdigest(row.data) for row in rows], np.uint64)


def sample_hashes(batch: Any) -> NDArray[np.uint64]:
    """A hash for each row of a batch whose rows are whole documents: input ids, targets and loss mask, without padding.

    A preference pair has two hashes, one for each side.
    """
    is_real = np.asarray(batch.attention_mask) > 0
    ids, targets = (np.asarray(array).astype("<i8") for array in (batch.input_ids, batch.targets))
    loss = np.asarray(batch.loss_mask).astype("<f4")
    hashes = [
        xxhash.xxh3_64_intdigest(b"".join(field[row, real].tobytes() for field in (ids, targets, loss)))
        for row, real in enumerate(is_real)
    ]
    return np.array(hashes, np.uint64)


def combine(parts: Iterable[NDArray[np.uint64]]) -> str:
    """One number, as 16 hex digits, from the hashes of consecutive rows.

    >>> combine([row_hashes([[5, 6, 7]]), row_hashes([[5, 6, 8]])]) == combine([row_hashes([[5, 6, 7], [5, 6, 8]])])
    True
    """
    joined = xxhash.xxh3_64()
    for part in parts:
        joined.update(np.ascontiguousarray(part, dtype="<u8").data)
    return joined.hexdigest()


def check_steps(plan: Plan, first_step: int, last_step: int) -> None:
    """Refuse steps that do not exist."""
    if last_step < first_step:
        raise PlanError(f"steps {first_step}-{last_step} run backwards", remedy=f"{last_step}-{first_step}")
    position_of_step(plan.steps, first_step, **plan.epoch_spec)  # refuses a step below 0
    limit = plan.epoch_spec["epochs"].limit
    num_steps = None if limit is None else step_of_position(plan.steps, limit, **plan.epoch_spec)
    if num_steps is not None and last_step >= num_steps:
        what = f"step {last_step:,} does not exist: the stream of plan {plan.fingerprint} ends at position {limit:,}"
        raise PlanError(what, remedy=f"steps below {num_steps:,}")


def _tasks(plan: Plan, first_step: int, last_step: int) -> Iterator[Task]:
    """The steps on one rank, without rows that only fill a batch up; many short ones at a time."""
    step = first_step
    while step <= last_step:
        position, rows = position_of_step(plan.steps, step, **plan.epoch_spec)
        stop = min([last_step + 1, *(entry[0] for entry in plan.steps if entry[0] > step)])
        cut = Cut(rows_per_step=rows, **plan.epoch_spec)
        at_once = max(1, _TOKENS_AT_ONCE // (rows * plan.row_tokens))
        for task in tasks_from(position, cut, range, None, at_once):
            steps = min(task.num_steps, stop - step)
            yield replace(task, num_steps=steps, rows=range(task.real_rows))
            step += steps
            if step == stop:
                break
        else:
            return  # no more steps


def _hash_tasks(flow: Flow, tasks: Iterable[Task], step: int) -> Iterator[StepDigest]:
    for task in tasks:
        block = flow.make(task, lambda rows, width: np.empty((rows, width), np.int64))
        ids = block.tokens[:, :-1]
        if flow.has_samples:
            hashes = sample_hashes(TrainingBatch(ids, **block.extra))
        else:
            hashes = row_hashes(ids)
        tokens = block.extra.get("attention_mask", np.ones(ids.shape, bool)).sum(axis=1)
        of_steps = tokens.reshape(task.num_steps, -1).sum(axis=1).tolist()
        for number, of_step in enumerate(np.split(hashes, task.num_steps)):
            position = flow.order.skips.position(task.live + number * task.stride)
            yield StepDigest(step, position, of_step, of_steps[number])
            step += 1
