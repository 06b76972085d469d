"""The entry point: from a command line to a verb, and from an error to one message and an exit code.

Nothing here, and nothing at the top of a verb's file, imports NumPy, Arrow or a framework: `batchwright --help` answers
at once, and a verb pays only for what it uses.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from batchwright import __version__
from batchwright.base.errors import BatchwrightError

__all__ = ["main"]

OK, CHECK_FAILED, BAD_INPUT, BUG, INTERRUPTED, READER_GONE = 0, 1, 2, 70, 130, 141

VERBS = (
    *("bake", "train-tokenizer", "adopt", "export"),
    *("info", "look", "plan", "amend", "trace", "verify", "digest", "drill", "doctor"),
    *("prepare", "train", "run"),
    *("queue", "rollouts", "shards", "gc", "demo"),
)

_DESCRIPTION = """\
Everything between raw data and model(batch).

A store is a folder that `bake` makes. A plan fixes every batch of a run over it; opening a loader keeps its plan with
the store. Wherever a PLAN is asked for, give its fingerprint (or the first digits), its file, or a saved state's file.
"""

_EXIT_CODES = """\
exit codes:
  0    done
  1    a check failed: verify or queue verify found damage, drill a difference, doctor a fault,
       rollouts a loss, shards one that cannot be read
  2    not done: bad usage, bad input, another process is writing, no space left
  70   a bug in batchwright
  130  interrupted
  141  the reader of the output closed it

`batchwright VERB --help` explains a verb. Results go to stdout, progress and errors to stderr.
"""


class Parser(argparse.ArgumentParser):
    """argparse, with errors in the form that all errors of batchwright have."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"batchwright: {message}\n  try        {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line. Returns the exit code; raises nothing but SystemExit (from --help and bad usage)."""
    given = list(sys.argv[1:] if argv is None else argv)
    _print_anything()
    try:
        try:
            code = _run(given)
        finally:
            sys.stdout.flush()  # here, where a reader that went away can be handled
    except BrokenPipeError:
        _forget_stdout()
        return READER_GONE
    except BatchwrightError as error:
        return _say(BAD_INPUT, str(error))
    except KeyboardInterrupt:
        return _say(INTERRUPTED, "interrupted")
    except OSError as error:
        where = f": {error.filename}" if error.filename is not None else ""
        return _say(BAD_INPUT, f"{error.strerror or error}{where}")
    except Exception:
        traceback.print_exc()
        return _say(BUG, f"this is a bug in batchwright {__version__}: please report it with the lines above")
    return code


def _run(given: list[str]) -> int:
    if given[:1] == ["demo"]:  # it reads its own arguments
        return int(import_module("batchwright.cli.demo").run(given[1:]))
    parser = _parser()
    arguments, more = parser.parse_known_args(given)
    if more and not arguments.takes_settings:
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    arguments.settings = more
    return int(arguments.run(arguments) or OK)  # verbs without a check return nothing


def _parser() -> Parser:
    parser = Parser(prog="batchwright", description=_DESCRIPTION, epilog=_EXIT_CODES)
    parser.add_argument("--version", action="version", version=f"batchwright {__version__}")
    verbs = parser.add_subparsers(metavar="VERB", required=True, title="verbs")
    for name in VERBS:
        verb = import_module(f"batchwright.cli.{name.replace('-', '_')}")
        sub = verbs.add_parser(name, help=verb.SUMMARY, description=verb.__doc__, epilog=verb.EXAMPLES)
        verb.add_arguments(sub)
        sub.set_defaults(run=verb.run, takes_settings=getattr(verb, "TAKES_SETTINGS", False))
    return parser


def _print_anything() -> None:
    """Text of any corpus can be printed anywhere: what a terminal's encoding lacks comes out as an escape."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def _forget_stdout() -> None:
    # The interpreter flushes stdout once more when it ends, and would complain.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(code: int, text: str) -> int:
    print(f"batchwright: {text}", file=sys.stderr)
    return code
