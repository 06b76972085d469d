"""Bake one unit of work: read its rows, keep or drop each with a reason, tokenise, and write one Arrow file.

A pure function of (job, unit): it runs the same in this process or in any other, and its output file is named by what
went in, so that work which an earlier, interrupted bake finished is found again.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.errors import PenstockError, SourceError, TokenizerError, WorkerError
from penstock.fingerprint import fingerprint, fingerprint_file
from penstock.order.permute import permutation
from penstock.prepare.holdout import side_of
from penstock.prepare.rows import RowStep
from penstock.prepare.tokenize import Tokenize
from penstock.sources.formats import Format
from penstock.sources.units import EndOfSpan, Malformed, Unit, read_unit
from penstock.spec import suggest
from penstock.store.writer import MAX_SHARD_TOKENS, write_arrow

__all__ = [
    "SPLITS",
    "Documents",
    "Job",
    "UnitReport",
    "bake_unit",
    "find_characters",
    "find_passing",
    "read_unit_report",
    "unit_documents",
    "unit_key",
]

SPLITS = ("train", "val")
_BATCH_CHARACTERS = 1 << 20
_EXAMPLES = 5


@dataclass(frozen=True, slots=True)
class Job:
    """What is the same for all units of one ingredient. Travels to workers by value."""

    ingredient: str
    text: str
    where: Callable[[dict[str, Any]], Any] | None
    steps: list[RowStep]
    tokenize: Tokenize
    holdout: float
    seed: int
    shuffle: bool
    on_error: str
    formats: dict[str, Format]
    fingerprint: str
    """Of everything above that decides the output."""


@dataclass(slots=True)
class UnitReport:
    """What became of a unit's rows."""

    key: str = ""
    rows_read: int = 0
    documents: int = 0
    tokens: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    examples: list[tuple[str, int, str]] = field(default_factory=list)
    """A few of the dropped: (file, row in span, reason)."""
    errors: int = 0
    """How many of the dropped were malformed, and passed over because on_error='skip'."""
    span_rows: list[int] = field(default_factory=list)
    span_hashes: list[str] = field(default_factory=list)


def unit_key(job: Job, unit: Unit, identity: Any) -> str:
    """Names a unit's output by what goes in, and by nothing else: not by where the unit stands among others."""
    spans = [[s.start, s.stop] for s in unit.spans]
    return fingerprint([job.fingerprint, spans, unit.first_row, identity])


def bake_unit(job: Job, unit: Unit, key: str, selected: Any, path: Path) -> UnitReport:
    """Write the unit's documents to `path`, and say what became of its rows."""
    report = UnitReport(key=key, span_hashes=[_hash_of(span.path, span.start, span.stop) for span in unit.spans])
    dropped: Counter[str] = Counter()
    tokens: list[np.ndarray] = []
    spans: list[int] = []
    rows: list[int] = []
    splits: list[int] = []
    texts: list[str] = []
    waiting = 0

    def flush() -> None:
        nonlocal waiting
        try:
            encoded = job.tokenize.encode(texts)
            for number_in_batch, document in enumerate(encoded):
                if len(document) > MAX_SHARD_TOKENS:
                    raise TokenizerError(
                        f"a document of {len(document):,} tokens: a shard holds at most {MAX_SHARD_TOKENS:,}",
                        number=number_in_batch,
                        remedy="cut the document into several, in a step before tokenize",
                    )
        except TokenizerError as error:
            at = len(tokens) + int(error.where.pop("number", 0))  # type: ignore[call-overload]
            error.where |= _place(job, unit, spans[at], rows[at])
            raise
        tokens.extend(encoded)
        texts.clear()
        waiting = 0

    for span, row_number, row in _selected(_rows(job, unit, report, dropped), selected, dropped):
        text = _prepared(job, unit, span, row_number, row)
        if isinstance(text, _Dropped):
            dropped[f"dropped by step {text.step!r}"] += 1
            continue
        if not text:
            dropped["empty text"] += 1
            continue
        texts.append(text)
        spans.append(span)
        rows.append(row_number)
        splits.append(SPLITS.index(side_of(text, job.holdout)) if job.holdout else 0)
        waiting += len(text)
        if waiting >= _BATCH_CHARACTERS:
            flush()
    flush()
    report.dropped, report.documents = dict(sorted(dropped.items())), len(tokens)
    report.tokens = sum(map(len, tokens))
    _write(job, path, report, tokens, spans, rows, splits)
    return report


def find_passing(job: Job, unit: Unit) -> tuple[Any, list[int]]:
    """((span, row) of every row that passes `where`, rows of each span): what a quantity chooses from."""
    report = UnitReport()
    passing = [(span, row_number) for span, row_number, _ in _rows(job, unit, report, Counter())]
    return np.array(passing, np.int64).reshape(-1, 2), report.span_rows


