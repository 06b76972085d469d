"""Make a store over token files in place, without copying them.

A PATH is a nanoGPT .bin (also with the header of llm.c), a .npy, a Megatron .idx or .bin or their common prefix, a
datatrove .ds, a folder of such files, or a quoted glob. NAME=PATH names a source, which can be mixed by weights. Files
named train and val become the two splits. Each file is read once, to hash it and to check that every id is in the
vocabulary; it is never changed. If a format does not record where documents end, the end-of-document id separates them.
"""

from __future__ import annotations

import argparse
from typing import Any

import batchwright as bw
from batchwright.base.errors import SpecError
from batchwright.cli.output import add_json, print_facts, store_facts
from batchwright.cli.values import paths_by_name

SUMMARY = "make a store over token files in place"

EXAMPLES = """\
examples:
  batchwright adopt data/openwebtext --tokenizer gpt2/tokenizer.json
  batchwright adopt fineweb10B/*.bin --tokenizer gpt2/tokenizer.json --eos-first --to fineweb.store
  batchwright adopt web=web_text_document code=code.npy --tokenizer tokenizer.json --to mix.store
  batchwright adopt ids.bin --dtype uint32 --tokenizer bytes --eos none
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("path", nargs="+", metavar="PATH", help="file, folder, glob, or NAME=PATH")
    add("--tokenizer", required=True, metavar="T", help="bytes, or the path of a tokenizer.json")
    add("--to", metavar="STORE", help="the folder of the store (beside the data, with its name)")
    add("--val", action="append", metavar="PATH", help="files of split val; repeatable")
    add("--split", choices=("train", "val"), help="the split of all files")
    add("--name", metavar="SOURCE", help="name of the source (from the file names)")
    add("--eos", metavar="ID|TOKEN", help="the end of a document (the tokenizer's own); none: a file is one document")
    add("--eos-first", action="store_true", help="the id begins documents instead of ending them")
    add("--dtype", help="type of ids in .bin files (uint16; uint32 for a vocabulary over 65,536)")
    add("--format", help="bin, npy, megatron or datatrove, if the extension does not say")
    add("--quiet", action="store_true", help="no progress")
    add_json(parser)


def run(arguments: argparse.Namespace) -> None:
    eos: Any = arguments.eos
    if eos is not None and eos.isdecimal():
        eos = int(eos)
    val = None
    if arguments.val:
        val = _paths(arguments.val)
    settings = {name: getattr(arguments, name) for name in ("to", "split", "name", "eos_first", "dtype", "format")}
    settings |= {"val": val, "eos": eos, "show_progress": not arguments.quiet}
    store = bw.adopt(_paths(arguments.path), arguments.tokenizer, **settings)
    facts = store_facts(store) | {"notes": store.report["notes"]}
    print_facts(facts, [str(store)], as_json=arguments.json)


def _paths(given: list[str]) -> Any:
    """Paths without names as a path or a list; paths with names by name."""
    named = paths_by_name(given)
    plain = named.get(None, [])
    if plain and len(named) > 1:
        what = f"{plain[0]} has no name, and others do"
        raise SpecError(what, parameter="path", remedy=f"NAME={plain[0]}, or no names at all")
    values: dict[str | None, Any] = dict(named)
    values |= {name: paths[0] for name, paths in named.items() if len(paths) == 1}
    return values.get(None, values)
