"""`batchwright demo queue`: providers and a trainer are killed, a file is damaged, and no batch is lost or changed.

All of them are processes of their own. The batches of the trainer are compared, one by one, with those of an
undisturbed run in this process.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import os
import signal
import subprocess
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

import batchwright as bw
from batchwright.base.errors import NotReadyError, WorkerError
from batchwright.demo.harness import Demo, Report, expect, follow, head, near, process, report, reported, say, show_verb
from batchwright.demo.model import CHECKPOINT, digest_of, loss_and_gradients, new_weights, resumed, write_checkpoint
from batchwright.queue.provider_file import open_provider

NUM_STEPS = 400
BATCHES_PER_FILE = 40
CHECKPOINT_STEPS = 60
KILL_PROVIDER_STEP = 50
KILL_TRAINER_STEP = 150
"""From here on, but early in a file: the trainer may be some steps ahead of what was read of it."""
PATIENCE_SECONDS = 60.0
MIDDLE = range(BATCHES_PER_FILE // 4, BATCHES_PER_FILE // 2)

CONFIG = f"""\
dataset = "code"
batch_size = 8
block_size = 64
batches_per_file = {BATCHES_PER_FILE}
seconds_per_batch = 0.01
learning_rate = 0.005
"""

PROVIDER = """\
import time
import numpy as np
import batchwright as bw

class CodeProvider(bw.DataProviderBase):
    def build_meta(self):
        fields = [{"name": name, "dtype": "int64", "shape": [self.block_size]} for name in "xy"]
        return {"vocab_size": 256, "batch_schema": fields}

    def sample_batch(self, split, rng):
        time.sleep(self.seconds_per_batch)  # stands for what takes time
        text = np.frombuffer(self.input_files()[0].read_bytes(), np.uint8)
        first = rng.integers(0, len(text) - self.block_size, size=(self.batch_size, 1))
        rows = text[first + np.arange(self.block_size + 1)].astype(np.int64)
        return {"x": rows[:, :-1], "y": rows[:, 1:]}
"""


def _tell(folder: Path) -> None:
    run = _Run(folder / "runs", _write_project(folder / "runs"))
    _show_project(run)
    with run.provider(1) as first, run.provider(2) as second:
        _train_and_kill(run, first, second)
        with run.provider(3) as third:
            _damage_and_go_on(run, [second, third])
            _expect_undisturbed_batches(run)
            head(5, "The queue")
            show_verb("queue", "status", run.dataset)
            _stop([second, third])


main = Demo(
    name="queue",
    title="batches are made by some processes while another one trains on them.",
    description="Two providers make batches while a small model trains on them. A provider is killed, the trainer is "
    "killed, a file is damaged; the run goes on with the batches of an undisturbed one.",
    tell=_tell,
).main


@dataclass(slots=True)
class _Run:
    """One training run as seen from outside: its project, and the reports of its trainers."""

    folder: Path
    config: Path
    reports: dict[int, list[Report]] = field(default_factory=dict)
    """By step. A step that was done again after a kill has two."""
    last: Report = field(default_factory=dict)
    end: Report = field(default_factory=dict)
    """The weights and the consumer's counts, once it is through."""

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def dataset(self) -> Path:
        return self.data / "code"

    @property
    def ready(self) -> list[Path]:
        """Files that wait, in the order of their numbers."""
        return sorted((self.dataset / "queue" / "train").glob("*.batches"))

    def provider(self, number: int) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
        return process(provide, log=self.folder / f"provider-{number}.txt", config=self.config, data=self.data)

    def watch(self, *, kill_when: Callable[[Report], bool] = lambda _: False) -> int:
        """Start a trainer and follow it, and kill it once `kill_when` says so. Returns its process id."""

        def take(report: Report) -> bool:
            if "step" not in report:
                self.end = report
                return False
            self.last = report
            self.reports.setdefault(report["step"], []).append(report)
            return kill_when(report)

        log = self.folder / "trainer.txt"
        return follow(train, take, log=log, config=self.config, data=self.data, folder=self.folder)

    def mean_loss(self, steps: range) -> float:
        return sum(float.fromhex(self.reports[step][-1]["loss"]) for step in steps) / len(steps)


