"""From a step to its documents, and from a document to the steps that use it. No run and no scan is needed.

--step or --position prints every piece of a document in the batch (or row), in reading order: file, row, lines, tokens
and text. --file (and --row) prints every use of a document. A use that an amendment skips is marked.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import asdict

import batchwright as bw
from batchwright.base.errors import SpecError
from batchwright.base.words import counted
from batchwright.cli.output import add_json, piece_in_words, print_json, printable
from batchwright.cli.values import add_plan, count, whole_number

SUMMARY = "a step to its documents, or a document to its steps"

EXAMPLES = """\
examples:
  batchwright trace corpus.store 3f2a --step 100
  batchwright trace corpus.store 3f2a --position 12345
  batchwright trace corpus.store 3f2a --file data/web.jsonl --row 17
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plan(parser)
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--step", type=whole_number, metavar="N", help="all rows of this step")
    what.add_argument("--position", type=whole_number, metavar="N", help="the row at this position")
    what.add_argument("--file", metavar="F", help="every use of a raw file (its path, or the end of it)")
    add("--row", type=whole_number, metavar="R", help="with --file: only this row of it, from 0")
    add("--until", type=whole_number, metavar="N", help="with --file: the last position to search (one epoch)")
    add("--world-size", type=count, metavar="N", help="with --step: the rank of each row, for this number of ranks")
    add("--sharding", metavar="NAME", help="with --world-size: the sharding of the run (contiguous)")
    add("--chars", type=whole_number, default=60, metavar="N", help="characters of text (60)")
    add_json(parser)


def run(arguments: argparse.Namespace) -> None:
    for name in ("row", "until"):
        if getattr(arguments, name) is not None and arguments.file is None:
            raise SpecError(f"--{name} belongs to --file", parameter=name)
    if arguments.file is not None:
        place = {name: getattr(arguments, name) for name in ("file", "row", "batch_size", "until")}
        uses = bw.find(arguments.store, arguments.plan, **place)
        return _show(uses, arguments, f"{counted(len(uses), 'use')} of {arguments.file}")
    names = ("step", "position", "batch_size", "world_size", "sharding")
    records = bw.trace(arguments.store, arguments.plan, **{name: getattr(arguments, name) for name in names})
    return _show(records, arguments, None)


def _show(records: Iterable[bw.TraceRecord], arguments: argparse.Namespace, headline: str | None) -> None:
    if arguments.json:
        print_json({"store": arguments.store, "records": [asdict(record) for record in records]})
        return
    if headline is not None:
        print(printable(headline))
    last = None
    for record in records:
        if record.position != last:
            last = record.position
            print(_place(record))
        print(f"  {printable(piece_in_words(record))}  {_excerpt(record.text, arguments.chars)}".rstrip())


def _place(record: bw.TraceRecord) -> str:
    """Where a row is in the run."""
    if record.is_skipped:
        step = "skipped"
    elif record.step is None:
        step = "no step"
    else:
        step = f"step {record.step:,}, rank {record.rank}, row {record.row_in_batch}"
    return f"{step} (position {record.position:,}): {printable(record.source)}, epoch {record.epoch}"


def _excerpt(text: str | None, characters: int) -> str:
    if text is None or not characters:
        return ""
    excerpt = printable(repr(text[:characters]))
    if len(text) > characters:
        excerpt += "..."
    return excerpt
