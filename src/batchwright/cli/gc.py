"""Remove old versions of a store, and the work of unfinished bakes.

A version stays while a process has it open, and while a kept plan needs its content, so that a stopped run can resume.
`batchwright plan forget STORE PLAN` releases a plan. Symbolic links stay and are not followed. Indexes of packed rows
are removed, and made again on demand.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from batchwright.base.words import bytes_in_words
from batchwright.cli.output import add_json, print_json
from batchwright.cli.values import whole_number

if TYPE_CHECKING:
    from batchwright.store.versions import Removal

SUMMARY = "remove old versions and unfinished work of a store"

EXAMPLES = """\
examples:
  batchwright gc corpus.store --dry-run
  batchwright gc corpus.store --keep 1
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", metavar="STORE")
    parser.add_argument("--keep", type=whole_number, default=0, metavar="N", help="keep the newest N old versions (0)")
    parser.add_argument("--dry-run", action="store_true", help="list what would be removed, and remove nothing")
    add_json(parser)


def run(arguments: argparse.Namespace) -> None:
    from batchwright.base.checks import at_least
    from batchwright.store import collect_garbage

    removals = collect_garbage(arguments.store, keep=at_least(0, keep=arguments.keep), dry_run=bool(arguments.dry_run))
    num_bytes = sum(removal.num_bytes for removal in removals if not removal.is_kept)
    if arguments.json:
        answer = {"store": arguments.store, "dry_run": arguments.dry_run, "num_bytes": num_bytes}
        print_json(answer | {"removals": [asdict(removal) for removal in removals]})
        return
    verb = "would remove" if arguments.dry_run else "removed"
    for removal in removals:
        line = f"{_fate(removal, verb)}  {removal.folder}  {bytes_in_words(removal.num_bytes)}"
        if removal.plans:
            line += f"  needed by plan {', '.join(removal.plans)}"
        print(line)
    if all(removal.is_kept for removal in removals):
        print("nothing to remove")
    else:
        print(f"{verb} {bytes_in_words(num_bytes)}")


def _fate(removal: Removal, verb: str) -> str:
    if removal.is_link:
        return "a link, left"
    if removal.in_use:
        return "in use, left"
    if removal.plans:
        return "kept"
    return verb
