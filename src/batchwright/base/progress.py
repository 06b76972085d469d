"""Progress of long work: a live bar on a terminal, otherwise a plain line every few seconds."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

__all__ = ["Progress", "progress", "say"]

log: logging.Logger = logging.getLogger("batchwright")

_SECONDS_BETWEEN_LINES = 5.0


class Progress:
    """Work that nobody watches."""

    def advance(self, amount: int, note: str = "") -> None:
        """Count `amount` more bytes. The note stands beside the bar or in the line."""


@contextmanager
def progress(what: str, total: int, *, show: bool = True, to: TextIO | None = None) -> Iterator[Progress]:
    """Count work from 0 to `total` bytes.

    >>> with progress("reading", 100, show=False) as done:
    ...     done.advance(100)
    """
    stream = to or sys.stderr
    if not show:
        yield Progress()
    elif stream.isatty():
        from rich.console import Console
        from rich.progress import DownloadColumn, TextColumn, TransferSpeedColumn
        from rich.progress import Progress as Bar

        columns = (DownloadColumn(), TransferSpeedColumn(), TextColumn("{task.fields[note]}"))
        with Bar(*Bar.get_default_columns(), *columns, console=Console(file=stream), transient=True) as bar:
            yield _Live(bar, what, total)
    else:
        yield _Lines(stream, what, total)


def say(text: str, *, show: bool = True) -> None:
    """Log a line, and print it to stderr if it is to be shown."""
    log.info(text)
    if show:
        print(text, file=sys.stderr, flush=True)


class _Live(Progress):
    def __init__(self, bar: Any, what: str, total: int) -> None:
        self._bar = bar
        self._task = bar.add_task(what, total=total, note="")

    def advance(self, amount: int, note: str = "") -> None:
        self._bar.update(self._task, advance=amount, note=note)


class _Lines(Progress):
    def __init__(self, stream: TextIO, what: str, total: int) -> None:
        self._stream, self._what, self._total = stream, what, total
        self._done = 0
        self._started = self._last = time.monotonic()

    def advance(self, amount: int, note: str = "") -> None:
        self._done += amount
        now = time.monotonic()
        if now - self._last >= _SECONDS_BETWEEN_LINES:
            self._last = now
            share = 100 * self._done / max(self._total, 1)
            rate = self._done / 1e6 / (now - self._started)
            print(f"{self._what}: {share:.0f} %, {rate:.1f} MB/s {note}".rstrip(), file=self._stream, flush=True)
