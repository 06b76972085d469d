"""A demo's folder, and the training runs in it: processes of their own, as seen from outside."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchwright.base.checks import local_path
from batchwright.base.errors import SpecError, WorkerError
from batchwright.demo import ONE_THREAD
from batchwright.demo.screen import LiveLine, say
from batchwright.demo.train import CHECKPOINT, Checkpoint, read_checkpoint

__all__ = ["Run", "check_end", "first_difference", "perform", "python_process", "reports", "say_if_equal", "take"]

MARK = "made-by-batchwright-demo.txt"


def take(folder: Path) -> None:
    """Make the folder ours, with nothing of an earlier demo in it but the baked stores."""
    local_path(folder=folder)
    if folder.exists() and not (folder / MARK).exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SpecError(
            f"{folder} is there already and is not a demo's folder",
            parameter="folder",
            remedy="another folder: --folder my-demo",
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).write_text("Everything in this folder was made by `batchwright demo`, and can be deleted.\n")
    shutil.rmtree(folder / "runs", ignore_errors=True)


def perform(title: str, folder: Path, story: Callable[[], bool]) -> int:
    """Take the folder, tell the story, say whether all of it was as promised. Returns the exit code: 0 if it was."""
    began = time.monotonic()
    take(folder)
    say(title)
    say(f"Everything goes into {folder}; delete it when you like.")
    held = story()
    promised = "Everything was as promised." if held else "NOT everything was as promised: see above."
    say()
    say(f"The demo took {time.monotonic() - began:.0f} s. {promised}")
    return 0 if held else 1


@dataclass(slots=True)
class Run:
    """One training run as seen from outside: what its process printed, and what it left behind."""

    store: Path
    folder: Path
    num_steps: int
    checkpoint_steps: int
    settings: tuple[str, ...] = ()
    """Further arguments of the process."""
    losses: dict[int, str] = field(default_factory=dict)
    """Of each step, every bit of it: `float.hex`."""
    row_losses: dict[int, list[float]] = field(default_factory=dict)
    weights: str | None = None
    """A digest of the trained weights; None until the run has reached its end."""
    seconds: float = 0.0
    last: dict[str, Any] = field(default_factory=dict)

    def checkpoint(self) -> Checkpoint:
        return read_checkpoint(self.folder / CHECKPOINT)

    def watch(self, *, kill_after: int | None = None, note: Callable[[Run], str | None] | None = None) -> int:
        """Start a process, show what it does, and kill it after a step or wait for its end. Returns its id.

        What `note` has to say after a step stays on the screen.
        """
        began = time.monotonic()
        with _process(self) as process, LiveLine(sys.stdout) as line:
            for report in reports(process):
                if "step" not in report:
                    self.weights = report["weights"]
                    continue
                self.last = report
                self.losses[report["step"]] = report["loss"]
                self.row_losses[report["step"]] = report["row_losses"]
                line.show(self._progress())
                if note is not None and (noted := note(self)) is not None:
                    line.note(noted)
                if report["step"] == kill_after:
                    os.kill(process.pid, signal.SIGKILL)
                    break
            code = process.wait()
            line.keep(self._progress() if self.last else "")
        self.seconds += time.monotonic() - began
        remedy = "run the demo again" if code else "run the demo again, with more --steps"
        check_end("the training process", code, kill_after is not None, _log_of(self), remedy)
        return process.pid

    def _progress(self) -> str:
        return (
            f"step {self.last['step']:>4}/{self.num_steps - 1}   loss {float.fromhex(self.last['loss']):.3f}   "
            f"{self.last['tokens_per_second']:>9,.0f} tokens/s   data wait {self.last['data_wait_percent']:.1f} %"
        )

    def summary(self) -> str:
        losses = [float.fromhex(self.losses[step]) for step in sorted(self.losses)]
        tail = losses[-max(1, len(losses) // 20) :]
        return f"loss {losses[0]:.2f} -> {sum(tail) / len(tail):.2f} in {self.seconds:.1f} s"


def first_difference(expected: dict[int, str], got: dict[int, str]) -> int | None:
    """The first step of `got` whose loss is not the expected one.

    >>> first_difference({0: "0x1p+2", 1: "0x1p+1", 2: "0x1p+0"}, {1: "0x1p+1", 2: "0x1.8p+0"})
    2
    """
    return next((step for step in sorted(got) if expected.get(step) != got[step]), None)


def say_if_equal(whose: str, losses: dict[int, str], other: str, expected: dict[int, str], steps: range) -> bool:
    """Say whether the losses are the expected ones, to the last bit, and reach over all of the steps."""
    step = first_difference(expected, losses)
    missing, runner = set(steps) - set(losses), whose.removesuffix("'s")
    if step is not None:
        say(f"DIFFERENT: the {whose} loss at step {step} is {losses[step]}")
        say(f"           the {other} is {expected.get(step)}")
    elif missing:
        say(f"DIFFERENT: the {runner} never came to step {min(missing)}")
    else:
        say(
            f"The {whose} losses, steps {steps[0]} to {steps[-1]}, equal the {other} bit for bit: "
            f"{len(losses)} of {len(losses)}."
        )
    return step is None and not missing


def _process(run: Run) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    """The training process of a run."""
    run.folder.mkdir(parents=True, exist_ok=True)
    arguments = [str(run.store), str(run.folder), "--steps", str(run.num_steps)]
    arguments += ["--checkpoint-steps", str(run.checkpoint_steps), *run.settings]
    return python_process("batchwright.demo.train", *arguments, log=_log_of(run), stdin=subprocess.DEVNULL)


@contextlib.contextmanager
def python_process(module: str, *arguments: str, log: Path, stdin: int) -> Iterator[subprocess.Popen[str]]:
    """A module of this package as a process of its own. Whatever happens in the block, it does not outlive it."""
    package = Path(__file__).resolve().parents[2]
    search = os.pathsep.join(filter(None, [str(package), os.environ.get("PYTHONPATH")]))
    with (
        open(log, "w") as errors,
        subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **ONE_THREAD, "PYTHONPATH": search},
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def _log_of(run: Run) -> Path:
    return run.folder / "stderr.txt"


def reports(process: subprocess.Popen[str]) -> Iterator[Any]:
    """What a process says of itself: JSON, line by line."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.endswith("\n"):  # a killed process may leave half a line
            yield json.loads(line)


def check_end(whose: str, code: int, was_killed: bool, log: Path, remedy: str = "run the demo again") -> None:
    """A process ended as it should: by SIGKILL if it was killed, else well."""
    if code != (-signal.SIGKILL if was_killed else 0):
        raise WorkerError(
            f"{whose} ended too early" if code else f"{whose} ended before it was killed",
            exit_code=code,
            output=log.read_text().strip()[-2000:] or None,
            remedy=remedy,
        )
