"""`batchwright prepare`, `train` and `run`: one config for both sides, real processes and real signals."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from batchwright.cli.run import _launch
from batchwright.queue.consumer import DatasetConsumer
from batchwright.queue.members import Liveness
from harness import SECONDS, is_running, wait_for

CONFIG = "dataset = 'toy'\nbatch_size = 2\nblock_size = 3\nlevel = 1\nbatches_per_file = 2\nlearning_rate = 0.1\n"

PROVIDER = """\
import os
import numpy as np
from batchwright import DataProviderBase

class Toy(DataProviderBase):
    def build_meta(self):
        return {"batch_schema": [{"name": "x", "dtype": "int64", "shape": [self.block_size]}]}

    def sample_batch(self, split, rng):
        ...  # what a test adds
        return {"x": np.full((self.batch_size, self.block_size), level)}
"""

TRAINER = """\
import os, sys, time
with open("trainer.tmp", "w") as file:
    file.write(f"{os.getpid()} {' '.join(sys.argv)}")
os.rename("trainer.tmp", "trainer")
"""


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A folder with config.py, train.py and data/toy/prepare_streaming.py; it is the current one."""
    (tmp_path / "data/toy").mkdir(parents=True)
    (tmp_path / "config.py").write_text(CONFIG)
    (tmp_path / "data/toy/prepare_streaming.py").write_text(PROVIDER)
    (tmp_path / "train.py").write_text(TRAINER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(os, "execv", became_a_trainer)
    return tmp_path


def became_a_trainer(*arguments: Any) -> None:
    raise AssertionError(f"this process would now be {arguments}")


def let_batches(project: Path, statement: str) -> None:
    """Let `sample_batch` do something first."""
    file = project / "data/toy/prepare_streaming.py"
    file.write_text(PROVIDER.replace("...  # what a test adds", statement))


@pytest.fixture
def started(project, environment) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """started("run config.py"): the command line in a process group of its own, as a shell would start it."""
    running: list[subprocess.Popen[str]] = []

    def started(line: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "batchwright", *shlex.split(line)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        running.append(process)
        return process

    yield started
    for process in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def providers_of(project: Path) -> list[int]:
    return [facts.pid for facts, _ in Liveness(project / "data/toy/queue/who").members("provider")]


# prepare


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_prepare_makes_files_until_a_signal_and_says_how_many(number, project, started):
    process = started("prepare config.py")
    wait_for("two files of each split", lambda: len(list((project / "data/toy/queue").glob("*/*.batches"))) == 4)
    process.send_signal(number)
    out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, out) == (0, "data/toy/queue: 4 files made\n")
    assert err == "data/toy/queue: Toy makes batches until Ctrl-C\n"


def test_prepare_takes_settings_from_the_command_line(project, succeeds):
    let_batches(project, "print(self.level, level, self.config['level'], self.batch_size); self.stop()")
    assert succeeds("prepare config.py --level=7 --batch_size=5").out.splitlines()[0] == "7 7 7 5"


def test_prepare_finds_modules_of_the_current_folder(project, succeeds):
    (project / "toy_numbers.py").write_text("level = 12")
    (project / "config.py").write_text(CONFIG + "from toy_numbers import level\n")
    let_batches(project, "print(level); self.stop()")
    assert succeeds("prepare config.py").out.startswith("12\n")


def test_prepare_refuses_a_queue_that_was_made_by_something_else(project, succeeds, batchwright):
    let_batches(project, "if split == 'val': self.stop()")
    succeeds("prepare config.py")
    take(1)
    before = {path: path.stat().st_mtime_ns for path in project.rglob("queue/**/*") if path.is_file()}
    done = batchwright("prepare config.py --level=2")
    assert done.code == 2
    text = done.err
    assert "config level was 1, and is 2" in text
    assert "batchwright queue purge data/toy" in text
    assert {path: path.stat().st_mtime_ns for path in before} == before


def take(num_batches: int) -> list[int]:
    """The first number of each batch that the trainer is handed."""
    with DatasetConsumer("data/toy", framework="numpy", timeout_seconds=SECONDS) as consumer:
        return [int(consumer.get_batch("train")["x"][0, 0]) for _ in range(num_batches)]


@pytest.mark.parametrize("num_read", [0, 2])
def test_a_mended_provider_goes_on_with_the_file_that_failed(num_read, project, batchwright, succeeds):
    let_batches(project, "self.n = getattr(self, 'n', 0) + 1; 1 / (self.n != 7)")
    assert "train file 1" in batchwright("prepare config.py").err
    take(num_read)
    let_batches(project, "if split == 'val': self.stop()")
    mended = ["prepare", "config.py", "--level=2"]
    if num_read:
        assert "--accept-change" in batchwright(*mended).err
        mended.append("--accept-change")
    succeeds(*mended)
    assert set(take(2)) == {2}


def test_run_lets_its_providers_accept_a_change(project, succeeds, started):
    let_batches(project, "if split == 'val': self.stop()")
    succeeds("prepare config.py")
    take(1)
    (project / "train.py").write_text(
        "import batchwright as bw\n"
        "with bw.DatasetConsumer('data/toy', framework='numpy') as consumer:\n"
        "    print([int(consumer.get_batch('train')['x'][0, 0]) for _ in range(4)][-1])\n"
    )
    let_batches(project, "")
    process = started("run config.py --providers 2 --level=2 --accept-change")
    out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, out) == (0, "2\n"), err


