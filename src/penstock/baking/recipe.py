"""A recipe: ingredients (sources with filters and quantities), then prepare steps. A value; baking it does the work."""

from __future__ import annotations

import contextlib
import json
import operator
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import SpecError
from penstock.fingerprint import fingerprint, fingerprint_bytes, function_fingerprint
from penstock.prepare.chat.step import Chat
from penstock.prepare.columns import TextColumn
from penstock.prepare.rows import RowStep, row_step
from penstock.prepare.tokenize import Tokenize
from penstock.sources.formats import format_for, known_extensions
from penstock.sources.listing import InputFile, list_files, looks_like_paths
from penstock.sources.memory import TableRows, table_rows
from penstock.spec import at_least

__all__ = ["DatasetRecipe", "Ingredient"]

Row = dict[str, Any]


@dataclass(frozen=True)
class Ingredient:
    """One source of a recipe, and what of it is wanted."""

    name: str
    source: Any
    text: str
    format: str | None
    where: Callable[[Row], Any] | None
    version: str | None
    quantity: int | float | None
    options: dict[str, Any] | None = None

    @property
    def where_fingerprint(self) -> str | None:
        """What `where` does now: globals that it uses may have changed since the ingredient was added."""
        return None if self.where is None else function_fingerprint(self.where, name="where=", version=self.version)

    @cached_property
    def is_memory(self) -> bool:
        """Whether the source is rows given from Python; otherwise it names files."""
        if isinstance(self.source, TableRows):
            return True
        is_path = isinstance(self.source, str | os.PathLike)
        return not is_path and self.format is None and not looks_like_paths(self.source, known_extensions())

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
            "memory": _fingerprint_of_rows(self) if self.is_memory else None,
            **({"options": self.options} if self.options else {}),
        }


class DatasetRecipe:
    """What a dataset is made of. Methods change the recipe and return it.

    >>> recipe = DatasetRecipe(seed=0).add_ingredient(["one", "two", "three"], name="words", quantity=2)
    >>> recipe
    DatasetRecipe, seed 0
    └─ words: 3 rows from memory, 2 of them
    """

    def __init__(self, *, seed: int = 0) -> None:
        self.seed = at_least(0, seed=seed)
        self.ingredients: list[Ingredient] = []
        self.steps: list[RowStep | Tokenize | Chat] = []
        self.holdout_fraction = 0.0

    def add_ingredient(
        self,
        source: str | os.PathLike[str] | Iterable[Any],
        text: str = "text",
        *,
        format: str | None = None,
        name: str | None = None,
        where: Callable[[Row], Any] | None = None,
        quantity: int | float | None = None,
        options: Mapping[str, Any] | None = None,
        version: str | None = None,
    ) -> DatasetRecipe:
        """Add a source: a file, folder or glob (or a list of them), rows (dicts or strings), or a table from memory.

        `text` is the column that holds the text, a path into nested data ("message.content"), or a template over
        several columns ("{title}\\n\\n{body}"). `where(row)` keeps a row or not. `quantity` keeps that many of the rows
        that `where` kept (a whole number), or that share of them (a fraction), chosen by a hash of seed, name, file and
        row: the same ones every time. `options` are for the files' format: {"delimiter": ";"}. `version` names `where`,
        should it use things that cannot be compared.
        """
        TextColumn(text)  # says now, not at the bake, that it cannot be one
        checked_options = _checked_options(options)
        if format is not None:
            format_for("", format).with_options(checked_options)
        if where is not None and not callable(where):
            raise SpecError(
                f"where= is a function of a row, not a {type(where).__name__}",
                parameter="where",
                remedy="where=lambda row: row['score'] > 3",
            )
        ingredient = Ingredient(
            "" if name is None else self._checked_name(name),
            _checked_source(source),
            text,
            format,
            where,
            version,
            _checked_quantity(quantity),
            checked_options,
        )
        if checked_options and ingredient.is_memory:
            raise SpecError("options= are for files, and this source is in memory", parameter="options")
        _ = ingredient.where_fingerprint  # says now, not at the bake, that it needs a version
        self.ingredients.append(
            ingredient if name is not None else replace(ingredient, name=self._free_name(ingredient))
        )
        return self

    def prepare_step(
        self,
        step: Tokenize | Chat | Callable[[Row], Row | None],
        *,
        name: str | None = None,
        version: str | None = None,
    ) -> DatasetRecipe:
        """Add a step: a function that gets a row and returns a row, or None to drop it.

        The last one is `ps.tokenize(...)`, or `ps.chat(...)` for rows that are conversations.
        """
        if any(isinstance(known, Tokenize | Chat) for known in self.steps):
            raise SpecError(
                "no step can follow tokenize: rows are tokens then", parameter="step", remedy="add it before tokenize"
            )
        if isinstance(step, Tokenize | Chat):
            self.steps.append(step)
        elif callable(step):
            self.steps.append(row_step(step, name=name, version=version))
        else:
            raise SpecError(
                f"a step is a function, ps.tokenize(...) or ps.chat(...), not a {type(step).__name__}",
                parameter="step",
                remedy="recipe.prepare_step(ps.tokenize('bytes'))",
            )
        return self

    def holdout(self, fraction: float) -> DatasetRecipe:
        """Hold this share of the documents out for validation: `split="val"`.

        A document's side is a hash of the text that is tokenised: duplicates fall together, new files move nothing.
        """
        if not isinstance(fraction, int | float) or not 0.0 < fraction < 1.0:
            raise SpecError(f"holdout({fraction!r}) is not a share", parameter="fraction", remedy="holdout(0.005)")
        self.holdout_fraction = fraction
        return self

    @property
    def row_steps(self) -> list[RowStep]:
        return [step for step in self.steps if isinstance(step, RowStep)]

    @property
    def tokenize(self) -> Tokenize | Chat:
        for step in self.steps:
            if isinstance(step, Tokenize | Chat):
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
            # A tokenizer by what it does alone: where its file lies does not matter.
            "steps": [
                [s.name if isinstance(s, RowStep) else "chat" if isinstance(s, Chat) else "tokenize", s.fingerprint]
                for s in self.steps
            ],
            "holdout": self.holdout_fraction,
        }

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.spec())[:16]

    def _checked_name(self, name: str) -> str:
        """A name that can be part of a file's name, on every system."""
        why = (
            "a name is text"
            if not isinstance(name, str)
            else "it is empty"
            if not name
            else "it is longer than 100 bytes"
            if len(name.encode("utf-8", "replace")) > 100
            else "it begins with '.'"
            if name.startswith(".")
            else "it holds '/' or a character that cannot be printed"
            if "/" in name or not name.isprintable()
            else "that name is taken"  # some file systems do not tell large letters from small ones
            if name.casefold() in (known.name.casefold() for known in self.ingredients)
            else None
        )
        if why:
            raise SpecError(
                f"an ingredient cannot be named {name!r}: {why}",
                parameter="name",
                remedy="a short name of its own, such as 'web'",
            )
        return name

    def _free_name(self, ingredient: Ingredient) -> str:
        source = "memory" if ingredient.is_memory else ingredient.source
        if isinstance(source, list):
            source = source[0]
        parts = [p for p in Path(source).parts if not any(c in p for c in "*?[") and p not in ("/", "..", ".", "~")]
        base = Path(parts[-1]).name.lstrip(".").split(".")[0] if parts else ""
        base = "".join(c for c in base if c.isprintable())[:40] or "data"
        taken = {ingredient.name.casefold() for ingredient in self.ingredients}
        return next(n for n in (base, *(f"{base}-{i}" for i in range(2, 10_000))) if n.casefold() not in taken)

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


