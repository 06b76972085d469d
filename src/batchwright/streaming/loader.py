"""Pretraining straight from raw files: the first batch at once, bounded memory, and still an exact resume.

Rows are windows over the documents in the order of the files. Where a row lies is only known once everything before it
was read, so the state says it: file, record, tokens to skip.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from batchwright.assemble.batch import Block, Fields, add_border_fields, mask_padding
from batchwright.assemble.feed import Place
from batchwright.baking import DatasetRecipe
from batchwright.baking.inputs import Inputs
from batchwright.baking.work import plan_work
from batchwright.deliver.ahead import by_threads
from batchwright.deliver.ranks import find_ranks
from batchwright.errors import EndOfRun, PlanError, SpecError
from batchwright.fingerprint import fingerprint
from batchwright.loaders.base import DataLoader
from batchwright.loaders.pretrain import PretrainDataLoader
from batchwright.loaders.stream import BatchStream, Record
from batchwright.order.schedule import ORDER_VERSION
from batchwright.plan import Plan, PlanSource, State
from batchwright.spec import at_least, one_of, whole_number
from batchwright.streaming.raw import recipe_of
from batchwright.streaming.rows import Chunk, Document, RawDocuments, RawPlan, RawRows, first_rows
from batchwright.types import TrainingBatch
from batchwright.typing import Framework

__all__ = ["StreamingPretrainDataLoader"]

_AHEAD_STEPS = 2
"""Steps made ahead by a thread: reading and tokenising take time that the training step can hide."""
_SHUFFLE_ROWS = 1024
"""Rows of a window of the shuffle, where shuffling was asked for and no number said."""

T = TypeVar("T")


@dataclass(slots=True)
class _Cursor:
    """What a loader knows besides its position: where that lies, and how many rows an epoch has."""

    position: int = 0
    place: Place[Document] | None = None
    """Where reading must begin for `position`; None: at the beginning of its epoch."""
    epoch_rows: int | None = None


@dataclass(slots=True, kw_only=True)
class _RawBatches(BatchStream):
    """One rank's batches of a run over raw files. Every rank reads everything, and takes its rows."""

    rows: RawRows
    fields: Fields
    cursor: _Cursor
    counted_rows: int | None = None
    """Rows of an epoch, as soon as its end was read: perhaps ahead of what was handed over."""

    def batches(self, position: int, record: Record) -> Generator[tuple[TrainingBatch, int], None, None]:
        """(batch, position after it) from a position to the end of its epoch."""
        for block, after, place, origins in self._made_ahead(position):
            self.adapt(block)
            width = len(block.source)
            metadata = (self._raw_metadata, block, after, record, place, origins)
            batch = self._batch(self._fields(block, width), 0, width, metadata)
            self.cursor.position, self.cursor.place = after, place
            yield batch, after
        # Only now: what is known of the end, and so where a batch begins, must not depend on how far a thread had read.
        self.cursor.epoch_rows = self.counted_rows

    def turns(self, position: int, stop: int | None, every: int, record: Record) -> Iterator[TrainingBatch]:
        raise AssertionError  # see StreamingPretrainDataLoader._turns

    def _made_ahead(self, position: int) -> Iterator[Made]:
        made = self._made_from(position)
        if not self.prefetch:
            yield from made
            return
        for one in by_threads(lambda _: next(made, None), itertools.repeat(None), self.prefetch):
            if one is None:
                return
            yield one

    def _made_from(self, position: int) -> Iterator[Made]:
        """Steps from a position to the end of the run; of its epoch, where nobody knew yet when that ends."""
        while not self.is_over(position := self.cut.settle(position)):
            position = yield from self._made_in_epoch(position)
            if self.rows.plan.known_rows is None:
                return

    def _made_in_epoch(self, position: int) -> Generator[Made, None, int]:
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
        tokens, known = self.flow.row_tokens, self.rows.plan.known_rows
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
        tokens = self.pool.take(len(real), self.flow.row_tokens + 1)
        tokens[:] = step.tokens[real]
        block = Block(tokens, np.zeros(len(real), np.int32), position + real, task.weights())
        if self.fields.need_borders:
            add_border_fields(block, [step.borders[i] for i in real.tolist()], self.fields)
        mask_padding(block)
        return block

    def _raw_metadata(
        self, block: Block, after: int, record: Record, place: Place[Document] | None, origins: list[Place[Document]]
    ) -> dict[str, Any]:
        task = self._task(0, len(origins))
        metadata = self._metadata(block, 0, task.num_rows, after, record) | {"global_rows": task.real_rows}
        documents = self.rows.documents
        metadata["state"] |= _state_of(documents, place, self.rows.plan.known_rows)
        begins = [documents.describe(origins[i]) or {} for i in task.live_rows().tolist()]
        metadata["begins"] = [{name: at[name] for name in ("file", "record", "skip")} for at in begins]
        return metadata


