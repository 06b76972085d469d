"""Rows straight from raw files: documents tokenised as they are read, windows over them, from any place on.

Rows are the ones that a store baked with `shuffle=False` has. Where a row lies is only known once everything before it
was read: a `Place` says it, as file, record and tokens to skip, and from there on reading goes on.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import index
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from batchwright.baking.unit import DocumentJob, UnitReport, encode_located, texts_of
from batchwright.baking.work import Work
from batchwright.base.errors import PlanError
from batchwright.base.seeds import key_of
from batchwright.base.words import suggest
from batchwright.batches.feed import Place, Taken, WindowFeed
from batchwright.order.permute import permutation
from batchwright.order.plan import Plan
from batchwright.sources.units import Unit

__all__ = ["Chunk", "Document", "RawDocuments", "RawPlan", "RawRows", "first_rows"]

_FIRST_TEXT = 1 << 14
"""Characters tokenised at first: the first batch should not wait for more than it needs. Doubled up to _MOST_TEXT."""
_MOST_TEXT = 1 << 20


@dataclass(frozen=True, kw_only=True)
class RawPlan(Plan):
    """What fixes the rows of a stream over raw files: names and sizes of the files, tokenizer, steps, shuffle."""

    shuffle_rows: int = 0
    """Rows of a window of the shuffle; 0: no shuffle."""
    known_rows: int | None = field(default=None, compare=False)
    """Rows of an epoch, once one pass has counted them. Not part of what the plan is."""

    @property
    def epoch_rows(self) -> int | None:
        return self.known_rows

    def __repr__(self) -> str:
        window = f"in windows of {self.shuffle_rows:,} rows" if self.shuffle_rows else "none"
        rows = "not counted yet" if self.known_rows is None else f"{self.known_rows:,} an epoch"
        return f"Plan {self.fingerprint}: rows of {self.row_tokens} tokens from raw files, {rows}, shuffle {window}"


class Document(NamedTuple):
    """One document of raw files: enough to begin reading at it again."""

    part: int
    first_record: int
    """Number, in its file, of the part's first record."""
    record: int
    """Number in its file."""
    check: str
    """Hash of its tokens: tells that a file was changed under a saved state."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A file, or a range of one."""

    file: str
    start: int
    unit: Unit


class RawDocuments:
    """The documents of raw files, tokenised, in order, from any of them on."""

    def __init__(self, work: Work) -> None:
        self.job: DocumentJob = work.job
        self.parts: list[_Part] = [
            _Part(work.file_of(span).name, span.start, Unit((span,), unit.num_bytes))
            for unit in work.units
            for span in unit.spans
        ] or [_Part("<memory>", unit.first_row, unit) for unit in work.units]

    def read(self, begin: Document | None = None) -> Iterator[tuple[Document, NDArray[Any]]]:
        """Documents from one on. What comes before it in its file (or range of it) is read again, not tokenised."""
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
            goes_on = part + 1 < len(self.parts) and self.parts[part + 1].file == self.parts[part].file
            part, first, wanted = part + 1, first + report.span_rows[0] if goes_on else 0, 0
        yield from self._encoded(waiting, texts)

    def _encoded(
        self, waiting: list[tuple[int, int, int]], texts: list[str]
    ) -> Iterator[tuple[Document, NDArray[Any]]]:
        def locate(number: int) -> tuple[Unit, int, int]:
            part, first, record = waiting[number]
            return self.parts[part].unit, 0, record - first

        for at, tokens in zip(waiting, encode_located(self.job, texts, locate), strict=True):
            yield Document(*at, xxhash.xxh3_64_hexdigest(tokens.data)), tokens

    def describe(self, place: Place[Document] | None) -> dict[str, Any] | None:
        """A place in JSON, for a state."""
        if place is None:
            return None
        part, first, record, check = place.document
        named = self.parts[part]
        return {
            "file": named.file,
            "record": record,
            "skip": place.skip,
            "start": named.start,
            "first_record": first,
            "check": check,
        }

    def find(self, described: Any) -> Place[Document] | None:
        """The place that a state describes."""
        if described is None:
            return None
        try:
            file, start = described["file"], described["start"]
            numbers = [index(described[name]) for name in ("first_record", "record", "skip")]
            check = str(described["check"])
            if min(numbers) < 0:
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise PlanError(
                "this is not the state of a loader that streams raw files",
                got=repr(described)[:80],
                remedy="what state_dict() returned",
            ) from None
        for part, named in enumerate(self.parts):
            if (named.file, named.start) == (file, start):
                return Place(Document(part, numbers[0], numbers[1], check), numbers[2])
        near = suggest(str(file), [named.file for named in self.parts])
        raise PlanError(
            f"this state lies in {file}, which is not among the files of this loader",
            file=file,
            remedy=f"perhaps it was renamed: there is {near}" if near else "the files that the run was started with",
        )


