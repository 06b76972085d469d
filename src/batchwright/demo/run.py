"""`batchwright demo`, from top to bottom: bake, train, kill, resume, compare, trace."""

from __future__ import annotations

import argparse
import contextlib
import glob
import json
import os
import random
import shlex
import sys
import sysconfig
import textwrap
import time
from pathlib import Path
from typing import Any

import batchwright as bw
from batchwright.base.errors import SpecError
from batchwright.demo.runs import Run, say_if_equal, take
from batchwright.demo.screen import COLUMNS, command, exit_code_of, head, say, show_pieces
from batchwright.demo.train import BATCH_ROWS, CHECKPOINT, ROW_TOKENS, Checkpoint

__all__ = ["main"]

FAULTY_FOLDERS = ("test/encoded_modules", "test/tokenizedata", "email/mime")
"""Folders of the standard library with files that are not UTF-8, or empty. Some systems leave the tests out."""


def main(argv: list[str] | None = None) -> int:
    """Run the demo. 0: everything it promises held; 1: a resumed run differed; 2: not done; 130: Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="batchwright demo",
        description="Bake Python's own sources, train a tiny model on them, kill it, resume it bit for bit, trace a "
        "step to its files. No network, no torch, about a minute.",
        epilog="`batchwright demo spike` is another: the loss jumps; the document behind it is found and skipped.",
    )
    parser.add_argument("--folder", type=Path, default=Path(".demo"), help="where everything goes (default: .demo)")
    parser.add_argument("--steps", type=int, default=800, help="steps to train (default: 800)")
    parser.add_argument("--kill-at", type=int, metavar="STEP", help="kill after this step (default: a random one)")
    asked = parser.parse_args(argv)
    return exit_code_of(lambda: _demo(asked.folder, asked.steps, asked.kill_at))


def _demo(folder: Path, num_steps: int, kill_at: int | None) -> int:
    if num_steps < 24:
        raise SpecError(
            f"--steps {num_steps} leaves no room to kill and resume", parameter="steps", remedy="--steps 24"
        )
    checkpoint_steps = num_steps // 12
    if kill_at is None:
        kill_at = _random_kill(num_steps, checkpoint_steps)
    elif not checkpoint_steps <= kill_at < num_steps - 1:
        raise SpecError(
            f"--kill-at {kill_at} is not between the first checkpoint and the end",
            parameter="kill_at",
            remedy=f"a step from {checkpoint_steps} to {num_steps - 2}",
        )
    started = time.monotonic()
    take(folder)
    say("batchwright demo: from files to batches, and from a step back to its files.")
    say(f"Everything goes into {folder}; delete it when you like.")

    head(1, "Bake Python's own standard library, each file a document, each byte a token")
    store = _bake_corpus(folder)
    _bake_faulty_files(folder)

    head(2, f"Train a tiny neural language model: plain NumPy, {num_steps} steps of {BATCH_ROWS} x {ROW_TOKENS} bytes")
    whole = Run(store, folder / "runs" / "whole", num_steps, checkpoint_steps)
    whole.watch()
    say(f"Done: {whole.summary()}")

    head(3, "Train it again, and kill it")
    run = Run(store, folder / "runs" / "killed", num_steps, checkpoint_steps)
    pid = run.watch(kill_after=kill_at)
    before = dict(run.losses)
    say(f"kill -9: process {pid} got SIGKILL after step {kill_at}, in the middle of its work.")
    checkpoint = _last_checkpoint(run)
    resumed = _resume(run)
    same = _compare(whole, before, resumed, kill_at, checkpoint)

    step = _trace_a_step(store, whole, resumed.checkpoint().loader)
    _what_next(store, step, checkpoint.loader["plan"])
    say(
        f"The demo took {time.monotonic() - started:.0f} s. Losses and weights after resume: "
        f"{'equal, bit for bit.' if same else 'DIFFERENT.'}"
    )
    return 0 if same else 1


def _random_kill(num_steps: int, checkpoint_steps: int) -> int:
    """A step in the middle third, some way past a checkpoint, so that the killed process loses work."""
    middle = range(num_steps // 3, 2 * num_steps // 3)
    return random.SystemRandom().choice([s for s in middle if (s + 1) % checkpoint_steps >= checkpoint_steps // 2])


# 1. The store


def _bake_corpus(folder: Path) -> Path:
    sources = sysconfig.get_path("stdlib") + "/*.py"
    store = folder / "corpus.store"
    recipe = bw.DatasetRecipe(seed=0)
    recipe.add_ingredient(sources, format="text", name="code")
    recipe.prepare_step(bw.tokenize("bytes", append_eos=True))
    say(f"{sources}")
    with contextlib.redirect_stderr(sys.stdout):  # bake reports to stderr: here it is part of the story
        bw.bake(recipe, to=store, on_error="skip")
    return store


def _bake_faulty_files(folder: Path) -> None:
    """Bake files of which some cannot be read, and show what is said of them."""
    library = sysconfig.get_path("stdlib")
    files = [Path(path) for part in FAULTY_FOLDERS for path in sorted(glob.glob(f"{library}/{part}/*.py"))]
    made = _make_missing_faults(folder / "faulty", files)
    recipe = bw.DatasetRecipe(seed=0)
    recipe.add_ingredient([*map(str, files), *map(str, made)], format="text", name="faulty")
    recipe.prepare_step(bw.tokenize("bytes", append_eos=True))
    store = bw.bake(recipe, to=folder / "faulty.store", on_error="skip", show_progress=False)

    part = store.report["ingredients"]["faulty"]
    folders = [*dict.fromkeys(os.path.relpath(file.parent, library) for file in files), *{str(p.parent) for p in made}]
    say()
    say(f"Not every file can be used. Of {part['rows_read']} files in {', '.join(folders)},")
    counts = ", ".join(f"{count} x {reason}" for reason, count in part["dropped"].items())
    say(f'{part["documents"]} became documents; left out, with on_error="skip": {counts}:')
    for file, _, reason in store.report["examples"]:
        name = os.path.relpath(file, library) if Path(file) in files else file
        say(f"  {name}: {reason}")
    if made:
        say(f"(This Python comes without such files, so the demo made {' and '.join(p.name for p in made)}.)")


def _make_missing_faults(folder: Path, files: list[Path]) -> list[Path]:
    """Files of our own for the faults that this machine's library does not have."""
    contents = [file.read_bytes() for file in files]
    wanted = {}
    if all(_is_utf8(content) for content in contents):
        wanted["latin1.py"] = "# Café\n".encode("latin-1")
    if all(contents):
        wanted["empty.py"] = b""
    for name, content in wanted.items():
        folder.mkdir(exist_ok=True)
        if not (folder / name).exists():
            (folder / name).write_bytes(content)
    return [folder / name for name in wanted]


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


