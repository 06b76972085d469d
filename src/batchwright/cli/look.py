"""Look at data in the terminal: documents of a store, rows of a buffer, or the batches of a run.

Without loader settings it shows documents as they are stored. With --chunk-size (or a PLAN) it shows the decoded rows
of one step. A line marks where a document begins and its source, and which rows an amendment skips. STORE is any one
store of a mixture: its plan finds the others. Control characters in the text are escaped.

For conversations, and for rows that a plan packs, trained tokens are marked, as by `batchwright.look(batch)`; --html
writes this as a page, for any store or plan. For a buffer it shows rows: --document is the first of them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any

import batchwright as bw
from batchwright.base.checks import local_path
from batchwright.base.errors import SpecError
from batchwright.base.files import write_whole
from batchwright.base.words import counted, truncated
from batchwright.cli.output import add_json, indented, lines_in_words, print_json, printable
from batchwright.cli.values import add_settings, count, is_buffer, refuse_settings, settings_given, whole_number

if TYPE_CHECKING:
    from batchwright.store.stream import TokenStream

__all__ = ["EXAMPLES", "SUMMARY", "add_arguments", "run"]

Row = list["bw.TraceRecord"]
"""The pieces of documents in a row."""
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
    add("store", metavar="STORE", help="a store, or a buffer")
    add("plan", metavar="PLAN", nargs="?", help="fingerprint, plan file or state file")
    add("--step", type=whole_number, metavar="N", help="the step whose rows are shown (0)")
    add("--document", type=whole_number, metavar="N", help="the first document (0)")
    add("--source", metavar="NAME", help="only documents of this source")
    add("--count", type=count, metavar="N", help="number of documents (3) or rows (all)")
    add("--chars", type=whole_number, default=400, metavar="N", help="characters of a piece (400); 0: all")
    add("--ids", action="store_true", help="token by token, with ids")
    add("--html", metavar="FILE", help="write a page with trained tokens marked, instead of text")
    add_settings(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> None:
    from batchwright.cli.plan_settings import plan_of_settings
    from batchwright.store.plans import find_plan, streams_for_plan

    if is_buffer(arguments.store):
        return _buffer_rows(arguments)
    _check_page(arguments)
    if arguments.plan is not None:
        refuse_settings(arguments, arguments.plan)
        plan = find_plan(arguments.store, arguments.plan, batch_size=arguments.batch_size)
        store = next(iter(streams_for_plan(arguments.store, plan).values())).store
    elif arguments.step is not None or set(settings_given(arguments)) - _OF_DOCUMENTS:
        store = bw.Store(arguments.store)
        plan = plan_of_settings(store, arguments)
    else:
        return _documents(bw.Store(arguments.store), arguments)
    for name in ("document", "source"):
        if getattr(arguments, name) is not None:
            raise SpecError(f"--{name} shows documents, and --chunk-size or PLAN shows rows", remedy="one of them")
    return _rows(store, plan, arguments)


def _check_page(arguments: argparse.Namespace) -> None:
    """--html must name a file in an existing folder, and excludes --json."""
    if arguments.html is None:
        return
    if arguments.json:
        raise SpecError("--html writes a page, and --json prints numbers", remedy="one of them")
    page = local_path(html=arguments.html)
    if page.is_dir() or not page.parent.is_dir():
        what = f"{arguments.html} is a folder, or in a folder that does not exist"
        raise SpecError(what, parameter="html", remedy="a file name in an existing folder")


# Documents


def _documents(store: bw.Store, arguments: argparse.Namespace) -> None:
    found = list(_chosen(store, arguments))
    is_text = "chat" not in store.manifest.tokenizer
    for flag in settings_given(arguments):
        if is_text and flag != "--split":
            what = f"{flag} does not apply: {store.path} holds plain text"
            raise SpecError(what, remedy=f"leave out {flag}")
    if not is_text or arguments.html is not None or arguments.json:
        _trained_documents(store, found, arguments)
        return
    for number, stream, number_in_stream in found:
        document = stream.document(number_in_stream)
        print(
            f"document {number:,}: {printable(document.source)} ({document.split}), {printable(document.file)}, "
            f"row {document.row:,}, {counted(len(document.tokens), 'token')}"
        )
        print(indented(_content(store, document.tokens, arguments), "  | "))


def _chosen(store: bw.Store, arguments: argparse.Namespace) -> Iterator[Found]:
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


def _trained_documents(store: bw.Store, found: list[Found], arguments: argparse.Namespace) -> None:
    """Documents with their trained tokens marked: of a preference pair, two rows."""
    from batchwright.cli.masks import batch_of_documents, rows_of_document
    from batchwright.prepare.chat.spans import ROLES

    documents, rows = [], []
    for number, stream, number_in_stream in found:
        document = stream.document(number_in_stream)
        place = {name: getattr(document, name) for name in ("source", "split", "file", "row")}
        words = f"document {number:,}: {document.file}, row {document.row:,}"
        for row in rows_of_document(stream, number_in_stream, words, arguments.loss):
            rows.append(row)
            facts = {"document": number, **place, "side": row.side, "num_tokens": len(row.tokens)}
            facts |= {"num_trained": int((row.weight != 0).sum()), "text": store.decode(row.tokens)}
            documents.append(facts)
            if arguments.ids:
                facts |= {"ids": row.tokens, "loss_mask": row.weight}
            if arguments.ids and stream.has_spans:
                facts["role"] = [ROLES[role] for role in row.role.tolist()]
    if arguments.json:
        print_json({"store": str(store.path), "documents": documents})
    else:
        _show(batch_of_documents(rows), store, arguments, len(rows))


def _show(batch: bw.TrainingBatch, store: bw.Store, arguments: argparse.Namespace, rows: int) -> None:
    """Rows of a batch with their trained tokens marked: on stdout, or as a page."""
    batch.metadata["tokenizer"] = str(store.folder / "tokenizer.json")
    shown = bw.look(batch, rows=max(rows, 1), ids=arguments.ids, whole=arguments.chars == 0)
    if arguments.html is None:
        print(shown)
    else:
        write_whole(local_path(html=arguments.html), shown.html().encode())
        print(f"{printable(arguments.html)}: {shown.heading}")


# Rows


def _rows(store: bw.Store, plan: bw.Plan, arguments: argparse.Namespace) -> None:
    """`store` is the first of the plan's, and decodes for all; the plan finds the others."""
    from batchwright.cli.masks import tokens_at

    step = arguments.step or 0
    records = bw.trace(arguments.store, plan, step=step)
    rows = [list(pieces) for _, pieces in groupby(records, key=lambda record: record.position)]
    if arguments.html is not None or any(source.rows for source in plan.all_sources):
        _trained_rows(store, plan, rows, arguments)
        return
    shown = rows[: arguments.count]
    skipped = _skipped_before(plan, shown)
    ids: dict[int, Any] = {}
    if arguments.ids or arguments.json:
        ids = tokens_at(arguments.store, plan, [row[0].position for row in shown])
    if arguments.json:
        facts = [_row_facts(row) | {"tokens": ids[row[0].position], "pieces": list(map(asdict, row))} for row in shown]
        print_json(_step_facts(store, plan, step, skipped) | {"rows": facts})
        return
    print(
        f"step {step:,} of plan {plan.fingerprint}: {counted(len(rows), 'row')} of {plan.row_tokens:,} tokens and one "
        "more for the last target"
    )
    for row in shown:
        _print_row(store, row, skipped, ids, arguments)
    if len(shown) < len(rows):
        print(f"  -- and {counted(len(rows) - len(shown), 'more row')}: --count {len(rows)}")


