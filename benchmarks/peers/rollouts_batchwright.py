"""batchwright: RolloutDataLoader over the list, to the last batch of one epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import batchwright as bw
from batchwright.loaders import rollout
from benchmarks.peers.rollouts import BATCH_ROWS, WORLD, Epoch

PACKAGE = "batchwright"
_OPTIONS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "one of 8 ranks, balanced": {"rank": 0, "world_size": WORLD, "batch_size": bw.Batching(BATCH_ROWS, balance=True)},
    "one width": {"batch_size": bw.Batching(BATCH_ROWS, pad_to="max_length")},
    "by tokens": {"batch_size": bw.Batching(tokens=BATCH_ROWS * 740)},
}


def run(rows: list[dict[str, Any]], how: str, epoch: Epoch) -> None:
    options = {"batch_size": BATCH_ROWS, "framework": "torch", **_OPTIONS[how]}
    with epoch.stage("open"), _stages(epoch):
        loader = bw.RolloutDataLoader(rows, None, compute_advantages=True, **options)
    with epoch.stage("batches"):
        for batch in loader:
            columns = batch.metadata
            epoch.take(
                batch.input_ids,
                lambda batch=batch: batch.targets,
                batch.loss_mask,
                columns["old_log_probs"],
                columns["advantages"],
            )


@contextmanager
def _stages(epoch: Epoch) -> Iterator[None]:
    """Inside, the loader's reading and its estimation are timed as stages of their own."""

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **options: Any) -> Any:
            with epoch.stage(name):
                return function(*given, **options)

        return call

    read, estimate = rollout.read_rollouts, bw.Advantages.__call__
    rollout.read_rollouts = timed("read", read)
    bw.Advantages.__call__ = timed("advantages", estimate)  # type: ignore[method-assign]
    try:
        yield
    finally:
        rollout.read_rollouts = read
        bw.Advantages.__call__ = estimate  # type: ignore[method-assign]
