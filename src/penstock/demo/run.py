"""`penstock demo`, from top to bottom: bake, train, kill, resume, compare, trace."""

from __future__ import annotations

import argparse
import contextlib
import glob
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import penstock as ps
from penstock.demo.train import BATCH_ROWS, CHECKPOINT, ROW_TOKENS, Checkpoint, read_checkpoint
from penstock.errors import PenstockError, SpecError, WorkerError

__all__ = ["first_difference", "main"]

COLUMNS = 100
SECONDS_BETWEEN_LINES = 2.0
MARK = "made-by-penstock-demo.txt"
FAULTY_FOLDERS = ("test/encoded_modules", "test/tokenizedata", "email/mime")
"""Folders of the standard library with files that are not UTF-8, or empty. Some systems leave the tests out."""
ONE_THREAD = dict.fromkeys(
    ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "BLIS_NUM_THREADS"), "1"
)
"""Threads of a matrix product may split its sums differently each time: with one, two processes agree in every bit."""


def main(argv: list[str] | None = None) -> int:
    """Run the demo. 0: everything it promises held; 1: a resumed run differed; 2: not done; 130: Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="penstock demo",
        description="Bake Python's own sources, train a tiny model on them, kill it, resume it bit for bit, trace a "
        "step to its files. No network, no torch, about a minute.",
    )
    parser.add_argument("--folder", type=Path, default=Path(".demo"), help="where everything goes (default: .demo)")
    parser.add_argument("--steps", type=int, default=800, help="steps to train (default: 800)")
    parser.add_argument("--kill-at", type=int, metavar="STEP", help="kill after this step (default: a random one)")
    asked = parser.parse_args(argv)
    try:
        return _demo(asked.folder, asked.steps, asked.kill_at)
    except KeyboardInterrupt:
        print("\nStopped. Nothing is left running; the same command starts over.", flush=True)
        return 130
    except PenstockError as error:
        print(f"penstock: {error}", file=sys.stderr, flush=True)
        return 2


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
    _take(folder)
    _say("penstock demo: from files to batches, and from a step back to its files.")
    _say(f"Everything goes into {folder}; delete it when you like.")

    _head(1, "Bake Python's own standard library, each file a document, each byte a token")
    store = _bake_corpus(folder)
    _bake_faulty_files(folder)

    _head(2, f"Train a tiny neural language model: plain NumPy, {num_steps} steps of {BATCH_ROWS} x {ROW_TOKENS} bytes")
    whole = _Run(store, folder / "runs" / "whole", num_steps, checkpoint_steps)
    whole.watch()
    _say(f"Done: {whole.summary()}")

    _head(3, "Train it again, and kill it")
    run = _Run(store, folder / "runs" / "killed", num_steps, checkpoint_steps)
    pid = run.watch(kill_after=kill_at)
    before = dict(run.losses)
    _say(f"kill -9: process {pid} got SIGKILL after step {kill_at}, in the middle of its work.")
    checkpoint = _last_checkpoint(run)
    resumed = _resume(run)
    same = _compare(whole, before, resumed, kill_at, checkpoint)

    step = _trace_a_step(store, whole, resumed.checkpoint().loader)
    _what_next(store, step, checkpoint.loader["plan"])
    _say(
        f"The demo took {time.monotonic() - started:.0f} s. Losses and weights after resume: "
        f"{'equal, bit for bit.' if same else 'DIFFERENT.'}"
    )
    return 0 if same else 1


def _random_kill(num_steps: int, checkpoint_steps: int) -> int:
    """A step in the middle third, some way past a checkpoint, so that the killed process loses work."""
    middle = range(num_steps // 3, 2 * num_steps // 3)
    return random.SystemRandom().choice([s for s in middle if (s + 1) % checkpoint_steps >= checkpoint_steps // 2])


# 1. The store


def _take(folder: Path) -> None:
    """Make the folder ours, with nothing of an earlier demo in it but the baked stores."""
    if folder.exists() and not (folder / MARK).exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SpecError(
            f"{folder} is there already and is not a demo's folder",
            parameter="folder",
            remedy="another folder: penstock demo --folder my-demo",
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).write_text("Everything in this folder was made by `penstock demo`, and can be deleted.\n")
    shutil.rmtree(folder / "runs", ignore_errors=True)


def _bake_corpus(folder: Path) -> Path:
    sources = sysconfig.get_path("stdlib") + "/*.py"
    store = folder / "corpus.store"
    recipe = ps.DatasetRecipe(seed=0)
    recipe.add_ingredient(sources, format="text", name="code")
    recipe.prepare_step(ps.tokenize("bytes", append_eos=True))
    _say(f"{sources}")
    with contextlib.redirect_stderr(sys.stdout):  # bake reports to stderr: here it is part of the story
        ps.bake(recipe, to=store, on_error="skip")
    return store


def _bake_faulty_files(folder: Path) -> None:
    """Bake files of which some cannot be read, and show what is said of them."""
    library = sysconfig.get_path("stdlib")
    files = [Path(path) for part in FAULTY_FOLDERS for path in sorted(glob.glob(f"{library}/{part}/*.py"))]
    made = _make_missing_faults(folder / "faulty", files)
    recipe = ps.DatasetRecipe(seed=0)
    recipe.add_ingredient([*map(str, files), *map(str, made)], format="text", name="faulty")
    recipe.prepare_step(ps.tokenize("bytes", append_eos=True))
    store = ps.bake(recipe, to=folder / "faulty.store", on_error="skip", show_progress=False)

    part = store.report["ingredients"]["faulty"]
    folders = [*dict.fromkeys(os.path.relpath(file.parent, library) for file in files), *{str(p.parent) for p in made}]
    _say()
    _say(f"Not every file can be used. Of {part['rows_read']} files in {', '.join(folders)},")
    counts = ", ".join(f"{count} x {reason}" for reason, count in part["dropped"].items())
    _say(f'{part["documents"]} became documents; left out, with on_error="skip": {counts}:')
    for file, _, reason in store.report["examples"]:
        name = os.path.relpath(file, library) if Path(file) in files else file
        _say(f"  {name}: {reason}")
    if made:
        _say(f"(This Python comes without such files, so the demo made {' and '.join(p.name for p in made)}.)")


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


@dataclass(slots=True)
class _Run:
    """One training run as seen from outside: what its process printed, and what it left behind."""

    store: Path
    folder: Path
    num_steps: int
    checkpoint_steps: int
    losses: dict[int, str] = field(default_factory=dict)
    """Of each step, every bit of it: `float.hex`."""
    weights: str | None = None
    """A digest of the trained weights; None until the run has reached its end."""
    seconds: float = 0.0
    last: dict[str, Any] = field(default_factory=dict)

    def checkpoint(self) -> Checkpoint:
        return read_checkpoint(self.folder / CHECKPOINT)

    def watch(self, *, kill_after: int | None = None) -> int:
        """Start a process, show what it does, and kill it after a step or wait for its end. Returns its id."""
        began = time.monotonic()
        with _process(self) as process, _LiveLine(sys.stdout) as line:
            for report in _reports(process):
                if "step" not in report:
                    self.weights = report["weights"]
                    continue
                self.last = report
                self.losses[report["step"]] = report["loss"]
                line.show(self._progress())
                if report["step"] == kill_after:
                    os.kill(process.pid, signal.SIGKILL)
                    break
            code = process.wait()
            line.keep(self._progress() if self.last else "")
        self.seconds += time.monotonic() - began
        if code != (0 if kill_after is None else -signal.SIGKILL):
            raise WorkerError(
                "the training process ended too early" if code else "the training process ended before it was killed",
                exit_code=code,
                output=_log_of(self).read_text().strip()[-2000:] or None,
                remedy="run the demo again" if code else "run the demo again, with more --steps",
            )
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


def _resume(run: _Run) -> _Run:
    """The same command again: a new process, which finds the checkpoint of the killed one."""
    resumed = _Run(run.store, run.folder, run.num_steps, run.checkpoint_steps)
    pid = resumed.watch()
    _say(f"Process {pid}, started after the kill, went on from step {min(resumed.losses)}.")
    return resumed


def _last_checkpoint(run: _Run) -> Checkpoint:
    checkpoint = run.checkpoint()
    num_bytes = (run.folder / CHECKPOINT).stat().st_size
    data = json.dumps(checkpoint.loader)
    _say(
        f"Its last checkpoint, after {checkpoint.adam.num_updates} steps, has {num_bytes / 1e6:.1f} MB; the data's "
        f"part of it is {len(data)} bytes:"
    )
    _say(f"  {data}")
    _say("Now a new process, with the same command:")
    return checkpoint


def first_difference(expected: dict[int, str], got: dict[int, str]) -> int | None:
    """The first step of `got` whose loss is not the expected one.

    >>> first_difference({0: "0x1p+2", 1: "0x1p+1", 2: "0x1p+0"}, {1: "0x1p+1", 2: "0x1.8p+0"})
    2
    """
    return next((step for step in sorted(got) if expected.get(step) != got[step]), None)


def _compare(whole: _Run, before: dict[int, str], resumed: _Run, kill_at: int, checkpoint: Checkpoint) -> bool:
    """Say whether the killed and resumed run did exactly what the uninterrupted one did."""
    _say()
    same = True
    for what, losses, first, stop in (
        ("killed", before, 0, kill_at + 1),
        ("resumed", resumed.losses, checkpoint.adam.num_updates, whole.num_steps),
    ):
        step = first_difference(whole.losses, losses)
        missing = set(range(first, stop)) - set(losses)
        if step is not None:
            _say(f"DIFFERENT: the {what} run's loss at step {step} is {losses[step]}")
            _say(f"           the uninterrupted run's is {whole.losses.get(step)}")
        elif missing:
            _say(f"DIFFERENT: the {what} run never came to step {min(missing)}")
        else:
            _say(
                f"The {what} run's losses, steps {first} to {stop - 1}, equal the uninterrupted run's "
                f"bit for bit: {len(losses)} of {len(losses)}."
            )
        same = same and step is None and not missing
    if resumed.weights == whole.weights:
        _say(f"So do the weights after step {whole.num_steps - 1}: sha256 {whole.weights}... in both runs.")
    else:
        _say(f"DIFFERENT: the weights at the end: {resumed.weights} here, {whole.weights} in the uninterrupted run")
        same = False
    return same


@contextlib.contextmanager
def _process(run: _Run) -> Iterator[subprocess.Popen[str]]:
    """The training process of a run. Whatever happens in the block, it does not outlive it."""
    run.folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-P", "-m", "penstock.demo.train", str(run.store), str(run.folder)]
    command += ["--steps", str(run.num_steps), "--checkpoint-steps", str(run.checkpoint_steps)]
    package = Path(__file__).resolve().parents[2]
    search = os.pathsep.join(filter(None, [str(package), os.environ.get("PYTHONPATH")]))
    with (
        open(_log_of(run), "w") as log,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **ONE_THREAD, "PYTHONPATH": search},
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def _log_of(run: _Run) -> Path:
    return run.folder / "stderr.txt"


def _reports(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.endswith("\n"):  # a killed process may leave half a line
            yield json.loads(line)


class _LiveLine:
    """A line that is rewritten in place on a terminal; elsewhere a plain line every two seconds."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._live = stream, stream.isatty()
        self._shown_at, self._shown = 0.0, ""

    def __enter__(self) -> _LiveLine:
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