def _print_row(
    store: bw.Store,
    row: Row,
    skipped: dict[int, tuple[int, int]],
    ids: dict[int, Any],
    arguments: argparse.Namespace,
) -> None:
    """A row, piece by piece. `ids` is empty without --ids."""
    first = row[0]
    if first.position in skipped:
        print(f"  -- skipped: {_positions(*skipped[first.position])}")
    print(f"row {first.row_in_batch} (position {first.position:,}): {printable(first.source)}, epoch {first.epoch}")
    for piece in row:
        print(f"  -- {_piece_in_words(piece)}")
        tokens = ids.get(first.position)
        if tokens is not None:
            tokens = tokens[slice(*piece.window_span)]
        print(indented(_content(store, tokens, arguments, piece.text), "  | "))


def _skipped_before(plan: bw.Plan, rows: list[Row]) -> dict[int, tuple[int, int]]:
    """By position of a row: the first and last position that an amendment skips just before it."""
    ranges = {stop: (start, stop - 1) for start, stop in plan.order.skips.ranges}
    return {row[0].position: ranges[row[0].position] for row in rows if row[0].position in ranges}


def _step_facts(store: bw.Store, plan: bw.Plan, step: int, skipped: dict[int, tuple[int, int]]) -> dict[str, Any]:
    return {"store": str(store.path), "plan": plan.fingerprint, "step": step, "skipped": list(skipped.values())}


