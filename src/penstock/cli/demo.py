"""See it work in under a minute: bake real text, train a tiny model, kill it, resume it exactly, trace a step.

`penstock demo spike` is another story: the loss jumps, the document that did it is found and skipped.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module

__all__ = ["EXAMPLES", "SUMMARY", "add_arguments", "run"]

SUMMARY = "bake, train, kill, resume and trace, on text that every machine has"

EXAMPLES = """\
examples:
  penstock demo
  penstock demo spike
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None: the demo reads its own."""


def run(argv: Sequence[str]) -> int:
    if argv[:1] == ["spike"]:
        return int(import_module("penstock.demo.spike").main(list(argv[1:])))
    return int(import_module("penstock.demo.run").main(list(argv)) or 0)
