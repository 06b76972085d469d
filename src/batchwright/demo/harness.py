"""The frame of every demo: its arguments and exit code, its folder, what it prints, and its processes."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from batchwright.base.checks import local_path
from batchwright.base.errors import BatchwrightError, SpecError, WorkerError
from batchwright.batches.types import TraceRecord
from batchwright.cli.main import main as batchwright
from batchwright.demo import ONE_THREAD

COLUMNS = 100
MARK = "made-by-batchwright-demo.txt"
_SECONDS_BETWEEN_LINES = 2.0

Report = dict[str, Any]


class NotAsExpected(Exception):
    """A promise of the demo did not hold."""


def expect(held: bool, otherwise: str) -> None:
    """Stop the demo unless a promise held."""
    if not held:
        raise NotAsExpected(otherwise)


@dataclass(frozen=True, kw_only=True)
class Demo:
    """One demo: `tell(folder, steps)` runs it and raises NotAsExpected where a promise does not hold."""

    name: str
    title: str
    description: str
    tell: Callable[..., None]
    steps: int | None = None
    """Steps to train by default; None: the demo has no `--steps`."""
    fewest_steps: int = 0

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run the demo. 0: every promise held; 1: one did not; 2: it could not run; 130: Ctrl-C."""
        try:
            return self._perform(**vars(self._parser().parse_args(argv)))
        except KeyboardInterrupt:
            print("\nStopped. No process is left running. The same command starts over.", flush=True)
            return 130
        except BatchwrightError as error:
            print(f"batchwright: {error}", file=sys.stderr, flush=True)
            return 2

    def _parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(
            prog=f"batchwright demo {self.name}".rstrip(),
            description=f"{self.description} No network, no torch, less than a minute.",
        )
        parser.add_argument("--folder", type=Path, default=Path(".demo"), help="the folder for all files (.demo)")
        if self.steps is not None:
            parser.add_argument("--steps", type=int, default=self.steps, help=f"training steps ({self.steps})")
        return parser

    def _perform(self, folder: Path, **settings: int) -> int:
        if settings.get("steps", self.fewest_steps) < self.fewest_steps:
            raise SpecError(
                f"--steps {settings['steps']} is too few for this demo",
                parameter="steps",
                remedy=f"--steps {self.fewest_steps}",
            )
        began, code, promised = time.monotonic(), 0, "Everything was as promised."
        _take(folder)
        say(f"batchwright demo {self.name}".rstrip() + f": {self.title}")
        say(f"All files are in {folder}. Delete it at any time.")
        try:
            self.tell(folder, **settings)
        except NotAsExpected as unexpected:
            say(f"NOT AS EXPECTED: {unexpected}")
            code, promised = 1, "NOT everything was as promised: see above."
        say()
        say(f"The demo took {time.monotonic() - began:.0f} s. {promised}")
        return code


def _take(folder: Path) -> None:
    """Make the folder the demo's own, and remove what an earlier demo left, except for its stores."""
    local_path(folder=folder)
    if folder.exists() and not (folder / MARK).exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SpecError(
            f"{folder} exists and is not a demo's folder", parameter="folder", remedy="another folder: --folder my-demo"
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).write_text("Everything in this folder was made by `batchwright demo`, and can be deleted.\n")
    shutil.rmtree(folder / "runs", ignore_errors=True)
    (folder / "runs").mkdir()


# Output


def head(number: int, text: str) -> None:
    say()
    say(f"{number}. {text}")


def say(text: str = "", *, hang: int = 4) -> None:
    """Print text. Long lines are folded, and continue `hang` columns further in."""
    for line in text.split("\n"):
        if len(line) > COLUMNS:
            indent = " " * (len(line) - len(line.lstrip()) + hang)
            line = textwrap.fill(line, COLUMNS, subsequent_indent=indent)
        print(line, flush=True)


