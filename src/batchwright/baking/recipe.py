"""A recipe: instructions in order, each adds a source or prepares the rows so far. A value; baking does the work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from batchwright.baking.instructions import Ingredient, Instruction, Step, add_ingredient, bad_name, prepare_step
from batchwright.base.checks import at_least, one_of
from batchwright.base.errors import SpecError
from batchwright.base.fingerprint import fingerprint
from batchwright.base.words import suggest
from batchwright.prepare.chat.step import Chat
from batchwright.prepare.rows import RowStep
from batchwright.prepare.tokenize import Tokenize
from batchwright.typing import Data, OnError

__all__ = ["DatasetRecipe", "check_recipe", "spec_of_step"]

Row = dict[str, Any]


class DatasetRecipe:
    """What a dataset is made of: a list of `instructions`, and the `seed` of all that is shuffled or chosen. Methods
    change the recipe and return it. `on_error` says what becomes of malformed rows, as in `bake`.

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
        several columns ("{title}\\n\\n{body}"). `where(row)` keeps a row or not. `quantity` keeps that many of the rows
        that `where` kept (a whole number), or that share of them (a fraction), chosen by a hash of seed, name, file and
        row: the same ones every time. `options` are for the files' format: {"delimiter": ";"}. `version` names `where`,
        should it use things that cannot be compared.
        """
        return self._add(
            add_ingredient(
                source,
                text,
                format=format,
                name=name,
                where=where,
                quantity=quantity,
                options=options,
                version=version,
            )
        )

    def prepare_step(
        self,
        step: Tokenize | Chat | Callable[[Row], Row | None],
        *,
        select: Callable[[Row], Any] | str | list[str] | tuple[str, ...] | None = None,
        name: str | None = None,
        version: str | None = None,
    ) -> DatasetRecipe:
        """Add a step over the rows of the ingredients so far: a function of a row that returns one, or None to drop it.

        `select` says which rows the function sees (a function of a row, an ingredient's name, or a list of names); the
        others pass by unchanged. `version` names both functions, should they use things that cannot be compared. The
        last step is `bw.tokenize(...)`, or `bw.chat(...)` for rows that are conversations; it is for all ingredients.
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
        """In the order in which they are followed: tokenize is the last, whenever it was added."""
        return list(self._instructions)

    @property
    def ingredients(self) -> list[Ingredient]:
        return [each for each in self._instructions if isinstance(each, Ingredient)]

    @property
    def steps(self) -> list[Step]:
        return [each for each in self._instructions if not isinstance(each, Ingredient)]

    def steps_of(self, ingredient: Ingredient) -> list[Step]:
        """The steps that an ingredient's rows go through: those that come after it and do not name others only."""
        after = [s for s in self._instructions[self._number_of(ingredient) :] if not isinstance(s, Ingredient)]
        steps: list[Step] = []
        for step in after:
            if not isinstance(step, RowStep) or not isinstance(step.select, tuple):
                steps.append(step)
            elif ingredient.name in step.select:  # it sees all of these rows, so that nothing is left to select
                steps.append(replace(step, select=None))
        return steps

    @property
    def is_tokenized(self) -> bool:
        """Whether it ends in tokens. Otherwise rows come out as they are after the last step."""
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
        """What decides the result, besides the content of the files."""
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
        if isinstance(instruction, Ingredient):
            taken = {known.name.casefold() for known in self.ingredients}
            # Some file systems do not tell large letters from small ones.
            if instruction.name.casefold() in taken:
                raise bad_name(instruction.name, "that name is taken")
            named = instruction if instruction.name else replace(instruction, name=instruction.name_after_source(taken))
            self._instructions.insert(len(self._instructions) - self.is_tokenized, named)
        elif isinstance(instruction, RowStep | Tokenize | Chat):
            if self.is_tokenized:
                raise SpecError(
                    "no step can follow tokenize: rows are tokens then",
                    parameter="step",
                    remedy="add it before tokenize",
                )
            if isinstance(instruction, RowStep) and isinstance(instruction.select, tuple):
                self._check_selected(instruction.select)
            self._instructions.append(instruction)
        else:
            raise SpecError(
                f"a {type(instruction).__name__} is not an instruction",
                parameter="instructions",
                remedy="bw.add_ingredient(...), bw.prepare_step(...) or bw.tokenize(...)",
            )
        return self

    def _check_selected(self, names: Sequence[str]) -> None:
        there = [ingredient.name for ingredient in self.ingredients]
        for name in names:
            if name not in there:
                near = suggest(name, there)
                raise SpecError(
                    f"no ingredient before this step is named {name!r}",
                    parameter="select",
                    ingredients=", ".join(map(repr, there)) or "none",
                    remedy=f"select={near!r}" if near else "a step comes after the ingredients that it is for",
                )

    def _number_of(self, ingredient: Ingredient) -> int:
        return next(n for n, each in enumerate(self._instructions) if each is ingredient)

    def _spec_of(self, ingredient: Ingredient) -> dict[str, Any]:
        """An ingredient's spec, and how many steps it came too late for, if any."""
        before = self._instructions[: self._number_of(ingredient)]
        missed = sum(not isinstance(each, Ingredient) for each in before)
        return {**ingredient.spec(), **({"after": missed} if missed else {})}

    def __repr__(self) -> str:
        entries = [
            each.describe() if isinstance(each, Ingredient) else f"then {each.describe()}"
            for each in self._instructions
        ]
        if self.holdout_fraction:
            entries.append(f"hold out {100 * self.holdout_fraction:g} % as val")
        lines = [f"DatasetRecipe, seed {self.seed}"]
        return "\n".join([*lines, *(f"{'└─' if n == len(entries) - 1 else '├─'} {e}" for n, e in enumerate(entries))])


def check_recipe(recipe: Any) -> None:
    """Refuse what cannot be baked, whatever it is to become."""
    if not isinstance(recipe, DatasetRecipe):
        raise SpecError(
            f"a {type(recipe).__name__} is not a recipe", parameter="recipe", remedy="recipe = bw.DatasetRecipe()"
        )
    if not recipe.ingredients:
        raise SpecError(
            "this recipe has no ingredients", parameter="recipe", remedy="recipe.add_ingredient('data/*.jsonl')"
        )
    if recipe.holdout_fraction and not recipe.is_tokenized:
        raise SpecError(
            "holdout is of documents that are tokenised, and this recipe has no tokenize step",
            parameter="recipe",
            remedy="leave holdout out, or recipe.prepare_step(bw.tokenize('bytes'))",
        )


def spec_of_step(step: Step) -> list[Any]:
    """A tokenizer by what it does alone: where its file lies does not matter."""
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
