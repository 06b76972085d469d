"""Steps of a recipe over rows: a user's function, and the holdout of documents by a hash of their text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import xxhash

from batchwright.base.errors import SourceError, SpecError
from batchwright.base.fingerprint import function_fingerprint

__all__ = ["RowStep", "row_step", "side_of"]

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RowStep:
    """A step of a recipe over rows, with a user's function."""

    function: Callable[[Row], Row | None]
    name: str
    version: str | None = None
    select: Callable[[Row], Any] | tuple[str, ...] | None = None
    """The rows that the function sees: a function of a row, or names of ingredients. None: all."""

    @property
    def fingerprint(self) -> str:
        """Computed anew: globals that the function uses may have changed since the step was added."""
        return function_fingerprint(self.function, name=self.name, version=self.version)

    def spec(self) -> list[Any]:
        """The part of a recipe's spec that decides the step's rows."""
        decides: list[Any] = [self.name, self.fingerprint]
        if isinstance(self.select, tuple):
            decides.append(list(self.select))
        elif self.select is not None:
            what = f"select= of step {self.name!r}"
            decides.append(function_fingerprint(self.select, name=what, version=self.version))
        return decides

    def __call__(self, row: Row) -> Row | None:
        result: object = self.function(row)
        if result is None or isinstance(result, dict):
            return result
        remedy = "return a dict, or None to drop the row"
        if isinstance(result, bool):
            remedy += " (to keep or drop rows, pass the function as where= of add_ingredient)"
        what = f"step {self.name!r} returned {type(result).__name__}, not a row"
        raise SourceError(what, step=self.name, remedy=remedy)

    def describe(self) -> str:
        """
        >>> row_step(str.upper, name="shout", select=["web", "books"]).describe()
        'shout, only web, books'
        """
        if self.select is None:
            return self.name
        what = ", ".join(self.select) if isinstance(self.select, tuple) else f"where {_name_of(self.select)}"
        return f"{self.name}, only {what}"


def row_step(
    function: Callable[[Row], Row | None],
    *,
    name: str | None = None,
    version: str | None = None,
    select: Callable[[Row], Any] | str | list[str] | tuple[str, ...] | None = None,
) -> RowStep:
    step = RowStep(function, name or _name_of(function), version, _checked_select(select))
    _ = step.spec()  # raises now, not at the bake, if it needs a version
    return step


def _checked_select(select: object) -> Callable[[Row], Any] | tuple[str, ...] | None:
    if select is None or callable(select):
        return select
    names = (select,) if isinstance(select, str) else select
    if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) for name in names):
        raise SpecError(
            f"select={select!r} says nothing about rows",
            parameter="select",
            remedy="a function: select=lambda row: row['score'] > 3, an ingredient's name, or a list of names",
        )
    return tuple(names)


def _name_of(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


# Holdout

_SALT = 0x70656E73746F636B


def side_of(text: str, fraction: float) -> str:
    """The side of a text, `train` or `val`, is the same in every recipe. A larger fraction only adds to `val`.

    >>> side_of("a document", 0.0), side_of("a document", 1.0)
    ('train', 'val')
    """
    digest = xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"), seed=_SALT)
    return "val" if digest < fraction * 2**64 else "train"
