"""The stream over raw files: an immediate first batch, bounded memory, and an exact resume.

Documents are tokenised while they are read; rows are windows over them, and equal those of a store that is baked with
`shuffle=False`. The place of a row is known only after everything before it was read, so states hold the place: file,
record, tokens to skip.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, NamedTuple, Self

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from batchwright.baking import DatasetRecipe
from batchwright.baking.inputs import Inputs
from batchwright.baking.unit import DocumentJob, UnitReport, encode_located, texts_of
from batchwright.baking.work import Work, plan_work
from batchwright.base.checks import at_least
from batchwright.base.errors import PlanError, SpecError
from batchwright.base.fingerprint import fingerprint
from batchwright.base.memory import BlockPool
from batchwright.base.seeds import key_of
from batchwright.base.words import shortened, suggest
from batchwright.batches.ahead import by_threads
from batchwright.batches.batch import Block, add_border_fields, mask_padding
from batchwright.batches.flow import Task
from batchwright.batches.settings import Asked, Fields
from batchwright.batches.types import TrainingBatch
from batchwright.batches.window import Place, WindowFeed
from batchwright.loaders.blocks import BlockBatches, BlockStream
from batchwright.loaders.interface import Made, Making, Record, state_at
from batchwright.loaders.raw_files import recipe_of
from batchwright.loaders.run import Run
from batchwright.order.permute import permutation
from batchwright.order.plan import Plan, PlanSource
from batchwright.order.schedule import NEVER
from batchwright.order.sharding import Share
from batchwright.order.split import Cut
from batchwright.sources.units import Unit

_FIRST_TEXT = 1 << 14
"""Characters tokenised at first: the first batch should not wait for more than it needs. Doubled up to _MOST_TEXT."""
_MOST_TEXT = 1 << 20
_SHUFFLE_ROWS = 1024
"""Rows of a window of the shuffle, by default."""


@dataclass(frozen=True, kw_only=True)
class RawPlan(Plan):
    """The plan of a stream over raw files: names and sizes of the files, tokenizer, steps, shuffle."""

    shuffle_rows: int = 0
    """Rows of a window of the shuffle; 0: no shuffle."""
    known_rows: int | None = field(default=None, compare=False)
    """Rows of an epoch, once one pass has counted them. Not part of the plan's fingerprint."""

    @property
    def epoch_rows(self) -> int | None:
        return self.known_rows

    def __repr__(self) -> str:
        window, rows = "none", "not counted yet"
        if self.shuffle_rows:
            window = f"in windows of {self.shuffle_rows:,} rows"
        if self.known_rows is not None:
            rows = f"{self.known_rows:,} an epoch"
        return f"Plan {self.fingerprint}: rows of {self.row_tokens} tokens from raw files, {rows}, shuffle {window}"


class Document(NamedTuple):
    """One document of raw files: enough to begin reading at it again."""

    part: int
    first_record: int
    """Number, in its file, of the part's first record."""
    record: int
    """Number in its file."""
    check: str
    """Hash of its tokens, which shows that a file was changed under a saved state."""


Tokenised = Iterator[tuple[Document, NDArray[Any]]]
OnePlace = Place[Document] | None


class SavedPlace(msgspec.Struct, kw_only=True):
    """A place in the form of states."""

    file: str
    record: Annotated[int, msgspec.Meta(ge=0)]
    skip: Annotated[int, msgspec.Meta(ge=0)]
    start: int
    """The beginning of the range of the file."""
    first_record: Annotated[int, msgspec.Meta(ge=0)]
    check: str


@dataclass(frozen=True, slots=True)
class _Part:
    """A file, or a range of a file."""

    file: str
    start: int
    unit: Unit


