"""Train a byte-level BPE tokenizer on raw text.

SOURCE is what `batchwright bake` reads: a file, a folder or a quoted glob; several count as one. The same source gives
the same file, to the byte. `batchwright bake --tokenizer FILE --append-eos` then finds the end of a document in it.
"""

from __future__ import annotations

import argparse
import warnings

from batchwright.cli.output import add_json, print_json
from batchwright.cli.values import whole_number

__all__ = ["EXAMPLES", "SUMMARY", "add_arguments", "run"]

SUMMARY = "train a tokenizer on raw text"

EXAMPLES = """\
examples:
  batchwright train-tokenizer corpus/ --vocab-size 32000 --out tokenizer.json
  batchwright train-tokenizer 'web/*.jsonl.zst' --text content --max-bytes 2e9 --out tokenizer.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", nargs="+", metavar="SOURCE", help="file, folder or glob")
    parser.add_argument("--vocab-size", type=whole_number, default=32_000, metavar="N", help="ids in all (32000)")
    parser.add_argument("--out", required=True, metavar="FILE", help="where the tokenizer.json goes")
    parser.add_argument("--force", action="store_true", help="replace a file that is there")
    parser.add_argument("--text", default="text", metavar="COLUMN", help="the column that holds the text (text)")
    parser.add_argument("--format", help="text (a file is a document), lines (a line is one), jsonl, or a plug-in's")
    parser.add_argument(
        "--special", action="append", metavar="TOKEN", help="a special token; several times for several (<|endoftext|>)"
    )
    parser.add_argument(
        "--pattern", default="llama3", help="where text is cut: llama3, gpt2, or a regular expression (llama3)"
    )
    parser.add_argument(
        "--min-frequency", type=whole_number, default=2, metavar="N", help="merge pairs that occur so often (2)"
    )
    parser.add_argument(
        "--max-bytes", type=whole_number, metavar="N", help="learn from a sample of at most so much text, e.g. 2e9"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sample (0)")
    parser.add_argument(
        "--on-error", choices=("raise", "skip"), default="raise", help="a malformed row: stop and name it, or count it"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    import sys

    from batchwright.baking.train import train_tokenizer

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        tokenizer = train_tokenizer(
            arguments.source if len(arguments.source) > 1 else arguments.source[0],
            arguments.vocab_size,
            out=arguments.out,
            text=arguments.text,
            format=arguments.format,
            special_tokens=arguments.special or ("<|endoftext|>",),
            pattern=arguments.pattern,
            min_frequency=arguments.min_frequency,
            max_bytes=arguments.max_bytes,
            seed=arguments.seed,
            on_error=arguments.on_error,
            force=arguments.force,
            show_progress=not arguments.quiet,
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
    return 0
