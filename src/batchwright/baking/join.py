"""Join units, in their shuffled order, into shards; then the tables, and the manifest that names everything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from batchwright.baking.inputs import Inputs, content_hash
from batchwright.baking.reuse import Placed, units_table
from batchwright.baking.unit import SPLITS
from batchwright.baking.work import Work, first_rows
from batchwright.base.errors import SourceError, TokenizerError
from batchwright.base.files import write_whole
from batchwright.base.fingerprint import fingerprint_bytes
from batchwright.order.permute import permutation
from batchwright.prepare.chat.step import Chat
from batchwright.prepare.tokenize import Tokenize
from batchwright.sources.listing import InputFile
from batchwright.store import writer
from batchwright.store.layout import Manifest, Shard, StreamInfo
from batchwright.store.texts import TextsWriter

__all__ = ["join"]

_Part = tuple[Any, Any, Any, Any, Any, Any, Any]
"""(tokens, lengths, file, row, hash of the text, number of marks, marks) of some documents."""


def join(work: list[Work], inputs: Inputs, folder: Path, version: str, *, shard_bytes: int) -> Manifest:
    """Write all of a version but its manifest, which is returned."""
    tokenize = work[0].job.tokenize
    report = _report(work)
    _refuse_nothing(report)
    streams: list[StreamInfo] = []
    table: list[tuple[int, Shard]] = []
    placed: list[Placed] = []
    with TextsWriter(folder, sum(part["documents"] for part in report["ingredients"].values())) as texts:
        for part in work:
            places = _places(part)
            for split in SPLITS if part.job.holdout else SPLITS[:1]:
                shards = _write_stream(part, split, folder, places, texts, shard_bytes)
                table += [(len(streams), shard) for shard in shards]
                streams.append(writer.stream_info(part.ingredient.name, split, shards, tokenize.dtype.name))
            placed += places
        texts_hash = texts.finish(folder / "texts.arrow")
    tokenizer_json = tokenize.tokenizer.to_json()
    write_whole(folder / "tokenizer.json", tokenizer_json)
    return Manifest(
        version=version,
        streams=streams,
        token_dtype=tokenize.dtype.name,
        tokenizer=tokenize.info(),
        recipe=inputs.spec_as_json(),
        report=report,
        shards_hash=writer.write_table(folder / "shards.arrow", _shards_table(table)),
        files_hash=writer.write_table(folder / "files.arrow", _files_table(work)),
        units_hash=writer.write_table(folder / "units.arrow", units_table(placed)),
        tokenizer_hash=fingerprint_bytes(tokenizer_json),
        texts_hash=texts_hash,
    )


def _refuse_nothing(report: dict[str, Any]) -> None:
    if not sum(part["documents"] for part in report["ingredients"].values()):
        raise SourceError(
            "no documents: every row was dropped",
            dropped="\n".join(
                f"{name}: " + (", ".join(f"{n:,} {why}" for why, n in part["dropped"].items()) or "nothing was read")
                for name, part in report["ingredients"].items()
            ),
            remedy="look at where=, quantity= and the steps; text= names the column that holds the text",
        )
    if not sum(part["tokens"] for part in report["ingredients"].values()):
        raise TokenizerError(
            "no tokens: the tokenizer gave none for any document",
            documents=f"{sum(part['documents'] for part in report['ingredients'].values()):,}",
            remedy="try the tokenizer on one text; append_eos=True ends every document with an id",
        )


def _places(part: Work) -> list[Placed]:
    """One for each unit; where its documents lie is not known yet."""
    first = first_rows(part, [report.span_rows for report in part.reports])
    return [
        Placed(report, [span.file for span in unit.spans] or [part.first_file], rows, [("", 0, 0)] * len(SPLITS))
        for unit, report, rows in zip(part.units, part.reports, first, strict=True)
    ]


def _write_stream(
    part: Work, split: str, folder: Path, places: list[Placed], texts: TextsWriter, shard_bytes: int
) -> list[Shard]:
    """The shards of one ingredient and split. Says in `places` where each unit's documents came to lie."""
    count, side = len(part.units), SPLITS.index(split)
    order = permutation(count, part.job.seed, part.job.ingredient, "units").at(range(count)).tolist()
    itemsize = part.job.tokenize.dtype.itemsize
    shards: list[Shard] = []
    waiting: list[tuple[int, _Part]] = []

    def flush() -> None:
        if not waiting:
            return
        name = f"{part.ingredient.name}-{split}-{len(shards):05d}.arrow"
        first = 0
        for number, (_, lengths, *_) in waiting:
            unit = places[number]
            unit.is_whole &= not unit.places[side][2]
            unit.places[side] = (name, first, len(lengths))
            first += len(lengths)
        pieces = [piece for _, piece in waiting]
        tokens, lengths, file, row, text, num_marks, marks = map(_end_to_end, zip(*pieces, strict=True))
        shards.append(
            writer.write_shard(
                folder,
                name,
                source=part.ingredient.name,
                split=split,
                tokens=tokens,
                offsets=_starts(lengths),
                file=file,
                row=row,
                spans=(_starts(num_marks), marks) if isinstance(part.job.tokenize, Chat) else None,
            )
        )
        texts.add(text)
        waiting.clear()

    for number in order if part.job.shuffle else range(count):
        documents = _documents_of(part, places[number], number, side)
        for piece in _split_documents(*documents, limit=min(writer.MAX_SHARD_TOKENS, shard_bytes // itemsize)):
            together = sum(len(tokens) for _, (tokens, *_) in waiting) + len(piece[0])
            if together * itemsize > shard_bytes or together > writer.MAX_SHARD_TOKENS:
                flush()
            waiting.append((number, piece))
    flush()
    return shards


def _starts(lengths: Any) -> Any:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def _end_to_end(arrays: Sequence[Any]) -> Any:
    return np.concatenate(arrays) if len(arrays) > 1 else arrays[0]  # one may be large, and mapped: not copied


def _documents_of(part: Work, placed: Placed, number: int, side: int) -> _Part:
    """A unit's documents of one split: not with spans and rows in them, but with files and rows in those."""
    found = part.documents[number](side)
    files, first = np.array(placed.files, np.int32), np.array(placed.first_rows, np.int64)
    file, row = files[found.span], found.row + first[found.span]
    return found.tokens, found.lengths, file, row, found.text, found.num_marks, found.marks


def _split_documents(
    tokens: Any, lengths: Any, file: Any, row: Any, text: Any, num_marks: Any, marks: Any, *, limit: int
) -> Iterator[_Part]:
    """A unit's documents in as few parts as hold at most `limit` tokens each: nearly always one, or none."""
    ends = np.cumsum(lengths)
    mark_ends = np.concatenate([[0], np.cumsum(num_marks)])
    first = 0
    while first < len(lengths):
        begin = int(ends[first] - lengths[first])
        last = max(int(np.searchsorted(ends, begin + limit, side="right")), first + 1)  # one document is never cut
        some = slice(first, last)
        mine = marks[mark_ends[first] : mark_ends[last]] if len(num_marks) else marks
        yield (
            tokens[begin : int(ends[last - 1])],
            lengths[some],
            file[some],
            row[some],
            text[some],
            num_marks[some],
            mine,
        )
        first = last


def _shards_table(table: list[tuple[int, Shard]]) -> dict[str, Any]:
    columns = ("file", "num_documents", "num_tokens", "num_bytes", "file_hash", "content_hash")
    return {
        "stream": np.array([stream for stream, _ in table], np.int32),
        **{name: [getattr(shard, name) for _, shard in table] for name in columns},
    }


def _files_table(work: list[Work]) -> dict[str, Any]:
    columns: dict[str, list[Any]] = {
        name: [] for name in ("path", "name", "source", "format", "num_bytes", "modified_ns", "content_hash")
    }
    for part in work:
        hashes: dict[int, list[str]] = {}
        for unit, report in zip(part.units, part.reports, strict=True):
            for span, digest in zip(unit.spans, report.span_hashes, strict=True):
                hashes.setdefault(span.file, []).append(digest)
        formats = {span.file: span.format for unit in part.units for span in unit.spans}
        for number, file in enumerate(part.files or [InputFile("<memory>", "<memory>", 0, 0)]):
            whole = hashes.get(part.first_file + number)
            values = (
                file.path,
                file.name,
                part.ingredient.name,
                formats.get(part.first_file + number, "memory"),
                file.num_bytes,
                file.modified_ns,
                content_hash(whole) if whole else "",
            )
            for column, value in zip(columns.values(), values, strict=True):
                column.append(value)
    return columns


def _report(work: list[Work]) -> dict[str, Any]:
    """What was read, kept and dropped, and why; with a few examples of malformed rows."""
    ingredients: dict[str, Any] = {}
    examples: list[list[Any]] = []
    for part in work:
        dropped: Counter[str] = Counter()
        first = first_rows(part, [report.span_rows for report in part.reports])
        for unit, report, rows in zip(part.units, part.reports, first, strict=True):
            dropped.update(report.dropped)
            by_path = {span.path: row for span, row in zip(unit.spans, rows, strict=False)}
            examples += [[file, row + by_path.get(file, rows[0]), reason] for file, row, reason in report.examples]
        ingredients[part.ingredient.name] = {
            "rows_read": sum(report.rows_read for report in part.reports),
            "documents": sum(report.documents for report in part.reports),
            "tokens": sum(report.tokens for report in part.reports),
            "dropped": dict(sorted(dropped.items())),
        }
    layouts = {p.ingredient.name: str(p.job.tokenize.layout) for p in work if isinstance(p.job.tokenize, Chat)}
    return {
        "ingredients": ingredients,
        **({"layouts": layouts} if layouts else {}),
        **_special_tokens(work),
        "errors": sum(report.errors for part in work for report in part.reports),
        "examples": examples[:20],
    }


def _special_tokens(work: list[Work]) -> dict[str, Any]:
    """How many documents hold the names of special tokens, which names how often, and what they became."""
    step = work[0].job.tokenize
    if not isinstance(step, Tokenize) or step.special is None:
        return {}
    reports = [report for part in work for report in part.reports]
    names = sum((Counter(report.special) for report in reports), Counter[str]())
    documents = sum(report.special_documents for report in reports)
    return {"special_tokens": {"as": step.special, "documents": documents, "names": dict(sorted(names.items()))}}
