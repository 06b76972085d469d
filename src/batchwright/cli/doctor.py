"""Find what is wrong with data before a run does.

`doctor chat` renders and encodes the first 1,000 rows of a file of conversations, without baking anything, and says
what would go wrong in training: rows that cannot be used, masks that are empty or leave out the end of turn, two start
tokens, a template for another tokenizer, too many rows over length. Then it shows the masks of a few rows. Exit code 1
where a check failed.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from batchwright.base.checks import local_path
from batchwright.base.errors import SpecError, TokenizerError
from batchwright.base.words import counted
from batchwright.cli.output import add_json, print_json, printable
from batchwright.cli.plan_settings import add_renames
from batchwright.cli.values import whole_number

if TYPE_CHECKING:
    from batchwright.baking.work import Work
    from batchwright.batches.types import TrainingBatch
    from batchwright.loaders.chat_checks import Finding, Rows
    from batchwright.prepare.chat.spans import Encoded
    from batchwright.prepare.chat.step import Chat, Prepared

__all__ = ["EXAMPLES", "SUMMARY", "add_arguments", "run"]

SUMMARY = "find what is wrong with data before a run does"

EXAMPLES = """\
examples:
  batchwright doctor chat sft.jsonl --tokenizer tokenizer.json
  batchwright doctor chat sft.jsonl --tokenizer tokenizer.json --template chatml --max-length 4096
  batchwright doctor chat pairs.parquet --tokenizer tokenizer.json --loss last --html masks.html --json