def _checked_source(source: Any) -> Any:
    """Paths as they are; tables as Arrow; other rows as a list, because a generator gives them only once."""
    if isinstance(source, str | os.PathLike):
        return source
    table = table_rows(source)
    if table is not None:
        return table
    if isinstance(source, bytes | bytearray | dict) or not hasattr(source, "__iter__"):
        kind = type(source).__name__
        is_to_be_called = callable(source)
        raise SpecError(
            f"a {kind} is not a source",
            parameter="source",
            remedy="call it: its rows are the source"
            if is_to_be_called
            else "a path, folder or glob, a list of them, rows (dicts or strings), or a table",
        )
    rows = list(source)
    if not rows:
        raise SpecError("this source is an empty list", parameter="source", remedy="rows, or paths")
    return rows


def _checked_quantity(quantity: Any) -> int | float | None:
    """A number of rows as int, a share as float."""
    if quantity is None:
        return None
    if not isinstance(quantity, bool):
        with contextlib.suppress(TypeError):
            if operator.index(quantity) >= 0:
                return operator.index(quantity)
        with contextlib.suppress(TypeError, ValueError):
            if not isinstance(quantity, str) and not hasattr(quantity, "__index__") and 0.0 <= float(quantity) <= 1.0:
                return float(quantity)
    raise SpecError(
        f"quantity={quantity!r} is neither a number of rows nor a share",
        parameter="quantity",
        remedy="a whole number such as 10_000, or a fraction from 0.0 to 1.0",
    )


def _checked_options(options: Any) -> dict[str, Any] | None:
    """Options that a manifest can keep."""
    if not options:
        return None
    if not isinstance(options, Mapping) or not all(isinstance(n, str) and _is_plain(v) for n, v in options.items()):
        raise SpecError(
            f"options={options!r} are not names with text, numbers, booleans or lists",
            parameter="options",
            remedy="options={'delimiter': ';'}",
        )
    return {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}


def _is_plain(value: Any) -> bool:
    return (
        value is None
        or isinstance(value, str | int | float)
        or (type(value) in (list, tuple) and all(map(_is_plain, value)))
    )


def _fingerprint_of_rows(ingredient: Ingredient) -> str:
    rows = ingredient.source
    return rows.fingerprint if isinstance(rows, TableRows) else fingerprint_bytes(_encode_rows(ingredient))


def _encode_rows(ingredient: Ingredient) -> bytes:
    try:
        try:
            return msgspec.json.encode(ingredient.source, order="deterministic")
        except UnicodeEncodeError:  # half a surrogate pair: the row that has it will be named when it is read
            return json.dumps(ingredient.source, sort_keys=True).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise SpecError(
            f"the rows of {ingredient.name!r} hold values that cannot be compared: {error}",
            parameter="source",
            remedy="rows of str, numbers, lists and dicts",
        ) from None
