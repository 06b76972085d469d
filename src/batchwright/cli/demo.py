"""See it work in under a minute: bake real text, train a tiny model, kill it, resume it exactly, trace a step.

`batchwright demo spike` is another story: the loss jumps, the document that did it is found and skipped. So is
`batchwright demo chat`: a bad set of conversations is caught, and a good one trained where it should be. And
`batchwright demo buffer`: rows change while a model trains, bad ones are rolled back, kill -9 loses nothing. And
`batchwright demo queue`: batches are made by processes that are killed, and every one is what it would have been.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from importlib import import_module

from batchwright.demo import ONE_THREAD

__all__ = ["EXAMPLES", "SUMMARY", "add_arguments", "run"]

SUMMARY = "bake, train, kill, resume and trace, on text that every machine has"

EXAMPLES = """\
examples:
  batchwright demo
  batchwright demo spike
  batchwright demo chat
  batchwright demo buffer
  batchwright demo queue
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None: the demo reads its own."""


def run(argv: Sequence[str]) -> int:
    if argv[:1] in (["chat"], ["buffer"], ["queue"]):  # they train in this process
        os.environ.update(ONE_THREAD)
    if argv[:1] in (["spike"], ["chat"], ["buffer"], ["queue"]):
        return int(import_module(f"batchwright.demo.{argv[0]}").main(list(argv[1:])))
    return int(import_module("batchwright.demo.run").main(list(argv)) or 0)
