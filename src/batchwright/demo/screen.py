"""What a demo shows: plain lines, headings, and one line that is rewritten while a run goes on."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from batchwright.base.errors import BatchwrightError
from batchwright.batches.types import TraceRecord

__all__ = ["COLUMNS", "LiveLine", "command", "exit_code_of", "head", "near", "say", "show_pieces", "snippet"]

COLUMNS = 100
SECONDS_BETWEEN_LINES = 2.0


def exit_code_of(demo: Callable[[], int]) -> int:
    """What the demo returns; 2 where it could not be done, 130 after Ctrl-C, both with a message."""
    try:
        return demo()
    except KeyboardInterrupt:
        print("\nStopped. Nothing is left running; the same command starts over.", flush=True)
        return 130
    except BatchwrightError as error:
        print(f"batchwright: {error}", file=sys.stderr, flush=True)
        return 2


def head(number: int, text: str) -> None:
    say()
    say(f"{number}. {text}")


def say(text: str = "") -> None:
    print(text, flush=True)


class LiveLine:
    """A line that is rewritten in place on a terminal; elsewhere a plain line every two seconds."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._live = stream, stream.isatty()
        self._shown_at, self._shown = 0.0, ""

    def __enter__(self) -> LiveLine:
        return self

    def show(self, text: str) -> None:
        now = time.monotonic()
        if now - self._shown_at < (0.1 if self._live else SECONDS_BETWEEN_LINES):
            return
        self._shown_at, self._shown = now, text
        if self._live:
            width = shutil.get_terminal_size((COLUMNS, 24)).columns - 1
            self._stream.write("\r" + text[:width] + "\x1b[K")
        else:
            self._stream.write(text + "\n")
        self._stream.flush()

    def note(self, text: str) -> None:
        """A line of its own that stays; what is shown next comes below it."""
        self._stream.write(f"\r{text}\x1b[K\n" if self._live else f"{text}\n")
        self._stream.flush()

    def keep(self, text: str) -> None:
        """Leave this as the last state of the line."""
        if self._live:
            self._stream.write("\r" + text + "\x1b[K")
        elif text != self._shown:
            self._stream.write(text + "\n")
            self._shown = text

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._stream.write("\n")
        self._stream.flush()


def show_pieces(records: Sequence[TraceRecord], folder: str, row_losses: Sequence[float] | None = None) -> None:
    """What rows were made of: row, (its loss,) file relative to a folder, lines, and the beginning of the text."""
    names = [near(record.file, folder) for record in records]
    width = max(map(len, names))
    for name, record in zip(names, records, strict=True):
        lines = f"lines {record.lines[0]}-{record.lines[1]}" if record.lines else ""
        loss = "" if row_losses is None else f"  loss {row_losses[record.row_in_batch]:6.3f}"
        place = f"row {record.row_in_batch}{loss}  {name:<{width}}  {lines:<15}  "
        say(place + snippet(record.text or "", COLUMNS - len(place)))


def snippet(text: str, columns: int) -> str:
    """A text in one line of plain characters, the blanks of its lines taken out.

    >>> snippet("  def f():\\n      return 1", 80)
    'def f(): return 1'
    """
    return " ".join(text.split()).encode("ascii", "replace").decode()[: max(columns, 0)]


def command() -> str:
    """How to call batchwright from this shell: `make demo` installs it where a shell does not look."""
    beside = Path(sys.executable).with_name("batchwright")
    if not beside.exists():
        return f"{shlex.quote(near(Path(sys.executable)))} -m batchwright"
    on_path = shutil.which("batchwright")
    return "batchwright" if on_path and Path(on_path) == beside else shlex.quote(near(beside))


def near(path: str | Path, folder: str | Path = ".") -> str:
    """A path, relative to a folder where that is shorter."""
    return min(os.path.relpath(path, folder), str(path), key=len)
