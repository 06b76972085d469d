"""Bake one unit of work: read its rows, keep or drop each with a reason, tokenise, and write one Arrow file.

A pure function of (job, unit): it runs the same in this process or in any other, and its output file is named by what
went in, so that work which an earlier, interrupted bake finished is found again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchwright.baking.held import HeldTokens
from batchwright.baking.rows import (
    Dropped,
    Reading,
    UnitReport,
    kept_rows,
    pass_over,
    passing_rows,
    stepped,
    unchanged_while_read,
)
from batchwright.base.errors import BatchwrightError, SourceError, TokenizerError
from batchwright.base.fingerprint import fingerprint, fingerprint_file
from batchwright.columns.arrays import arrow_to_numpy, numpy_to_arrow, records_of, records_to_arrow
from batchwright.order.permute import permutation
from batchwright.prepare.chat.faults import ChatError
from batchwright.prepare.chat.formats import Layout, detect
from batchwright.prepare.chat.spans import SPAN_DTYPE
from batchwright.prepare.chat.step import Chat, Prepared
from batchwright.prepare.holdout import side_of
from batchwright.prepare.tokenize import Tokenize
from batchwright.sources.faults import error_of, place
from batchwright.sources.units import Malformed, Unit
from batchwright.store.texts import TextHashes, hash_texts
from batchwright.store.writer import MAX_SHARD_TOKENS, write_arrow

if TYPE_CHECKING:
    from batchwright.baking.known import KnownTokens

__all__ = [
    "NO_MARKS",
    "SPLITS",
    "Documents",
    "Job",
    "UnitReport",
    "bake_unit",
    "detect_layout",
    "document_of",
    "documents_of",
    "encode_located",
    "find_characters",
    "marks_of",
    "read_unit_report",
    "texts_of",
    "unit_documents",
    "unit_key",
]

T = TypeVar("T")
D = TypeVar("D")
Locate = Callable[[int], tuple[Unit, int, int]]
"""(unit, span, row in span) of a document, by its number among those that are encoded together."""

SPLITS = ("train", "val")
_BATCH_CHARACTERS = 1 << 22
"""Tokenised at once: threads wait for each other at its end, so not too few."""
_UNIT_FORMAT = 2
"""Part of every unit's name: units of an earlier release, which wrote other columns, are not taken for ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(Reading):
    """What is the same for all units of one ingredient of a store."""

    tokenize: Tokenize | Chat
    holdout: float
    shuffle: bool
    fingerprint: str
    """Of everything that decides the output."""


def unit_key(job: Job, unit: Unit, identity: Any) -> str:
    """Names a unit's output by what goes in, and by nothing else: not by where the unit stands among others."""
    spans = [[s.start, s.stop] for s in unit.spans]
    return fingerprint([_UNIT_FORMAT, job.fingerprint, spans, unit.first_row, identity])


def bake_unit(
    job: Job, unit: Unit, key: str, selected: Any, path: Path, *, known: KnownTokens
) -> tuple[UnitReport, int]:
    """Write the unit's documents to `path`. Says what became of its rows, and how many texts had to be encoded."""
    report = UnitReport(key=key, span_hashes=[_hash_of(span.path, span.start, span.stop) for span in unit.spans])
    dropped: Counter[str] = Counter()
    tokens = HeldTokens(path.parent, job.tokenize.dtype)
    spans: list[int] = []
    rows: list[int] = []
    splits: list[int] = []
    texts: list[str] = []
    prepared: list[Prepared] = []
    marks: list[NDArray[Any]] = []
    """Of conversations: what their tokens are."""
    hashes: list[TextHashes] = []
    waiting = num_encoded = 0

    def flush() -> None:
        nonlocal waiting, num_encoded
        hashes.append(hash_texts(texts))
        if isinstance(job.tokenize, Chat):
            first = len(tokens)
            conversations = _located(
                job, job.tokenize.encode, prepared, lambda n: (unit, spans[first + n], rows[first + n])
            )
            tokens.extend([one.tokens for one in conversations])
            marks.extend(one.spans for one in conversations)
            num_encoded += len(prepared)
        else:
            found = known.find(job.tokenize, texts, hashes[-1])
            new = [number for number, document in enumerate(found) if document is None]
            at = [len(tokens) + number for number in new]
            encoded = iter(  # an encoder that is not needed is not even made
                encode_located(job, [texts[n] for n in new], lambda n: (unit, spans[at[n]], rows[at[n]])) if new else []
            )
            tokens.extend([next(encoded) if document is None else document for document in found])
            num_encoded += len(new)
        texts.clear()
        prepared.clear()
        waiting = 0

    with unchanged_while_read(unit):
        for span, row_number, document in documents_of(job, unit, report, dropped, selected):
            if isinstance(document, Prepared):
                prepared.append(document)
            text = document if isinstance(document, str) else document.text
            texts.append(text)
            spans.append(span)
            rows.append(row_number)
            splits.append(SPLITS.index(side_of(text, job.holdout)) if job.holdout else 0)
            waiting += len(text)
            if waiting >= _BATCH_CHARACTERS:
                flush()
        flush()
    report.dropped, report.documents = dict(sorted(dropped.items())), len(tokens)
    report.tokens = int(tokens.lengths().sum())
    _write(job, path, report, tokens, spans, rows, splits, np.concatenate(hashes), marks)
    return report, num_encoded


