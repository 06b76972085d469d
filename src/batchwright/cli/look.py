"""Look at data in the terminal: documents of a store, rows of a buffer, or the batches that a run will see.

Without loader settings it shows documents as they are stored. With --chunk-size (or a PLAN) it shows the rows of one
step, decoded, with a line where a document begins and which source it is from, and one for rows that an amendment
skips. STORE is any one store of a mixture: its plan knows where the others are. Control characters in the text are
shown as escapes.

Of conversations, and of rows that a plan packs, trained tokens are marked, as `batchwright.look(batch)` does; --html
writes that of any store or plan as a page. Of a buffer's folder it shows rows: --document is the first of them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any

from batchwright.base.checks import local_path
from batchwright.base.errors import SpecError
from batchwright.base.words import counted
from batchwright.cli.output import add_json, indented, lines_in_words, print_json, printable
from batchwright.cli.plan_settings import (
    add_settings,
    holds_conversations,
    plan_of_settings,
    refuse_settings,
    settings_given,
)
from batchwright.cli.rows import is_buffer, look_at_rows
from batchwright.cli.values import check_positive, whole_number

if TYPE_CHECKING:
    from batchwright.batches.types import TraceRecord, TrainingBatch
    from batchwright.order.plan import Plan
    from batchwright.store import Store
    from batchwright.store.stream import StoredDocument, TokenStream

__all__ = ["EXAMPLES", "SUMMARY", "add_arguments", "run"]

Found = tuple[int, "TokenStream", int]
"""(number of a document in its store, its stream, its number there)."""
_OF_DOCUMENTS = {"--split", "--loss", "--no-end-of-turn"}
"""Loader settings that documents alone can be shown with."""

SUMMARY = "documents and batches, decoded, in the terminal"

EXAMPLES = """\
examples:
  batchwright look corpus.store                                     the first documents
  batchwright look corpus.store --document 120 --count 1 --chars 0  one, whole
  batchwright look corpus.store --chunk-size 64 --batch-size 4 --step 0
  batchwright look corpus.store 3f2a --step 100 --ids
  batchwright look chats.store --loss last                          conversations: what would be trained
  batchwright look chats.store 81c0 --step 100 --html masks.html
  batchwright look my-buffer --document 120                         rows of a buffer
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("store", metavar="STORE")
    add("plan", metavar="PLAN", nargs="?", help="fingerprint, plan file or state file")
    add("--step", type=whole_number, metavar="N", help="which step's rows (0)")
    add("--document", type=whole_number, metavar="N", help="the first document to show (0)")
    add("--source", metavar="NAME", help="documents of this source only")
    add("--count", type=whole_number, metavar="N", help="documents (3) or rows (all) to show")
    add("--chars", type=whole_number, default=400, metavar="N", help="characters of a piece (400); 0: all")
    add("--ids", action="store_true", help="show token by token: id and text")
    add("--html", metavar="FILE", help="write a page with trained tokens marked, in place of text here")
    add_settings(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> None:
    from batchwright.store import Store
    from batchwright.store.plans import find_plan, streams_for_plan

    check_positive(arguments, "count")
    if is_buffer(arguments.store):
        return look_at_rows(arguments)
    _check_page(arguments)
    if arguments.plan is not None:
        refuse_settings(arguments, arguments.plan)
        plan = find_plan(arguments.store, arguments.plan, batch_size=arguments.batch_size)
        store = next(iter(streams_for_plan(arguments.store, plan).values())).store
    elif arguments.step is not None or set(settings_given(arguments)) - _OF_DOCUMENTS:
        store = Store(arguments.store)
        plan = plan_of_settings(store, arguments)
    else:
        return _documents(Store(arguments.store), arguments)
    for name in ("document", "source"):
        if getattr(arguments, name) is not None:
            raise SpecError(f"--{name} shows documents, and --chunk-size or PLAN shows rows", remedy="one of them")
    return _rows(store, plan, arguments)


def _check_page(arguments: argparse.Namespace) -> None:
    """--html must be a file that can be written, and excludes --json."""
    if arguments.html is None:
        return
    if arguments.json:
        raise SpecError("--html writes a page, and --json prints numbers", remedy="one of them")
    page = local_path(html=arguments.html)
    remedy = "the name of a file, in a folder that exists"
    if page.is_dir():
        raise SpecError(f"{arguments.html} is a folder", parameter="html", remedy=remedy)
    if not page.parent.is_dir():
        raise SpecError(f"{arguments.html} is in a folder that does not exist", parameter="html", remedy=remedy)


# Documents


def _documents(store: Store, arguments: argparse.Namespace) -> None:
    found = list(_chosen(store, arguments))
    is_text = not holds_conversations(store)
    for flag in settings_given(arguments):
        if is_text and flag != "--split":
            remedy = f"leave out {flag}"
            raise SpecError(f"{flag} means nothing here: {store.path} holds plain text", remedy=remedy)
    if not is_text or arguments.html is not None:
        _trained_documents(store, found, arguments)
        return
    read = [(number, stream.document(number_in_stream)) for number, stream, number_in_stream in found]
    if arguments.json:
        facts = [_document_as_json(store, number, document, arguments) for number, document in read]
        print_json({"store": str(store.path), "documents": facts})
        return
    for number, document in read:
        _heading(
            f"document {number:,}: {document.source} ({document.split}), {document.file}, row {document.row:,}, "
            f"{counted(len(document.tokens), 'token')}"
        )
        _text(_content(store, document.tokens, arguments))


def _document_as_json(
    store: Store, number: int, document: StoredDocument, arguments: argparse.Namespace
) -> dict[str, Any]:
    facts = _document_facts(number, document)
    facts |= {"num_tokens": len(document.tokens), "text": store.decode(document.tokens)}
    if arguments.ids:
        facts["ids"] = document.tokens
    return facts


def _document_facts(number: int, document: StoredDocument) -> dict[str, Any]:
    """The place of a document: in its store, and in the raw files."""
    return {"document": number, **{name: getattr(document, name) for name in ("source", "split", "file", "row")}}


def _chosen(store: Store, arguments: argparse.Namespace) -> Iterator[Found]:
    if arguments.source is not None and arguments.source not in store.names:
        store.stream(arguments.source)  # says which names there are
    first, left = arguments.document or 0, arguments.count or 3
    base = total = 0
    for info in store.manifest.streams:
        if arguments.source in (None, info.source) and arguments.split in (None, info.split):
            stream = store.stream(info.source, info.split)
            numbers = range(info.num_documents)[max(first - total, 0) :][:left]
            for number in numbers:
                yield base + number, stream, number
            left -= len(numbers)
            total += info.num_documents
        base += info.num_documents
    if first >= total:
        raise SpecError(
            f"document {first:,} does not exist: there are {total:,}",
            parameter="document",
            remedy=f"--document {max(total - 1, 0)} or less",
        )


def _trained_documents(store: Store, found: list[Found], arguments: argparse.Namespace) -> None:
    """Documents with their trained tokens marked: of a preference pair, two rows."""
    from batchwright.cli.masks import batch_of_documents, rows_of_document
    from batchwright.prepare.chat.spans import ROLES

    documents, rows = [], []
    for number, stream, number_in_stream in found:
        document = stream.document(number_in_stream)
        words = f"document {number:,}: {document.file}, row {document.row:,}"
        for row in rows_of_document(stream, number_in_stream, words, arguments.loss):
            rows.append(row)
            facts = _document_facts(number, document) | {"side": row.side, "num_tokens": len(row.tokens)}
            facts |= {"num_trained": int((row.weight != 0).sum()), "text": store.decode(row.tokens)}
            documents.append(facts)
            if arguments.ids:
                role = [ROLES[role] for role in row.role.tolist()]
                facts |= {"ids": row.tokens, "loss_mask": row.weight, "role": role}
    if arguments.json:
        print_json({"store": str(store.path), "documents": documents})
    else:
        _show(batch_of_documents(rows), store, arguments, len(rows))


def _show(batch: TrainingBatch, store: Store, arguments: argparse.Namespace, rows: int) -> None:
    """Rows of a batch with their trained tokens marked: on stdout, or as a page."""
    from batchwright.base.files import write_whole
    from batchwright.batches.looking import look

    batch.metadata["tokenizer"] = str(store.folder / "tokenizer.json")
    shown = look(batch, rows=max(rows, 1), ids=arguments.ids, whole=arguments.chars == 0)
    if arguments.html is None:
        print(shown)
    else:
        write_whole(local_path(html=arguments.html), shown.html().encode())
        print(f"{printable(arguments.html)}: {shown.heading}")


# Rows


def _rows(store: Store, plan: Plan, arguments: argparse.Namespace) -> None:
    """`store` is the first of the plan's, and decodes for all; the plan finds the others."""
    from batchwright.audit.tracing import trace

    step = arguments.step or 0
    records = trace(arguments.store, plan, step=step)
    rows = [list(pieces) for _, pieces in groupby(records, key=lambda record: record.position)]
    if arguments.html is not None or any(source.rows for source in plan.all_sources):
        _trained_rows(store, plan, rows, arguments)
        return
    shown = rows[: arguments.count]
    skipped = _skipped_before(plan, shown)
    ids: dict[int, Any] = {}
    if arguments.ids or arguments.json:
        ids = _ids(arguments.store, plan, [row[0].position for row in shown])
    if arguments.json:
        facts = [_row_facts(row) | {"tokens": ids[row[0].position], "pieces": list(map(asdict, row))} for row in shown]
        print_json(_step_facts(store, plan, step, skipped) | {"rows": facts})
        return
    _heading(
        f"step {step:,} of plan {plan.fingerprint}: {counted(len(rows), 'row')} of {plan.row_tokens:,} tokens and one "
        "more for the last target"
    )
    for row in shown:
        _print_row(store, row, skipped, ids, arguments)
    if len(shown) < len(rows):
        _border(f"and {counted(len(rows) - len(shown), 'more row')}: --count {len(rows)}")


def _print_row(
    store: Store,
    row: list[TraceRecord],
    skipped: dict[int, tuple[int, int]],
    ids: dict[int, Any],
    arguments: argparse.Namespace,
) -> None:
    """A row, piece by piece. `ids` is empty without --ids."""
    first = row[0]
    if first.position in skipped:
        _border(f"skipped: {_positions(*skipped[first.position])}")
    _heading(f"row {first.row_in_batch} (position {first.position:,}): {first.source}, epoch {first.epoch}")
    for piece in row:
        _border(_piece_in_words(piece))
        tokens = ids.get(first.position)
        if tokens is not None:
            tokens = tokens[slice(*piece.window_span)]
        _text(_content(store, tokens, arguments, piece.text))


def _skipped_before(plan: Plan, rows: list[list[TraceRecord]]) -> dict[int, tuple[int, int]]:
    """By position of a row: the first and last position that an amendment skips just before it."""
    ranges = {stop: (start, stop - 1) for start, stop in plan.order.skips.ranges}
    return {row[0].position: ranges[row[0].position] for row in rows if row[0].position in ranges}


def _step_facts(store: Store, plan: Plan, step: int, skipped: dict[int, tuple[int, int]]) -> dict[str, Any]:
    return {"store": str(store.path), "plan": plan.fingerprint, "step": step, "skipped": list(skipped.values())}


def _row_facts(pieces: list[TraceRecord]) -> dict[str, Any]:
    first = pieces[0]
    return {"position": first.position, "source": first.source, "epoch": first.epoch}


def _trained_rows(store: Store, plan: Plan, rows: list[list[TraceRecord]], arguments: argparse.Namespace) -> None:
    """The rows of a step with their trained tokens marked: of a preference pair, two."""
    from batchwright.cli.masks import batch_of_step

    step, batch = arguments.step or 0, batch_of_step(arguments.store, plan, rows)
    each = len(batch) // len(rows)
    count = each * len(rows[: arguments.count])
    skipped = _skipped_before(plan, rows)
    if arguments.json:
        facts = [_facts(batch, number, rows[number // each]) for number in range(count)]
        print_json(_step_facts(store, plan, step, skipped) | {"rows": facts})
        return
    for first, last in skipped.values():
        print(f"skipped: {_positions(first, last)}")
    print(f"step {step:,} of plan {plan.fingerprint}")
    _show(batch, store, arguments, count)
    if count < len(batch):
        print(f"and {counted((len(batch) - count) // each, 'more row')}: --count {len(rows)}")


def _facts(batch: TrainingBatch, number: int, pieces: list[TraceRecord]) -> dict[str, Any]:
    facts = _row_facts(pieces)
    if "side" in batch.metadata:
        facts["side"] = batch.metadata["side"][number]
    for name in ("input_ids", "attention_mask", "targets", "loss_mask"):
        facts[name] = getattr(batch, name)[number]
    return facts | {"pieces": [asdict(piece) for piece in pieces]}


def _positions(first: int, last: int) -> str:
    """
    >>> _positions(802, 803), _positions(802, 802)
    ('positions 802-803', 'position 802')
    """
    if first == last:
        return f"position {first:,}"
    return f"positions {first:,}-{last:,}"


def _piece_in_words(piece: TraceRecord) -> str:
    start, stop = piece.document_span
    begins = "begins" if start == 0 else "continues"
    return f"{piece.file}, row {piece.row:,} {begins}: tokens {start:,}-{stop:,}{lines_in_words(piece.lines)}"


def _ids(where: str, plan: Plan, positions: list[int]) -> dict[int, Any]:
    """The tokens of the windows at some positions."""
    import numpy as np

    from batchwright.loaders.stored import open_flow
    from batchwright.store.plans import streams_for_plan

    flow = open_flow(streams_for_plan(where, plan), plan)
    block = flow.at(np.array(positions, np.int64), lambda rows, width: np.empty((rows, width), np.int64))
    return dict(zip(positions, block.tokens, strict=True))


def _content(store: Store, tokens: Any, arguments: argparse.Namespace, text: str | None = None) -> str:
    """A piece as text, or token by token with --ids, cut after --chars."""
    most = arguments.chars or sys.maxsize
    if arguments.ids and tokens is not None:
        content, length, unit = " ".join(_token(store, int(token)) for token in tokens[:most]), len(tokens), "tokens"
    else:
        if text is None and tokens is not None:
            text = store.decode(tokens)
        if text is None:
            return "(the tokenizer was a function, and cannot decode: --ids)"
        content, length, unit = text[:most], len(text), "characters"
    if length > most:
        content += f" ... ({length:,} {unit})"
    return content


def _token(store: Store, token: int) -> str:
    text = store.decode([token])
    if text is None:
        return str(token)
    return f"{token}:{text!r}"


def _heading(text: str) -> None:
    _print(printable(text), "bold")


def _border(text: str) -> None:
    _print(f"  -- {printable(text)}", "cyan")


def _text(text: str) -> None:
    _print(indented(text, "  | "))


def _print(text: str, style: str | None = None) -> None:
    """A line to stdout, in its style on a terminal."""
    if not sys.stdout.isatty():
        print(text)
        return
    from rich.console import Console

    Console(highlight=False, markup=False, emoji=False, soft_wrap=True).print(text, style=style)
