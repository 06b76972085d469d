"""Describe a store, a buffer or a plan.

For a store: its sources, tokenizer, what the bake dropped and why, versions, plans and raw files. For STORE PLAN, or a
plan file: what `batchwright plan` prints. For a buffer, also while a process writes to it: rows, columns, origins,
settings, versions, and the sizes of journal and blocks. --version is then a version's name or number.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import batchwright as bw
from batchwright.base.errors import PlanError, SpecError
from batchwright.base.words import bytes_in_words, counted
from batchwright.cli.output import add_json, print_facts, printable, store_facts
from batchwright.cli.values import is_buffer

if TYPE_CHECKING:
    from batchwright.buffer.reads import Reads

SUMMARY = "what is in a store or a buffer, or what a plan is"

EXAMPLES = """\
examples:
  batchwright info corpus.store
  batchwright info corpus.store --files
  batchwright info corpus.store 3f2a
  batchwright info my-buffer --version "after epoch 3"
"""

_FILES_SHOWN = 5
_ORIGINS_SHOWN = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", metavar="STORE", help="a store, a buffer, or a plan file")
    parser.add_argument("plan", metavar="PLAN", nargs="?", help="a plan that is kept with the store")
    parser.add_argument("--version", metavar="ID", help="an older version of the store, or a version of the buffer")
    parser.add_argument("--files", action="store_true", help="list all raw files")
    add_json(parser)


def run(arguments: argparse.Namespace) -> None:
    from batchwright.cli.plan_words import describe
    from batchwright.order.plan_file import state_in
    from batchwright.store.plans import find_plan

    if is_buffer(arguments.store):
        _describe_buffer(arguments)
    elif arguments.plan is not None:
        describe(find_plan(arguments.store, arguments.plan), arguments.store, as_json=arguments.json)
    elif Path(arguments.store).is_file():
        state = state_in(arguments.store)
        if state is not None:
            raise PlanError(
                f"{arguments.store} is a state of plan {state['plan']}",
                remedy=f"batchwright info STORE {arguments.store}",
            )
        describe(bw.Plan.load(arguments.store), as_json=arguments.json)
    else:
        store = bw.Store(arguments.store, version=arguments.version)
        facts = _facts(store, all_files=arguments.files) | {"store": arguments.store}
        print_facts(facts, _lines(facts), as_json=arguments.json)


# A store


def _facts(store: bw.Store, *, all_files: bool) -> dict[str, Any]:
    from batchwright.store.layout import current_version
    from batchwright.store.plans import list_plans
    from batchwright.store.versions import list_versions

    paths, sizes = store.files["path"], store.files["num_bytes"]
    shown = len(paths)
    if not all_files:
        shown = min(shown, _FILES_SHOWN)
    names = ("split", "num_documents", "num_tokens", "num_shards", "fingerprint")
    return store_facts(store) | {
        "is_current": store.version == current_version(store.path),
        "versions": list_versions(store.path),
        "num_bytes": store.num_bytes,
        "adopted": store.manifest.adopted,
        "token_dtype": store.manifest.token_dtype,
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
    version = f"  version    {facts['version']} ({'current' if facts['is_current'] else 'not the current one'})"
    others = len(facts["versions"]) - 1
    if others:
        version += f", {counted(others, 'other')} beside it (`batchwright gc` removes unused ones)"
    yield version
    yield f"  plans      {', '.join(facts['plans']) or 'none yet: a loader keeps its plan'}"
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


# A buffer


def _describe_buffer(arguments: argparse.Namespace) -> None:
    """Only reads, and never disturbs the writer."""
    path, version = arguments.store, arguments.version
    for given in (arguments.plan, "--files" if arguments.files else None):
        if given is not None:
            raise SpecError(f"{given} does not apply: {path} is a buffer", remedy=f"leave out {given}")
    with bw.DatasetBuffer(path=path, read_only=True) as buffer:
        facts = {"buffer": path, **_buffer_facts(path, buffer, _version(buffer, version))}
    print_facts(facts, _buffer_lines(facts, version), as_json=arguments.json)


def _version(buffer: bw.DatasetBuffer, name: str | None) -> Reads:
    """A version by its name, or by its number where none has such a name; by default, what the buffer has now."""
    if name is None:
        return buffer
    if name.isdecimal() and name not in [version.name for version in buffer.versions()]:
        return buffer.at(int(name))
    return buffer.at(name)


def _buffer_facts(path: str, buffer: bw.DatasetBuffer, rows: Reads) -> dict[str, Any]:
    journals, blocks = list(Path(path).glob("journal-*.log")), list(Path(path).glob("blocks/*.arrow"))
    return {
        "num_rows": len(rows),
        "number": rows.number,
        "kind": rows.kind,
        "fingerprint": rows.content_fingerprint(),
        "columns": [
            {"name": field.name, "type": str(field), "required": field.required} for field in rows._look().schema
        ],
        "origins": [
            {"name": found["values"], "num_rows": found["counts"]}
            for found in rows.provenance()["origin"].value_counts().to_pylist()
        ],
        "settings": {"max_size": buffer.max_size, "drop_strategy": buffer.drop_strategy, "seed": buffer.seed},
        "versions": [
            {"number": version.number, "name": version.name, "time": str(version.time), "num_rows": version.rows}
            for version in buffer.versions()
        ],
        "journal_bytes": sum(map(_size_of, journals)),
        "num_block_files": len(blocks),
        "block_bytes": sum(map(_size_of, blocks)),
    }


def _size_of(file: Path) -> int:
    """The size of a file that a writer may remove meanwhile."""
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def _buffer_lines(facts: dict[str, Any], version: str | None) -> Iterator[str]:
    heading = f"buffer {facts['buffer']}"
    if version is not None:
        heading += f" at version {printable(version)!r}"
    yield f"{heading} ({facts['fingerprint'][:16]})"
    yield f"  rows       {facts['num_rows']:,}, after {counted(facts['number'], 'change')}"
    for column in facts["columns"]:
        line = f"  column     {printable(column['name'])}  {column['type']}"
        if not column["required"]:
            line += ", optional"
        yield line
    for origin in facts["origins"][:_ORIGINS_SHOWN]:
        if origin["name"] is not None:
            yield f"  origin     {counted(origin['num_rows'], 'row')} from {printable(origin['name'])!r}"
    yield f"  settings   {_settings_in_words(**facts['settings'])}"
    for kept in facts["versions"]:
        after = f"after change {kept['number']:,}, {kept['time'][:19]}"
        yield f"  version    {kept['name']}: {counted(kept['num_rows'], 'row')}, {after}"
    yield f"  journal    {bytes_in_words(facts['journal_bytes'])}"
    yield f"  blocks     {counted(facts['num_block_files'], 'file')}, {bytes_in_words(facts['block_bytes'])}"
    if len(facts["origins"]) > _ORIGINS_SHOWN:
        yield f"  and {len(facts['origins']) - _ORIGINS_SHOWN:,} more origins: --json has all"


def _settings_in_words(max_size: int | None, drop_strategy: str, seed: int) -> str:
    if max_size is None:
        return f"no limit, seed {seed}"
    return f"at most {max_size:,}, dropping by {printable(drop_strategy)}, seed {seed}"