"""

_MOST_EXAMPLES = 3
_GIVE_UP_AFTER = 100
"""Rows that all fail in the same way: the rest would too."""


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
        help="what becomes of rows over length (drop)",
    )
    chat.add_argument("--loss", help="assistant, last, all, or roles such as user+assistant (assistant; pairs: last)")
    chat.add_argument("--format", help="messages, sharegpt, alpaca, prompt_completion or preference (the first row's)")
    add_renames(chat)
    chat.add_argument("--rows", type=whole_number, default=1000, metavar="N", help="how many rows to check (1000)")
    chat.add_argument("--show", type=whole_number, default=2, metavar="N", help="rows to show with their masks (2)")
    chat.add_argument("--html", metavar="PAGE", help="write these rows as a page, too")
    add_json(chat)


def run(arguments: argparse.Namespace) -> int:
    from batchwright.base.checks import at_least

    at_least(2, max_length=arguments.max_length)
    at_least(1, rows=arguments.rows)
    return _chat(arguments)


@dataclass(slots=True)
class _Checkup:
    """What was read of a file of conversations."""

    step: Chat
    """It knows its format as soon as a row has told."""
    num_rows: int = 0
    prepared: list[Prepared] = field(default_factory=list)
    places: list[dict[str, Any]] = field(default_factory=list)
    """Where each of them was read."""
    faults: dict[str, list[tuple[dict[str, Any], str, str]]] = field(default_factory=dict)
    """By kind: (where, reason, remedy) of rows that cannot be used."""

    def refuse(self, kind: str, where: dict[str, Any], reason: str, remedy: str) -> None:
        self.faults.setdefault(kind, []).append((where, reason, remedy))


def _chat(arguments: argparse.Namespace) -> int:
    from batchwright.loaders.chat_checks import Settings, facts_of, findings_of
    from batchwright.prepare.chat.policy import LossPolicy
    from batchwright.prepare.chat.step import chat

    policy = None if arguments.loss is None else LossPolicy.of(arguments.loss)
    keep_newest = arguments.max_length if arguments.truncation == "drop_oldest" else None
    step = chat(
        arguments.tokenizer,
        arguments.template,
        format=arguments.format,
        columns=arguments.columns,
        roles=arguments.roles,
        keep_newest=keep_newest,
    )
    checkup = _read(arguments.file, step, arguments.rows)
    encoded = _encode(checkup)
    info = checkup.step.info()
    findings = [*_row_findings(checkup), *_layout_finding(checkup)]
    if encoded:
        rows = _rows_of(encoded, checkup.places)
        if policy is None:
            policy = LossPolicy.of("last" if rows.spans["side"].any() else "assistant")
        pad, of_pad = _pad_of(info, step.tokenizer)
        cuts = arguments.truncation if arguments.truncation.startswith("keep") else "drop"
        settings = Settings(policy, arguments.max_length, cuts, pad)
        findings += [*of_pad, *findings_of(rows, facts_of(info, step.tokenizer), settings)]
        findings += [*_check_said(checkup, rows), *_check_names(checkup), *_check_tools(checkup)]
    findings.sort(key=lambda finding: not finding.is_failure)
    ok = not any(finding.is_failure for finding in findings)
    shown = (
        _batch_of(encoded[: arguments.show], checkup.places, policy) if arguments.show and encoded and policy else None
    )
    if arguments.json:
        print_json(
            {
                "ok": ok,
                "rows": checkup.num_rows,
                "usable": len(encoded),
                "template": info["chat"]["template"],
                "end_of_turn": info["chat"]["end_of_turn"],
                "tokenizer": info["name"],
                "loss": None if policy is None else str(policy),
                "findings": [asdict(finding) for finding in findings],
            }
        )
    else:
        _print(arguments, checkup, findings, ok)
    if shown is not None:
        _show(shown, checkup.step, arguments)
    return 0 if ok else 1


# Reading


def _read(paths: list[str], step: Chat, count: int) -> _Checkup:
    """The first rows of some files, rendered. What cannot be used is kept with its reason."""
    from batchwright.baking import DatasetRecipe
    from batchwright.baking.inputs import Inputs
    from batchwright.baking.work import plan_work
    from batchwright.prepare.chat.faults import ChatError
    from batchwright.prepare.chat.formats import detect
    from batchwright.sources.formats import Malformed
    from batchwright.store.layout import is_store

    if is_store(local_path(file=paths[0])):
        raise SpecError(
            f"{paths[0]} is a store, and this looks at raw conversations",
            parameter="FILE",
            remedy="the files that it was baked from; ConversationDataLoader checks a store when it opens it",
        )
    source = paths if len(paths) > 1 else paths[0]
    recipe = DatasetRecipe().add_ingredient(source, name="conversations").prepare_step(step)
    (work,) = plan_work(recipe, Inputs.of(recipe, shuffle=False), "skip", shuffle=False)
    checkup = _Checkup(step)
    for where, row in _rows(work):
        if checkup.num_rows >= count or _is_hopeless(checkup):
            break
        checkup.num_rows += 1
        if isinstance(row, Malformed):
            checkup.refuse(row.kind, where, row.reason, row.remedy)
            continue
        try:
            if checkup.step.layout is None:
                checkup.step = replace(checkup.step, layout=detect(row))
            prepared = checkup.step.prepare(row)
        except ChatError as error:
            turn = {} if error.turn is None else {"turn": error.turn}
            checkup.refuse(error.kind, where | turn, error.reason, error.remedy)
            continue
        checkup.prepared.append(prepared)
        checkup.places.append(where)
    if not checkup.num_rows:
        raise SpecError("there are no rows to check", parameter="FILE", remedy="a file with a conversation in it")
    return checkup


def _rows(work: Work) -> Iterator[tuple[dict[str, Any], Any]]:
    """(where it is, the row or why there is none)."""
    from batchwright.prepare.documents import read_documents
    from batchwright.sources.faults import place
    from batchwright.sources.formats import Malformed
    from batchwright.sources.units import EndOfSpan

    for unit in work.units:
        first: dict[int, dict[str, Any]] = {}
        for span, number, text, row in read_documents(unit, work.job.formats, None, None):
            if isinstance(text, EndOfSpan):
                continue
            base = first.setdefault(span, place(unit, span, 0, work.job.formats))
            where = {name: value + number if name in ("line", "row") else value for name, value in base.items()}
            yield where, text if isinstance(text, Malformed) else row


def _is_hopeless(checkup: _Checkup) -> bool:
    return not checkup.prepared and any(len(faults) >= _GIVE_UP_AFTER for faults in checkup.faults.values())


def _encode(checkup: _Checkup) -> list[Encoded]:
    """Tokens and spans; rows that the tokenizer refuses are moved to the faults."""
    while checkup.prepared:
        try:
            return checkup.step.encode(checkup.prepared)
        except TokenizerError as error:
            if "number" not in error.where:
                raise
            number = int(error.where["number"])  # type: ignore[call-overload]
            checkup.prepared.pop(number)
            checkup.refuse("cannot be encoded", checkup.places.pop(number), error.headline, error.remedy or "")
    return []


def _rows_of(encoded: list[Encoded], places: list[dict[str, Any]]) -> Rows:
    import numpy as np

    from batchwright.loaders.chat_checks import Rows

    spans = np.concatenate([one.spans for one in encoded])
    return Rows(
        np.concatenate([one.tokens for one in encoded]),
        np.cumsum([0, *(len(one.tokens) for one in encoded)], dtype=np.int64),
        np.cumsum([0, *(len(one.spans) for one in encoded)], dtype=np.int64),
        {name: spans[name] for name in spans.dtype.names or ()},
        lambda number: dict(places[number]),
    )


# What only rows can tell, and tokens cannot


def _row_findings(checkup: _Checkup) -> Iterator[Finding]:
    """Rows that a bake would refuse: each kind once, with a few of them."""
    from batchwright.loaders.chat_checks import Finding

    for kind, faults in checkup.faults.items():
        examples = tuple(where | ({"why": why} if why else {}) for where, why, _ in faults[:_MOST_EXAMPLES])
        remedy = next((remedy for _, _, remedy in faults if remedy), "")
        share = f"{len(faults):,} of {counted(checkup.num_rows, 'row')} cannot be used"
        yield Finding(kind, True, share, examples, remedy or "mend these rows, or on_error='skip' leaves them out")


def _layout_finding(checkup: _Checkup) -> Iterator[Finding]:
    from batchwright.loaders.chat_checks import Finding

    if checkup.step.layout is not None:
        yield Finding("format", False, str(checkup.step.layout))


def _pad_of(info: dict[str, Any], tokenizer: Any) -> tuple[int | None, list[Finding]]:
    """The token that a loader would fill up with, or that it would ask for one."""
    from batchwright.loaders.chat_checks import Finding
    from batchwright.loaders.conversation import pad_token_of

    try:
        return pad_token_of(info, getattr(tokenizer, "vocab", {}), None), []
    except SpecError as error:
        return None, [Finding("no pad", False, error.headline, remedy=error.remedy or "")]


def _check_said(checkup: _Checkup, rows: Rows) -> Iterator[Finding]:
    """What an assistant's tokens say, decoded, must hold what the message says: found without the template's spans."""
    from batchwright.loaders.chat_checks import Finding
    from batchwright.prepare.chat.spans import ROLES, TEXT

    tokenizer, spans = checkup.step.tokenizer, rows.spans
    for number, prepared in enumerate(checkup.prepared):
        at = int(rows.borders[number])
        said: dict[tuple[int, int], str] = {}
        start = 0
        for span in range(int(rows.starts[number]), int(rows.starts[number + 1])):
            stop = int(spans["stop"][span])
            if spans["part"][span] == TEXT and spans["role"][span] == ROLES.index("assistant"):
                key = int(spans["side"][span]), int(spans["turn"][span])
                said[key] = said.get(key, "") + (tokenizer.decode(rows.tokens[at + start : at + stop]) or "")
            start = stop
        for (side, turn), text in said.items():
            messages = prepared.conversations[side]["messages"]
            if checkup.step.keep_newest is not None and len(messages) > _num_turns(rows, number, side):
                continue  # its oldest turns are gone, and the others have other numbers
            content = messages[turn]["content"]
            if "think>" in content or _squeezed(content) in _squeezed(text):
                continue  # templates may take reasoning out
            (ids,) = tokenizer.encode_batch([content])
            if _squeezed(tokenizer.decode(ids) or "") == _squeezed(content):
                where = rows.where(number) | {"turn": turn}
                what = "the tokens marked as an answer are not those of the message"
                yield Finding("wrong mask", True, what, (where,), "report this template and this row")
                return


def _num_turns(rows: Rows, number: int, side: int) -> int:
    mine = slice(int(rows.starts[number]), int(rows.starts[number + 1]))
    return int(rows.spans["turn"][mine][rows.spans["side"][mine] == side].max()) + 1


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _check_names(checkup: _Checkup) -> Iterator[Finding]:
    """Names of special tokens inside of messages: text that was rendered before, or somebody's words."""
    from batchwright.loaders.chat_checks import Finding

    end = checkup.step.template.end_of_turn
    names = {*getattr(checkup.step.tokenizer, "special", ()), *([end] if end else ())}
    pattern = re.compile("|".join(re.escape(name) for name in sorted(names, key=len, reverse=True) if len(name) > 2))
    if not pattern.pattern:
        return
    found: list[dict[str, Any]] = []
    first = ""
    for prepared, where in zip(checkup.prepared, checkup.places, strict=True):
        messages = [m for conversation in prepared.conversations for m in conversation["messages"]]
        turn = next((n for n, m in enumerate(messages) if pattern.search(m["content"])), None)
        if turn is not None:
            found.append(where | {"turn": turn % len(prepared.conversations[0]["messages"])})
            first = first or next(iter(pattern.findall(messages[turn]["content"])))
    if found:
        yield Finding(
            "marker in a message",
            False,
            f"{len(found):,} of {counted(len(checkup.prepared), 'row')} have the name of a special token in a message, "
            f"such as {first}: it is encoded as plain text",
            tuple(found[:_MOST_EXAMPLES]),
            "if these texts were rendered by a template before, start from the conversations",
        )


