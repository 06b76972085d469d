"""Check that the trainer and the queue of a config exist, and run the trainer.

The trainer is train.py of this folder, or the file that the config names as `trainer`. It gets CONFIG and every
--NAME=VALUE as its arguments: `batchwright.load_config(sys.argv[1], sys.argv[2:])` reads them. It replaces this
process: breakpoints, Ctrl-C and exit codes are its own.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from batchwright.base.checks import local_path
from batchwright.base.errors import MissingQueueError, QueueError, SpecError
from batchwright.cli.prepare import find_modules_here

if TYPE_CHECKING:
    from batchwright.queue.config import SharedConfig

SUMMARY = "run the trainer of this folder on the queue of a config"

EXAMPLES = """\
examples:
  batchwright train config/train_char_diffusion.py
  batchwright train config/train_char_diffusion.py --learning_rate=3e-4
"""

TAKES_SETTINGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "batchwright train [-h] CONFIG [--NAME=VALUE ...]"
    parser.add_argument("config", metavar="CONFIG", help="the config that provider and trainer share")


def run(arguments: argparse.Namespace) -> int:
    find_modules_here()  # first: it imports NumPy, where Ctrl-C must just end
    from batchwright.queue.config import load_config

    config = load_config(arguments.config, arguments.settings)
    trainer = trainer_of(config)
    queue = Path(config.data_dir) / "queue"
    if queue.exists() and not queue.is_dir():
        raise QueueError(f"{queue} is not a folder", remedy="move that file away: its place is the queue's")
    if not queue.is_dir():
        given = shlex.join([arguments.config, *arguments.settings])
        raise MissingQueueError(
            f"Queue directory not found: {queue}",
            remedy=f"batchwright prepare {given}, in another terminal; or both at once: batchwright run {given}",
        )
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, str(trainer), arguments.config, *arguments.settings])


def trainer_of(config: SharedConfig) -> Path:
    """The file that trains: `trainer` of the config, or train.py, in this folder."""
    name = config.get("trainer", "train.py")
    if not isinstance(name, str | os.PathLike):
        raise SpecError(
            f"trainer must be a path, got {name!r}",
            parameter="trainer",
            config=config.origins.get("trainer"),
            remedy="trainer = 'train.py'",
        )
    trainer = local_path(trainer=name)
    if not trainer.is_file():
        there = sorted(path.name for path in Path().glob("*.py"))
        raise SpecError(
            f"there is no {trainer} in this folder",
            parameter="trainer",
            folder=Path.cwd(),
            found=", ".join(there) or "no Python file",
            remedy="go to the folder with train.py, or set trainer = '...' in the config",
        )
    return trainer
