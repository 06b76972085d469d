"""Remove what no longer serves: versions of a store that are not current, and the work of bakes that did not finish.

A version that some process has open stays, and so do all plans. How documents were packed into rows goes, and is made
again where it is needed.
"""

from __future__ import annotations

import argparse

from batchwright.cli.common import add_json, bytes_in_words, print_json, whole_number

__all__ = ["EXAMPLES", "SUMMARY", "add_arguments", "run"]

SUMMARY = "remove old versions and unfinished work of a store"

EXAMPLES = """\
examples:
  batchwright gc corpus.store --dry-run
  batchwright gc corpus.store --keep 1
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", metavar="STORE")
    parser.add_argument("--keep", type=whole_number, default=0, metavar="N", help="keep the newest N old versions (0)")
    parser.add_argument("--dry-run", action="store_true", help="say what would be removed, and remove nothing")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    from batchwright.spec import at_least
    from batchwright.store import collect_garbage

    removals = collect_garbage(arguments.store, keep=at_least(0, keep=arguments.keep), dry_run=bool(arguments.dry_run))
    free = sum(removal.num_bytes for removal in removals if not removal.in_use)
    if arguments.json:
        print_json(
            {
                "store": arguments.store,
                "dry_run": arguments.dry_run,
                "num_bytes": free,
                "removals": [{"folder": str(r.folder), "num_bytes": r.num_bytes, "in_use": r.in_use} for r in removals],
            }
        )
        return 0
    verb = "would remove" if arguments.dry_run else "removed"
    for removal in removals:
        what = "in use, left" if removal.in_use else verb
        print(f"{what}  {removal.folder}  {bytes_in_words(removal.num_bytes)}")
    print(f"{verb} {bytes_in_words(free)}" if removals else "nothing to remove")
    return 0
