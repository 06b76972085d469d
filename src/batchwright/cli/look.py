"""Look at data in the terminal: documents of a store, rows of a buffer, or the batches of a run.

Without loader settings it shows documents. With --chunk-size, or a PLAN, it shows the rows of one step, with the file
and row of each document in them, and the rows that an amendment skips. STORE is any one store of a mixture: its plan
finds the others. Trained tokens are marked, in a terminal by colors, as by `batchwright.look(batch)`; --html writes
this as a page. Control characters in the text are escaped. For a buffer it shows rows: --document is the first of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any

import batchwright as bw
from batchwright.base.checks import local_path
from batchwright.base.errors import SpecError
from batchwright.base.files import write_whole
from batchwright.base.words import counted, truncated
from batchwright.cli.output import add_json, print_json, printable
from batchwright.cli.values import add_settings, count, is_buffer, refuse_settings, settings_given, whole_number

if TYPE_CHECKING:
    from batchwright.store.stream import TokenStream

Found = tuple[int, "TokenStream", int]
"""(number of a document in its store, its stream, its number there)."""
_OF_DOCUMENTS = {"--split", "--loss", "--no-end-of-turn"}
"""Loader settings that documents alone can be shown with."""
_MOST_CHARACTERS = 400

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
    add("--chars", type=whole_number, metavar="N", help="characters of a buffer's value (400); 0: whole texts")
    add("--ids", action="store_true", help="show each token with its id")
    add("--html", metavar="FILE", help="write a page with trained tokens marked, instead of text")
    add_settings(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> None:
    from batchwright.cli.plan_settings import plan_of_settings
    from batchwright.store.plans import find_plan, streams_for_plan

    if is_buffer(arguments.store):
        return _buffer_rows(arguments)
    _check_page(arguments)
    if arguments.chars:
        what = f"--chars {arguments.chars} does not apply: {arguments.store} is not a buffer"
        raise SpecError(
            what, parameter="chars", remedy="--chars 0 for whole texts; without it, long ones are shortened"
        )
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
    return _step(store, plan, arguments)


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
    """Documents as rows: of a preference pair, two."""
    from batchwright.cli.masks import batch_of_documents, rows_of_document
    from batchwright.prepare.chat.spans import ROLES

    for_conversations = [flag for flag in settings_given(arguments) if flag != "--split"]
    if for_conversations and "chat" not in store.manifest.tokenizer:
        flag = for_conversations[0]
        raise SpecError(f"{flag} does not apply: {store.path} holds plain text", remedy=f"leave out {flag}")
    documents, rows = [], []
    for number, stream, number_in_stream in _chosen(store, arguments):
        document = stream.document(number_in_stream)
        place = {name: getattr(document, name) for name in ("source", "split", "file", "row")}
        words = f"document {number:,} ({document.split}): {document.file}, row {document.row:,}"
        for row in rows_of_document(stream, number_in_stream, words, arguments.loss):
            rows.append(row)
            facts = {"document": number, **place, "side": row.side, "num_tokens": len(row.tokens)}
            facts |= {"num_trained": int((row.weight != 0).sum()), "text": store.decode(row.tokens)}
            documents.append(facts)
            if arguments.ids:
                facts |= {"ids": row.tokens, "loss_mask": row.weight}
                if stream.has_spans:
                    facts["role"] = [ROLES[role] for role in row.role.tolist()]
    if arguments.json:
        print_json({"store": str(store.path), "documents": documents})
    else:
        _show(batch_of_documents(rows), store, arguments, len(rows))


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


def _show(batch: bw.TrainingBatch, store: bw.Store, arguments: argparse.Namespace, rows: int) -> None:
    """Rows of a batch with their trained tokens marked: on stdout, or as a page."""
    batch.metadata["tokenizer"] = str(store.folder / "tokenizer.json")
    shown = bw.look(batch, rows=max(rows, 1), ids=arguments.ids, whole=arguments.chars == 0)
    if arguments.html is None:
        print(shown)
    else:
        write_whole(local_path(html=arguments.html), shown.html().encode())
        print(f"{printable(arguments.html)}: {shown.heading}")


# The rows of a step


def _step(store: bw.Store, plan: bw.Plan, arguments: argparse.Namespace) -> None:
    """The rows of a step: of a preference pair, two.

    `store` is the first of the plan's, and decodes for all; the plan finds the others.
    """
    from batchwright.cli.masks import batch_of_step

    step = arguments.step or 0
    records = bw.trace(arguments.store, plan, step=step)
    rows = [list(pieces) for _, pieces in groupby(records, key=lambda record: record.position)]
    batch = batch_of_step(arguments.store, plan, rows)
    each = len(batch) // len(rows)
    count = each * len(rows[: arguments.count])
    positions = {pieces[0].position for pieces in rows[: arguments.count]}
    skipped = [(start, stop - 1) for start, stop in plan.order.skips.ranges if stop in positions]
    if arguments.json:
        place = {"store": str(store.path), "plan": plan.fingerprint, "step": step, "skipped": skipped}
        print_json(place | {"rows": [_facts(batch, number, rows[number // each]) for number in range(count)]})
        return
    for first, last in skipped:
        print(f"skipped: {_positions(first, last)}")
    print(f"step {step:,} of plan {plan.fingerprint}")
    _show(batch, store, arguments, count)
    if count < len(batch):
        print(f"and {counted((len(batch) - count) // each, 'more row')}: --count {len(rows)}")


def _facts(batch: bw.TrainingBatch, number: int, pieces: list[bw.TraceRecord]) -> dict[str, Any]:
    first = pieces[0]
    facts = {"position": first.position, "source": first.source, "epoch": first.epoch}
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


def _value(value: Any, most: int | None) -> str:
    """A value in one line; an array as its type and its first numbers."""
    text = repr(value)
    if hasattr(value, "dtype") and value.shape:
        words = [f"{value.dtype}{list(value.shape)} ", *(f"{number:.4g}" for number in value.ravel()[:8])]
        if value.size > 8:
            words.append("...")
        text = " ".join(words)
    if most != 0:
        text = truncated(text, most or _MOST_CHARACTERS)
    return printable(text)
