"""Baking of one unit of work: its documents, tokenised, as one Arrow file.

A pure function of (job, unit): the same in every process. The file is named after its inputs, so that a later bake
finds the work of an interrupted one.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchwright.baking.documents import Documents, TokenSpool, borders_of
from batchwright.baking.unit_rows import RowAt, RowJob, UnitReport, pass_over, prepared_rows, unchanged_while_read
from batchwright.base.errors import BatchwrightError, SourceError, TokenizerError
from batchwright.base.fingerprint import fingerprint_file
from batchwright.columns.arrow import arrow_to_numpy, lists_to_arrow, numpy_to_arrow, records_of, records_to_arrow
from batchwright.order.permute import permutation
from batchwright.prepare.chat.formats import Layout, detect
from batchwright.prepare.chat.messages import ChatError
from batchwright.prepare.chat.spans import SPAN_DTYPE
from batchwright.prepare.chat.step import Chat, Prepared
from batchwright.prepare.rows import side_of
from batchwright.prepare.tokenize import Tokenize
from batchwright.sources.formats import Malformed
from batchwright.sources.units import Unit, place
from batchwright.store.texts import TextHashes, hash_texts
from batchwright.store.writer import MAX_SHARD_TOKENS, write_arrow

if TYPE_CHECKING:
    from batchwright.baking.reuse import TokenCache

__all__ = ["DocumentJob", "UnitReport", "encode_located", "texts_of"]

Locate = Callable[[int], RowAt]
"""The place of a document, by its number among those that are encoded together."""

SPLITS = ("train", "val")
_BATCH_CHARACTERS = 1 << 22
"""The number of characters tokenised at once. Large, because threads wait for each other at its end."""
UNIT_FORMAT = 2
"""Part of every unit's name, so that units of an earlier release with other columns are not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentJob(RowJob):
    """The description of the work on one ingredient's documents for a store."""

    tokenize: Tokenize | Chat
    holdout: float
    shuffle: bool
    fingerprint: str
    """The fingerprint of everything that decides the output."""


def bake_unit(
    job: DocumentJob, unit: Unit, key: str, selected: Any, path: Path, *, cache: TokenCache
) -> tuple[UnitReport, int]:
    """Write the unit's documents to `path`. Returns its report, and the number of texts that had to be encoded."""
    report = UnitReport(key=key, span_hashes=[_hash_of(span.path, span.start, span.stop) for span in unit.spans])
    documents = _UnitDocuments(job, unit, path.parent, cache)
    with unchanged_while_read(unit):
        for at, document in _documents_of(job, unit, report, selected):
            documents.add(at, document)
        documents.encode_waiting()
    report.finish(len(documents.tokens))
    report.tokens = int(documents.tokens.lengths().sum())
    documents.write(path, report)
    return report, documents.num_encoded


