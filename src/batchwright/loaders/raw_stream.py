"""The stream over raw files: an immediate first batch, bounded memory, and an exact resume.

Rows are windows over the documents in the order of the files. The place of a row is known only after everything before
it was read, so states hold the place: file, record, tokens to skip.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np

from batchwright.baking import DatasetRecipe
from batchwright.baking.inputs import Inputs
from batchwright.baking.work import plan_work
from batchwright.base.checks import at_least
from batchwright.base.errors import PlanError, SpecError
from batchwright.base.fingerprint import fingerprint
from batchwright.base.memory import BlockPool
from batchwright.batches.ahead import by_threads
from batchwright.batches.batch import Block, add_border_fields, mask_padding
from batchwright.batches.flow import Task
from batchwright.batches.settings import Asked, Fields
from batchwright.batches.types import TrainingBatch
from batchwright.batches.window import Place
from batchwright.loaders.blocks import BlockBatches, BlockStream
from batchwright.loaders.interface import Made, Making, Record, state_at
from batchwright.loaders.raw_files import recipe_of
from batchwright.loaders.raw_rows import Document, RawDocuments, RawPlan, RawRow, RawRows
from batchwright.loaders.run import Run
from batchwright.order.plan import PlanSource
from batchwright.order.schedule import NEVER
from batchwright.order.sharding import Share
from batchwright.order.split import Cut

__all__ = ["RawStream", "open_raw"]

_SHUFFLE_ROWS = 1024
"""Rows of a window of the shuffle, by default."""

OnePlace = Place[Document] | None


@dataclass(slots=True)
class _Cursor:
    """Facts about a position that are learned by reading: its place, and the rows of an epoch."""

    position: int = 0
    place: OnePlace = None
    """The place at which reading must begin for `position`; None: the beginning of its epoch."""
    epoch_rows: int | None = None


def open_raw(path: Any, tokenizer: Any, asked: Asked) -> RawStream:
    """The stream over raw files with these settings."""
    recipe = recipe_of(path, tokenizer)
    _check_recipe(recipe)
    inputs = Inputs.of(recipe, shuffle=False)
    (work,) = plan_work(recipe, inputs, recipe.on_error, shuffle=False)
    ingredient = recipe.ingredients[0]
    window = _shuffle_window(asked)
    content = fingerprint([work.job.fingerprint, [[f.name, f.num_bytes] for f in work.files], inputs.spec])
    plan = RawPlan(
        row_tokens=asked["chunk_size"],
        seed=asked["seed"] or 0,
        shuffle="window" if window else "none",
        shuffle_rows=window,
        sources=(PlanSource(name=ingredient.name, split="train", fingerprint=content, num_rows=0, num_tokens=0),),
        recut=asked["recut"] is not False,
        epoch_end=asked["epoch_end"] or "drop",
    )
    fields = Fields(**asked.some(*Fields.names())).with_defaults(is_packed=False)
    return RawStream(plan, RawDocuments(work), fields)


class RawStream(BlockStream):
    """Rows straight from raw files. The number of rows of an epoch is known after one epoch was read."""

    plan: RawPlan
    prefetch = 2  # reading and tokenising take time that the training step can hide
    of_another_plan = "the settings and the tokenizer of that run, and its files under the same names and sizes"

    def __init__(self, plan: RawPlan, documents: RawDocuments, fields: Fields, cursor: _Cursor | None = None) -> None:
        self.plan: RawPlan = plan
        self.documents: RawDocuments = documents
        self.fields: Fields = fields
        self.cursor: _Cursor = cursor or _Cursor()
        self.pool: BlockPool = BlockPool()

    def __reduce__(self) -> tuple[Any, ...]:
        return RawStream, (self.plan, self.documents, self.fields, replace(self.cursor))

    def open(self, run: Run, rows: int, record: Record, making: Making) -> _RawBatches:
        return _RawBatches(self, run, rows, record, making)

    # Facts learned by reading

    def why_uncounted(self) -> SpecError | None:
        if self.plan.known_rows is not None:
            return None
        return SpecError(
            "raw files are not counted before they are read, so there is no number of batches yet",
            parameter="streaming",
            remedy="streaming=False (bakes once, into a cache), or ask again after the first pass",
        )

    def with_facts_learned(self) -> Self:
        """The stream with the number of rows of an epoch, once a pass has counted them."""
        if self.plan.known_rows is not None or self.cursor.epoch_rows is None:
            return self
        return self._with(replace(self.plan, known_rows=self.cursor.epoch_rows), self.cursor)

    def note_batch(self, batch: Any) -> int | None:
        state = batch.metadata["state"]
        self.cursor.position, self.cursor.epoch_rows = state["position"], state["epoch_rows"]
        self.cursor.place = state["place"] and self.documents.find(state["place"])
        return self.cursor.position

    # States hold file, record and tokens to skip, so that resuming reads at most one file again

    def extra_state(self, position: int) -> dict[str, Any]:
        place = None
        if self.cursor.position == position:
            place = self.cursor.place
        return _extra_state(self.documents, place, self.plan)

    def for_state(self, state: Mapping[str, Any]) -> Self:
        if state["plan"] != self.plan.fingerprint:
            return self
        place, rows = state.get("place"), state.get("epoch_rows")
        if place is not None:
            place = self.documents.find(place)
        if rows is not None:
            rows = at_least(1, epoch_rows=rows)
        return self._with(replace(self.plan, known_rows=rows), _Cursor(state["position"], place, rows))

    def _with(self, plan: RawPlan, cursor: _Cursor) -> Self:
        return type(self)(plan, self.documents, self.fields, cursor)

    def stats(self, position: int) -> dict[str, Any]:
        tokens = position * self.plan.row_tokens
        return {"tokens": tokens, "tokens_per_source": {self.plan.sources[0].name: tokens}}

    @property
    def row_in_words(self) -> str:
        return f"x {self.plan.row_tokens}"


class _Step(NamedTuple):
    """This rank's rows of a step."""

    block: Block
    after: int
    """The position after the step."""
    place: OnePlace
    """The place at which reading must begin after the step; None: the beginning of its epoch."""
    origins: list[Place[Document]]
    """The place at which each row of the global batch begins."""


