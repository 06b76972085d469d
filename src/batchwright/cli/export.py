"""Write a store's documents in the formats of other tools.

The folder OUT gets files for each source and split: SOURCE-SPLIT.bin and .idx (megatron), .npy and .offsets.npy (npy),
.parquet or .jsonl (one row per document: source, split, file, row, tokens, text; for conversations also spans, with the
role and turn of each token, which the other formats do not have). Files appear when all are written, and replace
others only with --force.
"""

from __future__ import annotations

import argparse

import batchwright as bw
from batchwright.base.words import bytes_in_words
from batchwright.cli.output import add_json, print_json

SUMMARY = "write a store's documents for other tools"

EXAMPLES = """\
examples:
  batchwright export corpus.store out --to megatron
  batchwright export corpus.store out --to jsonl --source web --split val
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("store", metavar="STORE")
    add("out", metavar="OUT", help="the folder to write into")
    add("--to", required=True, choices=("megatron", "npy", "parquet", "jsonl"), help="the format")
    add("--source", metavar="NAME", help="only this source")
    add("--split", choices=("train", "val"), help="only this split")
    add("--version", metavar="ID", help="an older version of the store")
    add("--force", action="store_true", help="overwrite existing files")
    add("--quiet", action="store_true", help="no progress")
    add_json(parser)


def run(arguments: argparse.Namespace) -> None:
    store = bw.open_store(arguments.store, version=arguments.version)
    settings = {name: getattr(arguments, name) for name in ("to", "source", "split", "force")}
    files = bw.export(store, arguments.out, show_progress=not arguments.quiet, **settings)
    sizes = {str(file): file.stat().st_size for file in files}
    if arguments.json:
        listed = [{"path": file, "num_bytes": size} for file, size in sizes.items()]
        print_json({"store": str(store.path), "version": store.version, "to": arguments.to, "files": listed})
    else:
        for file, size in sizes.items():
            print(f"{file}  {bytes_in_words(size)}")