class _UnitDocuments:
    """The documents of a unit, tokenised a batch at a time."""

    def __init__(self, job: DocumentJob, unit: Unit, folder: Path, cache: TokenCache) -> None:
        self.job, self.unit, self.cache = job, unit, cache
        self.tokens = TokenSpool(folder, job.tokenize.dtype)
        self.spans, self.rows, self.sides = array("i"), array("q"), array("b")
        self.hashes: list[TextHashes] = []
        self.marks: list[NDArray[Any]] = []
        """The spans of conversations."""
        self.num_encoded = 0
        self._waiting: list[Any] = []
        self._texts: list[str] = []
        self._characters = 0

    def add(self, at: RowAt, document: str | Prepared) -> None:
        text = document.text if isinstance(document, Prepared) else document
        _, span, number = at
        self.spans.append(span)
        self.rows.append(number)
        self.sides.append(SPLITS.index(side_of(text, self.job.holdout)) if self.job.holdout else 0)
        self._waiting.append(document)
        self._texts.append(text)
        self._characters += len(text)
        if self._characters >= _BATCH_CHARACTERS:
            self.encode_waiting()

    def encode_waiting(self) -> None:
        self.hashes.append(hash_texts(self._texts))
        if isinstance(self.job.tokenize, Chat):
            conversations = encode_located(self.job, self._waiting, self._place)
            self.num_encoded += len(conversations)
            self.marks += [conversation.spans for conversation in conversations]
            self.tokens.extend([conversation.tokens for conversation in conversations])
        else:
            self.tokens.extend(self._encode_texts(self.job.tokenize))
        self._waiting, self._texts, self._characters = [], [], 0

    def _encode_texts(self, tokenize: Tokenize) -> list[NDArray[Any]]:
        found = self.cache.find(tokenize, self._texts, self.hashes[-1])
        new = [number for number, tokens in enumerate(found) if tokens is None]
        self.num_encoded += len(new)
        if new:  # an encoder that is not needed is not even made
            texts = [self._texts[number] for number in new]
            encoded = encode_located(self.job, texts, lambda number: self._place(new[number]))
            for number, tokens in zip(new, encoded, strict=True):
                if len(tokens) > MAX_SHARD_TOKENS:
                    what = f"a document of {len(tokens):,} tokens: a shard holds at most {MAX_SHARD_TOKENS:,}"
                    remedy = "cut the document into several, in a step before tokenize"
                    raise TokenizerError(what, **self.job.place(self._place(number)), remedy=remedy)
                found[number] = tokens
        return found  # type: ignore[return-value]  # none is missing now

    def _place(self, number: int) -> RowAt:
        """The place of a document of this batch."""
        number += len(self.tokens)
        return self.unit, self.spans[number], self.rows[number]

    def write(self, path: Path, report: UnitReport) -> None:
        job, count = self.job, len(self.tokens)
        order = np.arange(count)
        if job.shuffle and count:
            # The key does not name the unit, so that its documents keep their order when units come or go before it.
            order = permutation(count, job.seed, job.ingredient, 0).at(order)
        hashes = np.concatenate(self.hashes)
        tokens, borders = self.tokens.in_order(order.tolist()), borders_of(self.tokens.lengths()[order])
        columns = {
            "tokens": lists_to_arrow(borders, tokens),
            "span": numpy_to_arrow(np.array(self.spans, np.int32)[order]),
            "row": numpy_to_arrow(np.array(self.rows, np.int64)[order]),
            "split": numpy_to_arrow(np.array(self.sides, np.int8)[order]),
            "text_high": numpy_to_arrow(hashes[order, 0]),
            "text_low": numpy_to_arrow(hashes[order, 1]),
        }
        if isinstance(job.tokenize, Chat):
            marks = [self.marks[number] for number in order.tolist()]
            starts = borders_of(list(map(len, marks)))
            columns["spans"] = records_to_arrow(starts, np.concatenate([np.empty(0, SPAN_DTYPE), *marks]))
        batch = pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))
        write_arrow(path, batch.replace_schema_metadata({"report": msgspec.json.encode(report)}))


def _hash_of(path: str, start: int, stop: int | None) -> str:
    try:
        return fingerprint_file(Path(path), start, stop)
    except OSError:  # reading its rows raises the error
        return ""


# Rows as documents


def _documents_of(
    job: DocumentJob, unit: Unit, report: UnitReport, selected: Any = None
) -> Iterator[tuple[RowAt, str | Prepared]]:
    """(place, text or conversation) of every document of a unit."""
    for at, row in prepared_rows(job, unit, report, selected):
        document = kept_document(job, at, row, report)
        if document is not None:
            yield at, document


def kept_document(job: DocumentJob, at: RowAt, row: dict[str, Any], report: UnitReport) -> str | Prepared | None:
    """The text or conversation of a row; None, and a count in the report, if there is none."""
    document = document_of(job, at, row)
    if isinstance(document, Malformed):
        pass_over(job, at, document, report)
        return None
    if not document:
        report.drop("empty text")
        return None
    if isinstance(job.tokenize, Tokenize) and isinstance(document, str):
        report.count_special(job.tokenize.special_in(document))
    return document


def texts_of(job: DocumentJob, unit: Unit, report: UnitReport, selected: Any = None) -> Iterator[tuple[RowAt, str]]:
    """(place, text) of every document of a unit of texts."""
    for at, text in _documents_of(job, unit, report, selected):
        assert isinstance(text, str)
        yield at, text


