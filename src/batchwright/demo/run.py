"""`batchwright demo`, from top to bottom: bake, train, kill, resume, compare, trace."""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import sys
import sysconfig
import textwrap
from pathlib import Path
from typing import Any

import batchwright as bw
from batchwright.demo.harness import COLUMNS, Demo, head, near, say, show_pieces
from batchwright.demo.model import CHECKPOINT, Checkpoint
from batchwright.demo.train import BATCH_ROWS, ROW_TOKENS, TrainingRun, bake_library, expect_equal, expect_equal_weights


def _tell(folder: Path, steps: int) -> None:
    checkpoint_steps = steps // 12
    kill_at = _random_kill(steps, checkpoint_steps)
    head(1, "Bake Python's own standard library, each file a document, each byte a token")
    store = bake_library(folder / "corpus.store")

    head(2, f"Train a tiny neural language model: plain NumPy, {steps} steps of {BATCH_ROWS} x {ROW_TOKENS} bytes")
    whole = TrainingRun(store, folder / "runs" / "whole", steps, checkpoint_steps)
    whole.watch()
    say(f"Done: {whole.summary()}")

    head(3, "Train it again, and kill it")
    run = TrainingRun(store, folder / "runs" / "killed", steps, checkpoint_steps)
    pid = run.watch(kill_after=kill_at)
    say(f"kill -9: process {pid} got SIGKILL after step {kill_at}, in the middle of its work.")
    checkpoint = _last_checkpoint(run)
    resumed = _resume(run)
    say()
    expect_equal("killed run", run.losses, "uninterrupted run", whole.losses, range(kill_at + 1))
    again = range(checkpoint.adam.num_updates, steps)
    expect_equal("resumed run", resumed.losses, "uninterrupted run", whole.losses, again)
    expect_equal_weights(resumed, whole, "uninterrupted run")

    step = _trace_a_step(store, whole, resumed.checkpoint().loader)
    _what_next(store, step, checkpoint.loader["plan"])


main = Demo(
    name="",
    title="from files to batches, and from a step back to its files.",
    description="Bake Python's own sources, train a tiny model on them, kill it, resume it bit for bit, trace a step "
    "to its files. `batchwright demo spike`, `chat`, `buffer` and `queue` are the others.",
    tell=_tell,
    steps=800,
    fewest_steps=24,
).main


def _random_kill(num_steps: int, checkpoint_steps: int) -> int:
    """A step in the middle third, some way past a checkpoint, so that the killed process loses work."""
    middle = range(num_steps // 3, 2 * num_steps // 3)
    return random.SystemRandom().choice([s for s in middle if (s + 1) % checkpoint_steps >= checkpoint_steps // 2])


# 3. Killed and resumed


def _resume(run: TrainingRun) -> TrainingRun:
    """Run the same command again: a new process, which finds the checkpoint of the killed one."""
    resumed = TrainingRun(run.store, run.folder, run.num_steps, run.checkpoint_steps)
    pid = resumed.watch()
    say(f"Process {pid}, started after the kill, went on from step {min(resumed.losses)}.")
    return resumed


def _last_checkpoint(run: TrainingRun) -> Checkpoint:
    checkpoint = run.checkpoint()
    num_bytes = (run.folder / CHECKPOINT).stat().st_size
    data = json.dumps(checkpoint.loader)
    say(
        f"Its last checkpoint, after {checkpoint.adam.num_updates} steps, has {num_bytes / 1e6:.1f} MB; "
        f"{len(data)} bytes of it say where the data is:",
        hang=0,
    )
    say(f"  {data}")
    say("Now a new process, with the same command:")
    return checkpoint


# 4. Back to the files


def _trace_a_step(store: Path, whole: TrainingRun, state: dict[str, Any]) -> int:
    """Show the files of the step with the largest loss, and the steps of one of those files. Returns that step."""
    library = sysconfig.get_path("stdlib")
    warm = {step: float.fromhex(loss) for step, loss in whole.losses.items() if step >= whole.num_steps // 4}
    step = max(warm, key=lambda s: warm[s])
    head(4, f"What was in step {step}? After warm-up its loss was the largest: {warm[step]:.3f}")
    records = list(bw.trace(store, state, step=step))
    show_pieces(records, library)
    file = records[0].file
    uses = bw.find(store, state, file=file, until=state["position"])
    steps = sorted({record.step for record in uses if record.step is not None})
    say()
    say(f"And the other way: {near(file, library)} was used in {len(steps)} of the {whole.num_steps} steps:")
    say(textwrap.shorten(", ".join(map(str, steps)), COLUMNS - 2, placeholder=" ..."))
    return step


# 5. What next


def _what_next(store: Path, step: int, plan: str) -> None:
    """Print commands that can be pasted as they are."""
    command, store_name = _command(), shlex.quote(str(store))
    head(5, "Try next")
    for arguments, what in (
        (f"info {store_name}", "what is in the store"),
        (f"look {store_name} {plan[:8]} --step {step}", "a batch, decoded"),
        (f"plan {store_name} --chunk-size 2048", "epochs and tokens of a run, before it costs anything"),
        (f"drill {plan[:8]} --store {store_name}", "200 steps under kill -9, on 1, 3 and 8 ranks"),
    ):
        say(f"  # {what}")
        print(f"  {command} {arguments}", flush=True)  # never folded: it is to be pasted
    say("The example at the top of README.md is the same path in 12 lines, for your own files.")


def _command() -> str:
    """The batchwright command as this shell finds it: `make demo` installs it where a shell does not look."""
    beside = Path(sys.executable).with_name("batchwright")
    if not beside.exists():
        return f"{shlex.quote(near(sys.executable))} -m batchwright"
    on_path = shutil.which("batchwright")
    return "batchwright" if on_path and os.path.samefile(on_path, beside) else shlex.quote(near(beside))
