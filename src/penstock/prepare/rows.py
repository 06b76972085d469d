"""A user's function as a step over rows: it gets a row (a dict) and returns a row, or None to drop it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.errors import SourceError
from penstock.fingerprint import function_fingerprint

__all__ = ["RowStep", "row_step"]

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RowStep:
    """One step of a recipe that a user's function does."""

    function: Callable[[Row], Row | None]
    name: str
    version: str | None = None

    @property
    def fingerprint(self) -> str:
        """What the function does now: globals that it uses may have changed since the step was added."""
        return function_fingerprint(self.function, name=self.name, version=self.version)

    def __call__(self, row: Row) -> Row | None:
        result: Any = self.function(row)
        if result is not None and not isinstance(result, dict):
            hint = (
                " (to keep or drop rows, pass the function as where= of add_ingredient)"
                if isinstance(result, bool)
                else ""
            )
            raise SourceError(
                f"step {self.name!r} returned {type(result).__name__}, not a row",
                step=self.name,
                remedy=f"return a dict, or None to drop the row{hint}",
            )
        row_or_none: Row | None = result
        return row_or_none

    def describe(self) -> str:
        return self.name


def row_step(function: Callable[[Row], Row | None], *, name: str | None = None, version: str | None = None) -> RowStep:
    name = name or str(getattr(function, "__name__", type(function).__name__))
    step = RowStep(function, name, version)
    _ = step.fingerprint  # says now, not at the bake, that it needs a version
    return step