def texts_of(job: Job, unit: Unit, report: UnitReport, dropped: Counter[str]) -> Iterator[tuple[int, int, str]]:
    """(span, row in span, text) of every document of a unit of texts."""
    for span, row_number, text in documents_of(job, unit, report, dropped):
        assert isinstance(text, str)
        yield span, row_number, text


def documents_of(
    job: Job, unit: Unit, report: UnitReport, dropped: Counter[str], selected: Any = None
) -> Iterator[tuple[int, int, str | Prepared]]:
    """(span, row in span, text or conversation) of every document: what is left of a unit's rows after all steps."""
    for span, row_number, row in kept_rows(job, unit, report, dropped, selected):
        after = stepped(job, unit, span, row_number, row)
        if isinstance(after, Dropped):
            dropped[f"dropped by step {after.step!r}"] += 1
            continue
        text = document_of(job, unit, span, row_number, after)
        if isinstance(text, Malformed):
            pass_over(job, unit, span, row_number, text, report, dropped)
        elif not text:
            dropped["empty text"] += 1
        else:
            if isinstance(job.tokenize, Tokenize) and isinstance(text, str):
                report.count_special(job.tokenize.special_in(text))
            yield span, row_number, text


def encode_located(job: Job, texts: list[str], locate: Locate) -> list[NDArray[Any]]:
    """The tokens of some texts. An error says of which row: `locate` gives (unit, span, row in span) of a text."""
    assert isinstance(job.tokenize, Tokenize)
    tokenize = job.tokenize

    def encode(texts: list[str]) -> list[NDArray[Any]]:
        encoded = tokenize.encode(texts)
        for number, document in enumerate(encoded):
            if len(document) > MAX_SHARD_TOKENS:
                raise TokenizerError(
                    f"a document of {len(document):,} tokens: a shard holds at most {MAX_SHARD_TOKENS:,}",
                    number=number,
                    remedy="cut the document into several, in a step before tokenize",
                )
        return encoded

    return _located(job, encode, texts, locate)


def _located(job: Job, encode: Callable[[list[T]], list[D]], documents: list[T], locate: Locate) -> list[D]:
    """What `encode` gives; a TokenizerError of one document says where its row is."""
    try:
        return encode(documents)
    except TokenizerError as error:
        number = int(error.where.pop("number", 0))  # type: ignore[call-overload]
        error.where |= place(*locate(number), job.formats)
        raise


def detect_layout(job: Job, units: Sequence[Unit]) -> Layout:
    """How the conversations of an ingredient are written: as its first row that can be read has it, after all steps."""
    for unit in units:
        for span, row_number, row in passing_rows(job, unit, UnitReport(), Counter()):
            after = stepped(job, unit, span, row_number, row)
            if isinstance(after, Dropped):
                continue
            try:
                return detect(after)
            except ChatError as error:
                if job.on_error == "skip":
                    continue  # it will be counted
                fault = Malformed(error.kind, error.reason, remedy=error.remedy, turn=error.turn)
                raise error_of(fault, unit, span, row_number, job.formats) from None
    raise SourceError(
        f"{job.ingredient!r} has no row that can be read, so nothing says how its conversations are written",
        ingredient=job.ingredient,
        remedy="look at the file, or at where= and the steps",
    )


def find_characters(job: Job, unit: Unit, selected: Any) -> list[int]:
    """The characters of a unit's documents, as code points: what a vocabulary of characters is made of."""
    characters: set[str] = set()
    for span, row_number, row in kept_rows(job, unit, UnitReport(), Counter(), selected):
        after = stepped(job, unit, span, row_number, row)
        text = None if isinstance(after, Dropped) else document_of(job, unit, span, row_number, after)
        if isinstance(text, str):
            characters.update(text)
    return sorted(map(ord, characters))


def _hash_of(path: str, start: int, stop: int | None) -> str:
    try:
        return fingerprint_file(Path(path), start, stop)
    except OSError:  # reading its rows will say so
        return ""