def find_characters(job: Job, unit: Unit, selected: Any) -> list[int]:
    """The characters of a unit's documents, as code points: what a vocabulary of characters is made of."""
    characters: set[str] = set()
    for span, row_number, row in _selected(_rows(job, unit, UnitReport(), Counter()), selected, Counter()):
        text = _prepared(job, unit, span, row_number, row)
        if isinstance(text, str):
            characters.update(text)
    return sorted(map(ord, characters))


def _hash_of(path: str, start: int, stop: int | None) -> str:
    try:
        return fingerprint_file(Path(path), start, stop)
    except OSError:  # reading its rows will say so
        return ""


def _selected(
    rows: Iterator[tuple[int, int, dict[str, Any]]], selected: Any, dropped: Counter[str]
) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """The rows whose numbers were selected, if that was done."""
    if selected is None:
        yield from rows
        return
    keep = set(selected.tolist())
    for ordinal, row in enumerate(rows):
        if ordinal in keep:
            yield row
        else:
            dropped["beyond quantity"] += 1


@dataclass(frozen=True, slots=True)
class _Dropped:
    step: str


def _rows(job: Job, unit: Unit, report: UnitReport, dropped: Counter[str]) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Rows that can be read, have text, and pass `where`. All others are counted, or raised."""
    report.span_rows = [0] * max(len(unit.spans), 1)
    for span, row_number, row in _read(job, unit):
        if isinstance(row, EndOfSpan):
            report.span_rows[span] = row_number
            continue
        report.rows_read += 1
        fault = row if isinstance(row, Malformed) else _text_fault(job, row, from_memory=unit.rows is not None)
        if fault is not None:
            if job.on_error == "raise":
                raise _malformed(job, unit, span, row_number, fault)
            dropped[fault.kind] += 1
            report.errors += 1
            if len(report.examples) < _EXAMPLES:
                file = unit.spans[span].path if unit.spans else "<memory>"
                report.examples.append(
                    (file, row_number, f"{fault.kind}: {fault.reason}" if fault.reason else fault.kind)
                )
            continue
        if job.text != "text":
            row["text"] = row[job.text]
        if job.where is not None:
            try:
                passes = job.where(row)
            except Exception as error:
                raise _failed(f"where= of {job.ingredient!r}", error, job, unit, span, row_number) from error
            if not passes:
                dropped["not where"] += 1
                continue
        yield span, row_number, row


def _read(job: Job, unit: Unit) -> Iterator[tuple[int, int, Any]]:
    """What `read_unit` gives. An error in a user's format is located: it came after the last good row."""
    last_span, last_row = 0, -1
    try:
        for span, row_number, row in read_unit(unit, job.formats):
            last_span, last_row = span, row_number
            if isinstance(row, EndOfSpan):
                last_span, last_row = span + 1, -1
            yield span, row_number, row
    except PenstockError:
        raise
    except Exception as error:
        kind = unit.spans[min(last_span, len(unit.spans) - 1)].format if unit.spans else "memory"
        raise _failed(f"format {kind!r}", error, job, unit, last_span, last_row + 1) from error


def _text_fault(job: Job, row: Any, *, from_memory: bool) -> Malformed | None:
    """What is wrong with a row, if anything: it must be a dict whose text is text."""
    if not isinstance(row, dict):
        return Malformed("malformed row", f"the format gave a {type(row).__name__}, not a row")
    if job.text not in row:
        near = suggest(job.text, map(str, row))
        hint = f"; perhaps text={near!r}" if near else ""
        columns = ", ".join(map(repr, list(row)[:12])) or "no columns"
        return Malformed(f"no column {job.text!r}", f"this row has {columns}{hint}")
    if not isinstance(row[job.text], str):
        return Malformed(f"column {job.text!r} is not text", f"it is {type(row[job.text]).__name__}")
    if from_memory and not row[job.text].isascii():  # what was read from a file was decoded, so it can be encoded
        try:
            row[job.text].encode("utf-8")
        except UnicodeEncodeError as error:
            return Malformed("not UTF-8", f"half a surrogate pair at character {error.start:,}")
    return None


def _prepared(job: Job, unit: Unit, span: int, row_number: int, row: dict[str, Any]) -> str | _Dropped:
    for step in job.steps:
        try:
            after = step(row)
        except PenstockError as error:
            error.where |= _place(job, unit, span, row_number)
            raise
        except Exception as error:
            raise _failed(f"step {step.name!r}", error, job, unit, span, row_number) from error
        if after is None:
            return _Dropped(step.name)
        row = after
    text = row.get(job.tokenize.text)
    if not isinstance(text, str):
        there = ", ".join(map(repr, row))
        raise SourceError(
            f"no text to tokenise in column {job.tokenize.text!r}: the row has {there}",
            **_place(job, unit, span, row_number),
            remedy="let the last step return a row with that column, or tokenize(..., text='column')",
        )
    return text