# 1. The project


def _show_project(run: _Run) -> None:
    head(1, "A project: a config that provider and trainer share, and what a batch is")
    for name, text in (("config/train_code.py", CONFIG), ("data/code/prepare_streaming.py", PROVIDER)):
        say(f"  {near(run.folder / name)}")
        say(textwrap.indent(text.rstrip(), "    "))
        say()
    say("Two processes run `batchwright prepare config/train_code.py`. They share the work by taking numbers.")


# 2. Kill a provider, and the trainer


def _train_and_kill(run: _Run, first: subprocess.Popen[str], second: subprocess.Popen[str]) -> None:
    head(2, "kill -9: a provider in the middle of a file that it makes, the trainer of one that it reads")
    _wait((run.dataset / "queue" / "meta.json").exists, [first, second], "the queue", run)
    lost: list[int] = []

    def is_time(report: Report) -> bool:
        if not lost and report["step"] >= KILL_PROVIDER_STEP:
            lost.extend(_killed_in_mid_file(run, first))
        is_past = bool(lost) and report["file"] > lost[0]
        return is_past and report["step"] >= KILL_TRAINER_STEP and report["batch"] in MIDDLE

    pid = run.watch(kill_when=is_time)
    say(f"  Provider {first.pid} got SIGKILL while it made train file {lost[0]}. The other one made that file, too.")
    say(
        f"  Trainer {pid} got SIGKILL after step {run.last['step']}, with {run.last['batch']} of "
        f"{BATCHES_PER_FILE} batches of train file {run.last['file']}."
    )


def _killed_in_mid_file(run: _Run, provider: subprocess.Popen[str]) -> list[int]:
    """The number of the file that a provider makes, and it is killed; or nothing: it makes none just now."""
    os.kill(provider.pid, signal.SIGSTOP)  # so that it does not end the file while we look
    parts = list((run.dataset / "queue" / "train").glob(f".*.provider-{provider.pid}-*.part"))
    if not parts:
        os.kill(provider.pid, signal.SIGCONT)
        return []
    os.kill(provider.pid, signal.SIGKILL)
    provider.wait()
    return [int(parts[0].name.split(".")[1])]