def document_of(job: Job, unit: Unit, span: int, row_number: int, after: dict[str, Any]) -> str | Prepared | Malformed:
    """What is tokenised of a row that went through the steps: its text, or the conversation that it is."""
    if isinstance(job.tokenize, Chat):
        try:
            return job.tokenize.prepare(after)
        except ChatError as error:
            return Malformed(error.kind, error.reason, remedy=error.remedy, turn=error.turn)
        except RecursionError:
            return Malformed("nested too deeply", "lists or objects inside each other")
        except BatchwrightError as error:  # of the template, but this row may be what it does not end with
            error.where |= place(unit, span, row_number, job.formats)
            raise
    text = after.get(job.tokenize.text)
    if not isinstance(text, str):
        there = ", ".join(map(repr, after))
        raise SourceError(
            f"no text to tokenise in column {job.tokenize.text!r}: the row has {there}",
            **place(unit, span, row_number, job.formats),
            remedy="let the last step return a row with that column, or tokenize(..., text='column')",
        )
    return text


def _write(
    job: Job,
    path: Path,
    report: UnitReport,
    tokens: HeldTokens,
    spans: list[int],
    rows: list[int],
    splits: list[int],
    hashes: TextHashes,
    marks: list[NDArray[Any]],
) -> None:
    count = len(tokens)
    # The key names no unit: the order of a unit's documents then stays when units come or go before it.
    shuffled = job.shuffle and count
    order = (
        permutation(count, job.seed, job.ingredient, 0).at(range(count)).tolist() if shuffled else list(range(count))
    )
    lengths = tokens.lengths()[order]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    values = tokens.in_order(order)
    columns = {
        "tokens": pa.LargeListArray.from_arrays(numpy_to_arrow(offsets), numpy_to_arrow(values)),
        "span": numpy_to_arrow(np.array(spans, np.int32)[order] if count else np.empty(0, np.int32)),
        "row": numpy_to_arrow(np.array(rows, np.int64)[order] if count else np.empty(0, np.int64)),
        "split": numpy_to_arrow(np.array(splits, np.int8)[order] if count else np.empty(0, np.int8)),
        "text_high": numpy_to_arrow(hashes[order, 0]),
        "text_low": numpy_to_arrow(hashes[order, 1]),
    }
    if isinstance(job.tokenize, Chat):
        ordered = [marks[number] for number in order]
        starts = np.concatenate([[0], np.cumsum([len(each) for each in ordered])]).astype(np.int64)
        columns["spans"] = records_to_arrow(starts, np.concatenate([np.empty(0, SPAN_DTYPE), *ordered]))
    batch = pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))
    batch = batch.replace_schema_metadata({"report": msgspec.json.encode(report)})
    write_arrow(path, batch)


class Documents(NamedTuple):
    """Some documents of a unit."""

    tokens: NDArray[Any]
    """End to end."""
    lengths: NDArray[np.int64]
    span: NDArray[np.integer]
    row: NDArray[np.int64]
    """In the span."""
    text: TextHashes
    num_marks: NDArray[np.int64]
    """Of each document, where these are conversations; otherwise empty."""
    marks: NDArray[Any]
    """What the tokens are: of SPAN_DTYPE, end to end."""


NO_MARKS = np.empty(0, np.int64), np.empty(0, SPAN_DTYPE)


def unit_documents(path: Path, split: int) -> Documents:
    """The documents of a finished unit that are on one side of the holdout."""
    with pa.memory_map(str(path)) as file:
        batch = pa.ipc.open_file(file).get_batch(0)
    lists = batch.column("tokens")
    tokens, lengths = arrow_to_numpy(lists.values), np.diff(arrow_to_numpy(lists.offsets))
    span, row = arrow_to_numpy(batch.column("span")), arrow_to_numpy(batch.column("row"))
    text = np.stack([arrow_to_numpy(batch.column("text_high")), arrow_to_numpy(batch.column("text_low"))], axis=1)
    num_marks, marks = NO_MARKS
    if "spans" in batch.schema.names:
        starts, fields = records_of(batch.column("spans"))
        num_marks, marks = np.diff(starts), marks_of(fields)
    mine = arrow_to_numpy(batch.column("split")) == split
    if mine.all():
        return Documents(tokens, lengths, span, row, text, num_marks, marks)
    if len(num_marks):
        num_marks, marks = num_marks[mine], marks[np.repeat(mine, num_marks)]
    return Documents(
        tokens[np.repeat(mine, lengths)], lengths[mine], span[mine], row[mine], text[mine], num_marks, marks
    )


def marks_of(fields: dict[str, NDArray[Any]]) -> NDArray[Any]:
    """Spans as records, from their columns."""
    marks = np.empty(len(fields["stop"]), SPAN_DTYPE)
    for name in SPAN_DTYPE.names or ():
        marks[name] = fields[name]
    return marks


def read_unit_report(path: Path) -> UnitReport | None:
    """What a finished unit's file says; None where it is not there or not whole."""
    try:
        with pa.memory_map(str(path)) as file:
            metadata = pa.ipc.open_file(file).schema.metadata
        return msgspec.json.decode(metadata[b"report"], type=UnitReport)
    except (OSError, pa.ArrowException, KeyError, TypeError, msgspec.DecodeError):
        return None
