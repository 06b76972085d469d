"""Make batches for a trainer, as many as it needs, until Ctrl-C.

CONFIG is a Python file that provider and trainer share. The provider is data/DATASET/prepare_streaming.py, where the
config sets DATASET; its batches go to data/DATASET/queue. --NAME=VALUE sets a name of the config for this run. Several
providers may run at once, also on other machines that share the folder, and divide the work.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path

from batchwright.base.errors import WorkerError
from batchwright.base.words import counted

SUMMARY = "make batches for a trainer, as many as it needs"

EXAMPLES = """\
examples:
  batchwright prepare config/train_char_diffusion.py
  batchwright prepare config/train_char_diffusion.py --batch_size=64 --seed=7
"""

TAKES_SETTINGS = True

ACCEPT_CHANGE = "continue a queue that was made with other code, settings or raw files"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "batchwright prepare [-h] [--accept-change] CONFIG [--NAME=VALUE ...]"
    parser.add_argument("config", metavar="CONFIG", help="the config that provider and trainer share")
    parser.add_argument("--accept-change", action="store_true", help=ACCEPT_CHANGE)


def run(arguments: argparse.Namespace) -> None:
    find_modules_here()  # first: it imports NumPy, where Ctrl-C must just end
    from batchwright.queue.config import load_config
    from batchwright.queue.provider_file import open_provider

    config = load_config(arguments.config, arguments.settings)
    provider = open_provider(config)
    queue = Path(config.data_dir) / "queue"
    print(f"{queue}: {type(provider).__name__} makes batches until Ctrl-C", file=sys.stderr)
    try:
        num_files = provider.run(accept_change=arguments.accept_change)
    except WorkerError as error:
        if error.__cause__ is not None:  # the user's own code raised it, and he needs to see where
            error.where.setdefault("traceback", "".join(traceback.format_exception(error.__cause__)).rstrip())
        raise
    print(f"{queue}: {counted(num_files, 'file')} made")


def find_modules_here() -> None:
    """Config and provider find modules of the current folder, as `python prepare.py` would let them."""
    with _ctrl_c_just_ends():
        import batchwright.queue.provider  # noqa: F401 (before the current folder is on the path)
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)


@contextlib.contextmanager
def _ctrl_c_just_ends() -> Iterator[None]:
    """While NumPy is imported: a KeyboardInterrupt in the middle of that comes out as an ImportError."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