def document_of(job: DocumentJob, at: RowAt, row: dict[str, Any]) -> str | Prepared | Malformed:
    """The text to tokenise in a row that went through the steps; or the conversation."""
    if isinstance(job.tokenize, Chat):
        return _conversation_of(job, job.tokenize, at, row)
    text = row.get(job.tokenize.text)
    if isinstance(text, str):
        return text
    what = f"no text to tokenise in column {job.tokenize.text!r}: the row has {', '.join(map(repr, row))}"
    remedy = "let the last step return a row with that column, or tokenize(..., text='column')"
    raise SourceError(what, **job.place(at), remedy=remedy)


def _conversation_of(job: DocumentJob, chat: Chat, at: RowAt, row: dict[str, Any]) -> Prepared | Malformed:
    try:
        return chat.prepare(row)
    except ChatError as error:
        return _fault_of(error)
    except RecursionError:
        return Malformed("nested too deeply", "lists or objects inside each other")
    except BatchwrightError as error:  # of the template, but this row may be the reason
        error.where |= job.place(at)
        raise


def _fault_of(error: ChatError) -> Malformed:
    return Malformed(error.kind, error.reason, remedy=error.remedy, turn=error.turn)


def detect_layout(job: DocumentJob, units: Sequence[Unit]) -> Layout:
    """The layout of an ingredient's conversations: that of its first row that can be read, after all steps."""
    report = UnitReport()
    for unit in units:
        for at, row in prepared_rows(job, unit, report):
            try:
                return detect(row)
            except ChatError as error:
                fault = _fault_of(error)
            pass_over(job, at, fault, report)
    what = f"{job.ingredient!r} has no row that can be read, so nothing says how its conversations are written"
    raise SourceError(what, ingredient=job.ingredient, remedy="look at the file, or at where= and the steps")


def find_characters(job: DocumentJob, unit: Unit, selected: Any) -> set[str]:
    """The characters of a unit's documents, for a vocabulary of characters."""
    characters: set[str] = set()
    for _, text in texts_of(job, unit, UnitReport(), selected):
        characters.update(text)
    return characters


def encode_located(job: DocumentJob, documents: list[Any], locate: Locate) -> list[Any]:
    """The tokens of some texts, or conversations. An error names the row, found by `locate`."""
    try:
        return list(job.tokenize.encode(documents))
    except TokenizerError as error:
        number = int(error.where.pop("number", 0))  # type: ignore[call-overload]
        error.where |= place(*locate(number), job.formats)
        raise


# Units that are done


@dataclass(frozen=True, slots=True)
class UnitFile:
    """A file that `bake_unit` wrote. It gives what `ReusedUnit` gives for a unit of an older version."""

    path: Path
    report: UnitReport

    @classmethod
    def find(cls, path: Path, key: str) -> UnitFile | None:
        """The file at `path`; None if it is missing, damaged or of another unit."""
        try:
            with pa.memory_map(str(path)) as file:
                metadata = pa.ipc.open_file(file).schema.metadata
            report = msgspec.json.decode(metadata[b"report"], type=UnitReport)
        except (OSError, pa.ArrowException, KeyError, TypeError, msgspec.DecodeError):
            return None
        if report.key != key:
            return None
        return cls(path, report)

    def documents(self, side: int) -> Documents:
        """The documents of one split. Their `file` and `row` are the span, and the number in it."""
        with pa.memory_map(str(self.path)) as file:
            batch = pa.ipc.open_file(file).get_batch(0)
        names = ("span", "row", "split", "text_high", "text_low")
        span, row, split, *text = (arrow_to_numpy(batch.column(name)) for name in names)
        lists = batch.column("tokens")
        tokens, lengths = arrow_to_numpy(lists.values), np.diff(arrow_to_numpy(lists.offsets))
        every = Documents(tokens, lengths, span, row, np.stack(text, axis=1))
        if "spans" in batch.schema.names:
            every = every.marked(*records_of(batch.column("spans")))
        return every.only(split == side)