# Rows of an epoch


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows in the order of the stream, and for each the place at which reading must begin to make it again."""

    tokens: NDArray[Any]
    borders: list[NDArray[np.int64]]
    origins: list[Place[Document]]
    begin: list[Place[Document]]
    """One more than there are rows."""

    def __len__(self) -> int:
        return len(self.tokens)

    def part(self, first: int, last: int) -> Chunk:
        cut = slice(first, last)
        return Chunk(self.tokens[cut], self.borders[cut], self.origins[cut], self.begin[first : last + 1])


class RawRows:
    """The rows of an epoch over raw files, from any row on whose place is known."""

    def __init__(self, documents: RawDocuments, plan: RawPlan) -> None:
        self.documents, self.plan = documents, plan

    def chunks(self, epoch: int, row: int, place: Place[Document] | None, step_rows: int) -> Iterator[Chunk]:
        """Rows from `row` of an epoch on. `place` is where `begins_at(row)` begins; None is known for row 0 alone."""
        plan, rows_left = self.plan, self.plan.known_rows
        at = self.begins_at(row) if place is not None else 0
        feed = WindowFeed(
            self._documents(epoch, place), plan.row_tokens, self._offset(epoch) if place is None else place.skip
        )
        rows_at_once = plan.shuffle_rows or step_rows
        while rows_left is None or at < rows_left:
            wanted = rows_at_once if rows_left is None else min(rows_at_once, rows_left - at)
            chunk = self._shuffled(feed.take(wanted), epoch, at)
            if at + len(chunk) > row:
                yield chunk.part(max(row - at, 0), len(chunk))
            at += len(chunk)
            if len(chunk) < wanted:
                if at < row and place is None:
                    raise PlanError(f"row {row:,} is outside of the files", remedy=f"a position from 0 to {at:,}")
                return

    def begins_at(self, row: int) -> int:
        """The row at which reading must begin to make a row: its window of the shuffle has to be whole."""
        return row - row % (self.plan.shuffle_rows or 1)

    def _shuffled(self, taken: Taken[Document], epoch: int, at: int) -> Chunk:
        rows = len(taken)
        if not self.plan.shuffle_rows or not rows:
            return Chunk(taken.tokens, taken.borders, taken.places[:rows], taken.places)
        order = permutation(rows, self.plan.seed, self.plan.sources[0].name, epoch, "window", at).at(range(rows))
        begin = [taken.places[0]] * rows + [taken.places[rows]]
        picked = order.tolist()
        return Chunk(taken.tokens[order], [taken.borders[i] for i in picked], [taken.places[i] for i in picked], begin)

    def _offset(self, epoch: int) -> int:
        """Where the first row of an epoch begins: as in a store, later epochs cut at other places."""
        plan = self.plan
        return key_of("recut", plan.seed, plan.sources[0].name, epoch) % plan.row_tokens if plan.recut and epoch else 0

    def _documents(self, epoch: int, place: Place[Document] | None) -> Iterator[tuple[Document, NDArray[Any]]]:
        documents = self.documents.read(None if place is None else place.document)
        if place is not None:
            documents = self._checked(documents, place)
        # The cut of a later epoch makes a ring of the stream: its last row runs over the end into the beginning.
        return itertools.chain(documents, self.documents.read()) if self._offset(epoch) else documents

    def _checked(
        self, documents: Iterator[tuple[Document, NDArray[Any]]], place: Place[Document]
    ) -> Iterator[tuple[Document, NDArray[Any]]]:
        """The documents, if the first is the one that a place lies in."""
        expected, file = place.document, self.documents.parts[place.document.part].file
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


def first_rows(chunks: list[Chunk], rows: int) -> tuple[Chunk, list[Chunk]]:
    """The first `rows` rows of some chunks, and the chunks that are left."""
    taken: list[Chunk] = []
    while rows:
        chunk, *chunks = chunks
        taken.append(chunk.part(0, min(rows, len(chunk))))
        if len(chunk) > rows:
            chunks = [chunk.part(rows, len(chunk)), *chunks]
        rows -= len(taken[-1])
    if len(taken) == 1:
        return taken[0], chunks
    join = itertools.chain.from_iterable
    together = Chunk(
        np.concatenate([part.tokens for part in taken]),
        list(join(part.borders for part in taken)),
        list(join(part.origins for part in taken)),
        [*join(part.begin[:-1] for part in taken), taken[-1].begin[-1]],
    )
    return together, chunks