# 2 and 3. Training, in processes of its own


def _resume(run: Run) -> Run:
    """The same command again: a new process, which finds the checkpoint of the killed one."""
    resumed = Run(run.store, run.folder, run.num_steps, run.checkpoint_steps)
    pid = resumed.watch()
    say(f"Process {pid}, started after the kill, went on from step {min(resumed.losses)}.")
    return resumed


def _last_checkpoint(run: Run) -> Checkpoint:
    checkpoint = run.checkpoint()
    num_bytes = (run.folder / CHECKPOINT).stat().st_size
    data = json.dumps(checkpoint.loader)
    say(
        f"Its last checkpoint, after {checkpoint.adam.num_updates} steps, has {num_bytes / 1e6:.1f} MB; the data's "
        f"part of it is {len(data)} bytes:"
    )
    say(f"  {data}")
    say("Now a new process, with the same command:")
    return checkpoint


def _compare(whole: Run, before: dict[int, str], resumed: Run, kill_at: int, checkpoint: Checkpoint) -> bool:
    """Say whether the killed and resumed run did exactly what the uninterrupted one did."""
    say()
    same = True
    for what, losses, first, stop in (
        ("killed", before, 0, kill_at + 1),
        ("resumed", resumed.losses, checkpoint.adam.num_updates, whole.num_steps),
    ):
        same = say_if_equal(f"{what} run's", losses, "uninterrupted run's", whole.losses, range(first, stop)) and same
    if resumed.weights == whole.weights:
        say(f"So do the weights after step {whole.num_steps - 1}: sha256 {whole.weights}... in both runs.")
    else:
        say(f"DIFFERENT: the weights at the end: {resumed.weights} here, {whole.weights} in the uninterrupted run")
        same = False
    return same


# 4. Back to the files


def _trace_a_step(store: Path, whole: Run, state: dict[str, Any]) -> int:
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
    say(f"And the other way: {os.path.relpath(file, library)} was used in {len(steps)} of the {whole.num_steps} steps:")
    say(textwrap.shorten(", ".join(map(str, steps)), COLUMNS - 2, placeholder=" ..."))
    return step


# 5. What next


def _what_next(store: Path, step: int, plan: str) -> None:
    """Commands that can be pasted as they are."""
    batchwright, store_name = command(), shlex.quote(str(store))
    head(5, "Try next")
    for arguments, what in (
        (f"info {store_name}", "what is in the store"),
        (f"look {store_name} {plan[:8]} --step {step}", "a batch, decoded"),
        (f"plan {store_name} --chunk-size 2048", "epochs and tokens of a run, before it costs anything"),
        (f"drill {plan[:8]} --store {store_name}", "200 steps under kill -9, on 1, 3 and 8 ranks"),
    ):
        say(f"  # {what}")
        say(f"  {batchwright} {arguments}")
    say("The example at the top of README.md is the same path in 12 lines, for your own files.")
    say()


if __name__ == "__main__":
    sys.exit(main())
