"""Describe a store, a buffer or a plan.

Of a store: its sources, tokenizer, what the bake dropped and why, versions, plans and raw files. STORE PLAN, or a
plan's file alone, says what `batchwright plan` says. Of a buffer's folder: rows, columns, origins, settings, versions,
what the journal and the blocks take; --version has a version's name or number.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchwright.base.errors import PlanError, SpecError
from batchwright.base.words import bytes_in_words, counted
from batchwright.cli.output import add_json, print_facts, printable
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


def run(arguments: argparse.Namespace) -> None:
    from batchwright.cli.plan import describe, streams_of
    from batchwright.order.plan import Plan
    from batchwright.order.plan_file import state_in
    from batchwright.store import Store
    from batchwright.store.plans import find_plan

    if is_buffer(arguments.store):
        _refuse_what_is_of_stores(arguments)
        describe_buffer(arguments.store, version=arguments.version, as_json=arguments.json)
    elif arguments.plan is not None:
        plan = find_plan(arguments.store, arguments.plan)
        describe(plan, streams=streams_of(arguments.store, plan), as_json=arguments.json)
    elif Path(arguments.store).is_file():
        state = state_in(arguments.store)
        if state is not None:
            raise PlanError(
                f"{arguments.store} is a state of plan {state['plan']}",
                remedy=f"batchwright info STORE {arguments.store}",
            )
        describe(Plan.load(arguments.store), as_json=arguments.json)
    else:
        store = Store(arguments.store, version=arguments.version)
        facts = {"store": arguments.store, **_facts(store, all_files=arguments.files)}
        print_facts(facts, _lines(facts), as_json=arguments.json)


def _refuse_what_is_of_stores(arguments: argparse.Namespace) -> None:
    given = arguments.plan
    if given is None and arguments.files:
        given = "--files"
    if given is not None:
        raise SpecError(f"{given} means nothing here: {arguments.store} is a buffer", remedy=f"leave out {given}")


def _facts(store: Store, *, all_files: bool) -> dict[str, Any]:
    from batchwright.store.layout import current_version
    from batchwright.store.plans import list_plans
    from batchwright.store.versions import list_versions

    paths, sizes = store.files["path"], store.files["num_bytes"]
    shown = len(paths)
    if not all_files:
        shown = min(shown, _FILES_SHOWN)
    names = ("split", "num_documents", "num_tokens", "num_shards", "fingerprint")
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
            {"name": stream.source, **{name: getattr(stream, name) for name in names}}
            for stream in store.manifest.streams
        ],
        "report": store.report,
        "plans": [plan.fingerprint for plan in list_plans(store.path)],
        "num_files": len(paths),
        "files": [{"path": str(paths[i]), "num_bytes": int(sizes[i])} for i in range(shown)],
    }


def _lines(facts: dict[str, Any]) -> Iterator[str]:
    from batchwright.prepare.tokenize import special_in_words

    report = facts["report"]
    yield f"store {facts['store']} ({facts['fingerprint']})"
    yield (
        f"  content    {counted(facts['num_documents'], 'document')}, {counted(facts['num_tokens'], 'token')} as "
        f"{facts['token_dtype']}, {bytes_in_words(facts['num_bytes'])}"
    )
    yield from _tokenizer_lines(facts["tokenizer"], report.get("layouts", {}))
    for source in facts["sources"]:
        yield (
            f"  source     {source['name']} ({source['split']}): {counted(source['num_documents'], 'document')}, "
            f"{counted(source['num_tokens'], 'token')}, {counted(source['num_shards'], 'shard')}"
        )
    for line in special_in_words(report):
        yield f"  special    {printable(line)}"
    yield from _dropped_lines(report)
    yield _version_line(facts)
    yield f"  plans      {', '.join(facts['plans']) or 'none yet: opening a loader keeps one'}"
    for note in report.get("notes", ()):
        yield f"  note       {note}"
    yield from _file_lines(facts)


def _tokenizer_lines(tokenizer: dict[str, Any], layouts: dict[str, str]) -> Iterator[str]:
    line = f"  tokenizer  {tokenizer['name']}, {tokenizer['vocab_size']:,} ids"
    if "chat" in tokenizer:
        yield line
        yield from _chat_lines(tokenizer["chat"], layouts)
    elif tokenizer["eos"] is not None:
        yield f"{line}; documents end with {tokenizer['eos']} ({tokenizer['eos_from']})"
    else:
        yield line


def _chat_lines(chat: dict[str, Any], layouts: dict[str, str]) -> Iterator[str]:
    """The template of conversations, and the columns that their rows were read from."""
    end = "it has no end of turn"
    if chat["end_of_turn"]:
        end = f"turns end with {chat['end_of_turn']!r}"
    line = f"  template   {printable(chat['template'])}; {end}"
    if chat["keep_newest"]:
        line += f"; only the newest turns that fit {chat['keep_newest']:,} tokens"
    yield line
    for name, layout in layouts.items():
        yield f"  format     {printable(name)}: {printable(layout)}"


def _dropped_lines(report: dict[str, Any]) -> Iterator[str]:
    for name, part in report["ingredients"].items():
        if part["dropped"]:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in part["dropped"].items())
            rows = counted(part["rows_read"], "row")
            yield f"  dropped    {name}: {reasons} ({part['documents']:,} of {rows} kept)"
    for file, row, reason in report["examples"][:3]:
        yield f"  for example  {printable(str(file))}, row {row}: {printable(str(reason))}"


def _version_line(facts: dict[str, Any]) -> str:
    current = "current" if facts["is_current"] else "not the current one"
    line = f"  version    {facts['version']} ({current})"
    older = len(facts["versions"]) - 1
    if older:
        line += f", {counted(older, 'other')} beside it (`batchwright gc` removes what is not used)"
    return line


def _file_lines(facts: dict[str, Any]) -> Iterator[str]:
    line = f"  files      {facts['num_files']:,}"
    if facts["adopted"]:
        line += ", adopted in place"
    yield line
    for file in facts["files"]:
        yield f"    {printable(file['path'])}  {bytes_in_words(file['num_bytes'])}"
    more = facts["num_files"] - len(facts["files"])
    if more > 0:
        yield f"    and {more:,} more: --files lists all"
