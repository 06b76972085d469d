"""The instructions of a recipe, as values: sources to add, and steps over the rows of the sources before."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from batchwright.base.errors import SpecError
from batchwright.base.fingerprint import fingerprint_rows, function_fingerprint
from batchwright.base.words import counted
from batchwright.prepare.chat.step import Chat
from batchwright.prepare.documents import TextColumn
from batchwright.prepare.rows import RowStep, row_step
from batchwright.prepare.tokenize import Tokenize
from batchwright.sources.formats import format_for, known_extensions
from batchwright.sources.listing import InputFile, list_files, looks_like_paths
from batchwright.sources.memory import TableRows, table_rows
from batchwright.store.layout import check_source_name
from batchwright.typing import Data

__all__ = ["Ingredient", "Instruction", "Step", "add_ingredient", "line_of", "prepare_step"]

Row = dict[str, Any]


@dataclass(frozen=True)
class Ingredient:
    """One source of a recipe, and the choice of its rows."""

    name: str
    """Empty until a recipe names it after its source."""
    source: Any
    text: str
    format: str | None
    where: Callable[[Row], Any] | None
    version: str | None
    quantity: int | float | None
    options: dict[str, Any] | None = None

    @property
    def where_fingerprint(self) -> str | None:
        """Computed anew: globals that `where` uses may have changed since the ingredient was added."""
        if self.where is None:
            return None
        return function_fingerprint(self.where, name="where=", version=self.version)

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
        """The part of a recipe's spec that decides this ingredient's rows, besides the content of its files."""
        spec: dict[str, Any] = {
            "name": self.name,
            "text": self.text,
            "format": self.format,
            "where": self.where_fingerprint,
            "quantity": self.quantity,
            "memory": self._rows_fingerprint(),
        }
        if self.options:
            spec["options"] = self.options
        return spec

    def _rows_fingerprint(self) -> str | None:
        if not self.is_memory:
            return None
        if isinstance(self.source, TableRows):
            return self.source.fingerprint
        return fingerprint_rows(self.source, parameter="source", ingredient=self.name)

    def name_after_source(self, taken: set[str]) -> str:
        """A name that can be part of a file's name, and whose casefolded form is not `taken`."""
        base = "memory"
        if not self.is_memory:
            source = self.source
            if isinstance(source, list):
                source = source[0]
            parts = [p for p in Path(source).parts if not any(c in p for c in "*?[") and p not in ("/", "..", ".", "~")]
            stem = ["", *parts][-1].lstrip(".").split(".")[0]
            base = "".join(filter(str.isprintable, stem))[:40] or "data"
        names = (base, *(f"{base}-{number}" for number in range(2, 10_000)))
        return next(name for name in names if name.casefold() not in taken)

    def describe(self) -> str:
        if self.is_memory:
            what = f"{counted(len(self.source), 'row')} from memory"
        else:
            files = self.files()
            what = f"{counted(len(files), 'file')}, {sum(file.num_bytes for file in files):,} bytes"
        if self.format:
            what += f", {self.format}"
        if self.where is not None and hasattr(self.where, "__name__"):
            what += f", where {self.where.__name__}"
        if isinstance(self.quantity, int):
            what += f", {self.quantity:,} of them"
        elif self.quantity is not None:
            what += f", {100 * self.quantity:g} % of them"
        return f"{self.name}: {what}"


Step = RowStep | Tokenize | Chat
Instruction = Ingredient | Step


def line_of(instruction: Instruction) -> str:
    """An instruction as a line of a recipe."""
    if isinstance(instruction, Ingredient):
        return instruction.describe()
    return f"then {instruction.describe()}"


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

    `source`: files, a folder or glob, rows, or a table. `format`: of the files, if their names do not say it, with its
    `options`. `text`: the column, path or template of the text. `where` chooses rows, `quantity` the number of them.
    `name`: in mixtures. `version` identifies `where`, if it uses things that cannot be compared.
    """
    TextColumn(text)  # raises now, not in the bake
    options = _checked_options(options)
    if format is not None:
        format_for("", format).with_options(options)
    function: Any = where
    if function is not None and not callable(function):
        what = f"where= is a function of a row, not a {type(where).__name__}"
        raise SpecError(what, parameter="where", remedy="where=lambda row: row['score'] > 3")
    checked_name = "" if name is None else check_source_name(name, called="an ingredient")
    quantity = _checked_quantity(quantity)
    ingredient = Ingredient(checked_name, _checked_source(source), text, format, where, version, quantity, options)
    if options and ingredient.is_memory:
        what = "options= are for files, and this source is in memory"
        raise SpecError(what, parameter="options", remedy="leave them out")
    _ = ingredient.where_fingerprint  # raises now, not in the bake, if it needs a version
    return ingredient


def prepare_step(
    step: Tokenize | Chat | Callable[[Row], Row | None],
    *,
    select: Callable[[Row], Any] | str | list[str] | tuple[str, ...] | None = None,
    name: str | None = None,
    version: str | None = None,
) -> Step:
    """The instruction to prepare rows: `DatasetRecipe.prepare_step`, for a list of instructions.

    `step`: a function of a row that returns one, or None to drop it; or `bw.tokenize(...)`, or `bw.chat(...)`.
    `select` chooses the rows that it sees. `name`: in reports. `version` identifies functions that cannot be compared.
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


def _checked_source(source: Any) -> Any:
    """Paths unchanged; tables as Arrow; other rows as a list, because a generator gives them only once."""
    if isinstance(source, str | os.PathLike):
        return source
    table = table_rows(source)
    if table is not None:
        return table
    if isinstance(source, bytes | bytearray | dict) or not hasattr(source, "__iter__"):
        remedy = "a path, folder or glob, a list of them, rows (dicts or strings), or a table"
        if callable(source):
            remedy = "call it: its rows are the source"
        raise SpecError(f"a {type(source).__name__} is not a source", parameter="source", remedy=remedy)
    rows = list(source)
    if not rows:
        raise SpecError("this source is an empty list", parameter="source", remedy="rows, or paths")
    return rows


def _checked_quantity(quantity: Any) -> int | float | None:
    """A number of rows as int, a share as float."""
    if quantity is None:
        return None
    is_number = isinstance(quantity, Real) and not isinstance(quantity, bool)
    is_whole = isinstance(quantity, Integral)
    if is_number and is_whole and quantity >= 0:
        return int(quantity)
    if is_number and not is_whole and 0.0 <= quantity <= 1.0:
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
        what = f"options={options!r} are not names with text, numbers, booleans or lists"
        raise SpecError(what, parameter="options", remedy="options={'delimiter': ';'}")
    return {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float)