Made = tuple[Block, int, Place[Document] | None, list[Place[Document]]]
"""(a step's rows, position after it, where reading must begin there, where each row of the global batch begins)."""


def _state_of(documents: RawDocuments, place: Place[Document] | None, epoch_rows: int | None) -> dict[str, Any]:
    """What a state has besides position, plan and steps."""
    return {"place": documents.describe(place), "epoch_rows": epoch_rows}


class StreamingPretrainDataLoader(PretrainDataLoader):
    """What `PretrainDataLoader(..., streaming=True)` makes: batches straight from raw files."""

    _plan: RawPlan
    _of_another_plan = "the settings and the tokenizer of that run, and its files under the same names and sizes"

    def __init__(
        self,
        path: Any,
        tokenizer: Any = None,
        chunk_size: int | None = None,
        *,
        streaming: bool = True,
        batch_size: int | None = None,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        mesh: Any = None,
        framework: Framework | None = None,
        shuffle: str | bool | None = None,
        shuffle_rows: int | None = None,
        epochs: int | None = 1,
        epoch_end: str | None = None,
        recut: bool = True,
        position_ids: bool = False,
        segment_ids: bool = False,
        border_loss: bool = True,
        uneven: bool = False,
        sharding: Any = "contiguous",
        prefetch: int | None = None,
        text: str = "text",
        format: str | None = None,
        options: Mapping[str, Any] | None = None,
        append_eos: bool = True,
        eos: int | str | None = None,
        on_error: str = "raise",
        **of_a_store: Any,
    ) -> None:
        for name, value in of_a_store.items():
            if name not in _OF_A_STORE:
                raise TypeError(f"PretrainDataLoader() got an unexpected keyword argument {name!r}")
            if value is not None and value != _OF_A_STORE.get(name):
                raise SpecError(
                    f"{name}= needs to know all rows, and streaming=True does not",
                    parameter=name,
                    remedy=f"streaming=False (bakes once, into a cache), or leave out {name}=",
                )
        if chunk_size is None:
            raise SpecError("how long is a row?", parameter="chunk_size", remedy="chunk_size=2048")
        one_of(("raise", "skip"), on_error=on_error)
        recipe = recipe_of(path, tokenizer, text=text, format=format, options=options, append_eos=append_eos, eos=eos)
        _check_recipe(recipe)
        inputs = Inputs.of(recipe, shuffle=False)
        (work,) = plan_work(recipe, inputs, on_error, shuffle=False)
        ingredient = recipe.ingredients[0]
        window = _shuffle_window(shuffle, shuffle_rows)
        plan = RawPlan(
            row_tokens=at_least(1, chunk_size=chunk_size),
            seed=whole_number(seed=seed),
            shuffle="window" if window else "none",
            shuffle_rows=window,
            sources=(
                PlanSource(
                    name=ingredient.name,
                    split="train",
                    fingerprint=fingerprint(
                        [work.job.fingerprint, [[f.name, f.num_bytes] for f in work.files], inputs.spec]
                    ),
                    num_rows=0,
                    num_tokens=0,
                ),
            ),
            recut=recut,
            epoch_end=one_of(("drop", "short", "pad"), epoch_end="drop" if epoch_end is None else epoch_end),
            order_version=ORDER_VERSION,
        )
        self.documents: RawDocuments = RawDocuments(work)
        self._fields = Fields(position_ids=position_ids, segment_ids=segment_ids, border_loss=border_loss)
        self._cursor = _Cursor()
        DataLoader.__init__(
            self,
            _RawFlow(plan),  # type: ignore[arg-type]
            plan,
            batch_size=8 if batch_size is None else batch_size,
            ranks=find_ranks(rank, world_size, mesh),
            epochs=epochs,
            framework=framework,
            uneven=uneven,
            sharding=sharding,
            prefetch=_AHEAD_STEPS if prefetch is None else prefetch,
        )

    def _batches(self, rows: int) -> BatchStream:
        return _RawBatches(
            flow=self._flow,
            plan=self._plan.fingerprint,
            cut=self._cut_by_count(rows),
            share=self._share,
            end=self._end,
            adapt=self._adapt,
            pool=self._pool,
            prefetch=self.prefetch,
            rows=RawRows(self.documents, self._plan),
            fields=self._fields,
            cursor=self._cursor,
        )

    def _learn(self) -> None:
        """Take over how many rows an epoch has, once a pass has counted them."""
        if self._plan.known_rows is None and self._cursor.epoch_rows is not None:
            self._plan = replace(self._plan, known_rows=self._cursor.epoch_rows)
            self._warn_of_dropped_rows()

    def _close_stream(self) -> None:
        super()._close_stream()
        self._learn()

    def get_batch(self, batch_size: int | None = None) -> TrainingBatch:
        try:
            return super().get_batch(batch_size)
        except EndOfRun:
            if self._next_start()[1]:
                raise
            return super().get_batch(batch_size)  # the first pass ended, which was not known before

    def get_num_batches(self) -> int:
        if self._plan.known_rows is None:
            raise SpecError(
                "raw files are not counted before they are read, so there is no number of batches yet",
                parameter="streaming",
                remedy="streaming=False (bakes once, into a cache), or ask again after the first pass",
            )
        return super().get_num_batches()

    def _turns(self, worker: int, workers: int, taken: int = 0) -> Iterator[TrainingBatch]:
        if self.epochs != 1:
            raise SpecError(
                "several epochs of raw files cannot be streamed in torch's workers: none of them knows where one ends",
                parameter="num_workers",
                remedy="num_workers=0, epochs=1, or streaming=False (bakes once, into a cache)",
            )
        stream = self._batches(self.batch_size).batches(self._position, self._record(self.batch_size))
        return (batch for batch, _ in itertools.islice(stream, worker + taken * workers, None, workers))

    def _follow(self, begin: Callable[[], Iterable[T]]) -> Iterator[T]:
        return super()._follow(lambda: self._noting(begin()))

    def _noting(self, batches: Iterable[T]) -> Iterator[T]:
        """Batches that were made elsewhere: each says where it ended."""
        for batch in batches:
            state = batch.metadata["state"]  # type: ignore[attr-defined]
            self._cursor = _Cursor(state["position"], self.documents.find(state["place"]), state["epoch_rows"])
            yield batch

    def state_dict(self) -> State:
        """Where this loader is: with file, record and tokens to skip, so that resuming reads at most one file again."""
        place = self._cursor.place if self._cursor.position == self._position else None
        return super().state_dict() | _state_of(self.documents, place, self._plan.known_rows)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        place, plan = self.documents.find(state.get("place") if isinstance(state, Mapping) else None), self._plan
        try:
            if isinstance(state, Mapping) and state.get("plan") == plan.fingerprint:
                rows = state.get("epoch_rows")
                self._plan = replace(plan, known_rows=None if rows is None else at_least(1, epoch_rows=rows))
            super().load_state_dict(state)
        except BaseException:
            self._plan = plan
            raise
        self._cursor = _Cursor(self._position, place, self._plan.known_rows)

    def _known_plan(self, fingerprint: str) -> Plan | None:
        return None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_cursor": replace(self._cursor)}