def _check_tools(checkup: _Checkup) -> Iterator[Finding]:
    """Tools that a template does not write: silent, where no message of the row calls one."""
    from batchwright.loaders.chat_checks import Finding

    found = [
        where
        for prepared, where in zip(checkup.prepared, checkup.places, strict=True)
        if any(
            name not in side.text
            for conversation, side in zip(prepared.conversations, prepared.sides, strict=True)
            for name in _tool_names(conversation)
        )
    ]
    if found:
        yield Finding(
            "tools are not written",
            False,
            f"{len(found):,} of {counted(len(checkup.prepared), 'row')} have tools that the template "
            f"{checkup.step.template.name!r} does not write: a model would not be told of them",
            tuple(found[:_MOST_EXAMPLES]),
            "a template that writes tools: the tokenizer's own, 'qwen' or 'mistral'",
        )


def _tool_names(conversation: dict[str, Any]) -> Iterator[str]:
    for tool in conversation.get("tools") or ():
        definition = tool.get("function")
        name = (definition if isinstance(definition, dict) else tool).get("name")
        if isinstance(name, str):
            yield name


# What is printed


def _print(arguments: argparse.Namespace, checkup: _Checkup, findings: list[Finding], ok: bool) -> None:
    from batchwright.loaders.chat_checks import place_in_words

    step = checkup.step
    is_all = checkup.num_rows < arguments.rows and not _is_hopeless(checkup)
    is_own = step.template.name.partition(":")[0] == step.tokenizer.name
    print(
        f"{printable(' '.join(arguments.file))}: {'' if is_all else 'the first '}{counted(checkup.num_rows, 'row')}, "
        f"template {step.template.name}{' (its own)' if is_own else ''}, end of turn {step.template.end_of_turn}, "
        f"tokenizer {step.tokenizer.name}"
    )
    for finding in findings:
        mark = "FAILED" if finding.is_failure else "note"
        print(f"{mark:<7} {finding.kind}: {printable(finding.headline)}")
        for place in finding.examples:
            print(f"          {printable(place_in_words(place))}")
        if finding.remedy:
            print(f"          try: {printable(finding.remedy)}")
    failures = sum(finding.is_failure for finding in findings)
    print("ok: no check failed" if ok else f"{counted(failures, 'check')} failed")


def _batch_of(encoded: list[Encoded], places: list[dict[str, Any]], policy: Any) -> TrainingBatch:
    """A few rows as a batch, with its roles and turns."""
    from batchwright.cli.masks import batch_of_documents, rows_of_conversation
    from batchwright.loaders.chat_checks import place_in_words

    rows = [
        row
        for one, place in zip(encoded, places, strict=False)
        for row in rows_of_conversation(
            one.tokens,
            {name: one.spans[name] for name in one.spans.dtype.names or ()},
            policy,
            place_in_words(place),
        )
    ]
    return batch_of_documents(rows)


def _show(batch: TrainingBatch, step: Chat, arguments: argparse.Namespace) -> None:
    from batchwright.batches.looking import look

    shown = look(batch, rows=len(batch), tokenizer=step.tokenizer)
    if not arguments.json:
        print(f"\n{shown}")
    if arguments.html:
        local_path(html=arguments.html).write_text(shown.html(), encoding="utf-8")
        print(f"wrote {arguments.html}", file=sys.stderr)