class LiveLine:
    """A line that is rewritten in place on a terminal; elsewhere a plain line every two seconds."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._live = stream, stream.isatty()
        self._shown_at, self._shown = 0.0, ""

    def __enter__(self) -> LiveLine:
        return self

    def show(self, text: str) -> None:
        now = time.monotonic()
        if now - self._shown_at < (0.1 if self._live else _SECONDS_BETWEEN_LINES):
            return
        self._shown_at = now
        self.keep(text)

    def keep(self, text: str) -> None:
        """Show this text at once, as the last state of the line."""
        if self._live:
            width = shutil.get_terminal_size((COLUMNS, 24)).columns - 1
            self._stream.write("\r" + text[:width] + "\x1b[K")
        elif text != self._shown:
            self._stream.write(text + "\n")
        self._shown = text
        self._stream.flush()

    def note(self, text: str) -> None:
        """Print a line that stays. The live line goes on below it."""
        self._stream.write(f"\r{text}\x1b[K\n" if self._live else f"{text}\n")
        self._stream.flush()

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._stream.write("\n")
        self._stream.flush()


def show_pieces(records: Sequence[TraceRecord], folder: str, row_losses: Sequence[float] | None = None) -> None:
    """Print the documents of some rows: row, loss, file relative to a folder, lines, and the beginning of the text."""
    names = [near(record.file, folder) for record in records]
    width = max(map(len, names))
    for name, record in zip(names, records, strict=True):
        lines = f"lines {record.lines[0]}-{record.lines[1]}" if record.lines else ""
        loss = "" if row_losses is None else f"  loss {row_losses[record.row_in_batch]:6.3f}"
        place = f"row {record.row_in_batch}{loss}  {name:<{width}}  {lines:<15}  "
        say(place + _snippet(record.text or "", COLUMNS - len(place)))


def _snippet(text: str, columns: int) -> str:
    r"""A text as one line of ASCII characters, without the whitespace between its lines.

    >>> _snippet("  def f():\n      return 1", 80)
    'def f(): return 1'
    """
    return " ".join(text.split()).encode("ascii", "replace").decode()[: max(columns, 0)]


def near(path: str | Path, folder: str | Path = ".") -> str:
    """A path, relative to a folder where that is shorter."""
    return min(os.path.relpath(path, folder), str(path), key=len)


def printed_by(*arguments: str | Path) -> tuple[int, str]:
    """The exit code and the output of a batchwright command, run in this process."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = batchwright([str(argument) for argument in arguments])
    return code, printed.getvalue()


def show_verb(*arguments: str | Path) -> str:
    """Run a batchwright command, print it with its output, and return the output. It must succeed."""
    say(f"$ batchwright {shlex.join(near(a) if isinstance(a, Path) else a for a in arguments)}")
    code, printed = printed_by(*arguments)
    say(printed.rstrip())
    expect(code == 0, f"the exit code is {code}")
    return printed


# Processes


def report(**facts: Any) -> None:
    """In a process of a demo: print one line of JSON for the process that follows it."""
    print(json.dumps(facts), flush=True)


def reported(function: Callable[..., None], *arguments: Any, **named: Any) -> list[Report]:
    """Call a function in this process, and return its reports."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        function(*arguments, **named)
    return [json.loads(line) for line in printed.getvalue().splitlines()]


@contextlib.contextmanager
def process(function: Callable[..., None], *, log: Path, **arguments: Any) -> Iterator[subprocess.Popen[str]]:
    """Call a function of this package in a process of its own, which ends with the block. `log` gets its stderr."""
    package = Path(__file__).resolve().parents[2]
    search = os.pathsep.join(filter(None, [str(package), os.environ.get("PYTHONPATH")]))
    call = [function.__module__, function.__name__, json.dumps(arguments, default=str)]
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        open(log, "w") as errors,
        subprocess.Popen(
            [sys.executable, "-P", "-m", "batchwright.demo", *call],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **ONE_THREAD, "PYTHONPATH": search},
        ) as started,
    ):
        try:
            yield started
        finally:
            started.kill()


def follow(function: Callable[..., None], take: Callable[[Report], bool], *, log: Path, **arguments: Any) -> int:
    """Call a function in a process of its own, and `take` each of its reports. Returns its process id.

    Once `take` returns True, the process is killed. It must not have ended before that, or with an error.
    """
    is_killed = False
    with process(function, log=log, **arguments) as started:
        assert started.stdout is not None
        for line in started.stdout:
            # A killed process may leave half a line, and reports that it printed before.
            if line.endswith("\n") and take(json.loads(line)) and not is_killed:
                os.kill(started.pid, signal.SIGKILL)
                is_killed = True
        code = started.wait()
    if code == (-signal.SIGKILL if is_killed else 0):
        return started.pid
    what, remedy = "too early", "run the demo again"
    if code == 0:
        what, remedy = "before it was killed", "run the demo again, with more --steps"
    output = log.read_text().strip()[-2000:] or None
    raise WorkerError(f"the training process ended {what}", exit_code=code, output=output, remedy=remedy)
