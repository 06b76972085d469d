"""A recipe: ingredients (sources with filters and quantities), then prepare steps. A value; baking it does the work."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import SpecError
from penstock.fingerprint import fingerprint, fingerprint_bytes, function_fingerprint
from penstock.prepare.rows import RowStep, row_step
from penstock.prepare.tokenize import Tokenize
from penstock.sources.formats import format_for
from penstock.sources.listing import InputFile, list_files

__all__ = ["DatasetRecipe", "Ingredient"]

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ingredient:
    """One source of a recipe, and what of it is wanted."""

    name: str
    source: Any
    text: str
    format: str | None
    where: Callable[[Row], Any] | None
    where_fingerprint: str | None
    quantity: int | float | None

    @property
    def is_memory(self) -> bool:
        return not isinstance(self.source, str | os.PathLike) and not all(
            isinstance(part, str | os.PathLike) and os.path.exists(part) for part in self.source
        )

    def files(self) -> list[InputFile]:
        return [] if self.is_memory else list_files(self.source)

    def spec(self) -> dict[str, Any]:
        """What of an ingredient decides its rows, besides the content of its files."""
        return {
            "name": self.name,
            "text": self.text,
            "format": self.format,
            "where": self.where_fingerprint,
            "quantity": self.quantity,
            "memory": fingerprint_bytes(_encode_rows(self)) if self.is_memory else None,
        }


class DatasetRecipe:
    """What a dataset is made of. Methods change the recipe and return it.

    >>> recipe = DatasetRecipe(seed=0).add_ingredient(["one", "two", "three"], name="words", quantity=2)
    >>> recipe
    DatasetRecipe, seed 0
    └─ words: 3 rows from memory, 2 of them
    """

    def __init__(self, *, seed: int = 0) -> None:
        self.seed = seed
        self.ingredients: list[Ingredient] = []
        self.steps: list[RowStep | Tokenize] = []
        self.holdout_fraction = 0.0

    def add_ingredient(
        self,
        source: str | os.PathLike[str] | Sequence[Any],
        text: str = "text",
        *,
        format: str | None = None,
        name: str | None = None,
        where: Callable[[Row], Any] | None = None,
        quantity: int | float | None = None,
        version: str | None = None,
    ) -> DatasetRecipe:
        """Add a source: a file, folder or glob (or a list of them), or rows from memory (dicts or strings).

        `text` names the column that holds the text. `where(row)` keeps a row or not. `quantity` keeps that many of the
        rows that `where` kept (a whole number), or that share of them (a fraction), chosen by a hash of seed, name,
        file and row: the same ones every time. `version` names `where`, should it use things that cannot be compared.
        """
        name = name if name is not None else self._free_name(source)
        if not name or "/" in name or name.startswith(".") or name in (i.name for i in self.ingredients):
            raise SpecError(
                f"an ingredient cannot be named {name!r}"
                + (": that name is taken" if name and "/" not in name else ""),
                parameter="name",
                remedy="a name of its own, without '/'",
            )
        if quantity is not None and (
            isinstance(quantity, bool) or quantity < 0 or (isinstance(quantity, float) and not 0.0 <= quantity <= 1.0)
        ):
            raise SpecError(
                f"quantity={quantity!r} is neither a number of rows nor a share",
                parameter="quantity",
                remedy="a whole number such as 10_000, or a fraction from 0.0 to 1.0",
            )
        if format is not None:
            format_for("", format)
        if not isinstance(source, str | os.PathLike):
            source = list(source)
            if not source:
                raise SpecError(f"ingredient {name!r} is an empty list", parameter="source", remedy="rows, or paths")
        where_fingerprint = (
            None if where is None else function_fingerprint(where, name=f"where of {name!r}", version=version)
        )
        self.ingredients.append(Ingredient(name, source, text, format, where, where_fingerprint, quantity))
        return self

    def prepare_step(
        self, step: Tokenize | Callable[[Row], Row | None], *, name: str | None = None, version: str | None = None
    ) -> DatasetRecipe:
        """Add a step: `ps.tokenize(...)`, or a function that gets a row and returns a row, or None to drop it."""
        if any(isinstance(known, Tokenize) for known in self.steps):
            raise SpecError(
                "no step can follow tokenize: rows are tokens then", parameter="step", remedy="add it before tokenize"
            )
        if isinstance(step, Tokenize):
            self.steps.append(step)
        elif callable(step):
            self.steps.append(row_step(step, name=name, version=version))
        else:
            raise SpecError(f"a step is a function or ps.tokenize(...), not a {type(step).__name__}", parameter="step")
        return self

    def holdout(self, fraction: float) -> DatasetRecipe:
        """Hold this share of the documents out for validation: `split="val"`.

        A document's side is a hash of the text that is tokenised: duplicates fall together, new files move nothing.
        """
        if not 0.0 < fraction < 1.0:
            raise SpecError(f"holdout({fraction}) is not a share", parameter="fraction", remedy="holdout(0.005)")
        self.holdout_fraction = fraction
        return self

    @property
    def row_steps(self) -> list[RowStep]:
        return [step for step in self.steps if isinstance(step, RowStep)]

    @property
    def tokenize(self) -> Tokenize:
        for step in self.steps:
            if isinstance(step, Tokenize):
                return step
        raise SpecError(
            "this recipe has no tokenize step, and a store holds tokens",
            parameter="recipe",
            remedy='recipe.prepare_step(ps.tokenize("bytes"))',
        )

    def spec(self) -> dict[str, Any]:
        """What decides the result, besides the content of the files."""
        return {
            "seed": self.seed,
            "ingredients": [ingredient.spec() for ingredient in self.ingredients],
            "steps": [[step.describe(), step.fingerprint] for step in self.steps],
            "holdout": self.holdout_fraction,
        }

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.spec())[:16]

    def _free_name(self, source: Any) -> str:
        if isinstance(source, str | os.PathLike):
            parts = [p for p in Path(source).parts if not any(c in p for c in "*?[") and p not in ("/", "..", ".")]
            base = Path(parts[-1]).name.split(".")[0] if parts else "data"
        else:
            base = "memory"
        base = base or "data"
        taken = {ingredient.name for ingredient in self.ingredients}
        return next(n for n in (base, *(f"{base}-{i}" for i in range(2, 10_000))) if n not in taken)

    def __repr__(self) -> str:
        lines = [f"DatasetRecipe, seed {self.seed}"]
        entries = []
        for i in self.ingredients:
            if i.is_memory:
                what = f"{len(i.source):,} rows from memory"
            else:
                files = i.files()
                what = f"{len(files):,} file{'s' if len(files) != 1 else ''}, {sum(f.num_bytes for f in files):,} bytes"
            what += f", {i.format}" if i.format else ""
            what += f", where {i.where.__name__}" if i.where is not None and hasattr(i.where, "__name__") else ""
            if i.quantity is not None:
                what += (
                    f", {i.quantity:,} of them" if isinstance(i.quantity, int) else f", {100 * i.quantity:g} % of them"
                )
            entries.append(f"{i.name}: {what}")
        entries += [f"then {step.describe()}" for step in self.steps]
        if self.holdout_fraction:
            entries.append(f"hold out {100 * self.holdout_fraction:g} % as val")
        return "\n".join([*lines, *(f"{'└─' if n == len(entries) - 1 else '├─'} {e}" for n, e in enumerate(entries))])


def _encode_rows(ingredient: Ingredient) -> bytes:
    try:
        return msgspec.json.encode(ingredient.source, order="deterministic")
    except TypeError as error:
        raise SpecError(
            f"the rows of {ingredient.name!r} hold values that cannot be compared: {error}",
            parameter="source",
            remedy="rows of str, numbers, lists and dicts",
        ) from None
