"""Real processes for tests: started, signalled, started again, and always stopped. What they say is one log.

    def count(up_to: int) -> None:                   # a job: runs in a process of its own, from an importable file
        for number in range(up_to):
            say(id=number)                           # a line of the log, in one write
        stand_still()                                # to be killed here, so that no test comes too late

    def test_every_number_is_there(processes):       # a fixture: `Processes` in a folder of the test
        processes.start("counter", count, 100)
        processes.wait_until_said("counter", id=50)  # at a named step, or
        processes.disturb(["counter"], times=6)      # at random moments: killed, and started with the same job
        processes.wait_until_said("counter", id=99)
        assert {line["id"] for line in processes.said("counter")} == {*range(100)}

A command is a job too: `processes.start("bake", execute, "batchwright", "bake", ...)`. What a job does, and which ids
must be there, is said in the file of its area. A test that fails shows the seed of its random moments, and what every
process said. BATCHWRIGHT_TEST_SEED repeats the moments, as far as the machine does.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

SECONDS = 240.0
"""How long a test waits before it fails. Nothing takes this long, on the busiest machine."""
T = TypeVar("T")

# Forks of a server that has loaded what jobs import: a new interpreter would take seconds on a busy machine.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["pytest", "torch.distributed", "batchwright", "batchwright.queue.provider", "batchwright.queue.consumer"]
)


def wait_for(what: str, look: Callable[[], T], told: Callable[[], str] = str) -> T:
    """What `look` gives, once it gives something. `told()` is shown when it does not."""
    until = time.monotonic() + SECONDS
    while not (found := look()):
        assert time.monotonic() < until, f"no {what} after {SECONDS:.0f} s\n{told()}"
        time.sleep(0.005)
    return found


@contextmanager
def no_thread_left() -> Iterator[None]:
    """Threads that the block starts have ended after it."""
    before = set(threading.enumerate())
    yield
    new = lambda: set(threading.enumerate()) - before
    wait_for("end of threads", lambda: not new(), lambda: str(new()))


def is_running(pid: int) -> bool:
    """Whether a process has not ended: one that its parent has not waited for has."""
    if Path("/proc/self").exists():
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except OSError:
            return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def descendants(pid: int, depth: int = 1) -> dict[int, int]:
    """Processes that a process started, and those that they started: how far down each is. Linux only."""
    found = {}
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread, or the whole process, that ended just now
            for child in map(int, task.read_text().split()):
                found |= {child: depth} | descendants(child, depth + 1)
    return found


# In processes of their own

_name = ""
_log = -1


def say(**told: Any) -> None:
    """A line of the log. Its reader sees all of it or nothing, also when this process is killed."""
    # Nothing is glued to a line that a kill tore: every write begins a line of its own.
    os.write(_log, b"\n" + json.dumps({"who": _name, "pid": os.getpid(), **told}).encode() + b"\n")


def stand_still(**told: Any) -> NoReturn:
    """Say something, and wait for a signal that ends this process."""
    if told:
        say(**told)
    while True:
        signal.pause()


def execute(*command: object) -> NoReturn:
    """Become another program. It finds the package that is under test."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    os.execvp(str(command[0]), [*map(str, command)])


def _begin(name: str, folder: Path, environment: dict[str, str], job: Callable[..., None], given: Any) -> None:
    global _name, _log
    os.environ.clear()
    os.environ.update(environment)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # ends with the server, which ends with the test
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for descriptor in (1, 2):
        os.dup2(os.open(_output(folder, name, descriptor), flags), descriptor)
    _name, _log = name, os.open(folder / "log.jsonl", flags, 0o666)
    try:
        job(*given[0], **given[1])
    except Exception as error:
        say(event="error", kind=type(error).__name__, text=str(error))
        raise


def _output(folder: Path, name: str, descriptor: int) -> Path:
    return folder / f"{name}.{('out', 'err')[descriptor - 1]}"


# In the test


