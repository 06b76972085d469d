"""Prepare and train with one command: providers and the trainer start together, and end together.

The trainer starts when the first provider has written the meta of its batches. The trainer has the terminal; output of
providers goes to stderr, with "provider 1 | " before each line. One Ctrl-C asks all to stop, and a second one kills
them. If a provider dies, its message is shown, and the others continue. The exit code is the trainer's.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from batchwright.base.machine import boot_id, die_with_parent, is_linux
from batchwright.cli.prepare import ACCEPT_CHANGE, find_modules_here
from batchwright.cli.train import trainer_of
from batchwright.cli.values import count

SUMMARY = "prepare and train together: one command, one Ctrl-C"

EXAMPLES = """\
examples:
  batchwright run config/train_char_diffusion.py
  batchwright run config/train_char_diffusion.py --providers 4 --batch_size=64
"""

TAKES_SETTINGS = True

_LOOK_SECONDS = 0.1
"""The time between two looks whether a provider has begun, before the trainer starts."""
_PATIENCE_SECONDS = 10.0
"""The time for providers to end their batch after they were asked to stop. Killing them then loses no file."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "batchwright run [-h] [--providers N] [--accept-change] CONFIG [--NAME=VALUE ...]"
    parser.add_argument("config", metavar="CONFIG", help="the config that provider and trainer share")
    parser.add_argument("--providers", type=count, default=1, metavar="N", help="number of providers (1)")
    parser.add_argument("--accept-change", action="store_true", help=ACCEPT_CHANGE)


def run(arguments: argparse.Namespace) -> int:
    find_modules_here()  # first: it imports NumPy, where Ctrl-C must just end
    from batchwright.queue.config import load_config

    config = load_config(arguments.config, arguments.settings)
    trainer = trainer_of(config)
    given = [arguments.config, *arguments.settings]
    to_provider = list(given)
    if arguments.accept_change:
        to_provider.append("--accept-change")
    together = _Together(Path(config.data_dir) / "queue")
    with together.listening():
        try:
            for number in range(1, arguments.providers + 1):
                together.start_provider(number, to_provider)
            code = together.wait_for_first()
            if code is None:
                code = together.train(trainer, given)
            return code
        finally:
            together.stop_providers()


class _Provider:
    """A `batchwright prepare` in a process of its own."""

    def __init__(self, number: int, process: subprocess.Popen[str]) -> None:
        self.number = number
        self.process = process
        self.is_over = False
        self.is_asked = False
        assert process.stdout is not None
        self.pump = threading.Thread(target=_pump, args=(process.stdout, f"provider {number} | "), daemon=True)
        self.pump.start()

    def ask_to_stop(self) -> None:
        """Once: a second request would end it in the middle of a batch."""
        if not self.is_asked and self.process.poll() is None:
            self.is_asked = True
            self.process.terminate()

    def kill(self) -> None:
        self.is_asked = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if not self.is_over:
                os.killpg(self.process.pid, signal.SIGKILL)  # and what it started


