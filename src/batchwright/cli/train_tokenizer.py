"""Train a byte-level BPE tokenizer on raw text.

SOURCE is what `batchwright bake` reads: a file, a folder or a quoted glob; several count as one. The same source gives
the same file, to the byte. `batchwright bake --tokenizer FILE --append-eos` then finds the end of a document in it.
"""

from __future__ import annotations

import argparse
import sys
import warnings

import batchwright as bw
from batchwright.cli.output import add_json, print_json
from batchwright.cli.values import whole_number

SUMMARY = "train a tokenizer on raw text"

EXAMPLES = """\
examples:
  batchwright train-tokenizer corpus/ --vocab-size 32000 --out tokenizer.json
  batchwright train-tokenizer 'web/*.jsonl.zst' --text content --max-bytes 2e9 --out tokenizer.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", nargs="+", metavar="SOURCE", help="file, folder or glob")
    add("--vocab-size", type=whole_number, default=32_000, metavar="N", help="size of the vocabulary (32000)")
    add("--out", required=True, metavar="FILE", help="the tokenizer.json to write")
    add("--force", action="store_true", help="replace an existing file")
    add("--text", default="text", metavar="COLUMN", help="the column that holds the text (text)")
    add("--format", help="text (a file is a document), lines (a line is one), jsonl, or a plug-in's")
    add("--special", action="append", metavar="TOKEN", help="a special token; repeatable (<|endoftext|>)")
    add("--pattern", default="llama3", help="where text is cut: llama3, gpt2, or a regular expression (llama3)")
    add("--min-frequency", type=whole_number, default=2, metavar="N", help="merge pairs that occur N times or more (2)")
    add("--max-bytes", type=whole_number, metavar="N", help="learn from a sample of at most N bytes of text, e.g. 2e9")
    add("--seed", type=int, default=0, help="seed of the sample (0)")
    add("--on-error", choices=("raise", "skip"), default="raise", help="at a malformed row: stop (raise), or skip it")
    add("--quiet", action="store_true", help="no progress")
    add_json(parser)


def run(arguments: argparse.Namespace) -> None:
    names = "vocab_size out text format pattern min_frequency max_bytes seed on_error force"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        tokenizer = bw.train_tokenizer(
            arguments.source if len(arguments.source) > 1 else arguments.source[0],
            special_tokens=arguments.special or ("<|endoftext|>",),
            show_progress=not arguments.quiet,
            **{name: getattr(arguments, name) for name in names.split()},
        )
    for warning in caught:
        print(f"note: {warning.message}", file=sys.stderr)
    if arguments.json:
        print_json(
            {
                "tokenizer": arguments.out,
                "vocab_size": tokenizer.vocab_size,
                "special_tokens": tokenizer.special,
                "fingerprint": tokenizer.fingerprint,
            }
        )
    else:
        special = ", ".join(f"{token} ({number})" for token, number in tokenizer.special.items()) or "none"
        print(f"{arguments.out}: {tokenizer.vocab_size:,} ids, special tokens: {special}")
