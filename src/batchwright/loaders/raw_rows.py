"""Rows of raw files. Documents are tokenised while they are read; rows are windows over them, from any known place.

The rows equal those of a store that is baked with `shuffle=False`. The place of a row is known only after everything
before it was read. A `Place` holds file, record and tokens to skip, and reading can continue from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from batchwright.baking.unit import DocumentJob, UnitReport, encode_located, texts_of
from batchwright.baking.work import Work
from batchwright.base.errors import PlanError
from batchwright.base.seeds import key_of
from batchwright.base.words import shortened, suggest
from batchwright.batches.window import Place, WindowFeed
from batchwright.order.permute import permutation
from batchwright.order.plan import Plan
from batchwright.sources.units import Unit

__all__ = ["Document", "RawDocuments", "RawPlan", "RawRow", "RawRows"]

_FIRST_TEXT = 1 << 14
"""Characters tokenised at first: the first batch should not wait for more than it needs. Doubled up to _MOST_TEXT."""
_MOST_TEXT = 1 << 20


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
            raise PlanError(
                "this is not the state of a loader that streams raw files",
                got=shortened(described),
                remedy="what state_dict() returned",
            ) from None
        for part, (file, start) in enumerate((part.file, part.start) for part in self.parts):
            if (file, start) == (saved.file, saved.start):
                return Place(Document(part, saved.first_record, saved.record, saved.check), saved.skip)
        remedy = "the files that the run was started with"
        if near := suggest(saved.file, [part.file for part in self.parts]):
            remedy = f"perhaps it was renamed: there is {near}"
        raise PlanError(
            f"this state lies in {saved.file}, which is not among the files of this loader",
            file=saved.file,
            remedy=remedy,
        )


# Rows of an epoch


class RawRow(msgspec.Struct):  # faster to create than other classes; there is one for each row
    """A row in the order of the stream."""

    tokens: NDArray[Any]
    borders: NDArray[np.int64]
    origin: Place[Document]
    """The place at which the row begins."""
    following: Place[Document]
    """The place at which reading must begin for the next row."""


class RawRows:
    """The rows of an epoch over raw files, from any row with a known place."""

    plan: RawPlan
    documents: RawDocuments

    def __init__(self, documents: RawDocuments, plan: RawPlan) -> None:
        self.documents, self.plan = documents, plan

    def read(self, epoch: int, row: int, place: Place[Document] | None, at_once: int) -> Iterator[RawRow]:
        """Rows from `row` of an epoch on, cut `at_once` at a time if they are not shuffled in windows.

        `place` is the place at which reading must begin: the start of the row's shuffle window, which must be complete.
        None: unknown, so everything before it is read.
        """
        plan, offset = self.plan, self._offset(epoch)
        at, skip = 0, offset
        if place is not None:
            at, skip = row - row % (plan.shuffle_rows or 1), place.skip
        feed = WindowFeed(self._documents(place, is_ring=offset > 0), plan.row_tokens, skip)
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

    def _offset(self, epoch: int) -> int:
        """The first token of an epoch's first row. As in a store, later epochs cut rows at other places."""
        if not self.plan.recut or not epoch:
            return 0
        return key_of("recut", self.plan.seed, self.plan.sources[0].name, epoch) % self.plan.row_tokens

    def _documents(self, place: Place[Document] | None, is_ring: bool) -> Tokenised:
        if place is None:
            yield from self.documents.read()
        else:
            yield from self._checked(place)
        if is_ring:  # the last row of a later epoch wraps from the end of the files to their beginning
            yield from self.documents.read()

    def _checked(self, place: Place[Document]) -> Tokenised:
        """The documents from a place on. The first must be the place's own document."""
        expected, documents = place.document, self.documents.read(place.document)
        file = self.documents.parts[expected.part].file
        for document, tokens in documents:
            if document != expected or place.skip >= len(tokens):
                raise PlanError(
                    f"record {expected.record} of {file} is not what it was when the state was saved",
                    file=file,
                    row=expected.record,
                    remedy="the file as it was then, or start the run anew",
                )
            yield document, tokens
            break
        yield from documents
