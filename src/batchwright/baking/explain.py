"""A dry run of a recipe: the effect of each instruction in counts of rows. Writes and tokenises nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from batchwright.baking.recipe import DatasetRecipe, Ingredient, Instruction, check_recipe, line_of
from batchwright.baking.unit_rows import (
    RowAt,
    UnitReport,
    apply_step,
    is_selected,
    kept_rows,
    result_fingerprint,
)
from batchwright.base.checks import one_of
from batchwright.base.words import counted
from batchwright.prepare.rows import RowStep
from batchwright.typing import OnError

if TYPE_CHECKING:
    from batchwright.baking.work import RowWork


@dataclass(slots=True)
class Effect:
    """The effect of one instruction.

    `counts` of an ingredient: rows read, rows dropped by reason, kept. Of a step: rows seen, passed by, changed,
    dropped. Of tokenize: rows seen, rows without a document by reason, documents.
    """

    what: str
    counts: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.what}: " + ", ".join(f"{count:,} {name}" for name, count in self.counts.items())


@dataclass(frozen=True, slots=True)
class Explanation:
    """The effects of a recipe's instructions, in order. Prints as a tree."""

    seed: int
    instructions: list[Effect]
    num_rows: int
    """The number of rows at the end."""

    def as_json(self) -> dict[str, Any]:
        effects = [{"what": effect.what, "counts": effect.counts} for effect in self.instructions]
        return {"seed": self.seed, "instructions": effects, "num_rows": self.num_rows}

    def __repr__(self) -> str:
        lines = [f"DatasetRecipe, seed {self.seed}"]
        lines += [f"├─ {effect}" for effect in self.instructions]
        return "\n".join([*lines, f"└─ {counted(self.num_rows, 'row')} in the end"])


def explain(recipe: DatasetRecipe, *, on_error: OnError = "raise") -> Explanation:
    """The effect of every instruction of a recipe, in order, with counts.

    Reads the sources and runs `where`, `select` and the steps as `bake` would; `on_error` is as there.
    """
    from batchwright.baking.work import choose_quantities, plan_dry

    check_recipe(recipe)
    one_of(("raise", "skip"), on_error=on_error)
    work = plan_dry(recipe, on_error)
    choose_quantities(work, 0, "an explanation", show=False)
    run = _DryRun(recipe)
    for part in work:
        run.read(part)
    effects = [_effect(each, counts) for each, counts in zip(recipe.instructions, run.counts, strict=True)]
    return Explanation(recipe.seed, effects, run.num_rows)


class _DryRun:
    """Counts rows, for each instruction."""

    def __init__(self, recipe: DatasetRecipe) -> None:
        self.instructions = recipe.instructions
        self.counts: list[Counter[str]] = [Counter() for _ in self.instructions]
        self.num_rows = 0

    def read(self, part: RowWork) -> None:
        """Follow the rows of one ingredient through the instructions after it."""
        number = next(n for n, each in enumerate(self.instructions) if each is part.ingredient)
        counts = self.counts[number]
        for unit, chosen in zip(part.units, part.selected, strict=True):
            report = UnitReport()
            for at, row in kept_rows(part.job, unit, report, chosen):
                counts["kept"] += 1
                self.num_rows += self._is_left(part, at, row, number + 1)
            counts.update({"rows read": report.rows_read} | report.dropped)

    def _is_left(self, part: RowWork, at: RowAt, row: dict[str, Any], first: int) -> bool:
        """Whether a row remains at the end."""
        for step, counts in zip(self.instructions[first:], self.counts[first:], strict=True):
            if isinstance(step, Ingredient):
                continue
            if not isinstance(step, RowStep):
                return self._is_document(part, at, row, counts)
            if not is_selected(part.job, step, at, row):
                counts["passed by"] += 1
                continue
            counts["seen"] += 1
            before = result_fingerprint(row)  # now: a step may change the row that it gets
            after = apply_step(part.job, step, at, row)
            if after is None:
                counts["dropped"] += 1
                return False
            counts["changed"] += result_fingerprint(after) != before
            row = after
        return True

    def _is_document(self, part: RowWork, at: RowAt, row: dict[str, Any], counts: Counter[str]) -> bool:
        from batchwright.baking.unit import DocumentJob, kept_document

        assert isinstance(part.job, DocumentJob)
        report = UnitReport()
        is_kept = kept_document(part.job, at, row, report) is not None
        counts.update({"seen": 1, "documents": int(is_kept)} | report.dropped)
        return is_kept


def _effect(instruction: Instruction, counts: Counter[str]) -> Effect:
    """Counts in reading order: incoming rows, dropped or changed rows, remaining rows."""
    if isinstance(instruction, RowStep):
        names = ("seen", "passed by", "changed", "dropped")
        return Effect(line_of(instruction), {name: counts[name] for name in names})
    first, last = ("rows read", "kept") if isinstance(instruction, Ingredient) else ("seen", "documents")
    between = {name: count for name, count in counts.items() if name not in (first, last)}
    return Effect(line_of(instruction), {first: counts[first], **between, last: counts[last]})
