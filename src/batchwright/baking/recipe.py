"""A recipe, as values: instructions in order. Each adds a source, or prepares the rows of the sources before it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from batchwright.base.checks import at_least, one_of
from batchwright.base.errors import SpecError
from batchwright.base.fingerprint import fingerprint, fingerprint_rows, function_fingerprint
from batchwright.base.words import counted, suggest
from batchwright.prepare.chat.step import Chat
from batchwright.prepare.documents import TextColumn
from batchwright.prepare.rows import RowStep, row_step
from batchwright.prepare.tokenize import Tokenize
from batchwright.sources.formats import format_for, known_extensions
from batchwright.sources.listing import InputFile, list_files, looks_like_paths
from batchwright.sources.memory import TableRows, table_rows
from batchwright.store.layout import check_source_name
from batchwright.typing import Data, OnError

__all__ = ["DatasetRecipe"]

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
            what = "tokenize is for all rows: select= is for a step of your own"
            remedy = "leave select= out, and drop the other rows in a step before"
            raise SpecError(what, parameter="select", remedy=remedy)
        return step
    if isinstance(step, RowStep | Ingredient) or not callable(step):
        what = f"a step is a function, bw.tokenize(...) or bw.chat(...), not a {type(step).__name__}"
        raise SpecError(what, parameter="step", remedy="recipe.prepare_step(bw.tokenize('bytes'))")
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
    what = f"quantity={quantity!r} is neither a number of rows nor a share"
    raise SpecError(what, parameter="quantity", remedy="a whole number such as 10_000, or a fraction from 0.0 to 1.0")


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


class DatasetRecipe:
    """The description of a dataset: `instructions`, and the `seed` of everything that is shuffled or chosen.

    Methods change the recipe and return it. `on_error` is for malformed rows, as in `bake`.

    >>> recipe = DatasetRecipe(seed=0).add_ingredient(["one", "two", "three"], name="words", quantity=2)
    >>> recipe
    DatasetRecipe, seed 0
    └─ words: 3 rows from memory, 2 of them

    The same as a list:

    >>> same = DatasetRecipe([add_ingredient(["one", "two", "three"], name="words", quantity=2)], seed=0)
    >>> same.fingerprint == recipe.fingerprint
    True
    """

    def __init__(self, instructions: Iterable[Instruction] = (), *, seed: int = 0, on_error: OnError = "raise") -> None:
        self.seed: int = at_least(0, seed=seed)
        self.on_error: OnError = one_of(("raise", "skip"), on_error=on_error)
        self._instructions: list[Instruction] = []
        self.holdout_fraction: float = 0.0
        listed = _checked_list(instructions)
        for number, instruction in enumerate(listed, 1):
            try:
                self._add(instruction)
            except SpecError as error:
                error.where["instruction"] = f"{number} of {len(listed)}"
                raise

    def add_ingredient(
        self,
        source: Data,
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
        several columns ("{title}\\n\\n{body}"). `where(row)` keeps a row or not. Of the kept rows `quantity` chooses a
        number (a whole number) or a share (a fraction) by a hash of seed, name, file and row: the same ones every time.
        `options` are for the files' format: {"delimiter": ";"}. `version` identifies `where`, if it uses things
        that cannot be compared.
        """
        ingredient = add_ingredient(
            source, text, format=format, name=name, where=where, quantity=quantity, options=options, version=version
        )
        return self._add(ingredient)

    def prepare_step(
        self,
        step: Tokenize | Chat | Callable[[Row], Row | None],
        *,
        select: Callable[[Row], Any] | str | list[str] | tuple[str, ...] | None = None,
        name: str | None = None,
        version: str | None = None,
    ) -> DatasetRecipe:
        """Add a step over the rows of the ingredients so far: a function of a row that returns one, or None to drop it.

        `select` chooses the rows that the function sees: a function of a row, an ingredient's name, or a list of names.
        The others pass unchanged. `version` identifies both functions, if they use things that cannot be compared. The
        last step is `bw.tokenize(...)`, or `bw.chat(...)` for conversations; it is for all ingredients.
        """
        return self._add(prepare_step(step, select=select, name=name, version=version))

    def holdout(self, fraction: float) -> DatasetRecipe:
        """Hold this `fraction` of the documents out for validation: `split="val"`.

        A document's side is a hash of the text that is tokenised: duplicates fall together, new files move nothing.
        """
        if not isinstance(fraction, int | float) or not 0.0 < fraction < 1.0:
            raise SpecError(f"holdout({fraction!r}) is not a share", parameter="fraction", remedy="holdout(0.005)")
        self.holdout_fraction = fraction
        return self

    @property
    def instructions(self) -> list[Instruction]:
        """In the order of execution: tokenize is last, even if an ingredient was added after it."""
        return list(self._instructions)

    @property
    def ingredients(self) -> list[Ingredient]:
        return [each for each in self._instructions if isinstance(each, Ingredient)]

    @property
    def steps(self) -> list[Step]:
        return [each for each in self._instructions if not isinstance(each, Ingredient)]

    def steps_of(self, ingredient: Ingredient) -> list[Step]:
        """The steps over an ingredient's rows: those after it whose `select` does not name only others."""
        steps: list[Step] = []
        for step in self.steps[self._steps_before(ingredient) :]:
            if not isinstance(step, RowStep) or not isinstance(step.select, tuple):
                steps.append(step)
            elif ingredient.name in step.select:
                steps.append(replace(step, select=None))  # it sees all rows of this ingredient
        return steps

    @property
    def is_tokenized(self) -> bool:
        """Whether it ends in tokens. Otherwise it gives the rows after its last step."""
        return bool(self._instructions) and isinstance(self._instructions[-1], Tokenize | Chat)

    @property
    def tokenize(self) -> Tokenize | Chat:
        last = self._instructions[-1] if self._instructions else None
        if isinstance(last, Tokenize | Chat):
            return last
        what = "this recipe has no tokenize step, and a store holds tokens"
        raise SpecError(what, parameter="recipe", remedy='recipe.prepare_step(bw.tokenize("bytes"))')

    def spec(self) -> dict[str, Any]:
        """Everything that decides the result, besides the content of the files."""
        return {
            "seed": self.seed,
            "ingredients": [self._spec_of(ingredient) for ingredient in self.ingredients],
            "steps": [spec_of_step(step) for step in self.steps],
            "holdout": self.holdout_fraction,
        }

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.spec())[:16]

    def _add(self, instruction: Instruction) -> DatasetRecipe:
        match instruction:
            case Ingredient():
                self._add_source(instruction)
            case RowStep() | Tokenize() | Chat():
                self._add_step(instruction)
            case _:
                raise SpecError(
                    f"a {type(instruction).__name__} is not an instruction",
                    parameter="instructions",
                    remedy="bw.add_ingredient(...), bw.prepare_step(...) or bw.tokenize(...)",
                )
        return self

    def _add_source(self, ingredient: Ingredient) -> None:
        names = [other.name for other in self.ingredients]
        if ingredient.name:
            check_source_name(ingredient.name, names, called="an ingredient")
        else:
            ingredient = replace(ingredient, name=ingredient.name_after_source(set(map(str.casefold, names))))
        self._instructions.insert(len(self._instructions) - self.is_tokenized, ingredient)

    def _add_step(self, step: Step) -> None:
        if self.is_tokenized:
            what = "no step can follow tokenize: rows are tokens then"
            raise SpecError(what, parameter="step", remedy="add it before tokenize")
        if isinstance(step, RowStep) and isinstance(step.select, tuple):
            self._check_selected(step.select)
        self._instructions.append(step)

    def _check_selected(self, names: Sequence[str]) -> None:
        there = [ingredient.name for ingredient in self.ingredients]
        unknown = next((name for name in names if name not in there), None)
        if unknown is None:
            return
        near, remedy = suggest(unknown, there), "a step comes after the ingredients that it is for"
        if near is not None:
            remedy = f"select={near!r}"
        what, names_there = f"no ingredient before this step is named {unknown!r}", ", ".join(map(repr, there))
        raise SpecError(what, parameter="select", ingredients=names_there or "none", remedy=remedy)

    def _steps_before(self, ingredient: Ingredient) -> int:
        number = next(n for n, each in enumerate(self._instructions) if each is ingredient)
        return sum(not isinstance(each, Ingredient) for each in self._instructions[:number])

    def _spec_of(self, ingredient: Ingredient) -> dict[str, Any]:
        """An ingredient's spec, and the number of steps before it, if any, which it does not go through."""
        spec = ingredient.spec()
        if missed := self._steps_before(ingredient):
            spec["after"] = missed
        return spec

    def __repr__(self) -> str:
        lines = [f"DatasetRecipe, seed {self.seed}", *(f"├─ {line_of(each)}" for each in self._instructions)]
        if self.holdout_fraction:
            lines.append(f"├─ hold out {100 * self.holdout_fraction:g} % as val")
        lines[-1] = lines[-1].replace("├─", "└─", 1)
        return "\n".join(lines)


