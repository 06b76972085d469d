"""The settings of every provider, and the checks of their values."""

from __future__ import annotations

from typing import Any

from batchwright.base.checks import at_least
from batchwright.base.errors import SpecError
from batchwright.base.words import shortened

_SMALLEST = {
    "batch_size": 1,
    "block_size": 1,
    "target_size": 1,
    "batches_per_file": 1,
    "max_backlog_files": 1,
    "val_batches": 1,
    "seed": 0,
}
_MAY_BE_NONE = ("block_size", "target_size", "val_batches")
_FLAGS = ("verbose", "durable", "reproducible")
SETTINGS = (*_SMALLEST, *_FLAGS, "sleep_seconds", "rng_framework")


def checked_setting(name: str, value: Any) -> Any:
    """The value of a setting, if it may have that one. Settings of the user's own may have any.

    >>> checked_setting("batch_size", 8), checked_setting("stages", [1])
    (8, [1])
    """
    if name in _MAY_BE_NONE and value is None:
        return None
    if name in _SMALLEST:
        return at_least(_SMALLEST[name], **{name: value})
    if name in _FLAGS and not isinstance(value, bool):
        raise wrong(name, value, "True or False", str(bool(value)))
    if name == "sleep_seconds" and not is_seconds(value):
        raise wrong(name, value, "a number of seconds above 0", "2.0")
    if name == "rng_framework" and value not in ("numpy", "torch"):
        raise wrong(name, value, "'numpy' or 'torch'", "'numpy'")
    return value


def is_seconds(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def wrong(name: str, value: Any, allowed: str, example: str) -> SpecError:
    return SpecError(f"{name} must be {allowed}, got {shortened(value)}", parameter=name, remedy=f"{name}={example}")
