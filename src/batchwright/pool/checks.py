"""What users give to a mixed stream, checked: the value, or an error that names the parameter and says what to do."""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from batchwright.base.checks import at_least, whole_number
from batchwright.base.errors import PlanError, SpecError
from batchwright.pool.lane import Columns

__all__ = [
    "checked_memory",
    "checked_most_rows",
    "checked_result",
    "checked_threshold",
    "checked_transform",
    "differs",
    "seed_for",
]

log: logging.Logger = logging.getLogger("batchwright")


def checked_most_rows(max_examples_unaugmented: Any) -> int | None:
    if max_examples_unaugmented is None:
        return None
    return at_least(1, max_examples_unaugmented=max_examples_unaugmented)


def checked_threshold(refill_threshold: Any, pool_size: int) -> int:
    if refill_threshold is None:
        return pool_size * 3 // 4
    threshold = at_least(0, refill_threshold=refill_threshold)
    if threshold >= pool_size:
        raise SpecError(
            f"refill_threshold={threshold:,} is not below pool_size={pool_size:,}: the pool would be refilled for ever",
            parameter="refill_threshold",
            remedy=f"refill_threshold={pool_size * 3 // 4}, three quarters of the pool; or None, which is that",
        )
    return threshold


def checked_memory(max_memory_gb: Any) -> int:
    is_number = isinstance(max_memory_gb, int | float | np.number) and not isinstance(max_memory_gb, bool)
    if not is_number or not math.isfinite(max_memory_gb) or max_memory_gb <= 0:
        raise SpecError(
            f"max_memory_gb must be a number above 0, got {max_memory_gb!r}",
            parameter="max_memory_gb",
            remedy="max_memory_gb=5.0",
        )
    return int(max_memory_gb * 10**9)


def checked_transform(transform: Any) -> Callable[[Columns], Mapping[str, Any]] | None:
    if transform is not None and not callable(transform):
        raise SpecError(
            f"transform={transform!r} is not a function",
            parameter="transform",
            remedy="a function f(columns) -> columns, applied to every batch",
        )
    return transform  # type: ignore[no-any-return]


def seed_for(random_seed: Any) -> int:
    if random_seed is not None:
        return whole_number(random_seed=random_seed)
    seed = secrets.randbits(31)
    log.info("random_seed=None: drew the seed %d; it is kept in the state", seed)
    return seed


def checked_result(result: Any, count: int) -> Columns:
    if not isinstance(result, Mapping) or not result:
        raise SpecError(
            f"transform returned {type(result).__name__}, and not a dict of columns",
            parameter="transform",
            remedy="return a dict of columns: {**columns, 'planes': planes}",
        )
    for name, column in result.items():
        length = len(column) if hasattr(column, "__len__") else None
        if length != count:
            raise SpecError(
                f"transform gave column {name!r} {length if length is not None else 'no'} rows, for a batch of {count}",
                parameter="transform",
                column=name,
                remedy="one row for each that was given",
            )
    return dict(result)


def differs(parameter: str, saved: Any, now: Any) -> PlanError:
    return PlanError(
        f"this state was saved with {parameter}={saved!r}, and here it is {now!r}",
        parameter=parameter,
        remedy=f"{parameter}={saved!r}, as it was; or begin again, without this state",
    )