# 4. Back to the files


def _trace_a_step(store: Path, whole: _Run, state: dict[str, Any]) -> int:
    """Show the files of the step with the largest loss, and the steps of one of those files. Returns that step."""
    library = sysconfig.get_path("stdlib")
    warm = {step: float.fromhex(loss) for step, loss in whole.losses.items() if step >= whole.num_steps // 4}
    step = max(warm, key=lambda s: warm[s])
    _head(4, f"What was in step {step}? After warm-up its loss was the largest: {warm[step]:.3f}")
    records = list(ps.trace(store, state, step=step))
    names = [os.path.relpath(record.file, library) for record in records]
    name_width = max(map(len, names))
    for name, record in zip(names, records, strict=True):
        lines = f"lines {record.lines[0]}-{record.lines[1]}" if record.lines else ""
        head = f"row {record.row_in_batch}  {name:<{name_width}}  {lines:<15}  "
        _say(head + _snippet(record.text or "", COLUMNS - len(head)))
    file = records[0].file
    uses = ps.find(store, state, file=file, until=state["position"])
    steps = sorted({record.step for record in uses})
    _say()
    _say(f"And the other way: {names[0]} was used in {len(steps)} of the {whole.num_steps} steps:")
    _say(textwrap.shorten(", ".join(map(str, steps)), COLUMNS - 2, placeholder=" ..."))
    return step


def _snippet(text: str, columns: int) -> str:
    """A text in one line of plain characters, the blanks of its lines taken out.

    >>> _snippet("  def f():\\n      return 1", 80)
    'def f(): return 1'
    """
    return " ".join(text.split()).encode("ascii", "replace").decode()[: max(columns, 0)]


# 5. What next


def _what_next(store: Path, step: int, plan: str) -> None:
    """Commands that can be pasted as they are."""
    penstock, store_name = _command(), shlex.quote(str(store))
    _head(5, "Try next")
    for arguments, what in (
        (f"info {store_name}", "what is in the store"),
        (f"look {store_name} {plan[:8]} --step {step}", "a batch, decoded"),
        (f"plan {store_name} --chunk-size 2048", "epochs and tokens of a run, before it costs anything"),
        (f"drill {plan[:8]} --store {store_name}", "200 steps under kill -9, on 1, 3 and 8 ranks"),
    ):
        _say(f"  # {what}")
        _say(f"  {penstock} {arguments}")
    _say("The example at the top of README.md is the same path in 12 lines, for your own files.")
    _say()


def _command() -> str:
    """How to call penstock from this shell: `make demo` installs it where a shell does not look."""
    beside = Path(sys.executable).with_name("penstock")
    if not beside.exists():
        return f"{shlex.quote(_near(Path(sys.executable)))} -m penstock"
    on_path = shutil.which("penstock")
    return "penstock" if on_path and Path(on_path) == beside else shlex.quote(_near(beside))


def _near(path: Path) -> str:
    """A path, relative to here where that is shorter."""
    return min(os.path.relpath(path), str(path), key=len)


def _head(number: int, text: str) -> None:
    _say()
    _say(f"{number}. {text}")


def _say(text: str = "") -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