class RawDocuments:
    """The tokenised documents of raw files, in order, from any document on."""

    def __init__(self, work: Work) -> None:
        self.job: DocumentJob = work.job
        self.parts: list[_Part] = [
            _Part(work.file_of(span).name, span.start, Unit((span,), unit.num_bytes))
            for unit in work.units
            for span in unit.spans
        ] or [_Part("<memory>", unit.first_row, unit) for unit in work.units]

    def read(self, begin: Document | None = None) -> Tokenised:
        """Read documents from `begin` on. Earlier ones of its file (or range) are read again, but not tokenised."""
        part, first, wanted, _ = begin or Document(0, 0, 0, "")
        waiting: list[tuple[int, int, int]] = []
        texts: list[str] = []
        characters, limit = 0, _FIRST_TEXT
        while part < len(self.parts):
            report = UnitReport()
            for (_, _, row_number), text in texts_of(self.job, self.parts[part].unit, report):
                if first + row_number < wanted:
                    continue
                waiting.append((part, first, first + row_number))
                texts.append(text)
                characters += len(text)
                if characters >= limit:
                    yield from self._encoded(waiting, texts)
                    waiting, texts, characters, limit = [], [], 0, min(2 * limit, _MOST_TEXT)
            first, part, wanted = first + report.span_rows[0], part + 1, 0
            if part < len(self.parts) and self.parts[part].file != self.parts[part - 1].file:
                first = 0
        yield from self._encoded(waiting, texts)

    def read_from(self, place: Place[Document]) -> Tokenised:
        """The documents from a place on. The first must be the place's own document."""
        expected, documents = place.document, self.read(place.document)
        file = self.parts[expected.part].file
        for document, tokens in documents:
            if document != expected or place.skip >= len(tokens):
                what = f"record {expected.record} of {file} is not what it was when the state was saved"
                remedy = "the file as it was then, or start the run anew"
                raise PlanError(what, file=file, row=expected.record, remedy=remedy)
            yield document, tokens
            break
        yield from documents

    def _encoded(self, waiting: list[tuple[int, int, int]], texts: list[str]) -> Tokenised:
        def locate(number: int) -> tuple[Unit, int, int]:
            part, first, record = waiting[number]
            return self.parts[part].unit, 0, record - first

        for at, tokens in zip(waiting, encode_located(self.job, texts, locate), strict=True):
            yield Document(*at, xxhash.xxh3_64_hexdigest(tokens.data)), tokens

    def describe(self, place: Place[Document]) -> dict[str, Any]:
        """A place in JSON, for a state."""
        part, first, record, check = place.document
        file, start = self.parts[part].file, self.parts[part].start
        saved = SavedPlace(file=file, record=record, skip=place.skip, start=start, first_record=first, check=check)
        return msgspec.structs.asdict(saved)

    def find(self, described: Any) -> Place[Document]:
        """The place that a state describes."""
        try:
            saved = msgspec.convert(described, SavedPlace)
        except msgspec.ValidationError:
            what = "this is not the state of a loader that streams raw files"
            raise PlanError(what, got=shortened(described), remedy="what state_dict() returned") from None
        for part, (file, start) in enumerate((part.file, part.start) for part in self.parts):
            if (file, start) == (saved.file, saved.start):
                return Place(Document(part, saved.first_record, saved.record, saved.check), saved.skip)
        remedy = "the files that the run was started with"
        if near := suggest(saved.file, [part.file for part in self.parts]):
            remedy = f"perhaps it was renamed: there is {near}"
        what = f"this state lies in {saved.file}, which is not among the files of this loader"
        raise PlanError(what, file=saved.file, remedy=remedy)


