"""Loaders over rows that one can check by eye: row i of a source is 10 i, 10 i + 1, 10 i + 2 and the label 10 i + 3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from batchwright.batches.flow import Flow
from batchwright.batches.settings import Asked
from batchwright.loaders.loader import Loader
from batchwright.loaders.stored import StoreStream
from batchwright.order.plan import Plan, PlanSource
from batchwright.order.schedule import Order


def numbers(name: str, num_rows: int, row_tokens: int = 3) -> Any:
    # Inside a function, so that worker processes get the class by value: they cannot import this file.
    class Numbers:
        fingerprint = f"numbers of {num_rows}"

        def __init__(self) -> None:
            self.name, self.num_rows, self.row_tokens = name, num_rows, row_tokens
            self.gathered: list[int] = []

        def gather(self, index: Any, epoch: Any, out: Any) -> None:
            self.gathered += index.tolist()
            out[:] = 10 * index[:, None] + np.arange(out.shape[1])

    return Numbers()


class NumbersStream(StoreStream):
    """Over rows that no store has, so no plan is kept beside one."""

    def keep(self, plan: Plan) -> NumbersStream:
        return self


@pytest.fixture(scope="session")
def open_numbers() -> Callable[..., Loader]:
    """A loader of 10 rows (or as many as each source is given), 4 in a batch, in order; settings as given."""

    def opened(
        num_rows: int | dict[str, int] = 10,
        *,
        rank: int = 0,
        world_size: int = 1,
        shuffle: str = "none",
        epoch_end: str = "drop",
        weights: dict[str, float] | None = None,
        total_rows: int | None = None,
        row_tokens: int = 3,
        seed: int = 7,
        epochs: int | None = 1,
        framework: str = "numpy",
        **settings: Any,
    ) -> Loader:
        sizes = num_rows if isinstance(num_rows, dict) else {"numbers": num_rows}
        sources = [numbers(name, size, row_tokens) for name, size in sizes.items()]
        plan = Plan(
            row_tokens=row_tokens,
            seed=seed,
            shuffle=shuffle,
            epoch_end=epoch_end,
            sources=tuple(
                PlanSource(
                    name=s.name,
                    split="train",
                    fingerprint=s.fingerprint,
                    num_rows=s.num_rows,
                    num_tokens=s.num_rows * row_tokens + 1,
                )
                for s in sources
            ),
            segments=((0, None if weights is None else tuple(weights.items())),),
            num_rows=total_rows,
        )
        flow = Flow(sources, Order(sizes, seed=seed, weights=weights, shuffle=shuffle))
        asked = Asked(**({"batch_size": 4} | settings))
        ranks = {"rank": rank, "world_size": world_size}
        return Loader(NumbersStream(plan, flow), asked, **ranks, epochs=epochs, framework=framework)

    return opened
