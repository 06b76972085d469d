"""See it work in under a minute: bake real text, train a tiny model, kill it, resume it exactly, trace a step.

`penstock demo spike` is another story: the loss jumps, the document that did it is found and skipped. So is
`penstock demo chat`: a bad set of conversations is caught, and a good one trained where it should be. And
`penstock demo buffer`: rows change while a model trains, bad ones are rolled back, and nothing is lost to kill -9. And
`penstock demo queue`: batches are made by processes that are killed, and every one is what it would have been.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from importlib import import_module

from penstock.demo import ONE_THREAD

__all__ = ["EXAMPLES", "SUMMARY", "add_arguments", "run"]

SUMMARY = "bake, train, kill, resume and trace, on text that every machine has"

EXAMPLES = """\
examples:
  penstock demo
  penstock demo spike
  penstock demo chat
  penstock demo buffer
  penstock demo queue
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None: the demo reads its own."""


def run(argv: Sequence[str]) -> int:
    if argv[:1] in (["chat"], ["buffer"], ["queue"]):  # they train in this process
        os.environ.update(ONE_THREAD)
    if argv[:1] in (["spike"], ["chat"], ["buffer"], ["queue"]):
        return int(import_module(f"penstock.demo.{argv[0]}").main(list(argv[1:])))
    return int(import_module("penstock.demo.run").main(list(argv)) or 0)