class RawRow(msgspec.Struct):  # faster to create than other classes; there is one for each row
    """A row in the order of the stream."""

    tokens: NDArray[Any]
    borders: NDArray[np.int64]
    origin: Place[Document]
    """The place at which the row begins."""
    following: Place[Document]
    """The place at which reading must begin for the next row."""


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

    def check_workers(self, run: Run) -> None:
        if run.num_epochs != 1:
            what = "several epochs of raw files cannot be streamed in torch's workers: none knows where one ends"
            remedy = "num_workers=0, epochs=1, or streaming=False (bakes once, into a cache)"
            raise SpecError(what, parameter="num_workers", remedy=remedy)

    # Rows of an epoch

    def read(self, epoch: int, row: int, place: OnePlace, at_once: int) -> Iterator[RawRow]:
        """Rows from `row` of an epoch on, cut `at_once` at a time if they are not shuffled in windows.

        `place` is the place at which reading must begin: the start of the row's shuffle window, which must be complete.
        None: unknown, so everything before it is read.
        """
        plan, feed = self.plan, self._feed(epoch, place)
        at = 0
        if place is not None:
            at = row - row % (plan.shuffle_rows or 1)
        while plan.known_rows is None or at < plan.known_rows:
            wanted = plan.shuffle_rows or at_once
            if plan.known_rows is not None:
                wanted = min(wanted, plan.known_rows - at)
            window = self._window(feed, wanted, epoch, at)
            yield from window[max(row - at, 0) :]
            at += len(window)
            if len(window) < wanted:
                break
        if at < row and place is None:
            raise PlanError(f"row {row:,} is outside of the files", remedy=f"a position from 0 to {at:,}")

    def _window(self, feed: WindowFeed[Document], wanted: int, epoch: int, at: int) -> list[RawRow]:
        """The next rows of a feed, shuffled by the plan. The first is row `at` of the epoch."""
        taken = feed.take(wanted)
        origins, following = taken.places[:-1], taken.places[1:]
        if not self.plan.shuffle_rows or not origins:
            return list(map(RawRow, taken.tokens, taken.borders, origins, following))
        following = [origins[0]] * (len(origins) - 1) + following[-1:]  # inside a window, from its beginning
        order = permutation(len(origins), self.plan.seed, self.plan.sources[0].name, epoch, "window", at)
        shuffled = order.at(range(len(origins))).tolist()
        return [
            RawRow(taken.tokens[row], taken.borders[row], origins[row], after)
            for row, after in zip(shuffled, following, strict=True)
        ]

    def _feed(self, epoch: int, place: OnePlace) -> WindowFeed[Document]:
        """The documents of an epoch, from a place on. As in a store, later epochs cut rows at other places."""
        plan, documents, first = self.plan, self.documents.read(), 0
        if plan.recut and epoch:
            first = key_of("recut", plan.seed, plan.sources[0].name, epoch) % plan.row_tokens
        skip = first
        if place is not None:
            documents, skip = self.documents.read_from(place), place.skip
        if first:  # the last row of a later epoch wraps from the end of the files to their beginning
            documents = itertools.chain(documents, self.documents.read())
        return WindowFeed(documents, plan.row_tokens, skip)

    # Facts learned by reading

    def why_uncounted(self) -> SpecError | None:
        if self.plan.known_rows is not None:
            return None
        what = "raw files are not counted before they are read, so there is no number of batches yet"
        remedy = "streaming=False (bakes once, into a cache), or ask again after the first pass"
        return SpecError(what, parameter="streaming", remedy=remedy)

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

    stream: RawStream

    def __init__(self, stream: RawStream, run: Run, rows: int, record: Record, making: Making) -> None:
        super().__init__(stream, run, record, making)
        self.cut: Cut = run.cut_by_count(rows)
        self.share: Callable[[int], Share] = run.share
        self.cursor: _Cursor = stream.cursor
        self.counted_rows: int | None = None
        """Rows of an epoch, as soon as its end was read: perhaps ahead of what was handed over."""

    def batches(self, position: int, skipped: int = 0, every: int = 1, stop: int | None = None) -> Made[TrainingBatch]:
        """(batch, position after it) from a position to the end of its epoch."""
        return self.adapt.hand_over(self._sliced(position, skipped, every))

    def _sliced(self, position: int, skipped: int, every: int) -> Made[TrainingBatch]:
        for number, step in enumerate(self._ahead(position)):
            if number < skipped or (number - skipped) % every:
                continue
            self.adapt(step.block)
            width = len(step.block.source)
            batch = self._batch(self._fields(step.block, width), 0, width, (self._raw_metadata, step.block, *step[1:]))
            self.cursor.position, self.cursor.place = step.after, step.place
            yield batch, step.after
        # Facts are updated only now. The end of an epoch must not depend on the progress of a reading thread.
        self.cursor.epoch_rows = self.counted_rows

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
            if self.stream.plan.known_rows is None:
                return

    def _made_in_epoch(self, position: int) -> Generator[_Step, None, int]:
        """Steps from a position to the end of its epoch. Returns the position after them."""
        batch_rows, plan = self.cut.rows_per_step, self.stream.plan
        epoch, row = divmod(position, plan.known_rows or NEVER)
        place = None
        if row and self.cursor.position == position:  # else it may still hold the end of the previous epoch
            place = self.cursor.place
        rows = self.stream.read(epoch, row, place, batch_rows)
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
        tokens, known = self.row_tokens, self.stream.plan.known_rows
        if known is not None and epoch_rows != known:
            what = f"an epoch had {known:,} rows, and has {epoch_rows:,} now: the files have changed"
            remedy = "the files as they were, or start the run anew"
            raise PlanError(what, source=self.stream.plan.sources[0].name, remedy=remedy)
        if not epoch_rows:
            what = f"chunk_size={tokens} needs {tokens + 1:,} tokens; the files have fewer"
            raise SpecError(what, parameter="chunk_size", remedy="a smaller chunk_size, or more text")
        if epoch_rows < self.cut.rows_per_step and self.cut.epoch_end == "drop":
            what = f"batch_size={self.cut.rows_per_step} is more than an epoch, which has {epoch_rows} rows"
            remedy = f"batch_size={epoch_rows} or less, or epoch_end='short' or 'pad'"
            raise SpecError(what, parameter="batch_size", remedy=remedy)
        return epoch_rows

    def _step(self, position: int, rows: list[RawRow], after: int, place: OnePlace) -> _Step:
        task = self._task(position, len(rows))
        real = task.live_rows() - position
        mine = [rows[number] for number in real.tolist()]
        tokens = self.stream.pool.take(len(mine), self.row_tokens + 1)
        for target, row in zip(tokens, mine, strict=True):
            target[:] = row.tokens
        block = Block(tokens, np.zeros(len(mine), np.int32), position + real, task.weights())
        if self.stream.fields.need_borders:
            add_border_fields(block, [row.borders for row in mine], self.stream.fields)
        mask_padding(block)
        return _Step(block, after, place, [row.origin for row in rows])

    def _raw_metadata(
        self, block: Block, after: int, place: OnePlace, origins: list[Place[Document]]
    ) -> dict[str, Any]:
        task, documents, plan = self._task(0, len(origins)), self.stream.documents, self.stream.plan
        begins = [documents.describe(origins[row]) for row in task.live_rows().tolist()]
        state = state_at(after, plan.fingerprint, self.record) | _extra_state(documents, place, plan)
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
        what = f"shuffle={scope!r} and pool_rows={rows} contradict each other"
        raise SpecError(what, parameter="pool_rows", remedy="leave one of them out")
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
            remedy = "streaming=False: bakes once, into a cache"
            raise SpecError(f"this cannot be streamed: {why}", parameter="streaming", remedy=remedy)