class _RawFlow:
    """What batches of raw files say of themselves: one source, in its own order."""

    def __init__(self, plan: RawPlan) -> None:
        self.row_tokens, self.order = plan.row_tokens, self
        self.width_in_words = str(plan.row_tokens)
        self.names = [source.name for source in plan.sources]
        self.rows, self.windows, self.stored, self.sequences = [self], (), (), 1

    def given(self, position: int) -> list[int]:
        return [position]


_OF_A_STORE = {
    "weights": None,
    "num_rows": None,
    "num_tokens": None,
    "stop": None,
    "plan": None,
    "split": "train",
    "workers": 0,
    "pool_rows": None,
    "read_ahead": None,
}
"""Settings of a loader that only a store can answer, and what means that they were not given."""


def _shuffle_window(shuffle: str | bool | None, shuffle_rows: int | None) -> int:
    """Rows of a window of the shuffle; 0 for none."""
    asked = {True: "window", False: "none"}[shuffle] if isinstance(shuffle, bool) else shuffle
    if asked not in (None, "none", "window"):
        raise SpecError(
            f"shuffle={shuffle!r} needs to know all rows, and streaming=True does not",
            parameter="shuffle",
            remedy="shuffle_rows=4096 (inside windows of so many rows), or streaming=False",
        )
    if asked == "none" and shuffle_rows:
        raise SpecError(
            f"shuffle={shuffle!r} and shuffle_rows={shuffle_rows} contradict each other",
            parameter="shuffle_rows",
            remedy="leave one of them out",
        )
    if shuffle_rows is None:
        return _SHUFFLE_ROWS if asked == "window" else 0
    return at_least(1, shuffle_rows=shuffle_rows)


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
