"""Write a store's documents in the formats of other tools.

The folder OUT gets files for each source and split: SOURCE-SPLIT.bin and .idx (megatron), .npy and .offsets.npy (npy),
.parquet or .jsonl (a row for each document: source, split, file, row, tokens, text; of conversations also spans, which
say whose turn each token is: the other formats have only tokens). They appear whole or not at all,
and nothing that is there is written over, except with --force.
"""

from __future__ import annotations

import argparse

from batchwright.base.words import bytes_in_words
from batchwright.cli.output import add_json, print_json

__all__ = ["EXAMPLES", "SUMMARY", "add_arguments", "run"]

SUMMARY = "write a store's documents for other tools"

EXAMPLES = """\
examples:
  batchwright export corpus.store out --to megatron
  batchwright export corpus.store out --to jsonl --source web --split val
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", metavar="STORE")
    parser.add_argument("out", metavar="OUT", help="the folder to write into")
    parser.add_argument("--to", required=True, choices=("megatron", "npy", "parquet", "jsonl"), help="the format")
    parser.add_argument("--source", metavar="NAME", help="only this source")
    parser.add_argument("--split", choices=("train", "val"), help="only this split")
    parser.add_argument("--version", metavar="ID", help="an older version of the store")
    parser.add_argument("--force", action="store_true", help="write over files that are there")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    from batchwright.store import open_store
    from batchwright.store.export_tokens import export

    store = open_store(arguments.store, version=arguments.version)
    files = export(
        store,
        arguments.out,
        to=arguments.to,
        source=arguments.source,
        split=arguments.split,
        force=arguments.force,
        show_progress=not arguments.quiet,
    )
    sizes = [file.stat().st_size for file in files]
    if arguments.json:
        listed = [{"path": str(file), "num_bytes": size} for file, size in zip(files, sizes, strict=True)]
        print_json({"store": str(store.path), "version": store.version, "to": arguments.to, "files": listed})
    else:
        for file, size in zip(files, sizes, strict=True):
            print(f"{file}  {bytes_in_words(size)}")
    return 0