def _row_facts(pieces: Row) -> dict[str, Any]:
    first = pieces[0]
    return {"position": first.position, "source": first.source, "epoch": first.epoch}


def _trained_rows(store: bw.Store, plan: bw.Plan, rows: list[Row], arguments: argparse.Namespace) -> None:
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


def _facts(batch: bw.TrainingBatch, number: int, pieces: Row) -> dict[str, Any]:
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


def _piece_in_words(piece: bw.TraceRecord) -> str:
    start, stop = piece.document_span
    begins = "begins" if start == 0 else "continues"
    tokens = f"tokens {start:,}-{stop:,}{lines_in_words(piece.lines)}"
    return f"{printable(piece.file)}, row {piece.row:,} {begins}: {tokens}"


def _content(store: bw.Store, tokens: Any, arguments: argparse.Namespace, text: str | None = None) -> str:
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


def _token(store: bw.Store, token: int) -> str:
    text = store.decode([token])
    if text is None:
        return str(token)
    return f"{token}:{text!r}"


# Rows of a buffer


def _buffer_rows(arguments: argparse.Namespace) -> None:
    """Some rows of a buffer: --document, --count, --chars and --json apply."""
    _refuse_others(arguments)
    with bw.DatasetBuffer(path=arguments.store, read_only=True) as buffer:
        begin, most = arguments.document or 0, arguments.count or 3
        index = list(range(begin, min(begin + most, len(buffer))))
        if begin and not index:
            buffer.get_batch([begin])  # says which rows there are
        origins = buffer.provenance(index).to_pylist()
        rows = [
            {"row": number, "id": came["id"], "origin": came["origin"], "values": values}
            for number, came, values in zip(index, origins, buffer.__getitems__(index), strict=True)
        ]
    if arguments.json:
        print_json({"buffer": arguments.store, "rows": rows})
        return
    for row in rows:
        came_from = ""
        if row["origin"] is not None:
            came_from = f", from {printable(row['origin'])!r}"
        print(f"row {row['row']:,} (id {row['id']:,}{came_from})")
        for name, value in row["values"].items():
            print(f"  {printable(name)}  {_value(value, arguments.chars)}")


def _refuse_others(arguments: argparse.Namespace) -> None:
    """Refuse options that are about a store."""
    others = [f"--{name}" for name in ("step", "source", "html") if getattr(arguments, name) is not None]
    if arguments.ids:
        others.append("--ids")
    others = others or settings_given(arguments)
    if arguments.plan is not None:
        others.append(arguments.plan)
    if others:
        raise SpecError(
            f"{others[0]} does not apply: {arguments.store} is a buffer",
            remedy="--document for the first row, --count for how many",
        )


def _value(value: Any, most_characters: int) -> str:
    """A value in one line; an array as its type and its first numbers."""
    text = repr(value)
    if hasattr(value, "dtype") and value.shape:
        words = [f"{value.dtype}{list(value.shape)} ", *(f"{number:.4g}" for number in value.ravel()[:8])]
        if value.size > 8:
            words.append("...")
        text = " ".join(words)
    return printable(truncated(text, most_characters or sys.maxsize))
