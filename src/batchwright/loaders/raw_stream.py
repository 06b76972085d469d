"""Pretraining straight from raw files: the first batch at once, bounded memory, and still an exact resume.

Rows are windows over the documents in the order of the files. Where a row lies is only known once everything before it
was read, so the state says it: file, record, tokens to skip.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import index
from typing import Any, Self

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
from batchwright.batches.feed import Place
from batchwright.batches.flow import Task
from batchwright.batches.settings import Asked, Fields
from batchwright.batches.types import TrainingBatch
from batchwright.loaders.interface import Made, Making, Record, Stream, state_at
from batchwright.loaders.raw_files import recipe_of
from batchwright.loaders.raw_rows import Chunk, Document, RawDocuments, RawPlan, RawRows, first_rows
from batchwright.loaders.run import Run
from batchwright.loaders.stored import blocks_of
from batchwright.loaders.stream import BlockBatches
from batchwright.order.plan import PlanSource
from batchwright.order.schedule import ORDER_VERSION
from batchwright.order.sharding import Share
from batchwright.order.split import Cut

__all__ = ["RawStream", "open_raw"]

_SHUFFLE_ROWS = 1024
"""Rows of a window of the shuffle, where shuffling was asked for and no number said."""


@dataclass(slots=True)
class _Cursor:
    """What is known besides a position: where that lies, and how many rows an epoch has."""

    position: int = 0
    place: Place[Document] | None = None
    """Where reading must begin for `position`; None: at the beginning of its epoch."""
    epoch_rows: int | None = None


def open_raw(path: Any, tokenizer: Any, asked: Asked) -> RawStream:
    """The stream over raw files that settings ask for."""
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
        order_version=ORDER_VERSION,
    )
    fields = Fields(**asked.some(*Fields.names())).with_defaults(is_packed=False)
    return RawStream(plan, RawDocuments(work), fields)


class RawStream(Stream[TrainingBatch]):
    """Rows straight from raw files. How many an epoch has is known when one was read."""

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
        return _RawBatches(
            names=[source.name for source in self.plan.sources],
            row_tokens=self.plan.row_tokens,
            plan=self.plan.fingerprint,
            cut=run.cut_by_count(rows),
            share=run.share,
            end=run.end,
            adapt=blocks_of(making.framework),
            pool=self.pool,
            prefetch=making.prefetch,
            rows=RawRows(self.documents, self.plan),
            fields=self.fields,
            cursor=self.cursor,
            num_epochs=run.num_epochs,
            record=record,
        )

    # What is found out on the way

    def why_uncounted(self) -> SpecError | None:
        if self.plan.known_rows is not None:
            return None
        return SpecError(
            "raw files are not counted before they are read, so there is no number of batches yet",
            parameter="streaming",
            remedy="streaming=False (bakes once, into a cache), or ask again after the first pass",
        )

    def with_facts_learned(self) -> Self:
        """The stream that knows how many rows an epoch has, once a pass has counted them."""
        if self.plan.known_rows is not None or self.cursor.epoch_rows is None:
            return self
        return self._with(replace(self.plan, known_rows=self.cursor.epoch_rows), self.cursor)

    def note_batch(self, batch: Any) -> int | None:
        state = batch.metadata["state"]
        self.cursor.position, self.cursor.epoch_rows = state["position"], state["epoch_rows"]
        self.cursor.place = self.documents.find(state["place"])
        return self.cursor.position

    # States say file, record and tokens to skip, so that resuming reads at most one file again

    def extra_state(self, position: int) -> dict[str, Any]:
        place = self.cursor.place if self.cursor.position == position else None
        return _state_of(self.documents, place, self.plan.known_rows)

    def for_state(self, state: Mapping[str, Any]) -> Self:
        if state["plan"] != self.plan.fingerprint:
            return self
        place, rows = self.documents.find(state.get("place")), state.get("epoch_rows")
        known = None if rows is None else at_least(1, epoch_rows=rows)
        cursor = _Cursor(index(state["position"]), place, known)
        return self._with(replace(self.plan, known_rows=known), cursor)

    def _with(self, plan: RawPlan, cursor: _Cursor) -> Self:
        return type(self)(plan, self.documents, self.fields, cursor)

    def stats(self, position: int) -> dict[str, Any]:
        tokens = position * self.plan.row_tokens
        return {"tokens": tokens, "tokens_per_source": {self.plan.sources[0].name: tokens}}

    @property
    def row_in_words(self) -> str:
        return f"x {self.plan.row_tokens}"


@dataclass(slots=True, kw_only=True)
class _RawBatches(BlockBatches):
    """One rank's batches of a run over raw files. Every rank reads everything, and takes its rows."""

    cut: Cut
    share: Callable[[int], Share]
    end: int | None
    rows: RawRows
    fields: Fields
    cursor: _Cursor
    num_epochs: int | None
    counted_rows: int | None = None
    """Rows of an epoch, as soon as its end was read: perhaps ahead of what was handed over."""

    def batches(self, position: int) -> Made[TrainingBatch]:
        return self.adapt.hand_over(self._sliced(position))

    def _sliced(self, position: int) -> Made[TrainingBatch]:
        """(batch, position after it) from a position to the end of its epoch."""
        for block, after, place, origins in self._ahead(position):
            self.adapt(block)
            width = len(block.source)
            metadata = (self._raw_metadata, block, after, place, origins)
            batch = self._batch(self._fields(block, width), 0, width, metadata)
            self.cursor.position, self.cursor.place = after, place
            yield batch, after
        # Only now: what is known of the end, and so where a batch begins, must not depend on how far a thread had read.
        self.cursor.epoch_rows = self.counted_rows

    def turns(self, position: int, skipped: int, every: int, stop: int | None) -> Iterator[TrainingBatch]:
        if self.num_epochs != 1:
            raise SpecError(
                "several epochs of raw files cannot be streamed in torch's workers: none of them knows where one ends",
                parameter="num_workers",
                remedy="num_workers=0, epochs=1, or streaming=False (bakes once, into a cache)",
            )
        batches = self.batches(position)
        return (batch for batch, _ in itertools.islice(batches, skipped, None, every))

    def _ahead(self, position: int) -> Iterator[_Step]:
        made = self._made_from(position)
        if not self.prefetch:
            yield from made
            return
        for one in by_threads(lambda _: next(made, None), itertools.repeat(None), self.prefetch):
            if one is None:
                return
            yield one

    def _made_from(self, position: int) -> Iterator[_Step]:
        """Steps from a position to the end of the run; of its epoch, where nobody knew yet when that ends."""
        while not self.cut.is_over(position := self.cut.settle(position), self.end):
            position = yield from self._made_in_epoch(position)
            if self.rows.plan.known_rows is None:
                return

    def _made_in_epoch(self, position: int) -> Generator[_Step, None, int]:
        """Steps from a position to the end of its epoch. Returns the position after them."""
        rows, plan = self.cut.rows_per_step, self.rows.plan
        epoch, row = divmod(position, plan.known_rows) if plan.known_rows else (0, position)
        # The cursor may still say where the epoch before ended: when it came there, nobody knew that it was the end.
        place = self.cursor.place if row and self.cursor.position == position else None
        waiting: list[Chunk] = []
        for chunk in self.rows.chunks(epoch, row, place, rows):
            waiting.append(chunk)
            while sum(map(len, waiting)) >= rows:
                step, waiting = first_rows(waiting, rows)
                row += rows
                after = self.cut.settle(position + rows)
                place = step.begin[-1] if after == position + rows else None  # else at the beginning of the next epoch
                yield self._block(position, step), after, place, step.origins
                position += rows
        left = sum(map(len, waiting))
        self.counted_rows = self._counted(row + left)
        if left and plan.epoch_end != "drop":
            step, _ = first_rows(waiting, left)
            yield self._block(position, step), position + left, None, step.origins
            return position + left
        return position

    def _counted(self, epoch_rows: int) -> int:
        """Rows of an epoch, which has ended; or why they are too few."""
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

    def _block(self, position: int, step: Chunk) -> Block:
        task = self._task(position, len(step))
        real = task.live_rows() - position
        tokens = self.pool.take(len(real), self.row_tokens + 1)
        tokens[:] = step.tokens[real]
        block = Block(tokens, np.zeros(len(real), np.int32), position + real, task.weights())
        if self.fields.need_borders:
            add_border_fields(block, [step.borders[i] for i in real.tolist()], self.fields)
        mask_padding(block)
        return block

    def _raw_metadata(
        self, block: Block, after: int, place: Place[Document] | None, origins: list[Place[Document]]
    ) -> dict[str, Any]:
        task, documents = self._task(0, len(origins)), self.rows.documents
        begins = [documents.describe(origins[i]) or {} for i in task.live_rows().tolist()]
        return {
            **self._facts(block, 0, task.num_rows),
            "global_rows": task.real_rows,
            "begins": [{name: at[name] for name in ("file", "record", "skip")} for at in begins],
            "state": state_at(after, self.plan, self.record) | _state_of(documents, place, self.rows.plan.known_rows),
        }

    def _task(self, position: int, real_rows: int) -> Task:
        """One step, of which `real_rows` rows are data."""
        rows = real_rows if self.cut.epoch_end == "short" else self.cut.rows_per_step
        return Task(position, 1, rows, self.share(rows), real_rows)


