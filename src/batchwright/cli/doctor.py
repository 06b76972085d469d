"""Find what is wrong with data before a run does.

`doctor chat` renders and encodes the first 1,000 rows of a file of conversations, without baking anything, and says
what would go wrong in training: rows that cannot be used, masks that are empty or leave out the end of turn, two start
tokens, a template for another tokenizer, too many rows over length. Then it shows the masks of a few rows. Exit code 1
where a check failed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from batchwright.base.checks import at_least, local_path
from batchwright.base.words import counted
from batchwright.cli.output import add_json, print_json, printable
from batchwright.cli.plan_settings import add_renames
from batchwright.cli.values import whole_number

if TYPE_CHECKING:
    from batchwright.loaders.chat_checks import Finding
    from batchwright.loaders.chat_file import ChatFile
    from batchwright.prepare.chat.policy import LossPolicy

__all__ = ["EXAMPLES", "SUMMARY", "add_arguments", "run"]

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
    chat.add_argument("file", nargs="+", metavar="FILE", help="file, folder or glob")
    chat.add_argument("--tokenizer", required=True, help="a tokenizer.json, its folder, or bytes")
    chat.add_argument(
        "--template", metavar="NAME", help="a built-in template, a .jinja file, or Jinja (the tokenizer's own)"
    )
    chat.add_argument("--max-length", type=whole_number, default=2048, metavar="TOKENS", help="of a row (2048)")
    chat.add_argument(
        "--truncation",
        choices=("drop", "keep_start", "keep_end", "drop_oldest"),
        default="drop",
        help="of rows over length (drop)",
    )
    chat.add_argument("--loss", help="assistant, last, all, or roles such as user+assistant (assistant; pairs: last)")
    chat.add_argument("--format", help="messages, sharegpt, alpaca, prompt_completion or preference (the first row's)")
    add_renames(chat)
    chat.add_argument("--rows", type=whole_number, default=1000, metavar="N", help="how many rows to check (1000)")
    chat.add_argument("--show", type=whole_number, default=2, metavar="N", help="rows to show with their masks (2)")
    chat.add_argument("--html", metavar="PAGE", help="write these rows as a page, too")
    add_json(chat)


def run(arguments: argparse.Namespace) -> int:
    at_least(2, max_length=arguments.max_length)
    at_least(1, rows=arguments.rows)
    return _chat(arguments)


def _chat(arguments: argparse.Namespace) -> int:
    from batchwright.loaders.chat_checks import CheckSettings
    from batchwright.loaders.chat_file import ChatFile
    from batchwright.prepare.chat.policy import LossPolicy
    from batchwright.prepare.chat.step import chat

    policy = None if arguments.loss is None else LossPolicy.of(arguments.loss)
    cuts, keep_newest = arguments.truncation, None
    if cuts == "drop_oldest":
        cuts, keep_newest = "drop", arguments.max_length
    step = chat(
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
    policy = policy or LossPolicy.of("last" if file.has_pairs else "assistant")
    findings = file.findings(CheckSettings(policy, arguments.max_length, cuts))
    ok = not any(finding.is_failure for finding in findings)
    if arguments.json:
        info = file.step.info()
        print_json(
            {
                "ok": ok,
                "rows": file.num_rows,
                "usable": len(file.encoded),
                "template": info["chat"]["template"],
                "end_of_turn": info["chat"]["end_of_turn"],
                "tokenizer": info["name"],
                "loss": str(policy) if file.encoded else arguments.loss,
                "findings": [asdict(finding) for finding in findings],
            }
        )
    else:
        _print(arguments, file, findings)
    if arguments.show and file.encoded:
        _show(file, policy, arguments)
    return 0 if ok else 1


def _print(arguments: argparse.Namespace, file: ChatFile, findings: Sequence[Finding]) -> None:
    from batchwright.loaders.chat_checks import place_in_words

    template, tokenizer = file.step.template, file.step.tokenizer
    is_own = template.name.partition(":")[0] == tokenizer.name
    print(
        f"{printable(' '.join(arguments.file))}: {'' if file.is_all else 'the first '}{counted(file.num_rows, 'row')}, "
        f"template {template.name}{' (its own)' * is_own}, end of turn {template.end_of_turn}, "
        f"tokenizer {tokenizer.name}"
    )
    for finding in findings:
        mark = "FAILED" if finding.is_failure else "note"
        print(f"{mark:<7} {finding.kind}: {printable(finding.headline)}")
        for place in finding.examples:
            print(f"          {printable(place_in_words(place))}")
        if finding.remedy:
            print(f"          try: {printable(finding.remedy)}")
    failures = sum(finding.is_failure for finding in findings)
    print(f"{counted(failures, 'check')} failed" if failures else "ok: no check failed")


def _show(file: ChatFile, policy: LossPolicy, arguments: argparse.Namespace) -> None:
    """A few rows with their masks."""
    from batchwright.batches.looking import look
    from batchwright.cli.masks import batch_of_documents, rows_of_conversation
    from batchwright.loaders.chat_checks import place_in_words

    rows = [
        row
        for one, place in zip(file.encoded[: arguments.show], file.places, strict=False)
        for row in rows_of_conversation(one.tokens, one.fields(), policy, place_in_words(place))
    ]
    shown = look(batch_of_documents(rows), rows=len(rows), tokenizer=file.step.tokenizer)
    if not arguments.json:
        print(f"\n{shown}")
    if arguments.html:
        local_path(html=arguments.html).write_text(shown.html(), encoding="utf-8")
        print(f"wrote {arguments.html}", file=sys.stderr)
