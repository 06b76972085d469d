"""What is in a store or a buffer, or what a plan is.

Of a store: its sources, tokenizer, what the bake dropped and why, versions, plans and raw files. STORE PLAN, or a
plan's file alone, says what `batchwright plan` says. Of a buffer's folder: rows, columns, origins, settings, versions,
what the journal and the blocks take; --version has a version's name or number.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchwright.base.errors import PlanError, SpecError
from batchwright.base.words import bytes_in_words
from batchwright.cli.common import add_json, counted, print_json, printable
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
    tokenizer = facts["tokenizer"]
    is_text = tokenizer["eos"] is not None and "chat" not in tokenizer
    end = "" if not is_text else f"; documents end with {tokenizer['eos']} ({tokenizer['eos_from']})"
    current = "current" if facts["is_current"] else "not the current one"
    lines = [
        f"store {facts['store']} ({facts['fingerprint']})",
        f"  content    {counted(facts['num_documents'], 'document')}, {counted(facts['num_tokens'], 'token')} as "
        f"{facts['token_dtype']}, {bytes_in_words(facts['num_bytes'])}",
        f"  tokenizer  {tokenizer['name']}, {tokenizer['vocab_size']:,} ids{end}",
    ]
    if "chat" in tokenizer:
        lines += _of_conversations(tokenizer["chat"], facts["report"].get("layouts", {}))
    lines += [
        f"  source     {source['name']} ({source['split']}): {counted(source['num_documents'], 'document')}, "
        f"{counted(source['num_tokens'], 'token')}, {counted(source['num_shards'], 'shard')}"
        for source in facts["sources"]
    ]
    from batchwright.prepare.tokenize import special_in_words

    lines += [f"  special    {printable(line)}" for line in special_in_words(facts["report"])]
    for name, part in facts["report"]["ingredients"].items():
        if part["dropped"]:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in part["dropped"].items())
            lines.append(
                f"  dropped    {name}: {reasons} ({part['documents']:,} of {counted(part['rows_read'], 'row')} kept)"
            )
    lines += [
        f"  for example  {printable(str(file))}, row {row}: {printable(str(reason))}"
        for file, row, reason in facts["report"]["examples"][:3]
    ]
    older = len(facts["versions"]) - 1
    beside = f", {counted(older, 'other')} beside it (`batchwright gc` removes what is not used)" if older else ""
    lines.append(f"  version    {facts['version']} ({current}){beside}")
    lines.append(f"  plans      {', '.join(facts['plans']) or 'none yet: opening a loader keeps one'}")
    lines += [f"  note       {note}" for note in facts["report"].get("notes", ())]
    lines.append(f"  files      {facts['num_files']:,}{', adopted where they lie' if facts['adopted'] else ''}")
    lines += [f"    {printable(file['path'])}  {bytes_in_words(file['num_bytes'])}" for file in facts["files"]]
    if (more := facts["num_files"] - len(facts["files"])) > 0:
        lines.append(f"    and {more:,} more: --files lists all")
    return "\n".join(lines)


def _of_conversations(chat: dict[str, Any], layouts: dict[str, str]) -> list[str]:
    """How conversations became text, and where in a row they are."""
    ends = chat["end_of_turn"]
    said = f"; turns end with {ends!r}" if ends else "; it has no end of turn"
    newest = f"; only the newest turns that fit {chat['keep_newest']:,} tokens" if chat["keep_newest"] else ""
    return [
        f"  template   {printable(chat['template'])}{said}{newest}",
        *(f"  format     {printable(name)}: {printable(layout)}" for name, layout in layouts.items()),
    ]
