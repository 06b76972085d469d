"""Find what is wrong with data before a run does.

`doctor chat` renders and encodes the first 1,000 rows of a file of conversations, without a bake, and reports what
would go wrong in training: rows that cannot be used, masks that are empty or leave out the end of turn, two start
tokens, a template for another tokenizer, too many rows over the length limit. Then it shows the masks of a few rows.
The exit code is 1 if a check failed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import batchwright as bw
from batchwright.base.checks import at_least, local_path
from batchwright.base.words import counted
from batchwright.cli.output import add_json, print_json, printable
from batchwright.cli.values import add_renames, count, whole_number

if TYPE_CHECKING:
    from batchwright.loaders.chat_checks import Finding
    from batchwright.loaders.chat_file import ChatFile
    from batchwright.prepare.chat.spans import LossPolicy

SUMMARY = "find what is wrong with data before a run does"

EXAMPLES = """\
examples:
  batchwright doctor chat sft.jsonl --tokenizer tokenizer.json
  batchwright doctor chat sft.jsonl --tokenizer tokenizer.json --template chatml --max-length 4096
  batchwright doctor chat pairs.parquet --tokenizer tokenizer.json --loss last --html masks.html --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    subjects = parser.add_subparsers(metavar="SUBJECT", dest="subject", required=True, title="subjects")
    chat = subjects.add_parser("chat", help="conversations, and their masks", description=__doc__, epilog=EXAMPLES)
    add = chat.add_argument
    add("file", nargs="+", metavar="FILE", help="file, folder or glob")
    add("--tokenizer", required=True, help="a tokenizer.json, its folder, or bytes")
    add("--template", metavar="NAME", help="a built-in template, a .jinja file, or Jinja (the tokenizer's own)")
    add("--max-length", type=whole_number, default=2048, metavar="TOKENS", help="most tokens of a row (2048)")
    cuts = ("drop", "keep_start", "keep_end", "drop_oldest")
    add("--truncation", choices=cuts, default="drop", help="what happens to longer rows (drop)")
    add("--loss", help="assistant, last, all, or roles such as user+assistant (assistant; pairs: last)")
    add("--format", help="messages, sharegpt, alpaca, prompt_completion or preference (the first row's)")
    add_renames(chat)
    add("--rows", type=count, default=1000, metavar="N", help="number of rows to check (1000)")
    add("--show", type=whole_number, default=2, metavar="N", help="rows to show with their masks (2)")
    add("--html", metavar="PAGE", help="also write these rows as a page")
    add_json(chat)


def run(arguments: argparse.Namespace) -> int:
    from batchwright.cli.masks import default_loss
    from batchwright.loaders.chat_checks import CheckSettings
    from batchwright.prepare.chat.spans import LossPolicy

    at_least(2, max_length=arguments.max_length)
    if arguments.loss is not None:
        LossPolicy.of(arguments.loss)  # refused before the file is read
    cuts, keep_newest = arguments.truncation, None
    if cuts == "drop_oldest":
        cuts, keep_newest = "drop", arguments.max_length
    file = _read(arguments, keep_newest)
    policy = LossPolicy.of(arguments.loss or default_loss(is_pair=file.has_pairs))
    findings = file.findings(CheckSettings(policy, arguments.max_length, cuts))
    if arguments.json:
        print_json(_facts(arguments, file, policy, findings))
    else:
        print("\n".join(_lines(arguments, file, findings)))
    if arguments.show and file.encoded:
        _show(file, policy, arguments)
    return int(any(finding.is_failure for finding in findings))


def _read(arguments: argparse.Namespace, keep_newest: int | None) -> ChatFile:
    from batchwright.loaders.chat_file import ChatFile

    step = bw.chat(
        arguments.tokenizer,
        arguments.template,
        format=arguments.format,
        columns=arguments.columns,
        roles=arguments.roles,
        keep_newest=keep_newest,
    )
    file = ChatFile(step)
    file.read(arguments.file, arguments.rows)
    file.encode()
    return file


def _facts(
    arguments: argparse.Namespace, file: ChatFile, policy: LossPolicy, findings: Sequence[Finding]
) -> dict[str, Any]:
    info, loss = file.step.info(), arguments.loss
    if file.encoded:
        loss = str(policy)
    return {
        "ok": not any(finding.is_failure for finding in findings),
        "rows": file.num_rows,
        "usable": len(file.encoded),
        "template": info["chat"]["template"],
        "end_of_turn": info["chat"]["end_of_turn"],
        "tokenizer": info["name"],
        "loss": loss,
        "findings": [asdict(finding) for finding in findings],
    }


def _lines(arguments: argparse.Namespace, file: ChatFile, findings: Sequence[Finding]) -> Iterator[str]:
    from batchwright.loaders.chat_checks import place_in_words

    name, tokenizer = file.step.template.name, file.step.tokenizer.name
    rows, template = counted(file.num_rows, "row"), name
    if not file.is_all:
        rows = f"the first {rows}"
    if name.partition(":")[0] == tokenizer:
        template += " (its own)"
    yield (
        f"{printable(' '.join(arguments.file))}: {rows}, template {template}, "
        f"end of turn {file.step.template.end_of_turn}, tokenizer {tokenizer}"
    )
    for finding in findings:
        mark = "FAILED" if finding.is_failure else "note"
        yield f"{mark:<7} {finding.kind}: {printable(finding.headline)}"
        for place in finding.examples:
            yield f"          {printable(place_in_words(place))}"
        if finding.remedy:
            yield f"          try: {printable(finding.remedy)}"
    failures = sum(finding.is_failure for finding in findings)
    if failures:
        yield f"{counted(failures, 'check')} failed"
    else:
        yield "ok: no check failed"


def _show(file: ChatFile, policy: LossPolicy, arguments: argparse.Namespace) -> None:
    """A few rows with their masks."""
    from batchwright.cli.masks import batch_of_documents, rows_of_conversation
    from batchwright.loaders.chat_checks import place_in_words

    rows = [
        row
        for one, place in zip(file.encoded[: arguments.show], file.places, strict=False)
        for row in rows_of_conversation(one.tokens, one.fields(), policy, place_in_words(place))
    ]
    shown = bw.look(batch_of_documents(rows), rows=len(rows), tokenizer=file.step.tokenizer)
    if not arguments.json:
        print(f"\n{shown}")
    if arguments.html:
        local_path(html=arguments.html).write_text(shown.html(), encoding="utf-8")
        print(f"wrote {arguments.html}", file=sys.stderr)