class _RawBatches(BlockBatches):
    """One rank's batches of a run over raw files. Every rank reads everything, and takes its rows."""

    def __init__(self, stream: RawStream, run: Run, rows: int, record: Record, making: Making) -> None:
        super().__init__(stream, run, record, making)
        self.cut: Cut = run.cut_by_count(rows)
        self.share: Callable[[int], Share] = run.share
        self.rows: RawRows = RawRows(stream.documents, stream.plan)
        self.fields: Fields = stream.fields
        self.cursor: _Cursor = stream.cursor
        self.num_epochs: int | None = run.num_epochs
        self.counted_rows: int | None = None
        """Rows of an epoch, as soon as its end was read: perhaps ahead of what was handed over."""

    def batches(self, position: int) -> Made[TrainingBatch]:
        """(batch, position after it) from a position to the end of its epoch."""
        return self.adapt.hand_over(self._sliced(position))

    def _sliced(self, position: int) -> Made[TrainingBatch]:
        for step in self._ahead(position):
            self.adapt(step.block)
            width = len(step.block.source)
            batch = self._batch(self._fields(step.block, width), 0, width, (self._raw_metadata, step.block, *step[1:]))
            self.cursor.position, self.cursor.place = step.after, step.place
            yield batch, step.after
        # Facts are updated only now. The end of an epoch must not depend on the progress of a reading thread.
        self.cursor.epoch_rows = self.counted_rows

    def turns(self, position: int, skipped: int, every: int, stop: int | None) -> Iterator[TrainingBatch]:
        if self.num_epochs != 1:
            raise SpecError(
                "several epochs of raw files cannot be streamed in torch's workers: none of them knows where one ends",
                parameter="num_workers",
                remedy="num_workers=0, epochs=1, or streaming=False (bakes once, into a cache)",
            )
        return (batch for batch, _ in itertools.islice(self.batches(position), skipped, None, every))

    def _ahead(self, position: int) -> Iterator[_Step]:
        made = self._made_from(position)
        if not self.prefetch:
            yield from made
            return
        for step in by_threads(lambda _: next(made, None), itertools.repeat(None), self.prefetch):
            if step is None:
                return
            yield step

    def _made_from(self, position: int) -> Iterator[_Step]:
        """Steps from a position to the end of the run; of its epoch, if its end is not known yet."""
        while not self.cut.is_over(position := self.cut.settle(position), self.end):
            position = yield from self._made_in_epoch(position)
            if self.rows.plan.known_rows is None:
                return

    def _made_in_epoch(self, position: int) -> Generator[_Step, None, int]:
        """Steps from a position to the end of its epoch. Returns the position after them."""
        batch_rows, plan = self.cut.rows_per_step, self.rows.plan
        epoch, row = divmod(position, plan.known_rows or NEVER)
        place = None
        if row and self.cursor.position == position:  # else it may still hold the end of the previous epoch
            place = self.cursor.place
        rows = self.rows.read(epoch, row, place, batch_rows)
        while len(step := list(itertools.islice(rows, batch_rows))) == batch_rows:
            row += batch_rows
            after, place = position + batch_rows, step[-1].following
            if after != self.cut.settle(after):
                after, place = self.cut.settle(after), None  # at the beginning of the next epoch
            yield self._step(position, step, after, place)
            position += batch_rows
        self.counted_rows = self._counted(row + len(step))
        if step and plan.epoch_end != "drop":
            yield self._step(position, step, position + len(step), None)
            position += len(step)
        return position

    def _counted(self, epoch_rows: int) -> int:
        """Return the rows of a finished epoch, or raise the error for too few rows."""
        tokens, known = self.row_tokens, self.rows.plan.known_rows
        if known is not None and epoch_rows != known:
            raise PlanError(
                f"an epoch had {known:,} rows, and has {epoch_rows:,} now: the files have changed",
                source=self.rows.plan.sources[0].name,
                remedy="the files as they were, or start the run anew",
            )
        if not epoch_rows:
            raise SpecError(
                f"chunk_size={tokens} needs {tokens + 1:,} tokens; the files have fewer",
                parameter="chunk_size",
                remedy="a smaller chunk_size, or more text",
            )
        if epoch_rows < self.cut.rows_per_step and self.cut.epoch_end == "drop":
            raise SpecError(
                f"batch_size={self.cut.rows_per_step} is more than an epoch, which has {epoch_rows} rows",
                parameter="batch_size",
                remedy=f"batch_size={epoch_rows} or less, or epoch_end='short' or 'pad'",
            )
        return epoch_rows

    def _step(self, position: int, rows: list[RawRow], after: int, place: OnePlace) -> _Step:
        task = self._task(position, len(rows))
        real = task.live_rows() - position
        mine = [rows[number] for number in real.tolist()]
        tokens = self.pool.take(len(mine), self.row_tokens + 1)
        for target, row in zip(tokens, mine, strict=True):
            target[:] = row.tokens
        block = Block(tokens, np.zeros(len(mine), np.int32), position + real, task.weights())
        if self.fields.need_borders:
            add_border_fields(block, [row.borders for row in mine], self.fields)
        mask_padding(block)
        return _Step(block, after, place, [row.origin for row in rows])

    def _raw_metadata(
        self, block: Block, after: int, place: OnePlace, origins: list[Place[Document]]
    ) -> dict[str, Any]:
        task, documents = self._task(0, len(origins)), self.rows.documents
        begins = [documents.describe(origins[row]) for row in task.live_rows().tolist()]
        state = state_at(after, self.plan, self.record) | _extra_state(documents, place, self.rows.plan)
        return {
            **self._facts(block, 0, task.num_rows),
            "global_rows": task.real_rows,
            "begins": [{name: at[name] for name in ("file", "record", "skip")} for at in begins],
            "state": state,
        }

    def _task(self, position: int, real_rows: int) -> Task:
        """One step with `real_rows` rows of data."""
        rows = self.cut.rows_per_step
        if self.cut.epoch_end == "short":
            rows = real_rows
        return Task(position, 1, rows, self.share(rows), real_rows)