_Step = tuple[Block, int, Place[Document] | None, list[Place[Document]]]
"""(a step's rows, position after it, where reading must begin there, where each row of the global batch begins)."""


def _state_of(documents: RawDocuments, place: Place[Document] | None, epoch_rows: int | None) -> dict[str, Any]:
    """What a state has besides position, plan and steps."""
    return {"place": documents.describe(place), "epoch_rows": epoch_rows}


def _shuffle_window(asked: Asked) -> int:
    """Rows of a window of the shuffle; 0 for none."""
    scope, rows = asked["shuffle"], asked["pool_rows"]
    if scope in ("none", False) and rows:
        raise SpecError(
            f"shuffle={scope!r} and pool_rows={rows} contradict each other",
            parameter="pool_rows",
            remedy="leave one of them out",
        )
    if rows is None:
        return _SHUFFLE_ROWS if scope in ("window", True) else 0
    return int(rows)


def _check_recipe(recipe: DatasetRecipe) -> None:
    """Refuse what cannot be known before everything was read."""
    why = (
        f"it has {len(recipe.ingredients)} ingredients, and a stream has one"
        if len(recipe.ingredients) != 1
        else "a quantity is chosen among all rows"
        if recipe.ingredients[0].quantity is not None
        else "holding documents out needs a store"
        if recipe.holdout_fraction
        else "the characters of a corpus are known when all of it was read"
        if recipe.tokenize.needs_fit
        else None
    )
    if why:
        raise SpecError(
            f"this cannot be streamed: {why}",
            parameter="streaming",
            remedy="streaming=False: bakes once, into a cache",
        )
