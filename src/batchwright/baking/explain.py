"""Say what a recipe will do, with counts: a dry run over its sources that writes nothing and tokenises nothing."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from batchwright.baking.instructions import Ingredient, Instruction
from batchwright.baking.recipe import DatasetRecipe, check_recipe
from batchwright.baking.rows import Reading, UnitReport, apply_step, is_selected, kept_rows, pass_over
from batchwright.base.checks import one_of
from batchwright.prepare.rows import RowStep
from batchwright.typing import OnError

if TYPE_CHECKING:
    from batchwright.baking.work import Cut
    from batchwright.sources.units import Unit

__all__ = ["Explanation", "Told", "explain"]

Row = dict[str, Any]


@dataclass(slots=True)
class Told:
    """What one instruction will do.

    `counts` of an ingredient: rows read, why rows were not kept, kept. Of a step: rows seen, passed by, changed,
    dropped. Of tokenize: rows seen, why rows gave no document, documents.
    """

    what: str
    counts: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.what}: " + ", ".join(f"{count:,} {name}" for name, count in self.counts.items())


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a recipe will do, instruction by instruction. Prints as a tree."""

    seed: int
    instructions: list[Told]
    num_rows: int
    """At the end."""

    def as_json(self) -> dict[str, Any]:
        told = [{"what": each.what, "counts": each.counts} for each in self.instructions]
        return {"seed": self.seed, "instructions": told, "num_rows": self.num_rows}

    def __repr__(self) -> str:
        lines = [f"DatasetRecipe, seed {self.seed}"]
        lines += [f"├─ {told}" for told in self.instructions]
        return "\n".join([*lines, f"└─ {self.num_rows:,} row{'s' * (self.num_rows != 1)} in the end"])


def explain(recipe: DatasetRecipe, *, on_error: OnError = "raise") -> Explanation:
    """What every instruction of a recipe will do, in order, with counts.

    Reads the sources and runs `where`, `select` and the steps as `bake` would; `on_error` is as there.
    """
    from batchwright.baking.work import choose_quantities, plan_dry

    check_recipe(recipe)
    one_of(("raise", "skip"), on_error=on_error)
    work = plan_dry(recipe, on_error)
    choose_quantities(work, 0, "an explanation", show=False)
    run = _DryRun(recipe.instructions)
    for part in work:
        for unit, chosen in zip(part.units, part.selected, strict=True):
            run.read(part, unit, chosen)
    return Explanation(recipe.seed, run.tell(), run.num_rows)


class _DryRun:
    """Counts what becomes of rows, for each instruction."""

    def __init__(self, instructions: list[Instruction]) -> None:
        self.instructions = instructions
        self.counts: list[Counter[str]] = [Counter() for _ in instructions]
        self.num_rows = 0

    def read(self, part: Cut, unit: Unit, chosen: Any) -> None:
        """Follow the rows of one unit."""
        number = next(n for n, each in enumerate(self.instructions) if each is part.ingredient)
        report, dropped, kept = UnitReport(), Counter[str](), 0
        for span, row_number, row in kept_rows(part.job, unit, report, dropped, chosen):
            kept += 1
            self._follow(part.job, unit, span, row_number, row, number + 1)
        self.counts[number]["rows read"] += report.rows_read
        self.counts[number].update(dropped)
        self.counts[number]["kept"] += kept

    def _follow(self, job: Reading, unit: Unit, span: int, row_number: int, row: Row, first: int) -> None:
        """One row through the instructions that come after its ingredient."""
        for number in range(first, len(self.instructions)):
            step, counts = self.instructions[number], self.counts[number]
            if isinstance(step, Ingredient):
                continue
            if not isinstance(step, RowStep):
                counts["seen"] += 1
                if not self._is_document(job, unit, span, row_number, row, counts):
                    return
                counts["documents"] += 1
                continue
            if not is_selected(job, step, unit, span, row_number, row):
                counts["passed by"] += 1
                continue
            counts["seen"] += 1
            before = copy.deepcopy(row)  # a step may change the row that it is given
            after = apply_step(job, step, unit, span, row_number, row)
            if after is None:
                counts["dropped"] += 1
                return
            counts["changed"] += not _is_same(before, after)
            row = after
        self.num_rows += 1

    def _is_document(
        self, job: Reading, unit: Unit, span: int, row_number: int, row: Row, counts: Counter[str]
    ) -> bool:
        from batchwright.baking.unit import Job, document_of
        from batchwright.sources.formats import Malformed

        assert isinstance(job, Job)
        text = document_of(job, unit, span, row_number, row)
        if isinstance(text, Malformed):
            pass_over(job, unit, span, row_number, text, UnitReport(), counts)
            return False
        if not text:
            counts["empty text"] += 1
            return False
        return True

    def tell(self) -> list[Told]:
        return [_told(each, counts) for each, counts in zip(self.instructions, self.counts, strict=True)]


def _told(instruction: Instruction, counts: Counter[str]) -> Told:
    """Counts in an order that can be read: what came, what became of it, what is left."""
    if isinstance(instruction, Ingredient):
        what, first, last = instruction.describe(), "rows read", "kept"
    elif isinstance(instruction, RowStep):
        what, first, last = f"then {instruction.describe()}", "seen", "dropped"
        counts = Counter({name: counts[name] for name in ("passed by", "changed", first, last)})
    else:
        what, first, last = f"then {instruction.describe()}", "seen", "documents"
    between = {name: count for name, count in counts.items() if name not in (first, last)}
    return Told(what, {first: counts[first], **between, last: counts[last]})


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values are equal in type and content, arrays and tensors too."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(value, other[name]) for name, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if hasattr(one, "dtype") and hasattr(one, "shape"):
        return one.dtype == other.dtype and one.shape == other.shape and bool(np.all(np.asarray(one == other)))
    return one is other or bool(one == other) or (one != one and other != other)