class Processes:
    """Processes by name: the same name again is the same job, in a new process. `with` stops them all, by their ids."""

    def __init__(self, folder: Path, seed: int | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.seed = int(os.environ.get("BATCHWRIGHT_TEST_SEED") or random.randrange(10**9)) if seed is None else seed
        self.chance = random.Random(self.seed)
        self.may_fail = False
        """Whether a process may end with an error while the test waits for something else."""
        self._jobs: dict[str, tuple[Callable[..., None], Any]] = {}
        self._latest: dict[str, Any] = {}
        self._started: list[Any] = []
        self._signalled: set[int] = set()
        self._lines: list[dict[str, Any]] = []
        self._num_read = 0

    # Starting and signals

    def start(self, name: str, job: Callable[..., None], *arguments: Any, **settings: Any) -> None:
        self._jobs[name] = job, (arguments, settings)
        self.start_again(name)

    def start_again(self, *names: str) -> None:
        for name in names:
            job, given = self._jobs[name]
            for descriptor in (1, 2):
                _output(self.folder, name, descriptor).touch()
            arguments = (name, self.folder, dict(os.environ), job, given)
            process = _CONTEXT.Process(target=_begin, args=arguments, name=name)
            process.start()
            self._latest[name] = process
            self._started.append(process)

    def pid(self, name: str) -> int:
        return self._latest[name].pid

    def exit_code(self, name: str) -> int | None:
        """None while it runs; minus a signal's number if that ended it."""
        return self._latest[name].exitcode

    def send(self, name: str, number: int) -> None:
        """A signal, which the process may outlive."""
        self._signalled.add(self.pid(name))
        with suppress(ProcessLookupError):
            os.kill(self.pid(name), number)

    def kill(self, *names: str, number: int = signal.SIGKILL) -> None:
        """End processes, in random order, and wait until they have ended."""
        for name in self.chance.sample(names, len(names)):
            self.send(name, number)
        wait_for(f"end of {names}", lambda: not self._running(names), self.told)

    def pause(self, longest_seconds: float) -> None:
        """Until a random moment."""
        time.sleep(self.chance.uniform(0, longest_seconds))

    def disturb(self, names: list[str], times: int, *signals: int, longest_seconds: float = 0.03) -> None:
        """Signals (SIGKILL) to one after the other at random moments; each is started again once it has ended.

        A moment is soon after a process has said something; one in ten is while it starts.
        """
        for _ in range(times):
            name = self.chance.choice(names)
            if self.chance.random() < 0.9:
                self.wait_until_said(name)
            self.pause(longest_seconds)
            self.kill(name, number=self.chance.choice(signals or (signal.SIGKILL,)))
            self.start_again(name)

    # Waiting

    def wait_for(self, what: str, look: Callable[[], T]) -> T:
        """What `look` gives, once it gives something. A process that fails meanwhile fails the test."""

        def look_at_all() -> T:
            found = look()
            failed = [name for name in self._latest if self._has_failed(name)]
            assert found or self.may_fail or not failed, f"{failed} failed instead of {what}\n{self.told()}"
            return found

        return wait_for(what, look_at_all, self.told)

    def wait_until_said(self, name: str, **told: Any) -> dict[str, Any]:
        """The first line of a process, as it runs now, that has all that is told."""
        lines = lambda: (line for line in self.said(name) if line["pid"] == self.pid(name))
        return self.wait_for(
            f"line of {name} with {told}",
            lambda: next((line for line in lines() if told.items() <= line.items()), None),
        )

    def wait_for_lines(self, names: Iterable[str], num_lines: int) -> None:
        """Until each has said so much."""
        self.wait_for(
            f"{num_lines} lines of each of {names}", lambda: min(len(self.said(n)) for n in names) >= num_lines
        )

    def wait_for_end(self, name: str) -> int | None:
        """The exit code of a process that ends by itself, well or not."""
        wait_for(f"end of {name}", lambda: not self._running([name]), self.told)
        return self.exit_code(name)

    def finish(self, *names: str) -> None:
        """Wait until processes have ended by themselves, and well."""
        self.wait_for(f"end of {names}", lambda: not self._running(names))
        codes = [self.exit_code(name) for name in names]
        assert not any(codes), f"{codes}\n{self.told()}"

    def _running(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if self.exit_code(name) is None]

    def _has_failed(self, name: str) -> bool:
        return bool(self.exit_code(name)) and self.pid(name) not in self._signalled

    # What they said

    def said(self, *names: str) -> list[dict[str, Any]]:
        """Lines of these processes, or of all, over all their lives, in order: {"who", "pid", and what was said}."""
        with suppress(FileNotFoundError), open(self.folder / "log.jsonl", "rb") as file:
            file.seek(self._num_read)
            new = file.read()
            new = new[: new.rfind(b"\n") + 1]
            self._num_read += len(new)
            for line in filter(None, new.split(b"\n")):
                with suppress(ValueError):  # torn: as if its writer had been killed just before
                    self._lines.append(json.loads(line))
        return [line for line in self._lines if not names or line["who"] in names]

    def printed(self, name: str) -> str:
        return _output(self.folder, name, 1).read_text()

    def complained(self, name: str) -> str:
        return _output(self.folder, name, 2).read_text()

    def told(self) -> str:
        """For a test that fails: the seed, how each process ended, and the last that it said and printed."""
        parts = [f"seed {self.seed}"]
        for name in self._latest:
            parts.append(f"{name}: exit code {self.exit_code(name)}")
            parts += [text for text in (self.printed(name)[-2000:], self.complained(name)[-4000:]) if text]
        return "\n".join([*parts, *(json.dumps(line)[:500] for line in self.said()[-30:])])

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            process.kill()  # those that run: nothing happens to the others
        for process in self._started:
            process.join(SECONDS)
