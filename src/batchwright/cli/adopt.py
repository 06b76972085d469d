"""Make a store over token files in place, without copying them.

A PATH is a nanoGPT .bin (also with the header of llm.c), a .npy, a Megatron .idx or .bin or their common prefix, a
datatrove .ds, a folder of such files, or a quoted glob; NAME=PATH makes it a source of that name, to be mixed by
weights. Files that are named train and val become the two splits. Each file is read once, to hash it and to check that
every id is in the vocabulary, and is never changed. Where a format has no borders of documents, the end-of-document id
makes them.
"""

from __future__ import annotations

import argparse
import os
import re
from typing import Any

from batchwright.base.errors import SpecError
from batchwright.cli.output import add_json, print_json

__all__ = ["EXAMPLES", "SUMMARY", "add_arguments", "run"]

SUMMARY = "make a store over token files in place"

EXAMPLES = """\
examples:
  batchwright adopt data/openwebtext --tokenizer gpt2/tokenizer.json
  batchwright adopt fineweb10B/*.bin --tokenizer gpt2/tokenizer.json --eos-first --to fineweb.store
  batchwright adopt web=web_text_document code=code.npy --tokenizer tokenizer.json --to mix.store
  batchwright adopt ids.bin --dtype uint32 --tokenizer bytes --eos none
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", nargs="+", metavar="PATH", help="file, folder, glob, or NAME=PATH")
    parser.add_argument("--tokenizer", required=True, metavar="T", help="bytes, or the path of a tokenizer.json")
    parser.add_argument("--to", metavar="STORE", help="the store's folder (beside the data, named as it is)")
    parser.add_argument("--val", action="append", metavar="PATH", help="files of split val; can be given several times")
    parser.add_argument("--split", choices=("train", "val"), help="all files are of this split")
    parser.add_argument("--name", metavar="SOURCE", help="name of the source (from the names of the files)")
    parser.add_argument(
        "--eos", metavar="ID|TOKEN", help="what ends a document (the tokenizer's own); none: a file is one document"
    )
    parser.add_argument("--eos-first", action="store_true", help="that id begins documents, and does not end them")
    parser.add_argument("--dtype", help="of ids in .bin files (uint16; uint32 for a vocabulary over 65,536)")
    parser.add_argument("--format", help="bin, npy, megatron or datatrove, where the extension does not say")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    from batchwright.store.adopt_tokens import adopt

    eos = arguments.eos
    store = adopt(
        _paths(arguments.path),
        arguments.tokenizer,
        to=arguments.to,
        val=None if arguments.val is None else _paths(arguments.val),
        split=arguments.split,
        name=arguments.name,
        eos=int(eos) if eos is not None and eos.isdecimal() else eos,
        eos_first=arguments.eos_first,
        dtype=arguments.dtype,
        format=arguments.format,
        show_progress=not arguments.quiet,
    )
    if arguments.json:
        print_json(
            {
                "store": str(store.path),
                "version": store.version,
                "fingerprint": store.fingerprint,
                "num_documents": store.num_rows,
                "num_tokens": store.num_tokens,
                "tokenizer": store.manifest.tokenizer,
                "notes": store.report["notes"],
            }
        )
    else:
        print(store)
    return 0


def _paths(given: list[str]) -> Any:
    """One path as it is, several as a list; with names, by name."""
    named: dict[str, list[str]] = {}
    plain: list[str] = []
    for text in given:
        match = re.match(r"([\w.-]+)=(.+)", text, re.DOTALL)
        if match is not None and not os.path.exists(text):
            named.setdefault(match[1], []).append(match[2])
        else:
            plain.append(text)
    if named and plain:
        raise SpecError(
            f"{plain[0]} has no name, and others do", parameter="path", remedy=f"NAME={plain[0]}, or no names at all"
        )
    if named:
        return {name: paths[0] if len(paths) == 1 else paths for name, paths in named.items()}
    return plain[0] if len(plain) == 1 else plain
