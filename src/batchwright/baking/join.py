"""Joining of units: in their shuffled order into shards, with the tables, under one manifest."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from batchwright.baking.documents import Documents, borders_of, join_documents
from batchwright.baking.inputs import Inputs, content_hash
from batchwright.baking.reuse import UnitPlace, units_table
from batchwright.baking.unit import SPLITS
from batchwright.baking.unit_rows import UnitReport, dropped_in_words, total_report
from batchwright.baking.work import Work
from batchwright.base.errors import SourceError, TokenizerError
from batchwright.order.permute import permutation
from batchwright.prepare.chat.step import Chat
from batchwright.prepare.tokenize import Tokenize
from batchwright.sources.listing import InputFile
from batchwright.store import writer
from batchwright.store.layout import Manifest, Shard, content_digest
from batchwright.store.texts import TextsWriter


def join(work: list[Work], inputs: Inputs, folder: Path, *, shard_bytes: int) -> Manifest:
    """Write a version without its manifest, which is returned."""
    tokenize = work[0].job.tokenize
    first_rows = [part.first_rows([report.span_rows for report in part.reports]) for part in work]
    totals = [total_report(part.units, part.reports, rows) for part, rows in zip(work, first_rows, strict=True)]
    _refuse_nothing(work, totals)
    streams, shards, places = [], [], []
    with TextsWriter(folder, sum(total.documents for total in totals)) as texts:
        for part, rows in zip(work, first_rows, strict=True):
            writing = _IngredientWriter(part, rows, folder, texts, shard_bytes)
            for side in range(len(SPLITS) if part.job.holdout else 1):
                shards.append(writing.write_split(side))
                name = part.ingredient.name
                dtype = tokenize.dtype.name
                streams.append(writer.stream_info(name, SPLITS[side], shards[-1], dtype, default=dtype))
            places += writing.places
        texts_hash = texts.finish(folder / "texts.arrow")
    return writer.write_version_tables(
        folder,
        shards=shards,
        files=[file for part in work for file in _files_of(part)],
        units=units_table(places),
        tokenizer=tokenize.tokenizer,
        info=tokenize.info(),
        texts_hash=texts_hash,
        version=folder.name,
        streams=streams,
        token_dtype=tokenize.dtype.name,
        recipe=msgspec.json.decode(msgspec.json.encode(inputs.spec)),  # as a manifest has it when it is read
        report=_report(work, totals),
    )


def _refuse_nothing(work: list[Work], totals: list[UnitReport]) -> None:
    num_documents = sum(total.documents for total in totals)
    if not num_documents:
        parts = zip(work, totals, strict=True)
        dropped = [f"{p.ingredient.name}: {dropped_in_words(t.dropped) or 'nothing was read'}" for p, t in parts]
        remedy = "look at where=, quantity= and the steps; text= names the column that holds the text"
        raise SourceError("no documents: every row was dropped", dropped="\n".join(dropped), remedy=remedy)
    if not sum(total.tokens for total in totals):
        what = "no tokens: the tokenizer gave none for any document"
        remedy = "try the tokenizer on one text; append_eos=True ends every document with an id"
        raise TokenizerError(what, documents=f"{num_documents:,}", remedy=remedy)


class _IngredientWriter:
    """Writes the shards of one ingredient, and notes in `places` where each unit's documents are."""

    def __init__(
        self, part: Work, first_rows: list[list[int]], folder: Path, texts: TextsWriter, shard_bytes: int
    ) -> None:
        self.part, self.folder, self.texts = part, folder, texts
        self.most_tokens = min(writer.MAX_SHARD_TOKENS, shard_bytes // part.job.tokenize.dtype.itemsize)
        self.places = [
            UnitPlace(report, [span.file for span in unit.spans] or [part.first_file], rows)
            for unit, report, rows in zip(part.units, part.reports, first_rows, strict=True)
        ]

    def write_split(self, side: int) -> list[Shard]:
        job, count = self.part.job, len(self.places)
        order = range(count)
        if job.shuffle:
            order = permutation(count, job.seed, job.ingredient, "units").at(order).tolist()
        shards: list[Shard] = []
        waiting: list[tuple[UnitPlace, Documents]] = []
        num_tokens = 0
        for number in order:
            place = self.places[number]
            documents = self.part.baked[number].documents(side).in_files(place.files, place.first_rows)
            for piece in documents.parts(self.most_tokens):
                if waiting and num_tokens + len(piece.tokens) > self.most_tokens:
                    shards.append(self._write_shard(side, len(shards), waiting))
                    waiting, num_tokens = [], 0
                waiting.append((place, piece))
                num_tokens += len(piece.tokens)
        if waiting:
            shards.append(self._write_shard(side, len(shards), waiting))
        return shards

    def _write_shard(self, side: int, number: int, waiting: list[tuple[UnitPlace, Documents]]) -> Shard:
        name, split = self.part.ingredient.name, SPLITS[side]
        path = self.folder / f"{name}-{split}-{number:05d}.arrow"
        first = 0
        for place, piece in waiting:
            place.put(side, (path.name, first, len(piece.lengths)))
            first += len(piece.lengths)
        documents = join_documents([piece for _, piece in waiting])
        offsets, spans = borders_of(documents.lengths).astype(np.int32), None
        if isinstance(self.part.job.tokenize, Chat):
            spans = borders_of(documents.num_marks).astype(np.int32), documents.marks
        self.texts.add(documents.text)
        return writer.write_shard(
            path,
            name,
            split,
            tokens=documents.tokens,
            offsets=offsets,
            file=documents.file,
            row=documents.row,
            content_hash=content_digest(documents.tokens, offsets, *(spans or ())),
            spans=spans,
        )


def _files_of(part: Work) -> list[dict[str, Any]]:
    hashes: dict[int, list[str]] = {}
    formats: dict[int, str] = {}
    for unit, report in zip(part.units, part.reports, strict=True):
        for span, digest in zip(unit.spans, report.span_hashes, strict=True):
            hashes.setdefault(span.file, []).append(digest)
            formats[span.file] = span.format
    return [
        {
            "path": file.path,
            "name": file.name,
            "source": part.ingredient.name,
            "format": formats.get(number, "memory"),
            "num_bytes": file.num_bytes,
            "modified_ns": file.modified_ns,
            "content_hash": content_hash(hashes.get(number, [""])),
        }
        for number, file in enumerate(part.files or [InputFile("<memory>", "<memory>", 0, 0)], part.first_file)
    ]


def _report(work: list[Work], totals: list[UnitReport]) -> dict[str, Any]:
    """The counts of rows, documents and tokens, dropped rows by reason, and examples of malformed ones."""
    report: dict[str, Any] = {
        "ingredients": {
            part.ingredient.name: {
                "rows_read": total.rows_read,
                "documents": total.documents,
                "tokens": total.tokens,
                "dropped": total.dropped,
            }
            for part, total in zip(work, totals, strict=True)
        }
    }
    step = work[0].job.tokenize
    if isinstance(step, Chat):
        report["layouts"] = {part.ingredient.name: str(part.job.tokenize.layout) for part in work}  # type: ignore[union-attr]
    elif isinstance(step, Tokenize) and step.special is not None:
        names = sum((Counter(total.special) for total in totals), Counter[str]())
        documents = sum(total.special_documents for total in totals)
        report["special_tokens"] = {"as": step.special, "documents": documents, "names": dict(sorted(names.items()))}
    report["errors"] = sum(total.errors for total in totals)
    report["examples"] = [list(example) for total in totals for example in total.examples][:20]
    return report
