"""A corpus and a training run: `train` is its process, and `TrainingRun` follows that, kills it and starts it again.

`train` prints one JSON line for each step. Started again, it continues from its checkpoint.
"""

from __future__ import annotations

import contextlib
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import batchwright as bw
from batchwright.demo import model
from batchwright.demo.harness import LiveLine, Report, expect, follow, report, say
from batchwright.demo.model import CHECKPOINT, Checkpoint, digest_of, read_checkpoint, resumed, write_checkpoint

BATCH_ROWS = 8
ROW_TOKENS = 128
LEARNING_RATE = 0.005
WARM_UP_STEPS = 20


def bake_library(store: Path, *more: Path) -> Path:
    """Bake Python's own standard library, and more files: a text that every machine has."""
    library = sysconfig.get_path("stdlib") + "/*.py"
    recipe = bw.DatasetRecipe(seed=0)
    recipe.add_ingredient([library, *map(str, more)], format="text", name="code")
    recipe.prepare_step(bw.tokenize("bytes", append_eos=True))
    say(library)
    with contextlib.redirect_stderr(sys.stdout):  # bake reports to stderr: here it is part of the story
        bw.bake(recipe, to=store, on_error="skip")
    return store


def kept_checkpoint(folder: Path, num_steps: int) -> Path:
    """The checkpoint after `num_steps`, in a run that keeps all of them."""
    return folder / f"after-{num_steps:06d}.npz"


def train(
    store: str, folder: str, num_steps: int, checkpoint_steps: int, *, keep_all: bool = False, **settings: Any
) -> None:
    """Train from the checkpoint in `folder`, or from nothing, to step `num_steps`; report each step.

    `settings` are those of the loader, where they differ.
    """
    loader = bw.PretrainDataLoader(
        store, **{"batch_size": BATCH_ROWS, **settings}, epochs=None, framework="numpy", rank=0, world_size=1
    )
    path = Path(folder) / CHECKPOINT
    run = resumed(path, model.new_weights(loader.store.vocab_size))
    if run.loader:
        loader.load_state_dict(run.loader)
    started, first_step = time.perf_counter(), run.adam.num_updates
    for step in range(first_step, num_steps):
        batch = loader.get_batch()
        losses, gradients = model.row_losses_and_gradients(run.weights, batch.input_ids, batch.targets)
        run.adam.update(run.weights, gradients, rate=_learning_rate(step, num_steps))
        if (step + 1) % checkpoint_steps == 0 or step + 1 == num_steps:
            run.loader = loader.state_dict()
            write_checkpoint(path, run)
            if keep_all:
                write_checkpoint(kept_checkpoint(path.parent, step + 1), run)
        report(
            step=step,
            loss=float(losses.mean()).hex(),
            row_losses=losses.round(4).tolist(),
            tokens_per_second=(step + 1 - first_step) * batch.input_ids.size / (time.perf_counter() - started),
            data_wait_percent=loader.stats()["data_wait_percent"],
        )
    report(weights=digest_of(run.weights))


def _learning_rate(step: int, num_steps: int) -> float:
    """Up in the first steps, then down to a tenth."""
    return LEARNING_RATE * min(1.0, (step + 1) / WARM_UP_STEPS) * (1 - 0.9 * step / num_steps)


@dataclass(slots=True)
class TrainingRun:
    """One training run, as seen from outside: the losses its process reported, and the files it left."""

    store: Path
    folder: Path
    num_steps: int
    checkpoint_steps: int
    settings: dict[str, Any] = field(default_factory=lambda: {"chunk_size": ROW_TOKENS, "seed": 7})
    losses: dict[int, str] = field(default_factory=dict)
    """By step, every bit of them: `float.hex`."""
    row_losses: dict[int, list[float]] = field(default_factory=dict)
    weights: str | None = None
    """A digest of the trained weights; None until the run has reached its end."""
    seconds: float = 0.0

    def checkpoint(self) -> Checkpoint:
        return read_checkpoint(self.folder / CHECKPOINT)

    def watch(self, *, kill_after: int | None = None, note: Callable[[TrainingRun], str | None] | None = None) -> int:
        """Start a process, show its progress, and kill it after a step or wait for its end. Returns its id.

        The text that `note` returns after a step stays on the screen.
        """
        progress = ""

        def take(report: Report) -> bool:
            nonlocal progress
            if "step" not in report:
                self.weights = report["weights"]
                return False
            step: int = report["step"]
            self.losses[step], self.row_losses[step] = report["loss"], report["row_losses"]
            progress = self._progress(report)
            line.show(progress)
            if note is not None and (noted := note(self)) is not None:
                line.note(noted)
            return step == kill_after

        began = time.monotonic()
        named = {"store": self.store, "folder": self.folder, **self.settings}
        named |= {"num_steps": self.num_steps, "checkpoint_steps": self.checkpoint_steps}
        with LiveLine(sys.stdout) as line:
            pid = follow(train, take, log=self.folder / "stderr.txt", **named)
            line.keep(progress)
        self.seconds += time.monotonic() - began
        return pid

    def _progress(self, report: Report) -> str:
        return (
            f"step {report['step']:>4}/{self.num_steps - 1}   loss {float.fromhex(report['loss']):.3f}   "
            f"{report['tokens_per_second']:>9,.0f} tokens/s   data wait {report['data_wait_percent']:.1f} %"
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