def check_recipe(recipe: Any) -> None:
    """Refuse a recipe that cannot be baked."""
    if not isinstance(recipe, DatasetRecipe):
        what = f"a {type(recipe).__name__} is not a recipe"
        raise SpecError(what, parameter="recipe", remedy="recipe = bw.DatasetRecipe()")
    if not recipe.ingredients:
        what = "this recipe has no ingredients"
        raise SpecError(what, parameter="recipe", remedy="recipe.add_ingredient('data/*.jsonl')")
    if recipe.holdout_fraction and not recipe.is_tokenized:
        what = "holdout is of documents that are tokenised, and this recipe has no tokenize step"
        remedy = "leave holdout out, or recipe.prepare_step(bw.tokenize('bytes'))"
        raise SpecError(what, parameter="recipe", remedy=remedy)


def spec_of_step(step: Step) -> list[Any]:
    """A step in a recipe's spec. A tokenizer counts by its behaviour, not by the path of its file."""
    if isinstance(step, RowStep):
        return step.spec()
    return ["chat" if isinstance(step, Chat) else "tokenize", step.fingerprint]


def _checked_list(instructions: Any) -> list[Any]:
    if isinstance(instructions, str | bytes | dict) or not isinstance(instructions, Iterable):
        remedy = "DatasetRecipe(instructions=[bw.add_ingredient(...), bw.prepare_step(...)])"
        what = f"instructions are a list, not a {type(instructions).__name__}"
        raise SpecError(what, parameter="instructions", remedy=remedy)
    return list(instructions)
