"""A training run of a demo, as seen from outside: the process of `demo/train.py`, its losses and its checkpoints."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchwright.demo.harness import LiveLine, check_exit, expect, python_process, reports, say
from batchwright.demo.train import CHECKPOINT, Checkpoint, read_checkpoint

__all__ = ["TrainingRun", "expect_equal", "expect_equal_weights"]


@dataclass(slots=True)
class TrainingRun:
    """One training run: the losses its process printed, and the files it left."""

    store: Path
    folder: Path
    num_steps: int
    checkpoint_steps: int
    settings: tuple[object, ...] = ()
    """Further arguments of the process."""
    losses: dict[int, str] = field(default_factory=dict)
    """By step, every bit of them: `float.hex`."""
    row_losses: dict[int, list[float]] = field(default_factory=dict)
    weights: str | None = None
    """A digest of the trained weights; None until the run has reached its end."""
    seconds: float = 0.0
    last: dict[str, Any] = field(default_factory=dict)

    def checkpoint(self) -> Checkpoint:
        return read_checkpoint(self.folder / CHECKPOINT)

    def watch(self, *, kill_after: int | None = None, note: Callable[[TrainingRun], str | None] | None = None) -> int:
        """Start a process, show its progress, and kill it after a step or wait for its end. Returns its id.

        The text that `note` returns after a step stays on the screen.
        """
        began, log = time.monotonic(), self.folder / "stderr.txt"
        arguments = [self.store, self.folder, "--steps", self.num_steps, "--checkpoint-steps", self.checkpoint_steps]
        with (
            python_process("batchwright.demo.train", *arguments, *self.settings, log=log) as process,
            LiveLine(sys.stdout) as line,
        ):
            for report in reports(process):
                if "step" not in report:
                    self.weights = report["weights"]
                    continue
                self._take_in(report)
                line.show(self._progress())
                if note is not None and (noted := note(self)) is not None:
                    line.note(noted)
                if report["step"] == kill_after:
                    os.kill(process.pid, signal.SIGKILL)
                    break
            process.wait()
            if self.last:
                line.keep(self._progress())
        self.seconds += time.monotonic() - began
        check_exit(process, "the training process", log, killed=kill_after is not None)
        return process.pid

    def _take_in(self, report: dict[str, Any]) -> None:
        self.last = report
        self.losses[report["step"]] = report["loss"]
        self.row_losses[report["step"]] = report["row_losses"]

    def _progress(self) -> str:
        return (
            f"step {self.last['step']:>4}/{self.num_steps - 1}   loss {float.fromhex(self.last['loss']):.3f}   "
            f"{self.last['tokens_per_second']:>9,.0f} tokens/s   data wait {self.last['data_wait_percent']:.1f} %"
        )

    def summary(self) -> str:
        losses = [float.fromhex(self.losses[step]) for step in sorted(self.losses)]
        tail = losses[-max(1, len(losses) // 20) :]
        return f"loss {losses[0]:.2f} -> {sum(tail) / len(tail):.2f} in {self.seconds:.1f} s"


def expect_equal(whose: str, losses: dict[int, str], other: str, expected: dict[int, str], steps: range) -> None:
    """The losses of two runs must be equal to the last bit, over all of some steps."""
    for step in steps:
        expect(step in losses, f"the {whose} never came to step {step}")
        same = losses[step] == expected[step]
        expect(same, f"the {whose}'s loss at step {step} is {losses[step]}, the {other}'s {expected[step]}")
    say(
        f"The {whose}'s losses, steps {steps[0]} to {steps[-1]}, equal the {other}'s bit for bit: "
        f"{len(steps)} of {len(steps)}."
    )


def expect_equal_weights(run: TrainingRun, other: TrainingRun, where: str) -> None:
    """The weights of two runs must be equal at their end."""
    expect(run.weights == other.weights, f"the weights at the end are {run.weights}, {other.weights} in the {where}")
    say(f"So do the weights after step {run.num_steps - 1}: sha256 {run.weights}... in both.")
