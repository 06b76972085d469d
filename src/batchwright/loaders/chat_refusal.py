"""The check of a loader's conversations when it opens: one error for all failures, and notes in the log."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from batchwright.base.errors import SpecError
from batchwright.batches.samples import SampleRows
from batchwright.loaders.chat_checks import (
    MOST_LEFT_OUT,
    CheckSettings,
    ConversationRows,
    Finding,
    findings_of,
    place_in_words,
    share_in_words,
)
from batchwright.loaders.chat_facts import TemplateFacts, facts_of
from batchwright.prepare.chat.policy import LossPolicy
from batchwright.store.stream import TokenStream

if TYPE_CHECKING:
    from batchwright.loaders.stored import StoreStream

__all__ = ["refuse_bad"]

log: logging.Logger = logging.getLogger("batchwright")

_CHECKED_ROWS = 1000
_BY_THE_TEMPLATE = ("by the template", "the template fails", "generation marks")


def refuse_bad(read: StoreStream, *, drops_are_meant: bool = False) -> None:
    """Raise one error for all failures of the conversations; log the notes.

    `drops_are_meant`: the user asked to drop conversations that are too long, even if they are many.
    """
    failures: dict[str, str] = {}
    file = None
    for name, finding in _findings(read, drops_are_meant):
        if not finding.is_failure:
            log.info("%s: %s: %s", name, finding.kind, finding.headline)
            continue
        words = finding.headline
        for place in finding.examples[:1]:
            words += f"\nfirst: {place_in_words(place)}"
            file = file or str(place["file"])
        if finding.remedy:
            words += f"\ntry: {finding.remedy}"
        failures[f"{finding.kind}, {name}" if finding.kind in failures else finding.kind] = words
    if failures:
        remedy = "Delivery(check=False) opens them as they are"
        if file != "<memory>":
            command = f"batchwright doctor chat {file or 'FILE'} --tokenizer T --template X"
            remedy = f"{command} shows such rows; {remedy}"
        words = f"these conversations did not pass the check: {', '.join(failures)}"
        raise SpecError(words, **failures, remedy=remedy)


def _findings(read: StoreStream, drops_are_meant: bool) -> Iterator[tuple[str, Finding]]:
    """(name of the source, finding) of all sources."""
    known: dict[Any, TemplateFacts] = {}  # by store, as a store may have many sources
    for rows in read.flow.stored:
        stream = rows.stream
        if not isinstance(rows, SampleRows) or not isinstance(stream, TokenStream) or rows.spec.loss is None:
            continue
        store, spec, policy = stream.store, rows.spec, LossPolicy.parse(rows.spec.loss)
        if store.folder not in known:
            known[store.folder] = facts_of(store.manifest.tokenizer, store.tokenizer)
        settings = CheckSettings(policy, spec.row_tokens, spec.truncation, read.flow.pad, drops_are_meant)
        for finding in _findings_of_bake(store.report, stream.name):
            yield rows.name, finding
        for finding in findings_of(_first_rows(stream), known[store.folder], settings):
            yield rows.name, finding


def _findings_of_bake(report: Mapping[str, Any], source: str) -> Iterator[Finding]:
    """Findings of a bake's report: rows that its template could not render right, left out by on_error='skip'."""
    part = report.get("ingredients", {}).get(source, {})
    total = part.get("rows_read", 0)
    for kind, number in part.get("dropped", {}).items():
        if not any(words in kind for words in _BY_THE_TEMPLATE):
            continue
        examples = [
            {"file": file, "row": row, "why": why}
            for file, row, why in report.get("examples", [])
            if why.startswith(kind)
        ]
        headline = f"{share_in_words(number, total)} were left out: {kind}"
        remedy = "a chat template for such conversations"
        yield Finding(kind, number > MOST_LEFT_OUT * total, headline, tuple(examples[:1]), remedy)
    if source in report.get("layouts", {}):
        yield Finding("format", False, report["layouts"][source])


def _first_rows(stream: TokenStream) -> ConversationRows:
    """The first conversations of a stream, read from as few shards as possible."""
    tokens: list[NDArray[Any]] = []
    lengths: list[NDArray[Any]] = []
    num_spans: list[NDArray[Any]] = []
    fields: list[dict[str, NDArray[Any]]] = []
    left = _CHECKED_ROWS
    for number in range(len(stream.address)):
        shard = stream.shard(number)
        if not left or shard.spans is None:
            break
        starts, spans = shard.spans
        mine = min(left, len(shard.offsets) - 1)
        tokens.append(shard.tokens[: shard.offsets[mine]])
        lengths.append(np.diff(shard.offsets[: mine + 1]))
        num_spans.append(np.diff(starts[: mine + 1]))
        fields.append({name: values[: starts[mine]] for name, values in spans.items()})
        left -= mine

    def where(number: int) -> dict[str, Any]:
        document = stream.document(number)
        return {"file": document.file, "row": document.row}

    return ConversationRows(
        np.concatenate(tokens),
        np.append(0, np.cumsum(np.concatenate(lengths), dtype=np.int64)),
        np.append(0, np.cumsum(np.concatenate(num_spans), dtype=np.int64)),
        {name: np.concatenate([part[name] for part in fields]) for name in fields[0]},
        where,
    )
