"""See it work in under a minute: bake real text, train a tiny model, kill it, resume it exactly, trace a step.

There are four others:

    batchwright demo spike     the loss jumps; the document behind it is found and skipped
    batchwright demo chat      faults in conversations are caught; good ones are trained on their answers
    batchwright demo buffer    rows change while a model trains; bad ones are rolled back; kill -9 loses nothing
    batchwright demo queue     batches come from processes that are killed, and none is lost or changed
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from importlib import import_module

from batchwright.demo import ONE_THREAD

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
    name = argv[0] if argv else ""
    if name in ("chat", "buffer", "queue"):  # they train in this process
        os.environ.update(ONE_THREAD)
    if name in ("spike", "chat", "buffer", "queue"):
        return int(import_module(f"batchwright.demo.{name}").main(argv[1:]))
    return int(import_module("batchwright.demo.run").main(argv))