def _write(
    job: Job,
    path: Path,
    report: UnitReport,
    tokens: list[Any],
    spans: list[int],
    rows: list[int],
    splits: list[int],
) -> None:
    count = len(tokens)
    # The key names no unit: the order of a unit's documents then stays when units come or go before it.
    order = permutation(count, job.seed, job.ingredient, 0).at(range(count)) if job.shuffle and count else range(count)
    lengths = np.array([len(tokens[i]) for i in order], np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    values = np.concatenate([tokens[i] for i in order]) if count else np.empty(0, job.tokenize.dtype)
    columns = {
        "tokens": pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values)),
        "span": pa.array(np.array(spans, np.int32)[list(order)] if count else np.empty(0, np.int32)),
        "row": pa.array(np.array(rows, np.int64)[list(order)] if count else np.empty(0, np.int64)),
        "split": pa.array(np.array(splits, np.int8)[list(order)] if count else np.empty(0, np.int8)),
    }
    batch = pa.RecordBatch.from_pydict(columns).replace_schema_metadata({"report": msgspec.json.encode(report)})
    write_arrow(path, batch)


Documents = tuple[NDArray[Any], NDArray[np.int64], NDArray[np.integer], NDArray[np.int64]]
"""(tokens end to end, length, span, row in span) of some documents."""


def unit_documents(path: Path, split: int) -> Documents:
    """The documents of a finished unit that are on one side of the holdout."""
    with pa.memory_map(str(path)) as file:
        batch = pa.ipc.open_file(file).get_batch(0)
    lists = batch.column("tokens")
    tokens, lengths = lists.values.to_numpy(), np.diff(lists.offsets.to_numpy())
    span, row = batch.column("span").to_numpy(), batch.column("row").to_numpy()
    mine = batch.column("split").to_numpy() == split
    if mine.all():
        return tokens, lengths, span, row
    return tokens[np.repeat(mine, lengths)], lengths[mine], span[mine], row[mine]


def read_unit_report(path: Path) -> UnitReport | None:
    """What a finished unit's file says; None where it is not there or not whole."""
    try:
        with pa.memory_map(str(path)) as file:
            metadata = pa.ipc.open_file(file).schema.metadata
        return msgspec.json.decode(metadata[b"report"], type=UnitReport)
    except (OSError, pa.ArrowException, KeyError, TypeError, msgspec.DecodeError):
        return None


def _place(job: Job, unit: Unit, span: int, row_number: int) -> dict[str, Any]:
    """Where a row is, in words that a person can use: file and line (from 1), or file and row (from 0)."""
    if not unit.spans:
        return {"file": "<memory>", "row": unit.first_row + row_number}
    where = unit.spans[min(span, len(unit.spans) - 1)]
    if job.formats[where.format].by_line:
        return {"file": where.path, "line": _lines_before(where.path, where.start) + row_number + 1}
    return {"file": where.path} if where.format == "text" else {"file": where.path, "row": row_number}


def _lines_before(path: str, start: int) -> int:
    """Lines that begin before a byte of a file: the number, from 0, of the first line that begins at it or after it."""
    lines, last = 0, b"\n"
    if start:
        with open(path, "rb") as file:
            while start > 0 and (piece := file.read(min(start, 1 << 20))):
                lines += piece.count(b"\n")
                start -= len(piece)
                last = piece[-1:]
    return lines + (last != b"\n")  # a line that the byte lies inside began before it


def _malformed(job: Job, unit: Unit, span: int, row_number: int, fault: Malformed) -> SourceError:
    of_file = fault.rest or fault.kind == "empty file"
    return SourceError(
        f"{fault.kind}: {fault.reason}" if fault.reason else fault.kind,
        **_place(job, unit, span, row_number),
        remedy="mend or leave out the file, or bake(..., on_error='skip') to pass over it and count it"
        if of_file
        else f"text= with the column that holds the text, or {_SKIP_ROWS}"
        if fault.kind.startswith("no column")
        else f"mend the row, or {_SKIP_ROWS}",
    )


_SKIP_ROWS = "bake(..., on_error='skip') to leave out such rows and count them"


def _failed(what: str, error: Exception, job: Job, unit: Unit, span: int, row_number: int) -> WorkerError:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return WorkerError(
        f"{what} failed: {type(error).__name__}: {error}",
        **_place(job, unit, span, row_number),
        at=f"{frame.filename}:{frame.lineno}",
        remedy="mend the function, or leave such rows out with where=",
    )
