"""The instructions of a recipe, as values: what to add, and what to do with the rows that were added before."""

from __future__ import annotations

import contextlib
import operator
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from batchwright.base.errors import SpecError
from batchwright.base.fingerprint import fingerprint_rows, function_fingerprint
from batchwright.prepare.chat.step import Chat
from batchwright.prepare.rows import RowStep, row_step
from batchwright.prepare.text_column import TextColumn
from batchwright.prepare.tokenize import Tokenize
from batchwright.sources.formats import format_for, known_extensions
from batchwright.sources.listing import InputFile, list_files, looks_like_paths
from batchwright.sources.memory import TableRows, table_rows
from batchwright.typing import Data

__all__ = ["Ingredient", "Instruction", "Step", "add_ingredient", "bad_name", "prepare_step"]

Row = dict[str, Any]


@dataclass(frozen=True)
class Ingredient:
    """One source of a recipe, and what of it is wanted."""

    name: str
    """Empty until it is part of a recipe, which names it after its source."""
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

    def name_after_source(self, taken: set[str]) -> str:
        """A name that can be part of a file's name, and that none has which is `taken` (in small letters)."""
        source = "memory" if self.is_memory else self.source
        if isinstance(source, list):
            source = source[0]
        parts = [p for p in Path(source).parts if not any(c in p for c in "*?[") and p not in ("/", "..", ".", "~")]
        base = Path(parts[-1]).name.lstrip(".").split(".")[0] if parts else ""
        base = "".join(c for c in base if c.isprintable())[:40] or "data"
        return next(n for n in (base, *(f"{base}-{i}" for i in range(2, 10_000))) if n.casefold() not in taken)

    def describe(self) -> str:
        if self.is_memory:
            what = f"{len(self.source):,} row{'s' if len(self.source) != 1 else ''} from memory"
        else:
            files = self.files()
            what = f"{len(files):,} file{'s' if len(files) != 1 else ''}, {sum(f.num_bytes for f in files):,} bytes"
        what += f", {self.format}" if self.format else ""
        what += f", where {self.where.__name__}" if self.where is not None and hasattr(self.where, "__name__") else ""
        if self.quantity is not None:
            is_share = not isinstance(self.quantity, int)
            what += f", {100 * self.quantity:g} % of them" if is_share else f", {self.quantity:,} of them"
        return f"{self.name}: {what}"


Step = RowStep | Tokenize | Chat
Instruction = Ingredient | Step


def add_ingredient(
    source: Data,
    text: str = "text",
    *,
    format: str | None = None,
    name: str | None = None,
    where: Callable[[Row], Any] | None = None,
    quantity: int | float | None = None,
    options: Mapping[str, Any] | None = None,
    version: str | None = None,
) -> Ingredient:
    """The instruction to add a source: `DatasetRecipe.add_ingredient`, for a list of instructions.

    `source` is files, a folder or glob, rows, or a table. `format` is what the files are, if their names do not say it,
    with its `options`. `text` is the column, path or template of the text. `where` chooses rows, `quantity` how many of
    them. `name` is how mixtures call it. `version` names `where`, should it use things that cannot be compared.
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
        "" if name is None else _checked_name(name),
        _checked_source(source),
        text,
        format,
        where,
        version,
        _checked_quantity(quantity),
        checked_options,
    )
    if checked_options and ingredient.is_memory:
        raise SpecError(
            "options= are for files, and this source is in memory", parameter="options", remedy="leave them out"
        )
    _ = ingredient.where_fingerprint  # says now, not at the bake, that it needs a version
    return ingredient


def prepare_step(
    step: Tokenize | Chat | Callable[[Row], Row | None],
    *,
    select: Callable[[Row], Any] | str | list[str] | tuple[str, ...] | None = None,
    name: str | None = None,
    version: str | None = None,
) -> Step:
    """The instruction to do something with rows: `DatasetRecipe.prepare_step`, for a list of instructions.

    `step` is a function of a row that returns one, or None to drop it; or `bw.tokenize(...)`, or `bw.chat(...)`.
    `select` says which rows it sees. `name` is how reports call it, `version` names functions that cannot be compared.
    """
    if isinstance(step, Tokenize | Chat):
        if select is not None:
            raise SpecError(
                "tokenize is for all rows: select= is for a step of your own",
                parameter="select",
                remedy="leave select= out, and drop the other rows in a step before",
            )
        return step
    if isinstance(step, RowStep | Ingredient) or not callable(step):
        raise SpecError(
            f"a step is a function, bw.tokenize(...) or bw.chat(...), not a {type(step).__name__}",
            parameter="step",
            remedy="recipe.prepare_step(bw.tokenize('bytes'))",
        )
    return row_step(step, name=name, version=version, select=select)


def _checked_name(name: str) -> str:
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
        else None
    )
    if why:
        raise bad_name(name, why)
    return name


def bad_name(name: Any, why: str) -> SpecError:
    return SpecError(
        f"an ingredient cannot be named {name!r}: {why}",
        parameter="name",
        remedy="a short name of its own, such as 'web'",
    )


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
    return (
        rows.fingerprint
        if isinstance(rows, TableRows)
        else fingerprint_rows(rows, parameter="source", ingredient=ingredient.name)
    )