def test_prepare_goes_on_after_a_change_that_makes_no_other_data(project, succeeds):
    let_batches(project, "if split == 'val': self.stop()")
    succeeds("prepare config.py")
    file = project / "data/toy/prepare_streaming.py"
    file.write_text(file.read_text().replace("class Toy", "# A toy.\nclass Toy"))
    succeeds("prepare config.py --learning_rate=0.5")


def test_prepare_shows_where_the_users_own_code_failed(project, batchwright):
    let_batches(project, "{}['nothing']")
    done = batchwright("prepare config.py")
    assert done.code == 2
    assert "batchwright: sample_batch failed making train file 0: KeyError: 'nothing'" in done.err
    assert "line 10, in sample_batch\n" in done.err
    assert "{}['nothing']" in done.err


@pytest.mark.parametrize(
    ("arguments", "said", "remedy"),
    [
        (["prepare", "no.py"], "no.py", "config.py"),
        (["prepare", "config.py", "--lvel=2"], "no config file sets lvel", "--level=2"),
        (["prepare", "config.py", "--level", "2"], "--level: is not of the form --name=value", "--batch_size=64"),
        (["prepare", "config.py", "other.py"], "is not of the form --name=value", "--batch_size=64"),
        (["train", "config.py"], "Queue directory not found: data/toy/queue", "batchwright prepare config.py"),
        (["train", "config.py", "--batch_size=0"], "batch_size must be at least 1", "--batch_size=1"),
        (["run", "config.py", "--providers", "0"], "--providers: '0' is less than 1", "batchwright run --help"),
        (["run", "config.py", "--batch_size=0"], "batch_size must be at least 1", "--batch_size=1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_work_is_refused_before_anything_starts(arguments, said, remedy, project, refuses):
    text = refuses(*arguments)
    assert said in text
    assert remedy in text
    assert not (project / "data/toy/queue").exists()
    assert not (project / "trainer").exists()


@pytest.mark.parametrize("verb", ["train", "run"])
def test_a_folder_without_a_trainer_says_what_is_there(verb, project, refuses):
    (project / "train.py").rename(project / "fit.py")
    text = refuses(verb, "config.py")
    assert "there is no train.py in this folder" in text
    assert "config.py, fit.py" in text
    assert "trainer = '...'" in text


def test_ctrl_c_while_modules_are_imported_is_no_fault_of_batchwright(project, started):
    """NumPy turns a KeyboardInterrupt in the middle of its import into an ImportError."""
    (project / "numpy.py").write_text(
        "import signal\ntry:\n    signal.raise_signal(2)\nexcept KeyboardInterrupt:\n    raise ImportError from None\n"
    )
    process = started("prepare config.py")
    assert process.communicate(timeout=SECONDS) == ("", "")
    assert process.returncode == -signal.SIGINT


# train


def test_train_shows_commands_that_a_shell_understands(project, refuses):
    (project / "config.py").rename("my config.py")
    text = refuses("train 'my config.py'")
    assert (
        "batchwright prepare 'my config.py', in another terminal; or both at once: batchwright run 'my config.py'"
        in text
    )


def test_train_says_so_where_a_file_is_in_the_place_of_the_queue(project, refuses):
    (project / "data/toy/queue").touch()
    assert "data/toy/queue is not a folder" in refuses("train config.py")


def test_train_becomes_the_trainer_with_its_arguments_and_exit_code(project, started):
    (project / "data/toy/queue").mkdir()
    (project / "fit.py").write_text(TRAINER + "sys.exit(7)")
    (project / "config.py").write_text(CONFIG + "trainer = 'fit.py'\n")
    process = started("train config.py --level=3")
    assert process.wait(timeout=SECONDS) == 7
    assert (project / "trainer").read_text() == f"{process.pid} fit.py config.py --level=3"


# run


def test_run_gives_the_trainers_exit_code_and_leaves_no_provider(project, started):
    (project / "train.py").write_text(
        TRAINER + "print('learned from', open('data/toy/queue/meta.json').read()[:1]); sys.exit(5)"
    )
    process = started("run config.py --providers 2 --level=4")
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 5
    assert out == "learned from {\n"
    assert (project / "trainer").read_text().endswith(" train.py config.py --level=4")
    assert providers_of(project) == []
    made = re.findall(r"provider [12] \| data/toy/queue: (\d+) files? made", err)
    assert sum(map(int, made)) > 0  # one of them may have been stopped before it began
    assert "batchwright: " not in err


@pytest.mark.parametrize("how", ["kill -9", "Ctrl-C", pytest.param("SIGTERM", marks=pytest.mark.slow)])
def test_however_run_is_ended_it_leaves_no_process(how, project, started):
    (project / "train.py").write_text(TRAINER + "time.sleep(600)")
    process = started("run config.py --providers 2")
    wait_for("the trainer", (project / "trainer").exists)
    wait_for("both providers", lambda: len(providers_of(project)) == 2)
    pids = [int((project / "trainer").read_text().split()[0]), *providers_of(project)]
    assert all(map(is_running, pids))
    if how == "Ctrl-C":
        os.killpg(process.pid, signal.SIGINT)  # a terminal signals all of the group that it runs
    else:
        process.send_signal(signal.SIGKILL if how == "kill -9" else signal.SIGTERM)
    process.communicate(timeout=SECONDS)
    wait_for("their end", lambda: not any(map(is_running, pids)))
    assert process.returncode == {"kill -9": -9, "Ctrl-C": 130, "SIGTERM": 143}[how]


def test_a_provider_that_cannot_begin_ends_run_with_its_message(project, started):
    (project / "data/toy/prepare_streaming.py").write_text(PROVIDER.replace("return {", "1 / 0; return {", 1))
    process = started("run config.py")
    out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, out) == (2, "")
    assert "provider 1 | batchwright: build_meta failed: ZeroDivisionError" in err
    assert "1 / 0; return {" in err
    assert re.search(r"batchwright: provider 1 \(pid \d+\) ended: exit code 2; 0 of 1 left\n$", err)
    assert not (project / "trainer").exists()


def test_providers_go_on_where_nobody_reads_what_they_say(project, started):
    let_batches(project, "print('x' * 200_000)")  # more than a pipe holds
    (project / "train.py").write_text(
        "import os, time\nwhile not os.path.exists('data/toy/queue/train/00000001.batches'): time.sleep(.01)"
    )
    process = started("run config.py")
    assert process.stderr is not None
    process.stderr.close()
    process.stderr = None
    assert process.wait(timeout=SECONDS) == 0


def test_ctrl_c_before_the_trainer_runs_shows_no_traceback(environment):
    python, option, code = _launch("_as_trainer", "train.py", [])
    before_it_imports, _, _ = code.partition("import batchwright")
    interrupted = before_it_imports + "import signal; signal.raise_signal(signal.SIGINT)"
    done = subprocess.run([python, option, interrupted], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


@pytest.mark.slow
def test_when_a_provider_dies_the_others_go_on(project, started):
    let_batches(
        project,
        "if os.path.exists('trainer') and not os.path.exists('killed'): os.mkdir('killed'); os.kill(os.getpid(), 9)",
    )
    (project / "train.py").write_text(
        TRAINER
        + "import glob\n"
        + "for file in glob.glob('data/toy/queue/*/*.batches'): os.unlink(file)\n"  # demand
        + "while not os.path.exists('killed'): time.sleep(.01)\n"
        + "for file in glob.glob('data/toy/queue/*/*.batches'): os.unlink(file)\n"
        + "while not glob.glob('data/toy/queue/train/*.batches'): time.sleep(.01)\n"
    )
    process = started("run config.py --providers 2")
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    assert re.search(r"batchwright: provider [12] \(pid \d+\) ended: killed by SIGKILL; 1 of 2 left\n", err)