def _extra_state(documents: RawDocuments, place: OnePlace, plan: RawPlan) -> dict[str, Any]:
    """The entries of a state besides position, plan and steps."""
    return {"place": place and documents.describe(place), "epoch_rows": plan.known_rows}


def _shuffle_window(asked: Asked) -> int:
    """Rows of a window of the shuffle; 0 for none."""
    scope, rows = asked["shuffle"], asked["pool_rows"]
    if scope in ("none", False) and rows:
        raise SpecError(
            f"shuffle={scope!r} and pool_rows={rows} contradict each other",
            parameter="pool_rows",
            remedy="leave one of them out",
        )
    if scope in ("window", True):
        return int(rows or _SHUFFLE_ROWS)
    return int(rows or 0)


def _check_recipe(recipe: DatasetRecipe) -> None:
    """Refuse a recipe whose rows depend on all of its data."""
    number = len(recipe.ingredients)
    for is_so, why in (
        (number != 1, f"it has {number} ingredients, and a stream has one"),
        (any(each.quantity is not None for each in recipe.ingredients), "a quantity is chosen among all rows"),
        (recipe.holdout_fraction, "holding documents out needs a store"),
        (recipe.tokenize.needs_fit, "the characters of a corpus are known when all of it was read"),
    ):
        if is_so:
            raise SpecError(
                f"this cannot be streamed: {why}",
                parameter="streaming",
                remedy="streaming=False: bakes once, into a cache",
            )
