"""Describe a store, a buffer or a plan.

Of a store: its sources, tokenizer, what the bake dropped and why, versions, plans and raw files. STORE PLAN, or a
plan's file alone, says what `batchwright plan` says. Of a buffer's folder: rows, columns, origins, settings, versions,
what the journal and the blocks take; --version has a version's name or number.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchwright.base.errors import PlanError, SpecError
from batchwright.base.words import bytes_in_words, counted
from batchwright.cli.output import add_json, print_json, printable
from batchwright.cli.rows import describe_buffer, is_buffer

if TYPE_CHECKING:
    from batchwright.store import Store

__all__ = ["EXAMPLES", "SUMMARY", "add_arguments", "run"]

SUMMARY = "what is in a store or a buffer, or what a plan is"

EXAMPLES = """\
examples:
  batchwright info corpus.store
  batchwright info corpus.store --files
  batchwright info corpus.store 3f2a
  batchwright info my-buffer --version "after epoch 3"
"""

_FILES_SHOWN = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", metavar="STORE", help="a store, a buffer's folder, or a plan's file")
    parser.add_argument("plan", metavar="PLAN", nargs="?", help="a plan that is kept with the store")
    parser.add_argument("--version", metavar="ID", help="an older version of the store, or a version of the buffer")
    parser.add_argument("--files", action="store_true", help="list all raw files")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    from batchwright.cli.plan import describe, streams_of
    from batchwright.order.plan import Plan
    from batchwright.order.plan_file import state_in
    from batchwright.store import Store
    from batchwright.store.plans import find_plan

    if is_buffer(arguments.store):
        _refuse_what_is_of_stores(arguments)
        return describe_buffer(arguments.store, version=arguments.version, as_json=arguments.json)
    if arguments.plan is not None:
        plan = find_plan(arguments.store, arguments.plan)
        return describe(plan, streams=streams_of(arguments.store, plan), as_json=arguments.json)
    if Path(arguments.store).is_file():
        state = state_in(arguments.store)
        if state is not None:
            raise PlanError(
                f"{arguments.store} is a state of plan {state['plan']}",
                remedy=f"batchwright info STORE {arguments.store}",
            )
        return describe(Plan.load(arguments.store), as_json=arguments.json)
    store = Store(arguments.store, version=arguments.version)
    facts = {"store": arguments.store, **_facts(store, all_files=arguments.files)}
    if arguments.json:
        print_json(facts)
    else:
        print(_render(facts))
    return 0


def _refuse_what_is_of_stores(arguments: argparse.Namespace) -> None:
    given = arguments.plan or ("--files" if arguments.files else None)
    if given is not None:
        raise SpecError(f"{given} means nothing here: {arguments.store} is a buffer", remedy=f"leave out {given}")


def _facts(store: Store, *, all_files: bool) -> dict[str, Any]:
    from batchwright.store.layout import current_version
    from batchwright.store.plans import list_plans
    from batchwright.store.versions import list_versions

    paths, sizes = store.files["path"], store.files["num_bytes"]
    shown = len(paths) if all_files else min(len(paths), _FILES_SHOWN)
    return {
        "version": store.version,
        "is_current": store.version == current_version(store.path),
        "versions": list_versions(store.path),
        "fingerprint": store.fingerprint,
        "num_documents": store.num_rows,
        "num_tokens": store.num_tokens,
        "num_bytes": store.num_bytes,
        "adopted": store.manifest.adopted,
        "token_dtype": store.manifest.token_dtype,
        "tokenizer": store.manifest.tokenizer,
        "sources": [
            {
                "name": stream.source,
                "split": stream.split,
                "num_documents": stream.num_documents,
                "num_tokens": stream.num_tokens,
                "num_shards": stream.num_shards,
                "fingerprint": stream.fingerprint,
            }
            for stream in store.manifest.streams
        ],
        "report": store.report,
        "plans": [plan.fingerprint for plan in list_plans(store.path)],
        "num_files": len(paths),
        "files": [{"path": str(paths[i]), "num_bytes": int(sizes[i])} for i in range(shown)],
    }


def _render(facts: dict[str, Any]) -> str:
    from batchwright.prepare.tokenize import special_in_words

    tokenizer, report = facts["tokenizer"], facts["report"]
    lines = [
        f"store {facts['store']} ({facts['fingerprint']})",
        f"  content    {counted(facts['num_documents'], 'document')}, {counted(facts['num_tokens'], 'token')} as "
        f"{facts['token_dtype']}, {bytes_in_words(facts['num_bytes'])}",
        *_tokenizer_lines(tokenizer, report.get("layouts", {})),
    ]
    lines += [
        f"  source     {source['name']} ({source['split']}): {counted(source['num_documents'], 'document')}, "
        f"{counted(source['num_tokens'], 'token')}, {counted(source['num_shards'], 'shard')}"
        for source in facts["sources"]
    ]
    lines += [f"  special    {printable(line)}" for line in special_in_words(report)]
    lines += _dropped_lines(report)
    lines.append(_version_line(facts))
    lines.append(f"  plans      {', '.join(facts['plans']) or 'none yet: opening a loader keeps one'}")
    lines += [f"  note       {note}" for note in report.get("notes", ())]
    return "\n".join(lines + _file_lines(facts))


def _tokenizer_lines(tokenizer: dict[str, Any], layouts: dict[str, str]) -> list[str]:
    line = f"  tokenizer  {tokenizer['name']}, {tokenizer['vocab_size']:,} ids"
    if "chat" in tokenizer:
        return [line, *_chat_lines(tokenizer["chat"], layouts)]
    if tokenizer["eos"] is not None:
        line += f"; documents end with {tokenizer['eos']} ({tokenizer['eos_from']})"
    return [line]


def _chat_lines(chat: dict[str, Any], layouts: dict[str, str]) -> list[str]:
    """The template of conversations, and the columns that their rows were read from."""
    line = f"  template   {printable(chat['template'])}; "
    line += f"turns end with {chat['end_of_turn']!r}" if chat["end_of_turn"] else "it has no end of turn"
    if chat["keep_newest"]:
        line += f"; only the newest turns that fit {chat['keep_newest']:,} tokens"
    return [line, *(f"  format     {printable(name)}: {printable(layout)}" for name, layout in layouts.items())]


def _dropped_lines(report: dict[str, Any]) -> list[str]:
    lines = []
    for name, part in report["ingredients"].items():
        if part["dropped"]:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in part["dropped"].items())
            rows = counted(part["rows_read"], "row")
            lines.append(f"  dropped    {name}: {reasons} ({part['documents']:,} of {rows} kept)")
    for file, row, reason in report["examples"][:3]:
        lines.append(f"  for example  {printable(str(file))}, row {row}: {printable(str(reason))}")
    return lines


def _version_line(facts: dict[str, Any]) -> str:
    current = "current" if facts["is_current"] else "not the current one"
    line = f"  version    {facts['version']} ({current})"
    older = len(facts["versions"]) - 1
    if older:
        line += f", {counted(older, 'other')} beside it (`batchwright gc` removes what is not used)"
    return line


def _file_lines(facts: dict[str, Any]) -> list[str]:
    line = f"  files      {facts['num_files']:,}"
    if facts["adopted"]:
        line += ", adopted in place"
    lines = [line, *(f"    {printable(f['path'])}  {bytes_in_words(f['num_bytes'])}" for f in facts["files"])]
    more = facts["num_files"] - len(facts["files"])
    if more > 0:
        lines.append(f"    and {more:,} more: --files lists all")
    return lines