class _Together:
    """The processes of one run, and what happens to them: `events` has an entry for each that ends and each signal."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.providers: list[_Provider] = []
        self.trainer: subprocess.Popen[bytes] | None = None
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.num_signals = 0

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """SIGINT and SIGTERM become events."""
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:  # started with nohup, or in the background of a script
                signal.signal(number, lambda number, _: self.events.put(signal.Signals(number)))
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def start_provider(self, number: int, given: Sequence[str]) -> None:
        process = subprocess.Popen(
            _launch("_as_provider", list(given)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,  # Ctrl-C in the terminal is for the trainer and for us: we stop providers in their time
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            text=True,
            errors="backslashreplace",
        )
        provider = _Provider(number, process)
        self.providers.append(provider)
        self._await(process, provider)

    def _await(self, process: subprocess.Popen[Any], event: Any) -> None:
        def wait() -> None:
            process.wait()
            self.events.put(event)

        threading.Thread(target=wait, daemon=True).start()

    def wait_for_first(self) -> int | None:
        """Wait until a provider has begun. An exit code if none can: all died, or a signal stopped this process."""
        while not self._has_begun():
            try:
                event = self.events.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                continue
            if isinstance(event, _Provider):
                self._over(event)
                if all(provider.is_over for provider in self.providers):
                    return _code_of(event.process) or 2
            else:
                self.num_signals += 1
                return 128 + int(event)
        return None

    def _has_begun(self) -> bool:
        from batchwright.queue.members import Liveness

        pids = {provider.process.pid for provider in self.providers if not provider.is_over}
        # Before it makes or waits, it reads its data, and may yet find that another provider made the queue.
        return any(
            facts.pid in pids and facts.boot == boot_id() and activity.what.startswith(("makes", "waits"))
            for facts, activity in Liveness(self.folder / "who").members("provider")
        )

    def train(self, trainer: Path, given: Sequence[str]) -> int:
        """Run the trainer in this terminal. Its exit code, in the shell's way of counting."""
        process = self.trainer = subprocess.Popen(_launch("_as_trainer", str(trainer), list(given)))
        self._await(process, process)
        while True:
            event = self.events.get()
            if event is process:
                return _code_of(process)
            if isinstance(event, _Provider):
                self._over(event)
            else:
                self._signalled(event)

    def _over(self, provider: _Provider) -> None:
        provider.is_over = True
        provider.pump.join(timeout=1)  # its last words first
        if provider.is_asked:
            return
        how, left = f"exit code {provider.process.returncode}", sum(not other.is_over for other in self.providers)
        if provider.process.returncode < 0:
            how = f"killed by {signal.Signals(-provider.process.returncode).name}"
        pid = provider.process.pid
        _say(f"provider {provider.number} (pid {pid}) ended: {how}; {left} of {len(self.providers)} left")

    def _signalled(self, number: signal.Signals) -> None:
        """The first one asks all to stop, a second one ends them. (Ctrl-C reaches the trainer from the terminal.)"""
        self.num_signals += 1
        if self.num_signals > 1:
            if self.trainer is not None:
                self.trainer.kill()
            self._kill_providers()
            return
        if self.trainer is not None and number is not signal.SIGINT:
            self.trainer.send_signal(number)
        for provider in self.providers:
            provider.ask_to_stop()

    def _kill_providers(self) -> None:
        for provider in self.providers:
            provider.kill()

    def stop_providers(self) -> None:
        """Ask all providers to stop, wait for them, and end those that do not."""
        for provider in self.providers:
            provider.ask_to_stop()
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not all(provider.is_over for provider in self.providers):
            event = None
            with contextlib.suppress(queue.Empty):
                event = self.events.get(timeout=max(deadline - time.monotonic(), 0.01))
            if isinstance(event, _Provider):
                self._over(event)
            elif event is None or isinstance(event, signal.Signals):
                self._kill_providers()
                deadline = time.monotonic() + _PATIENCE_SECONDS


def _pump(lines: IO[str], prefix: str) -> None:
    for line in lines:
        # Lines are taken also when stderr is closed: a provider would wait for room for them.
        with contextlib.suppress(ValueError, OSError):
            sys.stderr.write(f"{prefix}{line.rstrip()}\n")  # in one piece: others write there, too
            sys.stderr.flush()


def _code_of(process: subprocess.Popen[Any]) -> int:
    if process.returncode < 0:
        return 128 - process.returncode
    return int(process.returncode)


def _say(text: str) -> None:
    with contextlib.suppress(ValueError, OSError):  # stderr is closed
        print(f"batchwright: {text}", file=sys.stderr, flush=True)


# In the processes that are started


def _launch(function: str, *arguments: Any) -> list[str]:
    """A Python that ends with this process, however this one ends, and does what the function says."""
    from batchwright.base.processes import python_command

    return python_command(
        # While it begins, Ctrl-C needs no traceback. (`signal` might be a file of this folder.)
        "import _signal as s; s.getsignal(s.SIGINT) == s.SIG_IGN or s.signal(s.SIGINT, s.SIG_DFL); "
        f"import batchwright.cli.run as run; run.{function}({os.getpid()}, *{arguments!r})"
    )


def _as_provider(parent_pid: int, given: list[str]) -> None:
    from batchwright.cli.main import main

    die_with_parent(parent_pid)
    sys.exit(main(["prepare", *given]))


def _as_trainer(parent_pid: int, trainer: str, given: list[str]) -> None:
    die_with_parent(parent_pid)
    if is_linux():  # which remembers whose child it is
        os.execv(sys.executable, [sys.executable, trainer, *given])
    import runpy

    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = [trainer, *given]
    sys.path.insert(0, str(Path(trainer).resolve().parent))
    runpy.run_path(trainer, run_name="__main__")
