"""A recipe: instructions in order. Each adds a source, or prepares the rows of the sources before it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from batchwright.baking.instructions import Ingredient, Instruction, Step, add_ingredient, line_of, prepare_step
from batchwright.base.checks import at_least, one_of
from batchwright.base.errors import SpecError
from batchwright.base.fingerprint import fingerprint
from batchwright.base.words import suggest
from batchwright.prepare.chat.step import Chat
from batchwright.prepare.rows import RowStep
from batchwright.prepare.tokenize import Tokenize
from batchwright.store.layout import check_source_name
from batchwright.typing import Data, OnError

__all__ = ["DatasetRecipe", "check_recipe", "spec_of_step"]

Row = dict[str, Any]


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
        for step in self._instructions[self._number_of(ingredient) :]:
            if isinstance(step, Ingredient):
                continue
            if not isinstance(step, RowStep) or not isinstance(step.select, tuple):
                steps.append(step)
            elif ingredient.name in step.select:
                steps.append(replace(step, select=None))  # it sees all rows of this ingredient
        return steps

    @property
    def is_tokenized(self) -> bool:
        """Whether it ends in tokens. Otherwise it gives the rows after its last step."""
        return any(isinstance(step, Tokenize | Chat) for step in self._instructions)

    @property
    def tokenize(self) -> Tokenize | Chat:
        for step in self._instructions:
            if isinstance(step, Tokenize | Chat):
                return step
        raise SpecError(
            "this recipe has no tokenize step, and a store holds tokens",
            parameter="recipe",
            remedy='recipe.prepare_step(bw.tokenize("bytes"))',
        )

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
        raise SpecError(
            f"no ingredient before this step is named {unknown!r}",
            parameter="select",
            ingredients=", ".join(map(repr, there)) or "none",
            remedy=remedy,
        )

    def _number_of(self, ingredient: Ingredient) -> int:
        return next(n for n, each in enumerate(self._instructions) if each is ingredient)

    def _spec_of(self, ingredient: Ingredient) -> dict[str, Any]:
        """An ingredient's spec, and the number of steps before it, if any, which it does not go through."""
        missed = sum(not isinstance(each, Ingredient) for each in self._instructions[: self._number_of(ingredient)])
        spec = ingredient.spec()
        if missed:
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
        raise SpecError(
            "holdout is of documents that are tokenised, and this recipe has no tokenize step",
            parameter="recipe",
            remedy="leave holdout out, or recipe.prepare_step(bw.tokenize('bytes'))",
        )


def spec_of_step(step: Step) -> list[Any]:
    """A step in a recipe's spec. A tokenizer counts by its behaviour, not by the path of its file."""
    if isinstance(step, RowStep):
        return step.spec()
    return ["chat" if isinstance(step, Chat) else "tokenize", step.fingerprint]


def _checked_list(instructions: Any) -> list[Any]:
    if isinstance(instructions, str | bytes | dict) or not isinstance(instructions, Iterable):
        raise SpecError(
            f"instructions are a list, not a {type(instructions).__name__}",
            parameter="instructions",
            remedy="DatasetRecipe(instructions=[bw.add_ingredient(...), bw.prepare_step(...)])",
        )
    return list(instructions)
