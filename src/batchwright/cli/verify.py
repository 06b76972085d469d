"""Read every byte of a store, or of a buffer's folder, and compare it with its hashes.

Opening a store checks the existence and sizes of its shards. This also finds changed bytes. Each damaged file is a line
on stdout, and the exit code is then 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import batchwright as bw
from batchwright.base.checks import local_path
from batchwright.base.errors import StoreError
from batchwright.base.words import bytes_in_words, counted
from batchwright.cli.output import add_json, print_damage, print_facts, print_json
from batchwright.cli.values import is_buffer

SUMMARY = "check every byte of a store or a buffer against its hashes"

EXAMPLES = """\
examples:
  batchwright verify corpus.store
  batchwright verify corpus.store --all --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", metavar="STORE")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--version", metavar="ID", help="an older version instead of the current one")
    which.add_argument("--all", action="store_true", help="all complete versions")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    from batchwright.store.layout import current_version, is_store
    from batchwright.store.versions import list_versions

    root = local_path(store=arguments.store)
    if is_buffer(arguments.store):
        return _verify_buffer(root, as_json=arguments.json)
    if not is_store(root):
        current_version(root)  # raises, with what it is instead
    versions = list_versions(root) if arguments.all else [arguments.version]
    answers = [_verify(root, version) for version in versions]
    damaged = [answer for answer in answers if answer["damaged"]]
    print_facts(
        {"store": str(root), "ok": not damaged, "versions": answers}, _lines(root, answers), as_json=arguments.json
    )
    if damaged and not arguments.json:
        num_files = sum(len(answer["damaged"]) for answer in damaged)
        print_damage(root, num_files, [damaged[0]["remedy"]])
    return int(bool(damaged))


def _lines(root: Path, answers: list[dict[str, Any]]) -> Iterator[str]:
    for answer in answers:
        for damage in answer["damaged"]:
            yield f"{damage['file']}: {damage['what']}"
        if not answer["damaged"]:
            size = f"{counted(answer['num_shards'], 'shard')}, {bytes_in_words(answer['num_bytes'])}"
            yield f"{root} version {answer['version']}: whole ({size})"


def _verify_buffer(root: Path, *, as_json: bool) -> int:
    damage: str | None = None
    try:
        with bw.DatasetBuffer(path=root, read_only=True) as buffer:
            buffer.verify()
    except StoreError as error:
        damage = str(error)
    if as_json:
        print_json({"buffer": str(root), "ok": damage is None, "damage": damage})
    elif damage is None:
        print(f"{root}: whole")
    else:
        print(f"batchwright: {damage}", file=sys.stderr)
    return int(damage is not None)


def _verify(root: Path, version: str | None) -> dict[str, Any]:
    from batchwright.store import verify_store
    from batchwright.store.layout import REBAKE

    try:
        store = bw.Store(root, version=version)
    except StoreError as error:
        where = error.where.get("file") or error.where.get("folder") or root
        damaged = [{"file": str(where), "what": error.headline}]
        return {"version": version, "damaged": damaged, "remedy": error.remedy or REBAKE}
    damaged = [{"file": str(damage.file), "what": damage.what} for damage in verify_store(store)]
    answer = {"version": store.version, "damaged": damaged}
    if damaged:
        return answer | {"remedy": store.manifest.repair}
    return answer | {"num_shards": len(store.shards["num_bytes"]), "num_bytes": store.num_bytes}
