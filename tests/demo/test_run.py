"""`batchwright demo` keeps what it promises, says so, and notices when it does not."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from batchwright.base.errors import WorkerError
from batchwright.base.files import is_in_use
from batchwright.demo import harness, run, train
from batchwright.demo.harness import NotAsExpected
from batchwright.demo.model import CHECKPOINT, read_checkpoint, write_checkpoint
from refusals import refused

STEPS = 60
COMMAND = [sys.executable, "-c", "import sys; from batchwright.demo.run import main; sys.exit(main())"]


@pytest.fixture(scope="module")
def demo(run_demo):
    """One whole run of the demo in an empty folder: (what it printed, the folder)."""
    return run_demo(f"demo --steps {STEPS}")


def test_the_bake_report_is_shown(demo):
    assert re.search(r"corpus\.store: [\d,]{3,} documents, [\d,]{9,} tokens", demo[0])


def test_the_live_line_says_step_loss_speed_and_wait(demo):
    assert re.search(r"^step +\d+/59 +loss \d\.\d{3} +[\d,]+ tokens/s +data wait [\d.]+ %$", demo[0], re.MULTILINE)


def test_the_loss_falls(demo):
    found = re.search(r"^Done: loss ([\d.]+) -> ([\d.]+) in", demo[0], re.MULTILINE)
    first, last = map(float, found.groups())
    assert first == pytest.approx(5.55, abs=0.1)
    assert last < 3.5


def test_a_process_was_killed_and_another_one_went_on(demo):
    killed, step = map(int, re.search(r"process (\d+) got SIGKILL after step (\d+)", demo[0]).groups())
    other, resumed = map(int, re.search(r"Process (\d+), .*, went on from step (\d+)", demo[0]).groups())
    assert killed != other
    assert STEPS // 3 <= step < 2 * STEPS // 3
    assert 0 < resumed <= step  # so that work was lost, and done again


def test_every_loss_was_compared_and_is_equal(demo):
    step = int(re.search(r"got SIGKILL after step (\d+)", demo[0])[1])
    resumed = int(re.search(r"went on from step (\d+)", demo[0])[1])
    text = "The {} run's losses, steps {} to {}, equal the uninterrupted run's bit for bit: {n} of {n}."
    assert text.format("killed", 0, step, n=step + 1) in demo[0]
    assert text.format("resumed", resumed, STEPS - 1, n=STEPS - resumed) in demo[0]
    assert "So do the weights" in demo[0]


def test_one_step_is_traced_to_files_and_lines_and_one_file_back_to_steps(demo):
    step = re.search(r"What was in step (\d+)\?", demo[0])[1]
    rows = re.findall(r"^row (\d)  (\S+\.py) +lines \d+-\d+ +\S", demo[0], re.MULTILINE)
    assert sorted({int(row) for row, _ in rows}) == list(range(8))
    file, count, steps = re.search(r"the other way: (\S+) was used in (\d+) of the 60 steps:\n(.*)", demo[0]).groups()
    assert file == rows[0][1]
    assert step in steps.split(", ") or steps.endswith("...")
    assert int(count) >= 1


def test_the_output_is_clean_and_fits_100_columns(demo):
    told, commands = demo[0].split("5. Try next")  # commands hold the path of this Python, which may be long
    assert [line for line in told.splitlines() if len(line) > 100] == []
    assert "Traceback" not in told + commands


@pytest.mark.parametrize("verb", ["info", "look", "plan", "drill"])
def test_the_commands_to_try_next_work_as_printed(demo, verb):
    (command,) = re.findall(rf"^  (\S*batchwright {verb} .*|\S+ -m batchwright {verb} .*)$", demo[0], re.MULTILINE)
    fewer = " --steps 12 --ranks 1,2 --workers 0" if verb == "drill" else ""
    done = subprocess.run(command + fewer, shell=True, cwd=demo[1].parent, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_run_again_it_bakes_nothing_and_finds_a_wrong_resume(demo, capsys, monkeypatch):
    resume = run._resume

    def resume_one_step_off(killed):
        """As if the loader's place were not kept exactly: the data is one step ahead of the model."""
        path = killed.folder / CHECKPOINT
        checkpoint = read_checkpoint(path)
        checkpoint.loader["position"] += 8
        write_checkpoint(path, checkpoint)
        return resume(killed)

    monkeypatch.setattr(run, "_resume", resume_one_step_off)
    monkeypatch.setattr(run, "_random_kill", lambda *_: 33)
    assert run.main(["--folder", str(demo[1]), "--steps", str(STEPS)]) == 1
    printed = capsys.readouterr().out
    assert "corpus.store: up to date" in printed
    assert "The killed run's losses, steps 0 to 33, equal" in printed
    said = " ".join(printed.split())
    assert re.search(r"NOT AS EXPECTED: the resumed run's loss at step 30 is 0x\S+, the uninterrupted run's 0x", said)


def test_a_resumed_run_that_stops_short_is_not_equal():
    with pytest.raises(NotAsExpected, match="the resumed run never came to step 3"):
        train.expect_equal("resumed run", {2: "c"}, "whole run", {2: "c", 3: "d"}, range(2, 4))


def test_other_weights_at_the_end_are_noticed():
    one, other = (train.TrainingRun(Path(), Path(), 4, 2, weights=weights) for weights in ("w", "v"))
    with pytest.raises(NotAsExpected, match="weights"):
        train.expect_equal_weights(one, other, "other run")


def test_a_kill_that_did_not_happen_is_an_error(demo, tmp_path, monkeypatch):
    monkeypatch.setattr(harness.os, "kill", lambda *_: None)
    unharmed = train.TrainingRun(demo[1] / "corpus.store", tmp_path, 24, 2)
    with refused(WorkerError, exit_code=0):
        unharmed.watch(kill_after=5)


def test_a_training_process_that_fails_is_reported_with_what_it_said(tmp_path):
    with refused(WorkerError, exit_code=1) as caught:
        train.TrainingRun(tmp_path / "no.store", tmp_path / "run", 24, 2).watch()
    assert "no.store" in str(caught.value.where["output"])


def test_ctrl_c_ends_the_demo_and_its_process_without_a_traceback(tmp_path):
    with subprocess.Popen(
        [*COMMAND, "--folder", "mine"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        for line in process.stdout:
            if line.startswith("step"):
                break
        (manifest,) = (tmp_path / "mine" / "corpus.store").glob("versions/*/manifest.json")
        assert is_in_use(manifest)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the demo and to the process that trains
        printed = process.stdout.read()
        assert process.wait(timeout=240) == 130
    assert "Stopped. No process is left running" in printed
    assert "Traceback" not in printed
    assert not is_in_use(manifest)


def test_a_folder_that_is_not_a_demos_is_left_alone(tmp_path, capsys):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine.txt").write_text("precious")
    assert run.main(["--folder", str(tmp_path)]) == 2
    assert "is not a demo's folder" in capsys.readouterr().err
    assert [str(p.relative_to(tmp_path)) for p in sorted(tmp_path.rglob("*"))] == ["runs", "runs/mine.txt"]


def test_too_few_steps_are_refused_before_anything_is_written(tmp_path, capsys):
    assert run.main(["--folder", str(tmp_path / "new"), "--steps", "3"]) == 2
    assert "--steps 24" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_random_kill_lies_past_a_checkpoint_in_the_middle_third():
    drawn = {run._random_kill(800, 66) for _ in range(300)}
    assert len(drawn) > 50
    assert all(266 <= step < 533 and (step + 1) % 66 >= 33 for step in drawn)