def _wait(is_there: Callable[[], bool], providers: list[subprocess.Popen[str]], what: str, run: _Run) -> None:
    """Until something is there that providers make."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_there():
        if all(provider.poll() is not None for provider in providers):
            said = "\n".join(log.read_text().strip() for log in sorted(run.folder.glob("provider-*.txt")))
            raise WorkerError("the providers ended too early", output=said[-2000:], remedy="run the demo again")
        if time.monotonic() > deadline:
            raise NotReadyError(f"{what} did not come in {PATIENCE_SECONDS:.0f} s", remedy="run the demo again")
        time.sleep(0.02)


# 3. Damage a file, and go on


def _damage_and_go_on(run: _Run, providers: list[subprocess.Popen[str]]) -> None:
    head(3, "One bit of a file that waits is flipped, and the trainer goes on from its checkpoint")
    _wait(lambda: bool(run.ready), providers, "a file that waits", run)
    damaged = run.ready[0]
    _flip_a_bit(damaged)
    pid = run.watch()
    again = sum(len(reports) > 1 for reports in run.reports.values())
    say(f"  Trainer {pid} went on from its checkpoint: {again} steps again, then on to step {NUM_STEPS - 1}.")
    first, last = run.mean_loss(range(20)), run.mean_loss(range(NUM_STEPS - 20, NUM_STEPS))
    say(f"  Loss {first:.2f} in the first 20 steps, {last:.2f} in the last 20.")
    _expect_quarantine(run, damaged.name)


def _flip_a_bit(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def _expect_quarantine(run: _Run, name: str) -> None:
    """The damaged file, and nothing else, is in quarantine, with a report."""
    there = sorted((run.dataset / "queue" / "quarantine").glob("*.json"))
    count = run.end["stats"]["quarantined_files"]
    names = [path.name for path in there]
    is_alone = len(there) == count == 1 and names[0].startswith(f"train-{name.removesuffix('.batches')}.")
    expect(is_alone, f"in quarantine {names}, counted {count}; damaged was {name}")
    reason = json.loads(there[0].read_bytes())["reason"]
    say(f"  {near(run.dataset)}/queue/train/{name} was put aside ({reason}) and made again.")


# 4. Beside an undisturbed run


def _expect_undisturbed_batches(run: _Run) -> None:
    head(4, "The same run in this process, where nobody is killed and there are no files")
    say("  DatasetConsumer(provider=CodeProvider(...)) makes batches when they are asked for.")
    expected, weights = _undisturbed(run)
    for step in range(NUM_STEPS):
        expect(step in run.reports, f"the trainer got no batch for step {step}")
        for seen in run.reports[step]:
            same = all(seen[key] == expected[step][key] for key in ("digest", "loss"))
            expect(same, f"step {step} was {seen}, and {expected[step]} undisturbed")
    expect(weights == run.end["weights"], f"the weights are {run.end['weights']}, and {weights} undisturbed")
    again = sum(map(len, run.reports.values())) - NUM_STEPS
    say(f"  All {NUM_STEPS} batches are the same, byte for byte; {again} that came again after the kill, too.")
    say("  So are the losses, and the weights at the end, in every bit.")


def _undisturbed(run: _Run) -> tuple[dict[int, Report], str]:
    """The reports and the final weights of the same run without disturbance."""
    config: Any = bw.load_config(run.config, ["--seconds_per_batch=0"], data=run.data)
    folder = run.folder / "undisturbed"
    folder.mkdir()
    with bw.DatasetConsumer(provider=open_provider(config), framework="numpy") as consumer:
        *steps, end = reported(_train_on, consumer, folder, learning_rate=config.learning_rate)
    return {seen["step"]: seen for seen in steps}, end["weights"]


# 5. The end


def _stop(providers: list[subprocess.Popen[str]]) -> None:
    for provider in providers:
        provider.terminate()
    codes = [provider.wait(PATIENCE_SECONDS) for provider in providers]
    expect(not any(codes), f"providers that got SIGTERM ended with {codes}")
    say()
    say("Both providers got SIGTERM, and ended with exit code 0.")


# The processes, and their project


def _write_project(folder: Path) -> Path:
    """A config, a provider, and a text that every machine has. Returns the config's path."""
    files = {
        "config/train_code.py": CONFIG,
        "data/code/prepare_streaming.py": PROVIDER,
        "data/code/input.py": inspect.getsource(argparse) + inspect.getsource(textwrap),
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "config" / "train_code.py"


def provide(config: str, data: str) -> None:
    """Make batches, as `batchwright prepare` does, until SIGTERM."""
    open_provider(bw.load_config(config, data=data)).run()


def train(config: str, data: str, folder: str) -> None:
    """Train on the queue. The checkpoint is in `folder`."""
    shared: Any = bw.load_config(config, data=data)
    with bw.DatasetConsumer(shared.data_dir, shared.batch_size, shared.block_size, framework="numpy") as consumer:
        _train_on(consumer, Path(folder), learning_rate=shared.learning_rate)


def _train_on(consumer: bw.DatasetConsumer, folder: Path, *, learning_rate: float) -> None:
    """Train from the checkpoint in `folder`, or from nothing. Report the batch and the loss of each step."""
    path = folder / CHECKPOINT
    run = resumed(path, new_weights(consumer.meta["vocab_size"]))
    if run.loader:
        consumer.load_state_dict(run.loader)
    for step in range(run.adam.num_updates, NUM_STEPS):
        x, y = consumer.get_batch("train")
        loss, gradients = loss_and_gradients(run.weights, x, y)
        run.adam.update(run.weights, gradients, rate=learning_rate)
        run.loader = consumer.state_dict()
        if (step + 1) % CHECKPOINT_STEPS == 0:
            write_checkpoint(path, run)
        digest = xxhash.xxh3_128_hexdigest(x.tobytes() + y.tobytes())
        report(step=step, digest=digest, loss=loss.hex(), **run.loader["train"])  # file and batch: what comes next
    report(weights=digest_of(run.weights), stats=consumer.stats()["train"])
